// Dummy weights from a seed; the same bits as on any other device. YT. For formats with scales every scale is the same:
// values are spread over the whole range of the format.
#include "scaled.cuh"
#include "weights.cuh"

DEVICE u64 hash(u64 seed, u64 i) {
    u64 z = seed + (i + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}
DEVICE float uniform(u64 seed, u64 i) { return __fsub_rn(__fmul_rn((float)(hash(seed, i) >> 40), 1.1920928955078125e-07f), 1.0f); }

extern "C" __global__ void __launch_bounds__(256)
noise(void* to, u32 rows, u32 cols, u32 stride, u64 seed, float mean, float scale) {
    let_successor_start();
    wait_for_predecessor();
    const u64 count = (u64)rows * cols, first = (u64)blockIdx.x * 256 + threadIdx.x, step = (u64)gridDim.x * 256;
    if (YT == MXFP4) {
        // Words, then exponents.
        for (u64 i = first; i < count / 64 * 8; i += step) {
            const u64 piece = i / 128;
            const u32 at = i % 128, g = at / 16, j = at / 4 % 4, strips = cols / 64;
            u32 word = 0;
            // Of operand r of a word the first element; the second is the next one.
            auto element = [&](u32 w, int r) {
                return (piece / strips * 16 + g + r % 2 * 8) * cols + piece % strips * 64 + w * 16 + 2 * j + r / 2 * 8;
            };
            auto code = [&](u64 i) { return (u32)(hash(seed, i) >> 60); };
#pragma unroll
            for (int r = 0; r < 3; r++) word |= fp4_placed(code(element(at % 4, r)), r) | fp4_placed(code(element(at % 4, r) + 1), r) << 16;
            const u64 a = element(at % 4 / 2 * 2, 3), b = element(at % 4 / 2 * 2 + 1, 3);
            word |= fp4_shared(code(a), code(b), at) | fp4_shared(code(a + 1), code(b + 1), at) << 16;
            *(u32*)((u8*)to + piece * FP4_PIECE + at * 4) = word;
        }
        for (u64 i = first; i < count / 32; i += step)
            ((u8*)to)[i / 32 * FP4_PIECE + FP4_CODES + i % 32] = (u8)(__float_as_uint(__fmul_rn(scale, 0.25f)) >> 23);
    } else if (YT >= I4_128) {
        const u32 wide = piece_columns<YT>(), bytes = wide * 8 + 48;
        // A byte has the same column of rows 8 apart.
        for (u64 i = first; i < count / 2; i += step) {
            const u32 column = i % cols, half = i / cols, row = half / 8 * 16 + half % 8;
            u8* piece = (u8*)to + ((u64)(row / 16) * (cols / wide) + column / wide) * bytes;
            const u64 at = (u64)row * cols + column;
            piece[nibble_byte<YT>(row % 16, column % wide)] = (u8)(hash(seed, at) >> 60 | hash(seed, at + 8ull * cols) >> 60 << 4);
            if (column % wide) continue;
            for (u32 r = row % 16; r < 16; r += 8) {
                *(u16*)(piece + wide * 8 + r * 2) = float_to_f16(__fdiv_rn(scale, 7.5f));
                piece[wide * 8 + 32 + r] = 7 + r % 2;
            }
        }
    } else if (YT >= F8_ROW) {
        for (u64 i = first; i < count; i += step)
            ((u8*)to)[i / 16 * 16 + byte_of(i % 16)] = (u8)pack_e4m3(__fmul_rn(uniform(seed, i), 448.0f), 0.0f);
        float* scales = (float*)((u8*)to + count);
        const u64 scale_rows = YT == F8_ROW ? rows : YT == F8_BLOCK ? (rows + 127) / 128 : (rows + 255) / 256 * 2, all = scale_rows * scale_columns<YT>(cols);
        for (u64 i = first; i < all; i += step) scales[i] = __fdiv_rn(scale, 448.0f);
    } else {
        for (u64 i = first; i < count; i += step)
            store1<YT>(to, i / cols * stride + i % cols, __fadd_rn(mean, __fmul_rn(scale, uniform(seed, i))));
    }
}
