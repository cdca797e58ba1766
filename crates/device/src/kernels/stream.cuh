// How kernels that stream weights finish their sums: the warps' parts of tiles of 16 output columns are added up, and up
// to BATCH tiles are stored at a time. N, K, ROWS, WARPS, ROUNDS, SETS, WEIGHT, EPILOGUE, BIAS, types; LATE_NORM: the
// norm's scale is applied here.
#pragma once
#include "prelude.cuh"

#define GATED (EPILOGUE == 2 || EPILOGUE == 4)
#define OUT (GATED ? 8 : 16)
// Tiles between two exchanges of the warps.
#define MOST (WARPS * 2 / ROWS < 4 ? WARPS * 2 / ROWS : 4)
#define BATCH (ROUNDS <= MOST ? ROUNDS : MOST)

// Adds up the warps' parts of one output (or gate and up) and stores it.
DEVICE void finish(const float* parts, u32 tile, u32 out, u32 row, float before, const void* bias, void* y, u32 stride,
                   const float (*squares)[8 * SETS], float eps, const float* scales) {
    float scale = 1.0f;
    if (LATE_NORM) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) sum += squares[i][row];
        scale = 1.0f / sqrtf(sum / (float)K + eps);
    }
    if (GATED) {
        float gate = 0.0f, up = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            const float2 v = *(const float2*)(parts + i * (16 * ROWS) + row * 16 + 2 * out);
            gate += v.x, up += v.y;
        }
        gate *= scale, up *= scale;
        const u32 column = tile * 8 + out;
        if (column >= N / 2) return;
        if (WEIGHT == FP8_CHANNEL) gate *= scales[2 * column], up *= scales[2 * column + 1];
        if (BIAS) gate += load1<BT>(bias, 2 * column), up += load1<BT>(bias, 2 * column + 1);
        store1<YT>(y, (u64)row * stride + column, gate / (1.0f + __expf(-gate_exponent<EPILOGUE>(gate))) * up);
    } else {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) sum += parts[i * (16 * ROWS) + row * 16 + out];
        sum *= scale;
        const u32 column = tile * 16 + out;
        if (column >= N) return;
        if (WEIGHT == FP8_CHANNEL) sum *= scales[column];
        if (BIAS) sum += load1<BT>(bias, column);
        store1<YT>(y, (u64)row * stride + column, after(sum + before));
    }
}
