// Both products of a layer of experts, in one launch: act = silu(x · gateᵀ) · (x · upᵀ) for each assignment of a token
// to an expert, then parts = gain · (act · downᵀ). Weights are the 64-row operand of the warpgroup product and an
// expert's tokens the columns, so that few tokens waste nothing. Tokens are read where they are.
//
// A unit is UP_WIDE or DOWN_WIDE weight rows of one product times the tokens of one task (experts_plan.cu). Blocks stay,
// and each has its list of units, first of gate/up, then of down. One thread copies weights, COPIERS others copy
// tokens: a down unit's weights are loaded while its tokens are still being computed. The last gate/up unit of a task
// is known by a count in `ready`. A block's gate/up units all come before its first down unit, so some block can always
// continue, provided that all blocks are resident: the grid must not be larger than what the GPU holds at once.
//
// Gate and up rows lie in turns of eight, so that a thread has both sums of an output.
//
// H, I (multiples of 64), TOP, what experts_gate.cuh wants, UP_WIDE, DOWN_WIDE (multiples of 16, to 256, that divide 2 · I and H), TILE (most tokens of
// a task), STAGES, DEPTH (divides I / 64 and H / 64), PHASES (1 gate/up, 2 down, 3 both), PASS (weights are read once: do not
// keep them in L2), COPIERS (8, 16, 32, 64, 96: as few as keep up), GATHERED (tokens of gate/up lie in the order of the
// plan's rows), CLUSTER (1; 2 if GATHERED: blocks copy tokens for each other). The task list has 16 entries or more.
//
// WEIGHT (weights.cuh): PLAIN, or FP8_BLOCK: gate/up as F8Turns, down as F8Block, H and I multiples of 128, DEPTH 2. Tokens and
// what lies between the two GEMMs are bf16. BYTES 0: weights are widened in registers (experts_scaled.cuh). BYTES 1: those who
// copy tokens make them e4m3, with a scale for 128 columns of each (experts_bytes.cuh; COPIERS 32, 64, 96, TILE to 128, no GATHERED).
// FP4_GROUP: pieces of MXFP4 (experts_fp4.cuh; TILE to 128, no GATHERED).
#include "experts_gate.cuh"
#include "experts_plan.cuh"
#include "fp4.cuh"
#include "weights.cuh"
#include "wgmma_scaled.cuh"

#define WIDE (((UP_WIDE > DOWN_WIDE ? UP_WIDE : DOWN_WIDE) + 63) / 64 * 64)
#define GROUPS (WIDE / 64)
#define WORKERS (GROUPS * 128)
#define THREADS (WORKERS + 128)
#define WEIGHT_BYTES (WIDE * 128)
#define TOKEN_BYTES (TILE * 128)
// A stage has DEPTH times 64 of the inner dimension: weights of each (bytes: of each two), then tokens of each.
#ifndef BYTES
#define BYTES 0
#endif
#define WEIGHT_TILES (FP8 ? DEPTH / 2 : DEPTH)
#if FP4
// Pieces of 16 rows × 64; tokens are swizzled, in units of 1,024 bytes.
#define TOKENS_AT (((UP_WIDE > DOWN_WIDE ? UP_WIDE : DOWN_WIDE) / 16 * DEPTH * FP4_PIECE + 1023) / 1024 * 1024)
#else
#define TOKENS_AT (WEIGHT_TILES * WEIGHT_BYTES)
#endif
#define STAGE_BYTES (TOKENS_AT + (BYTES ? DEPTH / 2 : DEPTH) * TOKEN_BYTES)
// Units of a task.
#define UP_UNITS (2 * I / UP_WIDE)
#define DOWN_UNITS (H / DOWN_WIDE)
// Tokens of a tensor copy.
#define BOX (TILE < 64 ? TILE : 64)
// Down units in the time of one of gate/up.
#define RATIO ((H * UP_WIDE + I * DOWN_WIDE / 2) / (I * DOWN_WIDE))
// Tokens whose addresses a copying thread holds.
#define OWN ((TILE + COPIERS - 1) / COPIERS)
#define MOVED (FP8 ? TILE >= 64 && GROUPS <= 2 && !BYTES : TILE > 128)
// Tokens whose weights a thread of a warpgroup loads.
#define EACH ((TILE + 127) / 128)

struct alignas(64) Map {
    u64 words[16];
};
DEVICE u32 rank_in_cluster() {
    u32 r = 0;
    if (CLUSTER > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
// To the same place in both blocks of the cluster.
DEVICE void copy_to_both(u32 to, const void* map, u32 x, u32 y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier), "h"((u16)3) : "memory");
}
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE void copiers_meet() {
    if (COPIERS > 32) asm volatile("bar.sync 15, %0;" ::"n"(COPIERS) : "memory");
    else __syncwarp(COPIERS < 32 ? (1u << COPIERS % 32) - 1 : FULL);
}
// Arrivals that free a stage: of a warpgroup, or of a warp where it reads weights itself.
#define BY_WARP (FP8 || FP4)
#define RELEASES (GROUPS * (BY_WARP ? 4 : 1) * CLUSTER)
// A stage is free in this block; a cluster's blocks copy for each other, and all have to know.
DEVICE void release(u32 empty) {
    const u32 within = threadIdx.x % (BY_WARP ? 32 : 128);
    if (BY_WARP) __syncwarp();
    if (CLUSTER == 1) {
        if (within == 0) barrier_arrive(empty);
    } else if (within < CLUSTER)
        asm volatile(
            "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
            "mbarrier.arrive.shared::cluster.b64 _, [there];\n}"
            ::"r"(empty), "r"(within) : "memory");
}

// A block's units in order. Blocks with a gate/up unit less than others get RATIO down units more. The next unit's
// task is read while this one is worked on.
struct Units {
    const Task* tasks;
    u32 up, down, turn, at, next_at;
    bool is_down, next_is_down;
    Task task, next_task;
    DEVICE Units(const Task* tasks, u32 count)
        : tasks(tasks), up(PHASES & 1 ? count * (UP_UNITS / CLUSTER) : 0), down(PHASES & 2 ? count * (DOWN_UNITS / CLUSTER) : 0),
          turn(0), next_is_down(false) {
        next_task = tasks[first_task()];
        next_at = find();
        if (next_at != FULL && next_at / per_task(next_is_down) != first_task()) read();
    }
    // The first unit's task, if it is one of gate/up: read without waiting for the count. The list is long enough.
    DEVICE u32 first_task() const { return PHASES & 1 ? blockIdx.x / CLUSTER / per_task(false) : 0; }
    DEVICE void read() { next_task = tasks[next_at / per_task(next_is_down)]; }
    DEVICE void look_ahead() {
        next_at = find();
        if (next_at != FULL) read();
    }
    DEVICE u32 find() {
        const u32 blocks = gridDim.x / CLUSTER, b = blockIdx.x / CLUSTER;
        if (!next_is_down) {
            const u32 i = b + turn++ * blocks;
            if (i < up) return i;
            next_is_down = true, turn = 0;
        }
        const u32 rest = up % blocks, spare = rest ? blocks - rest : 0, more = rest && b >= rest ? RATIO : 0;
        const u32 i = turn < more ? b - rest + turn * spare : spare * RATIO + b + (turn - more) * blocks;
        turn++;
        return i < down ? i : FULL;
    }
    DEVICE bool next() {
        at = next_at, is_down = next_is_down, task = next_task;
        if (at == FULL) return false;
        look_ahead();
        return true;
    }
    // A cluster's blocks have neighbouring weight rows.
    static DEVICE u32 per_task(bool down) { return (down ? DOWN_UNITS : UP_UNITS) / CLUSTER; }
    DEVICE u32 number() const { return at / per_task(is_down); }
    DEVICE u32 tile() const { return at % per_task(is_down) * CLUSTER + rank_in_cluster(); }
    // Stages of a unit.
    DEVICE u32 chunks() const { return (is_down ? I : H) / (64 * DEPTH); }
};

struct Ring {
    u32 base, full, empty, stage, phase;
    DEVICE void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    DEVICE u32 at() const { return base + stage * STAGE_BYTES; }
};

DEVICE void copy_weights(Ring ring, Units units, const Map* up, const Map* down) {
    const u64 policy = PASS ? pass_policy() : keep_policy();
    while (units.next()) {
        const u32 expert = (u32)units.task.expert;
        const Map* map = units.is_down ? down : up;
        const u32 row = expert * (units.is_down ? H : 2 * I) + units.tile() * (units.is_down ? DOWN_WIDE : UP_WIDE);
        const u32 bytes = (units.is_down ? DOWN_WIDE : UP_WIDE) * (FP4 ? 34 : 128);
        for (u32 chunk = 0; chunk < units.chunks(); chunk++) {
            barrier_wait(ring.empty + 8 * ring.stage, ring.phase);
            barrier_expect(ring.full + 8 * ring.stage, WEIGHT_TILES * bytes);
            if (FP4) tensor_copy(ring.at(), map, 0, chunk * DEPTH, row / 16, ring.full + 8 * ring.stage, policy);
#pragma unroll
            for (int d = 0; d < (FP4 ? 0 : WEIGHT_TILES); d++)
                tensor_copy(ring.at() + d * WEIGHT_BYTES, map, (chunk * WEIGHT_TILES + d) * (FP8 ? 128 : 64), row, ring.full + 8 * ring.stage, policy);
            ring.advance();
        }
    }
}

// By COPIERS threads. Tokens of gate/up lie apart (unless GATHERED): pieces of 16 bytes, in the order that a tensor copy
// would leave.
DEVICE void copy_tokens(Ring ring, Units units, u32 (&from)[TILE], const u16* x, u32 x_stride, const u32* rows, const u32* ready,
                        const Map* gathered, const Map* act) {
    const u32 id = threadIdx.x - WORKERS - 32, piece = id % 8;
    const u64 keep = keep_policy();
    u32 ahead[OWN];
    auto look_ahead = [&]() {
#pragma unroll
        for (int i = 0; i < OWN; i++)
            if (!GATHERED && units.next_at != FULL && !units.next_is_down && i * COPIERS + id < units.next_task.count)
                ahead[i] = rows[units.next_task.first + i * COPIERS + id];
    };
    look_ahead();
    while (units.next()) {
        const Task task = units.task;
        const u32 boxes = (task.count + BOX - 1) / BOX;
        const bool whole = GATHERED || units.is_down;
        if (units.is_down && PHASES == 3 && id == 0) {
            u32 seen;
            do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(ready + units.number()) : "memory");
            while (seen < UP_UNITS * GROUPS);
            asm volatile("fence.proxy.async.global;" ::: "memory");
        }
        if (!whole) {
            copiers_meet();
#pragma unroll
            for (int i = 0; i < OWN; i++)
                if (i * COPIERS + id < task.count) from[i * COPIERS + id] = ahead[i] / TOP * x_stride;
            copiers_meet();
        }
        look_ahead();
        for (u32 chunk = 0; chunk < units.chunks(); chunk++) {
            const u32 barrier = ring.full + 8 * ring.stage, to = ring.at() + TOKENS_AT;
            if (whole && id) break;
            barrier_wait(ring.empty + 8 * ring.stage, ring.phase);
            if (whole) {
                // For the other copiers.
                asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(COPIERS - 1) : "memory");
                barrier_expect(barrier, DEPTH * boxes * BOX * 128);
                // Blocks of a cluster copy every CLUSTER-th box, for all of them.
                for (u32 i = rank_in_cluster(); i < boxes; i += CLUSTER) {
                    const Map* map = units.is_down ? act : gathered;
#pragma unroll
                    for (int d = 0; d < DEPTH; d++) {
                        const u32 at = to + d * TOKEN_BYTES + i * BOX * 128, column = (chunk * DEPTH + d) * 64;
                        if (CLUSTER == 1) tensor_copy(at, map, column, task.first + i * BOX, barrier, keep);
                        else copy_to_both(at, map, column, task.first + i * BOX, barrier);
                    }
                }
            } else {
#pragma unroll 4
                for (u32 row = id / 8; row < task.count; row += COPIERS / 8)
#pragma unroll
                    for (int d = 0; d < DEPTH; d++)
                        copy16_async(to + d * TOKEN_BYTES + row * 128 + ((piece ^ row % 8) << 4), x + (u64)from[row] + (chunk * DEPTH + d) * 64 + piece * 8);
                asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
            }
            ring.advance();
        }
    }
}

// The tokens of a task, for the epilogue of a warpgroup.
struct Tokens {
    float gain[TILE];
    u32 slot[TILE];
};

// A product of few columns waits for the one before it: several sums take turns.
#ifndef SETS
#define SETS (FP8 || FP4 ? (TILE <= 32 && !BYTES ? 2 : 1) : TILE <= 32 ? 4 : TILE <= 64 ? 2 : 1)
#endif

#if FP4
#include "experts_fp4.cuh"
#elif WEIGHT != PLAIN
#include "experts_scaled.cuh"
#if BYTES
#include "experts_bytes.cuh"
#endif
#else
// The sums over the inner dimension, for the first M_ columns.
template <int M_> DEVICE void multiply(float* c, Ring& ring, u32 chunks) {
    const u32 group = __shfl_sync(FULL, threadIdx.x / 128, 0);
    u32 previous = ring.stage;
#pragma unroll 1
    for (u32 chunk = 0; chunk < chunks; chunk++) {
        barrier_wait(ring.full + 8 * ring.stage, ring.phase);
        // Tokens may have come by plain copies. A fence for all memory would wait for that as well: 400 ns.
        if (!GATHERED) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        const u64 a = swizzled_tile(ring.at() + group * 8192), b = swizzled_tile(ring.at() + DEPTH * WEIGHT_BYTES);
        product_begin();
#pragma unroll
        for (int k = 0; k < 4 * DEPTH; k++)
            Wgmma<BF16, M_>::add(*(float(*)[M_ / 2])(c + k % SETS * (M_ / 2)), a + k / 4 * (WEIGHT_BYTES / 16) + k % 4 * 2,
                                   b + k / 4 * (TOKEN_BYTES / 16) + k % 4 * 2, chunk > 0 || k >= SETS);
        product_commit();
        // The product before this one is done: its stage can be filled again.
        product_wait<1>();
        if (chunk > 0) release(ring.empty + 8 * previous);
        previous = ring.stage;
        ring.advance();
    }
    product_wait<0>();
    release(ring.empty + 8 * previous);
}
#define SCALES_PARAMETERS
#define SCALES
#define SCALES_OF_UNIT
#endif

// The last arguments of `multiply`.
#ifndef MULTIPLY
#define MULTIPLY SCALES
#endif

// The sums of this warpgroup's 64 weight rows and TILE columns, of which task.count are tokens.
DEVICE void unit(Ring& ring, const Units& units, Tokens& tokens, const u32* rows, const float* gains, u16* act, u16* parts SCALES_OF_UNIT
                 UP_BIAS_PARAMETER DOWN_BIAS_PARAMETER) {
    const Task& task = units.task;
    const u32 group = __shfl_sync(FULL, threadIdx.x / 128, 0), within = threadIdx.x % 128;
    const u32 warp = within / 32, lane = within % 32, g = lane / 4, j = lane % 4;
    // Loaded while the MMAs run.
    u32 slots[EACH];
    float mine[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (units.is_down && i * 128 + within < task.count) {
            slots[i] = rows[task.first + i * 128 + within];
            mine[i] = gains[task.first + i * 128 + within];
        }
    // Of gate row g and up row g of the sixteen that the warp has, or of two rows of down.
    const bool own = group * 64 + warp * 16 < (units.is_down ? DOWN_WIDE : UP_WIDE);
#if defined(UP_BIAS) || defined(DOWN_BIAS)
    float low_bias = 0.0f, high_bias = 0.0f;
    const u32 first = task.expert * (units.is_down ? H : 2 * I) + units.tile() * (units.is_down ? DOWN_WIDE : UP_WIDE) + group * 64 + warp * 16 + g;
    if (own && units.is_down) low_bias = BIAS_OF_DOWN(first), high_bias = BIAS_OF_DOWN(first + 8);
    if (own && !units.is_down) low_bias = BIAS_OF_UP(first), high_bias = BIAS_OF_UP(first + 8);
#endif
    float c[SETS * TILE / 2];
    const u32 chunks = __shfl_sync(FULL, units.chunks(), 0), columns = __shfl_sync(FULL, task.count, 0);
    if (FP4 && TILE == 48 && columns <= 32) multiply<FP4 ? 32 : TILE>(c, ring, chunks MULTIPLY);
    else if (FP4 && TILE == 48 && columns <= 40) multiply<FP4 ? 40 : TILE>(c, ring, chunks MULTIPLY);
    else if (TILE > 128 && columns <= 64) multiply<64>(c, ring, chunks MULTIPLY);
    else if (TILE > 128 && columns <= 128) multiply<128>(c, ring, chunks MULTIPLY);
    else if (TILE > 192 && columns <= 192) multiply<192>(c, ring, chunks MULTIPLY);
    else multiply<TILE>(c, ring, chunks MULTIPLY);
#pragma unroll
    for (int s = 1; s < SETS; s++)
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) c[i] += c[s * (TILE / 2) + i];
#if FP4
#pragma unroll
    for (int i = 0; i < TILE / 2; i++) c[i] *= FP4_SMALLER;
#elif WEIGHT != PLAIN && !BYTES
#pragma unroll
    for (int i = 0; i < TILE / 2; i++) c[i] *= i % 4 < 2 ? scales.last.x : scales.last.y;
#endif
#if defined(UP_BIAS) || defined(DOWN_BIAS)
#pragma unroll
    for (int i = 0; i < TILE / 2; i++) c[i] += i % 4 < 2 ? low_bias : high_bias;
#endif
    if (!units.is_down) {
        u16* to = act + (u64)task.first * I + units.tile() * (UP_WIDE / 2) + group * 32 + warp * 8 + 2 * j;
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
            const float* v = c + 4 * n;
            const u32 pair = transpose_8x8(pack_bf16(gated(v[0], v[2]), gated(v[1], v[3])));
            if (n * 8 + g < task.count && own) *(u32*)(to + (u64)(n * 8 + g) * I) = pair;
        }
        // Another block's tensor copies read this.
        if (PHASES == 3) {
            asm volatile("fence.proxy.async.global;" ::: "memory");
            asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (i * 128 + within < task.count) tokens.slot[i * 128 + within] = slots[i], tokens.gain[i * 128 + within] = mine[i];
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
    u16* to = parts + units.tile() * DOWN_WIDE + group * 64 + warp * 16 + 4 * j;
#pragma unroll
    for (int n = 0; n < TILE / 8; n++) {
        if (n * 8 >= task.count) break;
        const float* v = c + 4 * n;
        const float2 w = *(const float2*)(tokens.gain + n * 8 + 2 * j);
        const u32 low = transpose_8x8(pack_bf16(v[0] * w.x, v[1] * w.y)), high = transpose_8x8(pack_bf16(v[2] * w.x, v[3] * w.y));
        // A lane has columns 2j, 2j + 1 and those + 8 of token g, and gets 4j to 4j + 3.
        const u32 from = (lane & ~3u) | (2 * j & 3);
        const u32 a = __shfl_sync(FULL, low, from), b = __shfl_sync(FULL, low, from + 1);
        const u32 d = __shfl_sync(FULL, high, from), e = __shfl_sync(FULL, high, from + 1);
        if (n * 8 + g < task.count && own)
            *(uint2*)(to + (u64)tokens.slot[n * 8 + g] * H) = j < 2 ? make_uint2(a, b) : make_uint2(d, e);
    }
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
experts(const __grid_constant__ Map up_map, const __grid_constant__ Map down_map, const __grid_constant__ Map x_map,
        const __grid_constant__ Map act_map, const u16* x, const Task* tasks, const u32* head, const u32* rows,
        const float* gains, u32* ready, u16* act, u16* parts, u32 x_stride SCALES_PARAMETERS UP_BIAS_PARAMETER DOWN_BIAS_PARAMETER) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ u8 memory[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    __shared__ __align__(8) Tokens tokens[GROUPS];
#if BYTES
    __shared__ __align__(16) float x_scales[STAGES][TILE];
#else
    __shared__ u32 from[TILE];
#endif
    Ring ring;
    ring.base = __shfl_sync(FULL, (shared_address(memory) + 1023) & ~1023u, 0);
    ring.full = __shfl_sync(FULL, shared_address(barriers), 0), ring.empty = ring.full + 8 * STAGES;
    ring.stage = 0;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(ring.full + 8 * s, 1 + COPIERS);
            barrier_init(ring.empty + 8 * s, RELEASES);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (CLUSTER > 1) cluster_sync();
    else __syncthreads();
    let_successor_start();
    wait_for_predecessor();
    const u32 count = __ldcg(head);
    const u32 group = __shfl_sync(FULL, threadIdx.x / 128, 0);
    if (group == GROUPS) {
        if (MOVED) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        ring.phase = 1;
        const u32 warp = __shfl_sync(FULL, threadIdx.x / 32, 0) - GROUPS * 4;
        if (warp == 0 && threadIdx.x % 32 == 0) copy_weights(ring, Units(tasks, count), &up_map, &down_map);
        if (threadIdx.x - WORKERS - 32 < COPIERS) {
#if BYTES
            copy_tokens_as_bytes(ring, Units(tasks, count), x_scales, x, x_stride, rows, ready, act);
#else
            asm volatile("fence.proxy.async;" ::: "memory");
            copy_tokens(ring, Units(tasks, count), from, x, x_stride, rows, ready, &x_map, &act_map);
#endif
        }
    } else {
        if (MOVED) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        ring.phase = 0;
        Units units(tasks, count);
#if FP8
        Scales scales(units, up_scales, down_scales);
#if BYTES
        scales.of_tokens = shared_address(x_scales);
#endif
#endif
        while (units.next()) {
            unit(ring, units, tokens[group], rows, gains, act, parts SCALES UP_BIAS_ARGUMENT DOWN_BIAS_ARGUMENT);
            if (PHASES == 3 && !units.is_down && threadIdx.x % 128 == 0) {
                __threadfence();
                asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(ready + units.number()) : "memory");
            }
        }
    }
    // A block must not exit while the other one still writes to its shared memory.
    if (CLUSTER > 1) {
        __syncwarp();
        cluster_sync();
    }
#endif
}
