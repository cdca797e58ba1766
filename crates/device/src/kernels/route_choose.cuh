// How experts are chosen from a token's logits.
//
// E, TOP (≤ 32), SCORE 0: softmax of logits with the bias; 1: sigmoid, chosen by score + bias, weighed without it. GROUPS > 1: experts lie in
// groups, of which the KEPT best remain, by the sum of their GROUP_TOP (1, 2) best. Equal scores go to the lower index.
// RENORM: weights of a token sum up to `scale`. BIAS: there is one, of type BT.
#pragma once
#include "prelude.cuh"

#define SLOTS ((E + 31) / 32)

// Larger floats have larger keys; 0 is below all of them.
DEVICE u32 key_of(float v) {
    const u32 b = __float_as_uint(v);
    return b ^ (b >> 31 ? 0xffffffffu : 0x80000000u);
}

// A logit from the sum of its products.
DEVICE float logit_of(float sum, const void* bias, u32 e) { return SCORE == 0 && BIAS ? sum + load1<BT>(bias, e) : sum; }

DEVICE float score_of(float logit, const void* bias, u32 e) {
    return SCORE == 1 ? 1.0f / (1.0f + expf(-logit)) + (BIAS ? load1<BT>(bias, e) : 0.0f) : logit;
}

// A bit for each group that remains.
DEVICE u32 groups_of(const float* logits, const void* bias) {
    const u32 lane = threadIdx.x % 32, size = E / GROUPS;
    float best = -INFINITY, second = -INFINITY;
    if (lane < GROUPS)
        for (u32 i = 0; i < size; i++) {
            const float s = score_of(logits[lane * size + i], bias, lane * size + i);
            if (s > best) second = best, best = s;
            else if (s > second) second = s;
        }
    const float mine = GROUP_TOP == 2 ? best + second : best;
    u32 above = 0;
    for (u32 g = 0; g < GROUPS; g++) {
        const float other = __shfl_sync(FULL, mine, g);
        above += other > mine || (other == mine && g < lane);
    }
    return __ballot_sync(FULL, lane < GROUPS && above < KEPT);
}

// One warp chooses for one token: lane p has the p-th expert and its weight.
DEVICE void choose(const float* logits, const void* bias, float scale, u32& mine, float& weight) {
    const u32 lane = threadIdx.x % 32;
    const u32 kept = GROUPS > 1 ? groups_of(logits, bias) : FULL;
    u32 keys[SLOTS];
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
        const u32 e = i * 32 + lane;
        const bool there = E % 32 == 0 || e < E;
        const float logit = there ? logits[e] : -INFINITY;
        most = fmaxf(most, logit);
        keys[i] = !there ? 0 : GROUPS == 1 || kept >> e / (E / GROUPS) & 1 ? max(1u, key_of(score_of(logit, bias, e))) : 0;
    }
    mine = 0;
#pragma unroll
    for (int p = 0; p < TOP; p++) {
        u32 best = keys[0];
#pragma unroll
        for (int i = 1; i < SLOTS; i++) best = max(best, keys[i]);
        best = __reduce_max_sync(FULL, best);
        u32 at = E - 1;
#pragma unroll
        for (int i = SLOTS - 1; i >= 0; i--)
            if (keys[i] == best) at = i * 32 + lane;
        at = __reduce_min_sync(FULL, at);
#pragma unroll
        for (int i = 0; i < SLOTS; i++)
            if (at == i * 32 + lane) keys[i] = 0;
        if (lane == p) mine = at;
    }
    float sum = 0.0f;
    weight = 0.0f;
    if (SCORE == 0) {
        most = warp_max(most);
        if (!RENORM)
#pragma unroll
            for (int i = 0; i < SLOTS; i++)
                if (E % 32 == 0 || i * 32 + lane < E) sum += expf(logits[i * 32 + lane] - most);
        if (lane < TOP) weight = expf(logits[mine] - most);
    } else if (lane < TOP)
        weight = 1.0f / (1.0f + expf(-logits[mine]));
    if (RENORM) sum = SCORE == 0 ? weight : weight + (lane == 0 ? 1e-20f : 0.0f);
    sum = warp_sum(sum);
    weight = (SCORE == 0 || RENORM ? weight / sum : weight) * scale;
}
