// y = epilogue(norm(x) · wᵀ + bias) for up to eight rows (16 if WEIGHT is not PLAIN and x is HELD): weights are streamed
// once, 16 output columns at a time, by warps that each own every WARPS-th chunk of K and a ring of STAGES chunks in
// shared memory. Tensor cores
// compute the sums (weights are the 16-row operand, tokens the 8-column one), so the kernel is limited only by
// reading the weights. When a warp has few chunks (HELD), it keeps its part of x in registers: nothing is exchanged
// before the MMA, and the norm's scale, which needs all of x, is applied to the sums. The rings are filled before the
// wait for the predecessor: weights are in flight across the kernel boundary, which is what makes small batches fast.
//
// K, N, ROWS, WARPS, STAGES, ROUNDS (tiles of the busiest block), TYPE (of x and w), NT, BT, RT, YT; NORM, BIAS,
// EPILOGUE (0 store, 1 residual, 2 silu·mul, 4 gelu·mul), AFTER (prelude.cuh). K is a multiple of 64. WEIGHT: weights.cuh; e4m3 needs x in
// bf16, N and K multiples of 128; int4 K of 256, N of 16, GROUP. There x becomes f16, because widening to f16 takes the fewest
// instructions; sums of a chunk are scaled before they are added up. LEAN: fewer instructions for each weight and each
// element of x. SPLIT blocks of a cluster share K, so that a warp's part of a long x fits its registers (HELD); without norm and gate.
#include "weights.cuh"
#include "wgmma.cuh"

#define CHUNK (FP8 ? 128 : INT4 ? 256 : 64)
#ifndef LEAN
#define LEAN 0
#endif
#ifndef SPLIT
#define SPLIT 1
#endif
#define CHUNKS (K / CHUNK / SPLIT)
// Blocks with the same share of K, and the first chunk of a block's share.
#define BLOCK (blockIdx.x / SPLIT)
#define BLOCKS (gridDim.x / SPLIT)
#define FIRST_CHUNK (blockIdx.x % SPLIT * CHUNKS)
// A chunk of 16 rows; behind e4m3 weights the scales of even and of odd rows.
#define STAGE_BYTES (INT4 ? CHUNK / GROUP * PIECE : 2048 + (WEIGHT == FP8_BLOCK ? 16 : 0))
#define X_PITCH (K * 2 + 64)
#define TILES ((N + 15) / 16)
// Chunks of the busiest warp. HELD multiplies x by the norm's weight before scaling: F16 may overflow, bf16 does not.
#define PER_WARP ((CHUNKS + WARPS - 1) / WARPS)
// Tokens by eights, and 16-byte words of x that a lane has of a chunk and eight tokens.
#define SETS ((ROWS + 7) / 8)
#define WORDS (CHUNK / 32)
#if WEIGHT == PLAIN
#define HELD (PER_WARP <= 4 && (!NORM || (TYPE == BF16 && NT == BF16)))
#else
// More of x in registers than 64: slower for e4m3, faster for int4 (down of 8B at eight rows 14 instead of 23 µs).
#define HELD (PER_WARP * WORDS * SETS <= (INT4 && !NORM && SETS == 1 && ROWS > 2 ? 24 : 16) && (!NORM || NT == BF16))
#endif
// With one or two rows most lanes of an MMA have none: the lanes of a warp prepare its part of x together, eight columns
// each, and exchange it through shared memory.
#define SPREAD (WEIGHT != PLAIN && HELD && ROWS <= 2)
#define OWN_PIECES (PER_WARP * CHUNK / 8)
#define OWN_EACH ((OWN_PIECES + 31) / 32)
#define LATE_NORM (NORM && HELD)
#include "stream.cuh"
#if SPLIT > 1
static_assert(WEIGHT != PLAIN && HELD && !NORM && !GATED && K % (CHUNK * SPLIT) == 0, "blocks that share K");
#endif
// Warps that prepare one row of x, and 8-element vectors per thread of these warps.
#define GROUPS (ROWS <= 1 ? 1 : ROWS <= 2 ? 2 : ROWS <= 4 ? 4 : ROWS <= 8 ? 8 : 16)
#define WARPS_PER_ROW (WARPS / GROUPS)
#define VECTORS ((K / 8 + WARPS_PER_ROW * 32 - 1) / (WARPS_PER_ROW * 32))

#if WEIGHT == PLAIN
#define SCALES_PARAMETER
#define SCALES 0
#else
#define SCALES_PARAMETER , const float* scales
#define SCALES scales
#endif

DEVICE void fetch(u32 stage, const u16* w, u32 tile, u32 chunk, u64 stride, u32 lane, const float* scales) {
    if (INT4) {
        const u8* from = (const u8*)w + ((u64)tile * (K / GROUP) + chunk * (CHUNK / GROUP)) * PIECE;
#pragma unroll
        for (u32 i = lane; i < STAGE_BYTES / 16; i += 32) copy16_async(stage + i * 16, from + i * 16);
        return;
    }
    if (WEIGHT == FP8_BLOCK && lane < (GATED ? 2 : 1))
        copy4_async(stage + 2048 + lane * 4, scales + (u64)scale_row(tile * 16 + lane, GATED) * (K / SCALED) + chunk);
    if (FP8) {
        const u8* from = (const u8*)w + (u64)(tile * 16 + lane / 8) * K + chunk * CHUNK + lane % 8 * 16;
#pragma unroll
        for (int i = 0; i < 4; i++) copy16_async(stage + (i * 4 + lane / 8) * 128 + ((lane % 8 ^ (lane / 8 & 1) << 2) << 4), from + i * 4 * K);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 row = i * 4 + lane / 8, piece = lane % 8;
        const u32 column = min(tile * 16 + row, N - 1u);
        copy16_async(stage + row * 128 + ((piece ^ (row & 1) << 2) << 4),
                     w + column * stride + chunk * CHUNK + piece * 8);
    }
}

// Word i of a lane's x in a chunk: what an MMA multiplies with word i of the weights.
DEVICE uint4 word_of(const void* row, u32 chunk, int i, u32 j) {
    const u16* at = (const u16*)row + chunk * CHUNK;
    return *(const uint4*)(at + (FP8 ? (i / 2 * 4 + j) * 16 + i % 2 * 8 : i * 32 + j * 8));
}
// Of 32 columns, an int4 lane has words j, 4 + j, 8 + j, 12 + j.
DEVICE uint4 exchanged(uint4 w) {
    u32 v[4] = {w.x, w.y, w.z, w.w};
    exchange(v);
    return make_uint4(v[0], v[1], v[2], v[3]);
}
// A pair divided by HALF_FACTOR, if that takes no part in the conversion to f16.
DEVICE u32 divided(u32 v) {
    if (LEAN) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(v), "r"(0x3c803c80u));
    return v;
}
DEVICE uint4 divided(uint4 v) { return make_uint4(divided(v.x), divided(v.y), divided(v.z), divided(v.w)); }
// Two numbers that `divided` gave as f16.
DEVICE u32 pack_divided(float lo, float hi) {
    if (!LEAN) return pack_half(lo, hi);
    u32 r;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
DEVICE u32 half_of(u32 v) { return pack_divided(low_half<BF16>(v), high_half<BF16>(v)); }
DEVICE uint4 halves(uint4 v) { return make_uint4(half_of(v.x), half_of(v.y), half_of(v.z), half_of(v.w)); }
// Pairs of first and of second elements of two words, which bytes 0, 1 and 2, 3 of e4m3 weights go with.
DEVICE u32 firsts(u32 a, u32 b) { return pack_divided(low_half<BF16>(a), low_half<BF16>(b)); }
DEVICE u32 seconds(u32 a, u32 b) { return pack_divided(high_half<BF16>(a), high_half<BF16>(b)); }
// Two words of x, as bf16, as f16 for the weights.
DEVICE void prepare(uint4& a, uint4& b) {
    a = divided(a), b = divided(b);
    if (INT4) {
        a = halves(exchanged(a)), b = halves(exchanged(b));
        return;
    }
    const uint4 c = a, d = b;
    a = make_uint4(firsts(c.x, d.x), firsts(c.y, d.y), firsts(c.z, d.z), firsts(c.w, d.w));
    b = make_uint4(seconds(c.x, d.x), seconds(c.y, d.y), seconds(c.z, d.z), seconds(c.w, d.w));
}
// Eight columns of x to shared memory, where word i of lane j is at 64·i + 16·j of a chunk.
DEVICE void place(u8* row, u32 i, uint4 v) {
    v = divided(v);
    if (FP8) {
        // Lanes in pairs have the two words that belong together.
        u32 own[4] = {v.x, v.y, v.z, v.w}, out[4];
        const u32 active = LEAN ? 3u << (threadIdx.x & 30) : __activemask();
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const u32 other = __shfl_xor_sync(active, own[e], 1);
            out[e] = i % 2 ? seconds(other, own[e]) : firsts(own[e], other);
        }
        *(uint4*)(row + (i / 8 * 8 + i % 2 * 4 + i / 2 % 4) * 16) = make_uint4(out[0], out[1], out[2], out[3]);
    } else {
        u32* to = (u32*)(row + i / 4 * 64) + i % 4;
        v = halves(v);
        to[0] = v.x, to[4] = v.y, to[8] = v.z, to[12] = v.w;
    }
}
DEVICE u32 part_of(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Adds a chunk's sums: word(set, i) is word i of x of eight tokens.
template <typename Word> DEVICE void multiply(float (&sums)[SETS][4], u32 stage, u32 lane, Word word) {
    const u32 g = lane / 4, j = lane % 4;
#pragma unroll
    for (int group = 0; group < CHUNK / SCALED; group++) {
        // An MMA waits for the one before it with the same sums.
        float part[SETS][2 / SETS][4] = {};
        float low = HALF_FACTOR, high = HALF_FACTOR;
        const u32 first = stage + group * (INT4 ? PIECES_128 * PIECE : 0);
        if (WEIGHT == FP8_BLOCK) low = high = HALF_FACTOR * shared_float(first + 2048 + (GATED ? g % 2 * 4 : 0));
        Zeros zero_low(0), zero_high(0);
        // Scales and zeros of an int4 piece.
        auto begin = [&](u32 at) {
            zero_low = Zeros(shared_u8(at + PIECE_ZEROS + g)), zero_high = Zeros(shared_u8(at + PIECE_ZEROS + 8 + g));
            low = HALF_FACTOR * f16_to_float((u16)shared_u16(at + PIECE_SCALES + 2 * g)), high = HALF_FACTOR * f16_to_float((u16)shared_u16(at + PIECE_SCALES + 16 + 2 * g));
        };
        auto add_up = [&]() {
#pragma unroll
            for (int set = 0; set < SETS; set++) {
                const float* a = part[set][0];
                const float* b = part[set][1 / SETS];
#pragma unroll
                for (int e = 0; e < 4; e++) sums[set][e] += (e < 2 ? low : high) * (SETS == 1 ? a[e] + b[e] : a[e]);
            }
        };
        auto clear = [&]() {
#pragma unroll
            for (int set = 0; set < SETS; set++)
#pragma unroll
                for (int i = 0; i < 2 / SETS; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) part[set][i][e] = 0.0f;
        };
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint4 a, b;
            const u32 at = GROUP == 128 ? first : first + h * (64 / GROUP < 1 ? 1 : 64 / GROUP) * PIECE;
            const u32 from = !INT4 ? first + g * 128 + (((h * 4 + j) ^ (g & 1) << 2) << 4) : GROUP == 128 ? at + h * 512 + lane * 16 : at + lane * (GROUP / 4);
            if (INT4 && GROUP == 32) {
                asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(a.x), "=r"(a.y) : "r"(from) : "memory");
                asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(a.z), "=r"(a.w) : "r"(from + PIECE) : "memory");
            } else
                asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(a.x), "=r"(a.y), "=r"(a.z), "=r"(a.w) : "r"(from) : "memory");
            if (!INT4) asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(b.x), "=r"(b.y), "=r"(b.z), "=r"(b.w) : "r"(from + 1024) : "memory");
            uint4 v[SETS][2];
#pragma unroll
            for (int set = 0; set < SETS; set++)
#pragma unroll
                for (int i = 0; i < 2; i++) v[set][i] = word(set, group * 4 + h * 2 + i);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (INT4 && (h * 64 + i * 16) % GROUP == 0) begin(at + (GROUP == 32 ? i / 2 * PIECE : 0));
                u32 a0, a1, a2, a3;
                const u32 w = part_of(a, i);
                if (INT4) {
                    a0 = widen_int4_half<false>(w, zero_low), a1 = widen_int4_half<true>(w, zero_high);
                    a2 = widen_int4_half<false>(w >> 8, zero_low), a3 = widen_int4_half<true>(w >> 8, zero_high);
                } else {
                    widen_fp8_half(w, a0, a2);
                    widen_fp8_half(part_of(b, i), a1, a3);
                }
#pragma unroll
                for (int set = 0; set < SETS; set++) {
                    const u32 b0 = INT4 ? part_of(v[set][i / 2], i % 2 * 2) : part_of(v[set][0], i);
                    const u32 b1 = INT4 ? part_of(v[set][i / 2], i % 2 * 2 + 1) : part_of(v[set][1], i);
                    mma_16x8x16<F16>(part[set][i % (2 / SETS)], a0, a1, a2, a3, b0, b1);
                }
                if (INT4 && GROUP < 128 && (h * 64 + i * 16 + 16) % GROUP == 0) add_up(), clear();
            }
        }
        if (!INT4 || GROUP == 128) add_up();
    }
}

#if LEAN && INT4
#include "linear_stream_int4.cuh"
#endif

template <int T_> DEVICE u32 times(u32 a, u32 b) {
    if (LEAN && T_ == BF16) {
        u32 r;
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
    }
    return pack2<T_>(low_half<T_>(a) * low_half<T_>(b), high_half<T_>(a) * high_half<T_>(b));
}

template <int T_> DEVICE float square(u32 v) {
    const float a = low_half<T_>(v), b = high_half<T_>(v);
    return a * a + b * b;
}

#if SPLIT > 1
#include "linear_stream_split.cuh"
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32, (HELD && PER_WARP > 2) || (WEIGHT != PLAIN && WARPS > 8) ? 1 : WEIGHT != PLAIN ? 2 : 1024 / (WARPS * 32))
linear_stream(const void* x, const u16* w, const void* bias, const void* norm, const void* residual, void* y,
              u32 x_stride, u32 w_stride, u32 r_stride, u32 y_stride, float eps SCALES_PARAMETER) {
    extern __shared__ __align__(128) u8 memory[];
    u8* xs = memory + WARPS * STAGES * STAGE_BYTES;
    float* partial = (float*)(xs + (SPREAD ? WARPS * ROWS * OWN_PIECES * 16 : HELD ? 0 : ROWS * X_PITCH));
    __shared__ float squares[WARPS][8 * SETS];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
    const u32 ring = shared_address(memory) + warp * STAGES * STAGE_BYTES;

    // The chunks this warp will read: (tile, chunk) in order.
    u32 next_tile = BLOCK, next_chunk = warp;
    if (warp >= CHUNKS) next_tile = TILES;
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        if (next_tile < TILES) {
            fetch(ring + s * STAGE_BYTES, w, next_tile, FIRST_CHUNK + next_chunk, w_stride, lane, SCALES);
            next_chunk += WARPS;
            if (next_chunk >= CHUNKS) next_chunk = warp, next_tile += BLOCKS;
        }
        commit_copies();
    }
    const u32 row = warp / WARPS_PER_ROW, first = (warp % WARPS_PER_ROW) * 32 + lane;
    // The norm's weights do not depend on the predecessor either.
    float early[8];
    if (NORM && !HELD && VECTORS == 1 && first < K / 8) load8<NT>(norm, first * 8, early);
    if (NORM && !HELD && VECTORS > 1)
        for (u32 i = threadIdx.x * 8; i < K; i += WARPS * 256)
            asm volatile("prefetch.global.L2 [%0];" ::"l"((const u8*)norm + (NT == F32 ? 4 : 2) * i));
    uint4 held[HELD ? WORDS * SETS * PER_WARP : 1];
    uint4 weights[SPREAD ? OWN_EACH : 1];
    if (SPREAD && NORM)
#pragma unroll
        for (int e = 0; e < OWN_EACH; e++) {
            const u32 piece = lane + e * 32, chunk = warp + piece / (CHUNK / 8) * WARPS;
            weights[SPREAD ? e : 0] = piece < OWN_PIECES && chunk < CHUNKS ? *(const uint4*)((const u16*)norm + chunk * CHUNK + piece % (CHUNK / 8) * 8) : make_uint4(0, 0, 0, 0);
        }
    if (WEIGHT != PLAIN && HELD && NORM && !SPREAD)
#pragma unroll
        for (int i = 0; i < WORDS * PER_WARP; i++) {
            const u32 chunk = warp + i / WORDS * WARPS;
            held[HELD ? i : 0] = chunk < CHUNKS ? word_of(norm, chunk, i % WORDS, j) : make_uint4(0, 0, 0, 0);
        }
    if (WEIGHT == PLAIN && HELD && NORM)
#pragma unroll
        for (int i = 0; i < 2 * PER_WARP; i++) {
            const u32 k = (warp + i / 2 * WARPS) * CHUNK + i % 2 * 32 + j * 8;
            float n[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
            if (k < K) load8<NT>(norm, k, n);
            held[i] = make_uint4(pack2<TYPE>(n[0], n[1]), pack2<TYPE>(n[2], n[3]), pack2<TYPE>(n[4], n[5]), pack2<TYPE>(n[6], n[7]));
        }
    let_successor_start();
    wait_for_predecessor();

    if (SPREAD) {
        u8* own = xs + warp * (ROWS * OWN_PIECES * 16);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float sum = 0.0f;
#pragma unroll
            for (int e = 0; e < OWN_EACH; e++) {
                const u32 piece = lane + e * 32, chunk = warp + piece / (CHUNK / 8) * WARPS;
                if (piece >= OWN_PIECES) continue;
                uint4 v = make_uint4(0, 0, 0, 0);
                if (chunk < CHUNKS) v = *(const uint4*)((const u16*)x + (u64)r * x_stride + (FIRST_CHUNK + chunk) * CHUNK + piece % (CHUNK / 8) * 8);
                if (NORM) {
                    const uint4 n = weights[SPREAD ? e : 0];
                    sum += square<TYPE>(v.x) + square<TYPE>(v.y) + square<TYPE>(v.z) + square<TYPE>(v.w);
                    v.x = times<TYPE>(v.x, n.x), v.y = times<TYPE>(v.y, n.y);
                    v.z = times<TYPE>(v.z, n.z), v.w = times<TYPE>(v.w, n.w);
                }
                place(own + r * OWN_PIECES * 16, piece, v);
            }
            if (NORM) {
                sum = warp_sum(sum);
                if (lane == 0) squares[warp][r] = sum;
            }
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < WORDS * PER_WARP; i++)
            held[HELD ? i : 0] = g < ROWS ? *(const uint4*)(own + (g < ROWS ? g : 0) * OWN_PIECES * 16 + i * 64 + j * 16) : make_uint4(0, 0, 0, 0);
    } else if (WEIGHT != PLAIN && HELD) {
        // From the last eight tokens to the first: the norm's weights are where x of the first will be.
#pragma unroll
        for (int set = SETS - 1; set >= 0; set--) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < WORDS * PER_WARP; i++) {
                const u32 chunk = warp + i / WORDS * WARPS, token = set * 8 + g;
                uint4 v = make_uint4(0, 0, 0, 0);
                if (token < ROWS && chunk < CHUNKS) v = word_of((const u16*)x + (u64)token * x_stride, FIRST_CHUNK + chunk, i % WORDS, j);
                if (NORM) {
                    const uint4 n = held[HELD ? i : 0];
                    sum += square<TYPE>(v.x) + square<TYPE>(v.y) + square<TYPE>(v.z) + square<TYPE>(v.w);
                    v.x = times<TYPE>(v.x, n.x), v.y = times<TYPE>(v.y, n.y);
                    v.z = times<TYPE>(v.z, n.z), v.w = times<TYPE>(v.w, n.w);
                }
                held[HELD ? set * WORDS * PER_WARP + i : 0] = v;
            }
#pragma unroll
            for (int i = 0; HELD && i < WORDS * PER_WARP; i += 2)
                prepare(held[HELD ? set * WORDS * PER_WARP + i : 0], held[HELD ? set * WORDS * PER_WARP + i + 1 : 0]);
            if (NORM) {
                sum += __shfl_xor_sync(FULL, sum, 1);
                sum += __shfl_xor_sync(FULL, sum, 2);
                if (j == 0) squares[warp][set * 8 + g] = sum;
            }
        }
    } else if (HELD) {
        // This lane's part of row g of x, times the norm's weights.
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * PER_WARP; i++) {
            const u32 k = (warp + i / 2 * WARPS) * CHUNK + i % 2 * 32 + j * 8;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (g < ROWS && k < K) v = *(const uint4*)((const u16*)x + (u64)g * x_stride + k);
            if (NORM) {
                sum += square<TYPE>(v.x) + square<TYPE>(v.y) + square<TYPE>(v.z) + square<TYPE>(v.w);
                v.x = times<TYPE>(v.x, held[i].x), v.y = times<TYPE>(v.y, held[i].y);
                v.z = times<TYPE>(v.z, held[i].z), v.w = times<TYPE>(v.w, held[i].w);
            }
            held[i] = v;
        }
        if (NORM) {
            sum += __shfl_xor_sync(FULL, sum, 1);
            sum += __shfl_xor_sync(FULL, sum, 2);
            if (j == 0) squares[warp][g] = sum;
        }
    } else if (row < ROWS) {
        // x, normalised, to shared memory.
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const u32 i = first + v * WARPS_PER_ROW * 32;
            if (i >= K / 8) continue;
            const uint4 raw = *(const uint4*)((const u16*)x + (u64)row * x_stride + i * 8);
            if (WEIGHT == PLAIN) *(uint4*)(xs + row * X_PITCH + i * 16) = raw;
            else if (!NORM) place(xs + row * X_PITCH, i, raw);
            if (NORM) sum += square<TYPE>(raw.x) + square<TYPE>(raw.y) + square<TYPE>(raw.z) + square<TYPE>(raw.w);
        }
        if (NORM) {
            sum = warp_sum(sum);
            if (lane == 0) squares[warp][0] = sum;
            asm volatile("bar.sync %0, %1;" ::"r"(row + 1), "n"(WARPS_PER_ROW * 32) : "memory");
            sum = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS_PER_ROW; i++) sum += squares[row * WARPS_PER_ROW + i][0];
            const float scale = 1.0f / sqrtf(sum / (float)K + eps);
#pragma unroll 2
            for (int v = 0; v < VECTORS; v++) {
                const u32 i = first + v * WARPS_PER_ROW * 32;
                if (i >= K / 8) continue;
                uint4* at = (uint4*)(xs + row * X_PITCH + i * 16);
                uint4 raw = WEIGHT == PLAIN ? *at : *(const uint4*)((const u16*)x + (u64)row * x_stride + i * 8);
                float n[8];
                if (VECTORS > 1) load8<NT>(norm, i * 8, n);
                else
#pragma unroll
                    for (int t = 0; t < 8; t++) n[t] = early[t];
                raw.x = pack2<TYPE>(low_half<TYPE>(raw.x) * (scale * n[0]), high_half<TYPE>(raw.x) * (scale * n[1]));
                raw.y = pack2<TYPE>(low_half<TYPE>(raw.y) * (scale * n[2]), high_half<TYPE>(raw.y) * (scale * n[3]));
                raw.z = pack2<TYPE>(low_half<TYPE>(raw.z) * (scale * n[4]), high_half<TYPE>(raw.z) * (scale * n[5]));
                raw.w = pack2<TYPE>(low_half<TYPE>(raw.w) * (scale * n[6]), high_half<TYPE>(raw.w) * (scale * n[7]));
                if (WEIGHT == PLAIN) *at = raw;
                else place(xs + row * X_PITCH, i, raw);
            }
        }
    }
    if (!HELD) __syncthreads();

    const u8* mine = memory + warp * STAGES * STAGE_BYTES;
    const u8* x_mine = xs + (g < ROWS ? g : 0) * X_PITCH + j * 16;
    u32 stage = 0, buffer = 0, count = 0;
    // Tiles are finished BATCH at a time (BATCH · OUT · ROWS ≤ threads). This thread finishes column `out` and row
    // `out_row` of tile `own`, which is number `item` of the batch.
    const u32 item = threadIdx.x / (OUT * ROWS), rest = threadIdx.x - item * (OUT * ROWS);
    const u32 out = rest % OUT, out_row = rest / OUT;
    u32 own = BLOCK + item * BLOCKS;
    float before = 0.0f;
#if SPLIT > 1
    u32 which = 0;
#endif
#if LEAN && INT4
    float x_sums[SETS][PER_WARP][CHUNK_GROUPS][2];
#pragma unroll
    for (int set = 0; KEEPS_X_SUMS && set < SETS; set++)
#pragma unroll
        for (int at = 0; at < PER_WARP * CHUNK_GROUPS; at++) {
            float c[4] = {};
#pragma unroll
            for (int i = 0; i < GROUP / 32; i++) add_x(c, held[HELD ? set * WORDS * PER_WARP + at * (GROUP / 32) + i : 0]);
            const float2 sum = of_zeros(c);
            x_sums[set][at / CHUNK_GROUPS][at % CHUNK_GROUPS][0] = sum.x, x_sums[set][at / CHUNK_GROUPS][at % CHUNK_GROUPS][1] = sum.y;
        }
#endif
    for (u32 tile = BLOCK; tile < TILES; tile += BLOCKS) {
        if (EPILOGUE == 1 && count == 0 && item < BATCH && own < TILES && own * 16 + out < N)
            before = load1<RT>(residual, (u64)out_row * r_stride + own * 16 + out);
        float sums[SETS][4] = {};
#pragma unroll
        for (int turn = 0; turn < PER_WARP; turn++) {
            const u32 chunk = warp + turn * WARPS;
            if (chunk >= CHUNKS) break;
            wait_copies<STAGES - 1>();
            __syncwarp();
            const u8* at = mine + stage * STAGE_BYTES + g * 128;
            auto word = [&](int set, int i) {
                if (HELD) return held[HELD ? (set * PER_WARP + turn) * WORDS + i : 0];
                return *(const uint4*)(x_mine + chunk * (CHUNK * 2) + i * 64);
            };
#if LEAN && INT4
            multiply_lean(sums, ring + stage * STAGE_BYTES, lane, word, [&](int set, int group) {
                return make_float2(x_sums[set][turn][group][0], x_sums[set][turn][group][1]);
            });
#else
            if (WEIGHT != PLAIN) multiply(sums, ring + stage * STAGE_BYTES, lane, word);
#endif
#pragma unroll
            for (int h = 0; WEIGHT == PLAIN && h < 2; h++) {
                const u32 piece = ((h * 4 + j) ^ (g & 1) << 2) << 4;
                const uint4 a = *(const uint4*)(at + piece);
                const uint4 b = *(const uint4*)(at + 8 * 128 + piece);
                uint4 v = HELD ? held[HELD ? 2 * turn + h : 0] : make_uint4(0, 0, 0, 0);
                if (!HELD && g < ROWS) v = *(const uint4*)(x_mine + chunk * (CHUNK * 2) + h * 64);
                mma_16x8x16<TYPE>(sums[0], a.x, b.x, a.y, b.y, v.x, v.y);
                mma_16x8x16<TYPE>(sums[0], a.z, b.z, a.w, b.w, v.z, v.w);
            }
            __syncwarp();
            if (next_tile < TILES) {
                fetch(ring + stage * STAGE_BYTES, w, next_tile, FIRST_CHUNK + next_chunk, w_stride, lane, SCALES);
                next_chunk += WARPS;
                if (next_chunk >= CHUNKS) next_chunk = warp, next_tile += BLOCKS;
            }
            commit_copies();
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        // [buffer][tile of the batch][warp][row of x][column]
        float* to = partial + ((buffer + count) * WARPS + warp) * (16 * ROWS);
#if LEAN && INT4
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[set][e] *= e < 2 ? LOW_UNIT : HIGH_UNIT;
#endif
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const u32 token = set * 8 + 2 * j;
            if (token < ROWS) to[token * 16 + g] = sums[set][0], to[token * 16 + g + 8] = sums[set][2];
            if (token + 1 < ROWS) to[(token + 1) * 16 + g] = sums[set][1], to[(token + 1) * 16 + g + 8] = sums[set][3];
        }
        if (++count < BATCH && tile + BLOCKS < TILES) continue;
        __syncthreads();
#if SPLIT > 1
        finish_together(partial + (buffer + item) * WARPS * (16 * ROWS), which, item, item < count, own, out, out_row, before, bias, y, y_stride, SCALES);
        which ^= 1;
#else
        if (item < count)
            finish(partial + (buffer + item) * WARPS * (16 * ROWS), own, out, out_row, before, bias, y, y_stride, squares, eps, SCALES);
#endif
        own += BATCH * BLOCKS;
        count = 0;
        if (ROUNDS > BATCH) buffer ^= BATCH;
    }
    // Until the other block has read its sums.
    if (SPLIT > 1) asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
