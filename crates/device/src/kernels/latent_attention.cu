// Attention over pages of latents with tensor cores. A block takes one token and 16 of its heads, which are the 16 rows of
// the matrix instruction. Eight warps share tiles of TILE = 64 tokens in a ring in shared memory; a latent is loaded once,
// as key and as value. Each warp scores eight tokens of a tile, with the queries in its registers; the weights of all of
// them go through shared memory, and each warp adds up an eighth of the values' columns.
//
// SINGLE: every row has Q_TOKENS tokens, one or a few with its drafts, and item i is token i % Q_TOKENS of row
// i / Q_TOKENS. With SPLIT pieces of items share the work: all pieces of all items are about equal, a block finds its own
// by a sum over the items before it, and `latent_merge` adds up the pieces of an item. Otherwise a block is an item: with
// SINGLE of the rows, else any token of the step. Tiles are then counted from the first position on, so that the order of
// sums follows from a token's position alone.
//
// D, LATENT (a multiple of 128), HQ, PAGE = 16, SINGLE, Q_TOKENS, SPLIT, BLOCKS (pieces wanted), WAYS (the prologue's),
// ITEMS32 (32 items each), COUNT_SPLIT, STAGES; LAST: only the last token of each row is wanted; TYPE of q and pages, YT.
#include "prelude.cuh"

#define WARPS 8
#define TILE 64
#define TILE_PAGES (TILE / PAGE)
#define PITCH (D * 2 + 16)
#define CHUNKS (D / 8)
#define STAGE_BYTES (TILE * PITCH)
#define GROUPS ((HQ + 15) / 16)
#define COLUMNS (LATENT / WARPS)
#define WEIGHT_PITCH (TILE * 2 + 16)
// A piece has at least a tile.
#define LEAST_PAGES TILE_PAGES
// Words of a piece's partial result: maximum and total of each head, then the sums.
#define PART_WORDS (16 * (LATENT + 2))

struct Item {
    u32 item, length, split, splits, piece; // piece: the first one of the item
};

// Tokens that an item sees.
DEVICE u32 length_of(u32 item, const u32* kv_len) {
    const u32 length = __ldcg(kv_len + item / Q_TOKENS);
    return length < Q_TOKENS ? 0 : length - Q_TOKENS + 1 + item % Q_TOKENS;
}
DEVICE u32 splits_of(u32 length, u32 share) {
    const u32 pages = (length + PAGE - 1) / PAGE, splits = (pages + share / 2) / share;
    if (splits <= 1) return 1;
    const u32 each = (pages + splits - 1) / splits;
    return (pages + each - 1) / each;
}
// Pages of an equal piece. The prologue divides the pages of all rows into WAYS and rounds up.
DEVICE u32 share_of(const u32* counts) {
    const u32 pages = __ldcg(counts + COUNT_SPLIT) / PAGE * WAYS * Q_TOKENS;
    return max((pages * GROUPS + BLOCKS - 1) / BLOCKS, (u32)LEAST_PAGES);
}
// The item of a piece, or of which it is told (`wanted`); every warp computes it. All loads are in flight at once.
DEVICE Item find(u32 piece, u32 wanted, u32 items, const u32* kv_len, const u32* counts) {
    const u32 lane = threadIdx.x % 32;
    u32 lengths[ITEMS32], before = 0;
#pragma unroll
    for (int i = 0; i < ITEMS32; i++) lengths[i] = length_of(min(i * 32 + lane, items - 1), kv_len);
    const u32 share = share_of(counts);
    Item found = {items, 0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < ITEMS32; i++) {
        const u32 own = i * 32 + lane < items ? splits_of(lengths[i], share) : 0;
        u32 sum = own;
#pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            const u32 other = __shfl_up_sync(FULL, sum, o);
            if (lane >= o) sum += other;
        }
        const bool here = wanted < items ? i * 32 + lane == wanted : before + sum > piece;
        const u32 past = __ballot_sync(FULL, here), at = __ffs(past) - 1;
        const u32 total = __shfl_sync(FULL, sum, 31);
        if (past && found.item == items) {
            found.item = i * 32 + at;
            found.length = __shfl_sync(FULL, lengths[i], at);
            found.splits = __shfl_sync(FULL, own, at);
            found.piece = before + __shfl_sync(FULL, sum, at) - found.splits;
            found.split = piece - found.piece;
        }
        before += total;
    }
    return found;
}

// A tile of tokens from `first` on; those at `end` and later are zero.
DEVICE void fetch(u32 stage, const u8* kv, const u32* pages, u32 first, u32 end) {
#pragma unroll 6
    for (u32 i = threadIdx.x; i < TILE * CHUNKS; i += WARPS * 32) {
        const u32 token = i / CHUNKS, at = i % CHUNKS, t = min(first + token, end - 1);
        const u8* from = kv + ((u64)pages[t / PAGE] * PAGE + t % PAGE) * (D * 2) + at * 16;
        copy16_async_or_zero(stage + token * PITCH + at * 16, from, first + token < end);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
latent_attention(const u16* q, const u8* kv, void* out, const u32* row_seat, const u32* q_start, const u32* kv_len,
                 const u32* page_table, const u32* token_row, const u32* counts, float* partial, u32 rows,
                 u32 pages_per_seat, u32 q_stride, u32 out_stride, float scale) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ __align__(16) u8 weights[16 * WEIGHT_PITCH];
    __shared__ float maxima[WARPS][16], totals[WARPS][16];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
    const u32 ring = shared_address(memory), first_head = blockIdx.y * 16;
    let_successor_start();
    // The prologue wrote the tables, so they may be read before the wait.
    u32 token = blockIdx.x, row, length;
    Item item = {0, 0, 0, 1, 0};
    if (SINGLE && SPLIT) {
        item = find(blockIdx.x, FULL, rows * Q_TOKENS, kv_len, counts);
        if (item.item >= rows * Q_TOKENS) return;
        token = item.item, row = token / Q_TOKENS, length = item.length;
    } else if (SINGLE) {
        row = token / Q_TOKENS, length = length_of(token, kv_len);
    } else {
        row = __ldcg(token_row + token);
        if (row >= rows || (LAST && token + 1 != __ldcg(q_start + row + 1))) return;
        length = __ldcg(kv_len + row);
        if (length) length = length - (__ldcg(q_start + row + 1) - token) + 1;
    }
    if (length == 0) {
        if (!SINGLE) return;
        wait_for_predecessor();
        for (u32 i = threadIdx.x; i < min(16u, HQ - first_head) * LATENT; i += WARPS * 32)
            store1<YT>(out, (u64)token * out_stride + first_head * LATENT + i, 0.0f);
        return;
    }
    const u32* pages = page_table + (u64)__ldcg(row_seat + row) * pages_per_seat;
    u32 begin = 0, end = length;
    if (item.splits > 1) {
        const u32 all = (length + PAGE - 1) / PAGE, each = (all + item.splits - 1) / item.splits;
        begin = item.split * each * PAGE;
        end = min(begin + each * PAGE, length);
    }
    u32 ahead = begin;
    auto fetch_first = [&]() {
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) {
            if (ahead < end) fetch(ring + s * STAGE_BYTES, kv, pages, ahead, end);
            ahead += TILE;
            commit_copies();
        }
    };
    // Latents of earlier steps are fetched before the wait, since no running kernel can write them.
    const u32 fetched = min(begin + (STAGES - 1) * TILE, end);
    const bool early = SINGLE && fetched + Q_TOKENS <= __ldcg(kv_len + row);
    if (early) fetch_first();
    wait_for_predecessor();

    // Queries through the last stage to registers; heads past the last are zero.
    const u32 staging = ring + (STAGES - 1) * STAGE_BYTES;
    for (u32 i = threadIdx.x; i < 16 * CHUNKS; i += WARPS * 32) {
        const u32 head = first_head + i / CHUNKS, at = i % CHUNKS;
        const u16* from = q + (u64)token * q_stride + min(head, HQ - 1u) * D + at * 8;
        copy16_async_or_zero(staging + i / CHUNKS * PITCH + at * 16, from, head < HQ);
    }
    commit_copies();
    if (early) {
        wait_copies<0>();
    } else {
        fetch_first();
        wait_copies<STAGES - 1>();
    }
    __syncthreads();
    u32 query[D / 16][4];
#pragma unroll
    for (int s = 0; s < D / 16; s++) load_matrices(query[s], staging + lane % 16 * PITCH + s * 32 + lane / 16 * 16);

    float sums[COLUMNS / 8][4], maximum[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
    const float factor = scale * 1.44269504088896f;
    const u32 shared_weights = shared_address(weights);
    u32 stage = 0, free = STAGES - 1;
#pragma unroll 1
    for (u32 tile = begin; tile < end; tile += TILE) {
        wait_copies<STAGES - 2>();
        __syncthreads();
        if (ahead < end) fetch(ring + free * STAGE_BYTES, kv, pages, ahead, end);
        ahead += TILE;
        commit_copies();
        free = free + 1 == STAGES ? 0 : free + 1;
        const u32 latents = ring + stage * STAGE_BYTES;
        stage = stage + 1 == STAGES ? 0 : stage + 1;

        // Scores of tokens 8 · warp + 2j and + 1 for heads g and g + 8, in four sums so that no MMA waits for the last.
        float scores[4][4];
#pragma unroll
        for (int c = 0; c < 4; c++) scores[c][0] = scores[c][1] = scores[c][2] = scores[c][3] = 0.0f;
#pragma unroll
        for (int s = 0; s < D / 32; s++) {
            u32 b[4];
            load_matrices(b, latents + (warp * 8 + lane % 8) * PITCH + s * 64 + lane / 8 * 16);
            const u32(&low)[4] = query[2 * s], (&high)[4] = query[2 * s + 1];
            mma_16x8x16<TYPE>(scores[s % 2 * 2], low[0], low[1], low[2], low[3], b[0], b[1]);
            mma_16x8x16<TYPE>(scores[s % 2 * 2 + 1], high[0], high[1], high[2], high[3], b[2], b[3]);
        }
        float s[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const bool seen = tile + warp * 8 + 2 * j + e % 2 < end;
            s[e] = seen ? (scores[0][e] + scores[1][e] + scores[2][e] + scores[3][e]) * factor : -INFINITY;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float top = fmaxf(s[2 * half], s[2 * half + 1]);
            top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
            top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
            if (j == 0) maxima[warp][g + 8 * half] = top;
        }
        __syncthreads();
        // The first token of a tile is always seen, so maxima are finite.
        float keep[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float top = maximum[half];
#pragma unroll
            for (int w = 0; w < WARPS; w++) top = fmaxf(top, maxima[w][g + 8 * half]);
            keep[half] = exp2f(maximum[half] - top);
            maximum[half] = top;
            const float a = exp2f(s[2 * half] - top), b = exp2f(s[2 * half + 1] - top);
            total[half] = total[half] * keep[half] + a + b;
            *(u32*)(weights + (g + 8 * half) * WEIGHT_PITCH + (warp * 8 + 2 * j) * 2) = pack2<TYPE>(a, b);
        }
        if (__any_sync(FULL, keep[0] != 1.0f || keep[1] != 1.0f))
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++)
                sums[n][0] *= keep[0], sums[n][1] *= keep[0], sums[n][2] *= keep[1], sums[n][3] *= keep[1];
        __syncthreads();
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
            u32 a[4];
            load_matrices(a, shared_weights + lane % 16 * WEIGHT_PITCH + k * 32 + lane / 16 * 16);
#pragma unroll
            for (int n = 0; n < COLUMNS / 16; n++) {
                u32 b[4];
                load_matrices_transposed(b, latents + (k * 16 + lane % 16) * PITCH + (warp * COLUMNS + n * 16 + lane / 16 * 8) * 2);
                mma_16x8x16<TYPE>(sums[2 * n], a[0], a[1], a[2], a[3], b[0], b[1]);
                mma_16x8x16<TYPE>(sums[2 * n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        }
    }
    wait_copies<0>();

#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = total[half];
        sum += __shfl_xor_sync(FULL, sum, 1);
        sum += __shfl_xor_sync(FULL, sum, 2);
        if (j == 0) totals[warp][g + 8 * half] = sum;
    }
    __syncthreads();
    float* mine = partial + ((u64)blockIdx.x * GROUPS + blockIdx.y) * PART_WORDS;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 own = g + 8 * half, head = first_head + own;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += totals[w][own];
        if (head >= HQ) continue;
        const bool alone = item.splits == 1;
        const float inverse = 1.0f / sum;
        if (!alone && warp == 0 && j == 0) __stcg((float2*)(mine + 2 * own), make_float2(maximum[half], sum));
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++) {
            const u32 column = warp * COLUMNS + n * 8 + 2 * j;
            const float a = sums[n][2 * half], b = sums[n][2 * half + 1];
            const u64 to = (u64)token * out_stride + head * LATENT + column;
            if (!alone) __stcg((float2*)(mine + 32 + own * LATENT + column), make_float2(a, b));
            else if (YT == F32) *(float2*)((float*)out + to) = make_float2(a * inverse, b * inverse);
            else *(u32*)((u16*)out + to) = pack2<YT>(a * inverse, b * inverse);
        }
    }
}

// Adds up the pieces of an item: a block for each item and head.
extern "C" __global__ void __launch_bounds__(128)
latent_merge(void* out, const u32* kv_len, const u32* counts, const float* partial, u32 rows, u32 out_stride) {
    let_successor_start();
    const u32 head = blockIdx.y;
    const Item item = find(0, blockIdx.x, rows * Q_TOKENS, kv_len, counts);
    // Read partial results, and tell a successor that results are there, only when the pieces are done.
    wait_for_predecessor();
    if (item.splits <= 1) return;
    const float* parts = partial + ((u64)item.piece * GROUPS + head / 16) * PART_WORDS;
    // A lane has maximum and total of every 32nd piece, so that all of them are loaded at once.
    const u32 lane = threadIdx.x % 32;
    auto stats = [&](u32 s) { return __ldcg((const float2*)(parts + (u64)s * (GROUPS * PART_WORDS) + 2 * (head % 16))); };
    float top = -INFINITY;
    for (u32 s = lane; s < item.splits; s += 32) top = fmaxf(top, stats(s).x);
    top = warp_max(top);
    // Whole warps: LATENT is a multiple of 128.
    for (u32 i = threadIdx.x; i < LATENT / 4; i += 128) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float total = 0.0f;
        for (u32 base = 0; base < item.splits; base += 32) {
            float own = 0.0f;
            if (base + lane < item.splits) {
                const float2 of = stats(base + lane);
                own = exp2f(of.x - top);
                total += of.y * own;
            }
#pragma unroll 8
            for (u32 s = 0; s < min(32u, item.splits - base); s++) {
                const float4 v = __ldcg((const float4*)(parts + (u64)(base + s) * (GROUPS * PART_WORDS) + 32 + head % 16 * LATENT) + i);
                const float part = __shfl_sync(FULL, own, s);
                sum.x += v.x * part, sum.y += v.y * part, sum.z += v.z * part, sum.w += v.w * part;
            }
        }
        const float inverse = 1.0f / warp_sum(total);
        const u64 to = (u64)blockIdx.x * out_stride + head * LATENT + i * 4;
        store1<YT>(out, to, sum.x * inverse), store1<YT>(out, to + 1, sum.y * inverse);
        store1<YT>(out, to + 2, sum.z * inverse), store1<YT>(out, to + 3, sum.w * inverse);
    }
}
