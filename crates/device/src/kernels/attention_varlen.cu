// Paged attention for rows of many tokens, causal or both ways. A block takes Q_TOKENS tokens of a row with all G query
// heads of a KV head: up to 16·WARPS packed rows, 16 per warp, over tiles of 64 KV tokens that all warps share. Wide
// heads (D > 128) leave no registers for q, which then stays in shared memory, and tiles have 32 tokens. Items are found
// on the device from q_start, so the grid depends on the bucket alone; blocks past the live items return immediately.
//
// D ≤ 256, HQ, HKV, PAGE = 16, WARPS, Q_TOKENS, WINDOW (0: none), CAUSAL, TYPE (of q and pages), KT if pages have another
// type (pages.cuh), YT; SOFTCAP if scores are capped; SINKS (pages.cuh).
#include "pages.cuh"

#define G (HQ / HKV)
#define WIDE (D > 128)
#define TILE (WIDE ? 32 : 64)
#define ROW_BYTES (D * ELEMENT)
// Of a row of q, of a row of keys or values.
#define PITCH (D * 2 + 16)
#define KV_PITCH (NARROW ? BYTE_PITCH : PITCH)
#define HALF_BYTES (TILE * KV_PITCH)
#define STEPS (D / 16)

// Positions before `first` are outside the window, and their pages may belong to another sequence.
DEVICE void fetch(u32 stage, const u8* kv, const u32* pages, u32 tile, u32 first, u32 length) {
    const u64 bytes = (u64)HKV * PAGE * ROW_BYTES;
#pragma unroll
    for (int i = 0; i < (TILE * (ROW_BYTES / 16) + WARPS * 32 - 1) / (WARPS * 32); i++) {
        const u32 piece = i * (WARPS * 32) + threadIdx.x, token = piece / (ROW_BYTES / 16), at = piece % (ROW_BYTES / 16);
        if (token >= TILE) break;
        const u32 position = tile * TILE + token;
        const bool live = position < length && (!WINDOW || position >= first);
        const u8* from = kv + (u64)(live ? pages[position / PAGE] : 0) * (2 * bytes) + position % PAGE * ROW_BYTES + at * 16;
        const u32 to = NARROW ? stage + byte_place(token, at) : stage + token * PITCH + at * 16;
        copy16_async_or_zero(to, from, live);
        copy16_async_or_zero(to + HALF_BYTES, from + bytes, live);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
attention_varlen(const void* qkv, const u8* kv, void* out, const u32* row_seat, const u32* q_start, const u32* kv_len,
                 const u32* page_table, u32 rows, u32 pages_per_seat, u32 q_stride, u32 out_stride, float scale
                 SCALES_OF_PAGES SINKS_PARAMETER) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ u32 found;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, j = lane % 4, head = blockIdx.x;
    const u32 ring = shared_address(memory);
    // Late items have the most work, so they start first.
    const u32 item = gridDim.y - 1 - blockIdx.y;
    if (threadIdx.x == 0) found = rows;
    __syncthreads();
    let_successor_start();
    wait_for_predecessor();
    for (u32 c = threadIdx.x; c < rows; c += WARPS * 32) {
        const u32 from = q_start[c] / Q_TOKENS + c, to = q_start[c + 1] / Q_TOKENS + c + 1;
        if (item >= from && item < to) found = c;
    }
    __syncthreads();
    const u32 r = found;
    if (r >= rows) return;
    const u32 start = q_start[r], q_len = q_start[r + 1] - start;
    const u32 block = (item - (start / Q_TOKENS + r)) * Q_TOKENS;
    const u32 length = kv_len[r];
    // A row whose length does not fit its pages attends to nothing.
    if (block >= q_len || length < q_len) return;
    const u32 first_token = start + block, tokens = min(q_len - block, (u32)Q_TOKENS);
    const u32 position = length - q_len + block;
    const u32* pages = page_table + (u64)row_seat[r] * pages_per_seat;
    const u8* keys_of_head = kv + (u64)head * (PAGE * ROW_BYTES);
    const u32 first = WINDOW && position + 1 > WINDOW ? position + 1 - WINDOW : 0, begin = first / TILE;
    // One past the last position that any token of the block sees.
    const u32 seen = CAUSAL ? position + tokens : WINDOW ? min(length, position + tokens - 1 + WINDOW) : length;
    const u32 end = (seen + TILE - 1) / TILE;
    fetch(ring, keys_of_head, pages, begin, first, length);
    commit_copies();

    // This warp's 16 rows of q: rows g and g + 8 of this lane.
    const u32 row0 = warp * 16 + g, row1 = row0 + 8;
    u32 q[WIDE ? 1 : STEPS][4];
    // Wide heads: after the ring, rows of PITCH bytes, which only this warp writes and reads.
    const u32 queries = ring + 4 * HALF_BYTES + warp * (16 * PITCH);
    if (WIDE) {
        u8* to = memory + 4 * HALF_BYTES + warp * (16 * PITCH);
        for (u32 i = lane; i < 16 * (D / 8); i += 32) {
            const u32 row = warp * 16 + i / (D / 8), at = i % (D / 8), t = row / G;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (t < tokens) v = *(const uint4*)((const u16*)qkv + (u64)(first_token + t) * q_stride + (head * G + row % G) * D + at * 8);
            if (NARROW) {
                // In the order in which a lane has the elements of a key: 4j to 4j + 3 are a fragment's 2j, 2j + 1, 2j + 8, 2j + 9.
                v = to_half<TYPE>(v);
                u8* there = to + i / (D / 8) * PITCH + at / 2 * 32 + at % 2 * 8;
                *(uint2*)there = make_uint2(v.x, v.z), *(uint2*)(there + 16) = make_uint2(v.y, v.w);
            } else
                *(uint4*)(to + i / (D / 8) * PITCH + at * 16) = v;
        }
        __syncwarp();
    }
#pragma unroll
    for (int half = 0; half < 2 && !WIDE; half++) {
        const u32 row = half ? row1 : row0, t = row / G;
        const bool live = t < tokens;
        const u32* from = (const u32*)((const u16*)qkv + (u64)(first_token + (live ? t : 0)) * q_stride + (head * G + row % G) * D);
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            // With bytes, a lane has four neighbouring elements of a key.
            q[s][half] = live ? from[s * 8 + (NARROW ? 2 * j : j)] : 0;
            q[s][half + 2] = live ? from[s * 8 + (NARROW ? 2 * j + 1 : j + 4)] : 0;
            if (NARROW) q[s][half] = to_half<TYPE>(q[s][half]), q[s][half + 2] = to_half<TYPE>(q[s][half + 2]);
        }
    }
    // The last position each of the lane's two rows may see.
    const u32 places[2] = {position + row0 / G, position + row1 / G};
    u32 limits[2];
#pragma unroll
    for (int half = 0; half < 2; half++)
        limits[half] = CAUSAL ? places[half] : WINDOW ? min(length - 1, places[half] + WINDOW - 1) : length - 1;
#if NARROW
    scale *= __ldg(k_scale + head);
    const float scale_of_v = __ldg(v_scale + head);
#else
    const float scale_of_v = 1.0f;
#endif
    const float factor = score_factor(scale);
    float sums[D / 8][4], maximum[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < D / 8; n++) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;

    u32 stage = 0;
    for (u32 tile = begin; tile < end; tile++) {
        wait_copies<0>();
        __syncthreads();
        if (tile + 1 < end) fetch(ring + (stage ^ 1) * (2 * HALF_BYTES), keys_of_head, pages, tile + 1, first, length);
        commit_copies();
        const u32 keys = ring + stage * (2 * HALF_BYTES), values = keys + HALF_BYTES;
        stage ^= 1;
        float scores[TILE / 8][4];
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.0f;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            if (WIDE) load_matrices(q[0], queries + lane % 16 * PITCH + s * 32 + lane / 16 * 16);
            u32(&a)[4] = q[WIDE ? 0 : s];
#pragma unroll
            for (int n = 0; NARROW && n < TILE / 32; n++) {
                u32 bytes[4], low, high;
                load_matrices(bytes, keys + byte_place(n * 32 + lane, s));
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    widen_fp8_half(bytes[i], low, high);
                    mma_16x8x16<MT>(scores[4 * n + i], a[0], a[1], a[2], a[3], low, high);
                }
            }
#pragma unroll
            for (int n = 0; !NARROW && n < TILE / 16; n++) {
                u32 b[4];
                load_matrices(b, keys + (n * 16 + lane / 16 * 8 + lane % 8) * PITCH + s * 32 + lane / 8 % 2 * 16);
                mma_16x8x16<TYPE>(scores[2 * n], a[0], a[1], a[2], a[3], b[0], b[1]);
                mma_16x8x16<TYPE>(scores[2 * n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        }
        const bool partly = tile * TILE + TILE - 1 > (CAUSAL ? position : length - 1) || WINDOW;
        float keep[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float top = maximum[half];
#pragma unroll
            for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& s = scores[n][2 * half + e];
                    s = capped_score(s, factor);
                    if (partly) {
                        const u32 t = tile * TILE + n * 8 + 2 * j + e;
                        if (t > limits[half] || (WINDOW && t + WINDOW <= places[half])) s = -INFINITY;
                    }
                    top = fmaxf(top, s);
                }
            top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
            top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
            const float safe = top == -INFINITY ? 0.0f : top;
            keep[half] = exp2f(maximum[half] - safe);
            maximum[half] = top;
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& s = scores[n][2 * half + e];
                    s = exp2f(s - safe);
                    sum += s;
                }
            total[half] = total[half] * keep[half] + sum;
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++) sums[n][0] *= keep[0], sums[n][1] *= keep[0], sums[n][2] *= keep[1], sums[n][3] *= keep[1];
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
            const u32 a0 = pack2<MT>(scores[2 * k][0], scores[2 * k][1]), a1 = pack2<MT>(scores[2 * k][2], scores[2 * k][3]);
            const u32 a2 = pack2<MT>(scores[2 * k + 1][0], scores[2 * k + 1][1]), a3 = pack2<MT>(scores[2 * k + 1][2], scores[2 * k + 1][3]);
            u32 bytes[4];
#pragma unroll
            for (int n = 0; NARROW && n < D / 16; n++) {
                // Of columns 2i and 2i + 1 of sums, one is in each of a pair of sums: a lane has 4j to 4j + 3.
                u32 b[4];
                if (n % 2 == 0) load_matrices_transposed(bytes, values + byte_place(k * 16 + lane % 16, min(n + lane / 16, D / 16 - 1u)));
                widen_values(b, bytes[n % 2 * 2], bytes[n % 2 * 2 + 1]);
                mma_16x8x16<MT>(sums[2 * n], a0, a1, a2, a3, b[0], b[2]);
                mma_16x8x16<MT>(sums[2 * n + 1], a0, a1, a2, a3, b[1], b[3]);
            }
#pragma unroll
            for (int n = 0; !NARROW && n < D / 16; n++) {
                u32 b[4];
                load_matrices_transposed(b, values + (k * 16 + lane / 8 % 2 * 8 + lane % 8) * PITCH + n * 32 + lane / 16 * 16);
                mma_16x8x16<TYPE>(sums[2 * n], a0, a1, a2, a3, b[0], b[1]);
                mma_16x8x16<TYPE>(sums[2 * n + 1], a0, a1, a2, a3, b[2], b[3]);
            }
        }
    }
    wait_copies<0>();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = total[half];
        sum += __shfl_xor_sync(FULL, sum, 1);
        sum += __shfl_xor_sync(FULL, sum, 2);
        const u32 row = half ? row1 : row0, t = row / G;
        if (t >= tokens || row >= Q_TOKENS * G) continue;
        sum = WITH_SINK(sum, head * G + row % G, maximum[half]);
        const float inverse = NARROW ? scale_of_v / sum : 1.0f / sum;
        const u64 to = (u64)(first_token + t) * out_stride + (head * G + row % G) * D + (NARROW ? 4 : 2) * j;
#pragma unroll
        for (int n = 0; NARROW && n < D / 16; n++) {
            const float *even = sums[2 * n] + 2 * half, *odd = sums[2 * n + 1] + 2 * half;
            const float v[4] = {even[0] * inverse, odd[0] * inverse, even[1] * inverse, odd[1] * inverse};
            if (YT == F32) *(float4*)((float*)out + to + n * 16) = make_float4(v[0], v[1], v[2], v[3]);
            else *(uint2*)((u16*)out + to + n * 16) = make_uint2(pack2<YT>(v[0], v[1]), pack2<YT>(v[2], v[3]));
        }
#pragma unroll
        for (int n = 0; !NARROW && n < D / 8; n++) {
            const float a = sums[n][2 * half] * inverse, b = sums[n][2 * half + 1] * inverse;
            if (YT == F32) *(float2*)((float*)out + to + n * 8) = make_float2(a, b);
            else *(u32*)((u16*)out + to + n * 8) = pack2<YT>(a, b);
        }
    }
}
