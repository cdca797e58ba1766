// Reads memory once, 16 bytes a load, UNROLL loads in flight per thread. The sum is only stored if it has one value
// in 2^32, so that no load can be optimised away and nothing is written.
#include "prelude.cuh"

DEVICE uint4 load_once(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

extern "C" __global__ void __launch_bounds__(512) bench_read(const uint4* from, u64 count, u32* out) {
    const u64 stride = (u64)gridDim.x * blockDim.x;
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u32 sum = 0;
    for (; i + (UNROLL - 1) * stride < count; i += UNROLL * stride) {
        uint4 v[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) v[k] = load_once(from + i + k * stride);
#pragma unroll
        for (int k = 0; k < UNROLL; k++) sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    for (; i < count; i += stride) {
        uint4 v = load_once(from + i);
        sum += v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x9e3779b9u) *out = sum;
}
