// Copies memory once, 16 bytes at a time, four loads in flight per thread.
#include "prelude.cuh"

extern "C" __global__ void __launch_bounds__(512) bench_copy(const uint4* from, uint4* to, u64 count) {
    const u64 stride = (u64)gridDim.x * blockDim.x;
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < count; i += 4 * stride) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v[k].x), "=r"(v[k].y), "=r"(v[k].z), "=r"(v[k].w)
                         : "l"(from + i + k * stride));
        }
#pragma unroll
        for (int k = 0; k < 4; k++) __stcs(to + i + k * stride, v[k]);
    }
    for (; i < count; i += stride) to[i] = from[i];
}
