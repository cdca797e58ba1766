// One vector of the tokens of each row: their mean (POOLING 0), the first (1) or the last (2); UNIT: divided by its length.
// A block per row; groups of threads take every GROUPSth token, a thread EACH columns of it (8 if rows are aligned, else 1).
// Types XT, YT; WIDTH columns.
#include "prelude.cuh"

#define LANES (WIDTH / EACH)
// Columns that a thread has, in pieces of EACH, if there are more of them than threads.
#define PIECES ((LANES + THREADS - 1) / THREADS)
#define GROUPS (LANES >= THREADS ? 1 : THREADS / LANES)

extern "C" __global__ void __launch_bounds__(THREADS)
pool(const u32* q_start, const void* x, void* y, u32 tokens, u32 x_stride, u32 y_stride) {
    __shared__ float part[THREADS / 32];
    __shared__ float of_group[GROUPS > 1 ? GROUPS : 1][GROUPS > 1 ? WIDTH : 1];
    let_successor_start();
    wait_for_predecessor();
    const u32 r = blockIdx.x, group = GROUPS > 1 ? threadIdx.x / LANES : 0, lane = GROUPS > 1 ? threadIdx.x % LANES : threadIdx.x;
    u32 end = min(q_start[r + 1], tokens), begin = min(q_start[r], end);
    if (POOLING == 1) end = min(end, begin + 1);
    if (POOLING == 2 && end > begin) begin = end - 1;
    const float share = 1.0f / (float)max(end - begin, 1u);
    float sums[PIECES][EACH], squares = 0.0f;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        const u32 i = (lane + THREADS * p) * EACH;
#pragma unroll
        for (int e = 0; e < EACH; e++) sums[p][e] = 0.0f;
        if (i >= WIDTH || group >= GROUPS) continue;
#pragma unroll 4
        for (u32 t = begin + group; t < end; t += GROUPS) {
            float v[8];
            if (EACH == 8) load8<XT>(x, (u64)t * x_stride + i, v);
            else v[0] = load1<XT>(x, (u64)t * x_stride + i);
#pragma unroll
            for (int e = 0; e < EACH; e++) sums[p][e] += v[e];
        }
    }
    if (GROUPS > 1) {
        if (group < GROUPS)
#pragma unroll
            for (int e = 0; e < EACH; e++) of_group[group][lane * EACH + e] = sums[0][e];
        __syncthreads();
        if (group == 0)
#pragma unroll
            for (int e = 0; e < EACH; e++)
                for (u32 other = 1; other < GROUPS; other++) sums[0][e] += of_group[other][lane * EACH + e];
    }
    const bool keeps = group == 0;
#pragma unroll
    for (int p = 0; p < PIECES; p++)
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            sums[p][e] *= share;
            if (keeps && (lane + THREADS * p) * EACH < WIDTH) squares += sums[p][e] * sums[p][e];
        }
    float factor = 1.0f;
    if (UNIT) {
        squares = warp_sum(squares);
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = squares;
        __syncthreads();
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < THREADS / 32; w++) total += part[w];
        if (total > 0.0f) factor = 1.0f / sqrtf(total);
    }
    if (!keeps) return;
#pragma unroll
    for (int p = 0; p < PIECES; p++)
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const u32 i = (lane + THREADS * p) * EACH + e;
            if (i < WIDTH) store1<YT>(y, (u64)r * y_stride + i, sums[p][e] * factor);
        }
}
