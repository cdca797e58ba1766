// y = epilogue(x · wᵀ) for many rows on Hopper. Tiles of 128 tokens × 256 weight rows; two blocks of a cluster
// take neighbouring tokens and the same weights, of which each copies half for both. One thread copies, two
// warpgroups of 64 tokens multiply, sums go from registers to memory. Blocks stay and take tile after tile, in
// bands of BAND pairs of token tiles so that a band's tokens stay in L2. Tiles past the live tokens are
// not computed: padding costs nothing but the launch.
//
// K (a multiple of 64), N, STAGES, BAND, TYPE (of x, w), RT, YT, LIVE, EPILOGUE (0 store, 1 residual,
// 2 silu·mul). N is a multiple of 8, of 16 for silu·mul.
#include "wgmma.cuh"

#define TOKENS 128
#define WIDE 256
#define X_BYTES (TOKENS * 128)
#define HALF_BYTES (WIDE / 2 * 128)
#define STAGE_BYTES (X_BYTES + 2 * HALF_BYTES)
#define CHUNKS (K / 64)
#define TILES_N ((N + WIDE - 1) / WIDE)

struct alignas(64) Map {
    u64 words[16];
};

DEVICE u32 rank_in_cluster() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// To the same place in both blocks of the cluster.
DEVICE void copy_to_both(u32 to, const void* map, u32 x, u32 y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier), "h"((u16)3) : "memory");
}
DEVICE void arrive_at(u32 barrier, u32 block) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}"
        ::"r"(barrier), "r"(block) : "memory");
}
// The tile's first weight row and the pair's first token; false when there is no such tile.
DEVICE bool place(u32 index, u32 pairs, u32& row, u32& token) {
    if (index >= pairs * TILES_N) return false;
    const u32 band = index / (BAND * TILES_N), first = band * BAND, wide = min(pairs - first, (u32)BAND);
    const u32 within = index - first * TILES_N;
    row = within / wide * WIDE;
    token = (first + within % wide) * (2 * TOKENS);
    return true;
}

DEVICE float silu_mul_of(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

// This warp's rows g and g + 8: sums of columns 8i + 2j and + 1 from `column`.
DEVICE void store(const float (&c)[WIDE / 2], const void* residual, void* y, u32 row0, u32 column, u32 rows, u32 r_stride, u32 y_stride) {
    const u32 j = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 row = row0 + 8 * half;
        const bool live = row < rows;
        if (EPILOGUE == 2) {
            // Eight groups hold 32 outputs of a row; lane m ends with eight of them in order.
#pragma unroll
            for (int n = 0; n < WIDE / 8; n += 8) {
                u32 v[4];
#pragma unroll
                for (int m = 0; m < 4; m++) {
                    const float* a = c + 4 * (n + 2 * m) + 2 * half;
                    v[m] = pack2<YT>(silu_mul_of(a[0], a[1]), silu_mul_of(a[4], a[5]));
                }
                exchange(v);
                const u32 to = column / 2 + 4 * n + 8 * j;
                if (live && to < N / 2)
                    *(uint4*)((u16*)y + (u64)row * y_stride + to) =
                        make_uint4(__byte_perm(v[0], v[1], 0x5410), __byte_perm(v[2], v[3], 0x5410),
                                   __byte_perm(v[0], v[1], 0x7632), __byte_perm(v[2], v[3], 0x7632));
            }
        }
        // All of a row's residual first: a store to y could be one to the residual, and no load passes it.
        uint4 r[EPILOGUE == 1 ? WIDE / 32 : 1];
#pragma unroll
        for (int n = 0; EPILOGUE == 1 && n < WIDE / 32; n++) {
            const u32 to = column + 8 * (4 * n + j);
            r[n] = live && to < N ? *(const uint4*)((const u16*)residual + (u64)row * r_stride + to) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int n = 0; EPILOGUE != 2 && n < WIDE / 32; n++) {
            const u32 to = column + 8 * (4 * n + j);
            u32 v[4];
            if (EPILOGUE == 1) {
                v[0] = r[n].x, v[1] = r[n].y, v[2] = r[n].z, v[3] = r[n].w;
                exchange(v);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float a = c[4 * (4 * n + i) + 2 * half], b = c[4 * (4 * n + i) + 2 * half + 1];
                if (EPILOGUE == 1) a += low_half<RT>(v[i]), b += high_half<RT>(v[i]);
                v[i] = pack2<YT>(a, b);
            }
            exchange(v);
            if (live && to < N) *(uint4*)((u16*)y + (u64)row * y_stride + to) = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
linear_tiles(const __grid_constant__ Map x_map, const __grid_constant__ Map w_map, const void* residual, void* y,
             const u32* live, u32 most_rows, u32 r_stride, u32 y_stride) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ u8 memory[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    const u32 base = (shared_address(memory) + 1023) & ~1023u, full = shared_address(barriers), empty = full + 8 * STAGES;
    const u32 rank = rank_in_cluster(), first = blockIdx.x / 2, stride = gridDim.x / 2;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();
    let_successor_start();
    wait_for_predecessor();
    const u32 rows = LIVE ? min(*live, most_rows) : most_rows, pairs = (rows + 2 * TOKENS - 1) / (2 * TOKENS);
    u32 row, token;
    if (__shfl_sync(FULL, threadIdx.x / 128, 0) == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            asm volatile("fence.proxy.async;" ::: "memory");
            u32 stage = 0, phase = 1;
            for (u32 index = first; place(index, pairs, row, token); index += stride)
                for (u32 chunk = 0; chunk < CHUNKS; chunk++) {
                    const u32 at = base + stage * STAGE_BYTES, barrier = full + 8 * stage;
                    barrier_wait(empty + 8 * stage, phase);
                    barrier_expect(barrier, STAGE_BYTES);
                    tensor_copy(at, &x_map, chunk * 64, token + rank * TOKENS, barrier, keep_policy());
                    copy_to_both(at + X_BYTES + rank * HALF_BYTES, &w_map, chunk * 64, row + rank * (WIDE / 2), barrier);
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const u32 group = __shfl_sync(FULL, threadIdx.x / 128 - 1, 0), within = threadIdx.x % 128;
        u32 stage = 0, phase = 0;
        for (u32 index = first; place(index, pairs, row, token); index += stride) {
            float c[WIDE / 2];
            u32 previous = stage;
#pragma unroll 1
            for (u32 chunk = 0; chunk < CHUNKS; chunk++) {
                const u32 at = base + stage * STAGE_BYTES;
                barrier_wait(full + 8 * stage, phase);
                const u64 a = swizzled_tile(at + group * 8192), b = swizzled_tile(at + X_BYTES);
                product_begin();
#pragma unroll
                for (int k = 0; k < 4; k++) Product<TYPE, WIDE>::add(c, a + 2 * k, b + 2 * k, chunk + k > 0);
                product_commit();
                // The product before this one is done: its stage can be filled again, by both blocks.
                product_wait<1>();
                if (chunk > 0 && within < 2) arrive_at(empty + 8 * previous, within);
                previous = stage;
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            product_wait<0>();
            if (within < 2) arrive_at(empty + 8 * previous, within);
            const u32 row0 = token + rank * TOKENS + group * 64 + within / 32 * 16 + within % 32 / 4;
            store(c, residual, y, row0, row, rows, r_stride, y_stride);
        }
    }
    // Nobody leaves while the other block still writes or arrives here.
    cluster_sync();
#endif
}
