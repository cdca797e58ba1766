// What scan_chunks.cu needs of a chunk that does not depend on the matrices: products of its keys and queries by mma, decays, and
// for the delta rule the inverse of a lower triangular matrix, by substitution in fp32: a thread has a column of it in registers.
// A block has a chunk and a group of heads with the same key, two heads at a time. DELTA, KEY (a multiple of 16, up to 128), HEADS,
// GROUPS, SHARE, LONG, DRAFTS, Q_AT and K_AT as in scan.cu; x is bf16. Types GT (gates), AT, DT (vectors).
#include "scan_chunks.cuh"

#define THREADS 128
#define MEMBERS (HEADS / GROUPS)
#define COLUMN (CHUNK + 4)
#define INVERSE (CHUNK + 8)
#define TILE_BYTES (2 * CHUNK * ROW * 2)
#define COLUMN_BYTES (2 * CHUNK * COLUMN * 4)

struct Shared {
    // Queries and keys; then A of two heads, by columns; then its inverse.
    __align__(16) u8 room[TILE_BYTES > COLUMN_BYTES || !DELTA ? TILE_BYTES : COLUMN_BYTES];
    float q_scale[CHUNK], k_scale[CHUNK], sum[2][CHUNK], strength[2][CHUNK], half[2];
};

DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Products of a warp's 16 tokens with those up to them.
struct Products {
    float kk[8][4], qk[8][4];
    DEVICE void make(const u16* q, const u16* k, u32 warp, u32 lane) {
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) kk[i][e] = qk[i][e] = 0.0f;
#pragma unroll 2
        for (u32 c = 0; c < KEY; c += 16) {
            u32 of_q[4], of_k[4], b[4];
            load_matrices(of_q, quad<true>(q, ROW, 16 * warp, c, lane));
            if (DELTA) load_matrices(of_k, quad<true>(k, ROW, 16 * warp, c, lane));
#pragma unroll
            for (u32 p = 0; p < 4; p++) {
                if (p > warp) continue;
                load_matrices(b, quad<false>(k, ROW, 16 * p, c, lane));
                mma_16x8x16<BF16>(qk[2 * p], of_q[0], of_q[1], of_q[2], of_q[3], b[0], b[1]);
                mma_16x8x16<BF16>(qk[2 * p + 1], of_q[0], of_q[1], of_q[2], of_q[3], b[2], b[3]);
                if (DELTA) {
                    mma_16x8x16<BF16>(kk[2 * p], of_k[0], of_k[1], of_k[2], of_k[3], b[0], b[1]);
                    mma_16x8x16<BF16>(kk[2 * p + 1], of_k[0], of_k[1], of_k[2], of_k[3], b[2], b[3]);
                }
            }
        }
    }
};

// 1 / length of a token's query or key.
DEVICE float inverse_length(const u16* row, float eps) {
    float sum = 0.0f;
    for (u32 c = 0; c < KEY; c += 8) {
        const uint4 v = *(const uint4*)&row[c];
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum = fmaf(low_half<BF16>(words[i]), low_half<BF16>(words[i]), sum);
            sum = fmaf(high_half<BF16>(words[i]), high_half<BF16>(words[i]), sum);
        }
    }
    return 1.0f / sqrtf(sum + eps);
}

// Substitution: column `column` of the inverse of I + A, of whose columns each is CHUNK numbers in a row.
DEVICE void substitute(float (&x)[CHUNK], const float* a, u32 column) {
#pragma unroll
    for (int t = 0; t < CHUNK; t++) x[t] = t == column ? 1.0f : 0.0f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        // Above its first element a column is zero, for all columns of a warp.
        if (half == 0 && column >= CHUNK / 2) continue;
#pragma unroll
        for (int s = half * CHUNK / 2; s < (half + 1) * CHUNK / 2; s++) {
#pragma unroll
            for (int m = (s + 1) / 4 * 4; m < CHUNK; m += 4) {
                const float4 of = *(const float4*)&a[s * COLUMN + m];
                if (m > s) x[m] = fmaf(-of.x, x[s], x[m]);
                if (m + 1 > s) x[m + 1] = fmaf(-of.y, x[s], x[m + 1]);
                if (m + 2 > s) x[m + 2] = fmaf(-of.z, x[s], x[m + 2]);
                if (m + 3 > s) x[m + 3] = fmaf(-of.w, x[s], x[m + 3]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
scan_prepare(const u16* x, const void* gates, const void* a, const void* dt, Record* records, const u32* row_seat, const u32* q_start,
             const u32* kv_len, const u32* row_replay, u32 rows, u32 seats, u32 context, u32 from, u32 x_stride, u32 gates_stride,
             float least, float eps) {
    __shared__ Shared shared;
    const u32 slot = blockIdx.x, group = blockIdx.y, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    let_successor_start();
    wait_for_predecessor();
    u32 begun = 0;
    for (u32 r = 0; r < rows; r += THREADS) begun += __syncthreads_count(r + thread < rows && Fed::slot(q_start[r + thread], r + thread) <= slot);
    const u32 row = begun - 1;
    Fed fed;
    if (!fed.load(row_seat, q_start, kv_len, row_replay, row, seats, context)) return;
    const u32 done = (slot - Fed::slot(fed.start, row)) * CHUNK;
    if (done >= fed.count) return;
    const u32 there = min(fed.count - done, (u32)CHUNK), token = fed.start + done;
    u16* const q = (u16*)shared.room, * const k = q + CHUNK * ROW;
    fetch<THREADS>(q, ROW, x + (u64)token * x_stride + Q_AT + group * KEY, x_stride, KEY, there, thread);
    fetch<THREADS>(k, ROW, x + (u64)token * x_stride + K_AT + group * KEY, x_stride, KEY, there, thread);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    const u32 own = thread / CHUNK, t = thread % CHUNK;
    if (DELTA && own == 0) shared.q_scale[t] = inverse_length(q + t * ROW, eps) * (1.0f / sqrtf((float)KEY));
    if (DELTA && own == 1) shared.k_scale[t] = inverse_length(k + t * ROW, eps);
    if (!DELTA) (own ? shared.k_scale : shared.q_scale)[t] = 1.0f;
    Products of;
    of.make(q, k, warp, lane);
#pragma unroll 1
    for (u32 first = 0; first < MEMBERS; first += 2) {
        // Of an odd number of heads, the last one is made twice.
        const u32 head = MEMBER(group, min(first + own, (u32)MEMBERS - 1));
        const u64 gate = (u64)(token + min(t, there - 1)) * gates_stride + from + head;
        const float step = softplus(load1<GT>(gates, gate + (DELTA ? HEADS : 0)) + load1<DT>(dt, head));
        const float held = DELTA ? step : fmaxf(step, least);
        float sum = t < there ? -expf(load1<AT>(a, head)) * held : 0.0f;
        const float full = DELTA ? 1.0f / (1.0f + expf(-load1<GT>(gates, gate))) : held;
        const float strength = t < there ? full : 0.0f;
#pragma unroll
        for (u32 away = 1; away < 32; away *= 2) {
            const float before = __shfl_up_sync(FULL, sum, away);
            if (lane >= away) sum += before;
        }
        if (t == 31) shared.half[own] = sum;
        // Also: all warps have done with the tiles, or with the pair before.
        __syncthreads();
        if (t >= 32) sum += shared.half[own];
        shared.sum[own][t] = sum;
        shared.strength[own][t] = strength;
        __syncthreads();
        const float last = shared.sum[own][CHUNK - 1], decay = __expf(sum), k_scale = shared.k_scale[t];
        Record& record = records[(u64)slot * HEADS + head];
        record.value[t] = strength;
        record.known[t] = strength * decay * k_scale;
        record.query[t] = decay * shared.q_scale[t];
        record.late[t] = __expf(last - sum) * k_scale;
        if (t < 4) record.whole[t] = __expf(last);
#pragma unroll 1
        for (u32 e = 0; e < 2; e++) {
            Record& to = records[(u64)slot * HEADS + MEMBER(group, min(first + e, (u32)MEMBERS - 1))];
            float* const columns = (float*)shared.room + e * CHUNK * COLUMN;
            const float* const sums = shared.sum[e];
#pragma unroll
            for (u32 p = 0; p < 4; p++) {
                if (p > warp) continue;
                u32 words[4];
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    // Words are columns 0 and 8 of rows 0, then of rows 8.
                    const u32 at = 16 * warp + i / 2 * 8 + lane / 4, s = 16 * p + i % 2 * 8 + lane % 4 * 2;
                    const float* const both = of.qk[2 * p + i % 2] + i / 2 * 2;
                    const float* const keys = of.kk[2 * p + i % 2] + i / 2 * 2;
                    float mixed[2];
#pragma unroll
                    for (u32 c = 0; c < 2; c++) {
                        const float held = __expf(sums[at] - sums[s + c]) * shared.k_scale[s + c];
                        mixed[c] = s + c <= at ? both[c] * held * shared.q_scale[at] : 0.0f;
                        if (DELTA) columns[(s + c) * COLUMN + at] = s + c < at ? keys[c] * held * shared.k_scale[at] * shared.strength[e][at] : 0.0f;
                    }
                    words[i] = pack_bf16(mixed[0], mixed[1]);
                }
                to.mix[block_of(warp, p)][lane] = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
#if DELTA
        __syncthreads();
        float inverse[CHUNK];
        substitute(inverse, (const float*)shared.room + own * CHUNK * COLUMN, t);
        __syncthreads();
        u16* const tile = (u16*)shared.room + own * CHUNK * INVERSE;
#pragma unroll
        for (int i = 0; i < CHUNK; i++) tile[i * INVERSE + t] = float_to_bf16(inverse[i]);
        __syncthreads();
#pragma unroll 1
        for (u32 e = 0; e < 2; e++) {
            Record& to = records[(u64)slot * HEADS + MEMBER(group, min(first + e, (u32)MEMBERS - 1))];
#pragma unroll
            for (u32 p = 0; p < 4; p++) {
                if (p > warp) continue;
                u32 words[4];
                load_matrices(words, quad<false>((const u16*)shared.room + e * CHUNK * INVERSE, INVERSE, 16 * warp, 16 * p, lane));
                to.inverse[block_of(warp, p)][lane] = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
#endif
    }
}
