// What a model is fed in one pass, for kernels of one block of THREADS = 1024 that derive it. The layout of records comes as macros:
// see `cuda.rs` beside the prologue.
#pragma once
#include "prelude.cuh"

// The longest a sequence can be.
#define CONTEXT (PAGES_PER_SEAT * PAGE)

// Where keys and values of a position go; past the page table, into the scratch page.
DEVICE u32 slot_of(const u32* page_table, u32 seat, u32 position) {
    const u32 index = position / PAGE;
    const u32 page = index < PAGES_PER_SEAT ? page_table[(u64)seat * PAGES_PER_SEAT + index] : 0;
    return page * PAGE + position % PAGE;
}

// The longest row and the pages of all rows, in thread 0.
DEVICE void fed_totals(u32& longest, u32& pages, u32* shared, u32* sums) {
    longest = __reduce_max_sync(FULL, longest);
    pages = __reduce_add_sync(FULL, pages);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = longest, sums[threadIdx.x / 32] = pages;
    __syncthreads();
    if (threadIdx.x < 32) {
        longest = __reduce_max_sync(FULL, shared[threadIdx.x]);
        pages = __reduce_add_sync(FULL, sums[threadIdx.x]);
    }
}

DEVICE void fed_counts(u32* counts, u32 rows, u32 tokens, u32 longest, u32 pages, u32 ways) {
    counts[COUNT_ROWS] = rows;
    counts[COUNT_TOKENS] = tokens;
    counts[COUNT_MAX_KV] = longest;
    // An equal share, in tokens, for each of `ways` blocks per KV head if there were eight KV heads; kernels scale it
    // by their number of heads. Rounded up, so that `ways` shares hold all pages.
    counts[COUNT_SPLIT] = max((pages + ways - 1) / ways, 1u) * PAGE;
}
