// y = x · factor, with CAP y = cap · tanh(x · factor); eight results per thread. Types XT, YT; ALIGNED: rows start at
// multiples of 16 bytes and are whole eights.
#include "prelude.cuh"

DEVICE float scaled(float v, float factor, float cap) { return CAP ? cap * tanhf(v * factor) : v * factor; }

extern "C" __global__ void __launch_bounds__(256)
scale(const void* x, void* y, u32 k, u32 x_stride, u32 y_stride, float factor, float cap, const u32* live) {
    let_successor_start();
    wait_for_predecessor();
    if (live && blockIdx.y >= *live) return;
    const u64 from = (u64)blockIdx.y * x_stride, to = (u64)blockIdx.y * y_stride;
    const u32 i = (blockIdx.x * 256 + threadIdx.x) * 8;
    if (i >= k) return;
#if ALIGNED
    float v[8];
    load8<XT>(x, from + i, v);
#pragma unroll
    for (int t = 0; t < 8; t++) v[t] = scaled(v[t], factor, cap);
    store8<YT>(y, to + i, v);
#else
    for (u32 t = i; t < min(i + 8, k); t++)
        store1<YT>(y, to + t, scaled(load1<XT>(x, from + t), factor, cap));
#endif
}
