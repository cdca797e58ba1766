// Tokens in the order of the plan's rows: y[i] = x[rows[i] / TOP]; a block copies PER rows of H. H (a multiple of 8), TOP, PER.
#include "prelude.cuh"

extern "C" __global__ void __launch_bounds__(256)
experts_gather(const u16* x, const u32* rows, u16* y, const u32* live, u32 most, u32 x_stride) {
    let_successor_start();
    wait_for_predecessor();
    const u32 all = (live ? min(*live, most) : most) * TOP, first = blockIdx.x * PER;
    for (u32 i = threadIdx.x; i < PER * (H / 8); i += 256) {
        const u32 row = first + i / (H / 8), column = i % (H / 8) * 8;
        if (row < all) *(uint4*)(y + (u64)row * H + column) = *(const uint4*)(x + (u64)(rows[row] / TOP) * x_stride + column);
    }
}
