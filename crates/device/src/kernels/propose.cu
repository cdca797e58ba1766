// Chooses draft INDEX of each row, the token with the largest logit, and derives what is fed next: that token, BEHIND its position. A block per row;
// the first one also counts.
#include "fed.cuh"

#define THREADS 1024

extern "C" __global__ void __launch_bounds__(THREADS)
propose(const void* logits, const u32* verified_counts, const u32* verified_start, u32* verified_token, const u32* seat_len,
        const u32* row_seat, const u32* row_flags, const u32* page_table, const u32* row_drafts, u32* counts, u32* q_start,
        u32* kv_len, u32* last_index, u32* token, u32* position, u32* kv_slot, u32* token_row, const u32* ids, u32 vocab,
        u32 stride, u32 bucket, u32 ways) {
    __shared__ u32 shared[THREADS / 32], sums[THREADS / 32];
    __shared__ u64 found[THREADS / 32];
    const u32 r = blockIdx.x, tid = threadIdx.x;
    wait_for_predecessor();
    const u32 rows = min(verified_counts[COUNT_ROWS], bucket);
    const bool live = r < rows;
    // The logit in an order of integers, then the index from the end: the largest is what is looked for. NaN is less than every
    // number.
    u64 best = 0;
    if (live)
        for (u32 i = tid; i < vocab; i += THREADS) {
            const float value = load1<XT>(logits, (u64)r * stride + i);
            // Both zeros are equal.
            const u32 bits = __float_as_uint(value + 0.0f);
            const u32 size = value != value ? 0 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
            const u64 here = (u64)size << 32 | (FULL - i);
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
        const u32 seat = live ? min(row_seat[r], (u32)SEATS) : SEATS, next = seat_len[seat] + INDEX + 1;
        const u32 flags = live ? row_flags[r] : 0, place = live ? verified_start[r] + INDEX + 1 : 0;
        // Nothing but NaN and minus infinity: the first token.
        u32 draft = (u32)(best >> 32) > 0x007fffffu ? FULL - (u32)best : 0;
        if (ids) draft = ids[draft];
        draft = min(draft, VOCAB - 1u);
        if (live && flags & ROW_PROMPT) draft = verified_token[place];
        else if (live && INDEX < row_drafts[r]) verified_token[place] = draft;
        // A draft is never at position 0, and BEHIND is at most 1.
        const bool there = live && next < CONTEXT;
        const u32 at = next - BEHIND;
        q_start[r] = min(r, rows);
        kv_len[r] = there ? at + 1 : 0;
        last_index[r] = live ? r : 0;
        token[r] = live ? draft : 0;
        position[r] = there ? at : 0;
        kv_slot[r] = there ? slot_of(page_table, seat, at) : r % PAGE;
        token_row[r] = live ? r : ROWS_LIMIT;
    }
    if (r == 0) {
        u32 longest = 0, pages = 0;
        for (u32 i = tid; i < rows; i += THREADS) {
            const u32 next = seat_len[min(row_seat[i], (u32)SEATS)] + INDEX + 1;
            const u32 total = next < CONTEXT ? next - BEHIND + 1 : 0;
            longest = max(longest, total);
            pages += (total + PAGE - 1) / PAGE;
        }
        fed_totals(longest, pages, shared, sums);
        if (tid == 0) {
            q_start[bucket] = rows;
            fed_counts(counts, rows, rows, longest, pages, ways);
        }
    }
    // Only now: attention kernels read these tables before they wait.
    __threadfence();
    __syncthreads();
    let_successor_start();
}
