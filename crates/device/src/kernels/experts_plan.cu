// From the experts of each token to what the products need, in one launch: how many tokens an expert has and where they
// begin, its assignments (token · TOP + slot) in the order of tokens with their weights, and tasks: an expert and up to
// TILE of its assignments. A bit for each token and expert gives the order: an assignment comes after the bits before
// its own. Counts and bits are integers, so nothing depends on timing, and no expert has a limit. The task list has a
// fixed length; entries that are not used have expert −1. A cluster of SHARES blocks shares the tokens, each a stretch of them,
// and reads the others' counts: one block's scattered stores alone would take 110 µs for 8,192 tokens.
//
// E (to 512), SPREAD (the next power of two, 32 or more), TOP, TILE, SHARES (1, 2, 4, 8), CHUNK (256, 2048).
#include "experts_plan.cuh"

#define THREADS 1024
// CHUNK tokens have their bits in shared memory at once: so many assignments of a thread.
#define OWN ((CHUNK * TOP + THREADS - 1) / THREADS)
#define WORDS (CHUNK / 32)
// Threads that count an expert's bits, and words of each. An odd pitch keeps experts in different banks.
#define LANES (THREADS / SPREAD < WORDS ? THREADS / SPREAD : WORDS)
#define EACH (WORDS / LANES)
#define PITCH (WORDS + 1)

// The sums of `a` and `b` over the threads before this one, and over all; every thread of the block takes part.
DEVICE void sums_before(u32& a, u32& b, uint2* room, u32& all_a, u32& all_b) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 x = a, y = b;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        const u32 p = __shfl_up_sync(FULL, x, o), q = __shfl_up_sync(FULL, y, o);
        if (lane >= o) x += p, y += q;
    }
    if (lane == 31) room[warp] = make_uint2(x, y);
    __syncthreads();
    const uint2 of_warp = room[lane];
    all_a = __reduce_add_sync(FULL, of_warp.x);
    all_b = __reduce_add_sync(FULL, of_warp.y);
    a = __reduce_add_sync(FULL, lane < warp ? of_warp.x : 0) + x - a;
    b = __reduce_add_sync(FULL, lane < warp ? of_warp.y : 0) + y - b;
}

extern "C" __global__ void __launch_bounds__(THREADS)
experts_plan(const u32* choice, const u32* live, u32 most, PLAN_ARGUMENTS) {
    const Plan plan = PLAN;
    extern __shared__ u32 memory[];
    // [expert][word]: bits, and how many there are before the word.
    u32* bits = memory;
    u16* before = (u16*)(bits + E * PITCH);
    __shared__ u32 counts[E], base[E], own_counts[E];
    u32 rank = 0;
    if (SHARES > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    __shared__ uint2 room[THREADS / 32];
    const u32 id = threadIdx.x;
    for (u32 i = id; i < E; i += THREADS) counts[i] = 0;
    for (u32 i = id; i < E * PITCH; i += THREADS) bits[i] = 0;
    let_successor_start();
    wait_for_predecessor();
    __syncthreads();
    const u32 tokens = live ? min(*live, most) : most;
    // This block's tokens.
    const u32 stretch = (tokens + SHARES - 1) / SHARES, begin = min(rank * stretch, tokens), end = min(begin + stretch, tokens);
    u32 e[OWN];
    auto load = [&](u32 top) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const u32 within = i * THREADS + id, at = top * TOP + within;
            const bool own = (CHUNK * TOP % THREADS == 0 || within < CHUNK * TOP) && at < end * TOP;
            e[i] = own ? choice[at / TOP * 2 * TOP + at % TOP] : E;
        }
    };
    // Sets the bits of the tokens in e[], and leaves how many each expert has before each word in `before`.
    auto mark = [&]() {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const u32 token = (i * THREADS + id) / TOP;
            if (e[i] < E) atomicOr(bits + e[i] * PITCH + token / 32, 1u << token % 32);
        }
        __syncthreads();
        const u32 expert = id / LANES, first = id % LANES * EACH;
        u32 up_to[EACH], sum = 0;
#pragma unroll
        for (int w = 0; w < EACH; w++) up_to[w] = sum, sum += expert < E ? __popc(bits[expert * PITCH + first + w]) : 0;
        u32 scan = sum;
#pragma unroll
        for (int o = 1; o < LANES; o *= 2) {
            const u32 got = __shfl_up_sync(FULL, scan, o, LANES);
            if (id % LANES >= o) scan += got;
        }
#pragma unroll
        for (int w = 0; w < EACH && expert < E; w++) before[expert * PITCH + first + w] = (u16)(scan - sum + up_to[w]);
        if (id % LANES == LANES - 1 && expert < E) counts[expert] = scan;
        __syncthreads();
    };

    // Counts first: from the bits if one chunk holds all.
    const bool once = stretch <= CHUNK;
    if (once) {
        load(begin);
        mark();
    } else {
        for (u32 top = begin; top < end; top += CHUNK) {
            load(top);
#pragma unroll
            for (int i = 0; i < OWN; i++)
                if (e[i] < E) atomicAdd(counts + e[i], 1);
        }
        __syncthreads();
    }
    u32 count = id < E ? counts[id] : 0, earlier = 0;
    if (SHARES > 1) {
        // Counts of later chunks go to `counts`: the others read a copy.
        if (id < E) own_counts[id] = count;
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
        count = 0;
#pragma unroll
        for (u32 r = 0; r < SHARES; r++) {
            u32 got = 0;
            if (id < E)
                asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.u32 %0, [there];\n}"
                             : "=r"(got) : "r"(shared_address(own_counts + id)), "r"(r) : "memory");
            count += got;
            if (r < rank) earlier += got;
        }
    }
    // An expert's assignments are divided evenly among as few tasks as can hold them.
    const u32 tiles = (count + TILE - 1) / TILE, wide = tiles ? ((count + tiles - 1) / tiles + 7) / 8 * 8 : 0;
    u32 first = count, task = tiles, total, used;
    sums_before(first, task, room, total, used);
    if (id < E) base[id] = first + earlier;
    if (id < E && rank == 0) {
        plan.counts[id] = count;
        plan.offsets[id] = first;
        for (u32 t = 0; t < tiles; t++) plan.tasks[task + t] = {(int)id, first + t * wide, min(count - t * wide, wide), tiles};
    }
    for (u32 i = id; rank == 0 && i < plan.most_tasks; i += THREADS) {
        plan.ready[i] = 0;
        if (i >= used) plan.tasks[i] = {-1, 0, 0, 0};
    }
    if (id == 0 && rank == 0) plan.offsets[E] = total, plan.head[0] = used;
    const u32 chosen = __syncthreads_count(id < E && count);
    if (plan.load && rank == 0) {
        if (id < E && count) add_load(plan.load, id, count);
        if (id == 0) add_load(plan.load, E, chosen), add_load(plan.load, E + 1, 1);
    }
    for (u32 top = begin; top < end; top += CHUNK) {
        if (!once) {
            load(top);
            mark();
        }
        float weight[OWN];
#pragma unroll
        for (int i = 0; i < OWN; i++)
            if (e[i] < E) {
                const u32 at = top * TOP + i * THREADS + id;
                weight[i] = __uint_as_float(choice[at / TOP * 2 * TOP + TOP + at % TOP]);
            }
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            if (e[i] >= E) continue;
            const u32 token = (i * THREADS + id) / TOP, word = e[i] * PITCH + token / 32;
            const u32 to = base[e[i]] + before[word] + __popc(bits[word] & ((1u << token % 32) - 1));
            plan.rows[to] = top * TOP + i * THREADS + id;
            plan.gains[to] = weight[i];
            plan.place[top * TOP + i * THREADS + id] = to;
        }
        if (once) break;
        __syncthreads();
        for (u32 i = id; i < E; i += THREADS) base[i] += counts[i];
        for (u32 i = id; i < E * PITCH; i += THREADS) bits[i] = 0;
        __syncthreads();
    }
    // A block must not exit while others read its counts.
    if (SHARES > 1) asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
