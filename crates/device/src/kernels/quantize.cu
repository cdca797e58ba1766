// x as e4m3 for the kernels with e4m3 weights: scales of 128 columns of a row, [K / 128][s_stride], and bytes in the
// order of weights.cuh. Eight lanes take 128 columns. MODE 0: x itself, 1: RMS norm of x (a block per row), 2: SiLU·mul of
// the pairs (gate, up) of 2·K columns. WHOLE: one scale for a row, [rows]. K is a multiple of 128; types bf16 (NT: of the norm); LIVE: rows
// past *live are left out.
#include "weights.cuh"

#define THREADS 256
// A block has a whole row.
#define BY_ROW (MODE == 1 || WHOLE)
// 16-column pieces of a row, and those of a thread.
#define PIECES (K / 16)
#define EACH ((PIECES + THREADS - 1) / THREADS)

DEVICE float silu_mul(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

// The largest of a value over the block.
DEVICE float block_most(float v) {
    __shared__ float most[THREADS / 32];
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) v = fmaxf(v, __shfl_xor_sync(FULL, v, lanes));
    if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0.0f;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) v = fmaxf(v, most[w]);
    return v;
}

template <int T> DEVICE void load16(const void* x, u64 at, float (&v)[16]) {
    float a[8], b[8];
    load8<T>(x, at, a);
    load8<T>(x, at + 8, b);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = a[i], v[i + 8] = b[i];
}

extern "C" __global__ void __launch_bounds__(THREADS)
quantize(const void* x, const void* norm, u8* y, float* scales, const u32* live, u32 rows, u32 x_stride, u32 y_stride,
         u32 s_stride, float eps) {
    __shared__ float part[THREADS / 32];
    let_successor_start();
    // Weights of the norm do not depend on the predecessor: they are here when the sum of squares is.
    float weights[MODE == 1 ? EACH : 1][16];
    if (MODE == 1)
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (threadIdx.x + e * THREADS < PIECES) load16<NT>(norm, (threadIdx.x + e * THREADS) * 16, weights[e]);
    wait_for_predecessor();
    const u32 row = BY_ROW ? blockIdx.x : blockIdx.y;
    if (LIVE && row >= min(*live, rows)) return;
    const u64 from = (u64)row * x_stride;
    float v[BY_ROW ? EACH : 1][16];
    float scale = 1.0f;
    if (MODE == 1) {
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const u32 piece = threadIdx.x + e * THREADS;
            if (piece >= PIECES) continue;
            load16<BF16>(x, from + piece * 16, v[e]);
#pragma unroll
            for (int i = 0; i < 16; i++) sum += v[e][i] * v[e][i];
        }
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
        __syncthreads();
        sum = 0.0f;
#pragma unroll
        for (int w = 0; w < THREADS / 32; w++) sum += part[w];
        scale = 1.0f / sqrtf(sum / (float)K + eps);
    }
    float whole = 0.0f;
#pragma unroll
    for (int e = 0; e < (BY_ROW ? EACH : 1); e++) {
        const u32 piece = BY_ROW ? threadIdx.x + e * THREADS : blockIdx.x * THREADS + threadIdx.x;
        // Whole groups of eight lanes leave together, but a shuffle wants all lanes.
        const bool has = piece < PIECES;
        float most = 0.0f;
        if (has) {
            if (MODE == 0) load16<BF16>(x, from + piece * 16, v[e]);
            if (MODE == 2) {
                float a[16], b[16];
                load16<BF16>(x, from + piece * 32, a);
                load16<BF16>(x, from + piece * 32 + 16, b);
#pragma unroll
                for (int i = 0; i < 8; i++)
                    v[e][i] = silu_mul(a[2 * i], a[2 * i + 1]), v[e][i + 8] = silu_mul(b[2 * i], b[2 * i + 1]);
            }
            if (MODE == 1)
#pragma unroll
                for (int i = 0; i < 16; i++) v[e][i] *= scale * weights[e][i];
#pragma unroll
            for (int i = 0; i < 16; i++) {
                // What a kernel with bf16 activations would read.
                if (MODE) v[e][i] = rounded<BF16>(v[e][i]);
                most = fmaxf(most, fabsf(v[e][i]));
            }
        }
        if (WHOLE) {
            whole = fmaxf(whole, most);
            continue;
        }
#pragma unroll
        for (int lanes = 1; lanes < 8; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(FULL, most, lanes));
        if (!has) continue;
        const Fit fit = fit_e4m3(most);
        *(uint4*)(y + (u64)row * y_stride + piece * 16) = pack16_e4m3(v[e], fit.inverse);
        if (piece % 8 == 0) scales[(u64)(piece / 8) * s_stride + row] = fit.scale;
    }
    if (WHOLE) {
        const Fit fit = fit_e4m3(block_most(whole));
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const u32 piece = threadIdx.x + e * THREADS;
            if (piece < PIECES) *(uint4*)(y + (u64)row * y_stride + piece * 16) = pack16_e4m3(v[e], fit.inverse);
        }
        if (threadIdx.x == 0) scales[row] = fit.scale;
    }
}
