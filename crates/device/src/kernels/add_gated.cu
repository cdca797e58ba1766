// y = a + sigmoid(x · w) · b; a block per row. Types AT, BT, XT, WT, YT; ALIGNED: all rows start at multiples of 16 bytes
// and are whole eights.
#include "prelude.cuh"

extern "C" __global__ void __launch_bounds__(256)
add_gated(const void* a, const void* b, const void* x, const void* w, void* y, u32 wide, u32 cols, u32 a_stride,
          u32 b_stride, u32 x_stride, u32 y_stride, const u32* live) {
    __shared__ float part[8];
    let_successor_start();
    wait_for_predecessor();
    const u64 row = blockIdx.x;
    if (live && row >= *live) return;
    float sum = 0.0f;
#if ALIGNED
    for (u32 i = threadIdx.x * 8; i < wide; i += 2048) {
        float v[8], u[8];
        load8<XT>(x, row * x_stride + i, v);
        load8<WT>(w, i, u);
#pragma unroll
        for (int t = 0; t < 8; t++) sum += v[t] * u[t];
    }
#else
    for (u32 i = threadIdx.x; i < wide; i += 256) sum += load1<XT>(x, row * x_stride + i) * load1<WT>(w, i);
#endif
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int t = 0; t < 8; t++) sum += part[t];
    const float gate = 1.0f / (1.0f + expf(-sum));
#if ALIGNED
    for (u32 i = threadIdx.x * 8; i < cols; i += 2048) {
        float v[8], u[8];
        load8<AT>(a, row * a_stride + i, v);
        load8<BT>(b, row * b_stride + i, u);
#pragma unroll
        for (int t = 0; t < 8; t++) v[t] += gate * u[t];
        store8<YT>(y, row * y_stride + i, v);
    }
#else
    for (u32 i = threadIdx.x; i < cols; i += 256)
        store1<YT>(y, row * y_stride + i, load1<AT>(a, row * a_stride + i) + gate * load1<BT>(b, row * b_stride + i));
#endif
}
