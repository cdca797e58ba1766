// y = a + b; eight results per thread. Types AT, BT, YT; ALIGNED: rows start at multiples of 16 bytes and are whole eights.
#include "prelude.cuh"

extern "C" __global__ void __launch_bounds__(256)
add(const void* a, const void* b, void* y, u32 k, u32 a_stride, u32 b_stride, u32 y_stride, const u32* live) {
    let_successor_start();
    wait_for_predecessor();
    if (live && blockIdx.y >= *live) return;
    const u64 row = blockIdx.y, from_a = row * a_stride, from_b = row * b_stride, to = row * y_stride;
    const u32 i = (blockIdx.x * 256 + threadIdx.x) * 8;
    if (i >= k) return;
#if ALIGNED
    float v[8], w[8];
    load8<AT>(a, from_a + i, v);
    load8<BT>(b, from_b + i, w);
#pragma unroll
    for (int t = 0; t < 8; t++) v[t] += w[t];
    store8<YT>(y, to + i, v);
#else
    for (u32 t = i; t < min(i + 8, k); t++)
        store1<YT>(y, to + t, load1<AT>(a, from_a + t) + load1<BT>(b, from_b + t));
#endif
}
