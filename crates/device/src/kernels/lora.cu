// What adapters add to the result of a linear. lora_shrink: sums = x · Aᵀ, a warp per sum, eight a block. lora_expand:
// y += sums · Bᵀ, a thread per column. Rows whose sequence has no adapter are left alone. Types XT, AT, BT, YT; ALIGNED:
// rows of x and A start at multiples of 16 bytes and are whole eights.
#include "adapter_of.cuh"

extern "C" __global__ void __launch_bounds__(256)
lora_shrink(const void* x, const void* a, float* sums, const u32* token_row, const u32* row_seat, const u32* params,
            u32 wide, u32 x_stride, u32 a_stride, u32 inner, u32 rows, u32 seats, u32 slots, u32 by_row,
            const u32* live) {
    let_successor_start();
    wait_for_predecessor();
    const u32 row = blockIdx.y;
    if (live && row >= *live) return;
    const u32 adapter = adapter_of(row, token_row, row_seat, params, rows, seats, slots, by_row);
    const u32 at = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (adapter == 0 || at >= inner) return;
    const u64 from = (u64)row * x_stride, with = ((u64)(adapter - 1) * inner + at) * a_stride;
    float sum = 0.0f;
#if ALIGNED
    for (u32 i = lane * 8; i < wide; i += 256) {
        float v[8], u[8];
        load8<XT>(x, from + i, v);
        load8<AT>(a, with + i, u);
#pragma unroll
        for (int t = 0; t < 8; t++) sum += v[t] * u[t];
    }
#else
    for (u32 i = lane; i < wide; i += 32) sum += load1<XT>(x, from + i) * load1<AT>(a, with + i);
#endif
    sum = warp_sum(sum);
    if (lane == 0) sums[(u64)row * inner + at] = sum;
}

extern "C" __global__ void __launch_bounds__(256)
lora_expand(const float* sums, const void* b, void* y, const u32* token_row, const u32* row_seat, const u32* params,
            u32 cols, u32 y_stride, u32 b_stride, u32 inner, u32 rank, u32 rows, u32 seats, u32 slots, u32 by_row,
            u32 turns, u32 end0, u32 end1, u32 end2, u32 end3, const u32* live) {
    extern __shared__ float own[];
    let_successor_start();
    wait_for_predecessor();
    const u32 row = blockIdx.y;
    if (live && row >= *live) return;
    const u32 adapter = adapter_of(row, token_row, row_seat, params, rows, seats, slots, by_row);
    if (adapter == 0) return;
    for (u32 i = threadIdx.x; i < inner; i += 256) own[i] = sums[(u64)row * inner + i];
    __syncthreads();
    const u32 col = blockIdx.x * 256 + threadIdx.x;
    if (col >= cols) return;
    const u32 stacked = (col >= end0) + (col >= end1) + (col >= end2) + (col >= end3);
    const float* part = own + (turns ? col % turns : stacked) * rank;
    const u64 with = ((u64)(adapter - 1) * cols + col) * b_stride, to = (u64)row * y_stride + col;
    float sum = 0.0f;
    for (u32 r = 0; r < rank; r++) sum += part[r] * load1<BT>(b, with + r);
    store1<YT>(y, to, load1<YT>(y, to) + sum);
}
