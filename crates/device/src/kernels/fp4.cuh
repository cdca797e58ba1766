// MXFP4 as it lies in memory (src/scaled/mxfp4.rs): pieces of 16 rows × 64 columns, [N / 16][K / 64]. A piece has 32 lanes × 4
// words, then 32 exponents. Word s of lane 4·g + j has, for the columns 16s and on, operand r of an MMA in both halves: row g (r
// even) or g + 8, columns 2j and 2j + 1 (r < 2) or those 8 further. A half has, as sign, exponent and mantissa: of r = 0 bits 15
// and 8 to 6, r = 1 bits 12 and 5 to 3, r = 2 bits 9 and 2 to 0. Words 2p and 2p + 1 share the bits that are left for their r = 3:
// signs and mantissas are in the first, bits 14 and 13 of word 2p, 11 and 10 of word 2p + 1, exponents in the second, bits 14 and 13,
// 11 and 10. So three shifts and two selections bring both to where r = 0 and r = 1 are.
#pragma once
#include "prelude.cuh"

#define FP4_CODES 512
#define FP4_PIECE 544

// The byte of a piece where lane j = 0 has its word with this row and column; those of the next lanes are 16 bytes further.
DEVICE u32 fp4_word(u32 row, u32 column) { return row % 8 * 64 + column / 16 * 4; }
DEVICE u32 fp4_exponent(u32 row, u32 group) { return FP4_CODES + row % 8 * 4 + group * 2 + row / 8; }

// Operand r < 3 of a word, its fields where those of a bf16 are: the numbers are then 2^126 times too small, subnormal ones as well.
DEVICE u32 fp4_pair(u32 v, int r) { return v << 3 * r & 0x81c081c0u; }
// Bits of a where `mask` has ones, of b elsewhere.
DEVICE u32 bits_of(u32 a, u32 b, u32 mask) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(r) : "r"(a), "r"(b), "r"(mask));
    return r;
}
// Operands 3 of words 2p and 2p + 1 as operands 0 and 1 of a word.
DEVICE u32 fp4_last(u32 first, u32 second) { return bits_of(first >> 7, bits_of(first << 1, second >> 6, 0x90009000u), 0x00480048u); }
DEVICE float fp4_to_float(u32 half) { return __uint_as_float(half << 16) * 0x1p126f; }
// The power of 2 that an exponent stands for; 255 is no number.
DEVICE float power_of(u32 byte) { return __int_as_float(byte == 255 ? 0x7fc00000 : byte == 0 ? 1 << 22 : byte << 23); }
// Four bits as operand r < 3 of half a word has them.
DEVICE u32 fp4_placed(u32 code, int r) { return (code & 8) << (12 - 3 * r) | (code & 7) << (6 - 3 * r); }
// What half of word `word` has of operands 3: their four bits are a in word 2p and b in word 2p + 1.
DEVICE u32 fp4_shared(u32 a, u32 b, u32 word) {
    return word % 2 ? (a & 6) << 12 | (b & 6) << 9 : (a & 8) << 11 | (a & 1) << 13 | (b & 8) << 8 | (b & 1) << 10;
}
