// y = epilogue(x · wᵀ + bias) for eight rows and more on Hopper. Weights are the 64-row operand of the
// warpgroup product and tokens the columns, so that a small batch wastes nothing. One thread copies tiles
// (WIDE weight rows × 64, and COLUMNS tokens × 64) into a ring, its first weights before the wait for the
// predecessor; WIDE/64 warpgroups multiply. Blocks are persistent over units (weight tile, token tile,
// share of K); when K is shared by SPLIT units, each stores its sums and the last to arrive adds them up,
// always in the same order.
//
// K, N, ROWS, WIDE (64 or 128), COLUMNS (8, 16, 32, 64, 128, 256), STAGES, SPLIT, TYPE (of x, w), BT, RT, YT, BIAS,
// LIVE, EPILOGUE (0 store, 1 residual, 2 silu·mul). K is a multiple of 64 · SPLIT.
#include "wgmma.cuh"

#define GROUPS (WIDE / 64)
#define WEIGHT_BYTES (WIDE * 128)
#define TOKEN_BYTES (COLUMNS * 128)
#define STAGE_BYTES (WEIGHT_BYTES + TOKEN_BYTES)
#define TILES_N ((N + WIDE - 1) / WIDE)
#define TILES_T ((ROWS + COLUMNS - 1) / COLUMNS)
#define UNITS (TILES_N * TILES_T * SPLIT)
#define CHUNKS (K / 64 / SPLIT)

struct Unit {
    u32 tile, token, share;
};
// Shares of a tile are neighbours, then token tiles: what runs together reads the same weights.
DEVICE Unit unit_at(u32 i) {
    Unit u;
    u.share = i % SPLIT;
    u.token = i / SPLIT % TILES_T;
    u.tile = i / (SPLIT * TILES_T);
    return u;
}

struct alignas(64) Map {
    u64 words[16];
};

extern "C" __global__ void __launch_bounds__(GROUPS * 128 + 32, 1)
linear_wgmma(const __grid_constant__ Map x_map, const __grid_constant__ Map w_map, const void* bias,
             const void* residual, void* y, const u32* live, u32* semaphores, float* partial, u32 r_stride, u32 y_stride) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ u8 memory[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    __shared__ u32 arrived;
    const u32 base = (shared_address(memory) + 1023) & ~1023u, full = shared_address(barriers), empty = full + 8 * STAGES;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (warp == GROUPS * 4) {
        if (lane != 0) return;
        const u64 pass = TILES_T == 1 ? pass_policy() : keep_policy(), keep = keep_policy();
        // The first stages: weights before the wait, tokens after it.
        u32 ahead_unit = blockIdx.x, ahead_chunk = 0;
        for (u32 s = 0; s < STAGES && ahead_unit < UNITS; s++) {
            const Unit u = unit_at(ahead_unit);
            barrier_expect(full + 8 * s, STAGE_BYTES);
            tensor_copy(base + s * STAGE_BYTES, &w_map, (u.share * CHUNKS + ahead_chunk) * 64, u.tile * WIDE, full + 8 * s, pass);
            if (++ahead_chunk == CHUNKS) ahead_chunk = 0, ahead_unit += gridDim.x;
        }
        wait_for_predecessor();
        let_successor_start();
        asm volatile("fence.proxy.async;" ::: "memory");
        u32 step = 0;
        for (u32 i = blockIdx.x; i < UNITS; i += gridDim.x) {
            const Unit u = unit_at(i);
            for (u32 chunk = 0; chunk < CHUNKS; chunk++, step++) {
                const u32 s = step % STAGES, at = base + s * STAGE_BYTES;
                const u32 column = (u.share * CHUNKS + chunk) * 64;
                if (step >= STAGES) {
                    barrier_wait(empty + 8 * s, (step / STAGES - 1) & 1);
                    barrier_expect(full + 8 * s, STAGE_BYTES);
                    tensor_copy(at, &w_map, column, u.tile * WIDE, full + 8 * s, pass);
                }
                tensor_copy(at + WEIGHT_BYTES, &x_map, column, u.token * COLUMNS, full + 8 * s, keep);
            }
        }
        return;
    }

    wait_for_predecessor();
    const u32 group = warp / 4, g = lane / 4, j = lane % 4;
    const u32 rows = LIVE ? min(*live, (u32)ROWS) : ROWS;
    u32 step = 0;
    for (u32 i = blockIdx.x; i < UNITS; i += gridDim.x) {
        const Unit u = unit_at(i);
        float c[COLUMNS / 2];
#pragma unroll 1
        for (u32 chunk = 0; chunk < CHUNKS; chunk++, step++) {
            const u32 s = step % STAGES, at = base + s * STAGE_BYTES;
            barrier_wait(full + 8 * s, (step / STAGES) & 1);
            const u64 a = swizzled_tile(at + group * 8192), b = swizzled_tile(at + WEIGHT_BYTES);
            product_begin();
#pragma unroll
            for (int k = 0; k < 4; k++) Product<TYPE, COLUMNS>::add(c, a + 2 * k, b + 2 * k, chunk + k > 0);
            product_commit();
            // The product before this one is done: its stage can be filled again.
            product_wait<1>();
            if (chunk > 0 && threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * ((step - 1) % STAGES));
        }
        product_wait<0>();
        if (threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * ((step - 1) % STAGES));

        if (SPLIT > 1) {
            // [unit][register / 4][thread] of float4
            const u32 tile = i / SPLIT;
            float4* mine = (float4*)partial + (u64)i * (GROUPS * 128 * (COLUMNS / 8)) + threadIdx.x;
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++)
                __stcg(&mine[n * GROUPS * 128], make_float4(c[4 * n], c[4 * n + 1], c[4 * n + 2], c[4 * n + 3]));
            __threadfence();
            asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128) : "memory");
            if (threadIdx.x == 0) {
                arrived = add_acquire_release(&semaphores[tile], 1);
                if (arrived == SPLIT - 1) semaphores[tile] = 0;
            }
            asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128) : "memory");
            const bool last = arrived == SPLIT - 1;
            asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 128) : "memory");
            if (!last) continue;
            __threadfence();
            const float4* all = (const float4*)partial + (u64)tile * SPLIT * (GROUPS * 128 * (COLUMNS / 8)) + threadIdx.x;
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++) {
                float4 sum = __ldcg(&all[n * GROUPS * 128]);
#pragma unroll
                for (int share = 1; share < SPLIT; share++) {
                    const float4 v = __ldcg(&all[(share * (COLUMNS / 8) + n) * GROUPS * 128]);
                    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
                }
                c[4 * n] = sum.x, c[4 * n + 1] = sum.y, c[4 * n + 2] = sum.z, c[4 * n + 3] = sum.w;
            }
        }

        // Rows of the 64-row tile are columns of y. Transposed in 8×8 pieces so that stores are wide; a
        // sum is carried as two halves, which loses nothing that the one rounding at the end would keep.
        const u32 top = u.tile * WIDE + group * 64 + warp % 4 * 16;
        const float bias0 = BIAS && top + g < N ? load1<BT>(bias, top + g) : 0.0f;
        const float bias1 = BIAS && top + g + 8 < N ? load1<BT>(bias, top + g + 8) : 0.0f;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++) {
            float v[4] = {c[4 * n] + bias0, c[4 * n + 1] + bias0, c[4 * n + 2] + bias1, c[4 * n + 3] + bias1};
            if (EPILOGUE == 2) {
                // Lane g even has the gate, g odd the up of the same output.
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float up = __shfl_down_sync(FULL, v[e], 4);
                    v[e] = v[e] / (1.0f + __expf(-v[e])) * up;
                }
                if (g % 2 == 0)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const u32 row = u.token * COLUMNS + n * 8 + 2 * j + e % 2, column = (top + g + e / 2 * 8) / 2;
                        if (row < rows && column < N / 2) store1<YT>(y, (u64)row * y_stride + column, v[e]);
                    }
            } else if (YT == F32) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const u32 row = u.token * COLUMNS + n * 8 + 2 * j + e % 2, column = top + g + e / 2 * 8;
                    if (row >= rows || column >= N) continue;
                    if (EPILOGUE == 1) v[e] += load1<RT>(residual, (u64)row * r_stride + column);
                    store1<YT>(y, (u64)row * y_stride + column, v[e]);
                }
            } else {
                const u32 row = u.token * COLUMNS + n * 8 + g;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32 high = pack_bf16(v[2 * half], v[2 * half + 1]);
                    const u32 low = pack_bf16(v[2 * half] - low_half<BF16>(high), v[2 * half + 1] - high_half<BF16>(high));
                    const u32 h = transpose_8x8(high), l = transpose_8x8(low), column = top + half * 8 + 2 * j;
                    if (row >= rows || column >= N) continue;
                    float a = low_half<BF16>(h) + low_half<BF16>(l), b = high_half<BF16>(h) + high_half<BF16>(l);
                    if (EPILOGUE == 1) {
                        a += load1<RT>(residual, (u64)row * r_stride + column);
                        b += load1<RT>(residual, (u64)row * r_stride + column + 1);
                    }
                    *(u32*)((u16*)y + (u64)row * y_stride + column) = pack2<YT>(a, b);
                }
            }
        }
    }
#endif
}
