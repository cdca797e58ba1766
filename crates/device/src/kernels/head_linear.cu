// A matrix for each head, with tensor cores. A block takes a head, COLUMNS of its results and 16 · WM tokens: WM warps
// along the tokens, WN along the columns. Weights are on their way to shared memory before the wait. A result is summed
// in two alternating sums over K in order, whatever the shape of the block.
//
// K inputs (a multiple of 32), N outputs, EACH elements of a head of x: those behind K are copied behind the results.
// TURNED: the head's matrix is K × N, else N × K. COLUMNS = 8 · TILES · WN (TURNED: TILES is even); TYPE of x and w, YT.
#include "prelude.cuh"

#define THREADS (32 * WM * WN)
#define TOKENS (16 * WM)
#define X_PITCH (K * 2 + 16)
#define W_ROWS (TURNED ? K : COLUMNS)
#define W_COLUMNS (TURNED ? COLUMNS : K)
#define W_PITCH (W_COLUMNS * 2 + 16)
#define MADE (N + EACH - K)

extern "C" __global__ void __launch_bounds__(THREADS)
head_linear(const u16* x, const u16* w, void* y, u32 rows, u32 x_stride, u32 w_stride, u32 y_stride, const u32* live) {
    extern __shared__ __align__(128) u8 memory[];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
    const u32 head = blockIdx.y, column = blockIdx.x * COLUMNS, first = blockIdx.z * TOKENS;
    const u32 weights = shared_address(memory), inputs = weights + W_ROWS * W_PITCH;
    for (u32 i = threadIdx.x; i < W_ROWS * (W_COLUMNS / 8); i += THREADS) {
        const u32 r = i / (W_COLUMNS / 8), at = i % (W_COLUMNS / 8);
        const u16* from = TURNED ? w + (u64)(head * K + r) * w_stride + column : w + (u64)(head * N + column + r) * w_stride;
        copy16_async(weights + r * W_PITCH + at * 16, from + at * 8);
    }
    let_successor_start();
    wait_for_predecessor();
    const u32 count = live ? min(rows, *live) : rows;
    if (first >= count) {
        wait_copies<0>();
        return;
    }
    for (u32 i = threadIdx.x; i < TOKENS * (K / 8); i += THREADS) {
        const u32 t = first + i / (K / 8), at = i % (K / 8);
        copy16_async_or_zero(inputs + i / (K / 8) * X_PITCH + at * 16,
                             x + (u64)min(t, rows - 1) * x_stride + head * EACH + at * 8, t < count);
    }
    commit_copies();
#if EACH > K
#define REST (EACH - K)
    // The blocks of a head divide what is copied.
#if YT == TYPE && REST % 8 == 0 && K % 8 == 0 && N % 8 == 0
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < TOKENS * (REST / 8); i += gridDim.x * THREADS) {
        const u32 t = first + i / (REST / 8), at = i % (REST / 8) * 8;
        if (t < count) *(uint4*)((u16*)y + (u64)t * y_stride + head * MADE + N + at) = *(const uint4*)(x + (u64)t * x_stride + head * EACH + K + at);
    }
#else
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < TOKENS * REST; i += gridDim.x * THREADS) {
        const u32 t = first + i / REST, at = i % REST;
        if (t < count) store1<YT>(y, (u64)t * y_stride + head * MADE + N + at, load1<TYPE>(x, (u64)t * x_stride + head * EACH + K + at));
    }
#endif
#endif
    wait_copies<0>();
    __syncthreads();

    const u32 row = warp / WN * 16, mine = warp % WN * (8 * TILES);
    float sums[2][TILES][4];
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[0][n][e] = sums[1][n][e] = 0.0f;
#pragma unroll 4
    for (u32 s = 0; s < K / 32; s++) {
        u32 a[2][4];
#pragma unroll
        for (int h = 0; h < 2; h++) load_matrices(a[h], inputs + (row + lane % 16) * X_PITCH + (2 * s + h) * 32 + lane / 16 * 16);
        if (TURNED) {
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int n = 0; n < TILES; n += 2) {
                    u32 b[4];
                    load_matrices_transposed(b, weights + ((2 * s + h) * 16 + lane % 16) * W_PITCH + (mine + n * 8 + lane / 16 * 8) * 2);
                    mma_16x8x16<TYPE>(sums[h][n], a[h][0], a[h][1], a[h][2], a[h][3], b[0], b[1]);
                    mma_16x8x16<TYPE>(sums[h][(n + 1) % TILES], a[h][0], a[h][1], a[h][2], a[h][3], b[2], b[3]);
                }
        } else {
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                u32 b[4];
                load_matrices(b, weights + (mine + n * 8 + lane % 8) * W_PITCH + s * 64 + lane / 8 * 16);
                mma_16x8x16<TYPE>(sums[0][n], a[0][0], a[0][1], a[0][2], a[0][3], b[0], b[1]);
                mma_16x8x16<TYPE>(sums[1][n], a[1][0], a[1][1], a[1][2], a[1][3], b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 t = first + row + g + 8 * half;
            const u64 to = (u64)t * y_stride + head * MADE + column + mine + n * 8 + 2 * j;
            const float a = sums[0][n][2 * half] + sums[1][n][2 * half], b = sums[0][n][2 * half + 1] + sums[1][n][2 * half + 1];
            if (t >= count) continue;
            if (YT == F32) *(float2*)((float*)y + to) = make_float2(a, b);
            else *(u32*)((u16*)y + to) = pack2<YT>(a, b);
        }
}
