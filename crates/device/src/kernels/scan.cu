// A matrix of each head, carried from token to token: S = g S, d = b (v - k S) or b v, S += k d, y = q S. A block has
// WARPS times 8 columns of one head's matrix of one row, and takes the row's tokens in order, TILE at a time. Four lanes
// share a column: lane part p has rows 16 m + 4 p .. + 3 for every m, so that it reads keys four at a time without bank
// conflicts. Every sum has one order whatever the tile: decode steps and chunks of prompts give the same bits.
// KEY x VALUE elements of each of HEADS heads. SHARE consecutive heads have the same key of GROUPS; SHARE 0: every GROUPS-th
// head has. Columns Q_AT, K_AT, V_AT of x. DELTA: the delta rule, else a state space. SINGLE: row r has token r alone.
// SKIP: part of the value is added. Types XT (x), GT (gates), AT, DT, ST (vectors), YT.
// With DRAFTS there is a log of LOGGED tokens behind a seat's matrices, LOG_COLS floats each: k of all groups, the changes b (..)
// of all heads from CHANGES_AT on, g of all heads from DECAYS_AT on; position p is entry p mod LOGGED. VERIFY: the tokens of a row
// but the first are drafts. The matrix stays as it is after the first, drafts are logged, and accepted ones are taken from there
// before the seat's next tokens, with the same roundings. Entries that some block reads are not written in the same launch.
// LONG: rows of so many tokens without such drafts are left to scan_chunks.cu.
#include "prelude.cuh"

#define PADDED ((KEY + 15) / 16 * 16)
#define PER (PADDED / 4)
#define COLUMNS (8 * WARPS)
// Left to itself, the compiler spills registers with a log, for more blocks than there is work for.
#if DRAFTS
#define BLOCKS , 1
#else
#define BLOCKS
#endif
#if SHARE
#define GROUP(head) ((head) / SHARE)
#define FIRST(head) ((head) % SHARE == 0)
#else
#define GROUP(head) ((head) % GROUPS)
#define FIRST(head) ((head) < GROUPS)
#endif

DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Accepted drafts before a row's tokens.
DEVICE u32 replayed(const u32* row_replay, u32 row, u32 before) {
    return DRAFTS ? min(row_replay[row], min(before, (u32)DRAFTS)) : 0;
}

// Where a seat's log has the token of a position.
DEVICE float* logged(float* log, u32 position) { return log + (u64)(position % max(LOGGED, 1)) * LOG_COLS; }

struct Shared {
    float q[TILE][PADDED], k[TILE][PADDED], v[TILE][COLUMNS];
    float decay[TILE], strength[TILE], both[TILE];
};

// Adds a token from the log.
DEVICE void add(float* s, const float* keys, u32 part, float decay, float change) {
#pragma unroll
    for (int m = 0; m < PER / 4; m++) {
        const float4 k = *(const float4*)&keys[16 * m + 4 * part];
        s[4 * m] = fmaf(k.x, change, __fmul_rn(s[4 * m], decay));
        s[4 * m + 1] = fmaf(k.y, change, __fmul_rn(s[4 * m + 1], decay));
        s[4 * m + 2] = fmaf(k.z, change, __fmul_rn(s[4 * m + 2], decay));
        s[4 * m + 3] = fmaf(k.w, change, __fmul_rn(s[4 * m + 3], decay));
    }
}

// Writes a column of the matrix.
DEVICE void put(const float* s, float* matrix, u32 part) {
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const u32 k = i / 4 * 16 + part * 4 + i % 4;
        if (k < KEY) matrix[(u64)k * VALUE] = s[i];
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS BLOCKS)
scan(const void* x, const void* gates, const void* a, const void* dt, const void* skip, float* carry, void* y,
     const u32* row_seat, const u32* q_start, const u32* kv_len, const u32* row_replay, u32 seats, u32 context, u32 from, u32 x_stride,
     u32 gates_stride, u32 carry_stride, u32 y_stride, float least, float eps) {
    __shared__ __align__(16) Shared tile;
    const u32 head = blockIdx.y, row = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 part = lane / 8, first = blockIdx.x * COLUMNS, own = warp * 8 + lane % 8, column = first + own;
    const float rate = -expf(load1<AT>(a, head)), offset = load1<DT>(dt, head);
    const float through = SKIP ? load1<ST>(skip, head) : 0.0f;
    let_successor_start();
    wait_for_predecessor();
    const u32 seat = row_seat[row], start = SINGLE ? row : q_start[row];
    const u32 count = SINGLE ? 1 : q_start[row + 1] - start, length = kv_len[row];
    // Pad rows have no seat of their own, and must not change what seats carry.
    if (seat >= seats || count == 0 || length == 0 || length < count || length > context) return;
    const u32 before = length - count, again = replayed(row_replay, row, before);
#if LONG
    if (count >= LONG && again == 0) return;
#endif
    float* const matrix = carry + (u64)seat * carry_stride + (u64)head * KEY * VALUE + column;
    float s[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const u32 k = i / 4 * 16 + part * 4 + i % 4;
        // A sequence's first token finds zeros, whatever the seat carried.
        s[i] = length > count && k < KEY ? matrix[(u64)k * VALUE] : 0.0f;
    }
    float* const log = carry + (u64)seat * carry_stride + (u64)HEADS * KEY * VALUE;
    const u32 changes = CHANGES_AT + head * VALUE + first;
    for (u32 done = 0; done < again; done += TILE) {
        const u32 there = min(again - done, (u32)TILE);
        if (done > 0) __syncthreads();
        for (u32 t = warp; t < there; t += WARPS) {
            const float* const entry = logged(log, before - again + done + t);
            for (u32 c = lane; c < PADDED; c += 32) tile.k[t][c] = c < KEY ? entry[GROUP(head) * KEY + c] : 0.0f;
            for (u32 c = lane; c < COLUMNS; c += 32) tile.v[t][c] = entry[changes + c];
            if (lane == 0) tile.decay[t] = entry[DECAYS_AT + head];
        }
        __syncthreads();
#pragma unroll 1
        for (u32 t = 0; t < there; t++) add(s, tile.k[t], part, tile.decay[t], tile.v[t][own]);
    }
    if (again > 0) __syncthreads();
    for (u32 done = 0; done < count; done += TILE) {
        const u32 there = min(count - done, (u32)TILE);
        if (done > 0) __syncthreads();
        // A warp prepares every WARPS-th token of the tile.
        for (u32 t = warp; t < there; t += WARPS) {
            const u64 token = start + done + t, at = token * x_stride;
            // A draft's key and decay are logged by one block of those that have them.
            float* const entry = VERIFY && blockIdx.x == 0 && done + t > 0 ? logged(log, before + done + t) : nullptr;
            const u64 query = at + Q_AT + GROUP(head) * KEY, key = at + K_AT + GROUP(head) * KEY;
            float q[(PADDED + 31) / 32], k[(PADDED + 31) / 32], qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
            for (int i = 0; i < (PADDED + 31) / 32; i++) {
                const u32 c = i * 32 + lane;
                q[i] = c < KEY ? load1<XT>(x, query + c) : 0.0f;
                k[i] = c < KEY ? load1<XT>(x, key + c) : 0.0f;
                qq = fmaf(q[i], q[i], qq);
                kk = fmaf(k[i], k[i], kk);
                qk = fmaf(q[i], k[i], qk);
            }
            qk = warp_sum(qk);
            float q_scale = 1.0f, k_scale = 1.0f;
            if (DELTA) {
                q_scale = 1.0f / (sqrtf(warp_sum(qq) + eps) * sqrtf((float)KEY));
                k_scale = 1.0f / sqrtf(warp_sum(kk) + eps);
            }
#pragma unroll
            for (int i = 0; i < (PADDED + 31) / 32; i++) {
                const u32 c = i * 32 + lane;
                if (c < PADDED) {
                    tile.q[t][c] = q[i] * q_scale;
                    tile.k[t][c] = k[i] * k_scale;
                }
                if (VERIFY && entry && FIRST(head) && c < KEY) entry[GROUP(head) * KEY + c] = k[i] * k_scale;
            }
            if (lane == 0) {
                const u64 gate = token * gates_stride + from + head;
                const float step = softplus(load1<GT>(gates, gate + (DELTA ? HEADS : 0)) + offset);
                const float held = DELTA ? step : fmaxf(step, least);
                const float decay = expf(rate * held);
                tile.decay[t] = decay;
                if (VERIFY && entry) entry[DECAYS_AT + head] = decay;
                tile.strength[t] = DELTA ? 1.0f / (1.0f + expf(-load1<GT>(gates, gate))) : held;
                tile.both[t] = qk * q_scale * k_scale;
            }
            for (u32 c = lane; c < COLUMNS; c += 32) tile.v[t][c] = load1<XT>(x, at + V_AT + head * VALUE + first + c);
        }
        __syncthreads();
#if VERIFY
#pragma unroll 1
#endif
        for (u32 t = 0; t < there; t++) {
            const float decay = tile.decay[t], v = tile.v[t][own];
            float known = 0.0f, result = 0.0f;
#pragma unroll
            for (int m = 0; m < PER / 4; m++) {
                const float4 q = *(const float4*)&tile.q[t][16 * m + 4 * part];
                const float4 k = *(const float4*)&tile.k[t][16 * m + 4 * part];
                const float qs[4] = {q.x, q.y, q.z, q.w}, ks[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    s[4 * m + i] = __fmul_rn(s[4 * m + i], decay);
                    known = fmaf(ks[i], s[4 * m + i], known);
                    result = fmaf(qs[i], s[4 * m + i], result);
                }
            }
#pragma unroll
            for (int away = 8; away < 32; away *= 2) {
                known += __shfl_xor_sync(FULL, known, away);
                result += __shfl_xor_sync(FULL, result, away);
            }
            const float change = __fmul_rn(tile.strength[t], DELTA ? v - known : v);
#pragma unroll
            for (int m = 0; m < PER / 4; m++) {
                const float4 k = *(const float4*)&tile.k[t][16 * m + 4 * part];
                s[4 * m] = fmaf(k.x, change, s[4 * m]);
                s[4 * m + 1] = fmaf(k.y, change, s[4 * m + 1]);
                s[4 * m + 2] = fmaf(k.z, change, s[4 * m + 2]);
                s[4 * m + 3] = fmaf(k.w, change, s[4 * m + 3]);
            }
            if (VERIFY && done + t == 0) put(s, matrix, part);
            if (VERIFY && done + t > 0 && part == 0) logged(log, before + done + t)[changes + own] = change;
            result = fmaf(tile.both[t], change, result);
            if (SKIP) result = fmaf(through, v, result);
            if (part == 0) store1<YT>(y, (u64)(start + done + t) * y_stride + head * VALUE + column, result);
        }
    }
    if (!VERIFY) put(s, matrix, part);
}
