// Per token: normalise and rotate q and k, store q in place, write k and v to the token's page slot.
// A warp per head, a lane per EACH neighbouring elements and those half a head on. D, HQ, HKV, PAGE, QN, KN (norms
// present), EACH (2 where both types are the same of 16 bits and rows are even, else 1); types XT, KT (pages), QNT,
// KNT (norm weights).
#include "prelude.cuh"

#define ROUNDS ((D / 2 + 32 * EACH - 1) / (32 * EACH))

// EACH neighbours.
template <int T> DEVICE void load(float (&v)[EACH], const void* p, u64 i) {
    if (EACH == 2) {
        const u32 both = *(const u32*)((const u16*)p + i);
        v[0] = low_half<T>(both), v[EACH - 1] = high_half<T>(both);
    } else {
        v[0] = load1<T>(p, i);
    }
}
template <int T> DEVICE void store(const float (&v)[EACH], void* p, u64 i) {
    if (EACH == 2) *(u32*)((u16*)p + i) = pack2<T>(v[0], v[EACH - 1]);
    else store1<T>(p, i, v[0]);
}

template <int NORM, int NT>
DEVICE void rotate(float (&a)[ROUNDS][EACH], float (&b)[ROUNDS][EACH], const void* weight, float eps, const float* table) {
    const u32 lane = threadIdx.x % 32;
    if (NORM) {
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < ROUNDS; c++)
#pragma unroll
            for (int e = 0; e < EACH; e++) sum += a[c][e] * a[c][e] + b[c][e] * b[c][e];
        const float scale = 1.0f / sqrtf(warp_sum(sum) / (float)D + eps);
#pragma unroll
        for (int c = 0; c < ROUNDS; c++)
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const u32 i = (lane + 32 * c) * EACH + e;
                if (i < D / 2) {
                    a[c][e] *= scale * load1<NT>(weight, i);
                    b[c][e] *= scale * load1<NT>(weight, i + D / 2);
                }
            }
    }
#pragma unroll
    for (int c = 0; c < ROUNDS; c++)
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const u32 i = (lane + 32 * c) * EACH + e;
            if (i < D / 2) {
                const float cosine = table[i], sine = table[i + D / 2];
                const float x = a[c][e], y = b[c][e];
                a[c][e] = x * cosine - y * sine;
                b[c][e] = y * cosine + x * sine;
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
        float a[ROUNDS][EACH], b[ROUNDS][EACH];
#pragma unroll
        for (int c = 0; c < ROUNDS; c++) {
            const u32 i = (lane + 32 * c) * EACH;
#pragma unroll
            for (int e = 0; e < EACH; e++) a[c][e] = b[c][e] = 0.0f;
            if (i < D / 2) {
                load<XT>(a[c], qkv, row + h * D + i);
                load<XT>(b[c], qkv, row + h * D + i + D / 2);
            }
        }
        if (h < HQ) rotate<QN, QNT>(a, b, q_norm, q_eps, table);
        else if (h < HQ + HKV) rotate<KN, KNT>(a, b, k_norm, k_eps, table);
        const u32 which = h >= HQ + HKV, head = h < HQ ? 0 : (h - HQ) % HKV;
        const u64 to = (((u64)(slot / PAGE) * 2 + which) * HKV + head) * (PAGE * D) + (slot % PAGE) * D;
#pragma unroll
        for (int c = 0; c < ROUNDS; c++) {
            const u32 i = (lane + 32 * c) * EACH;
            if (i >= D / 2) continue;
            if (h < HQ) {
                store<XT>(a[c], qkv, row + h * D + i);
                store<XT>(b[c], qkv, row + h * D + i + D / 2);
            } else {
                store<KT>(a[c], kv, to + i);
                store<KT>(b[c], kv, to + i + D / 2);
            }
        }
    }
}
