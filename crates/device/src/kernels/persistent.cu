// A run of decoder layers as one kernel: the persistent path of small models, in which reading a layer takes only a
// few microseconds, less than the gaps between kernels.
//
// BLOCKS blocks, one per multiprocessor, all resident: eight warps that compute and one that fetches. Everything that
// a block will read (8 rows of each weight matrix at a time, and its pages of keys and values) is one sequence of
// stages, known in advance. The fetching warp keeps a ring of STAGES of them full by bulk copies, across phases and
// layers, so that memory is busy while a phase waits for another.
//
// Activations go from block to block through `exchange`: 64-bit words of two bf16 and a tag. A receiver polls the
// words themselves until all carry the tag of this step and layer, so a handover costs one store and one load: no
// fence, no flag, no barrier of all blocks. Tags grow with every layer of every step, so nothing is reset. A word is
// overwritten one layer later. By then every block has sent gate/up outputs that depend on everything it had read
// before, and the writing block has received those, or sums of them. Words that every block reads are written COPIES
// times, because readers of one cache line wait for each other.
//
// Phases of a layer: qkv (norm · linear), attention (by units of a row, a KV head and a share of the pages; each unit
// normalises and rotates its heads, the unit with the newest token writes k and v), output linear (its receivers
// combine the units of a row), gate/up, down. A warp owns 128 columns of every 1024 of a linear's inner dimension: it
// polls only for those, and holds that part of the residual stream, which is the same in every block. Both halves of
// a layer run through the same code, to keep the code short: each layer runs through all of it once.
//
// H, I, D, HQ, HKV, LAYERS, ROWS (≤ 8), BLOCKS, STAGES, COPIES, QN, KN, NT (of the norms: BF16 or F32). All else is bf16;
// with KT = E4M3 pages are bytes (pages.cuh), each layer of the table ends with the addresses of its scales, and the map has
// lines of 128 bytes.
#ifndef KT
#define KT 2
#endif
#include "exchange.cuh"
#include "pages.cuh"

#define WARPS 8
#define THREADS (WARPS * 32 + 32)
#define PAGE 16
#define G (HQ / HKV)
#define QKV ((HQ + 2 * HKV) * D)
#define A (HQ * D)
// Slots of units per KV head.
#define SLOTS (BLOCKS / HKV)
// Stages in flight at once. More do not make memory faster, and polling loads would wait behind them.
#define FLYING 2
// Attention may land on few blocks; allow them more pages in flight.
#define PAGES_FLYING (2 * FLYING)
// Whether a receiver polls a part of the words before it reads all.
#define GATED (ROWS > 1)
#define max_of(a, b) ((a) > (b) ? (a) : (b))

// A stage: 8 rows of up to 1024 weights at a pitch that keeps them in different banks, or two pages of a KV head.
#define CHUNK 1024
#define PITCH (CHUNK * 2 + 64)
#define STAGE_BYTES (17 * 1024)
#define CHUNKS(k) (((k) + CHUNK - 1) / CHUNK)
#define TILES(n) (((n) / 8 + BLOCKS - 1) / BLOCKS)
#define MOST_CHUNKS max_of(CHUNKS(A), CHUNKS(I))
// Bytes of a row of a warp's slice of x, floats of a row of partial sums.
#define X_PITCH (256 + 64)
#define WIDE ((max_of(TILES(QKV), TILES(2 * I)) * 8 + 15) / 16 * 16 + 4)
#define PARTIAL max_of(WARPS * ROWS * WIDE, WARPS * G * (D + 4))

// The exchange, in words: generation and arrivals, then the outputs of each phase.
#define AT_QKV 32
#define AT_ATT (AT_QKV + ROWS * QKV / 2)
#define ATT_WORDS (SLOTS * (A / 2))
#define AT_LSE (AT_ATT + COPIES * ATT_WORDS)
#define LSE_WORDS ((SLOTS * HQ + 15) / 16 * 16)
#define AT_O (AT_LSE + COPIES * LSE_WORDS)
#define AT_ACT (AT_O + COPIES * (ROWS * H / 2))
#define AT_DOWN (AT_ACT + COPIES * (ROWS * I / 2))
// Generations until tags restart from 0; the last block then clears the exchange.
#define GENERATIONS (0xffffffffu / LAYERS - 1)

#define NORM_BYTES (NT == F32 ? 4 : 2)
#define STEPS (D / 16)
#define HELD_PAGES 256
#define PAGE_BYTES (2 * PAGE * D * ELEMENT) // of a KV head

struct Layer {
    const u16 *qkv, *o, *up, *down;
    const u8 *norm1, *norm2, *q_norm, *k_norm;
    u8* kv;
#if NARROW
    const float *k_scale, *v_scale;
#endif
};
struct Table {
    Layer layers[LAYERS];
};
struct alignas(64) Map {
    u64 words[16];
};

// A block's share of attention: pages first … last of a row and a KV head; empty if first > last.
struct Unit {
    const u32* pages; // of the row
    u32 row, head, first, last, length;
};

struct Shared {
    u64 full[STAGES], empty[STAGES];
    Layer layers[LAYERS];
    Unit unit;
    __align__(16) u32 pages[HELD_PAGES];
    __align__(16) float squares[2][8][WARPS];
    __align__(16) float maxima[8][WARPS], totals[8][WARPS];
    __align__(16) float rope[D]; // of the newest token
    __align__(16) u16 queries[8][D + 8];
    __align__(16) u16 newest[2][D];
    u32 first[ROWS], units[ROWS], most; // slots of each row's units, and the most of a row
    u32 word;
};

// A thread's warp, lane, and row and column group in MMA fragments.
struct Me {
    u32 warp, lane, g, j;
};

// ---- what is received -------------------------------------------------------------------------

// Receives the lane's four values of its warp's slices of every row. All loads are in flight before the first is
// checked.
template <int WIDTH_, int MOST_>
DEVICE void receive(const u64* from, u32 tag, const Me& me, uint2 (&out)[MOST_][ROWS]) {
    Patience patience;
    from += me.warp * 64 + me.lane * 2;
    for (;;) {
        u64 w[CHUNKS(WIDTH_)][ROWS][2];
        bool all = true;
        // With many rows, repeated reads of all words by all blocks would be the bottleneck.
        if (GATED) {
            u64 a, b;
            do {
                all = true;
#pragma unroll
                for (int c = 0; c < CHUNKS(WIDTH_); c++)
                    if (WIDTH_ % CHUNK == 0 || c * CHUNK + me.warp * 128 + me.lane * 4 < WIDTH_)
                        peek2(from + (ROWS - 1) * (WIDTH_ / 2) + c * (CHUNK / 2), a, b), all &= fresh(b, tag);
                patience.lose();
            } while (!__all_sync(FULL, all));
        }
#pragma unroll
        for (int c = 0; c < CHUNKS(WIDTH_); c++)
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                w[c][r][0] = w[c][r][1] = (u64)tag << 32;
                if (WIDTH_ % CHUNK == 0 || c * CHUNK + me.warp * 128 + me.lane * 4 < WIDTH_)
                    peek2(from + r * (WIDTH_ / 2) + c * (CHUNK / 2), w[c][r][0], w[c][r][1]);
            }
#pragma unroll
        for (int c = 0; c < CHUNKS(WIDTH_); c++)
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                all &= fresh(w[c][r][0], tag) && fresh(w[c][r][1], tag);
                out[c][r] = make_uint2((u32)w[c][r][0], (u32)w[c][r][1]);
            }
        if (__all_sync(FULL, all)) return;
        patience.lose();
    }
}

// ---- what is fetched --------------------------------------------------------------------------

DEVICE void copy_tile(u32 to, const Map* map, u32 x, u32 y, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(barrier)
                 : "memory");
}
DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Groups of eight rows are distributed in order, about the same number to each block: of qkv (phase 0), of gate and
// up (2).
DEVICE u32 first_tile(u32 phase, u32 block) { return block * ((phase ? 2 * I : QKV) / 8) / BLOCKS; }

struct Fetcher {
    Shared& s;
    const Map* map;
    u32 ring, lane;
    Place at, landed;
    u32 flying;

    DEVICE u32 full() const { return shared_address(&s.full[at.slot]); }
    DEVICE u32 stage() const { return ring + at.slot * STAGE_BYTES; }
    DEVICE void begin(u32 bytes, u32 limit = FLYING) {
        wait_for(shared_address(&s.empty[at.slot]), at.parity ^ 1);
        if (flying < limit) flying++;
        else
            for (u32 over = flying - limit + 1; over; over--, landed.next()) wait_for(shared_address(&s.full[landed.slot]), landed.parity);
        flying = min(flying, limit);
        if (lane == 0) expect(full(), bytes);
        __syncwarp();
    }
    // Columns chunk · CHUNK … of rows tile · 8 … + 7.
    DEVICE void rows(const u16* w, u32 width, u32 tile, u32 chunk) {
        const u32 bytes = min(width - chunk * CHUNK, (u32)CHUNK) * 2;
        begin(8 * bytes);
        if (lane < 8) copy_bulk(stage() + lane * PITCH, w + (u64)(tile * 8 + lane) * width + chunk * CHUNK, bytes, full());
        at.next();
    }
    // Page `first` and the next one of the unit's `span`, in tiles of 64 columns whose 16-byte pieces are swizzled.
    DEVICE void pages(u32 line, u32 first, u32 span) {
        const u32 count = min(span - first, 2u);
        begin(count * PAGE_BYTES, PAGES_FLYING);
#if NARROW
        const u32 page = lane / 2, which = lane % 2;
        if (page < count) {
            const u32 n = first + page, id = n < HELD_PAGES ? s.pages[n] : __ldcg(s.unit.pages + s.unit.first + n);
            copy_tile(stage() + page * PAGE_BYTES + which * (PAGE_BYTES / 2), map, 0, line + ((id * 2 + which) * HKV + s.unit.head) * (PAGE * D / 128), full());
        }
#else
        const u32 page = lane / (D / 32), which = lane / (D / 64) % 2, part = lane % (D / 64);
        if (page < count) {
            const u32 n = first + page, id = n < HELD_PAGES ? s.pages[n] : __ldcg(s.unit.pages + s.unit.first + n);
            copy_tile(stage() + page * PAGE_BYTES + (which * (D / 64) + part) * 2048, map, part * 64,
                      line + ((id * 2 + which) * HKV + s.unit.head) * PAGE, full());
        }
#endif
        at.next();
    }
};

DEVICE void fetch_all(Shared& s, const Map* map, u32 ring, u32 lane) {
    Fetcher to = {s, map, ring, lane, {0, 0}, {0, 0}, 0};
    const u32 block = blockIdx.x, span = s.unit.first <= s.unit.last ? s.unit.last + 1 - s.unit.first : 0;
#pragma unroll 1
    for (u32 layer = 0; layer < LAYERS; layer++) {
        const Layer& here = s.layers[layer];
        // One block prefetches the next layer's norms for all blocks.
        if (block == layer && layer + 1 < LAYERS) {
            const Layer& next = s.layers[layer + 1];
            for (u32 k = lane * 128; k < H * NORM_BYTES; k += 32 * 128) prefetch(next.norm1 + k), prefetch(next.norm2 + k);
            if (lane * 128 < D * NORM_BYTES) prefetch(next.q_norm + lane * 128), prefetch(next.k_norm + lane * 128);
        }
        // qkv, o, up, down; the pages after qkv
#pragma unroll 1
        for (u32 p = 0; p < 4; p++) {
            const u16* w = (&here.qkv)[p];
            const u32 width = p == 1 ? A : p == 3 ? I : H;
            const u32 first = p % 2 ? block : first_tile(p, block), last = p % 2 ? min(block + 1, H / 8u) : first_tile(p, block + 1);
#pragma unroll 1
            for (u32 tile = first; tile < last; tile++)
#pragma unroll 1
                for (u32 chunk = 0; chunk * CHUNK < width; chunk++) to.rows(w, width, tile, chunk);
            const u32 line = (u32)((u64)(here.kv - s.layers[0].kv) / (NARROW ? 128 : D * 2));
            if (p == 0)
#pragma unroll 1
                for (u32 page = 0; page < span; page += 2) to.pages(line, page, span);
        }
    }
}

// ---- linears ----------------------------------------------------------------------------------

DEVICE void join() { asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory"); }

// The matrix instruction takes 16 rows and 8 columns. Here the second eight rows are later columns of the same eight
// weight rows, so that the 16 bytes a lane loads are its operand without rearrangement: pairs 0 and 2 of a lane's
// eight belong to row g, pairs 1 and 3 to row g + 8. The two need different parts of x: up to four rows of x take two
// columns each, one for either part; more rows take two instructions.
#define SPLIT (ROWS <= 4)
struct Piece {
    u32 x[SPLIT ? 2 : 4];
};
struct Tile {
    float c[2][4];
};

// Writes the lane's four values of each row to where `piece` reads them: of eight, pairs 0, 2, 1, 3.
DEVICE void lay_down(u8* slice, const uint2 (&x)[ROWS], const Me& me) {
    __syncwarp();
    u32* to = (u32*)(slice + me.lane / 2 * 16 + me.lane % 2 * 4);
#pragma unroll
    for (int r = 0; r < ROWS; r++) to[r * (X_PITCH / 4)] = x[r].x, to[r * (X_PITCH / 4) + 2] = x[r].y;
    __syncwarp();
}
// Columns h · 32 … of the slice, in the layout of the matrix instructions.
DEVICE Piece piece(const u8* slice, u32 h, const Me& me) {
    Piece p;
    if (SPLIT) {
        const uint2 v = *(const uint2*)(slice + min(me.g / 2, ROWS - 1u) * X_PITCH + h * 64 + me.j * 16 + me.g % 2 * 8);
        p.x[0] = v.x, p.x[1] = v.y;
    } else {
        const uint4 v = *(const uint4*)(slice + min(me.g, ROWS - 1u) * X_PITCH + h * 64 + me.j * 16);
        p.x[0] = v.x, p.x[1] = v.y, p.x[SPLIT ? 0 : 2] = v.z, p.x[SPLIT ? 0 : 3] = v.w;
    }
    return p;
}
DEVICE void clear(Tile& tile) {
#pragma unroll
    for (int i = 0; i < 8; i++) tile.c[i / 4][i % 4] = 0.0f;
}
DEVICE void multiply(Tile& tile, const uint4& w, const Piece& p, int h) {
    mma_16x8x16<BF16>(tile.c[SPLIT ? h % 2 : 0], w.x, w.y, w.z, w.w, p.x[0], p.x[1]);
    if (!SPLIT) mma_16x8x16<BF16>(tile.c[1], w.x, w.y, w.z, w.w, p.x[SPLIT ? 0 : 2], p.x[SPLIT ? 0 : 3]);
}

// Writes a warp's sums of eight columns to partial[warp][row][column].
DEVICE void put(float* partial, u32 column, const Tile& tile, const Me& me) {
    const float(&a)[4] = tile.c[0], (&b)[4] = tile.c[1];
    if (SPLIT) {
        if (me.j < ROWS) partial[(me.warp * ROWS + me.j) * WIDE + column + me.g] = a[0] + a[3] + (b[0] + b[3]);
    } else {
        float* to = partial + (me.warp * ROWS + 2 * me.j) * WIDE + column + me.g;
        if (2 * me.j < ROWS) to[0] = a[0] + b[2];
        if (2 * me.j + 1 < ROWS) to[WIDE] = a[1] + b[3];
    }
}
DEVICE float total(const float* partial, u32 row, u32 column) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += partial[(w * ROWS + row) * WIDE + column];
    return sum;
}

// A warp's sums of squares of every row. Many rows are added up together; each step halves the rows of a lane.
DEVICE void add_squares(float (&squares)[8][WARPS], const float (&sums)[ROWS], const Me& me) {
#if ROWS <= 2
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float sum = warp_sum(sums[r]);
        if (me.lane == 0) squares[r][me.warp] = sum;
    }
#else
    float v[8];
#pragma unroll
    for (int r = 0; r < 8; r++) v[r] = r < ROWS ? sums[r < ROWS ? r : 0] : 0.0f;
#pragma unroll
    for (int step = 4; step; step >>= 1) {
        const bool high = me.lane & 4 * step;
#pragma unroll
        for (int i = 0; i < step; i++) {
            const float sent = high ? v[i] : v[i + step], kept = high ? v[i + step] : v[i];
            v[i] = kept + __shfl_xor_sync(FULL, sent, 4 * step);
        }
    }
    v[0] += __shfl_xor_sync(FULL, v[0], 2);
    v[0] += __shfl_xor_sync(FULL, v[0], 1);
    if (me.j == 0) squares[me.g][me.warp] = v[0];
#endif
}

// Two neighbouring weights of a norm.
struct Pair {
    u32 a, b;
    DEVICE float low() const { return NT == F32 ? __uint_as_float(a) : low_half<BF16>(a); }
    DEVICE float high() const { return NT == F32 ? __uint_as_float(b) : high_half<BF16>(a); }
};
DEVICE Pair load_pair(const u8* norm, u32 i) {
    Pair p;
    if (NT == F32) {
        const uint2 v = *(const uint2*)(norm + i * 4);
        p.a = v.x, p.b = v.y;
    } else
        p.a = *(const u32*)(norm + i * 2), p.b = 0;
    return p;
}

// Four values of the residual stream: f32 if there are registers for it, else bf16, as separate nodes would store it.
struct Stream {
    u32 words[ROWS <= 4 ? 4 : 2];

    DEVICE void get(float (&v)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (ROWS <= 4) v[i] = __uint_as_float(words[ROWS <= 4 ? i : 0]);
            else v[i] = i % 2 ? high_half<BF16>(words[i / 2]) : low_half<BF16>(words[i / 2]);
    }
    template <bool FIRST> DEVICE void add(uint2 delta) {
        float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (!FIRST) get(v);
        v[0] += low_half<BF16>(delta.x), v[1] += high_half<BF16>(delta.x);
        v[2] += low_half<BF16>(delta.y), v[3] += high_half<BF16>(delta.y);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (ROWS <= 4) words[ROWS <= 4 ? i : 0] = __float_as_uint(v[i]);
            else if (i % 2) words[i / 2] = pack_bf16(v[i - 1], v[i]);
    }
};

DEVICE float row_scale(const float (&squares)[8][WARPS], u32 row, float eps) {
    const float4 a = *(const float4*)&squares[row][0], b = *(const float4*)&squares[row][4];
    return rsqrtf((a.x + a.y + a.z + a.w + b.x + b.y + b.z + b.w) * (1.0f / H) + eps);
}

// For very negative v the exponential is infinite and the quotient zero, as it should be.
DEVICE float silu(float v) { return v * __fdividef(1.0f, 1.0f + __expf(-v)); }

#include "persistent_attention.cuh"

// ---- the kernel -------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, 1)
persistent(const __grid_constant__ Table table, const __grid_constant__ Map map, u16* x, u64* exchange, const u32* row_seat,
           const u32* kv_len, const u32* page_table, const float* rope, u32 words_in_all, u32 pages_per_seat, u32 x_stride,
           u32 rope_stride, u32 max_position, float scale, float eps1, float eps2, float q_eps, float k_eps) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ u8 unaligned[];
    __shared__ Shared s;
    u8* memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    // Two buffers take turns, so that a phase can write while the previous one is still read.
    float* partials = (float*)(memory + STAGES * STAGE_BYTES);
    const Me me = {__shfl_sync(FULL, threadIdx.x / 32, 0), threadIdx.x % 32, threadIdx.x % 32 / 4, threadIdx.x % 4};

    for (u32 i = threadIdx.x; i < LAYERS * (sizeof(Layer) / 8); i += THREADS)
        ((u64*)s.layers)[i] = ((const u64*)&table)[i];
    for (u32 i = threadIdx.x; i < 8 * (D + 8) / 2; i += THREADS) ((u32*)s.queries)[i] = 0;
    {
        Unit unit = plan(s, kv_len);
        if (unit.first <= unit.last) {
            unit.pages = page_table + (u64)__ldcg(row_seat + unit.row) * pages_per_seat;
            for (u32 i = threadIdx.x; i < min(unit.last + 1 - unit.first, HELD_PAGES); i += THREADS)
                s.pages[i] = __ldcg(unit.pages + unit.first + i);
            const float* at = rope + (u64)min(unit.length - 1, max_position - 1) * rope_stride;
            for (u32 i = threadIdx.x; i < D; i += THREADS) s.rope[i] = at[i];
        }
        if (threadIdx.x == 0) {
            s.unit = unit;
            for (u32 i = 0; i < STAGES; i++) {
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&s.full[i])) : "memory");
                asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&s.empty[i])), "n"(WARPS * 32) : "memory");
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            asm volatile("fence.proxy.async;" ::: "memory");
        }
    }
    __syncthreads();
    let_successor_start();
    if (me.warp == WARPS) {
        fetch_all(s, &map, shared_address(memory), me.lane);
        wait_for_predecessor();
        return;
    }
    const u32 span = s.unit.first <= s.unit.last ? s.unit.last + 1 - s.unit.first : 0;
    const u32 heads = span ? G + (s.unit.last == (s.unit.length - 1) / PAGE ? 2 : 0) : 0; // to prepare, a warp each
    const u32 column = me.warp * 128 + me.lane * 4, copy = blockIdx.x % COPIES;
    const bool has_slice = column < H, has_tile = blockIdx.x < H / 8;
    u8* slice = memory + STAGES * STAGE_BYTES + 2 * PARTIAL * 4 + me.warp * (ROWS * X_PITCH);
    // The lane's part of a row of weights.
    const u32 offset = me.g * PITCH + me.warp * 256 + me.j * 16;
    Place at = {0, 0};
    auto full = [&](const Place& p) { return shared_address(&s.full[p.slot]); };
    auto stage = [&](const Place& p) { return memory + p.slot * STAGE_BYTES; };
    auto empty = [&](const Place& p) { return shared_address(&s.empty[p.slot]); };
    auto free_stage = [&] {
        arrive(empty(at));
        at.next();
    };
    wait_for_predecessor();

    const u32 generation = (u32)peek(exchange);
    Stream residual[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        residual[r].add<true>(has_slice ? __ldcg((const uint2*)(x + (u64)r * x_stride + column)) : make_uint2(0, 0));
    u32 tag = generation * LAYERS + 1, turn = 0;
#pragma unroll 1
    for (u32 half = 0; half < 2 * LAYERS; half++) {
        const bool second = half % 2;
        const Layer& here = s.layers[half / 2];
        if (half && !second) tag++;
        // The norms' weights are loaded while the phase waits.
        const Pair n = load_pair(second ? here.norm2 : here.norm1, has_slice ? column : 0);
        const Pair m = load_pair(second ? here.norm2 : here.norm1, has_slice ? column + 2 : 0);
        Pair low = {NT == F32 ? 0x3f800000u : 0x3f803f80u, 0x3f800000u}, high = low; // ones
        if (!second && me.warp < min(heads, G + 1u) && (me.warp < G ? QN : KN) && me.lane < D / 4) {
            low = load_pair(me.warp < G ? here.q_norm : here.k_norm, 2 * me.lane);
            high = load_pair(me.warp < G ? here.q_norm : here.k_norm, 2 * me.lane + D / 2);
        }
        // qkv, or gate and up: norm · linear
        {
            uint2 in[1][ROWS];
            if (half) {
                const u64* from = exchange + (second ? AT_O : AT_DOWN) + copy * (ROWS * H / 2);
                receive<H>(from, second ? tag : tag - 1, me, in);
#pragma unroll
                for (int r = 0; r < ROWS; r++) residual[r].add<false>(in[0][r]);
            }
            float sums[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float v[4];
                residual[r].get(v);
                in[0][r] = make_uint2(pack_bf16(v[0] * n.low(), v[1] * n.high()), pack_bf16(v[2] * m.low(), v[3] * m.high()));
                sums[r] = v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3];
            }
            lay_down(slice, in[0], me);
            Piece b[4];
#pragma unroll
            for (int h = 0; h < 4; h++) b[h] = piece(slice, h, me);
            float* partial = partials + turn * PARTIAL;
            const u32 tile = first_tile(2 * second, blockIdx.x), tiles = first_tile(2 * second, blockIdx.x + 1) - tile;
#pragma unroll 1
            for (u32 t = 0; t < tiles; t += 2) {
                Tile c[2];
                clear(c[0]), clear(c[1]);
                const Place first = at;
                if (t + 1 < tiles) at.next();
                wait_for_both(full(first), first.parity, full(at), at.parity);
                const u8 *one = stage(first) + offset, *other = stage(at) + offset;
#pragma unroll
                for (int h = 0; h < 4; h++) {
                    if (H % CHUNK && me.warp * 128 + h * 32 >= H) break;
                    multiply(c[0], *(const uint4*)(one + h * 64), b[h], h);
                    multiply(c[1], *(const uint4*)(other + h * 64), b[h], h);
                }
                put(partial, t * 8, c[0], me);
                if (t + 1 < tiles) put(partial, t * 8 + 8, c[1], me);
                if (first.slot != at.slot) arrive(empty(first));
                free_stage();
            }
            add_squares(s.squares[second], sums, me);
            join();
            // A thread adds up a column; two columns, or two of gate and two of up, make a word.
            const u32 columns = (second ? TILES(2 * I) : TILES(QKV)) * 8;
#pragma unroll 1
            for (u32 i = threadIdx.x; i - me.lane < ROWS * columns; i += WARPS * 32) {
                const u32 row = second ? i / (TILES(2 * I) * 8) : i / (TILES(QKV) * 8), c = i - row * columns;
                const bool live = row < ROWS && c / 8 < tiles;
                float v = live ? total(partial, row, c) * row_scale(s.squares[second], row, second ? eps2 : eps1) : 0.0f;
                float next = __shfl_down_sync(FULL, v, 1);
                if (second) v = silu(v) * next, next = __shfl_down_sync(FULL, v, 2);
                const u32 data = pack_bf16(v, next);
                if (!live) continue;
                if (second) {
                    if (c % 4 == 0) send_copies<ROWS * I / 2>(exchange + AT_ACT + row * (I / 2) + tile * 2 + c / 4, data, tag);
                } else if (c % 2 == 0)
                    send(exchange + AT_QKV + row * (QKV / 2) + tile * 4 + c / 2, data, tag);
            }
            turn ^= 1;
        }
        if (!second && span) {
#if NARROW
            const float scale_of_k = __ldg(here.k_scale + s.unit.head), scale_of_v = __ldg(here.v_scale + s.unit.head);
#else
            const float scale_of_k = 1.0f, scale_of_v = 1.0f;
#endif
            if (me.warp < heads) prepare(s, exchange, tag, here.kv, low, high, me.warp < G ? q_eps : k_eps, NARROW ? 1.0f / (me.warp == G ? scale_of_k : scale_of_v) : 1.0f, me);
            join();
            Sums sums;
            clear(sums);
            // A warp takes a stage, which is two pages, and frees it for all warps, because the others do not read
            // it.
            const u32 stages = (span + 1) / 2;
#pragma unroll 1
            for (u32 i = me.warp; i < stages + me.warp; i += WARPS) {
                // The parity of a stage's barrier is unambiguous only once the stages before it have been filled.
                if (i >= WARPS) join();
                if (i >= stages) continue;
                const Place own = at.after(i);
                wait_for(full(own), own.parity);
                attend(s, stage(own), s.unit.first + 2 * i, NARROW ? scale * scale_of_k * 1.44269504088896f : scale * 1.44269504088896f, sums, me);
                arrive(empty(at.after(i)), WARPS);
            }
            at = at.after(stages);
            merge(s, partials + turn * PARTIAL, sums, exchange, tag, scale_of_v, me);
            turn ^= 1;
        }
        // output linear, or down: added to the residual stream
        if (has_tile) {
            uint2 in[MOST_CHUNKS][ROWS];
            if (second) receive<I>(exchange + AT_ACT + copy * (ROWS * I / 2), tag, me, in);
            else gather(s, exchange + copy * ATT_WORDS, exchange + copy * LSE_WORDS, tag, me, in);
            Tile c;
            clear(c);
#pragma unroll
            for (int chunk = 0; chunk < MOST_CHUNKS; chunk++)
                if (chunk < (second ? CHUNKS(I) : CHUNKS(A))) {
                    lay_down(slice, in[chunk], me);
                    wait_for(full(at), at.parity);
                    const u8* from = stage(at) + offset;
#pragma unroll
                    for (int h = 0; h < 4; h++) {
                        if ((A % CHUNK || I % CHUNK) && chunk * CHUNK + me.warp * 128 + h * 32 >= (second ? I : A)) break;
                        multiply(c, *(const uint4*)(from + h * 64), piece(slice, h, me), h);
                    }
                    free_stage();
                }
            float* partial = partials + turn * PARTIAL;
            put(partial, 0, c, me);
            join();
            if (threadIdx.x < (ROWS * 8 + 31) / 32 * 32) {
                const u32 row = min(threadIdx.x / 8, ROWS - 1u), i = threadIdx.x % 8;
                const float v = total(partial, row, i), n = __shfl_down_sync(FULL, v, 1);
                u64* to = exchange + (second ? AT_DOWN : AT_O) + row * (H / 2) + blockIdx.x * 4 + i / 2;
                if (threadIdx.x < ROWS * 8 && i % 2 == 0) send_copies<ROWS * H / 2>(to, pack_bf16(v, n), tag);
            }
            turn ^= 1;
        }
    }
    // One block per row collects the output of the last layer.
    if (blockIdx.x < ROWS) {
        uint2 in[1][ROWS];
        receive<H>(exchange + AT_DOWN + copy * (ROWS * H / 2), tag, me, in);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (has_slice && r == blockIdx.x) {
                float v[4];
                residual[r].add<false>(in[0][r]);
                residual[r].get(v);
                *(uint2*)(x + (u64)r * x_stride + column) = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
            }
    }
    join();
    if (threadIdx.x == 0) s.word = add_acquire_release((u32*)(exchange + 16), 1);
    join();
    if (s.word != BLOCKS - 1) return;
    // The last block to arrive: all reads are done.
    const bool again = generation + 1 >= GENERATIONS;
    if (again)
        for (u32 i = AT_QKV + threadIdx.x; i < words_in_all; i += WARPS * 32) exchange[i] = 0;
    if (threadIdx.x == 0) exchange[0] = again ? 0 : generation + 1, exchange[16] = 0;
#endif
}
