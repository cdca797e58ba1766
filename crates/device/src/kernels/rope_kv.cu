// Per token: normalise and rotate q and k, store q in place, write k and v to the token's page slot.
// A warp per head. D, HQ, HKV, PAGE, QN, KN (norms present); types XT, KT (pages), QNT, KNT (norm weights).
#include "prelude.cuh"

template <int NORM, int NT>
DEVICE void rotate(float (&a)[D / 64 + 1], float (&b)[D / 64 + 1], const void* weight, float eps, const float* table) {
    const u32 lane = threadIdx.x % 32;
    if (NORM) {
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c <= D / 64; c++) sum += a[c] * a[c] + b[c] * b[c];
        const float scale = 1.0f / sqrtf(warp_sum(sum) / (float)D + eps);
#pragma unroll
        for (int c = 0; c <= D / 64; c++) {
            const u32 i = lane + 32 * c;
            if (i < D / 2) {
                a[c] *= scale * load1<NT>(weight, i);
                b[c] *= scale * load1<NT>(weight, i + D / 2);
            }
        }
    }
#pragma unroll
    for (int c = 0; c <= D / 64; c++) {
        const u32 i = lane + 32 * c;
        if (i < D / 2) {
            const float cosine = table[i], sine = table[i + D / 2];
            const float x = a[c], y = b[c];
            a[c] = x * cosine - y * sine;
            b[c] = y * cosine + x * sine;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
rope_kv(void* qkv, const void* q_norm, const void* k_norm, const float* rope, const u32* position,
        const u32* kv_slot, void* kv, u32 stride, u32 rope_stride, u32 max_position, float q_eps, float k_eps) {
    let_successor_start();
    wait_for_predecessor();
    const u32 t = blockIdx.x, lane = threadIdx.x % 32;
    const u32 at = position[t] < max_position ? position[t] : max_position - 1;
    const float* table = rope + (u64)at * rope_stride;
    const u32 slot = kv_slot[t];
    const u64 row = (u64)t * stride;
    for (u32 h = blockIdx.y * 8 + threadIdx.x / 32; h < HQ + 2 * HKV; h += gridDim.y * 8) {
        float a[D / 64 + 1], b[D / 64 + 1];
#pragma unroll
        for (int c = 0; c <= D / 64; c++) {
            const u32 i = lane + 32 * c;
            a[c] = i < D / 2 ? load1<XT>(qkv, row + h * D + i) : 0.0f;
            b[c] = i < D / 2 ? load1<XT>(qkv, row + h * D + i + D / 2) : 0.0f;
        }
        if (h < HQ) rotate<QN, QNT>(a, b, q_norm, q_eps, table);
        else if (h < HQ + HKV) rotate<KN, KNT>(a, b, k_norm, k_eps, table);
        const u32 which = h >= HQ + HKV, head = h < HQ ? 0 : (h - HQ) % HKV;
        const u64 to = (((u64)(slot / PAGE) * 2 + which) * HKV + head) * (PAGE * D) + (slot % PAGE) * D;
#pragma unroll
        for (int c = 0; c <= D / 64; c++) {
            const u32 i = lane + 32 * c;
            if (i >= D / 2) continue;
            if (h < HQ) {
                store1<XT>(qkv, row + h * D + i, a[c]);
                store1<XT>(qkv, row + h * D + i + D / 2, b[c]);
            } else {
                store1<KT>(kv, to + i, a[c]);
                store1<KT>(kv, to + i + D / 2, b[c]);
            }
        }
    }
}
