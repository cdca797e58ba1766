// y = epilogue(x · wᵀ + bias) for a batch on Hopper. Weights are the 64-row operand of the warpgroup
// product and tokens the columns, so that a small batch wastes nothing. One thread copies tiles (WIDE
// weight rows × 64, and COLUMNS tokens × 64) into a ring, its first weights before the wait for the
// predecessor; WIDE/64 warpgroups multiply. When there are fewer tiles than multiprocessors, SPLIT blocks
// of a cluster share a tile's K: each leaves its sums in its own shared memory and all of them add up and
// store a part, always in the same order.
//
// K, N, ROWS, WIDE (64, 128, 192), COLUMNS (8, 16, 32, 64, 128, 256), STAGES, SPLIT, TYPE (of x, w), BT, RT, YT, BIAS,
// LIVE, EPILOGUE (0 store, 1 residual, 2 silu·mul). K is a multiple of 64 · SPLIT; with SPLIT > 1 there
// is one tile per cluster.
#include "wgmma.cuh"

#define GROUPS (WIDE / 64)
#define WORKERS (GROUPS * 128)
#define WEIGHT_BYTES (WIDE * 128)
#define STAGE_BYTES (WEIGHT_BYTES + COLUMNS * 128)
#define TILES_T ((ROWS + COLUMNS - 1) / COLUMNS)
#define TILES ((N + WIDE - 1) / WIDE * TILES_T)
#define CHUNKS (K / 64 / SPLIT)

struct alignas(64) Map {
    u64 words[16];
};

struct Output {
    const void* bias;
    const void* residual;
    void* y;
    u32 r_stride, y_stride, rows;
};

// The 16 weight rows from `top` and 8 tokens from `token`: v holds rows g, g, g+8, g+8 of tokens 2j, 2j+1.
// Rows of a tile are columns of y, so pieces are transposed to make stores wide; a sum travels as two
// halves, which keeps more than the one rounding at the end does.
DEVICE void finish(const Output& o, u32 top, u32 token, float (&v)[4]) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
    if (BIAS) {
        const float b0 = top + g < N ? load1<BT>(o.bias, top + g) : 0.0f;
        const float b1 = top + g + 8 < N ? load1<BT>(o.bias, top + g + 8) : 0.0f;
        v[0] += b0, v[1] += b0, v[2] += b1, v[3] += b1;
    }
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
                const u32 row = token + 2 * j + e % 2, column = (top + g + e / 2 * 8) / 2;
                if (row < o.rows && column < N / 2) store1<YT>(o.y, (u64)row * o.y_stride + column, v[e]);
            }
    } else if (YT == F32) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const u32 row = token + 2 * j + e % 2, column = top + g + e / 2 * 8;
            if (row >= o.rows || column >= N) continue;
            if (EPILOGUE == 1) v[e] += load1<RT>(o.residual, (u64)row * o.r_stride + column);
            store1<YT>(o.y, (u64)row * o.y_stride + column, v[e]);
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
            if (EPILOGUE == 1) {
                a += load1<RT>(o.residual, (u64)row * o.r_stride + column);
                b += load1<RT>(o.residual, (u64)row * o.r_stride + column + 1);
            }
            *(u32*)((u16*)o.y + (u64)row * o.y_stride + column) = pack2<YT>(a, b);
        }
    }
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32, 1)
linear_wgmma(const __grid_constant__ Map x_map, const __grid_constant__ Map w_map, const void* bias,
             const void* residual, void* y, const u32* live, u32 r_stride, u32 y_stride) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ u8 memory[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    const u32 base = (shared_address(memory) + 1023) & ~1023u, full = shared_address(barriers), empty = full + 8 * STAGES;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 share = blockIdx.x % SPLIT, first = blockIdx.x / SPLIT, stride = gridDim.x / SPLIT;
    if (threadIdx.x == GROUPS * 128) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&w_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
    }
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
        u32 tile = first, chunk = 0;
        for (u32 s = 0; s < STAGES && tile < TILES; s++) {
            barrier_expect(full + 8 * s, STAGE_BYTES);
            tensor_copy(base + s * STAGE_BYTES, &w_map, (share * CHUNKS + chunk) * 64, tile / TILES_T * WIDE, full + 8 * s, pass);
            if (++chunk == CHUNKS) chunk = 0, tile += stride;
        }
        let_successor_start();
        wait_for_predecessor();
        asm volatile("fence.proxy.async;" ::: "memory");
        u32 stage = 0, phase = 1;
        bool again = false;
        for (tile = first; tile < TILES; tile += stride)
            for (chunk = 0; chunk < CHUNKS; chunk++) {
                const u32 at = base + stage * STAGE_BYTES, barrier = full + 8 * stage, column = (share * CHUNKS + chunk) * 64;
                if (again) {
                    barrier_wait(empty + 8 * stage, phase);
                    barrier_expect(barrier, STAGE_BYTES);
                    tensor_copy(at, &w_map, column, tile / TILES_T * WIDE, barrier, pass);
                }
                tensor_copy(at + WEIGHT_BYTES, &x_map, column, tile % TILES_T * COLUMNS, barrier, keep);
                if (++stage == STAGES) stage = 0, phase ^= 1, again = true;
            }
        return;
    }

    wait_for_predecessor();
    const u32 group = warp / 4;
    const Output o = {bias, residual, y, r_stride, y_stride, LIVE ? min(*live, (u32)ROWS) : ROWS};
    u32 stage = 0, phase = 0;
    for (u32 tile = first; tile < TILES; tile += stride) {
        float c[COLUMNS / 2];
        u32 previous = stage;
#pragma unroll 1
        for (u32 chunk = 0; chunk < CHUNKS; chunk++) {
            const u32 at = base + stage * STAGE_BYTES;
            barrier_wait(full + 8 * stage, phase);
            const u64 a = swizzled_tile(at + group * 8192), b = swizzled_tile(at + WEIGHT_BYTES);
            product_begin();
#pragma unroll
            for (int k = 0; k < 4; k++) Product<TYPE, COLUMNS>::add(c, a + 2 * k, b + 2 * k, chunk + k > 0);
            product_commit();
            // The product before this one is done: its stage can be filled again.
            product_wait<1>();
            if (chunk > 0 && threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * previous);
            previous = stage;
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        product_wait<0>();
        if (threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * previous);
        const u32 rows = tile / TILES_T * WIDE, tokens = tile % TILES_T * COLUMNS;
        if (SPLIT == 1) {
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++) {
                float v[4] = {c[4 * n], c[4 * n + 1], c[4 * n + 2], c[4 * n + 3]};
                finish(o, rows + warp * 16, tokens + n * 8, v);
            }
        } else {
            // All products of this block are done; its ring becomes [column / 8][thread] of four sums.
            asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++)
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(base + (n * WORKERS + threadIdx.x) * 16),
                             "f"(c[4 * n]), "f"(c[4 * n + 1]), "f"(c[4 * n + 2]), "f"(c[4 * n + 3])
                             : "memory");
            asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
            // Pieces of 16 rows × 8 tokens are dealt to the warps of all blocks of the cluster.
            for (u32 i = share * (GROUPS * 4) + warp; i < GROUPS * 4 * (COLUMNS / 8); i += SPLIT * GROUPS * 4) {
                const u32 owner = i % (GROUPS * 4), n = i / (GROUPS * 4);
                const u32 at = base + (n * WORKERS + owner * 32 + lane) * 16;
                float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (u32 from = 0; from < SPLIT; from++) {
                    float p0, p1, p2, p3;
                    asm volatile(
                        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
                        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
                        : "=f"(p0), "=f"(p1), "=f"(p2), "=f"(p3)
                        : "r"(at), "r"(from)
                        : "memory");
                    v[0] += p0, v[1] += p1, v[2] += p2, v[3] += p3;
                }
                finish(o, rows + owner * 16, tokens + n * 8, v);
            }
            // Nobody leaves while others read its memory.
            asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
        }
    }
#endif
}
