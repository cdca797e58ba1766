// y = epilogue(x · wᵀ + bias) for a batch on Hopper. Weights are the 64-row operand of the warpgroup MMA and tokens
// the columns, so that a small batch wastes nothing. One thread copies tiles (WIDE weight rows × 64, and COLUMNS
// tokens × 64) into a ring, its first weights before the wait for the predecessor; WIDE/64 warpgroups run MMA. Tiles
// of 48 rows use an MMA of 64 rows and ignore the last 16. When there are fewer tiles than multiprocessors, SPLIT
// blocks of a cluster share a tile's K: each writes its sums to its own shared memory, and each of them adds up and
// stores a part of the result, always in the same order.
//
// A norm between two linears needs no launch: the first (PRODUCES) also stores y times the norm's weights, and the
// squares of y summed over each 64 columns; the second (CONSUMES) reads those and applies the rows' scales to its sums.
//
// K, N, ROWS, WIDE (48, 64, 128, 192), COLUMNS (a multiple of 8, beyond 128 of 16, to 256), STAGES, SPLIT, TYPE (of
// x, w), BT, RT, YT, BIAS, LIVE, EPILOGUE (0 store, 1 residual, 2 silu·mul, 4 gelu·mul), AFTER (prelude.cuh), PAIRS (residuals can be
// loaded by twos), PRODUCES, CONSUMES. K is a multiple of 64; with SPLIT > 1 there is one tile per cluster. PRODUCES:
// EPILOGUE 1, bf16, N a multiple of 256, whole warpgroups; CONSUMES: K a multiple of 256, one tile of tokens.
//
// Many tokens, plain weights, SPLIT 1: with EVEN tiles of tokens past the live ones are not computed, and blocks end in the same round.
//
// With scales (WEIGHT: weights.cuh; WIDE a multiple of 64, K of 128 · SPLIT) a chunk is 128 columns, and its sums are
// scaled and added to those before. x is bf16, and weights are widened in registers (COLUMNS up to 128); or (BYTES) x is
// e4m3 as `quantize.cu` writes it, with scales [K / 128][s_stride], s_stride at least all tiles' tokens. TURNS: as many sets of
// warpgroups take turns with the chunks of a tile, so that one converts and scales while another multiplies. LEAN (int4): a chunk is
// widened in halves while MMAs run, and its pieces are one tensor copy. ORDERED (BYTES, one set of sums, no TURNS): below.
#include "pairs.cuh"
#include "weights.cuh"
#include "wgmma_scaled.cuh"

#ifndef BYTES
#define BYTES 0
#endif
#ifndef ADAPTERS
#define ADAPTERS 0
#endif
#ifndef EVEN
#define EVEN 0
#endif
// Weights are widened in registers.
#define MIXED (WEIGHT != PLAIN && !BYTES)
#define CHUNK (WEIGHT == PLAIN ? 64 : 128)
#ifndef TURNS
#define TURNS 1
#endif
#ifndef LEAN
#define LEAN 0
#endif

// Warpgroups with rows of their own, and all of them.
#define GROUPS ((WIDE + 63) / 64)
#define WARPGROUPS (GROUPS * TURNS)
#define WORKERS (WARPGROUPS * 128)
// Three warpgroups with more than 160 tokens each, and sums with scales, need registers from the one that copies.
#define MOVED (WEIGHT == PLAIN ? GROUPS == 3 && COLUMNS > 160 : WARPGROUPS > 1)
// What a thread has then, and what one of the warpgroup that copies has.
#define REGISTERS (WARPGROUPS == 4 ? 112 : WARPGROUPS == 3 ? 160 : 232)
#define COPY_REGISTERS (WARPGROUPS >= 3 ? 32 : 40)
// Warps that work on adapters. Beside three warpgroups they need registers from the warpgroup that copies, too.
#define HELPERS (ADAPTERS == 0 ? 0 : GROUPS == 3 ? 8 : 3)
#define HELPED (ADAPTERS && GROUPS == 3)
#define HELPER_REGISTERS 104
#define FIRST_HELPER (MOVED || HELPED ? WORKERS + 128 : WORKERS + 32)
#define THREADS (FIRST_HELPER + 32 * HELPERS)
// A narrow tile with adapters leaves half of the registers to another kernel's blocks.
#define RESIDENT (ADAPTERS && WIDE <= 64 ? 2 : 1)
// One MMA of that many columns needs more registers than a thread of four warpgroups has at launch: use two halves.
#define EACH ((WEIGHT == PLAIN && MOVED) || (BYTES && COLUMNS > 128) ? COLUMNS / 2 : COLUMNS)
// Pieces of 16 rows and 128 columns.
#define PIECE_128 (PIECES_128 * PIECE)
#define WEIGHT_BYTES (INT4 ? (WIDE / 16 * PIECE_128 + 1023) / 1024 * 1024 : WIDE * 128)
#define TOKEN_BYTES (COLUMNS * 128)
#define STAGE_BYTES (WEIGHT_BYTES + (MIXED ? 2 : 1) * TOKEN_BYTES)
// Warps arrive one by one where they read a stage themselves.
#define RELEASES (WEIGHT == PLAIN ? GROUPS : GROUPS * 4)
// Registers for a second set of sums, so that MMAs run while the first is scaled.
#define DOUBLE (COLUMNS <= 64 || (COLUMNS <= 128 && GROUPS <= 2))
// Warpgroups begin their MMAs one after the other, so that one scales its sums while another multiplies.
#ifndef ORDERED
#define ORDERED 0
#endif
// Registers for widening the next chunk while MMAs run.
#ifndef AHEAD
#define AHEAD (GROUPS < 3 || COLUMNS <= 32)
#endif
#define TILES_N ((N + WIDE - 1) / WIDE)
// Tiles of tokens, and all tiles; with EVEN those of the live tokens.
#if EVEN
#define TILES_T across
#define TILES tiles
#else
#define TILES_T ((ROWS + COLUMNS - 1) / COLUMNS)
#define TILES (TILES_N * TILES_T)
#endif
// The last share may have fewer: columns past K are zeros.
#define CHUNKS ((K / CHUNK + SPLIT - 1) / SPLIT)
// Those of this warpgroup.
#define MINE (CHUNKS % TURNS == 0 ? CHUNKS / TURNS : (CHUNKS - turn + TURNS - 1) / TURNS)
// A tile's sums are finished in pieces of 16 weight rows × 8 tokens; how many a warp has.
#define OWNERS (WIDE / 16)
#define ALL_PIECES (OWNERS * (COLUMNS / 8))
// Each warp finishes its own sums.
#define ALONE (SPLIT == 1 && TURNS == 1)
#define PIECES (ALONE ? COLUMNS / 8 : (ALL_PIECES + SPLIT * WARPGROUPS * 4 - 1) / (SPLIT * WARPGROUPS * 4))
#define GATED (EPILOGUE == 2 || EPILOGUE == 4)
#if TURNS > 1
static_assert((BYTES || (MIXED && LEAN)) && TURNS <= CHUNKS && TURNS <= STAGES && !PRODUCES && !CONSUMES, "turns");
#endif
// Residuals are loaded while the MMAs run.
#define EARLY (EPILOGUE == 1 && PAIRS && YT != F32 && PIECES <= 16)
// Threads that add up the squares of a row.
#define ADDERS (WORKERS >= 32 * COLUMNS ? 32 : WORKERS >= 16 * COLUMNS ? 16 : WORKERS >= 8 * COLUMNS ? 8 : \
                WORKERS >= 4 * COLUMNS ? 4 : WORKERS >= 2 * COLUMNS ? 2 : 1)
// Loads of four sums per thread.
#define FOURS ((K + 256 * ADDERS - 1) / (256 * ADDERS))

struct alignas(64) Map {
    u64 words[16];
};

#include "linear_wgmma_finish.cuh"

// A warpgroup has read a stage.
DEVICE void release_stage(u32 barrier) {
    if (threadIdx.x % 128 == 0) barrier_arrive(barrier);
}

#if WEIGHT == PLAIN
#define SCALES_PARAMETERS
#define SCALES 0
#else
#define SCALES_PARAMETERS , const float* scales_of_w, const float* scales_of_x, const u8* w, u32 s_stride
#define SCALES scales_of_w
#endif

// The block scales of a tile for each warpgroup, for even and odd rows.
#define TABLE (GROUPS * 2 * CHUNKS)
#define TABLE_EACH ((TABLE + WORKERS - 1) / WORKERS)

#if WEIGHT != PLAIN
#include "linear_wgmma_scaled.cuh"
#endif

#if ADAPTERS
#include "linear_wgmma_adapters.cuh"
#define ADAPTERS_PARAMETERS                                                                                            \
    , const u16 *x, const u16 *a, const u16 *b, float *sums, u32 *counters, const u32 *token_row, const u32 *row_seat, \
        const u32 *params, u32 x_stride, u32 seat_rows, u32 seats, u32 by_row, u32 end0, u32 end1
#else
#define ADAPTERS_PARAMETERS
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
linear_wgmma(const __grid_constant__ Map x_map, const __grid_constant__ Map w_map, const void* bias,
             const void* residual, void* y, const u32* live, float* squares, const void* next_norm, void* prepared,
             u32 r_stride, u32 y_stride, float eps SCALES_PARAMETERS ADAPTERS_PARAMETERS) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ u8 memory[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    __shared__ __align__(8) float scales[CONSUMES ? COLUMNS : 1];
#if WEIGHT != PLAIN
    __shared__ float table[2][WEIGHT == FP8_BLOCK ? TABLE : 1];
    __shared__ __align__(16) float x_scales[BYTES ? STAGES : 1][BYTES ? COLUMNS : 4];
    const u32 x_scales_at = shared_address(x_scales);
    auto copy_weights = [&](u32 at, u32 chunk, u32 row, u32 barrier, u64 policy, const Map* map) {
        if (!INT4) return tensor_copy(at, map, chunk * CHUNK, row, barrier, policy);
#if LEAN
        tensor_copy(at, map, 0, chunk * PIECES_128, row / 16, barrier, policy);
#else
        for (u32 i = 0; i < WIDE / 16; i++)
            bulk_copy(at + i * PIECE_128, w + ((u64)min(row / 16 + i, N / 16 - 1u) * (K / SCALED) + chunk) * PIECE_128, PIECE_128, barrier, policy);
#endif
    };
    auto copy_tokens = [&](u32 at, u32 stage, u32 chunk, u32 token, u32 barrier, u64 policy, const Map* map) {
        tensor_copy(at, map, chunk * CHUNK, token, barrier, policy);
        if (MIXED) tensor_copy(at + TOKEN_BYTES, map, chunk * CHUNK + 64, token, barrier, policy);
        if (BYTES) bulk_copy(x_scales_at + stage * COLUMNS * 4, scales_of_x + (u64)chunk * s_stride + token, COLUMNS * 4, barrier, policy);
    };
    const u32 bytes = (INT4 ? WIDE / 16 * PIECE_128 : WEIGHT_BYTES) + (MIXED ? 2 * TOKEN_BYTES : TOKEN_BYTES) + (BYTES ? COLUMNS * 4 : 0);
#endif
    __shared__ float parts[PRODUCES ? GROUPS * 4 : 1][PRODUCES ? COLUMNS : 1];
    const u32 base = (shared_address(memory) + 1023) & ~1023u, full = shared_address(barriers), empty = full + 8 * STAGES;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if EVEN
    // `live` is the prologue's, which ends before any other kernel starts.
    const u32 across = max(((LIVE ? min(__ldcg(live), (u32)ROWS) : ROWS) + COLUMNS - 1) / COLUMNS, 1u);
    const u32 tiles = TILES_N * across, rounds = (tiles + gridDim.x - 1) / gridDim.x;
    const u32 share = 0, stride = (tiles + rounds - 1) / rounds, first = blockIdx.x < stride ? blockIdx.x : tiles;
#else
    const u32 share = blockIdx.x % SPLIT, first = blockIdx.x / SPLIT, stride = gridDim.x / SPLIT;
#endif
#if ADAPTERS
    __shared__ __align__(8) u64 helper_barriers[2];
    __shared__ AdaptersInUse use;
    const u32 known = shared_address(helper_barriers), room = known + 8;
#endif
    if (threadIdx.x == WORKERS) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&w_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
    }
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, RELEASES);
        }
#if ADAPTERS
        barrier_init(known, 1);
        barrier_init(room, 1);
#endif
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (warp >= WARPGROUPS * 4) {
#if ADAPTERS
        if (threadIdx.x >= FIRST_HELPER) {
            if (HELPED) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(HELPER_REGISTERS));
            const Adapters adapters = {x, a, b, sums, counters, token_row, row_seat, params, x_stride, seat_rows, seats, by_row, end0, end1};
            return help(adapters, use, LIVE ? min(__ldcg(live), (u32)ROWS) : ROWS, known, room, base, full);
        }
#endif
        if (MOVED || HELPED) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPY_REGISTERS));
        if (threadIdx.x != WORKERS) return;
        const u64 pass = EVEN ? normal_policy() : TILES_T == 1 ? pass_policy() : keep_policy(), keep = keep_policy();
        // The first stages: weights before the wait, tokens after it.
        u32 tile = first, chunk = 0;
        for (u32 s = 0; s < STAGES && tile < TILES; s++) {
#if WEIGHT == PLAIN
            barrier_expect(full + 8 * s, STAGE_BYTES);
            tensor_copy(base + s * STAGE_BYTES, &w_map, (share * CHUNKS + chunk) * 64, tile / TILES_T * WIDE, full + 8 * s, pass);
#else
            barrier_expect(full + 8 * s, bytes);
            copy_weights(base + s * STAGE_BYTES, share * CHUNKS + chunk, tile / TILES_T * WIDE, full + 8 * s, pass, &w_map);
#endif
            if (++chunk == CHUNKS) chunk = 0, tile += stride;
        }
        let_successor_start();
        wait_for_predecessor();
        asm volatile("fence.proxy.async;" ::: "memory");
        u32 stage = 0, phase = 1;
        bool again = false;
        for (tile = first; tile < TILES; tile += stride) {
            for (chunk = 0; chunk < CHUNKS; chunk++) {
                const u32 at = base + stage * STAGE_BYTES, barrier = full + 8 * stage, column = (share * CHUNKS + chunk) * (WEIGHT == PLAIN ? 64 : 1);
                if (again) {
                    barrier_wait(empty + 8 * stage, phase);
#if WEIGHT == PLAIN
                    barrier_expect(barrier, STAGE_BYTES);
                    tensor_copy(at, &w_map, column, tile / TILES_T * WIDE, barrier, pass);
                }
                tensor_copy(at + WEIGHT_BYTES, &x_map, column, tile % TILES_T * COLUMNS, barrier, keep);
#else
                    barrier_expect(barrier, bytes);
                    copy_weights(at, column, tile / TILES_T * WIDE, barrier, pass, &w_map);
                }
                copy_tokens(at + WEIGHT_BYTES, stage, column, tile % TILES_T * COLUMNS, barrier, keep, &x_map);
#endif
                if (++stage == STAGES) stage = 0, phase ^= 1, again = true;
            }
#if ADAPTERS
            // Stages that the helpers fill.
            if (any_adapter(use, known)) {
                for (int h = 0; h < HANDED; h++) {
                    if (again) barrier_wait(empty + 8 * stage, phase);
                    if (++stage == STAGES) stage = 0, phase ^= 1, again = true;
                }
                barrier_arrive(room);
            }
#endif
        }
        return;
    }

    if (MOVED) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#if WEIGHT == FP8_BLOCK
    // Scales are weights: the first tile's are read before the wait.
    for (u32 i = threadIdx.x; i < TABLE; i += WORKERS) table[0][i] = block_scale(SCALES, first / TILES_T * WIDE, share, i);
    u32 which = 0;
#endif
    wait_for_predecessor();
    const u32 group = TURNS == 1 ? warp / 4 : warp / 4 % GROUPS, turn = TURNS == 1 ? 0 : __shfl_sync(FULL, warp / 4 / GROUPS, 0), g = lane / 4, j = lane % 4;
    const Output o = {bias, residual, y, prepared, r_stride, y_stride, LIVE ? min(*live, (u32)ROWS) : ROWS, SCALES};
    if (CONSUMES) {
        // Squares are loaded while the first tokens are copied.
        const u32 row = threadIdx.x / ADDERS;
        float sum = 0.0f;
        float4 four[FOURS];
#pragma unroll
        for (int t = 0; t < FOURS; t++) {
            const u32 i = t * ADDERS + threadIdx.x % ADDERS;
            four[t] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (row < ROWS && i < K / 256) four[t] = __ldcg((const float4*)(squares + (u64)row * (K / 64)) + i);
        }
#pragma unroll
        for (int t = 0; t < FOURS; t++) sum += four[t].x + four[t].y + four[t].z + four[t].w;
#pragma unroll
        for (int lanes = ADDERS / 2; lanes; lanes /= 2) sum += __shfl_xor_sync(FULL, sum, lanes);
        if (row < COLUMNS && threadIdx.x % ADDERS == 0) scales[row] = 1.0f / sqrtf(sum / (float)K + eps);
    }
    u32 stage = 0, phase = 0;
    for (u32 tile = first; tile < TILES; tile += stride) {
        const u32 rows = tile / TILES_T * WIDE, tokens = tile % TILES_T * COLUMNS;
        // Piece p of this warp: which 16 rows and which 8 tokens.
        auto number = [&](int p) { return ALONE ? p * OWNERS + warp : (p * SPLIT + share) * (WARPGROUPS * 4) + warp; };
        Pairs before[EARLY ? PIECES : 1], next = {0, 0};
#if WEIGHT == PLAIN
        if (EARLY)
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
                const u32 owner = number(p) % OWNERS, token = tokens + number(p) / OWNERS * 8 + g;
                before[p] = {0, 0};
                if (token < ROWS && number(p) < ALL_PIECES && (!ALONE || warp < OWNERS))
                    before[p] = pairs_at(residual, (u64)token * r_stride, rows + owner * 16 + 2 * j);
            }
#else
        // With many sums there are registers for residuals only when the MMAs are done.
        auto ask = [&](bool now) {
            if (!EARLY || !now) return;
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
                const u32 owner = number(p) % OWNERS, token = tokens + number(p) / OWNERS * 8 + g;
                before[EARLY ? p : 0] = {0, 0};
                if (token < ROWS && number(p) < ALL_PIECES) before[EARLY ? p : 0] = pairs_at(residual, (u64)token * r_stride, rows + owner * 16 + 2 * j);
            }
        };
        ask(COLUMNS <= 64);
#endif
        if (PRODUCES) next = pairs_at(next_norm, 0, rows + warp * 16 + 2 * j);
        float c[COLUMNS / EACH][EACH / 2];
#if WEIGHT != PLAIN
        const u32 odd = GATED ? g % 2 : 0;
        const float* scale_at = table[0];
#if WEIGHT == FP8_BLOCK
        float ahead[TABLE_EACH];
#pragma unroll
        for (int i = 0; i < TABLE_EACH; i++)
            if (tile + stride < TILES && i * WORKERS + threadIdx.x < TABLE)
                ahead[i] = block_scale(SCALES, (tile + stride) / TILES_T * WIDE, share, i * WORKERS + threadIdx.x);
        asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
        scale_at = table[which] + (group * 2 + odd) * CHUNKS;
#endif
        auto release = [&](u32 at) {
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * at);
        };
        auto advance = [&]() {
#if TURNS == 1
            if (++stage == STAGES) stage = 0, phase ^= 1;
#else
            if ((stage += TURNS) >= STAGES) stage -= STAGES, phase ^= 1;
#endif
        };
#if TURNS > 1
        // Where this tile's chunks begin in the ring; the first of this warpgroup.
        const u32 tile_stage = stage, tile_phase = phase;
        if ((stage += turn) >= STAGES) stage -= STAGES, phase ^= 1;
#endif
        // The scales of a chunk that are not in its stage.
        auto scale_of = [&](u32 chunk, float2& scale) {
            if (FP8) scale.x = scale.y = WEIGHT == FP8_BLOCK ? scale_at[chunk] : 1.0f;
        };
#pragma unroll
        for (int h = 0; h < COLUMNS / EACH; h++)
#pragma unroll
            for (int i = 0; i < EACH / 2; i++) c[h][i] = 0.0f;
#if MIXED && LEAN
        multiply_lean(c[0], base, full, stage, phase, group, turn, release);
#elif MIXED
        float part[EACH / 2];
        auto issue = [&](const u32 (&a)[8][4]) {
            const u64 b = swizzled_tile(base + stage * STAGE_BYTES + WEIGHT_BYTES);
            product_begin();
#pragma unroll
            for (int k = 0; k < 8; k++) MixedWgmma<EACH>::add(part, a[k], b + k / 4 * (TOKEN_BYTES / 16) + k % 4 * 2, k > 0);
            product_commit();
        };
        auto read = [&](u32 chunk, u32 (&a)[8][4], float2& with) {
            barrier_wait(full + 8 * stage, phase);
            widen(a, with, base + stage * STAGE_BYTES, group);
            scale_of(chunk, with);
        };
        auto finish_chunk = [&](u32 at, float2 with) {
            product_wait<0>();
            release(at);
            TokenScales none;
            promote(c[0], part, with, none);
        };
#if AHEAD
        // The next chunk is widened while MMAs run. No branches between MMAs: the assembler would wait after each of them.
        u32 a[2][8][4];
        float2 with[2];
        auto step = [&](u32 chunk, int now) {
            const u32 mine = stage;
            issue(a[now]);
            advance();
            read(chunk + 1, a[now ^ 1], with[now ^ 1]);
            finish_chunk(mine, with[now]);
        };
        auto last = [&](int now) {
            issue(a[now]);
            finish_chunk(stage, with[now]);
            advance();
        };
        read(0, a[0], with[0]);
#pragma unroll 1
        for (u32 chunk = 0; chunk < (CHUNKS - 1) / 2 * 2; chunk += 2) step(chunk, 0), step(chunk + 1, 1);
        if (CHUNKS % 2 == 0) step(CHUNKS - 2, 0), last(1);
        else last(0);
#else
        u32 a[8][4];
        float2 with;
#pragma unroll 1
        for (u32 chunk = 0; chunk < CHUNKS; chunk++) {
            read(chunk, a, with);
            issue(a);
            finish_chunk(stage, with);
            advance();
        }
#endif
#elif DOUBLE
        float part[2][EACH / 2];
        auto issue = [&](float (&to)[EACH / 2]) {
            const u32 at = base + stage * STAGE_BYTES;
            barrier_wait(full + 8 * stage, phase);
            const u64 a = swizzled_tile(at + group * 8192), b = swizzled_tile(at + WEIGHT_BYTES);
            product_begin();
#pragma unroll
            for (int k = 0; k < 4; k++) ByteWgmma<EACH>::add(to, a + 2 * k, b + 2 * k, k > 0);
            product_commit();
        };
        issue(part[0]);
        auto step = [&](u32 number, float (&now)[EACH / 2], float (&then)[EACH / 2]) {
            const u32 chunk = number * TURNS + turn;
            const u32 mine = stage;
            float2 with;
            scale_of(chunk, with);
            TokenScales x;
            x.load(x_scales_at + mine * COLUMNS * 4);
            advance();
            if (number + 1 < MINE) {
                issue(then);
                product_wait<1>();
            } else
                product_wait<0>();
            promote(c[0], now, with, x);
            release(mine);
        };
#pragma unroll 1
        for (u32 number = 0; number < MINE; number += 2) {
            step(number, part[0], part[1]);
            if (number + 1 < MINE) step(number + 1, part[1], part[0]);
        }
#else
        float part[EACH / 2];
#pragma unroll 1
        for (u32 chunk = turn; chunk < CHUNKS; chunk += TURNS) {
            const u32 at = base + stage * STAGE_BYTES;
            float2 with;
            scale_of(chunk, with);
            barrier_wait(full + 8 * stage, phase);
            const u64 a = swizzled_tile(at + group * 8192), b = swizzled_tile(at + WEIGHT_BYTES);
#pragma unroll
            for (int h = 0; h < COLUMNS / EACH; h++) {
#if ORDERED
                if (group > 0 || tile != first || chunk + h > 0) asm volatile("bar.sync %0, 256;" ::"r"(2 + group) : "memory");
#endif
                product_begin();
#pragma unroll
                for (int k = 0; k < 4; k++) ByteWgmma<EACH>::add(part, a + 2 * k, b + 2 * k + h * (EACH * 8), k > 0);
                product_commit();
#if ORDERED
                if (group + 1 < GROUPS || tile + stride < TILES || chunk + 1 < CHUNKS || h + 1 < COLUMNS / EACH)
                    asm volatile("bar.arrive %0, 256;" ::"r"(2 + (group + 1) % GROUPS) : "memory");
#endif
                product_wait<0>();
                // Loaded before the wait, they take registers from the sums of three warpgroups: 40.8 instead of 34.9 µs.
                TokenScales x;
                x.load(x_scales_at + (stage * COLUMNS + h * EACH) * 4);
                promote(c[h], part, with, x);
            }
            release(stage);
            advance();
        }
#endif
#if TURNS > 1
        stage = tile_stage + CHUNKS % STAGES, phase = tile_phase ^ CHUNKS / STAGES % 2;
        if (stage >= STAGES) stage -= STAGES, phase ^= 1;
#endif
        ask(COLUMNS > 64);
#if WEIGHT == FP8_BLOCK
        which ^= 1;
#pragma unroll
        for (int i = 0; i < TABLE_EACH; i++)
            if (i * WORKERS + threadIdx.x < TABLE) table[which][i * WORKERS + threadIdx.x] = ahead[i];
#endif
#else
        u32 previous = stage;
#pragma unroll 1
        for (u32 chunk = 0; chunk < CHUNKS; chunk++) {
            const u32 at = base + stage * STAGE_BYTES;
            barrier_wait(full + 8 * stage, phase);
            const u64 a = swizzled_tile(at + group * 8192), b = swizzled_tile(at + WEIGHT_BYTES);
            product_begin();
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
                for (int h = 0; h < COLUMNS / EACH; h++) Wgmma<TYPE, EACH>::add(c[h], a + 2 * k, b + 2 * k + h * (EACH * 8), chunk + k > 0);
            product_commit();
            // The previous MMA is done: its stage can be filled again.
            product_wait<1>();
            if (chunk > 0) release_stage(empty + 8 * previous);
            previous = stage;
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        product_wait<0>();
        release_stage(empty + 8 * previous);
#if ADAPTERS
        if (any_adapter(use, known)) take_handed(base, full, empty, stage, phase, tile + stride < TILES, c[0]);
#endif
#endif
        // Scales are ready, squares of the previous tile are stored, and all MMAs of this block are done.
        if (!ALONE || CONSUMES || PRODUCES) asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
        float2 scale[CONSUMES ? PIECES : 1];
#pragma unroll
        for (int p = 0; p < (CONSUMES ? PIECES : 0); p++)
            scale[p] = *(const float2*)(scales + (ALONE ? p : min(number(p), ALL_PIECES - 1u) / OWNERS) * 8 + 2 * j);
        if (ALONE) {
            if (warp < OWNERS)
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; n++) {
                    const float* from = c[n * 8 / EACH] + n % (EACH / 8) * 4;
                    float v[4] = {from[0], from[1], from[2], from[3]};
                    float sum = finish(o, rows + warp * 16, tokens + n * 8, v, scale[CONSUMES ? n : 0], before[EARLY ? n : 0], next);
                    if (PRODUCES) {
                        sum += __shfl_xor_sync(FULL, sum, 1);
                        sum += __shfl_xor_sync(FULL, sum, 2);
                        if (j == 0) parts[warp][PRODUCES ? n * 8 + g : 0] = sum;
                    }
                }
        } else {
            // The ring (what is behind it, if there may be other tiles) becomes [column / 8][thread] of four sums.
            const u32 all_sums = base + (SPLIT == 1 ? STAGES * STAGE_BYTES : 0);
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++) {
                const float* from = c[n * 8 / EACH] + n % (EACH / 8) * 4;
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(all_sums + (n * WORKERS + threadIdx.x) * 16),
                             "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3])
                             : "memory");
            }
            if (SPLIT > 1) asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
            else asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
            // Pieces are distributed over the warps of all blocks of the cluster.
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
                if (number(p) >= ALL_PIECES) continue;
                const u32 owner = number(p) % OWNERS, n = number(p) / OWNERS;
                const u32 at = all_sums + (n * WORKERS + owner * 32 + lane) * 16;
                float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (u32 part = 0; part < SPLIT * TURNS; part++) {
                    float p0, p1, p2, p3;
                    if (SPLIT == 1)
                        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(p0), "=f"(p1), "=f"(p2), "=f"(p3) : "r"(at + part * (GROUPS * 2048)) : "memory");
                    else
                    asm volatile(
                        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
                        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
                        : "=f"(p0), "=f"(p1), "=f"(p2), "=f"(p3)
                        : "r"(at + part % TURNS * (GROUPS * 2048)), "r"(part / TURNS)
                        : "memory");
                    v[0] += p0, v[1] += p1, v[2] += p2, v[3] += p3;
                }
                float sum = finish(o, rows + owner * 16, tokens + n * 8, v, scale[CONSUMES ? p : 0], before[EARLY ? p : 0], next);
                if (PRODUCES) {
                    sum += __shfl_xor_sync(FULL, sum, 1);
                    sum += __shfl_xor_sync(FULL, sum, 2);
                    if (j == 0) parts[warp][PRODUCES ? n * 8 + g : 0] = sum;
                }
            }
            if (SPLIT > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        }
        if (PRODUCES) {
            // Squares of 64 columns: the sum of four warps, for the tokens that this block finished.
            asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
            for (u32 i = threadIdx.x; i < GROUPS * COLUMNS; i += WORKERS) {
                const u32 token = i % COLUMNS, four = i / COLUMNS, column = rows + four * 64;
                if (token / 8 % SPLIT != share || tokens + token >= o.rows || column >= N) continue;
                const float sum = parts[four * 4][token] + parts[four * 4 + 1][token] + parts[four * 4 + 2][token] + parts[four * 4 + 3][token];
                squares[(u64)(tokens + token) * (N / 64) + column / 64] = sum;
            }
        }
        // A block must not exit while others read its memory.
        __syncwarp();
        if (SPLIT > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
#endif
}
