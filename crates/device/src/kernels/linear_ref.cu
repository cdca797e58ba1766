// y = epilogue(norm(x) · wᵀ + bias) for any formats and shapes: a warp per output column (or gate/up
// pair), ROWS rows at a time. Types XT, WT, NT (norm), BT (bias), RT (residual), YT; NORM, BIAS, LIVE;
// EPILOGUE 0 store, 1 residual, 2 silu·mul, 4 gelu·mul; AFTER (prelude.cuh); ALIGNED rows of x.
#include "scaled.cuh"

#define GATED (EPILOGUE == 2 || EPILOGUE == 4)
#define COLS (GATED ? 2 : 1)

extern "C" __global__ void __launch_bounds__(256)
linear_ref(const void* x, const void* w, const void* bias, const void* norm, const void* residual, void* y,
           const u32* live, u32 rows, u32 n, u32 k, u32 x_stride, u32 w_stride, u32 r_stride, u32 y_stride, float eps) {
    __shared__ float scales[ROWS];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.y * ROWS;
    let_successor_start();
    wait_for_predecessor();
    if (LIVE && *live < rows) rows = *live;
    if (first >= rows) return;
    const u32 count = rows - first < ROWS ? rows - first : ROWS;
    if (NORM) {
        for (u32 r = warp; r < count; r += 8) {
            float sum = 0.0f;
            for (u32 i = lane; i < k; i += 32) {
                const float v = load1<XT>(x, (u64)(first + r) * x_stride + i);
                sum += v * v;
            }
            sum = warp_sum(sum);
            if (lane == 0) scales[r] = 1.0f / sqrtf(sum / (float)k + eps);
        }
        __syncthreads();
    }
    const u32 column = blockIdx.x * 8 + warp;
    if (column * COLS >= n) return;
    float sums[COLS][ROWS];
#pragma unroll
    for (int c = 0; c < COLS; c++)
#pragma unroll
        for (int r = 0; r < ROWS; r++) sums[c][r] = 0.0f;
    for (u32 i = lane * 8; i < k; i += 256) {
        float weights[COLS][8], norms[8];
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            if (WT > BF16 || ALIGNED) elements8<WT>(w, n, k, w_stride, column * COLS + c, i, weights[c]);
            else {
                const u8* row = weight_row<WT>(w, column * COLS + c, w_stride);
                for (u32 t = 0; t < 8; t++) weights[c][t] = i + t < k ? load1<WT>(row, i + t) : 0.0f;
            }
        }
        if (NORM)
            for (u32 t = 0; t < 8; t++) norms[t] = i + t < k ? load1<NT>(norm, i + t) : 0.0f;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r >= count) break;
            const u64 at = (u64)(first + r) * x_stride + i;
            float v[8];
            if (ALIGNED) load8<XT>(x, at, v);
            else
                for (u32 t = 0; t < 8; t++) v[t] = i + t < k ? load1<XT>(x, at + t) : 0.0f;
            if (NORM)
#pragma unroll
                for (int t = 0; t < 8; t++) v[t] = rounded<XT>(v[t] * (scales[r] * norms[t]));
#pragma unroll
            for (int c = 0; c < COLS; c++)
#pragma unroll
                for (int t = 0; t < 8; t++) sums[c][r] += weights[c][t] * v[t];
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (r >= count) break;
        float p[COLS];
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            p[c] = warp_sum(sums[c][r]);
            if (BIAS) p[c] += load1<BT>(bias, column * COLS + c);
        }
        if (lane == 0) {
            float v = p[0];
            if (EPILOGUE == 1) v += load1<RT>(residual, (u64)(first + r) * r_stride + column);
            if (AFTER) v = activated<AFTER>(v);
            if (GATED) v = p[0] / (1.0f + expf(-gate_exponent<EPILOGUE>(p[0]))) * p[COLS - 1];
            store1<YT>(y, (u64)(first + r) * y_stride + column, v);
        }
    }
}
