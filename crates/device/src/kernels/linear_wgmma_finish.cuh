// How `linear_wgmma` finishes its sums: biases, residuals, activations, stores, and what the next norm needs. N, EPILOGUE, BIAS, WEIGHT, types,
// EARLY (residuals are loaded before), PRODUCES, CONSUMES.
#pragma once
#include "prelude.cuh"

struct Output {
    const void* bias;
    const void* residual;
    void* y;
    void* prepared;
    u32 r_stride, y_stride, rows;
    const float* scales;
};

// What a lane of a piece needs from memory: pairs of residuals and of the next norm's weights, for rows of the tile
// 2j, 2j + 1 and those + 8.
struct Pairs {
    u32 low, high;
};
DEVICE Pairs pairs_at(const void* from, u64 row, u32 column) {
    const u16* at = (const u16*)from + row + column;
    Pairs p = {0, 0};
    if (column < N) p.low = *(const u32*)at;
    if (column + 8 < N) p.high = *(const u32*)(at + 8);
    return p;
}

DEVICE float activated(float v) { return __fdividef(v, 1.0f + __expf(-gate_exponent<EPILOGUE>(v))); }

// Finishes the 16 weight rows from `top` and 8 tokens from `token`: v holds rows g, g, g+8, g+8 of tokens 2j, 2j+1.
// Rows of a tile are columns of y, so pieces are transposed to make stores wide. A sum is exchanged as two halves,
// which is more precise than the rounding at the end. Returns the lane's part of the squares of y in row `token` + g.
DEVICE float finish(const Output& o, u32 top, u32 token, float (&v)[4], float2 scale, Pairs before, Pairs next) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
    float squares = 0.0f;
    if (WEIGHT == FP8_CHANNEL) {
        const float low = top + g < N ? o.scales[top + g] : 0.0f, high = top + g + 8 < N ? o.scales[top + g + 8] : 0.0f;
        v[0] *= low, v[1] *= low, v[2] *= high, v[3] *= high;
    }
    if (CONSUMES) v[0] *= scale.x, v[1] *= scale.y, v[2] *= scale.x, v[3] *= scale.y;
    if (BIAS) {
        const float b0 = top + g < N ? load1<BT>(o.bias, top + g) : 0.0f;
        const float b1 = top + g + 8 < N ? load1<BT>(o.bias, top + g + 8) : 0.0f;
        v[0] += b0, v[1] += b0, v[2] += b1, v[3] += b1;
    }
    if (GATED && YT != F32) {
        // Lanes with even g have gates, those with odd g the ups that belong to them: the even lane computes output g
        // / 2, the odd one output (g - 1) / 2 + 4. Transposed, a lane has outputs j and j + 4 of token g, and gets
        // j's neighbours.
        const bool odd = g % 2;
        const float got0 = __shfl_xor_sync(FULL, odd ? v[0] : v[2], 4), got1 = __shfl_xor_sync(FULL, odd ? v[1] : v[3], 4);
        const float gate0 = odd ? got0 : v[0], gate1 = odd ? got1 : v[1], up0 = odd ? v[2] : got0, up1 = odd ? v[3] : got1;
        const u32 pair = transpose_8x8(pack2<YT>(activated(gate0) * up0, activated(gate1) * up1));
        const u32 a = __shfl_sync(FULL, pair, (lane & ~3u) | (2 * j & 3)), b = __shfl_sync(FULL, pair, (lane & ~3u) | (2 * j + 1 & 3));
        const u32 row = token + g, column = top / 2 + 2 * j;
        if (row < o.rows && column < N / 2)
            *(u32*)((u16*)o.y + (u64)row * o.y_stride + column) = __byte_perm(a, b, j < 2 ? 0x5410 : 0x7632);
    } else if (GATED) {
        // Lanes with even g have the gate, those with odd g the up of the same output.
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float up = __shfl_down_sync(FULL, v[e], 4);
            v[e] = v[e] / (1.0f + __expf(-gate_exponent<EPILOGUE>(v[e]))) * up;
        }
        if (g % 2 == 0)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const u32 row = token + 2 * j + e % 2, column = (top + g + e / 2 * 8) / 2;
                if (row < o.rows && column < N / 2) store1<YT>(o.y, (u64)row * o.y_stride + column, v[e]);
            }
    } else if (YT == F32) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const u32 row = token + 2 * j + e % 2, column = top + g + e / 2 * 8;
            if (row >= o.rows || column >= N) continue;
            if (EPILOGUE == 1) v[e] += load1<RT>(o.residual, (u64)row * o.r_stride + column);
            store1<YT>(o.y, (u64)row * o.y_stride + column, after(v[e]));
        }
    } else {
        const u32 row = token + g;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 high = pack_bf16(v[2 * half], v[2 * half + 1]);
            const u32 low = pack_bf16(v[2 * half] - low_half<BF16>(high), v[2 * half + 1] - high_half<BF16>(high));
            const u32 h = transpose_8x8(high), l = transpose_8x8(low), column = top + half * 8 + 2 * j;
            if (row >= o.rows || column >= N) continue;
            float a = low_half<BF16>(h) + low_half<BF16>(l), b = high_half<BF16>(h) + high_half<BF16>(l);
            if (EARLY) {
                const u32 pair = half ? before.high : before.low;
                a += low_half<RT>(pair), b += high_half<RT>(pair);
            } else if (EPILOGUE == 1) {
                a += load1<RT>(o.residual, (u64)row * o.r_stride + column);
                b += load1<RT>(o.residual, (u64)row * o.r_stride + column + 1);
            }
            const u32 stored = pack2<YT>(after(a), after(b));
            *(u32*)((u16*)o.y + (u64)row * o.y_stride + column) = stored;
            if (PRODUCES) {
                const u32 weights = half ? next.high : next.low;
                a = low_half<YT>(stored), b = high_half<YT>(stored);
                squares += a * a + b * b;
                *(u32*)((u16*)o.prepared + (u64)row * N + column) = pack2<YT>(a * low_half<YT>(weights), b * high_half<YT>(weights));
            }
        }
    }
    return squares;
}
