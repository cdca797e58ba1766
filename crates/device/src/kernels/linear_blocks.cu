// y = epilogue(norm(x) · wᵀ + bias) for up to eight rows and weights in blocks of GGUF files, read as the file has them.
// As linear_stream.cu: 16 output columns at a time, by warps that each own every WARPS-th chunk (256 columns) of K and
// a ring of STAGES chunks in shared memory. Tensor cores multiply: an unsigned value below 256 is a subnormal f16,
// q · 2^-24, without an instruction. Groups' sums begin with what is subtracted from their values, and are scaled; minima
// are multiplied with the sums of x, which an MMA with ones gives. Each warp prepares its own part of x, and the norm's
// scale, which needs all of it, is applied at the end. Up to four rows: `blocks_spread.cuh`.
//
// K (a multiple of 32; of 256 for types of 256), N, ROWS, WARPS, STAGES, ROUNDS, WT, NT, BT, RT, YT; NORM, BIAS,
// EPILOGUE, AFTER. x is bf16.
#define TYPE BF16
#define WORDS_ALIGNED (K % 256 == 0 && WT != Q6K)
#define LATE_NORM NORM
#define SETS 1
#include "blocks.cuh"
#include "weights.cuh"
#include "stream.cuh"

#define CHUNKS ((K + 255) / 256)
#define PER_WARP ((CHUNKS + WARPS - 1) / WARPS)
#define ROW_BYTES ((u64)(WT < Q2K ? K / 32 : K / 256) * BLOCK_BYTES)
// Rows that begin at any even address are copied from the multiple of 16 before it.
#define WHOLE (ROW_BYTES % 16 == 0 && CHUNK_BYTES % 16 == 0)
#define PIECES ((CHUNK_BYTES + (WHOLE ? 0 : 14) + 15) / 16)
// An odd number of 16 bytes: eight rows have different banks.
#define PITCH ((PIECES | 1) * 16)
#define STAGE_BYTES (16 * PITCH)
#define X_PITCH (512 + 64)
// Sums of x of a chunk.
#define X_SUMS (HALVES ? 128 : 64)
#define TILES ((N + 15) / 16)
// 2^24 for values and HALF_FACTOR for x.
#define UNIT (16777216.0f * HALF_FACTOR)
// Sums of groups side by side in an MMA's columns.
#ifndef SPREAD
#define SPREAD (ROWS <= 4)
#endif

// What differs from row to row, if it is not the same for all.
DEVICE u32 before_of(u32 tile, u32 row, u32 chunk) {
    if (WHOLE) return 0;
    return (ROW_BYTES % 16 ? (u32)(min(tile * 16 + row, N - 1u) * ROW_BYTES) + chunk * CHUNK_BYTES : chunk * CHUNK_BYTES) & 15;
}

DEVICE void fetch(u32 stage, const u8* w, u32 tile, u32 chunk, u32 lane) {
    const u32 bytes = K % 256 && chunk == CHUNKS - 1 ? (K % 256) / 32 * BLOCK_BYTES : CHUNK_BYTES;
    const u8* from = w + tile * (16 * ROW_BYTES) + chunk * CHUNK_BYTES;
    const u32 last = N % 16 ? N - 1 - tile * 16 : 15;
#pragma unroll
    for (u32 i = lane; i < 16 * PIECES; i += 32) {
        const u32 row = i / PIECES, piece = i % PIECES, before = before_of(tile, row, chunk);
        // All pieces of a whole chunk have some of its bytes.
        if (((PIECES - 1) * 16 < CHUNK_BYTES && bytes == CHUNK_BYTES) || piece * 16 < before + bytes)
            copy16_async(stage + i * 16 + row * (PITCH - PIECES * 16), from + (u32)((N % 16 ? min(row, last) : row) * ROW_BYTES + piece * 16) - before);
    }
}

// Eight columns of x of a chunk, to where lanes of an MMA read them: of four columns the pairs 0, 2 and 1, 3.
DEVICE void place(u8* row, u32 lane, const float (&v)[8]) {
    u8* to = row + (lane / 4 * 4 + lane % 2 * 2) * 16 + lane % 4 / 2 * 8;
    *(uint2*)to = make_uint2(pack_half(v[0], v[2]), pack_half(v[1], v[3]));
    *(uint2*)(to + 16) = make_uint2(pack_half(v[4], v[6]), pack_half(v[5], v[7]));
}

// A sum of products that begins with other numbers.
DEVICE void begin_sums(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float2 from = {0.0f, 0.0f}) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%10,%11};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(from.x), "f"(from.y));
}
// A lane's words of 32 columns of x.
DEVICE uint4 word_of(const u8* x, int sub, u32 lane) { return *(const uint4*)(x + (sub * 4 + lane % 4) * 16); }

#if SPREAD
#include "blocks_spread.cuh"
#else
// Sums of x over groups of columns, by group and token. What products begin with (MIDDLE), numbers (minima of groups), or f16 in
// two parts, as an MMA multiplies them with minima.
DEVICE void sum_groups(float* to, const u8* x, u32 lane) {
    const u32 ones = 0x3c003c00u, token = 2 * lane;
    auto put = [&](int group, const float (&sum)[4]) {
        if (lane >= 4) return;
        if (MINIMA) {
            // Of group 2j or 2j + 1 lane 4 · token + j has halves 0 or 1 of two words.
            u16* at = (u16*)to + (token * 4 + group / 2) * 4 + group % 2;
            const u32 low = pack2<F16>(sum[0], sum[1]);
            const u32 rest = pack2<F16>(sum[0] - low_half<F16>(low), sum[1] - high_half<F16>(low));
            at[0] = low, at[2] = rest, at[16] = low >> 16, at[18] = rest >> 16;
            return;
        }
        const float by = MIDDLE ? -(float)MIDDLE / 16777216.0f : 1.0f;
        *(float2*)(to + group * 8 + token) = make_float2(by * sum[0], by * sum[1]);
    };
#pragma unroll
    for (int sub = 0; sub < 8; sub++) {
        const uint4 v = word_of(x, sub, lane);
        float sum[4];
        begin_sums(sum, ones, ones, ones, ones, v.x, v.y);
        if (HALVES) put(2 * sub, sum);
        if (HALVES) begin_sums(sum, ones, ones, ones, ones, v.z, v.w);
        else mma_16x8x16<F16>(sum, ones, ones, ones, ones, v.z, v.w);
        put(HALVES ? 2 * sub + 1 : sub, sum);
    }
}

// Adds the products of a chunk of 16 rows, in units of 2^-24.
DEVICE void multiply(float (&sums)[4], const u8* low, const u8* high, const u8* x, const float* x_sums, u32 groups, u32 lane) {
    const u32 j = lane % 4;
    const Scales of_low(low), of_high(high);
    float part[4], here[4] = {}, less[4] = {};
#pragma unroll
    for (int sub = 0; sub < 8; sub++) {
        if (K % 256 && sub >= groups) break;
        const uint4 v = word_of(x, sub, lane);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 a0, a1, a2, a3;
            pairs(low, sub, h, j, a0, a2), pairs(high, sub, h, j, a1, a3);
            const u32 b0 = h ? v.z : v.x, b1 = h ? v.w : v.y;
            float2 all = make_float2(0.0f, 0.0f);
            if (!MINIMA && (HALVES || h == 0)) all = *(const float2*)(x_sums + (HALVES ? 2 * sub + h : sub) * 8 + 2 * j);
            if (!HALVES && h == 1) mma_16x8x16<F16>(part, a0, a1, a2, a3, b0, b1);
            else if (MIDDLE) begin_sums(part, a0, a1, a2, a3, b0, b1, all);
            else begin_sums(part, a0, a1, a2, a3, b0, b1);
            if (!MIDDLE && !MINIMA && h == 0) {
                const float l = of_low.minimum(low, sub), u = of_high.minimum(high, sub);
                less[0] += l * all.x, less[1] += l * all.y, less[2] += u * all.x, less[3] += u * all.y;
            }
            if (!HALVES && h == 0) continue;
            const float l = of_low.scale(low, sub, h), u = of_high.scale(high, sub, h);
            here[0] += l * part[0], here[1] += l * part[1], here[2] += u * part[2], here[3] += u * part[3];
        }
    }
    if (MINIMA) {
        const uint2 v = *(const uint2*)(x_sums + lane * 2);
        const u32 a0 = of_low.minima_of(j), a1 = of_high.minima_of(j);
        begin_sums(less, a0, a1, a0, a1, v.x, v.y);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const Scales& of = e < 2 ? of_low : of_high;
        if (WT == Q4_1 || WT == Q5_1) sums[e] += here[e] + less[e] * (1.0f / 16777216.0f);
        else sums[e] += MINIMA ? of.d * here[e] + of.m * less[e] : of.d * here[e];
    }
}
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
linear_blocks(const void* x, const u8* w, const void* bias, const void* norm, const void* residual, void* y,
              u32 x_stride, u32 r_stride, u32 y_stride, float eps) {
    extern __shared__ __align__(128) u8 memory[];
    u8* xs = memory + WARPS * STAGES * STAGE_BYTES;
    float* all_sums = (float*)(xs + WARPS * PER_WARP * ROWS * X_PITCH);
    float* partial = all_sums + WARPS * PER_WARP * X_SUMS;
    __shared__ float squares[WARPS][8];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
    const u32 ring = shared_address(memory) + warp * STAGES * STAGE_BYTES;

    // The chunks this warp will read: (tile, chunk) in order.
    u32 next_tile = blockIdx.x, next_chunk = warp;
    if (warp >= CHUNKS) next_tile = TILES;
    auto ask = [&](u32 stage) {
        if (next_tile < TILES) {
            fetch(ring + stage * STAGE_BYTES, w, next_tile, next_chunk, lane);
            next_chunk += WARPS;
            if (next_chunk >= CHUNKS) next_chunk = warp, next_tile += gridDim.x;
        }
        commit_copies();
    };
    for (u32 s = 0; s < STAGES; s++) ask(s);
    let_successor_start();
    wait_for_predecessor();

    // This warp's part of x, times the norm's weights.
    u8* own_x = xs + warp * PER_WARP * ROWS * X_PITCH;
    float* own_sums = all_sums + warp * PER_WARP * X_SUMS;
    float sum[ROWS] = {};
#pragma unroll
    for (int turn = 0; turn < PER_WARP; turn++) {
        const u32 chunk = warp + turn * WARPS, column = chunk * 256 + lane * 8;
        if (chunk >= CHUNKS) break;
        const bool live = K % 256 == 0 || column < K;
        float n[8];
        if (NORM && live) load8<NT>(norm, column, n);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float v[8] = {};
            if (live) load8<BF16>(x, (u64)r * x_stride + column, v);
            if (NORM && live)
#pragma unroll
                for (int t = 0; t < 8; t++) sum[r] += v[t] * v[t], v[t] *= n[t];
            u8* row = own_x + (turn * ROWS + r) * X_PITCH;
#if SPREAD
            place_spread(row, own_sums + turn * X_SUMS, r, lane, chunk % 2, v);
#else
            place(row, lane, v);
#endif
        }
    }
    if (NORM)
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float all = warp_sum(sum[r]);
            if (lane == 0) squares[warp][r] = all;
        }
    __syncwarp();
#if !SPREAD
#pragma unroll 1
    for (u32 turn = 0; turn < PER_WARP; turn++) sum_groups(own_sums + turn * X_SUMS, own_x + (turn * ROWS + (g < ROWS ? g : 0)) * X_PITCH, lane);
    __syncwarp();
#endif

    const u8* mine = memory + warp * STAGES * STAGE_BYTES;
#if SPREAD
    // Lanes of other groups read the zeros behind a row.
    const u32 row = min(g / SHARES, ROWS - 1u);
    auto x_of = [&](int turn, int sub) {
        const u8* x = own_x + (turn * ROWS + row) * X_PITCH + j * 16;
        return *(const uint4*)(x + (g % SHARES == sub % SHARES && g / SHARES < ROWS ? sub * 64 : 512));
    };
    auto begin_of = [&](int turn, int f, int h) {
        const float* from = own_sums + turn * X_SUMS + (HALVES ? 4 * pair_of(f, j) + h : 2 * pair_of(f, j)) * 8 + j * 2 / SHARES;
        return make_float2(from[0], from[HALVES ? 16 : 8]);
    };
    auto less_of = [&](int turn) { return MINIMA ? *(const uint2*)(own_sums + turn * X_SUMS + 2 * lane) : make_uint2(0, 0); };
    uint4 held[8];
    float2 begins[FRAGMENTS][2];
    uint2 held_less;
    if (HELD) {
        held_less = less_of(0);
#pragma unroll
        for (int sub = 0; sub < 8; sub++) held[sub] = x_of(0, sub);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) begins[f][0] = begin_of(0, f, 0), begins[f][1] = begin_of(0, f, HALVES);
    }
#else
    const u8* x_mine = own_x + (g < ROWS ? g : 0) * X_PITCH;
#endif
    u32 stage = 0, buffer = 0, count = 0;
    // Tiles are finished BATCH at a time (BATCH · OUT · ROWS ≤ threads). This thread finishes column `out` and row
    // `out_row` of tile `own`, which is number `item` of the batch.
    const u32 item = threadIdx.x / (OUT * ROWS), rest = threadIdx.x - item * (OUT * ROWS);
    const u32 out = rest % OUT, out_row = rest / OUT;
    u32 own = blockIdx.x + item * gridDim.x;
    float before = 0.0f;
    for (u32 tile = blockIdx.x; tile < TILES; tile += gridDim.x) {
        if (EPILOGUE == 1 && count == 0 && item < BATCH && own < TILES && own * 16 + out < N)
            before = load1<RT>(residual, (u64)out_row * r_stride + own * 16 + out);
        float sums[SPREAD ? 2 : 4] = {};
#pragma unroll 1
        for (int turn = 0; turn < PER_WARP; turn++) {
            const u32 chunk = warp + turn * WARPS;
            if (chunk >= CHUNKS) break;
            wait_copies<STAGES - 1>();
            __syncwarp();
            const u8* at = mine + stage * STAGE_BYTES;
            const u8 *low = at + g * PITCH + before_of(tile, g, chunk), *high = at + (g + 8) * PITCH + before_of(tile, g + 8, chunk);
            const u32 groups = min(8u, (K - chunk * 256) / 32);
#if SPREAD
            multiply_spread(sums, low, high, [&](int sub) { return HELD ? held[sub] : x_of(turn, sub); },
                            [&](int f, int h) { return HELD ? begins[f][h] : begin_of(turn, f, h); }, HELD ? held_less : less_of(turn), chunk % 2, groups, lane);
#else
            multiply(sums, low, high, x_mine + turn * ROWS * X_PITCH, own_sums + turn * X_SUMS, groups, lane);
#endif
            __syncwarp();
            ask(stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        // [buffer][tile of the batch][warp][row of x][column]
        float* to = partial + ((buffer + count) * WARPS + warp) * (16 * ROWS);
#if SPREAD
        join_lanes(sums);
        if (j * 2 % SHARES == 0 && j * 2 / SHARES < ROWS) to[j * 2 / SHARES * 16 + g] = UNIT * sums[0], to[j * 2 / SHARES * 16 + g + 8] = UNIT * sums[1];
#else
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const u32 token = 2 * j + e % 2;
            if (token < ROWS) to[token * 16 + g + e / 2 * 8] = UNIT * sums[e];
        }
#endif
        if (++count < BATCH && tile + gridDim.x < TILES) continue;
        __syncthreads();
        if (item < count)
            finish(partial + (buffer + item) * WARPS * (16 * ROWS), own, out, out_row, before, bias, y, y_stride, squares, eps, 0);
        own += BATCH * gridDim.x;
        count = 0;
        if (ROUNDS > BATCH) buffer ^= BATCH;
    }
}
