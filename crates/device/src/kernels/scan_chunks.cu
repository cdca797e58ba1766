// scan.cu for rows of many tokens, by matrix instructions: CHUNK tokens at a time, from what scan_prepare.cu made of them.
// With S the matrix before a chunk, G as in scan_chunks.cuh:
//   R_t = β_t (v_t − exp(G_t) k_t·S), D = (I + A)^-1 R for the delta rule, else R_t = β_t v_t = D_t;
//   y_t = exp(G_t) q_t·S + Σ_{s<=t} exp(G_t − G_s) q_t·k_s D_s;  S ← exp(G_last) S + Σ_s exp(G_last − G_s) k_s ⊗ D_s.
// All of it is computed transposed: a warp has 16 columns of the matrix as rows of its sums, in fp32 for all of a row's tokens, so
// that sums become the first operand of the next product in the registers where they are, and warps need nothing of each other.
// Operands are rounded to bf16, sums are fp32. Keys and queries are used as they are in x: lengths are in factors.
// A block has WARPS times 16 columns. APART: as many warps beside them copy and compute the results of the chunk before, which shortens
// what tokens wait for from chunk to chunk; without, the warps copy themselves. VALUE, SKIP, V_AT and the rest as in scan.cu; x and y are bf16, ST is the type of skip.
#include "scan_chunks.cuh"

#define COLUMNS (16 * WARPS)
#define V_ROW (COLUMNS + 8)
#define TILES (KEY / 8)
// Threads that copy, the last ones of a block, and all threads; chunks in shared memory.
#define HANDS (32 * WARPS)
#define THREADS (APART ? 2 * HANDS : HANDS)
#define STAGES (APART ? 3 : 2)

struct Stage {
    u16 q[CHUNK][ROW], k[CHUNK][ROW], v[CHUNK][V_ROW];
    __align__(16) Record record;
};

// Sums of 16 columns by CHUNK tokens.
typedef float Sums[CHUNK / 8][4];
typedef u32 Operand[CHUNK / 16][4];

// Two tiles of sums as one tile of a first operand.
DEVICE void pack(u32 (&to)[4], const float (&a)[4], const float (&b)[4]) {
    to[0] = pack_bf16(a[0], a[1]);
    to[1] = pack_bf16(a[2], a[3]);
    to[2] = pack_bf16(b[0], b[1]);
    to[3] = pack_bf16(b[2], b[3]);
}
DEVICE void pack(Operand& to, const Sums& of) {
#pragma unroll
    for (int i = 0; i < CHUNK / 16; i++) pack(to[i], of[2 * i], of[2 * i + 1]);
}
DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_16x8x16<BF16>(c, a[0], a[1], a[2], a[3], b0, b1); }
DEVICE void clear(Sums& of) {
#pragma unroll
    for (int i = 0; i < CHUNK / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) of[i][e] = 0.0f;
}
// Sums of a token times its factor.
DEVICE void weigh(Sums& of, const float* factors, u32 lane) {
#pragma unroll
    for (int i = 0; i < CHUNK / 8; i++) {
        const float2 f = *(const float2*)&factors[8 * i + lane % 4 * 2];
        of[i][0] *= f.x, of[i][1] *= f.y, of[i][2] *= f.x, of[i][3] *= f.y;
    }
}
// Adds a product with a lower triangular matrix.
DEVICE void triangular(Sums& to, const Operand& of, const uint4 (&blocks)[BLOCKS][32], u32 lane) {
#pragma unroll
    for (int s = 0; s < CHUNK / 16; s++) {
#pragma unroll
        for (int t = s; t < CHUNK / 16; t++) {
            const uint4 b = blocks[block_of(t, s)][lane];
            multiply(to[2 * t], of[s], b.x, b.y);
            multiply(to[2 * t + 1], of[s], b.z, b.w);
        }
    }
}
// A warp's values, transposed, as sums are: eight tokens and the next eight.
DEVICE void values(float (&a)[4], float (&b)[4], const Stage& stage, int pair, u32 own, u32 lane) {
    u32 v[4];
    load_matrices_transposed(v, quad<false>(stage.v[0], V_ROW, 16 * pair, own, lane));
    a[0] = low_half<BF16>(v[0]), a[1] = high_half<BF16>(v[0]), a[2] = low_half<BF16>(v[1]), a[3] = high_half<BF16>(v[1]);
    b[0] = low_half<BF16>(v[2]), b[1] = high_half<BF16>(v[2]), b[2] = low_half<BF16>(v[3]), b[3] = high_half<BF16>(v[3]);
}

// The matrix before a chunk and what the chunk's tokens add, as operands.
struct Handed {
    uint4 matrix[KEY / 16][32], change[CHUNK / 16][32];
};

// Products of a chunk's queries with 16 rows of the matrix.
DEVICE void ask(Sums& result, const u32 (&of)[4], const Stage& stage, int c, u32 lane) {
#pragma unroll
    for (int p = 0; p < CHUNK / 16; p++) {
        u32 b[4];
        load_matrices(b, quad<false>(stage.q[0], ROW, 16 * p, 16 * c, lane));
        multiply(result[2 * p], of, b[0], b[1]);
        multiply(result[2 * p + 1], of, b[2], b[3]);
    }
}

// A chunk's results, from products of its queries with the matrix and what its tokens add.
DEVICE void finish(Sums& result, const Operand& change, const Stage& stage, u16* y, u32 y_stride, u32 there, float through, u32 own, u32 lane) {
    weigh(result, stage.record.query, lane);
    triangular(result, change, stage.record.mix, lane);
    if (SKIP) {
#pragma unroll
        for (int p = 0; p < CHUNK / 16; p++) {
            float v[2][4];
            values(v[0], v[1], stage, p, own, lane);
#pragma unroll
            for (int e = 0; e < 8; e++) result[2 * p + e / 4][e % 4] = fmaf(through, v[e / 4][e % 4], result[2 * p + e / 4][e % 4]);
        }
    }
#pragma unroll
    for (int i = 0; i < CHUNK / 8; i++) {
        const u32 low = transpose_8x8(pack_bf16(result[i][0], result[i][1])), high = transpose_8x8(pack_bf16(result[i][2], result[i][3]));
        const u32 t = 8 * i + lane / 4;
        u32* const to = (u32*)(y + (u64)t * y_stride + lane % 4 * 2);
        if (t < there) to[0] = low, to[4] = high;
    }
}

// Results by a warp beside the one that has the matrix.
DEVICE void results(const Stage& stage, const Handed& from, u16* y, u32 y_stride, u32 there, float through, bool zero, u32 own, u32 lane) {
    Sums result;
    clear(result);
    if (!zero) {
#pragma unroll
        for (int c = 0; c < KEY / 16; c++) {
            const uint4 m = from.matrix[c][lane];
            const u32 of[4] = {m.x, m.y, m.z, m.w};
            ask(result, of, stage, c, lane);
        }
    }
    Operand change;
#pragma unroll
    for (int i = 0; i < CHUNK / 16; i++) {
        const uint4 m = from.change[i][lane];
        change[i][0] = m.x, change[i][1] = m.y, change[i][2] = m.z, change[i][3] = m.w;
    }
    finish(result, change, stage, y, y_stride, there, through, own, lane);
}

// A chunk: the matrix after it, and its results, or what makes them. The matrix before it may be zero.
DEVICE void chunk(float (&s)[TILES][4], const Stage& stage, Handed* to, u16* y, u32 y_stride, u32 there, float through, bool zero, u32 own, u32 lane) {
    const Record& record = stage.record;
    Sums known, result, change;
    clear(known);
    clear(result);
    if (!zero) {
#pragma unroll
        for (int c = 0; c < KEY / 16; c++) {
            u32 of[4], b[4];
            pack(of, s[2 * c], s[2 * c + 1]);
            if (APART) to->matrix[c][lane] = make_uint4(of[0], of[1], of[2], of[3]);
#pragma unroll
            for (int p = 0; p < CHUNK / 16; p++) {
                if (!DELTA) continue;
                load_matrices(b, quad<false>(stage.k[0], ROW, 16 * p, 16 * c, lane));
                multiply(known[2 * p], of, b[0], b[1]);
                multiply(known[2 * p + 1], of, b[2], b[3]);
            }
            if (!APART) ask(result, of, stage, c, lane);
        }
    }
#pragma unroll
    for (int p = 0; p < CHUNK / 16; p++) values(change[2 * p], change[2 * p + 1], stage, p, own, lane);
    weigh(change, record.value, lane);
    Operand of;
#if DELTA
    weigh(known, record.known, lane);
#pragma unroll
    for (int i = 0; i < CHUNK / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) change[i][e] -= known[i][e];
    pack(of, change);
    clear(change);
    triangular(change, of, record.inverse, lane);
#endif
    pack(of, change);
    if (APART) {
#pragma unroll
        for (int i = 0; i < CHUNK / 16; i++) to->change[i][lane] = make_uint4(of[i][0], of[i][1], of[i][2], of[i][3]);
    } else {
        finish(result, of, stage, y, y_stride, there, through, own, lane);
    }
    weigh(change, record.late, lane);
    pack(of, change);
    const float whole = record.whole[0];
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[i][e] *= whole;
#pragma unroll
    for (int t = 0; t < CHUNK / 16; t++) {
#pragma unroll
        for (int p = 0; p < KEY / 16; p++) {
            u32 b[4];
            load_matrices_transposed(b, quad<true>(stage.k[0], ROW, 16 * t, 16 * p, lane));
            multiply(s[2 * p], of[t], b[0], b[1]);
            multiply(s[2 * p + 1], of[t], b[2], b[3]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
scan_chunks(const u16* x, const Record* records, const void* skip, float* carry, u16* y, const u32* row_seat, const u32* q_start,
            const u32* kv_len, const u32* row_replay, u32 seats, u32 context, u32 x_stride, u32 carry_stride, u32 y_stride) {
    extern __shared__ __align__(16) Stage stages[];
    const u32 head = blockIdx.y, row = blockIdx.z, thread = threadIdx.x, warp = thread / 32, lane = thread % 32, own = warp % WARPS * 16;
    const u32 first = blockIdx.x * COLUMNS;
    const bool copies = HANDS == THREADS || warp >= WARPS, computes = warp < WARPS;
    const float through = SKIP ? load1<ST>(skip, head) : 0.0f;
    let_successor_start();
    wait_for_predecessor();
    Fed fed;
    if (!fed.load(row_seat, q_start, kv_len, row_replay, row, seats, context)) return;
    Handed* const handed = (Handed*)(stages + STAGES);
    const auto issue = [&](u32 done) {
        Stage& to = stages[done / CHUNK % STAGES];
        const u32 hand = thread - (THREADS - HANDS), there = min(fed.count - done, (u32)CHUNK);
        const u16* const from = x + (u64)(fed.start + done) * x_stride;
        const Record* const record = records + (u64)(Fed::slot(fed.start, row) + done / CHUNK) * HEADS + head;
        fetch<HANDS>(to.k[0], ROW, from + K_AT + GROUP(head) * KEY, x_stride, KEY, there, hand);
        fetch<HANDS>(to.q[0], ROW, from + Q_AT + GROUP(head) * KEY, x_stride, KEY, there, hand);
        fetch<HANDS>(to.v[0], V_ROW, from + V_AT + head * VALUE + first, x_stride, COLUMNS, there, hand);
        for (u32 i = hand; i < sizeof(Record) / 16; i += HANDS) copy16_async(shared_address((uint4*)&to.record + i), (const uint4*)record + i);
        commit_copies();
    };
    if (copies) issue(0);
    float* const matrix = carry + (u64)fed.seat * carry_stride + (u64)head * KEY * VALUE + first + own + lane / 4;
    // A sequence's first token finds zeros, whatever the seat carried.
    const bool begins = fed.length == fed.count;
    float s[TILES][4];
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[i][e] = begins || !computes ? 0.0f : matrix[(u64)(8 * i + lane % 4 * 2 + e % 2) * VALUE + e / 2 * 8];
    u16* const to = y + (u64)fed.start * y_stride + head * VALUE + first + own;
    const auto handed_by = [&](u32 done) { return handed + done / CHUNK % 2 * WARPS + warp % WARPS; };
#pragma unroll 1
    for (u32 done = 0; done < fed.count; done += CHUNK) {
        if (copies) wait_copies<0>();
        // Also: the chunk before has been read.
        __syncthreads();
        if (copies && done + CHUNK < fed.count) issue(done + CHUNK);
        if (computes) {
            chunk(s, stages[done / CHUNK % STAGES], handed_by(done), to + (u64)done * y_stride, y_stride, fed.count - done, through, begins && done == 0, own, lane);
        } else if (APART && done > 0) {
            const u32 of = done - CHUNK;
            results(stages[of / CHUNK % STAGES], *handed_by(of), to + (u64)of * y_stride, y_stride, CHUNK, through, begins && of == 0, own, lane);
        }
    }
    if (APART) {
        __syncthreads();
        const u32 of = (fed.count - 1) / CHUNK * CHUNK;
        if (!computes) results(stages[of / CHUNK % STAGES], *handed_by(of), to + (u64)of * y_stride, y_stride, fed.count - of, through, begins && of == 0, own, lane);
    }
    if (!computes) return;
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) matrix[(u64)(8 * i + lane % 4 * 2 + e % 2) * VALUE + e / 2 * 8] = s[i][e];
}
