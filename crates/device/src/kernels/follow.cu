// After a step, what a drafter is fed that reads hidden states: each token with the states after the token before it. A block
// per token; the first token of a row keeps the states of the last one that was accepted for the next step. OWN: the states
// after the token itself, and nothing is kept. MADE: `kept` was made of those, and the tables are written.
#include "copy_row.cuh"
#include "fed.cuh"

extern "C" __global__ void __launch_bounds__(256)
follow(const u32* verified_counts, const u32* verified_start, const u32* verified_token, const u32* verified_position,
       const u32* verified_row, const u32* seat_len, const u32* row_seat, const u32* page_table, const Element* kept,
       Element* last, u32* last_len, u32* counts, u32* token, u32* position, u32* kv_slot, u32* token_row, Element* y,
       u32 cols, u32 kept_stride, u32 last_stride, u32 y_stride) {
    const u32 t = blockIdx.x, tid = threadIdx.x;
    if (MADE) let_successor_start();
    wait_for_predecessor();
    const u32 tokens = min(verified_counts[COUNT_TOKENS], gridDim.x);
    const bool live = t < tokens;
    const u32 row = live ? verified_row[t] : 0, seat = live ? min(row_seat[row], (u32)SEATS) : SEATS;
    const u32 at = live ? verified_position[t] : 0;
    const bool first = !live || t == verified_start[row];
    const bool known = !first || (live && at > 0 && last_len[seat] == at);
    Element* to = y + (u64)t * y_stride;
    if (OWN && live) copy_row(kept + (u64)t * kept_stride, to, cols);
    else if (!OWN && known) copy_row(first ? last + (u64)seat * last_stride : kept + (u64)(t - 1) * kept_stride, to, cols);
    else
        for (u32 i = tid; i < cols; i += 256) to[i] = 0;
    // Everything of the last step was read.
    __syncthreads();
    if (!OWN && first && live) {
        // The sampler has advanced the seat.
        const u32 length = seat_len[seat], accepted = length > at ? length - at : 0;
        const bool there = accepted && t + accepted - 1 < tokens;
        if (there) copy_row(kept + (u64)(t + accepted - 1) * kept_stride, last + (u64)seat * last_stride, cols);
        if (tid == 0) last_len[seat] = there ? length : 0;
    }
    if (MADE) return;
    if (tid == 0) {
        token[t] = live ? verified_token[t] : 0;
        position[t] = at ? at - 1 : 0;
        kv_slot[t] = known ? slot_of(page_table, seat, at - 1) : t % PAGE;
        token_row[t] = live ? row : ROWS_LIMIT;
        if (t == 0) counts[COUNT_ROWS] = verified_counts[COUNT_ROWS], counts[COUNT_TOKENS] = tokens;
    }
    // Kernels read these tables before they wait.
    __threadfence();
    __syncthreads();
    let_successor_start();
}
