// y = (x − mean) / sqrt(variance + eps) · weight (+ bias). A warp per row, which is in its registers, or (HELD 0) a block per
// row. Types XT, WT, BT, YT; BIAS; ALIGNED: all rows start at multiples of 16 bytes and are whole eights. HELD: eights of a
// row that a lane has.
#include "prelude.cuh"

// The block's sum of v, in every thread.
DEVICE float block_sum(float v, float* part) {
    v = warp_sum(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0.0f;
#pragma unroll
    for (int w = 0; w < 8; w++) v += part[w];
    return v;
}

#if HELD
extern "C" __global__ void __launch_bounds__(256)
layer_norm_held(const void* x, const void* weight, const void* bias, void* y, u32 rows, u32 k, u32 x_stride, u32 y_stride, float eps) {
    let_successor_start();
    wait_for_predecessor();
    const u32 row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const u64 from = (u64)row * x_stride, to = (u64)row * y_stride;
    float v[HELD][8], w[8], b[8], mean = 0.0f, squares = 0.0f;
#pragma unroll
    for (u32 n = 0; n < HELD; n++) {
        const u32 i = (n * 32 + lane) * 8;
        if (i < k) load8<XT>(x, from + i, v[n]);
#pragma unroll
        for (int t = 0; t < 8; t++) mean += i < k ? v[n][t] : 0.0f;
    }
    mean = warp_sum(mean) / (float)k;
#pragma unroll
    for (u32 n = 0; n < HELD; n++)
#pragma unroll
        for (int t = 0; t < 8; t++)
            if ((n * 32 + lane) * 8 < k) squares += (v[n][t] - mean) * (v[n][t] - mean);
    const float scale = 1.0f / sqrtf(warp_sum(squares) / (float)k + eps);
#pragma unroll
    for (u32 n = 0; n < HELD; n++) {
        const u32 i = (n * 32 + lane) * 8;
        if (i >= k) break;
        load8<WT>(weight, i, w);
        if (BIAS) load8<BT>(bias, i, b);
#pragma unroll
        for (int t = 0; t < 8; t++) v[n][t] = (v[n][t] - mean) * scale * w[t] + (BIAS ? b[t] : 0.0f);
        store8<YT>(y, to + i, v[n]);
    }
}
#else
extern "C" __global__ void __launch_bounds__(256)
layer_norm(const void* x, const void* weight, const void* bias, void* y, u32 k, u32 x_stride, u32 y_stride, float eps) {
    __shared__ float part[8];
    let_successor_start();
    wait_for_predecessor();
    const u64 from = (u64)blockIdx.x * x_stride, to = (u64)blockIdx.x * y_stride;
    // The variance is summed from differences from the mean: subtracting two sums would lose digits.
    float mean = 0.0f, squares = 0.0f;
#if ALIGNED
    float v[8], w[8], b[8];
    for (u32 i = threadIdx.x * 8; i < k; i += 2048) {
        load8<XT>(x, from + i, v);
#pragma unroll
        for (int t = 0; t < 8; t++) mean += v[t];
    }
    mean = block_sum(mean, part) / (float)k;
    for (u32 i = threadIdx.x * 8; i < k; i += 2048) {
        load8<XT>(x, from + i, v);
#pragma unroll
        for (int t = 0; t < 8; t++) squares += (v[t] - mean) * (v[t] - mean);
    }
    const float scale = 1.0f / sqrtf(block_sum(squares, part) / (float)k + eps);
    for (u32 i = threadIdx.x * 8; i < k; i += 2048) {
        load8<XT>(x, from + i, v);
        load8<WT>(weight, i, w);
        if (BIAS) load8<BT>(bias, i, b);
#pragma unroll
        for (int t = 0; t < 8; t++) v[t] = (v[t] - mean) * scale * w[t] + (BIAS ? b[t] : 0.0f);
        store8<YT>(y, to + i, v);
    }
#else
    for (u32 i = threadIdx.x; i < k; i += 256) mean += load1<XT>(x, from + i);
    mean = block_sum(mean, part) / (float)k;
    for (u32 i = threadIdx.x; i < k; i += 256) {
        const float v = load1<XT>(x, from + i) - mean;
        squares += v * v;
    }
    const float scale = 1.0f / sqrtf(block_sum(squares, part) / (float)k + eps);
    for (u32 i = threadIdx.x; i < k; i += 256) {
        const float v = (load1<XT>(x, from + i) - mean) * scale * load1<WT>(weight, i);
        store1<YT>(y, to + i, BIAS ? v + load1<BT>(bias, i) : v);
    }
#endif
}
#endif
