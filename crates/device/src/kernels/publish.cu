// Ends a step that samples nothing. publish_vectors: a block per row copies its vector to the host's memory. publish: one
// block advances the seats and writes the ring entry, its launch number last. XT: the vectors' type; records as macros.
#include "prelude.cuh"

extern "C" __global__ void __launch_bounds__(256)
publish_vectors(const void* vectors, const u32* counts, float* even, float* odd, u32 width, u32 stride) {
    let_successor_start();
    wait_for_predecessor();
    const u32 r = blockIdx.x;
    if (r >= __ldcg(counts + COUNT_ROWS)) return;
    float* to = (__ldcg(counts + COUNT_LAUNCH_LO) & 1 ? odd : even) + (u64)r * width;
    for (u32 i = threadIdx.x; i < width; i += 256) to[i] = load1<XT>(vectors, (u64)r * stride + i);
    __threadfence_system();
}

extern "C" __global__ void __launch_bounds__(256)
publish(u32* counts, u32* seat_len, const u32* row_seat, const u32* row_q_len, u32* ring) {
    let_successor_start();
    wait_for_predecessor();
    const u32 rows = __ldcg(counts + COUNT_ROWS);
    const u64 launch = (u64)__ldcg(counts + COUNT_LAUNCH_HI) << 32 | __ldcg(counts + COUNT_LAUNCH_LO);
    u32* entry = ring + (u64)(launch % RING_ENTRIES) * RING_ENTRY_WORDS;
    for (u32 r = threadIdx.x; r < rows; r += 256) {
        const u32 seat = __ldcg(row_seat + r);
        seat_len[seat] = __ldcg(seat_len + seat) + __ldcg(row_q_len + r);
        volatile u32* row = entry + RING_HEADER_WORDS + (u64)r * RING_ROW_WORDS;
        row[0] = 0, row[1] = 0, row[2] = 0, row[3] = 0;
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        entry[RING_ROWS] = rows;
        entry[RING_AGAIN] = counts[COUNT_AGAIN] = REPEAT_DONE;
        store_release_system((u64*)entry, launch);
    }
}
