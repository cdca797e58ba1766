// Derives what a model is fed that drafts, EACH tokens of each row at positions BEHIND theirs, and how many drafts each row may accept. One block.
#include "fed.cuh"

#define THREADS 1024

extern "C" __global__ void __launch_bounds__(THREADS)
draft_rows(const u32* verified_counts, const u32* seat_len, const u32* row_seat, const u32* row_flags,
           const u32* page_table, const u32* history, u32* row_drafts, u32* counts, u32* q_start, u32* kv_len,
           u32* last_index, u32* token, u32* position, u32* kv_slot, u32* token_row, u32 bucket, u32 ways) {
    __shared__ u32 shared[THREADS / 32], sums[THREADS / 32];
    const u32 tid = threadIdx.x;
    wait_for_predecessor();
    const u32 rows = min(verified_counts[COUNT_ROWS], bucket);
    u32 longest = 0, pages = 0;
    for (u32 r = tid; r < bucket; r += THREADS) {
        const bool live = r < rows;
        const u32 seat = live ? min(row_seat[r], (u32)SEATS) : SEATS, length = seat_len[seat];
        const u32 asked = live ? min(row_flags[r] >> ROW_DRAFTS & 255, (u32)DRAFTS) : 0;
        // Drafts need a page for their keys and values.
        u32 most = 0;
        while (most < asked && slot_of(page_table, seat, length + most + 1) >= PAGE) most++;
        row_drafts[r] = most;
        const u32 total = live && length < CONTEXT ? length + 1 - min(length + 1, (u32)BEHIND) : 0;
        q_start[r] = min(r, rows) * EACH;
        kv_len[r] = total;
        last_index[r] = live ? r * EACH + EACH - 1 : 0;
        longest = max(longest, total);
        pages += (total + PAGE - 1) / PAGE;
    }
    for (u32 t = tid; t < bucket * EACH; t += THREADS) {
        const u32 r = t / EACH, back = EACH - 1 - t % EACH;
        const bool live = r < rows;
        const u32 seat = live ? min(row_seat[r], (u32)SEATS) : SEATS, length = seat_len[seat];
        const bool known = live && length >= back && length - back < CONTEXT;
        const u32 of = known ? length - back : 0;
        const bool there = known && of + 1 > BEHIND;
        const u32 at = there ? of - BEHIND : 0;
        token[t] = known ? history[(u64)seat * CONTEXT + of] : 0;
        position[t] = at;
        kv_slot[t] = there ? slot_of(page_table, seat, at) : t % PAGE;
        token_row[t] = live ? r : ROWS_LIMIT;
    }
    fed_totals(longest, pages, shared, sums);
    if (tid == 0) {
        q_start[bucket] = rows * EACH;
        fed_counts(counts, rows, rows * EACH, longest, pages, ways);
    }
    // Only now: attention kernels read these tables before they wait.
    __threadfence();
    __syncthreads();
    let_successor_start();
}
