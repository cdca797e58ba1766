// From the experts of each token to what the products need, in one block: how many tokens an expert has and where they
// begin, its assignments (token · TOP + slot) in the order of tokens with their weights, and tasks: an expert and up to
// TILE of its assignments. A bit for each token and expert gives the order: an assignment comes after the bits before
// its own. Counts and bits are integers, so nothing depends on timing, and no expert has a limit. The task list has a
// fixed length; entries that are not used have expert −1.
//
// E (≤ 1024), TOP, TILE.
#include "experts_plan.cuh"

#define THREADS 1024
// Tokens whose bits are in shared memory at once.
#define CHUNK 2048
#define WORDS (CHUNK / 32)
// Assignments that a thread has on their way at once.
#define BATCH 4

// The sum of `v` over the threads before this one; all threads of the block take part.
DEVICE u32 sum_before(u32 v, u32* room, u32& total) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 sum = v;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        const u32 got = __shfl_up_sync(FULL, sum, o);
        if (lane >= o) sum += got;
    }
    __syncthreads();
    if (lane == 31) room[warp] = sum;
    __syncthreads();
    const u32 of_warp = room[lane];
    total = __reduce_add_sync(FULL, of_warp);
    return __reduce_add_sync(FULL, lane < warp ? of_warp : 0) + sum - v;
}

extern "C" __global__ void __launch_bounds__(THREADS)
experts_plan(const u32* ids, const float* weights, const u32* live, u32 most, Plan plan) {
    extern __shared__ u32 memory[];
    // [expert][word]: bits, and how many there are before the word. An odd pitch keeps experts in different banks.
    u32* bits = memory;
    u16* before = (u16*)(bits + E * (WORDS + 1));
    __shared__ u32 counts[E], base[E];
    __shared__ u32 room[32];
    const u32 id = threadIdx.x, warp = id / 32, lane = id % 32;
    for (u32 i = id; i < E; i += THREADS) counts[i] = 0;
    let_successor_start();
    wait_for_predecessor();
    __syncthreads();
    const u32 tokens = live ? min(*live, most) : most, all = tokens * TOP;
    for (u32 at = id; at < all; at += THREADS * BATCH) {
        u32 e[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) e[b] = at + b * THREADS < all ? ids[at + b * THREADS] : E;
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            if (e[b] < E) atomicAdd(counts + e[b], 1);
    }
    __syncthreads();
    const u32 count = id < E ? counts[id] : 0;
    u32 total, used;
    const u32 first = sum_before(count, room, total);
    // An expert's assignments are dealt evenly to as few tasks as hold them.
    const u32 tiles = (count + TILE - 1) / TILE, wide = tiles ? ((count + tiles - 1) / tiles + 7) / 8 * 8 : 0;
    const u32 task = sum_before(tiles, room, used);
    if (id < E) {
        base[id] = first;
        plan.counts[id] = count;
        plan.offsets[id] = first;
        for (u32 t = 0; t < tiles; t++) plan.tasks[task + t] = {(int)id, first + t * wide, min(count - t * wide, wide), tiles};
    }
    for (u32 i = id; i < plan.most_tasks; i += THREADS) {
        plan.ready[i] = 0;
        if (i >= used) plan.tasks[i] = {-1, 0, 0, 0};
    }
    if (id == 0) plan.offsets[E] = total, plan.head[0] = used;

    for (u32 top = 0; top < tokens; top += CHUNK) {
        const u32 here = min(tokens - top, (u32)CHUNK) * TOP, words = (here / TOP + 31) / 32;
        __syncthreads();
        for (u32 i = id; i < E * words; i += THREADS) bits[i / words * (WORDS + 1) + i % words] = 0;
        __syncthreads();
        for (u32 at = id; at < here; at += THREADS) {
            const u32 e = ids[top * TOP + at], token = at / TOP;
            atomicOr(bits + e * (WORDS + 1) + token / 32, 1u << token % 32);
        }
        __syncthreads();
        for (u32 e = warp; e < E; e += THREADS / 32) {
            u32 sum = base[e];
            __syncwarp();
            for (u32 w = 0; w < words; w += 32) {
                const u32 own = w + lane < words ? __popc(bits[e * (WORDS + 1) + w + lane]) : 0;
                u32 up_to = own;
#pragma unroll
                for (int o = 1; o < 32; o *= 2) {
                    const u32 got = __shfl_up_sync(FULL, up_to, o);
                    if (lane >= o) up_to += got;
                }
                if (w + lane < words) before[e * (WORDS + 2) + w + lane] = (u16)(sum - base[e] + up_to - own);
                sum += __shfl_sync(FULL, up_to, 31);
            }
            if (lane == 0) counts[e] = sum;
        }
        __syncthreads();
        for (u32 at = id; at < here; at += THREADS) {
            const u32 e = ids[top * TOP + at], token = at / TOP, word = token / 32;
            const u32 to = base[e] + before[e * (WORDS + 2) + word] + __popc(bits[e * (WORDS + 1) + word] & ((1u << token % 32) - 1));
            plan.rows[to] = top * TOP + at;
            plan.gains[to] = weights[top * TOP + at];
        }
        __syncthreads();
        for (u32 i = id; i < E; i += THREADS) base[i] = counts[i];
    }
}
