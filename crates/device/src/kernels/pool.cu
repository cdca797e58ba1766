// One vector of the tokens of each row: their mean (POOLING 0), the first (1) or the last (2); UNIT: divided by its length.
// A block per row. Types XT, YT; WIDTH columns.
#include "prelude.cuh"

#define PER ((WIDTH + 255) / 256)

extern "C" __global__ void __launch_bounds__(256)
pool(const u32* q_start, const void* x, void* y, u32 tokens, u32 x_stride, u32 y_stride) {
    __shared__ float part[8];
    let_successor_start();
    wait_for_predecessor();
    const u32 r = blockIdx.x;
    u32 end = min(q_start[r + 1], tokens), begin = min(q_start[r], end);
    if (POOLING == 1) end = min(end, begin + 1);
    if (POOLING == 2 && end > begin) begin = end - 1;
    const float share = 1.0f / (float)max(end - begin, 1u);
    float sums[PER], squares = 0.0f;
#pragma unroll
    for (int c = 0; c < PER; c++) {
        const u32 i = threadIdx.x + 256 * c;
        sums[c] = 0.0f;
        for (u32 t = begin; t < end && i < WIDTH; t++) sums[c] += load1<XT>(x, (u64)t * x_stride + i);
        sums[c] *= share;
        squares += sums[c] * sums[c];
    }
    float factor = 1.0f;
    if (UNIT) {
        squares = warp_sum(squares);
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = squares;
        __syncthreads();
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < 8; w++) total += part[w];
        if (total > 0.0f) factor = 1.0f / sqrtf(total);
    }
#pragma unroll
    for (int c = 0; c < PER; c++) {
        const u32 i = threadIdx.x + 256 * c;
        if (i < WIDTH) store1<YT>(y, (u64)r * y_stride + i, sums[c] * factor);
    }
}
