// MXFP4 as it lies in memory (src/scaled/mxfp4.rs): pieces of 16 rows × 64 columns, [N / 16][K / 64]. A piece has 32 lanes × 4
// words, then 32 exponents. Word s of lane 4·g + j has, for the columns 16s and on, operand r of an MMA in both halves: row g (r
// even) or g + 8, columns 2j and 2j + 1 (r < 2) or those 8 further. A half has, as sign, exponent and mantissa: of r = 0 bits 15
// and 8 to 6, r = 1 bits 12 and 5 to 3, r = 2 bits 9 and 2 to 0, r = 3 bits 14, 13, 11, 10.
#pragma once
#include "prelude.cuh"

#define FP4_CODES 512
#define FP4_PIECE 544

// The byte of a piece where lane j = 0 has its word with this row and column; those of the next lanes are 16 bytes further.
DEVICE u32 fp4_word(u32 row, u32 column) { return row % 8 * 64 + column / 16 * 4; }
DEVICE u32 fp4_exponent(u32 row, u32 group) { return FP4_CODES + row % 8 * 4 + group * 2 + row / 8; }

// Operand r of a word, its fields where those of a bf16 are: the numbers are then 2^126 times too small, subnormal ones as well.
DEVICE u32 fp4_pair(u32 v, int r) {
    if (r == 3) return (v << 1 & 0x80008000u) | (v >> 5 & 0x01000100u) | (v >> 4 & 0x00c000c0u);
    return v << 3 * r & 0x81c081c0u;
}
DEVICE float fp4_to_float(u32 half) { return __uint_as_float(half << 16) * 0x1p126f; }
// The power of 2 that an exponent stands for; 255 is no number.
DEVICE float power_of(u32 byte) { return __int_as_float(byte == 255 ? 0x7fc00000 : byte == 0 ? 1 << 22 : byte << 23); }
// Four bits as operand r of half a word has them.
DEVICE u32 fp4_placed(u32 code, int r) {
    return r == 3 ? (code & 12) << 11 | (code & 3) << 10 : (code & 8) << (12 - 3 * r) | (code & 7) << (6 - 3 * r);
}
