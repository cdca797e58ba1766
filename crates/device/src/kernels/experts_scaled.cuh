// What `experts.cu` needs for e4m3 weights with a scale for 128 × 128; its macros are defined before this is included.
//
// Weights of 16 rows × 128 are widened to bf16 in a warp's registers and multiplied there. Sums are kept in units of the
// scale of the columns that were added last: before the next 128 columns they are multiplied by the ratio of the two
// scales. So a thread needs no second set of sums.
//
// AHEAD: the next weights are widened while MMAs run, three stages or more are needed.
#pragma once

#ifndef AHEAD
#define AHEAD (GROUPS <= 2 || (GROUPS == 3 && TILE <= 32))
#endif
// Words with a lane for each 128 columns.
#define SCALE_WORDS (((H > I ? H : I) + 4095) / 4096)

#define SCALES_PARAMETERS , const float *up_scales, const float *down_scales
#define SCALES_OF_UNIT , Scales& scales
#define SCALES , scales

// Scales of this warp's 16 rows: rows of gate (x) and of up (y), for down both are the same.
struct Scales {
    const Units& units;
    const float *up, *down;
    // Of the unit after this one, as they are in memory: lane n has columns 128 · n and on.
    float2 ahead[SCALE_WORDS];
    // From each 128 columns to the next; with BYTES the scales themselves.
    float2 ratio[SCALE_WORDS];
    // Of the last columns.
    float2 last;
    // Where the scales of tokens are, [STAGES][TILE].
    u32 of_tokens;
    DEVICE Scales(const Units& units, const float* up, const float* down) : units(units), up(up), down(down) { look_ahead(); }
    // Asks for the next unit's.
    DEVICE void look_ahead() {
        if (units.next_at == FULL) return;
        const bool is_down = units.next_is_down;
        const u32 per_task = Units::per_task(is_down), wide = is_down ? DOWN_WIDE : UP_WIDE, columns = (is_down ? I : H) / 128;
        const u32 top = (u32)units.next_task.expert * (is_down ? H : 2 * I) + (units.next_at % per_task * CLUSTER + rank_in_cluster()) * wide;
        const u32 row = top + min(threadIdx.x / 32 * 16, wide - 16);
        const float* from = is_down ? down + (u64)(row / 128) * columns : up + (u64)(row / 256 * 2) * columns;
#pragma unroll
        for (int w = 0; w < SCALE_WORDS; w++) {
            const u32 column = min(w * 32 + threadIdx.x % 32, columns - 1);
            ahead[w].x = from[column], ahead[w].y = from[is_down ? column : columns + column];
        }
    }
    // A scale that can be divided by: blocks of zeros may have none.
    static DEVICE float usable(float s) { return fabsf(s) < 1e-30f ? 1e-30f : s; }
    // Begins a unit with what was asked for.
    DEVICE void begin(u32 columns) {
#pragma unroll
        for (int w = 0; w < SCALE_WORDS; w++) ratio[w] = ahead[w];
#if !BYTES
        const u32 lane = threadIdx.x % 32;
#pragma unroll
        for (int w = 0; w < SCALE_WORDS; w++) ahead[w].x = usable(ahead[w].x), ahead[w].y = usable(ahead[w].y);
#pragma unroll
        for (int w = 0; w < SCALE_WORDS; w++) {
            const float2 from = lane == 0 && w + 1 < SCALE_WORDS ? ahead[w + 1 < SCALE_WORDS ? w + 1 : 0] : ahead[w];
            const float x = __shfl_sync(FULL, from.x, (lane + 1) % 32), y = __shfl_sync(FULL, from.y, (lane + 1) % 32);
            ratio[w].x = ahead[w].x / x, ratio[w].y = ahead[w].y / y;
        }
        last = pick(ahead, columns - 1);
#endif
    }
    static DEVICE float2 pick(const float2 (&of)[SCALE_WORDS], u32 column) {
        float2 v = of[0];
#pragma unroll
        for (int w = 1; w < SCALE_WORDS; w++)
            if (column / 32 == w) v = of[w];
        return make_float2(__shfl_sync(FULL, v.x, column % 32), __shfl_sync(FULL, v.y, column % 32));
    }
};

#if !BYTES
// Sixteen rows of 128 e4m3 for a warp, 128 bytes apart and swizzled; and as the left operands of eight MMAs.
DEVICE void load_rows(u32 (&v)[4][4], u32 at) {
    const u32 lane = threadIdx.x % 32, from = at + lane % 16 * 128;
#pragma unroll
    for (int i = 0; i < 4; i++) load_matrices(v[i], from + ((2 * i + lane / 16 ^ lane % 8) << 4));
}
DEVICE void widen_rows(u32 (&a)[8][4], const u32 (&v)[4][4]) {
#pragma unroll
    for (int i = 0; i < 16; i++) widen_fp8(v[i / 4][i % 4], a[i / 2][i % 2], a[i / 2][i % 2 + 2]);
}

// The sums over the inner dimension, for the first M_ columns, in units of scales.last. ODD: of an odd number of chunks.
template <int M_, bool ODD> DEVICE void multiply_chunks(float* c, Ring& ring, u32 chunks, Scales& scales) {
    const u32 warp = __shfl_sync(FULL, threadIdx.x / 32, 0);
    auto read = [&](u32 (&v)[4][4]) {
        barrier_wait(ring.full + 8 * ring.stage, ring.phase);
        // Tokens may have come by plain copies.
        if (!GATHERED) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        load_rows(v, ring.at() + warp * 2048);
    };
    auto issue = [&](const u32 (&a)[8][4], u32 stage, bool more) {
        const u64 b = swizzled_tile(ring.base + stage * STAGE_BYTES + WEIGHT_BYTES);
        product_begin();
#pragma unroll
        for (int k = 0; k < 8; k++)
            MixedWgmma<M_>::add(*(float(*)[M_ / 2])(c + k % SETS * (M_ / 2)), a[k], b + k / 4 * (TOKEN_BYTES / 16) + k % 4 * 2, more || k >= SETS);
        product_commit();
    };
    auto rescale = [&](float2 by) {
#pragma unroll
        for (int i = 0; i < SETS * M_ / 2; i++) c[i] *= i % 4 < 2 ? by.x : by.y;
    };
#if AHEAD
    // While MMAs of a chunk run, the next is widened and the one after that is loaded. The wait for a stage between the two keeps
    // the assembler from widening after the MMAs. No branches between MMAs: it would wait after each of them.
    u32 a[2][8][4], v[4][4], mine = ring.stage, next;
    auto step = [&](u32 chunk, int now, bool loads) {
        issue(a[now], mine, chunk > 0);
        widen_rows(a[now ^ 1], v);
        const u32 freed = mine;
        mine = next;
        if (loads) {
            next = ring.stage;
            read(v);
            ring.advance();
        }
        const float2 by = Scales::pick(scales.ratio, chunk);
        product_wait<0>();
        release(ring.empty + 8 * freed);
        rescale(by);
    };
    read(v);
    ring.advance();
    widen_rows(a[0], v);
    scales.begin(chunks);
    scales.look_ahead();
    if (chunks > 1) {
        next = ring.stage;
        read(v);
        ring.advance();
#pragma unroll 1
        for (u32 chunk = 0; chunk + (ODD ? 3 : 2) < chunks; chunk += 2) step(chunk, 0, true), step(chunk + 1, 1, true);
        if (ODD) step(chunks - 3, 0, true), step(chunks - 2, 1, false);
        else step(chunks - 2, 0, false);
    }
    issue(a[ODD ? 0 : 1], mine, chunks > 1);
    product_wait<0>();
    release(ring.empty + 8 * mine);
#else
    u32 a[8][4], v[4][4];
    scales.begin(chunks);
    scales.look_ahead();
#pragma unroll 1
    for (u32 chunk = 0; chunk < chunks; chunk++) {
        read(v);
        widen_rows(a, v);
        issue(a, ring.stage, chunk > 0);
        const float2 by = Scales::pick(scales.ratio, chunk);
        product_wait<0>();
        release(ring.empty + 8 * ring.stage);
        ring.advance();
        if (chunk + 1 < chunks) rescale(by);
    }
#endif
}
template <int M_> DEVICE void multiply(float* c, Ring& ring, u32 chunks, Scales& scales) {
    if (H / 128 % 2 != I / 128 % 2 && chunks % 2) multiply_chunks<M_, true>(c, ring, chunks, scales);
    else multiply_chunks<M_, H / 128 % 2 && I / 128 % 2>(c, ring, chunks, scales);
}
#endif
