// y[i] = act(x[2i]) · x[2i + 1]; four results per thread. Types XT, YT; ALIGNED: rows of x start at multiples of 16 bytes;
// ACT as in prelude.cuh.
#include "prelude.cuh"

extern "C" __global__ void __launch_bounds__(256)
gate_mul(const void* x, void* y, u32 half, u32 x_stride, u32 y_stride, const u32* live) {
    let_successor_start();
    wait_for_predecessor();
    if (live && blockIdx.y >= *live) return;
    const u64 from = (u64)blockIdx.y * x_stride, to = (u64)blockIdx.y * y_stride;
    const u32 i = (blockIdx.x * 256 + threadIdx.x) * 4;
    if (i >= half) return;
    float v[8];
#if ALIGNED
    load8<XT>(x, from + 2 * i, v);
#else
    for (int t = 0; t < 8; t++) v[t] = i + t / 2 < half ? load1<XT>(x, from + 2 * i + t) : 0.0f;
#endif
    float r[4];
#pragma unroll
    for (int t = 0; t < 4; t++) r[t] = activated<ACT>(v[2 * t]) * v[2 * t + 1];
    for (int t = 0; t < 4; t++)
        if (i + t < half) store1<YT>(y, to + i + t, r[t]);
}
