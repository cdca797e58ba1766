// From the experts of each token to what the products need, in one block: how many tokens an expert has and where they
// begin, its assignments (token · TOP + slot) in the order of tokens with their weights, and tasks: an expert and up to TILE of its
// assignments. Warps take neighbouring stretches of assignments, count them, and place them behind those of the
// warps before: the order never depends on timing, and no expert has a limit. The task list has a fixed length;
// entries that are not used have expert −1.
//
// E (≤ 1024), TOP, TILE.
#include "prelude.cuh"

#define WARPS 32
// Assignments that a lane has on their way at once.
#define BATCH 4

struct alignas(16) Task {
    int expert;
    u32 first, count, tiles;
};

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

extern "C" __global__ void __launch_bounds__(WARPS * 32)
experts_plan(const u32* ids, const float* weights, const u32* live, u32 most, u32* counts, u32* offsets, u32* rows, float* gains, Task* tasks,
             u32* ready, u32* head, u32 most_tasks) {
    __shared__ u32 seen[WARPS][E];
    __shared__ u32 room[WARPS];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 i = threadIdx.x; i < WARPS * E; i += WARPS * 32) (&seen[0][0])[i] = 0;
    let_successor_start();
    wait_for_predecessor();
    __syncthreads();
    const u32 all = (live ? min(*live, most) : most) * TOP;
    const u32 stretch = (all + WARPS * 32 - 1) / (WARPS * 32) * 32, begin = min(warp * stretch, all), end = min(begin + stretch, all);

    // `pass` 0 counts, 1 places; E stands for no assignment.
    auto walk = [&](bool place) {
        for (u32 at = begin; at < end; at += 32 * BATCH) {
            u32 id[BATCH];
            float weight[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; b++) id[b] = at + b * 32 + lane < end ? ids[at + b * 32 + lane] : E, weight[b] = place && id[b] < E ? weights[at + b * 32 + lane] : 0.0f;
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                if (at + b * 32 >= end) break;
                const u32 same = __match_any_sync(FULL, id[b]), before = __popc(same & ((1u << lane) - 1));
                u32 first = 0;
                if (id[b] < E) first = seen[warp][id[b]];
                __syncwarp();
                if (id[b] < E) {
                    if (before == 0) seen[warp][id[b]] = first + __popc(same);
                    if (place) rows[first + before] = at + b * 32 + lane, gains[first + before] = weight[b];
                }
                __syncwarp();
            }
        }
    };
    walk(false);
    __syncthreads();
    u32 count = 0;
    if (threadIdx.x < E)
#pragma unroll 8
        for (u32 w = 0; w < WARPS; w++) {
            const u32 here = seen[w][threadIdx.x];
            seen[w][threadIdx.x] = count;
            count += here;
        }
    u32 total;
    const u32 first = sum_before(count, room, total);
    // An expert's assignments are dealt evenly to as few tasks as hold them.
    const u32 tiles = (count + TILE - 1) / TILE, wide = tiles ? ((count + tiles - 1) / tiles + 7) / 8 * 8 : 0;
    u32 used;
    const u32 task = sum_before(tiles, room, used);
    if (threadIdx.x < E) {
#pragma unroll 8
        for (u32 w = 0; w < WARPS; w++) seen[w][threadIdx.x] += first;
        counts[threadIdx.x] = count;
        offsets[threadIdx.x] = first;
        for (u32 t = 0; t < tiles; t++) {
            const u32 left = count - min(count, t * wide);
            tasks[task + t] = {(int)threadIdx.x, first + t * wide, min(left, wide), tiles};
        }
    }
    for (u32 i = threadIdx.x; i < most_tasks; i += WARPS * 32) {
        ready[i] = 0;
        if (i >= used) tasks[i] = {-1, 0, 0, 0};
    }
    if (threadIdx.x == 0) offsets[E] = total, head[0] = used;
    __syncthreads();
    walk(true);
}
