// Elements of weights with scales, for kernels of any format. The order of bytes and scales: src/scaled.rs.
#pragma once
#include "fp4.cuh"
#include "quant.cuh"

// Columns of a piece of 4-bit values.
template <int T> DEVICE constexpr u32 piece_columns() { return T == I4_32 ? 32 : T == I4_64 ? 64 : 128; }

// The row of scales for a row.
template <int T> DEVICE u32 scale_row_of(u32 row) {
    return T == F8_PAIRS ? row / 256 * 2 + row % 2 : T == F8_TURNS ? row / 256 * 2 + row / 8 % 2 : T == F8_BLOCK ? row / 128 : row;
}
template <int T> DEVICE u32 scale_columns(u32 cols) { return T == F8_ROW ? 1 : (cols + 127) / 128; }

// Where the byte of a column of 16 lies.
DEVICE u32 byte_of(u32 column) { return column / 2 % 4 * 4 + column % 2 * 2 + column / 8; }

// The byte of a piece with the four bits of an element; rows 8 to 15 have the upper half.
template <int T> DEVICE u32 nibble_byte(u32 row, u32 column) {
    const u32 words = T == I4_32 ? 2 : 4, part = column / (16 * words), step = column / 16 % words, within = column % 16;
    return (part * 32 + row % 8 * 4 + within % 8 / 2) * words * 4 + step * 4 + within / 8 + within % 2 * 2;
}

// Eight elements from column i, a multiple of 8, of a row of a matrix; any weight format.
template <int T> DEVICE void elements8(const void* w, u32 rows, u32 cols, u64 stride, u32 row, u32 i, float (&out)[8]) {
    if (T == MXFP4) {
        const u8* piece = (const u8*)w + ((u64)(row / 16) * (cols / 64) + i / 64) * FP4_PIECE;
        const float power = power_of(piece[fp4_exponent(row % 16, i / 32 % 2)]);
        const u32* words = (const u32*)(piece + fp4_word(row % 16, i % 64));
        const int r = i / 8 % 2 * 2 + row / 8 % 2, word = i / 16 % 2;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32* at = words + 4 * j;
            const u32 pair = r == 3 ? fp4_pair(fp4_last(at[-word], at[1 - word]), word) : fp4_pair(*at, r);
            out[2 * j] = fp4_to_float(pair & 0xffff) * power, out[2 * j + 1] = fp4_to_float(pair >> 16) * power;
        }
    } else if (T < F8_ROW) {
        weights8<T>(weight_row<T>(w, row, stride), i, out);
    } else if (T < I4_128) {
        const u8* from = (const u8*)w + (u64)row * cols + i / 16 * 16;
        const float* scales = (const float*)((const u8*)w + (u64)rows * cols) + (u64)scale_row_of<T>(row) * scale_columns<T>(cols);
        const float scale = T == F8_ROW ? scales[0] : scales[i / 128];
#pragma unroll
        for (int t = 0; t < 8; t++) out[t] = e4m3_to_float(from[byte_of(i % 16 + t)]) * scale;
    } else {
        const u32 wide = piece_columns<T>(), bytes = wide * 8 + 48;
        const u8* piece = (const u8*)w + ((u64)(row / 16) * (cols / wide) + i / wide) * bytes;
        const u8* behind = piece + wide * 8;
        const float scale = f16_to_float(*(const u16*)(behind + row % 16 * 2));
        const int zero = behind[32 + row % 16];
#pragma unroll
        for (int t = 0; t < 8; t++) out[t] = (float)((piece[nibble_byte<T>(row % 16, i % wide + t)] >> (row / 8 % 2 * 4) & 15) - zero) * scale;
    }
}
