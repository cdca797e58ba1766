// Blocks of GGUF files in shared memory, for MMA: values as they are, without a sign, and what a group of columns with
// one scale has. A value w is scale · q + offset.
//
// A chunk is 256 columns of a row. Within 16 columns (half `h` of group `sub` of 32) lane j of an MMA has columns 4j to
// 4j + 3. Chunks lie at even addresses.
#pragma once
#include "quant.cuh"

// Bytes of 256 columns, and of one block.
#define BLOCK_BYTES (WT == Q4_0 ? 18 : WT == Q4_1 ? 20 : WT == Q5_0 ? 22 : WT == Q5_1 ? 24 : WT == Q8_0 ? 34 : WT == Q4K ? 144 : WT == Q5K ? 176 : 210)
#define CHUNK_BYTES (WT < Q2K ? 8 * BLOCK_BYTES : BLOCK_BYTES)
// Groups of 16 columns have their own scales.
#define HALVES (WT == Q6K)
// What is subtracted from values; 0: groups have minima. MINIMA: these are bytes with one scale for all groups.
#define MIDDLE (WT == Q4_0 ? 8 : WT == Q5_0 ? 16 : WT == Q8_0 ? 128 : WT == Q6K ? 32 : 0)
#define MINIMA (WT == Q4K || WT == Q5K)

// Four bytes at an even address, or (WORDS_ALIGNED) at a multiple of four.
DEVICE u32 four(const u8* p) {
    if (WORDS_ALIGNED && BLOCK_BYTES % 4 == 0) return *(const u32*)p;
    return *(const u16*)p | (u32) * (const u16*)(p + 2) << 16;
}
DEVICE float half_of_two(const u8* p) { return f16_to_float(*(const u16*)p); }
// Bits 0 to 3 as bit 4 of four bytes.
DEVICE u32 fifths(u32 bits) { return ((bits & 15) * 0x00204081u & 0x01010101u) << 4; }
// Byte i as a float; SIXTEENTH: divided by 16.
template <bool SIXTEENTH = false> DEVICE float byte_float(u32 v, int i) {
    return __uint_as_float(__byte_perm(v, SIXTEENTH ? 0x49000000u : 0x4b000000u, 0x7440 | i)) - (SIXTEENTH ? 524288.0f : 8388608.0f);
}

// Columns 4j to 4j + 3 of half h of group `sub`: a byte each.
DEVICE u32 quad(const u8* p, int sub, int h, u32 j) {
    const u8* b = WT < Q2K ? p + sub * BLOCK_BYTES : p;
    const u32 low = 0x0f0f0f0fu;
    if (WT == Q4_0) return four(b + 2 + 4 * j) >> 4 * h & low;
    if (WT == Q4_1) return four(b + 4 + 4 * j) >> 4 * h & low;
    if (WT == Q5_0) return (four(b + 6 + 4 * j) >> 4 * h & low) | fifths(four(b + 2) >> (16 * h + 4 * j));
    if (WT == Q5_1) return (four(b + 8 + 4 * j) >> 4 * h & low) | fifths(four(b + 4) >> (16 * h + 4 * j));
    if (WT == Q8_0) return four(b + 2 + 16 * h + 4 * j) ^ 0x80808080u;
    if (WT == Q5K) return (four(b + 48 + sub / 2 * 32 + 16 * h + 4 * j) >> sub % 2 * 4 & low) | (four(b + 16 + 16 * h + 4 * j) >> sub & 0x01010101u) << 4;
    const int n = sub / 4, i = sub % 4;
    return (four(b + n * 64 + i % 2 * 32 + 16 * h + 4 * j) >> i / 2 * 4 & low) | (four(b + 128 + n * 32 + 16 * h + 4 * j) >> 2 * i & 0x03030303u) << 4;
}
// The same as two pairs of f16, columns 4j, 4j + 2 and 4j + 1, 4j + 3, in units of 2^-24; of 2^-20 in odd groups of Q4K.
DEVICE void pairs(const u8* p, int sub, int h, u32 j, u32& even, u32& odd) {
    if (WT == Q4K) {
        const u32 v = four(p + 16 + sub / 2 * 32 + 16 * h + 4 * j), mask = sub % 2 ? 0x00f000f0u : 0x000f000fu;
        even = v & mask, odd = v >> 8 & mask;
    } else {
        const u32 v = quad(p, sub, h, j);
        even = __byte_perm(v, 0, 0x4240), odd = __byte_perm(v, 0, 0x4341);
    }
}

// Scales of a row's chunk: a value is d · scale · (number − MIDDLE), and with MINIMA m · minimum is added.
struct Scales {
    float d, m;
    // Bytes of groups.
    u32 scales[HALVES ? 4 : 2], minima[2];
    DEVICE Scales(const u8* p) {
        d = 1.0f, m = 1.0f;
        if (MINIMA) {
            d = half_of_two(p), m = -half_of_two(p + 2);
            const u32 a = four(p + 4), b = four(p + 8), c = four(p + 12);
            scales[0] = a & 0x3f3f3f3fu, scales[1] = (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u);
            minima[0] = b & 0x3f3f3f3fu, minima[1] = (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u);
        }
        if (HALVES) {
            d = half_of_two(p + 208);
#pragma unroll
            for (int i = 0; i < 4; i++) scales[HALVES ? i : 0] = four(p + 192 + 4 * i) ^ 0x80808080u;
        }
    }
    // Of half h of group `sub`; of odd groups of Q4K for numbers 16 times as large.
    DEVICE float scale(const u8* p, int sub, int h) const {
        // Bytes have a sign: 128 was added.
        if (HALVES) return byte_float(scales[HALVES ? sub / 2 : 0], sub % 2 * 2 + h) - 128.0f;
        if (!MINIMA) return half_of_two(p + sub * BLOCK_BYTES);
        return WT == Q4K && sub % 2 ? byte_float<true>(scales[sub / 4], sub % 4) : byte_float(scales[sub / 4], sub % 4);
    }
    DEVICE float minimum(const u8* p, int sub) const { return half_of_two(p + sub * BLOCK_BYTES + 2); }
    // Minima of groups 2j and 2j + 1 as a pair of f16, in units of 2^-24.
    DEVICE u32 minima_of(u32 j) const { return __byte_perm(j < 2 ? minima[0] : minima[1], 0, j % 2 ? 0x4342 : 0x4140); }
};
