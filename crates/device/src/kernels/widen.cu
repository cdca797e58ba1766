// A matrix of any weight format as bf16, dense. WT; N rows, K columns, a multiple of 16.
#include "scaled.cuh"
#include "wgmma.cuh"

// Sixteen e4m3 with one scale.
DEVICE void widen16(uint4 v, float scale, u32 (&out)[8]) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const u32 w = words[j];
        out[j] = pack_bf16(e4m3_to_float(w & 255) * scale, e4m3_to_float(w >> 16 & 255) * scale);
        out[j + 4] = pack_bf16(e4m3_to_float(w >> 8 & 255) * scale, e4m3_to_float(w >> 24) * scale);
    }
}

extern "C" __global__ void __launch_bounds__(256)
widen(const void* w, u16* y) {
    let_successor_start();
    // Weights do not change: only y has to wait.
    wait_for_predecessor();
    const u64 first = (u64)blockIdx.x * 256 + threadIdx.x, step = (u64)gridDim.x * 256;
    if (WT >= I4_128 && WT != MXFP4) {
        // A lane's words of 64 columns (of 32, in small groups) and 16 rows.
        const u32 wide = piece_columns<WT>(), words = WT == I4_32 ? 2 : 4, columns = 16 * words, parts = K / columns;
        for (u64 at = first; at < (u64)(N / 16) * parts * 32; at += step) {
            const u32 lane = at % 32, g = lane / 4, j = lane % 4, part = at / 32 % parts, column = part * columns;
            const u64 rows = at / 32 / parts;
            const u8* piece = (const u8*)w + (rows * (K / wide) + column / wide) * (wide * 8 + 48);
            const u8* behind = piece + wide * 8;
            const u32* from = (const u32*)(piece + (column % wide / columns * 32 + lane) * words * 4);
            float scale[2];
            int zero[2];
#pragma unroll
            for (int h = 0; h < 2; h++) scale[h] = f16_to_float(*(const u16*)(behind + (g + 8 * h) * 2)), zero[h] = behind[32 + g + 8 * h];
            // Pairs of columns of each step; lanes in fours exchange them, so that each stores eight columns.
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int h = i % 2;
                u32 v[4] = {};
#pragma unroll
                for (u32 s = 0; s < words; s++)
                    v[s] = pack_bf16((float)((int)(from[s] >> 4 * i & 15) - zero[h]) * scale[h], (float)((int)(from[s] >> 4 * (i + 4) & 15) - zero[h]) * scale[h]);
                exchange(v);
                if (j < words) *(uint4*)(y + (rows * 16 + g + 8 * h) * K + column + 16 * j + i / 2 * 8) = make_uint4(v[0], v[1], v[2], v[3]);
            }
        }
    } else if (WT >= F8_ROW && WT != MXFP4) {
        const float* scales = (const float*)((const u8*)w + (u64)N * K);
        for (u64 at = first; at < (u64)N * (K / 16); at += step) {
            const u32 row = at / (K / 16), piece = at % (K / 16);
            const float scale = scales[(u64)scale_row_of<WT>(row) * scale_columns<WT>(K) + (WT == F8_ROW ? 0 : piece / 8)];
            u32 out[8];
            widen16(((const uint4*)w)[at], scale, out);
            uint4* to = (uint4*)(y + at * 16);
            to[0] = make_uint4(out[0], out[1], out[2], out[3]);
            to[1] = make_uint4(out[4], out[5], out[6], out[7]);
        }
    } else {
        for (u64 at = first; at < (u64)N * (K / 8); at += step) {
            float v[8];
            elements8<WT>(w, N, K, K, at / (K / 8), at % (K / 8) * 8, v);
            ((uint4*)y)[at] = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
        }
    }
}
