// Chooses draft INDEX of each row, the token with the largest logit, and derives what is fed next: that token, BEHIND its position. A block per row;
// the first one also counts.
#include "fed.cuh"

#define THREADS 1024
// Pieces of eight logits that a thread has in flight.
#define PIECES_AT_ONCE 4

// The larger logit, of equal ones that of the lower index; NaN is less than every number. A thread's indices ascend.
DEVICE void choose(float value, u32 i, float& best, u32& at) {
    if (value > best) best = value, at = i;
}

// The best of a warp: sizes are logits in an order of integers, 0 without a choice.
DEVICE void choose_of_warp(u32& size, u32& at) {
    const u32 most = __reduce_max_sync(FULL, size);
    at = __reduce_min_sync(FULL, size == most ? at : FULL);
    size = most;
}

extern "C" __global__ void __launch_bounds__(THREADS)
propose(const void* logits, const u32* verified_counts, const u32* verified_start, u32* verified_token, const u32* seat_len,
        const u32* row_seat, const u32* row_flags, const u32* page_table, const u32* row_drafts, u32* counts, u32* q_start,
        u32* kv_len, u32* last_index, u32* token, u32* position, u32* kv_slot, u32* token_row, const u32* ids, u32 vocab,
        u32 stride, u32 bucket, u32 ways) {
    __shared__ u32 shared[THREADS / 32], sums[THREADS / 32], sizes[THREADS / 32], places[THREADS / 32];
    const u32 r = blockIdx.x, tid = threadIdx.x;
    const u8* row = (const u8*)logits + (u64)r * stride * (XT == F32 ? 4 : 2);
    const u32 pieces = (u64)row % 16 == 0 ? vocab / 8 : 0;
    float held[PIECES_AT_ONCE][8], best = -INFINITY;
    u32 best_at = FULL;
    auto load = [&](u32 base) {
#pragma unroll
        for (int p = 0; p < PIECES_AT_ONCE; p++)
            if (base + p * THREADS < pieces) load8<XT>(row, (u64)(base + p * THREADS) * 8, held[p]);
    };
    auto look = [&](u32 base) {
#pragma unroll
        for (int p = 0; p < PIECES_AT_ONCE; p++)
            if (base + p * THREADS < pieces)
#pragma unroll
                for (int e = 0; e < 8; e++) choose(held[p][e], (base + p * THREADS) * 8 + e, best, best_at);
    };
    wait_for_predecessor();
    // Everything that does not depend on the choice is asked for together with the first logits.
    load(tid);
    const u32 rows = min(verified_counts[COUNT_ROWS], bucket);
    const bool live = r < rows;
    const u32 own_seat = row_seat[r], own_flags = row_flags[r], start = verified_start[r], drafts = row_drafts[r];
    const u32 seat = live ? min(own_seat, (u32)SEATS) : SEATS, next = seat_len[seat] + INDEX + 1;
    const u32 flags = live ? own_flags : 0, place = live ? start + INDEX + 1 : 0;
    const bool accepts = live && INDEX < drafts;
    // A draft is never at position 0, and BEHIND is at most 1.
    const bool there = live && next < CONTEXT;
    const u32 at = next - BEHIND, slot = there ? slot_of(page_table, seat, at) : r % PAGE;
    look(tid);
    for (u32 base = tid + THREADS * PIECES_AT_ONCE; base < pieces; base += THREADS * PIECES_AT_ONCE) {
        load(base);
        look(base);
    }
    for (u32 i = pieces * 8 + tid; i < vocab; i += THREADS) choose(load1<XT>(row, i), i, best, best_at);
    // Both zeros are equal.
    const u32 bits = __float_as_uint(best + 0.0f);
    u32 size = best_at == FULL ? 0 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    choose_of_warp(size, best_at);
    if (tid % 32 == 0) sizes[tid / 32] = size, places[tid / 32] = best_at;
    if (r == 0) {
        u32 longest = 0, pages = 0;
        for (u32 i = tid; i < rows; i += THREADS) {
            const u32 after = seat_len[min(row_seat[i], (u32)SEATS)] + INDEX + 1;
            const u32 total = after < CONTEXT ? after - BEHIND + 1 : 0;
            longest = max(longest, total);
            pages += (total + PAGE - 1) / PAGE;
        }
        fed_totals(longest, pages, shared, sums);
        if (tid == 0) {
            q_start[bucket] = rows;
            fed_counts(counts, rows, rows, longest, pages, ways);
        }
    }
    __syncthreads();
    if (tid < 32) {
        size = sizes[tid], best_at = places[tid];
        choose_of_warp(size, best_at);
    }
    if (tid == 0) {
        // Nothing but NaN and minus infinity: the first token.
        u32 draft = size ? best_at : 0;
        if (ids) draft = ids[draft];
        draft = min(draft, VOCAB - 1u);
        if (live && flags & ROW_PROMPT) draft = verified_token[place];
        else if (accepts) verified_token[place] = draft;
        q_start[r] = min(r, rows);
        kv_len[r] = there ? at + 1 : 0;
        last_index[r] = live ? r : 0;
        token[r] = live ? draft : 0;
        position[r] = there ? at : 0;
        kv_slot[r] = slot;
        token_row[r] = live ? r : ROWS_LIMIT;
    }
    // Only now: attention kernels read these tables before they wait.
    __threadfence();
    __syncthreads();
    let_successor_start();
}
