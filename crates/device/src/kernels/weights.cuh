// Weights with scales: how K-slices of a weight tile lie in memory (src/scaled.rs), and how they become bf16 or f16.
//
// WEIGHT says the format: 0 (PLAIN) is the type of x. FP8_BLOCK: e4m3, one f32 scale for 128 × 128. FP8_CHANNEL: e4m3,
// one f32 scale per row. INT4_GROUP: 4 bits, an f16 scale and an 8-bit zero for GROUP
// (128, 64, 32) columns of a row. FP4_GROUP: MXFP4 (fp4.cuh).
//
// e4m3 rows lie in order, but within each 16 columns byte 4j + i holds column 2j + i/2 + 8·(i%2): a word is then what
// one lane of an MMA needs, and one shift and two logic operations widen two of its bytes. Activations in e4m3 have the
// same order. Scales of blocks: [N / 128][K / 128]. Where gate and up rows alternate, their scales do, too: rows
// 256·b + {0, 2, …} have scales of row 2b, those between of row 2b + 1.
//
// int4: pieces of 16 rows × GROUP columns, [N / 16][K / GROUP]. A piece of 128 columns has 2 × 32 lanes × 16 bytes, then 16
// scales (f16), then 16 zeros (bytes). Word s of lane 4·g + j (words 0 to 3 in the first half) has what step s of an MMA needs: nibbles
// i and i + 4 are columns 16s + 2j and + 1 of row g (i = 0), of row g + 8 (1), the columns 8 further of row g (2), of
// row g + 8 (3).
#pragma once
#include "prelude.cuh"

#define PLAIN 0
#define FP8_BLOCK 1
#define FP8_CHANNEL 2
#define INT4_GROUP 3
#define FP4_GROUP 4
#ifndef WEIGHT
#define WEIGHT PLAIN
#endif
#define FP8 (WEIGHT == FP8_BLOCK || WEIGHT == FP8_CHANNEL)
#define INT4 (WEIGHT == INT4_GROUP)
#define FP4 (WEIGHT == FP4_GROUP)
// Columns with one scale.
#define SCALED 128
#ifndef GROUP
#define GROUP 128
#endif
// Bytes of an int4 piece, and where its scales and zeros are; pieces of 128 columns.
#define PIECE_SCALES (8 * GROUP)
#define PIECE_ZEROS (PIECE_SCALES + 32)
#define PIECE (PIECE_ZEROS + 16)
#define PIECES_128 (128 / GROUP)

// The row of block scales for weight row n.
DEVICE u32 scale_row(u32 n, bool gated) { return gated ? n / 256 * 2 + n % 2 : n / 128; }

DEVICE u32 times_2_120(u32 v) {
    u32 r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(v), "r"(0x7b807b80u));
    return r;
}
// Four e4m3 as two pairs of bf16, exactly: bytes 0 and 2, bytes 1 and 3. Exponent and mantissa move to bf16's fields,
// whose bias is 120 larger; this holds for subnormal numbers, too.
DEVICE void widen_fp8(u32 v, u32& even, u32& odd) {
    even = times_2_120((v << 4 & 0x07f007f0u) | (v << 8 & 0x80008000u));
    odd = times_2_120((v >> 4 & 0x07f007f0u) | (v & 0x80008000u));
}
// A row's zero as the number that is subtracted from 128 + q.
DEVICE u32 zero_pair(u32 zero) { return (0x4300u | zero) * 0x10001u; }
// Nibbles i and i + 4, less the zero, exactly: 128 + q is a bf16 with q in its last bits.
DEVICE u32 widen_int4(u32 v, int i, u32 zero) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(v >> 4 * i), "r"(0x000f000fu), "r"(0x43004300u));
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(r), "r"(zero));
    return r;
}

// For f16 MMA, where `widen_fp8_half` widens e4m3: every second nibble needs no shift.
// A row's zero as 1024 + zero and as -(64 + zero).
struct Zeros {
    u32 one, sixteenth;
    DEVICE Zeros(u32 zero) : one((0x6400u | zero) * 0x10001u), sixteenth((0xd400u | zero << 4) * 0x10001u) {}
};
// Nibbles i and i + 4 of v, or (ODD) nibbles i + 1 and i + 5 of what was shifted by i, less the zero: 1024 + q, or
// 1024 + 16·q divided by 16, are exact.
template <bool ODD> DEVICE u32 widen_int4_half(u32 v, Zeros zero) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(v), "r"(ODD ? 0x00f000f0u : 0x000f000fu), "r"(0x64006400u));
    if (ODD) asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(r), "r"(0x2c002c00u), "r"(zero.sixteenth));
    else asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(r), "r"(zero.one));
    return r;
}
// bf16 numbers become f16 exactly after division by 64, from 2^-10 to 4.1e6; what is smaller loses less than 2e-6.
#define HALF_FACTOR 64.0f
DEVICE u32 pack_half(float lo, float hi) {
    u32 r;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi * (1.0f / HALF_FACTOR)), "f"(lo * (1.0f / HALF_FACTOR)));
    return r;
}

DEVICE float shared_float(u32 address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}
DEVICE u32 shared_u16(u32 address) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
    return v;
}
DEVICE u32 shared_u8(u32 address) {
    u32 v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}
DEVICE void copy4_async(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// ---- e4m3 activations -------------------------------------------------------------------------

// The scale for a largest magnitude, and its reciprocal. Zero rows get 1.
struct Fit {
    float scale, inverse;
};
DEVICE Fit fit_e4m3(float most) {
    const float scale = most > 0.0f ? fmaxf(most * (1.0f / 448.0f), 1e-30f) : 1.0f;
    return {scale, 1.0f / scale};
}
// Sixteen values in the order of weights: v[0..7] and v[8..15] are columns 0 to 7 and 8 to 15.
DEVICE uint4 pack16_e4m3(const float (&v)[16], float by) {
    u32 w[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
        w[j] = pack_e4m3(v[2 * j] * by, v[2 * j + 8] * by) | pack_e4m3(v[2 * j + 1] * by, v[2 * j + 9] * by) << 16;
    return make_uint4(w[0], w[1], w[2], w[3]);
}
