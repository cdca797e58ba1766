// Per token: normalise and rotate q and k, store q in place, write k and v to the token's page slot. LANES lanes per
// head, each with groups of V neighbours from both halves of it; a thread has ROUNDS heads and loads all of them
// first. D, HQ, HKV, PAGE, V (4, 1), ROUNDS, QN, KN (norms present); types XT, KT (pages; for E4M3 see pages.cuh), QNT,
// KNT (norm weights).
#include "pages.cuh"

#define HEADS (HQ + 2 * HKV)
#define GROUPS (D / 2 / V)
#define LANES (GROUPS <= 8 ? 8 : GROUPS <= 16 ? 16 : 32)
#define EACH ((GROUPS + LANES - 1) / LANES)

template <int T> DEVICE void load(const void* p, u64 i, float (&v)[V]) {
    if (V == 1) {
        v[0] = load1<T>(p, i);
    } else if (T == F32) {
        const float4 a = *(const float4*)((const float*)p + i);
        v[0] = a.x, v[V > 1] = a.y, v[V / 2] = a.z, v[V - 1] = a.w;
    } else {
        const uint2 a = *(const uint2*)((const u16*)p + i);
        v[0] = low_half<T>(a.x), v[V > 1] = high_half<T>(a.x), v[V / 2] = low_half<T>(a.y), v[V - 1] = high_half<T>(a.y);
    }
}
template <int T> DEVICE void store(void* p, u64 i, const float (&v)[V]) {
    if (V == 1) store1<T>(p, i, v[0]);
    else if (T == E4M3) *(u32*)((u8*)p + i) = pack_e4m3(v[0], v[V > 1]) | pack_e4m3(v[V / 2], v[V - 1]) << 16;
    else if (T == F32) *(float4*)((float*)p + i) = make_float4(v[0], v[V > 1], v[V / 2], v[V - 1]);
    else *(uint2*)((u16*)p + i) = make_uint2(pack2<T>(v[0], v[V > 1]), pack2<T>(v[V / 2], v[V - 1]));
}
template <int T> DEVICE void scale_by(float (&v)[V], float scale, const void* weight, u32 i) {
    float w[V];
    load<T>(weight, i, w);
#pragma unroll
    for (int e = 0; e < V; e++) v[e] *= scale * w[e];
}

extern "C" __global__ void __launch_bounds__(256)
rope_kv(void* qkv, const void* q_norm, const void* k_norm, const float* rope, const u32* position,
        const u32* kv_slot, void* kv, u32 stride, u32 rope_stride, u32 max_position, float q_eps, float k_eps
        SCALES_OF_PAGES) {
    let_successor_start();
    wait_for_predecessor();
    const u32 t = blockIdx.x, lane = threadIdx.x % LANES, at_once = 256 / LANES;
    const u32 first = blockIdx.y * at_once + threadIdx.x / LANES, apart = gridDim.y * at_once;
    const u32 at = position[t] < max_position ? position[t] : max_position - 1;
    const u32 slot = kv_slot[t];
    const float* table = rope + (u64)at * rope_stride;
    const u64 row = (u64)t * stride;
    float a[ROUNDS][EACH][V], b[ROUNDS][EACH][V], cosine[EACH][V], sine[EACH][V];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++)
#pragma unroll
        for (int c = 0; c < EACH; c++) {
            const u32 h = first + r * apart, i = (lane + c * LANES) * V;
#pragma unroll
            for (int e = 0; e < V; e++) a[r][c][e] = b[r][c][e] = 0.0f;
            if (h < HEADS && i < D / 2) {
                load<XT>(qkv, row + h * D + i, a[r][c]);
                load<XT>(qkv, row + h * D + i + D / 2, b[r][c]);
            }
        }
#pragma unroll
    for (int c = 0; c < EACH; c++) {
        const u32 i = (lane + c * LANES) * V;
        if (i < D / 2) load<F32>(table, i, cosine[c]), load<F32>(table, i + D / 2, sine[c]);
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const u32 h = first + r * apart;
        const bool query = h < HQ, key = !query && h < HQ + HKV;
        float scale = 1.0f;
        if (QN || KN) {
            float sum = 0.0f;
#pragma unroll
            for (int c = 0; c < EACH; c++)
#pragma unroll
                for (int e = 0; e < V; e++) sum += a[r][c][e] * a[r][c][e] + b[r][c][e] * b[r][c][e];
#pragma unroll
            for (int o = LANES / 2; o; o >>= 1) sum += __shfl_xor_sync(FULL, sum, o);
            scale = 1.0f / sqrtf(sum / (float)D + (query ? q_eps : k_eps));
        }
        const u64 to = (((u64)(slot / PAGE) * 2 + !key) * HKV + (h - HQ) % HKV) * (PAGE * D) + (slot % PAGE) * D;
#pragma unroll
        for (int c = 0; c < EACH; c++) {
            const u32 i = (lane + c * LANES) * V;
            if (h >= HEADS || i >= D / 2) continue;
            if (QN && query) scale_by<QNT>(a[r][c], scale, q_norm, i), scale_by<QNT>(b[r][c], scale, q_norm, i + D / 2);
            if (KN && key) scale_by<KNT>(a[r][c], scale, k_norm, i), scale_by<KNT>(b[r][c], scale, k_norm, i + D / 2);
            if (query || key)
#pragma unroll
                for (int e = 0; e < V; e++) {
                    const float x = a[r][c][e], y = b[r][c][e];
                    a[r][c][e] = x * cosine[c][e] - y * sine[c][e];
                    b[r][c][e] = y * cosine[c][e] + x * sine[c][e];
                }
            if (query) {
                store<XT>(qkv, row + h * D + i, a[r][c]);
                store<XT>(qkv, row + h * D + i + D / 2, b[r][c]);
            } else {
#if NARROW
                const float by = 1.0f / __ldg((key ? k_scale : v_scale) + (h - HQ) % HKV);
#pragma unroll
                for (int e = 0; e < V; e++) a[r][c][e] *= by, b[r][c][e] *= by;
#endif
                store<KT>(kv, to + i, a[r][c]);
                store<KT>(kv, to + i + D / 2, b[r][c]);
            }
        }
    }
}
