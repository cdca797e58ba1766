// y = epilogue(norm(x) · wᵀ + bias) for up to eight rows: weights are streamed once, 16 output columns at a time, by
// warps that each own every WARPS-th 64-wide chunk of K and a ring of STAGES chunks in shared memory. Tensor cores
// compute the sums (weights are the 16-row operand, tokens the 8-column one), so the kernel is limited only by
// reading the weights. When a warp has few chunks (HELD), it keeps its part of x in registers: nothing is exchanged
// before the MMA, and the norm's scale, which needs all of x, is applied to the sums. The rings are filled before the
// wait for the predecessor: weights are in flight across the kernel boundary, which is what makes small batches fast.
//
// K, N, ROWS, WARPS, STAGES, ROUNDS (tiles of the busiest block), TYPE (of x and w), NT, BT, RT, YT; NORM, BIAS,
// EPILOGUE (0 store, 1 residual, 2 silu·mul, 4 gelu·mul). K is a multiple of 64.
#include "prelude.cuh"

#define CHUNK 64
#define CHUNKS (K / CHUNK)
#define STAGE_BYTES (16 * CHUNK * 2)
#define X_PITCH (K * 2 + 64)
#define TILES ((N + 15) / 16)
// Chunks of the busiest warp. HELD multiplies x by the norm's weight before scaling: F16 may overflow, bf16 does not.
#define PER_WARP ((CHUNKS + WARPS - 1) / WARPS)
#define HELD (PER_WARP <= 4 && (!NORM || (TYPE == BF16 && NT == BF16)))
#define GATED (EPILOGUE == 2 || EPILOGUE == 4)
#define OUT (GATED ? 8 : 16)
// Tiles between two exchanges of the warps.
#define BATCH (ROUNDS <= 4 ? ROUNDS : 4)
// Warps that prepare one row of x, and 8-element vectors per thread of these warps.
#define GROUPS (ROWS <= 1 ? 1 : ROWS <= 2 ? 2 : ROWS <= 4 ? 4 : 8)
#define WARPS_PER_ROW (WARPS / GROUPS)
#define VECTORS ((K / 8 + WARPS_PER_ROW * 32 - 1) / (WARPS_PER_ROW * 32))

DEVICE void fetch(u32 stage, const u16* w, u32 tile, u32 chunk, u64 stride, u32 lane) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 row = i * 4 + lane / 8, piece = lane % 8;
        const u32 column = min(tile * 16 + row, N - 1u);
        copy16_async(stage + row * 128 + ((piece ^ (row & 1) << 2) << 4),
                     w + column * stride + chunk * CHUNK + piece * 8);
    }
}

// Adds up the warps' parts of one output (or gate and up) and stores it.
DEVICE void finish(const float* parts, u32 tile, u32 out, u32 row, float before, const void* bias, void* y, u32 stride,
                   const float (*squares)[8], float eps) {
    float scale = 1.0f;
    if (NORM && HELD) {
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
        if (BIAS) gate += load1<BT>(bias, 2 * column), up += load1<BT>(bias, 2 * column + 1);
        store1<YT>(y, (u64)row * stride + column, gate / (1.0f + __expf(-gate_exponent<EPILOGUE>(gate))) * up);
    } else {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) sum += parts[i * (16 * ROWS) + row * 16 + out];
        sum *= scale;
        const u32 column = tile * 16 + out;
        if (column >= N) return;
        if (BIAS) sum += load1<BT>(bias, column);
        store1<YT>(y, (u64)row * stride + column, sum + before);
    }
}

template <int T_> DEVICE u32 times(u32 a, u32 b) {
    return pack2<T_>(low_half<T_>(a) * low_half<T_>(b), high_half<T_>(a) * high_half<T_>(b));
}

template <int T_> DEVICE float square(u32 v) {
    const float a = low_half<T_>(v), b = high_half<T_>(v);
    return a * a + b * b;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, HELD && PER_WARP > 2 ? 1 : 1024 / (WARPS * 32))
linear_stream(const void* x, const u16* w, const void* bias, const void* norm, const void* residual, void* y,
              u32 x_stride, u32 w_stride, u32 r_stride, u32 y_stride, float eps) {
    extern __shared__ __align__(128) u8 memory[];
    u8* xs = memory + WARPS * STAGES * STAGE_BYTES;
    float* partial = (float*)(xs + (HELD ? 0 : ROWS * X_PITCH));
    __shared__ float squares[WARPS][8];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
    const u32 ring = shared_address(memory) + warp * STAGES * STAGE_BYTES;

    // The chunks this warp will read: (tile, chunk) in order.
    u32 next_tile = blockIdx.x, next_chunk = warp;
    if (warp >= CHUNKS) next_tile = TILES;
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        if (next_tile < TILES) {
            fetch(ring + s * STAGE_BYTES, w, next_tile, next_chunk, w_stride, lane);
            next_chunk += WARPS;
            if (next_chunk >= CHUNKS) next_chunk = warp, next_tile += gridDim.x;
        }
        commit_copies();
    }
    const u32 row = warp / WARPS_PER_ROW, first = (warp % WARPS_PER_ROW) * 32 + lane;
    // The norm's weights do not depend on the predecessor either.
    float early[8];
    if (NORM && !HELD && VECTORS == 1 && first < K / 8) load8<NT>(norm, first * 8, early);
    if (NORM && !HELD && VECTORS > 1)
        for (u32 i = threadIdx.x * 8; i < K; i += WARPS * 256)
            asm volatile("prefetch.global.L2 [%0];" ::"l"((const u8*)norm + (NT == F32 ? 4 : 2) * i));
    uint4 held[HELD ? 2 * PER_WARP : 1];
    if (HELD && NORM)
#pragma unroll
        for (int i = 0; i < 2 * PER_WARP; i++) {
            const u32 k = (warp + i / 2 * WARPS) * CHUNK + i % 2 * 32 + j * 8;
            float n[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
            if (k < K) load8<NT>(norm, k, n);
            held[i] = make_uint4(pack2<TYPE>(n[0], n[1]), pack2<TYPE>(n[2], n[3]), pack2<TYPE>(n[4], n[5]), pack2<TYPE>(n[6], n[7]));
        }
    let_successor_start();
    wait_for_predecessor();

    if (HELD) {
        // This lane's part of row g of x, times the norm's weights.
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * PER_WARP; i++) {
            const u32 k = (warp + i / 2 * WARPS) * CHUNK + i % 2 * 32 + j * 8;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (g < ROWS && k < K) v = *(const uint4*)((const u16*)x + (u64)g * x_stride + k);
            if (NORM) {
                sum += square<TYPE>(v.x) + square<TYPE>(v.y) + square<TYPE>(v.z) + square<TYPE>(v.w);
                v.x = times<TYPE>(v.x, held[i].x), v.y = times<TYPE>(v.y, held[i].y);
                v.z = times<TYPE>(v.z, held[i].z), v.w = times<TYPE>(v.w, held[i].w);
            }
            held[i] = v;
        }
        if (NORM) {
            sum += __shfl_xor_sync(FULL, sum, 1);
            sum += __shfl_xor_sync(FULL, sum, 2);
            if (j == 0) squares[warp][g] = sum;
        }
    } else if (row < ROWS) {
        // x, normalised, to shared memory.
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const u32 i = first + v * WARPS_PER_ROW * 32;
            if (i >= K / 8) continue;
            const uint4 raw = *(const uint4*)((const u16*)x + (u64)row * x_stride + i * 8);
            *(uint4*)(xs + row * X_PITCH + i * 16) = raw;
            if (NORM) sum += square<TYPE>(raw.x) + square<TYPE>(raw.y) + square<TYPE>(raw.z) + square<TYPE>(raw.w);
        }
        if (NORM) {
            sum = warp_sum(sum);
            if (lane == 0) squares[warp][0] = sum;
            asm volatile("bar.sync %0, %1;" ::"r"(row + 1), "n"(WARPS_PER_ROW * 32) : "memory");
            sum = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS_PER_ROW; i++) sum += squares[row * WARPS_PER_ROW + i][0];
            const float scale = 1.0f / sqrtf(sum / (float)K + eps);
#pragma unroll 2
            for (int v = 0; v < VECTORS; v++) {
                const u32 i = first + v * WARPS_PER_ROW * 32;
                if (i >= K / 8) continue;
                uint4* at = (uint4*)(xs + row * X_PITCH + i * 16);
                uint4 raw = *at;
                float n[8];
                if (VECTORS > 1) load8<NT>(norm, i * 8, n);
                else
#pragma unroll
                    for (int t = 0; t < 8; t++) n[t] = early[t];
                raw.x = pack2<TYPE>(low_half<TYPE>(raw.x) * (scale * n[0]), high_half<TYPE>(raw.x) * (scale * n[1]));
                raw.y = pack2<TYPE>(low_half<TYPE>(raw.y) * (scale * n[2]), high_half<TYPE>(raw.y) * (scale * n[3]));
                raw.z = pack2<TYPE>(low_half<TYPE>(raw.z) * (scale * n[4]), high_half<TYPE>(raw.z) * (scale * n[5]));
                raw.w = pack2<TYPE>(low_half<TYPE>(raw.w) * (scale * n[6]), high_half<TYPE>(raw.w) * (scale * n[7]));
                *at = raw;
            }
        }
    }
    if (!HELD) __syncthreads();

    const u8* mine = memory + warp * STAGES * STAGE_BYTES;
    const u8* x_mine = xs + (g < ROWS ? g : 0) * X_PITCH + j * 16;
    u32 stage = 0, buffer = 0, count = 0;
    // Tiles are finished BATCH at a time (BATCH · OUT · ROWS ≤ threads). This thread finishes column `out` and row
    // `out_row` of tile `own`, which is number `item` of the batch.
    const u32 item = threadIdx.x / (OUT * ROWS), rest = threadIdx.x - item * (OUT * ROWS);
    const u32 out = rest % OUT, out_row = rest / OUT;
    u32 own = blockIdx.x + item * gridDim.x;
    float before = 0.0f;
    for (u32 tile = blockIdx.x; tile < TILES; tile += gridDim.x) {
        if (EPILOGUE == 1 && count == 0 && item < BATCH && own < TILES && own * 16 + out < N)
            before = load1<RT>(residual, (u64)out_row * r_stride + own * 16 + out);
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int turn = 0; turn < PER_WARP; turn++) {
            const u32 chunk = warp + turn * WARPS;
            if (chunk >= CHUNKS) break;
            wait_copies<STAGES - 1>();
            __syncwarp();
            const u8* at = mine + stage * STAGE_BYTES + g * 128;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const u32 piece = ((h * 4 + j) ^ (g & 1) << 2) << 4;
                const uint4 a = *(const uint4*)(at + piece);
                const uint4 b = *(const uint4*)(at + 8 * 128 + piece);
                uint4 v = HELD ? held[HELD ? 2 * turn + h : 0] : make_uint4(0, 0, 0, 0);
                if (!HELD && g < ROWS) v = *(const uint4*)(x_mine + chunk * (CHUNK * 2) + h * 64);
                mma_16x8x16<TYPE>(sums, a.x, b.x, a.y, b.y, v.x, v.y);
                mma_16x8x16<TYPE>(sums, a.z, b.z, a.w, b.w, v.z, v.w);
            }
            __syncwarp();
            if (next_tile < TILES) {
                fetch(ring + stage * STAGE_BYTES, w, next_tile, next_chunk, w_stride, lane);
                next_chunk += WARPS;
                if (next_chunk >= CHUNKS) next_chunk = warp, next_tile += gridDim.x;
            }
            commit_copies();
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        // [buffer][tile of the batch][warp][row of x][column]
        float* to = partial + ((buffer + count) * WARPS + warp) * (16 * ROWS);
        if (2 * j < ROWS) to[2 * j * 16 + g] = sums[0], to[2 * j * 16 + g + 8] = sums[2];
        if (2 * j + 1 < ROWS) to[(2 * j + 1) * 16 + g] = sums[1], to[(2 * j + 1) * 16 + g + 8] = sums[3];
        if (++count < BATCH && tile + gridDim.x < TILES) continue;
        __syncthreads();
        if (item < count)
            finish(partial + (buffer + item) * WARPS * (16 * ROWS), own, out, out_row, before, bias, y, y_stride, squares, eps);
        own += BATCH * gridDim.x;
        count = 0;
        if (ROUNDS > BATCH) buffer ^= BATCH;
    }
}
