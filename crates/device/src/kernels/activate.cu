// y = act(x); eight results per thread. Types XT, YT; ACT as in prelude.cuh; ALIGNED: rows start at multiples of 16 bytes
// and are whole eights.
#include "prelude.cuh"

extern "C" __global__ void __launch_bounds__(256)
activate(const void* x, void* y, u32 k, u32 x_stride, u32 y_stride, const u32* live) {
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
    for (int t = 0; t < 8; t++) v[t] = activated<ACT>(v[t]);
    store8<YT>(y, to + i, v);
#else
    for (u32 t = i; t < min(i + 8, k); t++) store1<YT>(y, to + t, activated<ACT>(load1<XT>(x, from + t)));
#endif
}
