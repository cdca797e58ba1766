// Tokens in the order of the plan's rows: token t goes to its TOP places. A block has one token and H / 8 threads.
// H (a multiple of 8, to 8192), TOP.
#include "prelude.cuh"

extern "C" __global__ void __launch_bounds__(H / 8)
experts_gather(const u16* x, const u32* place, u16* y, const u32* live, u32 most, u32 x_stride) {
    let_successor_start();
    wait_for_predecessor();
    if (blockIdx.x >= (live ? min(*live, most) : most)) return;
    const uint4 v = *(const uint4*)(x + (u64)blockIdx.x * x_stride + threadIdx.x * 8);
    u32 to[TOP];
#pragma unroll
    for (int k = 0; k < TOP; k++) to[k] = place[blockIdx.x * TOP + k];
#pragma unroll
    for (int k = 0; k < TOP; k++) *(uint4*)(y + (u64)to[k] * H + threadIdx.x * 8) = v;
}
