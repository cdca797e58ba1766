// What `experts.cu` needs for weights in MXFP4 (fp4.cuh); its macros are defined before this is included. A stage's weights are
// [rows / 16][DEPTH] pieces: a copy of three dimensions. Pieces are widened to bf16 in a warp's registers and multiplied there;
// while MMAs of one run, the next is widened. Weights are FP4_SMALLER times too small, so that their powers of 2 fit bf16.
#pragma once

#define FP4_SMALLER 0x1p32f

// Both numbers of a pair of bf16, times one of another pair: operands of an instruction may be halves.
DEVICE u32 times_half(u32 v, u32 pair, int which) {
    u32 r;
    if (which) asm("{\n.reg .b16 l, h;\n.reg .b32 two;\nmov.b32 {l, h}, %2;\nmov.b32 two, {h, h};\nmul.rn.bf16x2 %0, %1, two;\n}" : "=r"(r) : "r"(v), "r"(pair));
    else asm("{\n.reg .b16 l, h;\n.reg .b32 two;\nmov.b32 {l, h}, %2;\nmov.b32 two, {l, l};\nmul.rn.bf16x2 %0, %1, two;\n}" : "=r"(r) : "r"(v), "r"(pair));
    return r;
}
// Sixteen rows and 64 columns as the left operands of four MMAs, multiplied by their powers of 2.
DEVICE void widen_piece(u32 (&a)[4][4], u32 at) {
    const u32 lane = threadIdx.x % 32;
    u32 v[4], exponents;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at + lane * 16) : "memory");
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(exponents) : "r"(at + FP4_CODES + lane / 4 * 4) : "memory");
    // Exponent e as the bf16 2^(e - 1 - 32), those of rows g and g + 8 in one word; LARGEST in src/scaled/mxfp4.rs is the largest for
    // which there is one.
    u32 by[2];
#pragma unroll
    for (int i = 0; i < 2; i++) by[i] = (__byte_perm(exponents, 0, 0x4140 + 0x202 * i) + 0x005e005eu) * 128;
#pragma unroll
    for (int s = 0; s < 4; s++) {
        const u32 last = fp4_last(v[s / 2 * 2], v[s / 2 * 2 + 1]);
#pragma unroll
        for (int r = 0; r < 4; r++) a[s][r] = times_half(r == 3 ? fp4_pair(last, s % 2) : fp4_pair(v[s], r), by[s / 2], r % 2);
    }
}

// The sums over the inner dimension, for the first M_ columns. `rows`: of the unit; a warpgroup behind them only frees stages.
template <int M_> DEVICE void multiply(float* c, Ring& ring, u32 chunks, u32 rows) {
    const u32 warp = __shfl_sync(FULL, threadIdx.x / 32, 0), first = warp * (DEPTH * FP4_PIECE);
    const bool idle = warp / 4 * 64 >= rows;
    u32 a[2][4][4];
#pragma unroll 1
    for (u32 chunk = 0; chunk < chunks; chunk++) {
        barrier_wait(ring.full + 8 * ring.stage, ring.phase);
        if (!idle) {
            // Tokens may have come by plain copies.
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            const u32 at = ring.at() + first;
            const u64 b = swizzled_tile(ring.at() + TOKENS_AT);
            widen_piece(a[0], at);
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                product_begin();
#pragma unroll
                for (int k = 0; k < 4; k++)
                    MixedWgmma<M_>::add(*(float(*)[M_ / 2])(c + k % SETS * (M_ / 2)), a[d % 2][k], b + d * (TOKEN_BYTES / 16) + k * 2,
                                        chunk > 0 || d > 0 || k >= SETS);
                product_commit();
                if (d + 1 < DEPTH) widen_piece(a[(d + 1) % 2], at + (d + 1) * FP4_PIECE);
                product_wait<0>();
            }
        }
        release(ring.empty + 8 * ring.stage);
        ring.advance();
    }
}
#define SCALES_PARAMETERS
#define SCALES
#define SCALES_OF_UNIT
#define MULTIPLY , units.is_down ? DOWN_WIDE : UP_WIDE
