// Paged attention with tensor cores. A warp takes 16 tokens (a page) at a time: scoresᵀ = K · qᵀ with the tokens as
// the 16-row operand and up to 8·TILES packed (token, query head) columns, then outᵀ += Vᵀ · p. Warps of a block take
// pages of the KV range round robin, each with its own ring, and merge at the end. Blocks of a row share its KV range
// by splits; the last one to arrive merges them, always in the same order.
//
// Decode (SINGLE): every row has Q_TOKENS tokens, one or a few with its drafts. The prologue's plan splits rows into pieces, so that all pieces of all rows are about equal. SPLIT
// 0: no splitting, grid (HKV, rows). SPLIT 1: grid (HKV, items); there are at most as many pieces as rows plus the
// plan's ways, and a block finds its row by a sum over the rows. SPLIT 2, for a few rows: grid (HKV, most pieces of a
// row, rows). Blocks without a piece return immediately. With ROPE the block prepares q itself, and the block whose
// piece holds a new token prepares, writes and uses its k and v; all older pages are fetched before the wait, since no
// running kernel can write them. With ONES (SPLIT 0 or 1) rows may have any number of tokens, and only rows with one token
// are computed: the decode rows of a step that also feeds prompts. Otherwise grid (items, HKV): an item is Q_TOKENS
// tokens of a row, found on the device from q_start.
//
// CLUSTER > 1: this many blocks divide a piece once more. Each of them merges a share of the columns, whose partial
// results all of them write to its shared memory, which takes a third of the time of a merge through L2.
//
// D, HQ, HKV, PAGE = 16, WARPS, STAGES, SPLIT, LEAST_PAGES, ROWS32 (32 rows each), SINGLE, ROPE, Q_TOKENS, WINDOW;
// TYPE (of q and pages), KT if pages have another type (pages.cuh), YT; QN, KN, QNT, KNT for ROPE; COUNT_SPLIT; ONES;
// SOFTCAP if scores are capped; SINKS (pages.cuh). With FIXED a page's warp depends on the page alone.
#include "pages.cuh"

#define G (HQ / HKV)
#define COLUMNS (Q_TOKENS * G)
#define TILES ((COLUMNS + 7) / 8)
#define ROW_BYTES (D * ELEMENT)
#define PITCH (NARROW ? BYTE_PITCH : D * 2 + 16)
#define STAGE_BYTES (2 * 16 * PITCH)
#define STEPS (D / 16)
#define PER ((D / 2 + 31) / 32)
// Words of a block's partial result: maximum and total of each column, padded to four words, then the sums.
#define PART_WORDS (COLUMNS * (D + 4))
#define RING_BYTES (WARPS * STAGES * STAGE_BYTES)
// Scores are summed alternately in two accumulators, so that an MMA does not wait for the previous one. FIXED needs
// one order.
#define IN_TURN (TILES == 1 && !FIXED)
// The memory of the rings is reused to merge the warps; the partial results of a cluster's blocks lie after it.
#define PARTS_AT (RING_BYTES > WARPS * PART_WORDS * 4 ? RING_BYTES : WARPS * PART_WORDS * 4)
// Columns that a block of a cluster merges.
#define OWN_COLUMNS ((COLUMNS + CLUSTER - 1) / CLUSTER)
#define OWN_WORDS (OWN_COLUMNS * (D + 4))
// Partial results that are loaded at once when splits are merged: one round trip to L2 each time. Those past the last one
// are loaded, too.
#define MERGED 17

struct Row {
    const u32* pages;
    const u8* kv; // the head's keys in page 0
    u32 length, fresh; // tokens at `fresh` and later are not fetched
    u32 first; // pages before it are outside the window and may belong to another sequence
};

DEVICE void fetch(u32 stage, const Row& row, u32 page, u32 lane) {
    const u64 bytes = (u64)HKV * PAGE * ROW_BYTES;
    const u8* keys = row.kv + (u64)row.pages[page] * (2 * bytes);
#pragma unroll
    for (int i = 0; i < (ROW_BYTES + 31) / 32; i++) {
        const u32 piece = i * 32 + lane, token = piece / (ROW_BYTES / 16), at = piece % (ROW_BYTES / 16);
        if (ROW_BYTES % 32 && token >= 16) break;
        const bool live = page * PAGE + token < row.fresh && (!(FIXED && WINDOW) || page >= row.first);
        const u8* from = keys + token * ROW_BYTES + at * 16;
        const u32 to = NARROW ? stage + byte_place(token, at) : stage + token * PITCH + at * 16;
        copy16_async_or_zero(to, from, live);
        copy16_async_or_zero(to + 16 * PITCH, from + bytes, live);
    }
}

// What a lane needs to normalise and rotate elements i = lane + 32c and i + D/2 of a head. Neither depends on the
// predecessor, so both are loaded before the wait.
struct Scales {
    float low[PER], high[PER];
};
struct Angles {
    float cosine[PER], sine[PER];
};
// Those elements of a head.
struct Pairs {
    float a[PER], b[PER];
};
// New tokens whose k, and whose v, a warp prepares.
#define NEW_EACH ((Q_TOKENS + WARPS - 1) / WARPS)
template <int T_> DEVICE void store4(void* to, u64 i, float a, float b, float c, float d) {
    if (T_ == F32) *(float4*)((float*)to + i) = make_float4(a, b, c, d);
    else *(uint2*)((u16*)to + i) = make_uint2(pack2<T_>(a, b), pack2<T_>(c, d));
}

template <int NORM, int T_> DEVICE Scales scales_of(const void* weight) {
    Scales f;
#pragma unroll
    for (int c = 0; c < PER; c++) {
        const u32 i = min(threadIdx.x % 32 + 32 * c, D / 2 - 1u);
        f.low[c] = NORM ? load1<T_>(weight, i) : 1.0f;
        f.high[c] = NORM ? load1<T_>(weight, i + D / 2) : 1.0f;
    }
    return f;
}
DEVICE Angles angles_of(const float* table) {
    Angles f;
#pragma unroll
    for (int c = 0; c < PER; c++) {
        const u32 i = min(threadIdx.x % 32 + 32 * c, D / 2 - 1u);
        f.cosine[c] = table[i], f.sine[c] = table[i + D / 2];
    }
    return f;
}
DEVICE Pairs pairs_of(const void* from, u64 at) {
    Pairs f;
#pragma unroll
    for (int c = 0; c < PER; c++) {
        const u32 i = threadIdx.x % 32 + 32 * c;
        f.a[c] = i < D / 2 ? load1<TYPE>(from, at + i) : 0.0f;
        f.b[c] = i < D / 2 ? load1<TYPE>(from, at + i + D / 2) : 0.0f;
    }
    return f;
}
// The number of pieces that the pages of a row of `length` tokens are split into.
DEVICE u32 splits_of(u32 length, u32 share, u32 most) {
    const u32 begin = WINDOW && length + 1 > WINDOW + Q_TOKENS ? length + 1 - WINDOW - Q_TOKENS : 0;
    const u32 pages = length ? (length - 1) / PAGE + 1 - begin / PAGE : 0, splits = min((pages + share / 2) / share, most);
    if (splits <= 1) return 1;
    const u32 each = (pages + splits - 1) / splits;
    return (pages + each - 1) / each;
}

// Pages of an equal piece; a cluster's piece is shared by all its blocks.
DEVICE u32 share_of(const u32* counts) {
    return CLUSTER * max((__ldcg(counts + COUNT_SPLIT) * HKV + 8 * PAGE - 1) / (8 * PAGE), (u32)LEAST_PAGES);
}

struct Item {
    u32 row, seat, length, split, splits;
};
// The row and piece of an item, by a sum over the rows before it; every warp computes it. All loads are in flight at
// once.
DEVICE Item find(u32 item, u32 rows, const u32* kv_len, const u32* row_seat, const u32* counts, const u32* q_start) {
    const u32 lane = threadIdx.x % 32;
    u32 lengths[ROWS32], seats[ROWS32], before = 0;
    bool fed[ROWS32];
#pragma unroll
    for (int i = 0; i < ROWS32; i++) {
        const u32 r = min(i * 32 + lane, rows - 1);
        lengths[i] = __ldcg(kv_len + r), seats[i] = __ldcg(row_seat + r);
        fed[i] = !ONES || __ldcg(q_start + r + 1) - __ldcg(q_start + r) == 1;
    }
    const u32 share = share_of(counts);
    Item found = {rows, 0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < ROWS32; i++) {
        const u32 own = i * 32 + lane < rows && fed[i] ? splits_of(lengths[i], share, FULL) : 0;
        u32 sum = own;
#pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            const u32 other = __shfl_up_sync(FULL, sum, o);
            if (lane >= o) sum += other;
        }
        const u32 past = __ballot_sync(FULL, before + sum > item), at = __ffs(past) - 1;
        const u32 total = __shfl_sync(FULL, sum, 31);
        if (past && found.row == rows) {
            found.row = i * 32 + at;
            found.seat = __shfl_sync(FULL, seats[i], at);
            found.length = __shfl_sync(FULL, lengths[i], at);
            found.splits = __shfl_sync(FULL, own, at);
            found.split = item - (before + __shfl_sync(FULL, sum, at) - found.splits);
        }
        before += total;
    }
    return found;
}

// Normalises and rotates a head into shared memory.
template <int NORM, int T_> DEVICE void prepare(const Pairs& x, float eps, const Scales& f, const Angles& t, void* to, float by = 1.0f) {
    const u32 lane = threadIdx.x % 32;
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < PER; c++) sum += x.a[c] * x.a[c] + x.b[c] * x.b[c];
    const float scale = NORM ? 1.0f / sqrtf(warp_sum(sum) / (float)D + eps) : 1.0f;
#pragma unroll
    for (int c = 0; c < PER; c++) {
        if (lane + 32 * c >= D / 2) continue;
        const float u = x.a[c] * (scale * f.low[c]), v = x.b[c] * (scale * f.high[c]);
        store1<T_>(to, lane + 32 * c, (u * t.cosine[c] - v * t.sine[c]) * by);
        store1<T_>(to, lane + 32 * c + D / 2, (v * t.cosine[c] + u * t.sine[c]) * by);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
attention(const void* qkv, u8* kv, void* out, const u32* row_seat, const u32* q_start, const u32* kv_len,
          const u32* page_table, const u32* counts, u32* semaphores, float* partial, const void* q_norm,
          const void* k_norm, const float* rope, u32 rows, u32 pages_per_seat, u32 q_stride, u32 out_stride,
          u32 rope_stride, u32 max_position, float scale, float q_eps, float k_eps SCALES_OF_PAGES SINKS_PARAMETER) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ __align__(16) u16 queries[TILES * 8][D + 8];
    __shared__ __align__(16) u8 newest[ROPE ? Q_TOKENS : 1][2][ROW_BYTES];
    __shared__ float maxima[WARPS][TILES * 8], totals[WARPS][TILES * 8];
    __shared__ u32 shared_word;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
    const u32 head = SINGLE ? blockIdx.x : blockIdx.y;
    const u32 ring = shared_address(memory) + warp * STAGES * STAGE_BYTES;
#if NARROW
    const float scale_of_k = __ldg(k_scale + head), scale_of_v = __ldg(v_scale + head);
#else
    const float scale_of_k = 1.0f, scale_of_v = 1.0f;
#endif

    // Which row, and which of its tokens.
    const u32 rank = blockIdx.y % CLUSTER, cut = blockIdx.y / CLUSTER, cuts = gridDim.y / CLUSTER, piece = blockIdx.z * cuts + cut;
    u32 r = SPLIT == 2 ? blockIdx.z : cut, first_token = r * Q_TOKENS, tokens = Q_TOKENS, split = 0, splits = 1;
    if (!SINGLE) {
        wait_for_predecessor();
        if (threadIdx.x == 0) shared_word = rows;
        __syncthreads();
        for (u32 c = threadIdx.x; c < rows; c += WARPS * 32) {
            const u32 from = q_start[c] / Q_TOKENS + c, to = q_start[c + 1] / Q_TOKENS + c + 1;
            if (blockIdx.x >= from && blockIdx.x < to) shared_word = c;
        }
        __syncthreads();
        r = shared_word;
        if (r >= rows) return;
        const u32 start = q_start[r], q_len = q_start[r + 1] - start;
        const u32 block = (blockIdx.x - (start / Q_TOKENS + r)) * Q_TOKENS;
        if (block >= q_len) return;
        first_token = start + block;
        tokens = min(q_len - block, (u32)Q_TOKENS);
    } else if (!ROPE && !ONES) {
        wait_for_predecessor();
    }
    if (ONES && !SPLIT) {
        first_token = q_start[r];
        if (q_start[r + 1] - first_token != 1) return wait_for_predecessor();
    }
    Row row;
    // With ROPE this is before the wait: read from L2, where the prologue wrote them.
    if (SINGLE && SPLIT == 1) {
        const Item item = find(cut, rows, kv_len, row_seat, counts, q_start);
        if (item.row >= rows) {
            if (ONES) wait_for_predecessor();
            return;
        }
        r = item.row, first_token = ONES ? q_start[r] : r * Q_TOKENS, split = item.split, splits = item.splits;
        row.length = item.length;
        row.pages = page_table + (u64)item.seat * pages_per_seat;
    } else {
        row.length = __ldcg(kv_len + r);
        row.pages = page_table + (u64)__ldcg(row_seat + r) * pages_per_seat;
        if (SINGLE && SPLIT == 2) {
            split = cut, splits = splits_of(row.length, share_of(counts), cuts);
            if (split >= splits) return;
        }
    }
    row.kv = kv + (u64)head * (PAGE * ROW_BYTES);
    if (SINGLE ? row.length < Q_TOKENS : row.length == 0) {
        // With ONES the row's length does not fit its pages, and its token is not `r`.
        if (SINGLE && !ONES) {
            wait_for_predecessor();
            for (u32 i = threadIdx.x; i < Q_TOKENS * G * D; i += WARPS * 32)
                store1<YT>(out, (u64)(first_token + i / (G * D)) * out_stride + head * (G * D) + i % (G * D), 0.0f);
        }
        if (ONES) wait_for_predecessor();
        return;
    }
    // The position of the item's first token; column c is token c / G, head c % G.
    const u32 position = SINGLE ? row.length - Q_TOKENS : row.length - (q_start[r + 1] - first_token);
    const u32 end = position + tokens;
    row.fresh = ROPE ? row.length - Q_TOKENS : row.length;
    const u32 begin = WINDOW && position + 1 > WINDOW ? position + 1 - WINDOW : 0;
    row.first = begin / PAGE;
    u32 page = begin / PAGE / (FIXED ? WARPS : 1) * (FIXED ? WARPS : 1), last_page = (end - 1) / PAGE;
    if (splits > 1) {
        const u32 share = (last_page + splits - page) / splits;
        page += split * share;
        last_page = min(page + share - 1, last_page);
    }
    if (CLUSTER > 1) {
        // The matching wait below ensures that all blocks of the cluster have started.
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
        const u32 share = (last_page + CLUSTER - page) / CLUSTER;
        page += rank * share;
        last_page = min(page + share - 1, last_page);
    }
    // The new tokens in this piece, counted from the first one.
    const u32 fresh_begin = max(page * PAGE, row.fresh) - row.fresh;
    const u32 fresh_end = ROPE && page <= last_page ? max(min((last_page + 1) * PAGE, row.length), row.fresh) - row.fresh : 0;
    const bool has_newest = fresh_begin < fresh_end;
    u32 ahead = page + warp;
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        if (ahead <= last_page) fetch(ring + s * STAGE_BYTES, row, ahead, lane);
        ahead += WARPS;
        commit_copies();
    }
    Scales q_scales, k_scales;
    Angles q_angles[Q_TOKENS], k_angles[NEW_EACH];
    // The new tokens whose k and v this warp prepares.
    auto k_token = [&](int i) { return i * WARPS + WARPS - 1 - warp; };
    auto v_token = [&](int i) { return i * WARPS + warp; };
    auto here = [&](u32 t) { return t >= fresh_begin && t < fresh_end; };
    if (ROPE) {
        auto table = [&](u32 t) { return rope + (u64)min(position + t, max_position - 1) * rope_stride; };
        q_scales = scales_of<QN, QNT>(q_norm);
#pragma unroll
        for (int t = 0; t < Q_TOKENS; t++) q_angles[t] = angles_of(table(t));
        if (has_newest) {
            k_scales = scales_of<KN, KNT>(k_norm);
#pragma unroll
            for (int i = 0; i < NEW_EACH; i++) k_angles[i] = angles_of(table(k_token(i)));
        }
        let_successor_start();
        wait_for_predecessor();
    } else
        let_successor_start();

    // Queries to shared memory; columns past the live ones are zero.
    if (ROPE) {
        const u64 base = (u64)first_token * q_stride;
        // All loads are in flight before the first result is needed.
        Pairs keys[NEW_EACH];
        u16 values[NEW_EACH][2 * PER];
#pragma unroll
        for (int i = 0; i < NEW_EACH; i++) {
            if (here(k_token(i))) keys[i] = pairs_of(qkv, base + (u64)k_token(i) * q_stride + (HQ + head) * D);
            if (here(v_token(i)))
#pragma unroll
                for (int c = 0; c < 2 * PER; c++)
                    if (lane + 32 * c < D) values[i][c] = ((const u16*)qkv)[base + (u64)v_token(i) * q_stride + (HQ + HKV + head) * D + lane + 32 * c];
        }
        for (u32 c = warp; c < G; c += WARPS) {
            Pairs heads[Q_TOKENS];
#pragma unroll
            for (int t = 0; t < Q_TOKENS; t++) heads[t] = pairs_of(qkv, base + (u64)t * q_stride + (head * G + c) * D);
#pragma unroll
            for (int t = 0; t < Q_TOKENS; t++) prepare<QN, MT>(heads[t], q_eps, q_scales, q_angles[t], queries[t * G + c]);
        }
#pragma unroll
        for (int i = 0; i < NEW_EACH; i++) {
            if (here(k_token(i))) prepare<KN, KT>(keys[i], k_eps, k_scales, k_angles[i], newest[k_token(i)][0], 1.0f / scale_of_k);
            if (here(v_token(i)))
#pragma unroll
                for (int c = 0; c < 2 * PER; c++) {
                    if (lane + 32 * c >= D) continue;
                    u8* to = newest[v_token(i)][1];
                    if (NARROW) store1<KT>(to, lane + 32 * c, load1<TYPE>(&values[i][c], 0) * (1.0f / scale_of_v));
                    else ((u16*)to)[lane + 32 * c] = values[i][c];
                }
        }
        for (u32 i = threadIdx.x; i < (TILES * 8 - COLUMNS) * (D / 2); i += WARPS * 32)
            ((u32*)queries[COLUMNS + i / (D / 2)])[i % (D / 2)] = 0;
    } else
        for (u32 i = threadIdx.x; i < TILES * 8 * (D / 8); i += WARPS * 32) {
            const u32 c = i / (D / 8), at = i % (D / 8), t = c / G;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (c < COLUMNS && t < tokens)
                v = __ldcg((const uint4*)((const u16*)qkv + (u64)(first_token + t) * q_stride + (head * G + c % G) * D + at * 8));
            *(uint4*)&queries[c][at * 8] = NARROW ? to_half<TYPE>(v) : v;
        }
    __syncthreads();
    if (has_newest)
        for (u32 i = fresh_begin * (ROW_BYTES / 2) + threadIdx.x; i < fresh_end * (ROW_BYTES / 2); i += WARPS * 32) {
            const u32 t = i / (ROW_BYTES / 2), which = i / (ROW_BYTES / 4) % 2, at = i % (ROW_BYTES / 4), place = row.fresh + t;
            u8* to = kv + ((u64)row.pages[place / PAGE] * 2 * HKV + head) * (PAGE * ROW_BYTES) + place % PAGE * ROW_BYTES;
            ((u32*)(to + which * (u64)(HKV * PAGE * ROW_BYTES)))[at] = ((const u32*)newest[t][which])[at];
        }
    u32 q[TILES][STEPS][2];
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            // With bytes, a lane has four neighbouring elements of a key.
            q[n][s][0] = *(const u32*)&queries[n * 8 + g][s * 16 + (NARROW ? 4 : 2) * j];
            q[n][s][1] = *(const u32*)&queries[n * 8 + g][s * 16 + (NARROW ? 4 * j + 2 : 2 * j + 8)];
        }

    float sums[STEPS][TILES][4], maximum[TILES][2], total[TILES][2];
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        maximum[n][0] = maximum[n][1] = -INFINITY;
        total[n][0] = total[n][1] = 0.0f;
#pragma unroll
        for (int s = 0; s < STEPS; s++) sums[s][n][0] = sums[s][n][1] = sums[s][n][2] = sums[s][n][3] = 0.0f;
    }
    const float factor = score_factor(NARROW ? scale * scale_of_k : scale);
    u32 stage = 0;
    for (u32 p = page + warp; p <= last_page; p += WARPS) {
        wait_copies<STAGES - 1>();
        __syncwarp();
        const u32 keys = ring + stage * STAGE_BYTES, values = keys + 16 * PITCH;
        if (ROPE && has_newest && p >= row.fresh / PAGE) {
            u8* tile = memory + (warp * STAGES + stage) * STAGE_BYTES;
#pragma unroll
            for (int t = 0; t < Q_TOKENS; t++) {
                const u32 place = row.fresh + t;
                if (place / PAGE != p) continue;
                u8* to = tile + (NARROW ? 0 : place % PAGE * PITCH);
                for (u32 i = lane; i < ROW_BYTES / 4; i += 32) {
                    const u32 at = NARROW ? byte_place(place % PAGE, i / 4) / 4 + i % 4 : i;
                    ((u32*)to)[at] = ((const u32*)newest[t][0])[i];
                    ((u32*)(to + 16 * PITCH))[at] = ((const u32*)newest[t][1])[i];
                }
            }
            __syncwarp();
        }
        float scores[TILES][4];
#pragma unroll
        for (int n = 0; n < TILES; n++) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.0f;
        float odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        u32 bytes[4];
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            u32 a[4];
            if (NARROW) {
                // Bytes of two steps at once.
                if (s % 2 == 0) load_matrices(bytes, keys + byte_place(lane % 16, min(s + lane / 16, STEPS - 1u)));
                widen_keys(a, bytes[s % 2 * 2], bytes[s % 2 * 2 + 1]);
            } else
                load_matrices(a, keys + (lane % 16) * PITCH + s * 32 + (lane / 16) * 16);
#pragma unroll
            for (int n = 0; n < TILES; n++)
                mma_16x8x16<MT>(IN_TURN && s % 2 ? odd : scores[n], a[0], a[1], a[2], a[3], q[n][s][0], q[n][s][1]);
        }
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (IN_TURN) scores[0][e] += odd[e];
        u32 weights[TILES][2];
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const u32 limit = SINGLE && Q_TOKENS == 1 ? position : position + (n * 8 + 2 * j + c) / G;
                const u32 t0 = p * PAGE + g, t1 = t0 + 8;
                const bool in0 = t0 <= limit && t0 < row.length && (!WINDOW || t0 + WINDOW > limit);
                const bool in1 = t1 <= limit && t1 < row.length && (!WINDOW || t1 + WINDOW > limit);
                const float s0 = in0 ? capped_score(scores[n][c], factor) : -INFINITY, s1 = in1 ? capped_score(scores[n][c + 2], factor) : -INFINITY;
                float top = fmaxf(s0, s1);
#pragma unroll
                for (int o = 4; o < 32; o <<= 1) top = fmaxf(top, __shfl_xor_sync(FULL, top, o));
                top = fmaxf(top, maximum[n][c]);
                const float safe = top == -INFINITY ? 0.0f : top;
                const float keep = exp2f(maximum[n][c] - safe), w0 = exp2f(s0 - safe), w1 = exp2f(s1 - safe);
                maximum[n][c] = top;
                total[n][c] = total[n][c] * keep + w0 + w1;
                scores[n][c] = w0;
                scores[n][c + 2] = w1;
#pragma unroll
                for (int s = 0; s < STEPS; s++) sums[s][n][c] *= keep, sums[s][n][c + 2] *= keep;
            }
            weights[n][0] = transpose_8x8(pack2<MT>(scores[n][0], scores[n][1]));
            weights[n][1] = transpose_8x8(pack2<MT>(scores[n][2], scores[n][3]));
        }
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            u32 a[4];
            if (NARROW) {
                if (s % 2 == 0) load_matrices_transposed(bytes, values + byte_place(lane % 16, min(s + lane / 16, STEPS - 1u)));
                widen_values(a, bytes[s % 2 * 2], bytes[s % 2 * 2 + 1]);
            } else
                load_matrices_transposed(a, values + ((lane / 16) * 8 + lane % 8) * PITCH + s * 32 + (lane / 8 % 2) * 16);
#pragma unroll
            for (int n = 0; n < TILES; n++) mma_16x8x16<MT>(sums[s][n], a[0], a[1], a[2], a[3], weights[n][0], weights[n][1]);
        }
        __syncwarp();
        if (ahead <= last_page) fetch(ring + stage * STAGE_BYTES, row, ahead, lane);
        ahead += WARPS;
        commit_copies();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    wait_copies<0>();
    __syncthreads();

    // Merge the warps: [warp][column][D] over the rings.
    float* merged = (float*)memory;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const u32 column = n * 8 + 2 * j + c;
            float sum = total[n][c];
#pragma unroll
            for (int o = 4; o < 32; o <<= 1) sum += __shfl_xor_sync(FULL, sum, o);
            if (g == 0) maxima[warp][column] = maximum[n][c], totals[warp][column] = sum;
            if (column < COLUMNS)
#pragma unroll
                for (int s = 0; s < STEPS; s++) {
                    merged[(warp * COLUMNS + column) * (D + 4) + s * 16 + (NARROW ? 2 : 1) * g] = sums[s][n][c];
                    merged[(warp * COLUMNS + column) * (D + 4) + s * 16 + (NARROW ? 2 : 1) * g + (NARROW ? 1 : 8)] = sums[s][n][c + 2];
                }
        }
    __syncthreads();
    const u32 live = tokens * G, quads = live * (D / 4), words = PART_WORDS;
    float* mine = partial + ((u64)piece * HKV + head) * words;
    const bool alone = !SPLIT || splits == 1;
    // Stores quad i of the sums: the final result, or a partial one for the merge of splits.
    auto leave = [&](u32 i, float top, float weight, float4 sum) {
        const u32 column = i / (D / 4), at = i % (D / 4) * 4;
        if (alone) {
            const float all = WITH_SINK(weight, head * G + column % G, top);
            const float inverse = NARROW ? scale_of_v / all : 1.0f / all;
            const u64 to = (u64)(first_token + column / G) * out_stride + (head * G + column % G) * D + at;
            store4<YT>(out, to, sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse);
        } else {
            __stcg((float4*)(mine + 4 * COLUMNS) + i, sum);
            if (at == 0) __stcg((float2*)(mine + 4 * column), make_float2(top, weight));
        }
    };
    if (CLUSTER > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    for (u32 i = threadIdx.x; i < quads; i += WARPS * 32) {
        const u32 column = i / (D / 4), at = i % (D / 4) * 4;
        float top = maxima[0][column], weight = 0.0f;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 1; w < WARPS; w++) top = fmaxf(top, maxima[w][column]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float part = maxima[w][column] == -INFINITY ? 0.0f : exp2f(maxima[w][column] - top);
            const float4 v = *(const float4*)&merged[(w * COLUMNS + column) * (D + 4) + at];
            weight += totals[w][column] * part;
            sum.x += v.x * part, sum.y += v.y * part, sum.z += v.z * part, sum.w += v.w * part;
        }
        if (CLUSTER > 1) {
            // To the block that merges this column, as the part of this one.
            const u32 own = column % OWN_COLUMNS;
            u32 to;
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(memory) + PARTS_AT), "r"(column / OWN_COLUMNS));
            to += rank * (OWN_WORDS * 4);
            asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + 16 * OWN_COLUMNS + 16 * (own * (D / 4) + at / 4)),
                         "f"(sum.x), "f"(sum.y), "f"(sum.z), "f"(sum.w)
                         : "memory");
            if (at == 0)
                asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to + 16 * own), "f"(top), "f"(weight) : "memory");
        } else
            leave(i, top, weight, sum);
    }
    if (CLUSTER > 1) {
        __syncwarp();
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        const float* parts = (const float*)(memory + PARTS_AT);
        const u32 first = rank * OWN_COLUMNS, own_quads = first < live ? min(live - first, (u32)OWN_COLUMNS) * (D / 4) : 0;
        for (u32 i = threadIdx.x; i < own_quads; i += WARPS * 32) {
            const u32 column = i / (D / 4);
            float top = -INFINITY, weight = 0.0f;
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int c = 0; c < CLUSTER; c++) top = fmaxf(top, parts[c * OWN_WORDS + 4 * column]);
#pragma unroll
            for (int c = 0; c < CLUSTER; c++) {
                const float2 stats = *(const float2*)(parts + c * OWN_WORDS + 4 * column);
                const float4 v = *(const float4*)(parts + c * OWN_WORDS + 4 * OWN_COLUMNS + 4 * i);
                const float part = stats.x == -INFINITY ? 0.0f : exp2f(stats.x - top);
                weight += stats.y * part;
                sum.x += v.x * part, sum.y += v.y * part, sum.z += v.z * part, sum.w += v.w * part;
            }
            leave(first * (D / 4) + i, top, weight, sum);
        }
    }
    // The kernel beside this one is done, too, when this one is.
    if (ONES) wait_for_predecessor();
    if (alone) return;
    // The barrier orders the block's stores before thread 0's release.
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 arrived = add_acquire_release(&semaphores[r * HKV + head], 1);
        if (arrived == splits * CLUSTER - 1) semaphores[r * HKV + head] = 0;
        shared_word = arrived;
    }
    __syncthreads();
    if (shared_word != splits * CLUSTER - 1) return;
    // The last block adds up the partial results, with many independent loads at a time.
    const float* all = partial + ((u64)(piece - split) * HKV + head) * words;
    for (u32 i = threadIdx.x; i < quads; i += WARPS * 32) {
        const u32 column = i / (D / 4), at = i % (D / 4) * 4;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float top = -INFINITY, weight = 0.0f;
        for (u32 base = 0; base < splits; base += MERGED) {
            float2 stats[MERGED];
            float4 parts[MERGED];
#pragma unroll
            for (int u = 0; u < MERGED; u++) {
                const float* from = all + (u64)min(base + u, splits - 1) * (HKV * words);
                stats[u] = __ldcg((const float2*)(from + 4 * column));
                parts[u] = __ldcg((const float4*)(from + 4 * COLUMNS) + i);
            }
            float next = top;
#pragma unroll
            for (int u = 0; u < MERGED; u++)
                if (base + u < splits) next = fmaxf(next, stats[u].x);
            // A token with drafts after it may see nothing of some pieces.
            const float safe = next == -INFINITY ? 0.0f : next, keep = exp2f(top - safe);
            weight *= keep, sum.x *= keep, sum.y *= keep, sum.z *= keep, sum.w *= keep;
            top = next;
#pragma unroll
            for (int u = 0; u < MERGED; u++) {
                const float part = base + u < splits ? exp2f(stats[u].x - safe) : 0.0f;
                const float4 v = parts[u];
                weight += stats[u].y * part;
                sum.x += v.x * part, sum.y += v.y * part, sum.z += v.z * part, sum.w += v.w * part;
            }
        }
        weight = WITH_SINK(weight, head * G + column % G, top);
        const float inverse = NARROW ? scale_of_v / weight : 1.0f / weight;
        const u64 to = (u64)(first_token + column / G) * out_stride + (head * G + column % G) * D + at;
        store4<YT>(out, to, sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse);
    }
}
