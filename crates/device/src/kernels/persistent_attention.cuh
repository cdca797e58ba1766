// Attention inside `persistent.cu`: a unit prepares its heads, attends to its pages, merges the results of its warps,
// and sends the result; the receivers of a row combine its units. Included after the shapes, the exchange and the
// ring, which it uses.
#pragma once

// Clocks that two pages cost a warp, and clocks that a unit of a row costs its receivers.
#define PAGE_COST 1100
#define UNIT_COST 250

DEVICE float power(float v) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

DEVICE u32 pages_of(u32 length) { return (length + PAGE - 1) / PAGE; }

// Which pages this block attends to, and which slots the units of each row have: the cheapest number of stages per
// warp for which all units have slots. The tables are written by the prologue, which lets its successors start only
// at its end, so they can be read before the wait.
DEVICE Unit plan(Shared& s, const u32* kv_len) {
    u32 lengths[ROWS], share = 0, cost = FULL;
#pragma unroll
    for (int r = 0; r < ROWS; r++) lengths[r] = __ldcg(kv_len + r);
    for (u32 each = 1;; each += (each + 3) / 4) {
        u32 units = 0, most = 0;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const u32 own = (pages_of(lengths[r]) + 2 * WARPS * each - 1) / (2 * WARPS * each);
            units += own, most = max(most, own);
        }
        const u32 now = PAGE_COST * each + UNIT_COST * ROWS * most;
        if (units <= SLOTS && now < cost) share = 2 * WARPS * each, cost = now;
        if (most <= 1) break;
    }
    Unit unit = {0, 0, blockIdx.x % HKV, 1, 0, 1};
    u32 first = 0, most = 0;
    const u32 slot = blockIdx.x / HKV;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const u32 pages = pages_of(lengths[r]);
        u32 units = (pages + share - 1) / share;
        const u32 each = units ? (pages + units - 1) / units : 1;
        units = (pages + each - 1) / each;
        if (slot >= first && slot < first + units) {
            unit.row = r, unit.length = lengths[r];
            unit.first = (slot - first) * each, unit.last = min(unit.first + each, pages) - 1;
        }
        if (threadIdx.x == 0) s.first[r] = first, s.units[r] = units;
        most = max(most, units);
        first += units;
    }
    if (threadIdx.x == 0) s.most = most;
    return unit;
}

// Polls, normalises and rotates head `me.warp` of the unit: G queries, then, with the newest token, its k and v. `p` and
// `q` are the norm's weights for the lane's elements of either half of the head. k and v become bytes after multiplication
// by `into`.
DEVICE void prepare(Shared& s, const u64* exchange, u32 tag, u8* kv, const Pair& p, const Pair& q, float eps, float into, const Me& me) {
    const Unit& unit = s.unit;
    const u32 warp = me.warp, lane = min(me.lane, D / 4 - 1u);
    const u32 head = warp < G ? unit.head * G + warp : HQ + (warp - G) * HKV + unit.head;
    const u64* from = exchange + AT_QKV + unit.row * (QKV / 2) + head * (D / 2) + lane;
    u64 low, high;
    Patience patience;
    for (;;) {
        low = peek(from), high = peek(from + D / 4);
        if (__all_sync(FULL, fresh(low, tag) && fresh(high, tag))) break;
        patience.lose();
    }
    u32 out[2] = {(u32)low, (u32)high};
#if NARROW
    float v[4] = {low_half<BF16>(out[0]), high_half<BF16>(out[0]), low_half<BF16>(out[1]), high_half<BF16>(out[1])};
    if (warp <= G) {
        float by = 1.0f;
        if (warp < G ? QN : KN)
            by = rsqrtf(warp_sum(me.lane < D / 4 ? v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3] : 0.0f) * (1.0f / D) + eps);
        v[0] *= by * p.low(), v[1] *= by * p.high();
        v[2] *= by * q.low(), v[3] *= by * q.high();
        const float2 c = *(const float2*)&s.rope[2 * lane], n = *(const float2*)&s.rope[D / 2 + 2 * lane];
        const float a0 = v[0], a1 = v[1];
        v[0] = a0 * c.x - v[2] * n.x, v[1] = a1 * c.y - v[3] * n.y;
        v[2] = v[2] * c.x + a0 * n.x, v[3] = v[3] * c.y + a1 * n.y;
    }
    if (me.lane >= D / 4) return;
    if (warp < G) {
        // In the order in which a lane has the elements of a key: 4j to 4j + 3 are a fragment's 2j, 2j + 1, 2j + 8, 2j + 9.
        u32* to = (u32*)s.queries[warp] + lane / 8 * 8 + lane % 2 * 4 + lane % 8 / 2;
        to[0] = pack_f16(v[0], v[1]), to[D / 4] = pack_f16(v[2], v[3]);
    } else {
        const u16 bytes[2] = {(u16)pack_e4m3(v[0] * into, v[1] * into), (u16)pack_e4m3(v[2] * into, v[3] * into)};
        const u32 at = unit.length - 1, page = at / PAGE - unit.first;
        const u32 id = page < HELD_PAGES ? s.pages[page] : __ldcg(unit.pages + at / PAGE);
        u16* there = (u16*)(kv + (((u64)id * 2 + (warp - G)) * HKV + unit.head) * (PAGE * D) + at % PAGE * D);
        s.newest[warp - G][lane] = there[lane] = bytes[0], s.newest[warp - G][lane + D / 4] = there[lane + D / 4] = bytes[1];
    }
#else
    if (warp <= G) {
        float a0 = low_half<BF16>(out[0]), a1 = high_half<BF16>(out[0]), b0 = low_half<BF16>(out[1]), b1 = high_half<BF16>(out[1]);
        float by = 1.0f;
        if (warp < G ? QN : KN)
            by = rsqrtf(warp_sum(me.lane < D / 4 ? a0 * a0 + a1 * a1 + b0 * b0 + b1 * b1 : 0.0f) * (1.0f / D) + eps);
        a0 *= by * p.low(), a1 *= by * p.high();
        b0 *= by * q.low(), b1 *= by * q.high();
        const float2 c = *(const float2*)&s.rope[2 * lane], n = *(const float2*)&s.rope[D / 2 + 2 * lane];
        out[0] = pack_bf16(a0 * c.x - b0 * n.x, a1 * c.y - b1 * n.y);
        out[1] = pack_bf16(b0 * c.x + a0 * n.x, b1 * c.y + a1 * n.y);
    }
    if (me.lane >= D / 4) return;
    u32* to = (u32*)(warp < G ? s.queries[warp] : s.newest[warp - G]);
    to[lane] = out[0], to[lane + D / 4] = out[1];
    if (warp >= G) {
        const u32 at = unit.length - 1, page = at / PAGE - unit.first;
        const u32 id = page < HELD_PAGES ? s.pages[page] : __ldcg(unit.pages + at / PAGE);
        u32* there = (u32*)(kv + (((u64)id * 2 + (warp - G)) * HKV + unit.head) * (PAGE * D * 2) + at % PAGE * (D * 2));
        there[lane] = out[0], there[lane + D / 4] = out[1];
    }
#endif
}

// A warp's sums so far: lane 4·g + j holds columns (query heads) 2j and 2j + 1.
struct Sums {
    float out[STEPS][4], maximum[2], total[2];
};
DEVICE void clear(Sums& sums) {
    sums.maximum[0] = sums.maximum[1] = -INFINITY, sums.total[0] = sums.total[1] = 0.0f;
#pragma unroll
    for (int k = 0; k < STEPS; k++) sums.out[k][0] = sums.out[k][1] = sums.out[k][2] = sums.out[k][3] = 0.0f;
}

// The place of piece `i` of a token in the tiles of 64 columns, or in the lines of 128 bytes, that a tensor copy swizzles.
#define PIECES (D * ELEMENT / 16)
DEVICE u32 swizzled(u32 token, u32 i) {
    if (NARROW) {
        const u32 line = token * D / 128, piece = (token * PIECES + i) % 8;
        return line * 128 + ((piece ^ line % 8) << 4);
    }
    return i / 8 * 2048 + token * 128 + ((i % 8 ^ token % 8) << 4);
}

// Attends to two pages of the unit, from `first` on: each has 16 keys, then 16 values, at `here`.
DEVICE void attend(Shared& s, u8* here, u32 first, float factor, Sums& sums, const Me& me) {
    const u32 newest = s.unit.length - 1, end = min((s.unit.last + 1) * PAGE, s.unit.length), lane = me.lane;
    if (newest / PAGE - first < 2) {
        // The newest token comes from the exchange, and the values after it must be finite.
        const u32 t = newest % PAGE;
        u8* page = here + (newest / PAGE - first) * PAGE_BYTES;
        for (u32 i = lane; i < 2 * PIECES; i += 32)
            *(uint4*)(page + i / PIECES * (PAGE_BYTES / 2) + swizzled(t, i % PIECES)) = *(const uint4*)&s.newest[i / PIECES][i % PIECES * 8];
        for (u32 i = lane; i < (15 - t) * PIECES; i += 32)
            *(uint4*)(page + PAGE_BYTES / 2 + swizzled(t + 1 + i / PIECES, i % PIECES)) = make_uint4(0, 0, 0, 0);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
    }
    // If there is no second page, the first is used again with zero weight.
    const u32 base = shared_address(here), other = first < s.unit.last ? PAGE_BYTES : 0;
    const u32 queries = shared_address(&s.queries[lane % 8][lane / 8 * 8]);
    u32 q[4], bytes[2][4];
    float scores[2][2][4];
#pragma unroll
    for (int i = 0; i < 16; i++) scores[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        const u32 from = base + swizzled(lane % 16, NARROW ? k / 2 * 2 + lane / 16 : 2 * k + lane / 16);
        if (k % 2 == 0) load_matrices(q, queries + k * 32);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            u32 a[4];
            if (NARROW) {
                if (k % 2 == 0) load_matrices(bytes[n], n ? from + other : from);
                widen_keys(a, bytes[n][k % 2 * 2], bytes[n][k % 2 * 2 + 1]);
            } else
                load_matrices(a, n ? from + other : from);
            mma_16x8x16<NARROW ? F16 : BF16>(scores[n][k % 2], a[0], a[1], a[2], a[3], q[k % 2 * 2], q[k % 2 * 2 + 1]);
        }
    }
    u32 p[2][2];
    float weights[2][4];
#pragma unroll
    for (int c = 0; c < 2; c++) {
        float v[4], top;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float score = scores[i / 2][0][c + i % 2 * 2] + scores[i / 2][1][c + i % 2 * 2];
            v[i] = (first + i / 2) * PAGE + i % 2 * 8 + me.g < end ? score * factor : -INFINITY;
        }
        top = fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3]));
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) top = fmaxf(top, __shfl_xor_sync(FULL, top, o));
        top = fmaxf(top, sums.maximum[c]);
        const float keep = power(sums.maximum[c] - top);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = power(v[i] - top), weights[i / 2][c + i % 2 * 2] = v[i];
        sums.maximum[c] = top;
        sums.total[c] = sums.total[c] * keep + (v[0] + v[1]) + (v[2] + v[3]);
#pragma unroll
        for (int k = 0; k < STEPS; k++) sums.out[k][c] *= keep, sums.out[k][c + 2] *= keep;
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
        p[n][0] = transpose_8x8(pack2<NARROW ? F16 : BF16>(weights[n][0], weights[n][1]));
        p[n][1] = transpose_8x8(pack2<NARROW ? F16 : BF16>(weights[n][2], weights[n][3]));
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            u32 a[4];
            if (NARROW) {
                const u32 from = base + PAGE_BYTES / 2 + swizzled(lane % 16, k / 2 * 2 + lane / 16);
                if (k % 2 == 0) load_matrices_transposed(bytes[n], n ? from + other : from);
                widen_values(a, bytes[n][k % 2 * 2], bytes[n][k % 2 * 2 + 1]);
            } else {
                const u32 from = base + PAGE_BYTES / 2 + swizzled(lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2);
                load_matrices_transposed(a, n ? from + other : from);
            }
            mma_16x8x16<NARROW ? F16 : BF16>(sums.out[k], a[0], a[1], a[2], a[3], p[n][0], p[n][1]);
        }
}

// Merges all warps' sums of the unit and sends the result to the exchange. `merged` is [warp][column][D]. A warp
// without pages has a maximum of minus infinity and sums of zero.
DEVICE void merge(Shared& s, float* merged, const Sums& sums, u64* exchange, u32 tag, float scale_of_v, const Me& me) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const u32 column = 2 * me.j + c;
        float sum = sums.total[c];
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) sum += __shfl_xor_sync(FULL, sum, o);
        if (me.g == 0) s.maxima[column][me.warp] = sums.maximum[c], s.totals[column][me.warp] = sum;
        float* to = merged + (me.warp * G + column) * (D + 4) + (NARROW ? 2 : 1) * me.g;
        if (column < G)
#pragma unroll
            for (int k = 0; k < STEPS; k++) to[k * 16] = sums.out[k][c], to[k * 16 + (NARROW ? 1 : 8)] = sums.out[k][c + 2];
    }
    join();
#pragma unroll 1
    for (u32 i = threadIdx.x; i < G * D; i += WARPS * 32) {
        const u32 column = i / D, e = i % D;
        float maxima[WARPS], top = -INFINITY, weight = 0.0f, sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) maxima[w] = s.maxima[column][w], top = fmaxf(top, maxima[w]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float part = power(maxima[w] - top);
            weight += s.totals[column][w] * part;
            sum += merged[(w * G + column) * (D + 4) + e] * part;
        }
        const float v = NARROW ? __fdividef(sum, weight) * scale_of_v : __fdividef(sum, weight), n = __shfl_down_sync(FULL, v, 1);
        // The blocks of a slot are the KV heads in order.
        if (e % 2 == 0) send_copies<ATT_WORDS>(exchange + AT_ATT + blockIdx.x * (G * D / 2) + i / 2, pack_bf16(v, n), tag);
        if (e == 0) send_copies<LSE_WORDS>(exchange + AT_LSE + blockIdx.x * G + column, __float_as_uint(top + __log2f(weight)), tag);
    }
}

// Receives the attention of every row from its units: the lane's four values of each of the warp's slices. Loads are
// in flight before the first is checked: of all rows if no row has more than one unit, else of one row and a few
// units.
#define UNITS_AT_ONCE (ROWS <= 2 ? 4 : 2)
DEVICE void gather(const Shared& s, const u64* parts, const u64* lses, u32 tag, const Me& me, uint2 (&out)[MOST_CHUNKS][ROWS]) {
    const u32 column = me.warp * 128 + me.lane * 4;
    parts += AT_ATT + column / 2, lses += AT_LSE + column / D;
    if (s.most <= 1) {
        // One unit per row: nothing to combine.
        Patience patience;
        for (;;) {
            u64 w[CHUNKS(A)][ROWS][2];
            bool all = true;
            if (GATED && s.units[0]) {
                u64 a, b;
                do {
                    all = true;
#pragma unroll
                    for (int c = 0; c < CHUNKS(A); c++)
                        if (A % CHUNK == 0 || c * CHUNK + column < A)
                            peek2(parts + s.first[0] * (A / 2) + c * (CHUNK / 2), a, b), all &= fresh(b, tag);
                    patience.lose();
                } while (!__all_sync(FULL, all));
            }
#pragma unroll
            for (int i = 0; i < CHUNKS(A) * ROWS; i++) {
                const int c = i / ROWS, r = i % ROWS;
                w[c][r][0] = w[c][r][1] = (u64)tag << 32;
                if (s.units[r] && (A % CHUNK == 0 || c * CHUNK + column < A))
                    peek2(parts + s.first[r] * (A / 2) + c * (CHUNK / 2), w[c][r][0], w[c][r][1]);
            }
#pragma unroll
            for (int i = 0; i < CHUNKS(A) * ROWS; i++) {
                const int c = i / ROWS, r = i % ROWS;
                all &= fresh(w[c][r][0], tag) && fresh(w[c][r][1], tag);
                out[c][r] = make_uint2((u32)w[c][r][0], (u32)w[c][r][1]);
            }
            if (__all_sync(FULL, all)) return;
            patience.lose();
        }
    }
#pragma unroll 1
    for (u32 row = 0; row < ROWS; row++) {
        const u32 units = s.units[row];
        float top[CHUNKS(A)], weight[CHUNKS(A)], sums[CHUNKS(A)][4];
#pragma unroll
        for (int c = 0; c < CHUNKS(A); c++)
            top[c] = -1e30f, weight[c] = 0.0f, sums[c][0] = sums[c][1] = sums[c][2] = sums[c][3] = 0.0f;
#pragma unroll 1
        for (u32 base = 0; base < units; base += UNITS_AT_ONCE) {
            const u32 slot = s.first[row] + base;
            u64 w[CHUNKS(A)][UNITS_AT_ONCE][2], lse[CHUNKS(A)][UNITS_AT_ONCE];
            Patience patience;
            for (;;) {
                bool all = true;
#pragma unroll
                for (int i = 0; i < CHUNKS(A) * UNITS_AT_ONCE; i++) {
                    const int c = i / UNITS_AT_ONCE, u = i % UNITS_AT_ONCE;
                    w[c][u][0] = w[c][u][1] = (u64)tag << 32, lse[c][u] = (u64)tag << 32 | 0xff800000u;
                    if (base + u < units && (A % CHUNK == 0 || c * CHUNK + column < A)) {
                        peek2(parts + slot * (A / 2) + (u * (A / 2) + c * (CHUNK / 2)), w[c][u][0], w[c][u][1]);
                        lse[c][u] = peek(lses + slot * HQ + (u * HQ + c * (CHUNK / D)));
                    }
                }
#pragma unroll
                for (int i = 0; i < CHUNKS(A) * UNITS_AT_ONCE; i++) {
                    const int c = i / UNITS_AT_ONCE, u = i % UNITS_AT_ONCE;
                    all &= fresh(w[c][u][0], tag) && fresh(w[c][u][1], tag) && fresh(lse[c][u], tag);
                }
                if (__all_sync(FULL, all)) break;
                patience.lose();
            }
#pragma unroll
            for (int c = 0; c < CHUNKS(A); c++) {
                float next = top[c];
#pragma unroll
                for (int u = 0; u < UNITS_AT_ONCE; u++) next = fmaxf(next, __uint_as_float((u32)lse[c][u]));
                const float before = power(top[c] - next);
                top[c] = next, weight[c] *= before;
#pragma unroll
                for (int e = 0; e < 4; e++) sums[c][e] *= before;
#pragma unroll
                for (int u = 0; u < UNITS_AT_ONCE; u++) {
                    const float now = power(__uint_as_float((u32)lse[c][u]) - next);
                    const u32 low = (u32)w[c][u][0], high = (u32)w[c][u][1];
                    weight[c] += now;
                    sums[c][0] += now * low_half<BF16>(low), sums[c][1] += now * high_half<BF16>(low);
                    sums[c][2] += now * low_half<BF16>(high), sums[c][3] += now * high_half<BF16>(high);
                }
            }
        }
#pragma unroll
        for (int c = 0; c < CHUNKS(A); c++) {
            // A pad row has no units, and is zero.
            const float by = __fdividef(1.0f, fmaxf(weight[c], 1e-30f));
            const uint2 v = make_uint2(pack_bf16(sums[c][0] * by, sums[c][1] * by), pack_bf16(sums[c][2] * by, sums[c][3] * by));
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                if (r == row) out[c][r] = v;
        }
    }
}
