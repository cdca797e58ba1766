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
