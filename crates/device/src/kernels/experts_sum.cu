// y = residual + the sum of a token's TOP expert outputs, in the order of its slots; eight columns to a thread.
// H, TOP, RESIDUAL.
#include "prelude.cuh"

extern "C" __global__ void __launch_bounds__(256)
experts_sum(const u16* parts, const u16* residual, u16* y, const u32* live, u32 most) {
    let_successor_start();
    wait_for_predecessor();
    const u32 at = blockIdx.x * 256 + threadIdx.x, token = at / (H / 8), column = at % (H / 8) * 8;
    if (token >= (live ? min(*live, most) : most)) return;
    uint4 v[TOP];
#pragma unroll
    for (int k = 0; k < TOP; k++) v[k] = __ldcg((const uint4*)(parts + ((u64)token * TOP + k) * H + column));
    float sum[8] = {};
    if (RESIDUAL) load8<BF16>(residual, (u64)token * H + column, sum);
#pragma unroll
    for (int k = 0; k < TOP; k++) {
        const u32 w[4] = {v[k].x, v[k].y, v[k].z, v[k].w};
#pragma unroll
        for (int i = 0; i < 4; i++) sum[2 * i] += low_half<BF16>(w[i]), sum[2 * i + 1] += high_half<BF16>(w[i]);
    }
    store8<BF16>(y, (u64)token * H + column, sum);
}
