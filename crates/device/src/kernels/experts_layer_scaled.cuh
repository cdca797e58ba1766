// What `experts_layer.cu` needs for e4m3 weights: sums of one row by lanes, and of sixteen rows by MMA.
#pragma once
#include "weights.cuh"

// Eight weights, in the order of bytes.
DEVICE float dot8(const uint2& w, const float (&x)[8], float sum) {
    const u32 v[2] = {w.x, w.y};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 low, high;
        widen_fp8_half(v[i], low, high);
        sum = fmaf(low_half<F16>(low), x[4 * i], sum);
        sum = fmaf(high_half<F16>(low), x[4 * i + 1], sum);
        sum = fmaf(low_half<F16>(high), x[4 * i + 2], sum);
        sum = fmaf(high_half<F16>(high), x[4 * i + 3], sum);
    }
    return sum;
}
// Of sixteen columns, bytes 0 to 7 are columns 0, 8, 1, 9, 2, 10, 3, 11, bytes 8 to 15 those four further. `first` has four
// columns, `second` the four that are eight further.
DEVICE void in_order(const uint2& first, const uint2& second, float (&x)[8]) {
    x[0] = low_half<BF16>(first.x), x[2] = high_half<BF16>(first.x), x[4] = low_half<BF16>(first.y), x[6] = high_half<BF16>(first.y);
    x[1] = low_half<BF16>(second.x), x[3] = high_half<BF16>(second.x), x[5] = low_half<BF16>(second.y), x[7] = high_half<BF16>(second.y);
}
// A token's columns as the right operand of MMAs whose left one is a warp's 256 columns of e4m3: lane 4·g + j has pieces j,
// 4 + j, 8 + j and 12 + j of sixteen columns. As f16, which the weights are widened to.
struct Operand {
    u32 first[4][4], second[4][4];
    DEVICE void make(const uint4& mine, u32 lane) {
        const u32 w[4] = {mine.x, mine.y, mine.z, mine.w};
#pragma unroll
        for (int q = 0; q < 4; q++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 from = (q * 4 + lane % 4) * 2, a = __shfl_sync(FULL, w[i], from), b = __shfl_sync(FULL, w[i], from + 1);
                first[q][i] = pack_half(low_half<BF16>(a), low_half<BF16>(b));
                second[q][i] = pack_half(high_half<BF16>(a), high_half<BF16>(b));
            }
    }
};
// Adds 256 columns of rows g and g + 8, each 64 columns to sums of their own.
DEVICE void multiply(float (&c)[4][4], const u8* low, const u8* high, const Operand& x) {
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const uint4 a = *(const uint4*)(low + q * 64), b = *(const uint4*)(high + q * 64);
        const u32 v[4] = {a.x, a.y, a.z, a.w}, w[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 a0, a1, a2, a3;
            widen_fp8_half(v[i], a0, a2);
            widen_fp8_half(w[i], a1, a3);
            mma_16x8x16<F16>(c[q], a0, a1, a2, a3, x.first[q][i], x.second[q][i]);
        }
    }
}
