// y = x * gate(z), with an RMS norm over GROUP columns before the gate or AFTER it; a block for each group of each row.
// SILU: the gate is z sigmoid(z), else sigmoid(z). NORM: there is one; SHARED: its weight is the same for all groups.
// Types XT, ZT, WT, YT.
#include "prelude.cuh"

#define PER ((GROUP + THREADS - 1) / THREADS)

extern "C" __global__ void __launch_bounds__(THREADS)
gated(const void* x, const void* z, const void* weight, void* y, u32 cols, u32 from, u32 x_stride, u32 z_stride,
      u32 y_stride, const u32* live, float eps) {
    __shared__ float sums[THREADS / 32];
    let_successor_start();
    wait_for_predecessor();
    const u64 row = blockIdx.y;
    if (live && row >= *live) return;
    const u32 first = blockIdx.x * GROUP;
    float v[PER], g[PER], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const u32 c = i * THREADS + threadIdx.x;
        v[i] = g[i] = 0.0f;
        if (c < GROUP && first + c < cols) {
            v[i] = load1<XT>(x, row * x_stride + first + c);
            const float gate = load1<ZT>(z, row * z_stride + from + first + c), share = 1.0f / (1.0f + expf(-gate));
            g[i] = SILU ? gate * share : share;
            if (AFTER) v[i] *= g[i];
            sum += v[i] * v[i];
        }
    }
    float scale = 1.0f;
    if (NORM) {
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
        __syncthreads();
        sum = 0.0f;
#pragma unroll
        for (int w = 0; w < THREADS / 32; w++) sum += sums[w];
        scale = 1.0f / sqrtf(sum / (float)GROUP + eps);
    }
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const u32 c = i * THREADS + threadIdx.x;
        if (c < GROUP && first + c < cols) {
            float r = v[i];
            if (NORM) r *= scale * load1<WT>(weight, SHARED ? c : first + c);
            if (!AFTER) r *= g[i];
            store1<YT>(y, row * y_stride + first + c, r);
        }
    }
}
