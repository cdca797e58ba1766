// Drafts tokens for rows of Q_LEN tokens from their own history: a block per row looks for the place whose tokens agree
// longest with the last ones. The layout of records comes as macros: see `cuda.rs` beside the prologue.
#include "prelude.cuh"

#define THREADS 512
#define CONTEXT (PAGES_PER_SEAT * PAGE)

extern "C" __global__ void __launch_bounds__(THREADS)
draft(const u32* counts, const u32* seat_len, const u32* row_seat, const u32* row_flags, const u32* q_start,
      const u32* page_table, const u32* history, u32* token, u32* row_drafts) {
    __shared__ u64 found[THREADS / 32];
    __shared__ u32 last[LONGEST];
    const u32 r = blockIdx.x, tid = threadIdx.x;
    wait_for_predecessor();
    const u32 rows = counts[COUNT_ROWS];
    const u32 seat = r < rows ? min(row_seat[r], (u32)SEATS) : SEATS;
    const u32 flags = r < rows ? row_flags[r] : 0u, length = seat_len[seat];
    const u32 asked = min(flags >> ROW_DRAFTS & 255, (u32)(Q_LEN - 1));
    // Drafts need a page for their keys and values.
    u32 most = 0;
    while (most < asked) {
        const u32 index = (length + most + 1) / PAGE;
        if (index >= PAGES_PER_SEAT || !page_table[(u64)seat * PAGES_PER_SEAT + index]) break;
        most++;
    }
    const u32* known = history + (u64)seat * CONTEXT;
    const bool searched = most && !(flags & ROW_PROMPT) && length < CONTEXT;
    // The number of tokens that agree, then the position: the largest is what is looked for.
    u64 best = 0;
    if (searched && tid < LONGEST) last[tid] = tid <= length ? known[length - tid] : FULL;
    __syncthreads();
    if (searched)
#pragma unroll 4
        for (u32 p = tid; p < length; p += THREADS) {
            if (known[p] != last[0]) continue;
            u32 equal = 1;
#pragma unroll 1
            while (equal < LONGEST && equal <= p && known[p - equal] == last[equal]) equal++;
            const u64 here = (u64)equal << 32 | p;
            if (here > best) best = here;
        }
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        const u64 other = __shfl_xor_sync(FULL, best, o);
        if (other > best) best = other;
    }
    if (tid % 32 == 0) found[tid / 32] = best;
    __syncthreads();
    if (tid == 0) {
        for (u32 w = 1; w < THREADS / 32; w++)
            if (found[w] > best) best = found[w];
        if (searched && !best) most = min(flags >> ROW_FORCED, most);
        if (searched && best) {
            const u32 p = (u32)best, start = q_start[r];
            for (u32 j = 1; j <= most; j++) {
                const u32 at = p + j;
                token[start + j] = at <= length ? known[at] : token[start + at - length];
            }
        }
        row_drafts[r] = r < rows ? most : 0;
        __threadfence();
    }
    __syncthreads();
    let_successor_start();
}
