// Per token: normalise its latent, rotate the key that all heads share, write both to the token's slot in pages of
// latents ([page][token][D]: LATENT elements, then the key), and rotate the last elements of each query head in place.
// D, LATENT, HQ, PAGE; HALVES: element i is rotated with i + ROTATED / 2, else 2i with 2i + 1. Types QT, XT, WT (the
// norm's weight), KT (pages).
#include "prelude.cuh"

#define ROTATED (D - LATENT)
#define PER ((LATENT + 255) / 256)

// The two elements of pair i.
DEVICE u32 low(u32 i) { return HALVES ? i : 2 * i; }
DEVICE u32 high(u32 i) { return HALVES ? i + ROTATED / 2 : 2 * i + 1; }

extern "C" __global__ void __launch_bounds__(256)
latent_kv(void* q, const void* x, const void* weight, const float* rope, const u32* position, const u32* kv_slot,
          void* kv, u32 q_stride, u32 x_stride, u32 from, u32 rope_stride, u32 max_position, float eps) {
    __shared__ float sums[8];
    const u32 t = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float weights[PER];
#pragma unroll
    for (int c = 0; c < PER; c++) {
        const u32 i = threadIdx.x + 256 * c;
        weights[c] = i < LATENT ? load1<WT>(weight, i) : 0.0f;
    }
    let_successor_start();
    wait_for_predecessor();
    const float* table = rope + (u64)min(position[t], max_position - 1) * rope_stride;
    const u64 row = (u64)t * x_stride + from, slot = (u64)kv_slot[t] * D;
    float v[PER], sum = 0.0f;
#pragma unroll
    for (int c = 0; c < PER; c++) {
        const u32 i = threadIdx.x + 256 * c;
        v[c] = i < LATENT ? load1<XT>(x, row + i) : 0.0f;
        sum += v[c] * v[c];
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[warp] = sum;
    for (u32 i = threadIdx.x; i < HQ * (ROTATED / 2); i += 256) {
        const u32 pair = i % (ROTATED / 2);
        const u64 head = (u64)t * q_stride + i / (ROTATED / 2) * D + LATENT;
        const float a = load1<QT>(q, head + low(pair)), b = load1<QT>(q, head + high(pair));
        const float cosine = table[pair], sine = table[pair + ROTATED / 2];
        store1<QT>(q, head + low(pair), a * cosine - b * sine);
        store1<QT>(q, head + high(pair), b * cosine + a * sine);
    }
    if (threadIdx.x < ROTATED / 2) {
        const u32 pair = threadIdx.x;
        const float a = load1<XT>(x, row + LATENT + low(pair)), b = load1<XT>(x, row + LATENT + high(pair));
        const float cosine = table[pair], sine = table[pair + ROTATED / 2];
        store1<KT>(kv, slot + LATENT + low(pair), a * cosine - b * sine);
        store1<KT>(kv, slot + LATENT + high(pair), b * cosine + a * sine);
    }
    __syncthreads();
    sum = 0.0f;
    for (int w = 0; w < 8; w++) sum += sums[w];
    const float scale = 1.0f / sqrtf(sum / (float)LATENT + eps);
#pragma unroll
    for (int c = 0; c < PER; c++) {
        const u32 i = threadIdx.x + 256 * c;
        if (i < LATENT) store1<KT>(kv, slot + i, v[c] * (scale * weights[c]));
    }
}
