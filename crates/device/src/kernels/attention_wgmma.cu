// Paged attention, causal or both ways, for rows of many tokens on Hopper. One block per multiprocessor works through a list of
// items (a row's next Q_TOKENS tokens with all G query heads of one KV head: up to 128 packed rows), longest first.
// Every block computes the same list from the step's tables, so the grid never depends on the rows. One warp copies q
// and pages (KV tokens per tile, last tile first). Of two warpgroups of 64 packed rows one runs MMA while the other
// computes its weights, independently or in turns (TURNS). Weights stay in registers as the left operand of the MMA
// with v.
//
// A row's first maximum is its reference for all tiles: weights are powers of two relative to it, and only a sum of
// weights above MOST shows that the reference has become too small. The scores of such a tile, which is very rare,
// are computed again, and the sums so far are rescaled.
//
// D (64, 128), HQ, HKV, PAGE = 16, Q_TOKENS, KV (64, 128, 176), STAGES, Q_STAGES (1, 2), TURNS (0, 1), SLOTS
// (capacity of the list), WINDOW (0: none), CAUSAL, LAST (1: only blocks with a row's last token), ONES (0: rows of one token
// belong to another kernel), TYPE (of q and pages), KT if pages have another type (pages.cuh), YT, SINKS. With pages in e4m3 KV is
// at most 128, the second argument is the address of the pages, and RAW tiles of bytes lie after the ring.
#include "pages.cuh"
#include "wgmma_held.cuh"

#define G (HQ / HKV)
#define PARTS (D / 64)
#define PAGES (KV / PAGE)
#define TILE_BYTES (KV * D * 2)
#define PART_BYTES (KV * 128)
#define Q_BYTES (128 * D * 2)
#define Q_FILLED (Q_TOKENS * G * D * 2)
#define BINS 128
#define DEAD 0xffffffffu
// The limit for the sum of a lane's weights in a tile, far below overflow.
#define MOST (MT == F16 ? 16384.0f : 4294967296.0f)

struct alignas(64) Map {
    u64 words[16];
};

struct Item {
    u32 head, seat, first_token, tokens, position, length, begin, end;
};

// The first page that the first token at `position` sees. Pages before it may belong to another sequence, and hold anything.
DEVICE u32 first_page(u32 position) { return WINDOW && position + 1 > WINDOW ? (position + 1 - WINDOW) / PAGE : 0; }

struct Shared {
    u64 q_full[Q_STAGES], q_empty[Q_STAGES], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    Item item[Q_STAGES];
#if NARROW
    u64 raw_full[RAW], raw_empty[RAW];
#endif
    u32 count, longest, bins[BINS];
    u8 bin[SLOTS];
    u32 list[SLOTS];
};

DEVICE void tensor_copy_3d(u32 to, const void* map, u32 x, u32 y, u32 z, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
        ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier) : "memory");
}
DEVICE void tensor_copy_2d(u32 to, const void* map, u32 x, u32 y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}
DEVICE float exp2_fast(float v) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}
// The assembler would move a wait for MMA ahead of arithmetic that is meant to overlap with it. This branch is never
// taken (a sum of weights is not negative), but nothing can move before it until the sum is known.
DEVICE void hold(float sum, u32 unused) {
    asm volatile("{\n.reg .pred never;\nsetp.lt.f32 never, %0, 0f00000000;\n@never st.shared.f32 [%1], %0;\n}" ::"f"(sum), "r"(unused) : "memory");
}
DEVICE void named_sync(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void named_arrive(u32 id, u32 threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// A descriptor from its lower word; the upper one is the same for every tile here, and the matrix unit takes a
// constant more cheaply than a register.
DEVICE u64 descriptor(u32 low) {
    u64 d;
    asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "n"(0x40000040));
    return d;
}
// c = q · kᵀ for one warpgroup's rows.
DEVICE void multiply_keys(float (&scores)[KV / 2], u32 q, u32 keys) {
#pragma unroll
    for (int i = 0; i < D / 16; i++)
        Wgmma<MT, KV>::add(scores, descriptor(q + i / 4 * (128 * 128 >> 4) + i % 4 * 2),
                               descriptor(keys + i / 4 * (PART_BYTES >> 4) + i % 4 * 2), i > 0);
}
// c (+)= weights · v.
DEVICE void multiply_values(float (&sums)[D / 2], const u32 (&w)[KV / 4], u32 values, int keep) {
#pragma unroll
    for (int i = 0; i < KV / 16; i++)
        HeldWgmma<MT, D>::add(sums, w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3],
                                  descriptor(values + i * (16 * 128 >> 4)), i > 0 ? 1 : keep);
}

struct Rows {
    const u32 *row_seat, *q_start, *kv_len;
};

// Tiles of KV that a block of tokens needs: [begin, end).
DEVICE void tiles_of(u32 position, u32 tokens, u32 length, u32& begin, u32& end) {
    // One past the last position that any of the tokens sees.
    const u32 seen = CAUSAL ? position + tokens : WINDOW ? min(length, position + tokens - 1 + WINDOW) : length;
    begin = WINDOW && position + 1 > WINDOW ? (position + 1 - WINDOW) / KV : 0;
    end = (seen + KV - 1) / KV;
}

// Every block computes the same list: blocks of tokens sorted by their tiles, most first, equal ones in order.
DEVICE void make_list(Shared& s, const Rows& t, u32 rows, u32 slots) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) s.count = 0, s.longest = 1;
    for (u32 i = threadIdx.x; i < BINS; i += 384) s.bins[i] = 0;
    for (u32 i = threadIdx.x; i < slots; i += 384) s.list[i] = DEAD;
    __syncthreads();
    u32 longest = 0;
    for (u32 r = threadIdx.x; r < rows; r += 384) longest = max(longest, (t.kv_len[r] + KV - 1) / KV);
    atomicMax(&s.longest, longest);
    __syncthreads();
    const u32 shrink = (s.longest + BINS - 1) / BINS;
    for (u32 chunk = warp * 32; chunk < rows; chunk += 384) {
        const u32 mine = min(chunk + lane, rows - 1);
        const u32 my_start = t.q_start[mine], q_tokens = chunk + lane < rows ? t.q_start[mine + 1] - my_start : 0;
        const u32 my_length = t.kv_len[mine];
        // A row whose length does not fit its pages attends to nothing.
        const u32 my_tokens = (ONES || q_tokens > 1) && my_length >= q_tokens ? q_tokens : 0;
        for (u32 i = 0; i < 32 && chunk + i < rows; i++) {
            const u32 start = __shfl_sync(FULL, my_start, i), q_len = __shfl_sync(FULL, my_tokens, i);
            const u32 length = __shfl_sync(FULL, my_length, i), slot = start / Q_TOKENS + chunk + i;
            for (u32 b = lane; b * Q_TOKENS < q_len; b += 32) {
                if (LAST && (b + 1) * Q_TOKENS < q_len) continue;
                u32 begin, end;
                tiles_of(length - q_len + b * Q_TOKENS, min(q_len - b * Q_TOKENS, (u32)Q_TOKENS), length, begin, end);
                const u32 bin = BINS - 1 - min((end - begin) / shrink, BINS - 1u);
                s.list[slot + b] = (chunk + i) << 16 | b;
                s.bin[slot + b] = (u8)bin;
                atomicAdd(&s.bins[bin], 1);
            }
        }
    }
    __syncthreads();
    if (warp != 0) return;
    // Turn counts into first places; then each slot in order takes the next place of its bin.
    u32 sum = 0, counts[BINS / 32];
#pragma unroll
    for (int i = 0; i < BINS / 32; i++) sum += counts[i] = s.bins[lane * (BINS / 32) + i];
    u32 before = sum;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        const u32 other = __shfl_up_sync(FULL, before, o);
        if (lane >= o) before += other;
    }
    if (lane == 31) s.count = before;
    before -= sum;
#pragma unroll
    for (int i = 0; i < BINS / 32; i++) s.bins[lane * (BINS / 32) + i] = before, before += counts[i];
    __syncwarp();
}

// Sorts the list: s.list is in order of slots, `to` is sorted by bins.
DEVICE void sort_list(Shared& s, u32* to, u32 slots) {
    const u32 lane = threadIdx.x % 32;
    for (u32 chunk = 0; chunk < slots; chunk += 32) {
        const u32 slot = chunk + lane, entry = slot < slots ? s.list[slot] : DEAD;
        const u32 bin = entry == DEAD ? BINS : s.bin[slot];
        const u32 same = __match_any_sync(FULL, bin);
        const u32 rank = __popc(same & ((1u << lane) - 1));
        const u32 place = bin < BINS ? s.bins[bin] + rank : 0;
        __syncwarp();
        if (bin < BINS) {
            to[place] = entry;
            if (rank == 0) s.bins[bin] += __popc(same);
        }
        __syncwarp();
    }
}

// The item of this block in a round. The direction alternates between rounds, which keeps the blocks' shares of a
// sorted list equal.
DEVICE bool find_item(Item& item, const Shared& s, const u32* list, const Rows& t, u32 round) {
    const u32 place = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const u32 index = round * gridDim.x + place;
    if (index >= s.count * HKV) return false;
    const u32 entry = list[index / HKV], r = entry >> 16, b = (entry & 0xffff) * Q_TOKENS;
    const u32 start = t.q_start[r], q_len = t.q_start[r + 1] - start;
    item.head = index % HKV;
    item.seat = t.row_seat[r];
    item.first_token = start + b;
    item.tokens = min(q_len - b, (u32)Q_TOKENS);
    item.length = t.kv_len[r];
    item.position = item.length - q_len + b;
    tiles_of(item.position, item.tokens, item.length, item.begin, item.end);
    return true;
}

struct Ring {
    u32 stage = 0, phase = 0;
    DEVICE void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

DEVICE void produce(Shared& s, const u32* list, const Rows& t, const Map& q_map, const Map& kv_map, const u32* page_table,
                    u32 pages_per_seat, u32 base) {
    const u32 lane = threadIdx.x % 32;
    Ring k, v;
    k.phase = v.phase = 1;
    for (u32 round = 0;; round++) {
        Item item;
        const bool some = find_item(item, s, list, t, round);
        const u32 stage = round % Q_STAGES, full = shared_address(&s.q_full[stage]);
        barrier_wait(shared_address(&s.q_empty[stage]), round / Q_STAGES % 2 ^ 1);
        if (!some) {
            if (lane == 0) s.item[stage].tokens = 0, barrier_arrive(full);
            return;
        }
        if (lane == 0) {
            s.item[stage] = item;
            barrier_expect(full, Q_FILLED);
#pragma unroll
            for (int p = 0; p < PARTS; p++)
                tensor_copy_3d(base + stage * Q_BYTES + p * (128 * 128), &q_map, p * 64, item.head * G, item.first_token, full);
        }
        // A lane per page and part of 64 columns.
        const u32* pages = page_table + (u64)item.seat * pages_per_seat;
        const u32 first = first_page(item.position), last = (item.length - 1) / PAGE;
        const u32 page = lane / PARTS, part = lane % PARTS;
        const bool copies = lane < PAGES * PARTS;
        const u32 to = base + Q_STAGES * Q_BYTES + part * PART_BYTES + page * (PAGE * 128);
        auto row_of = [&](u32 tile) { return copies ? pages[max(min(tile * PAGES + page, last), first)] * (2 * HKV * PAGE) + item.head * PAGE : 0; };
        auto fetch = [&](Ring& ring, u64* fulls, u64* empties, u32 offset, u32 row) {
            barrier_wait(shared_address(&empties[ring.stage]), ring.phase);
            const u32 barrier = shared_address(&fulls[ring.stage]);
            if (lane == 0) barrier_expect(barrier, TILE_BYTES);
            __syncwarp();
            if (copies) tensor_copy_2d(to + offset + ring.stage * TILE_BYTES, &kv_map, part * 64, row, barrier);
            ring.next();
        };
        u32 row = row_of(item.end - 1);
        fetch(k, s.k_full, s.k_empty, 0, row);
        for (u32 tile = item.end - 1; tile > item.begin; tile--) {
            const u32 next = row_of(tile - 1);
            fetch(k, s.k_full, s.k_empty, 0, next);
            fetch(v, s.v_full, s.v_empty, STAGES * TILE_BYTES, row + HKV * PAGE);
            row = next;
        }
        fetch(v, s.v_full, s.v_empty, STAGES * TILE_BYTES, row + HKV * PAGE);
    }
}

#if NARROW
#include "attention_wgmma_bytes.cuh"
#endif

// Turns scores into weights, powers of two relative to the reference; `sum` is the sum of this lane's weights.
DEVICE void raise(float (&s)[KV / 2], const float (&shift)[2], float (&sum)[2], float factor) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float part[2] = {0.0f, 0.0f};
#pragma unroll
        for (int n = 0; n < KV / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float& x = s[4 * n + 2 * half + e];
                x = exp2_fast(x * factor - shift[half]);
                part[e] += x;
            }
        sum[half] = part[0] + part[1];
    }
}

// The same for a tile that must be masked or whose maxima must be known: references grow to the maxima. Earlier sums
// must be multiplied by `scale`.
DEVICE void weigh(float (&s)[KV / 2], float (&top)[2], float (&shift)[2], float (&total)[2], float (&scale)[2], bool masked,
                  const int (&place)[2], const int (&limit)[2], u32 tile, float factor) {
    if (masked) {
        const int column = tile * KV + 2 * (threadIdx.x % 4);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int here = place[half] - column, most = limit[half] - column;
#pragma unroll
            for (int n = 0; n < KV / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int t = n * 8 + e;
                    if (t > most || (WINDOW && t + (int)WINDOW <= here)) s[4 * n + 2 * half + e] = -INFINITY;
                }
        }
    }
    float most[2], sum[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float m[2] = {s[2 * half], s[2 * half + 1]};
#pragma unroll
        for (int n = 1; n < KV / 8; n++) m[0] = fmaxf(m[0], s[4 * n + 2 * half]), m[1] = fmaxf(m[1], s[4 * n + 2 * half + 1]);
        most[half] = fmaxf(m[0], m[1]);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) most[half] = fmaxf(most[half], __shfl_xor_sync(FULL, most[half], 1));
#pragma unroll
    for (int half = 0; half < 2; half++) most[half] = fmaxf(most[half], __shfl_xor_sync(FULL, most[half], 2));
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float now = fmaxf(top[half], most[half] * factor);
        shift[half] = now == -INFINITY ? 0.0f : now;
        scale[half] = exp2_fast(top[half] - shift[half]);
        top[half] = now;
    }
    raise(s, shift, sum, factor);
#pragma unroll
    for (int half = 0; half < 2; half++) total[half] = total[half] * scale[half] + sum[half];
}

// Sixteen bytes of a swizzled row of 128.
DEVICE u32 swizzled(u32 tile, u32 row, u32 chunk) { return tile + row * 128 + (chunk ^ row % 8) * 16; }

// Computes the scores of this warp's 16 rows again, by this warp alone: `rows` are its q, `keys` the tile.
DEVICE void score_again(float (&s)[KV / 2], u32 rows, u32 keys) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < KV / 2; i++) s[i] = 0.0f;
#pragma unroll 1
    for (u32 i = 0; i < D / 16; i++) {
        u32 a[4], b[4];
        load_matrices(a, swizzled(rows + i / 4 * (128 * 128), lane % 16, i % 4 * 2 + lane / 16));
#pragma unroll
        for (int n = 0; n < KV / 16; n++) {
            load_matrices(b, swizzled(keys + i / 4 * PART_BYTES, n * 16 + lane / 16 * 8 + lane % 8, i % 4 * 2 + lane / 8 % 2));
            float(&c)[4] = *(float(*)[4])(s + 8 * n), (&d)[4] = *(float(*)[4])(s + 8 * n + 4);
            mma_16x8x16<MT>(c, a[0], a[1], a[2], a[3], b[0], b[1]);
            mma_16x8x16<MT>(d, a[0], a[1], a[2], a[3], b[2], b[3]);
        }
    }
}

// Stores rows g and g + 8 of this warp; each lane has a pair of columns of every eight, and stores 16 bytes at a
// time.
DEVICE void store_row(void* out, u64 to, const float (&o)[D / 2], int half, float inverse, bool live) {
    const u32 j = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < D / 8; n += 4) {
        if (YT == F32) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (live)
                    *(float2*)((float*)out + to + (n + i) * 8 + 2 * j) =
                        make_float2(o[4 * (n + i) + 2 * half] * inverse, o[4 * (n + i) + 2 * half + 1] * inverse);
            continue;
        }
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = pack2<YT>(o[4 * (n + i) + 2 * half] * inverse, o[4 * (n + i) + 2 * half + 1] * inverse);
        // Lane j ends with all of column group n + j.
        exchange(v);
        if (live) *(uint4*)((u16*)out + to + (n + j) * 8) = make_uint4(v[0], v[1], v[2], v[3]);
    }
}

#if NARROW
#define SCALES_OF_HEAD const float factor = all_factor * __ldg(k_scale + item.head), scale_of_v = __ldg(v_scale + item.head)
#else
#define SCALES_OF_HEAD const float factor = all_factor, scale_of_v = 1.0f
#endif
DEVICE void consume(Shared& s, u32 base, void* out, u32 out_stride, float all_factor SCALES_OF_PAGES SINKS_PARAMETER) {
    // The same in all lanes; the shuffle tells the compiler so, which makes descriptors cheaper.
    const u32 group = __shfl_sync(FULL, threadIdx.x / 128 - 1, 0);
    const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4;
    const bool leader = threadIdx.x % 128 == 0, first = lane == 0;
    const u32 k_base = base + Q_STAGES * Q_BYTES, v_base = k_base + STAGES * TILE_BYTES;
    const u32 row0 = group * 64 + warp * 16 + g;
    Ring k, v;
    if (TURNS && group == 1) named_arrive(3, 256);
    for (u32 round = 0;; round++) {
        const u32 q_stage = round % Q_STAGES;
        barrier_wait(shared_address(&s.q_full[q_stage]), round / Q_STAGES % 2);
        Item item = s.item[q_stage];
        item.tokens = __shfl_sync(FULL, item.tokens, 0);
        item.begin = __shfl_sync(FULL, item.begin, 0);
        item.end = __shfl_sync(FULL, item.end, 0);
        if (item.tokens == 0) return;
        const u32 q_empty = shared_address(&s.q_empty[q_stage]);
        const bool both = item.tokens * G > 64;
        if (group == 1 && !both) {
            for (u32 tile = item.end; tile > item.begin; tile--) {
                barrier_wait(shared_address(&s.k_full[k.stage]), k.phase);
                if (NARROW || first) barrier_arrive(shared_address(&s.k_empty[k.stage]));
                k.next();
                barrier_wait(shared_address(&s.v_full[v.stage]), v.phase);
                if (NARROW || leader) barrier_arrive(shared_address(&s.v_empty[v.stage]));
                v.next();
            }
            if (first) barrier_arrive(q_empty);
            continue;
        }
        const u32 q_at = base + q_stage * Q_BYTES + group * 8192, q = (u32)swizzled_tile(q_at);
        SCALES_OF_HEAD;
#if NARROW
        narrow_queries(q_at, group);
#endif
        // The last position that a token sees.
        auto limit_of = [&](u32 at) { return CAUSAL ? at : WINDOW ? min(item.length - 1, at + WINDOW - 1) : item.length - 1; };
        const int place[2] = {(int)(item.position + row0 / G), (int)(item.position + (row0 + 8) / G)};
        const int limit[2] = {(int)limit_of(place[0]), (int)limit_of(place[1])};
        const u32 first_limit = limit_of(item.position + group * 64 / G), last_place = item.position + (group * 64 + 63) / G;
        // Tiles that end before the first row's limit need no mask (unless the window starts there), and by then
        // every row has a reference.
        auto careful = [&](u32 tile) { return tile * KV + KV > first_limit || (WINDOW && tile * KV + WINDOW <= last_place); };
        float scores[KV / 2], sums[D / 2], top[2] = {-INFINITY, -INFINITY}, shift[2], total[2] = {0.0f, 0.0f}, scale[2];
        u32 weights[KV / 4];

        u32 tile = item.end - 1;
        barrier_wait(shared_address(&s.k_full[k.stage]), k.phase);
        {
            const u32 b = (u32)swizzled_tile(k_base + k.stage * TILE_BYTES);
            product_begin();
            multiply_keys(scores, q, b);
            product_commit();
            product_wait<0>();
            if (NARROW || first) barrier_arrive(shared_address(&s.k_empty[k.stage]));
            k.next();
        }
        weigh(scores, top, shift, total, scale, careful(tile), place, limit, tile, factor);
#pragma unroll
        for (int i = 0; i < KV / 4; i++) weights[i] = pack2<MT>(scores[2 * i], scores[2 * i + 1]);
        if (item.end * KV > item.length) {
            // Weights past the row's end are zero, but the values there may be NaN, so they are set to zero. If its last page
            // is the first in the window, that page also stands for those before it.
            barrier_wait(shared_address(&s.v_full[v.stage]), v.phase);
            const u32 past = item.length - tile * KV, bytes = v_base + v.stage * TILE_BYTES;
            const u32 window = first_page(item.position), before = window == (item.length - 1) / PAGE ? window * PAGE - tile * KV : 0;
            for (u32 i = threadIdx.x % 128; i < KV * 8; i += 128) {
                if (i >= before * 8 && i < past * 8) continue;
#pragma unroll
                for (int p = 0; p < PARTS; p++)
                    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(bytes + p * PART_BYTES + i * 16), "r"(0) : "memory");
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            named_sync(1 + group, 128);
        }
        int keep = 0;
#pragma unroll 1
        for (; tile > item.begin; tile--) {
            barrier_wait(shared_address(&s.k_full[k.stage]), k.phase);
            if (TURNS && both) named_sync(3 + group, 256);
            const u32 b = (u32)swizzled_tile(k_base + k.stage * TILE_BYTES);
            product_begin();
            multiply_keys(scores, q, b);
            product_commit();
            barrier_wait(shared_address(&s.v_full[v.stage]), v.phase);
            const u32 c = (u32)swizzled_rows(v_base + v.stage * TILE_BYTES, PART_BYTES);
            product_begin();
            multiply_values(sums, weights, c, keep);
            product_commit();
            if (TURNS && both) named_arrive(3 + (group ^ 1), 256);
            keep = 1;
            product_wait<1>();
            const bool known = !careful(tile - 1);
            bool fits = known;
            float sum[2] = {0.0f, 0.0f};
            if (known) {
                raise(scores, shift, sum, factor);
                fits = !__any_sync(FULL, sum[0] > MOST || sum[1] > MOST);
            }
            hold(sum[0] + sum[1], base);
            product_wait<0>();
            if (NARROW || leader) barrier_arrive(shared_address(&s.v_empty[v.stage]));
            v.next();
            if (fits) {
                total[0] += sum[0], total[1] += sum[1];
            } else {
                if (known) score_again(scores, q_at + warp * 2048, k_base + k.stage * TILE_BYTES);
                weigh(scores, top, shift, total, scale, !known, place, limit, tile - 1, factor);
#pragma unroll
                for (int i = 0; i < D / 2; i++) sums[i] *= scale[i / 2 % 2];
            }
            if (NARROW || first) barrier_arrive(shared_address(&s.k_empty[k.stage]));
            k.next();
#pragma unroll
            for (int i = 0; i < KV / 4; i++) weights[i] = pack2<MT>(scores[2 * i], scores[2 * i + 1]);
        }
        if (first) barrier_arrive(q_empty);
        barrier_wait(shared_address(&s.v_full[v.stage]), v.phase);
        const u32 c = (u32)swizzled_rows(v_base + v.stage * TILE_BYTES, PART_BYTES);
        product_begin();
        multiply_values(sums, weights, c, keep);
        product_commit();
        product_wait<0>();
        if (NARROW || leader) barrier_arrive(shared_address(&s.v_empty[v.stage]));
        v.next();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = total[half];
            sum += __shfl_xor_sync(FULL, sum, 1);
            sum += __shfl_xor_sync(FULL, sum, 2);
            const u32 row = row0 + 8 * half, t = row / G;
            const bool live = t < item.tokens && row < Q_TOKENS * G;
            sum = WITH_SINK(sum, item.head * G + row % G, shift[half]);
            store_row(out, (u64)(item.first_token + t) * out_stride + (item.head * G + row % G) * D, sums, half, NARROW ? scale_of_v / sum : 1.0f / sum, live);
        }
    }
}

#if NARROW
#define PAGES_PARAMETER const u8* kv
// Registers of copying and widening warps, of computing ones.
#define FEW "72"
#define MANY "216"
#else
#define PAGES_PARAMETER const __grid_constant__ Map kv_map
#define FEW "40"
#define MANY "232"
#endif

extern "C" __global__ void __launch_bounds__(384, 1)
attention_wgmma(const __grid_constant__ Map q_map, PAGES_PARAMETER, void* out, const u32* row_seat,
                const u32* q_start, const u32* kv_len, const u32* page_table, u32 rows, u32 slots, u32 pages_per_seat,
                u32 out_stride, float scale SCALES_OF_PAGES SINKS_PARAMETER) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ u8 memory[];
    __shared__ Shared s;
    __shared__ u32 sorted[SLOTS];
    const u32 base = (shared_address(memory) + 1023) & ~1023u;
    const Rows tables = {row_seat, q_start, kv_len};
    if (threadIdx.x == 0) {
        for (int i = 0; i < Q_STAGES; i++) barrier_init(shared_address(&s.q_full[i]), 1), barrier_init(shared_address(&s.q_empty[i]), 8);
        for (int i = 0; i < STAGES; i++) {
            // Tiles that threads write have barriers at which every thread arrives: racecheck does not understand one for
            // its warp.
            barrier_init(shared_address(&s.k_full[i]), NARROW ? 96 : 1), barrier_init(shared_address(&s.k_empty[i]), NARROW ? 256 : 8);
            barrier_init(shared_address(&s.v_full[i]), NARROW ? 96 : 1), barrier_init(shared_address(&s.v_empty[i]), NARROW ? 256 : 2);
        }
#if NARROW
        for (int i = 0; i < RAW; i++) barrier_init(shared_address(&s.raw_full[i]), 1), barrier_init(shared_address(&s.raw_empty[i]), 96);
#endif
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (ONES) let_successor_start();
    // The prologue wrote the tables, so every kernel may read them before its predecessor has ended.
    make_list(s, tables, rows, slots);
    if (threadIdx.x < 32) sort_list(s, sorted, slots);
    __syncthreads();
    wait_for_predecessor();
    // The kernel for rows of one token runs beside this one: it does not wait for it, and starts when q and pages are there.
    if (!ONES) let_successor_start();
    if (__shfl_sync(FULL, threadIdx.x / 128, 0) == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 " FEW ";");
#if NARROW
        if (threadIdx.x < 32) {
            asm volatile("fence.proxy.async;" ::: "memory");
            produce_bytes(s, sorted, tables, q_map, kv, page_table, pages_per_seat, base);
        } else
            widen(s, sorted, tables, base);
#else
        if (threadIdx.x < 32) {
            asm volatile("fence.proxy.async;" ::: "memory");
            produce(s, sorted, tables, q_map, kv_map, page_table, pages_per_seat, base);
        }
#endif
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 " MANY ";");
#if NARROW
        consume(s, base, out, out_stride, scale * 1.44269504088896f, k_scale, v_scale SINKS_ARGUMENT);
#else
        consume(s, base, out, out_stride, scale * 1.44269504088896f SINKS_ARGUMENT);
#endif
    }
#endif
}
