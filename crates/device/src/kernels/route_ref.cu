// The router for any formats and shapes: a block for each token, a warp for each logit in turn, one warp for the choice.
// XT (x), WT (w), H, ALIGNED (rows of x and w), and what route_choose.cuh wants.
#include "quant.cuh"
#include "route_choose.cuh"

extern "C" __global__ void __launch_bounds__(256)
route_ref(const void* x, const void* w, const void* bias, u32* choice, const u32* live, u32 most, u32 x_stride,
          u32 w_stride, float scale) {
    __shared__ float logits[E];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.x;
    let_successor_start();
    wait_for_predecessor();
    if (token >= (live ? min(*live, most) : most)) return;
    for (u32 e = warp; e < E; e += 8) {
        const u8* row = weight_row<WT>(w, e, w_stride);
        float sum = 0.0f;
        for (u32 i = lane * 8; i < H; i += 256) {
            float a[8], b[8];
            const u64 at = (u64)token * x_stride + i;
            if (ALIGNED) load8<XT>(x, at, a);
            else
                for (u32 t = 0; t < 8; t++) a[t] = i + t < H ? load1<XT>(x, at + t) : 0.0f;
            if (WT > BF16 || ALIGNED) weights8<WT>(row, i, b);
            else
                for (u32 t = 0; t < 8; t++) b[t] = i + t < H ? load1<WT>(row, i + t) : 0.0f;
#pragma unroll
            for (int t = 0; t < 8; t++) sum += a[t] * b[t];
        }
        sum = warp_sum(sum);
        if (lane == 0) logits[e] = logit_of(sum, bias, e);
    }
    __syncthreads();
    if (warp > 0) return;
    u32 expert;
    float weight;
    choose(logits, bias, scale, expert, weight);
    if (lane >= TOP) return;
    choice[(u64)token * 2 * TOP + lane] = expert;
    choice[(u64)token * 2 * TOP + TOP + lane] = __float_as_uint(weight);
}
