// y = x / sqrt(mean(x²) + eps) · weight; a block per row. Types XT, WT, YT.
#include "prelude.cuh"

extern "C" __global__ void __launch_bounds__(256)
rms_norm(const void* x, const void* weight, void* y, u32 k, u32 x_stride, u32 y_stride, float eps) {
    __shared__ float part[8];
    let_successor_start();
    wait_for_predecessor();
    const u64 from = (u64)blockIdx.x * x_stride, to = (u64)blockIdx.x * y_stride;
    float sum = 0.0f;
#if ALIGNED
    for (u32 i = threadIdx.x * 8; i < k; i += 2048) {
        float v[8];
        load8<XT>(x, from + i, v);
#pragma unroll
        for (int t = 0; t < 8; t++) sum += v[t] * v[t];
    }
#else
    for (u32 i = threadIdx.x; i < k; i += 256) {
        const float v = load1<XT>(x, from + i);
        sum += v * v;
    }
#endif
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int w = 0; w < 8; w++) sum += part[w];
    const float scale = 1.0f / sqrtf(sum / (float)k + eps);
#if ALIGNED
    for (u32 i = threadIdx.x * 8; i < k; i += 2048) {
        float v[8], w[8];
        load8<XT>(x, from + i, v);
        load8<WT>(weight, i, w);
#pragma unroll
        for (int t = 0; t < 8; t++) v[t] *= scale * w[t];
        store8<YT>(y, to + i, v);
    }
#else
    for (u32 i = threadIdx.x; i < k; i += 256)
        store1<YT>(y, to + i, load1<XT>(x, from + i) * scale * load1<WT>(weight, i));
#endif
}

// y[i] = silu(x[2i]) · x[2i + 1]: the epilogue of a product that a library made. Type XT for both.
extern "C" __global__ void __launch_bounds__(256)
silu_mul(const void* x, void* y, u32 half, u32 x_stride, u32 y_stride, const u32* live) {
    let_successor_start();
    wait_for_predecessor();
    if (live && blockIdx.y >= *live) return;
    const u64 from = (u64)blockIdx.y * x_stride, to = (u64)blockIdx.y * y_stride;
    const u32 i = (blockIdx.x * 256 + threadIdx.x) * 4;
    if (i >= half) return;
    float v[8];
    load8<XT>(x, from + 2 * i, v);
    float r[4];
#pragma unroll
    for (int t = 0; t < 4; t++) r[t] = v[2 * t] / (1.0f + __expf(-v[2 * t])) * v[2 * t + 1];
    for (int t = 0; t < 4; t++)
        if (i + t < half) store1<XT>(y, to + i + t, r[t]);
}
