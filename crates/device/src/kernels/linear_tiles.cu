// y = epilogue(x · wᵀ + bias) for many rows on Hopper. Tiles of 128 tokens × 256 weight rows; two blocks of a cluster take
// neighbouring tokens and the same weights, of which each copies half for both. One thread copies, two warpgroups of
// 64 tokens run MMA, sums go from registers to memory. Blocks are persistent and take tile after tile, in bands of
// BAND pairs of token tiles so that a band's tokens stay in L2. Only as many blocks take part as the number of rounds
// needs: more busy multiprocessors would lower the clock without saving a round. Tiles past the live tokens are not
// computed, so padding costs only the launch. The inputs of an epilogue are loaded before the tile's last MMAs, and
// arrive while these run.
//
// A norm between two linears needs no separate pass: the first (PRODUCES) also stores y times the norm's weights, and
// the squares of y summed over each 256 columns; the second (CONSUMES) reads those and applies the rows' scales to its
// sums. EPILOGUE 3 applies the rotation and KV write of `rope_kv.cu` to the sums: a thread has both halves of its
// rows' heads.
//
// K (a multiple of 64), N, STAGES, BAND, TYPE (of x, w), BT, RT, YT, BIAS, LIVE, EPILOGUE (0 store, 1 residual, 2 silu·mul, 3
// rotate, 4 gelu·mul), AFTER (prelude.cuh), PRODUCES, CONSUMES. N is a multiple of 8, of 16 for gates, of 256 with PRODUCES; K of 256 with CONSUMES.
// WEIGHT FP8_BLOCK (weights.cuh): w and x are e4m3, x as `quantize.cu` writes it with scales [K / 128][s_stride]; a chunk is
// 128 columns, K a multiple of 128, N of 128 (256 for gates), and each chunk's sums are scaled in f32 before they are added, half a
// tile at a time. FP8_CHANNEL: one scale for a row of w and one for a row of x, applied to the sums at the end. QUANTIZES (gates only): y is e4m3, too, and its scales, [N / 256][s_stride], are stored.
// To rotate: D (64, 128), HQ, HKV, PAGE, QN, KN (norms present), KT (pages; for E4M3 see pages.cuh), QNT, KNT (norm weights).
#if EPILOGUE == 3
#include "pages.cuh"
#else
#define SCALES_OF_PAGES
#endif
#include "pairs.cuh"
#include "weights.cuh"
#include "wgmma_scaled.cuh"

#ifndef QUANTIZES
#define QUANTIZES 0
#endif
#define TOKENS 128
#define WIDE 256
#define X_BYTES (TOKENS * 128)
#define HALF_BYTES (WIDE / 2 * 128)
#define STAGE_BYTES (X_BYTES + 2 * HALF_BYTES)
#define CHUNK (WEIGHT == PLAIN ? 64 : 128)
#define CHUNKS (K / CHUNK)
#define TILES_N ((N + WIDE - 1) / WIDE)
// Chunks of a tile that are multiplied after the loads of its epilogue's inputs were issued, if it has any.
#define LAST (WEIGHT == PLAIN && (EPILOGUE == 1 || EPILOGUE == 3 || CONSUMES) && CHUNKS >= 8 ? 4 : 0)

struct alignas(64) Map {
    u64 words[16];
};

// This cluster's tiles: every `stride`th tile from `at` on.
struct Share {
    u32 pairs, at, stride;
    DEVICE Share(u32 rows) : pairs((rows + 2 * TOKENS - 1) / (2 * TOKENS)) {
        const u32 tiles = pairs * TILES_N, clusters = gridDim.x / 2, rounds = max((tiles + clusters - 1) / clusters, 1u);
        stride = (tiles + rounds - 1) / rounds;
        at = blockIdx.x / 2 < stride ? blockIdx.x / 2 : tiles;
    }
};
// The tile's first weight row and the pair's first token; false when there is no such tile.
DEVICE bool place(u32 index, u32 pairs, u32& row, u32& token) {
    if (index >= pairs * TILES_N) return false;
    const u32 band = index / (BAND * TILES_N), first = band * BAND, wide = min(pairs - first, (u32)BAND);
    const u32 within = index - first * TILES_N;
    row = within / wide * WIDE;
    token = (first + within % wide) * (2 * TOKENS);
    return true;
}

DEVICE float gate_mul_of(float gate, float up) {
    return __fdividef(gate, 1.0f + __expf(-gate_exponent<EPILOGUE>(gate))) * up;
}

// The inputs and outputs of the epilogues.
struct Memory {
    const void *bias, *residual;
    void* y;
    u32 r_stride, y_stride;
    // For the handoff between two linears with a norm between them.
    float* squares;
    const void* next_norm;
    void* prepared;
    float eps;
    // For rotation.
    const void *q_norm, *k_norm;
    const float* rope;
    const u32 *position, *kv_slot;
    void* kv;
    u32 rope_stride, max_position;
    float q_eps, k_eps;
    const float *k_scale, *v_scale;
};

// Squares of a row that a lane of the quad adds up.
#define PARTS ((K / WIDE + 3) / 4)
#if EPILOGUE == 3
#define TURNS (D / 16)
#else
#define TURNS 1
#endif

// Inputs of a thread's two rows. Nothing waits for them before the tile's MMAs are done.
struct Early {
    uint4 residual[2][EPILOGUE == 1 ? WIDE / 32 : 1];
    float squares[2][CONSUMES ? PARTS : 1];
    float2 cosine[2][TURNS], sine[2][TURNS];
};

// Where a thread's two tokens are in their sequences and pages.
struct Place {
    u32 position[2], slot[2];
};

DEVICE void ask(Early& e, const Memory& m, u32 row0, u32 column, u32 rows, const Place& here) {
    const u32 j = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 row = row0 + 8 * half;
        const bool live = row < rows;
#pragma unroll
        for (int n = 0; EPILOGUE == 1 && n < WIDE / 32; n++) {
            const u32 to = column + 8 * (4 * n + j);
            e.residual[half][n] = live && to < N ? *(const uint4*)((const u16*)m.residual + (u64)row * m.r_stride + to) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int n = 0; CONSUMES && n < PARTS; n++) {
            const u32 part = 4 * n + j;
            e.squares[half][n] = live && part < K / WIDE ? m.squares[(u64)row * (K / WIDE) + part] : 0.0f;
        }
#if EPILOGUE == 3
        const float* table = m.rope + (u64)here.position[half] * m.rope_stride + 2 * j;
#pragma unroll
        for (int n = 0; n < TURNS; n++) {
            e.cosine[half][n] = *(const float2*)(table + 8 * n);
            e.sine[half][n] = *(const float2*)(table + D / 2 + 8 * n);
        }
#endif
    }
}

DEVICE float quad_sum(float v) {
    v += __shfl_xor_sync(FULL, v, 1);
    return v + __shfl_xor_sync(FULL, v, 2);
}

// Applies the norm's scales to the sums of this thread's rows.
DEVICE void scale_rows(float (&c)[WIDE / 2], const Early& e, float eps) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < (CONSUMES ? PARTS : 1); n++) sum += e.squares[half][n];
        const float scale = 1.0f / sqrtf(quad_sum(sum) / (float)K + eps);
#pragma unroll
        for (int i = 0; i < WIDE / 8; i++) c[4 * i + 2 * half] *= scale, c[4 * i + 2 * half + 1] *= scale;
    }
}

template <int T> DEVICE float2 pair_at(const void* p, u32 i) {
    if (T == F32) return *(const float2*)((const float*)p + i);
    const u32 v = *(const u32*)((const u16*)p + i);
    return make_float2(low_half<T>(v), high_half<T>(v));
}

// In the functions below: this warp's rows g (`half` 0) and g + 8 (1); sums of columns 8i + 2j and + 1 from `column`.

DEVICE void add_bias(float (&c)[WIDE / 2], const void* bias, u32 column) {
#pragma unroll
    for (int i = 0; i < WIDE / 8; i++) {
        const u32 at = column + 8 * i + threadIdx.x % 4 * 2;
        const float2 b = at < N ? pair_at<BT>(bias, at) : make_float2(0.0f, 0.0f);
        c[4 * i] += b.x, c[4 * i + 1] += b.y, c[4 * i + 2] += b.x, c[4 * i + 3] += b.y;
    }
}

DEVICE void store_gate_mul(const float (&c)[WIDE / 2], const Memory& m, u32 row0, u32 column, u32 rows) {
    const u32 j = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 row = row0 + 8 * half;
        // Eight groups hold 32 outputs of a row; lane j ends with eight of them in order.
#pragma unroll
        for (int n = 0; n < WIDE / 8; n += 8) {
            u32 v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* a = c + 4 * (n + 2 * i) + 2 * half;
                v[i] = pack2<YT>(gate_mul_of(a[0], a[1]), gate_mul_of(a[4], a[5]));
            }
            exchange(v);
            const u32 to = column / 2 + 4 * n + 8 * j;
            if (row < rows && to < N / 2)
                *(uint4*)((u16*)m.y + (u64)row * m.y_stride + to) =
                    make_uint4(__byte_perm(v[0], v[1], 0x5410), __byte_perm(v[2], v[3], 0x5410),
                               __byte_perm(v[0], v[1], 0x7632), __byte_perm(v[2], v[3], 0x7632));
        }
    }
}

#if QUANTIZES
// 128 outputs of a row lie in a quad: their largest is the scale. A lane has outputs 4i + j; of 16 outputs it has the bytes
// 2j, 2j + 1 and those + 8 in the order of weights.cuh.
DEVICE void store_quantized(float (&c)[WIDE / 2], const Memory& m, u32 row0, u32 column, u32 rows, float* scales, u32 s_stride) {
    const u32 j = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 row = row0 + 8 * half;
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < WIDE / 8; i++) {
            float& v = c[4 * i + 2 * half];
            v = gate_mul_of(v, c[4 * i + 2 * half + 1]);
            most = fmaxf(most, fabsf(v));
        }
        most = fmaxf(most, __shfl_xor_sync(FULL, most, 1));
        most = fmaxf(most, __shfl_xor_sync(FULL, most, 2));
        const Fit fit = fit_e4m3(most);
        if (j == 0 && row < rows) scales[(u64)(column / WIDE) * s_stride + row] = fit.scale;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            u32 v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* a = c + (n * 4 + i) * 16 + 2 * half;
                v[i] = pack_e4m3(a[0] * fit.inverse, a[8] * fit.inverse) | pack_e4m3(a[4] * fit.inverse, a[12] * fit.inverse) << 16;
            }
            exchange(v);
            if (row < rows)
                *(uint4*)((u8*)m.y + (u64)row * m.y_stride + column / 2 + (n * 4 + j) * 16) =
                    make_uint4(__byte_perm(v[0], v[1], 0x5410), __byte_perm(v[2], v[3], 0x5410),
                               __byte_perm(v[0], v[1], 0x7632), __byte_perm(v[2], v[3], 0x7632));
        }
    }
}
#endif

// Stores y times the next norm's weights; returns the squares of y.
DEVICE float prepare(const u32 (&v)[4], const Memory& m, u64 to, uint4 weights) {
    const u32 w[4] = {weights.x, weights.y, weights.z, weights.w};
    float sum = 0.0f;
    u32 p[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float a = low_half<YT>(v[i]), b = high_half<YT>(v[i]);
        sum += a * a + b * b;
        p[i] = pack2<YT>(a * low_half<YT>(w[i]), b * high_half<YT>(w[i]));
    }
    *(uint4*)((u16*)m.prepared + to) = make_uint4(p[0], p[1], p[2], p[3]);
    return sum;
}

DEVICE void store(const float (&c)[WIDE / 2], const Early& e, const Memory& m, u32 row0, u32 column, u32 rows) {
    const u32 j = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 row = row0 + 8 * half;
        float squares = 0.0f;
        const uint4* weights = (const uint4*)((const u16*)m.next_norm + column + 8 * j);
        uint4 next = PRODUCES ? weights[0] : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int n = 0; n < WIDE / 32; n++) {
            const u32 to = column + 8 * (4 * n + j);
            // Loads are not moved ahead of stores, so each round loads the weights of the next one.
            const uint4 these = next;
            if (PRODUCES && n + 1 < WIDE / 32) next = weights[4 * (n + 1)];
            u32 v[4];
            if (EPILOGUE == 1) {
                const uint4 r = e.residual[half][EPILOGUE == 1 ? n : 0];
                v[0] = r.x, v[1] = r.y, v[2] = r.z, v[3] = r.w;
                exchange(v);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float a = c[4 * (4 * n + i) + 2 * half], b = c[4 * (4 * n + i) + 2 * half + 1];
                if (EPILOGUE == 1) a += low_half<RT>(v[i]), b += high_half<RT>(v[i]);
                v[i] = pack2<YT>(after(a), after(b));
            }
            exchange(v);
            if (row >= rows || to >= N) continue;
            *(uint4*)((u16*)m.y + (u64)row * m.y_stride + to) = make_uint4(v[0], v[1], v[2], v[3]);
            if (PRODUCES) squares += prepare(v, m, (u64)row * N + to, these);
        }
        if (PRODUCES) {
            squares = quad_sum(squares);
            if (j == 0 && row < rows) m.squares[(u64)row * (N / WIDE) + column / WIDE] = squares;
        }
    }
}

#if EPILOGUE == 3
// Normalises and rotates a head of one row, of which this thread has columns 8i + 2j and + 1.
DEVICE void turn(float* v, const float2 (&cosine)[TURNS], const float2 (&sine)[TURNS], const Memory& m, bool query) {
    const u32 j = threadIdx.x % 4;
    const bool normed = query ? QN : KN;
    float scale = 1.0f;
    if (normed) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < D / 8; i++) sum += v[4 * i] * v[4 * i] + v[4 * i + 1] * v[4 * i + 1];
        scale = 1.0f / sqrtf(quad_sum(sum) / (float)D + (query ? m.q_eps : m.k_eps));
    }
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        float* a = v + 4 * i;
        float* b = v + 4 * (i + TURNS);
        if (normed) {
            const u32 at = 8 * i + 2 * j;
            const float2 wa = query ? pair_at<QNT>(m.q_norm, at) : pair_at<KNT>(m.k_norm, at);
            const float2 wb = query ? pair_at<QNT>(m.q_norm, at + D / 2) : pair_at<KNT>(m.k_norm, at + D / 2);
            a[0] *= scale * wa.x, a[1] *= scale * wa.y, b[0] *= scale * wb.x, b[1] *= scale * wb.y;
        }
        const float2 s = sine[i], t = cosine[i];
        const float x = a[0], y = a[1];
        a[0] = x * t.x - b[0] * s.x, a[1] = y * t.y - b[1] * s.y;
        b[0] = b[0] * t.x + x * s.x, b[1] = b[1] * t.y + y * s.y;
    }
}

#if NARROW
// Stores a head as bytes; lane j ends with columns 8j to 8j + 7 of each 32.
DEVICE void store_bytes(u8* to, const float* v, float by, bool live) {
    const u32 j = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < D / 64; n++) {
        u32 p[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *a = v + 4 * (8 * n + i), *b = a + 16;
            p[i] = pack_e4m3(a[0] * by, a[1] * by) | pack_e4m3(b[0] * by, b[1] * by) << 16;
        }
        exchange(p);
        // Of each word, the lower half is from columns 64n + 8j …, the upper from 32 further.
        if (live) {
            *(uint2*)(to + 64 * n + 8 * j) = make_uint2(__byte_perm(p[0], p[1], 0x5410), __byte_perm(p[2], p[3], 0x5410));
            *(uint2*)(to + 64 * n + 32 + 8 * j) = make_uint2(__byte_perm(p[0], p[1], 0x7632), __byte_perm(p[2], p[3], 0x7632));
        }
    }
}
#endif
// Stores q to y, k and v to the token's slot in its page.
DEVICE void store_rotated(float (&c)[WIDE / 2], const Early& e, const Memory& m, u32 row0, u32 column, u32 rows, const Place& here) {
    const u32 j = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < WIDE / D; h++) {
        const u32 head = column / D + h;
        const bool query = head < HQ, key = !query && head < HQ + HKV;
        if (head >= HQ + 2 * HKV) break;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float* v = c + h * (D / 2) + 2 * half;
            if (query || key) turn(v, e.cosine[half], e.sine[half], m, query);
            const u32 row = row0 + 8 * half;
            const u64 in_pages = (((u64)(here.slot[half] / PAGE) * 2 + !key) * HKV + (head - HQ) % HKV) * (PAGE * D) + here.slot[half] % PAGE * D;
#if NARROW
            if (!query) {
                store_bytes((u8*)m.kv + in_pages, v, 1.0f / __ldg((key ? m.k_scale : m.v_scale) + (head - HQ) % HKV), row < rows);
                continue;
            }
#endif
            u16* to = query ? (u16*)m.y + (u64)row * m.y_stride + head * D : (u16*)m.kv + in_pages;
#pragma unroll
            for (int n = 0; n < D / 32; n++) {
                u32 p[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float* a = v + 4 * (4 * n + i);
                    p[i] = KT == YT || query ? pack2<YT>(a[0], a[1]) : pack2<KT>(a[0], a[1]);
                }
                exchange(p);
                if (row < rows) *(uint4*)(to + 8 * (4 * n + j)) = make_uint4(p[0], p[1], p[2], p[3]);
            }
        }
    }
}
#endif

#if WEIGHT == PLAIN
#define SCALES_PARAMETERS
#else
#define SCALES_PARAMETERS , const float* scales_of_w, const float* scales_of_x, float* scales_of_y, u32 s_stride
// Scales of a chunk: of this thread's two tokens, and of two blocks of weights (of a gated tile: gates and ups).
struct Scales {
    float x[2], w[2];
    DEVICE void load(const float* of_x, const float* of_w, u32 stride, u32 row0, u32 column, u32 chunk, u32 rows) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            x[i] = row0 + 8 * i < rows ? of_x[(u64)chunk * stride + row0 + 8 * i] : 0.0f;
            w[i] = __ldg(of_w + (u64)min(column / 128 + i, (N - 1u) / 128) * (K / SCALED) + chunk);
        }
    }
    // Scales the sums of 128 columns and adds them to c.
    DEVICE void add(float* c, const float (&part)[64], int half) const {
        const bool gated = EPILOGUE == 2 || EPILOGUE == 4;
        const float even = w[gated ? 0 : half], odd = w[gated ? 1 : half];
        const float f[4] = {x[0] * even, x[0] * odd, x[1] * even, x[1] * odd};
#pragma unroll
        for (int i = 0; i < 64; i++) c[half * 64 + i] += f[i % 4] * part[i];
    }
};
#endif

extern "C" __global__ void __launch_bounds__(384, 1)
linear_tiles(const __grid_constant__ Map x_map, const __grid_constant__ Map w_map, const void* bias, const void* residual, void* y,
             const u32* live, float* squares, const void* next_norm, void* prepared, u32 most_rows, u32 r_stride,
             u32 y_stride, float eps, const void* q_norm, const void* k_norm, const float* rope, const u32* position,
             const u32* kv_slot, void* kv, u32 rope_stride, u32 max_position, float q_eps, float k_eps
             SCALES_PARAMETERS SCALES_OF_PAGES) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ u8 memory[];
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    // The result of a shuffle is not recomputed in every round of a loop, as an address would be.
    const u32 base = __shfl_sync(FULL, (shared_address(memory) + 1023) & ~1023u, 0);
    const u32 full = __shfl_sync(FULL, shared_address(barriers), 0), empty = full + 8 * STAGES;
    const u32 rank = rank_in_cluster();
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
    const u32 rows = LIVE ? min(*live, most_rows) : most_rows;
    const Share share(rows);
    u32 row, token;
    if (__shfl_sync(FULL, threadIdx.x / 128, 0) == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            asm volatile("fence.proxy.async;" ::: "memory");
            u32 stage = 0, phase = 1;
            for (u32 index = share.at; place(index, share.pairs, row, token); index += share.stride)
                for (u32 chunk = 0; chunk < CHUNKS; chunk++) {
                    const u32 at = base + stage * STAGE_BYTES, barrier = full + 8 * stage;
                    barrier_wait(empty + 8 * stage, phase);
                    barrier_expect(barrier, STAGE_BYTES);
                    tensor_copy(at, &x_map, chunk * CHUNK, token + rank * TOKENS, barrier, keep_policy());
                    copy_to_both(at + X_BYTES + rank * HALF_BYTES, &w_map, chunk * CHUNK, row + rank * (WIDE / 2), barrier);
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                }
        }
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const u32 group = __shfl_sync(FULL, threadIdx.x / 128 - 1, 0), within = threadIdx.x % 128;
        const Memory m = {bias, residual, y, r_stride, y_stride, squares, next_norm, prepared, eps, q_norm, k_norm,
                          rope, position, kv_slot, kv, rope_stride, max_position, q_eps, k_eps,
#if EPILOGUE == 3 && NARROW
                          k_scale, v_scale
#endif
        };
        u32 stage = 0, phase = 0;
        for (u32 index = share.at; place(index, share.pairs, row, token); index += share.stride) {
            const u32 row0 = token + rank * TOKENS + group * 64 + within / 32 * 16 + within % 32 / 4;
            Place here = {};
#pragma unroll
            for (int half = 0; EPILOGUE == 3 && half < 2; half++)
                if (row0 + 8 * half < rows) {
                    here.position[half] = min(m.position[row0 + 8 * half], m.max_position - 1);
                    here.slot[half] = m.kv_slot[row0 + 8 * half];
                }
            float c[WIDE / 2];
            Early early;
#if WEIGHT == FP8_BLOCK
#pragma unroll
            for (int i = 0; i < WIDE / 2; i++) c[i] = 0.0f;
            Scales next;
            next.load(scales_of_x, scales_of_w, s_stride, row0, row, 0, rows);
#pragma unroll 1
            for (u32 chunk = 0; chunk < CHUNKS; chunk++) {
                const u32 at = base + stage * STAGE_BYTES;
                const Scales now = next;
                if (chunk + 1 < CHUNKS) next.load(scales_of_x, scales_of_w, s_stride, row0, row, chunk + 1, rows);
                barrier_wait(full + 8 * stage, phase);
                const u64 a = swizzled_tile(at + group * 8192), b = swizzled_tile(at + X_BYTES);
                float part[64];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    product_begin();
#pragma unroll
                    for (int k = 0; k < 4; k++) ByteWgmma<128>::add(part, a + 2 * k, b + 2 * k + half * (HALF_BYTES / 16), k > 0);
                    product_commit();
                    product_wait<0>();
                    if (half == 1 && within < 2) arrive_at(empty + 8 * stage, within);
                    now.add(c, part, half);
                }
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            ask(early, m, row0, row, rows, here);
#else
            u32 previous = stage;
            auto multiply = [&](u32 chunk) {
                const u32 at = base + stage * STAGE_BYTES;
                barrier_wait(full + 8 * stage, phase);
                const u64 a = swizzled_tile(at + group * 8192), b = swizzled_tile(at + X_BYTES);
                product_begin();
#pragma unroll
                for (int k = 0; k < 4; k++) {
#if WEIGHT == PLAIN
                    Wgmma<TYPE, WIDE>::add(c, a + 2 * k, b + 2 * k, chunk + k > 0);
#else
                    ByteWgmma<WIDE>::add(c, a + 2 * k, b + 2 * k, chunk + k > 0);
#endif
                }
                product_commit();
                // The previous MMA is done: both blocks can refill its stage.
                product_wait<1>();
                if (chunk > 0 && within < 2) arrive_at(empty + 8 * previous, within);
                previous = stage;
                if (++stage == STAGES) stage = 0, phase ^= 1;
            };
#pragma unroll 1
            for (u32 chunk = 0; chunk < CHUNKS - LAST; chunk++) multiply(chunk);
            ask(early, m, row0, row, rows, here);
#pragma unroll 1
            for (u32 chunk = CHUNKS - LAST; chunk < CHUNKS; chunk++) multiply(chunk);
            product_wait<0>();
            if (within < 2) arrive_at(empty + 8 * previous, within);
#endif
#if WEIGHT == FP8_CHANNEL
            const float of_x[2] = {row0 < rows ? scales_of_x[row0] : 0.0f, row0 + 8 < rows ? scales_of_x[row0 + 8] : 0.0f};
#pragma unroll
            for (int i = 0; i < WIDE / 8; i++) {
                const u32 column = row + 8 * i + within % 4 * 2;
                const float2 of_w = column < N ? *(const float2*)(scales_of_w + column) : make_float2(0.0f, 0.0f);
                c[4 * i] *= of_x[0] * of_w.x, c[4 * i + 1] *= of_x[0] * of_w.y;
                c[4 * i + 2] *= of_x[1] * of_w.x, c[4 * i + 3] *= of_x[1] * of_w.y;
            }
#endif
            if (CONSUMES) scale_rows(c, early, eps);
            if (BIAS) add_bias(c, m.bias, row);
#if EPILOGUE == 3
            store_rotated(c, early, m, row0, row, rows, here);
#elif QUANTIZES
            store_quantized(c, m, row0, row, rows, scales_of_y, s_stride);
#elif EPILOGUE == 2 || EPILOGUE == 4
            store_gate_mul(c, m, row0, row, rows);
#else
            store(c, early, m, row0, row, rows);
#endif
        }
    }
    // A block must not exit while the other one still writes or arrives here.
    cluster_sync();
#endif
}
