// A layer of experts for one to four tokens as one kernel: norm, router, experts and sum. With so few tokens a layer reads
// only what they chose, and the gaps between kernels take as long as a third of that.
//
// BLOCKS blocks, one per multiprocessor, all resident: eight warps that compute and one that fetches. Every block
// normalises all tokens; it holds eight columns of them in each thread. A block computes the logits of every BLOCKS-th
// expert, from weights that it has read before the wait, and sends them to all (exchange.cuh); every block then chooses for
// itself. What it has to read is known from there on: groups of sixteen rows of gate and up (which lie in turns of eight), then
// all chosen experts' parts of eight rows of down. Down's weights arrive while the activations are exchanged. A
// warp has 256 columns of every 2048 of gate and up, and a row of down.
//
// Words are tagged with a generation, which grows with every launch. A block sends only what depends on all that it has
// received in this launch, and the next launch begins when this one has ended, so no word is overwritten too early.
//
// SHARED > 0: so wide is an MLP that every token goes through besides, GATED: times the sigmoid of the token's product with a row.
// What is read of it does not depend on the choice: it is asked for before the predecessor has ended, and its gate and up, whose
// rows lie in turns of one, are computed for all tokens while the experts are chosen.
//
// H (a multiple of 2048), I (a multiple of 8; sixteen rows of H and eight of I are at most four stages and one), ROWS (≤ 4),
// BLOCKS, STAGES, STAGE_BYTES, FLYING (stages in flight), COPIES, ACT (2 silu·mul, 4 gelu·mul), NT (the norm's type), and what
// route_choose.cuh wants. WEIGHT (weights.cuh): PLAIN, or FP8_BLOCK (gate/up as F8Turns, down as F8Block; I a multiple of 128, TOP
// even): tensor cores add up gate and up then, because widening alone is as much work as the sums of bf16.
#include "exchange.cuh"
#include "experts_plan.cuh"
#include "route_choose.cuh"
#include "weights.cuh"

#define WARPS 8
#define THREADS (WARPS * 32 + 32)
#ifndef STAGE_BYTES
#define STAGE_BYTES (16 * 1024)
#endif
// Bytes of a stage of gate and up.
#define UP_BYTES (16 * 1024)
#ifndef SHARED
#define SHARED 0
#define GATED 0
#endif
// Bytes of a weight; experts whose rows of down are in a stage.
#define WEIGHT_SIZE (FP8 ? 1 : 2)
#define TOGETHER (FP8 ? 2 : 1)
// Pieces of eight columns that a thread has of a row of H, and a lane of a row of I.
#define PIECES (H / 2048)
#define DOWN_PIECES ((I + 255) / 256)
// Rows of gate and up in a stage.
#define UP_ROWS (UP_BYTES / (WEIGHT_SIZE * H))
// Experts whose logits a block computes.
#define OWN ((E + BLOCKS - 1) / BLOCKS)
// Groups of a token; groups whose sums are added up at the same time.
#define UNITS (TOP * (I / 8))
#define BATCH 8
#define TILES (H / 8)
// Units of the shared MLP: eight rows of gate and up for all tokens; units whose sums are added up at the same time. Parts of
// eight rows of its down, a stage each.
#define SHARED_UNITS (SHARED / 4)
#define SHARED_BATCH (BATCH * 2 / ROWS)
#define SHARED_PARTS ((SHARED * 16 + STAGE_BYTES - 1) / STAGE_BYTES)

// The exchange, in words: generation and arrivals, logits, activations.
#define AT_LOGITS 32
#define AT_ACT (AT_LOGITS + COPIES * ROWS * E)
#define ACT_WORDS (ROWS * (TOP * I + SHARED) / 2)
// Where those of the shared MLP are, behind those of the experts of all tokens.
#define SHARED_ACT (ROWS * TOP * I / 2)
// Pairs of words that are a token's activations, and how many of them a thread receives.
#define PAIRS ((TOP * I + SHARED) / 4)
#define RECEIVED ((PAIRS + WARPS * 32 - 1) / (WARPS * 32))

// Blocks of 128 rows of down, for all tokens, that a block has tiles of.
#define SPAN ((ROWS * TILES + BLOCKS - 1) / BLOCKS / 16 + 2)
#define DOWN_SCALES (SPAN * TOP * (I / 128))

struct Shared {
    u64 full[STAGES], empty[STAGES], chosen;
    float squares[ROWS][WARPS], dots[ROWS][OWN + GATED][WARPS];
    float logits[ROWS][E];
    u32 experts[ROWS][TOP];
    float gains[ROWS][TOP];
#if GATED
    float gates[ROWS];
#endif
    __align__(16) float sums[2][WARPS][BATCH * 16 + 4];
    __align__(16) u16 act[TOP * I + SHARED];
    u32 arrived;
#if WEIGHT != PLAIN
    float down_scales[DOWN_SCALES];
#endif
};

DEVICE void join() { asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory"); }

DEVICE float dot8(const uint4& w, const float (&x)[8], float sum) {
    const u32 v[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum = fmaf(low_half<BF16>(v[i]), x[2 * i], sum);
        sum = fmaf(high_half<BF16>(v[i]), x[2 * i + 1], sum);
    }
    return sum;
}
DEVICE void unpack8(const uint4& w, float (&x)[8]) {
    const u32 v[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; i++) x[2 * i] = low_half<BF16>(v[i]), x[2 * i + 1] = high_half<BF16>(v[i]);
}

// The sums over a warp's lanes of sixteen values; lane 2·n has that of value n.
template <int HALF> DEVICE void add_half(float (&v)[16], u32 lane) {
    const bool high = lane & 2 * HALF;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        const float sent = high ? v[i] : v[i + HALF], kept = high ? v[i + HALF] : v[i];
        v[i] = kept + __shfl_xor_sync(FULL, sent, 2 * HALF);
    }
}
// Of eight values: lanes 2·n and 2·n + 16 have that of value n.
DEVICE float add_lanes8(float (&v)[16], u32 lane) {
    add_half<4>(v, lane), add_half<2>(v, lane), add_half<1>(v, lane);
    v[0] += __shfl_xor_sync(FULL, v[0], 16);
    return v[0] + __shfl_xor_sync(FULL, v[0], 1);
}
DEVICE float add_lanes(float (&v)[16], u32 lane) {
    add_half<8>(v, lane), add_half<4>(v, lane), add_half<2>(v, lane), add_half<1>(v, lane);
    return v[0] + __shfl_xor_sync(FULL, v[0], 1);
}

// Shares of `count` things, about the same for each block.
DEVICE u32 share(u32 count, u32 block) { return count * block / BLOCKS; }

#if WEIGHT == PLAIN
typedef u16 Weight;
#define SCALES_PARAMETERS
#else
typedef u8 Weight;
#define SCALES_PARAMETERS , const float *up_scales, const float *down_scales
#include "experts_layer_scaled.cuh"
#endif

struct Weights {
    const Weight *gate_up, *down;
#if SHARED
    const Weight *shared_up, *shared_down;
#endif
};
#if SHARED
#define SHARED_PARAMETERS , const u16 *shared_up, const u16 *shared_down, const u16 *shared_gate
static_assert(WEIGHT == PLAIN && SHARED % (8 * SHARED_PARTS) == 0 && 8 % UP_ROWS == 0, "a shared MLP that this kernel does not take");
#else
#define SHARED_PARAMETERS
#endif

// Everything that this block reads, in order.
DEVICE void fetch(Shared& s, u32 ring, u32 rows, const Weights& w) {
    Place at = {0, 0}, landed = {0, 0};
    u32 flying = 0;
    auto room = [&](u32 bytes) {
        const u32 full = shared_address(&s.full[at.slot]);
        wait_for(shared_address(&s.empty[at.slot]), at.parity ^ 1);
        if (flying < FLYING) flying++;
        else wait_for(shared_address(&s.full[landed.slot]), landed.parity), landed.next();
        expect(full, bytes);
        return full;
    };
    auto copy = [&](const Weight* from, u32 bytes) {
        const u32 full = room(bytes);
        copy_bulk(ring + at.slot * STAGE_BYTES, from, bytes, full);
        at.next();
    };
    const u32 block = blockIdx.x;
#if SHARED
#pragma unroll 1
    for (u32 unit = share(SHARED_UNITS, block); unit < share(SHARED_UNITS, block + 1); unit++)
#pragma unroll 1
        for (u32 i = 0; i < 8; i += UP_ROWS) copy(w.shared_up + ((u64)unit * 8 + i) * H, UP_ROWS * H * 2);
    wait_for_predecessor();
    wait_for(shared_address(&s.chosen), 0);
#endif
#pragma unroll 1
    for (u32 group = share(rows * UNITS, block); group < share(rows * UNITS, block + 1); group++) {
        const u32 slot = group / (I / 8), expert = s.experts[slot / TOP][slot % TOP];
        const Weight* from = w.gate_up + ((u64)expert * (2 * I) + group % (I / 8) * 16) * H;
#pragma unroll 1
        for (u32 i = 0; i < 16; i += UP_ROWS) copy(from + i * H, UP_ROWS * H * WEIGHT_SIZE);
    }
#pragma unroll 1
    for (u32 tile = share(rows * TILES, block); tile < share(rows * TILES, block + 1); tile++) {
#if SHARED
        const u16* from = w.shared_down + (u64)(tile % TILES * 8) * SHARED;
        if (SHARED_PARTS == 1) copy(from, 8 * SHARED * 2);
        else
#pragma unroll 1
            for (u32 part = 0; part < SHARED_PARTS; part++) {
                const u32 each = SHARED / SHARED_PARTS, full = room(8 * each * 2);
#pragma unroll
                for (u32 r = 0; r < 8; r++) copy_bulk(ring + at.slot * STAGE_BYTES + r * each * 2, from + r * SHARED + part * each, each * 2, full);
                at.next();
            }
#endif
#pragma unroll 1
        for (u32 k = 0; k < TOP; k += TOGETHER) {
            auto rows_of = [&](u32 k) { return w.down + ((u64)s.experts[tile / TILES][k] * H + tile % TILES * 8) * I; };
            if (TOGETHER == 1) {
                copy(rows_of(k), 8 * I * WEIGHT_SIZE);
                continue;
            }
            const u32 full = room(TOGETHER * 8 * I * WEIGHT_SIZE);
#pragma unroll
            for (int t = 0; t < TOGETHER; t++) copy_bulk(ring + at.slot * STAGE_BYTES + t * (8 * I * WEIGHT_SIZE), rows_of(k + t), 8 * I * WEIGHT_SIZE, full);
            at.next();
        }
    }
}

// Receives the logits of row `warp` and chooses.
DEVICE void choose_row(Shared& s, const u64* exchange, u32 tag, const void* bias, float scale, u32* choice, u32 row, u32 lane) {
    const u64* from = exchange + AT_LOGITS + (blockIdx.x % COPIES * ROWS + row) * E + lane;
    Patience patience;
    for (bool all = false; !all; patience.lose()) {
        u64 v[SLOTS];
        all = true;
#pragma unroll
        for (int i = 0; i < SLOTS; i++) v[i] = E % 32 == 0 || i * 32 + lane < E ? peek(from + i * 32) : (u64)tag << 32;
#pragma unroll
        for (int i = 0; i < SLOTS; i++) {
            all &= fresh(v[i], tag);
            if (E % 32 == 0 || i * 32 + lane < E) s.logits[row][i * 32 + lane] = logit_of(__uint_as_float((u32)v[i]), bias, i * 32 + lane);
        }
        all = __all_sync(FULL, all);
    }
    __syncwarp();
    u32 expert;
    float gain;
    choose(s.logits[row], bias, scale, expert, gain);
    if (lane >= TOP) return;
    s.experts[row][lane] = expert, s.gains[row][lane] = gain;
    if (blockIdx.x == 0) choice[row * 2 * TOP + lane] = expert, choice[row * 2 * TOP + TOP + lane] = __float_as_uint(gain);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
experts_layer(const u16* x, const void* norm, const u16* router, const void* bias, const Weight* gate_up, const Weight* down,
              const u16* residual, u16* y, u32* choice, u64* exchange, const u32* live, u32 words_in_all, u32 x_stride,
              u32 residual_stride, u32 y_stride, float eps, float scale, u64* load SCALES_PARAMETERS SHARED_PARAMETERS) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) u8 memory[];
    __shared__ Shared s;
    const u32 warp = __shfl_sync(FULL, threadIdx.x / 32, 0), lane = threadIdx.x % 32, column = threadIdx.x * 8;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&s.full[i])) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&s.empty[i])), "n"(WARPS * 32) : "memory");
        }
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&s.chosen)), "n"(ROWS * TOP) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
    }
    __syncthreads();
    // Written by the prologue, which lets its successors start only at its end.
    const u32 rows = live ? min(__ldcg(live), (u32)ROWS) : ROWS;
    if (warp == WARPS) {
        let_successor_start();
#if SHARED
        if (lane == 0) fetch(s, shared_address(memory), rows, {gate_up, down, shared_up, shared_down});
#else
        wait_for_predecessor();
        wait_for(shared_address(&s.chosen), 0);
        if (lane == 0) fetch(s, shared_address(memory), rows, {gate_up, down});
#endif
        return;
    }
    uint4 held[OWN + GATED][PIECES];
    float scales[PIECES][8];
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        load8<NT>(norm, p * 2048 + column, scales[p]);
#pragma unroll
        for (int o = 0; o < OWN; o++) {
            const u32 expert = blockIdx.x + o * BLOCKS;
            held[o][p] = *(const uint4*)(router + (u64)min(expert, E - 1u) * H + p * 2048 + column);
        }
#if GATED
        held[OWN][p] = *(const uint4*)(shared_gate + p * 2048 + column);
#endif
    }
    let_successor_start();
    wait_for_predecessor();

    const u32 tag = (u32)peek(exchange) + 1;
    // The norm: tokens in bf16, as the members of this kernel store them.
    uint4 tokens[ROWS][PIECES];
    float sums[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        sums[r] = 0.0f;
#pragma unroll
        for (int p = 0; p < PIECES; p++) tokens[r][p] = __ldcg((const uint4*)(x + (u64)r * x_stride + p * 2048 + column));
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            float v[8];
            unpack8(tokens[r][p], v);
#pragma unroll
            for (int i = 0; i < 8; i++) sums[r] += v[i] * v[i];
        }
        sums[r] = warp_sum(sums[r]);
        if (lane == 0) s.squares[r][warp] = sums[r];
    }
    join();
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += s.squares[r][w];
        const float by = rsqrtf(total * (1.0f / H) + eps);
        float dots[OWN + GATED];
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            float v[8];
            unpack8(tokens[r][p], v);
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] *= by * scales[p][i];
            tokens[r][p] = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
            unpack8(tokens[r][p], v);
#pragma unroll
            for (int o = 0; o < OWN + GATED; o++) dots[o] = dot8(held[o][p], v, p ? dots[o] : 0.0f);
        }
#pragma unroll
        for (int o = 0; o < OWN + GATED; o++) {
            dots[o] = warp_sum(dots[o]);
            if (lane == 0) s.dots[r][o][warp] = dots[o];
        }
    }
    join();
    if (threadIdx.x < ROWS * OWN) {
        const u32 row = threadIdx.x / OWN, expert = blockIdx.x + threadIdx.x % OWN * BLOCKS;
        float logit = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) logit += s.dots[row][threadIdx.x % OWN][w];
        if (expert < E) send_copies<ROWS * E>(exchange + AT_LOGITS + row * E + expert, __float_as_uint(logit), tag);
    }
#if GATED
    // Every block has the row, so this is not exchanged.
    if (threadIdx.x >= WARPS * 32 - ROWS) {
        const u32 row = threadIdx.x - (WARPS * 32 - ROWS);
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += s.dots[row][OWN][w];
        s.gates[row] = 1.0f / (1.0f + expf(-sum));
    }
#endif
#if WEIGHT != PLAIN
    Operand operands[ROWS][PIECES];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int p = 0; p < PIECES; p++) operands[r][p].make(tokens[r][p], lane);
#endif
    if (warp < rows) choose_row(s, exchange, tag, bias, scale, choice, warp, lane);
    // The warp that fetches waits for every lane that wrote.
    if (warp < ROWS && lane < TOP) arrive(shared_address(&s.chosen));

    Place at = {0, 0};
    auto next_stage = [&] {
        wait_for(shared_address(&s.full[at.slot]), at.parity);
        return memory + at.slot * STAGE_BYTES;
    };
    auto free_stage = [&] {
        arrive(shared_address(&s.empty[at.slot]));
        at.next();
    };
#if WEIGHT != PLAIN
    join();
    // Scales of down, which all warps need, times the experts' weights; asked for long before.
    const u32 first_block = share(rows * TILES, blockIdx.x) / 16;
    float early[(DOWN_SCALES + WARPS * 32 - 1) / (WARPS * 32)];
#pragma unroll
    for (int i = 0; i < (DOWN_SCALES + WARPS * 32 - 1) / (WARPS * 32); i++) {
        const u32 n = i * WARPS * 32 + threadIdx.x, c = n % (I / 128), k = n / (I / 128) % TOP, at = first_block + n / (I / 128) / TOP;
        early[i] = 0.0f;
        if (n < DOWN_SCALES && at < rows * (TILES / 16)) {
            const u32 row = at / (TILES / 16);
            early[i] = down_scales[((u64)s.experts[row][k] * (H / 128) + at % (TILES / 16)) * (I / 128) + c] * s.gains[row][k];
        }
    }
    // Scales of a group of sixteen rows: of gate and of up, for each 128 of the warp's columns.
    float2 up_ahead[PIECES][2];
    auto look_ahead = [&](u32 group) {
        const u32 slot = group / (I / 8), row = s.experts[slot / TOP][slot % TOP] * (2 * I) + group % (I / 8) * 16;
        const float* from = up_scales + (u64)(row / 256 * 2) * (H / 128) + warp * 2;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            const float2 gate = *(const float2*)(from + p * 16), up = *(const float2*)(from + H / 128 + p * 16);
            up_ahead[p][0] = make_float2(gate.x, up.x), up_ahead[p][1] = make_float2(gate.y, up.y);
        }
    };
    if (share(rows * UNITS, blockIdx.x) < share(rows * UNITS, blockIdx.x + 1)) look_ahead(share(rows * UNITS, blockIdx.x));
#endif
    u32 turn = 0;
#if SHARED
    // Gate and up of the shared MLP.
    const u32 shared_end = share(SHARED_UNITS, blockIdx.x + 1);
#pragma unroll 1
    for (u32 first = share(SHARED_UNITS, blockIdx.x); first < shared_end; first += SHARED_BATCH, turn ^= 1) {
        const u32 count = min(shared_end - first, (u32)SHARED_BATCH);
#pragma unroll 1
        for (u32 g = 0; g < count; g++) {
            // All tokens: a row of weights is read once.
            float c[ROWS][16];
#pragma unroll
            for (int i = 0; i < 8; i += UP_ROWS) {
                const u8* from = next_stage() + column * 2;
#pragma unroll
                for (int n = 0; n < UP_ROWS; n++)
#pragma unroll
                    for (int r = 0; r < ROWS; r++) {
                        c[r][i + n] = 0.0f;
#pragma unroll
                        for (int p = 0; p < PIECES; p++) {
                            float v[8];
                            unpack8(tokens[r][p], v);
                            c[r][i + n] = dot8(*(const uint4*)(from + n * (H * 2) + p * 4096), v, c[r][i + n]);
                        }
                    }
                free_stage();
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float sum = add_lanes8(c[r], lane);
                if (lane % 2 == 0 && lane < 16) s.sums[turn][warp][(g * ROWS + r) * 8 + lane / 2] = sum;
            }
        }
        join();
        // A thread adds up an output; two are a word. Whole warps, because lanes exchange them.
        if (threadIdx.x < (SHARED_BATCH * ROWS * 4 + 31) / 32 * 32) {
            const u32 g = min(threadIdx.x / 4, (u32)(SHARED_BATCH * ROWS - 1)), i = threadIdx.x % 4, row = g % ROWS;
            float gate = 0.0f, up = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) gate += s.sums[turn][w][g * 8 + 2 * i], up += s.sums[turn][w][g * 8 + 2 * i + 1];
            const float v = __fdividef(gate, 1.0f + __expf(-gate_exponent<ACT>(gate))) * up;
            const u32 pair = pack_bf16(v, __shfl_down_sync(FULL, v, 1));
            if (threadIdx.x < count * ROWS * 4 && i % 2 == 0)
                send_copies<ACT_WORDS>(exchange + AT_ACT + SHARED_ACT + row * (SHARED / 2) + ((first + g / ROWS) * 4 + i) / 2, pair, tag);
        }
    }
#endif
    // Gate and up.
    const u32 end = share(rows * UNITS, blockIdx.x + 1);
#pragma unroll 1
    for (u32 first = share(rows * UNITS, blockIdx.x); first < end; first += BATCH, turn ^= 1) {
        const u32 count = min(end - first, (u32)BATCH);
#pragma unroll 1
        for (u32 g = 0; g < count; g++) {
            const u32 row = (first + g) / UNITS;
#if WEIGHT == PLAIN
            float v[PIECES][8], c[16];
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
                uint4 mine = tokens[0][p];
#pragma unroll
                for (int r = 1; r < ROWS; r++)
                    if (row == r) mine = tokens[r][p];
                unpack8(mine, v[p]);
            }
#pragma unroll
            for (int i = 0; i < 16; i += UP_ROWS) {
                const u8* from = next_stage() + column * 2;
#pragma unroll
                for (int n = 0; n < UP_ROWS; n++) {
                    c[i + n] = 0.0f;
#pragma unroll
                    for (int p = 0; p < PIECES; p++) c[i + n] = dot8(*(const uint4*)(from + n * (H * 2) + p * 4096), v[p], c[i + n]);
                }
                free_stage();
            }
            const float sum = add_lanes(c, lane);
            if (lane % 2 == 0) s.sums[turn][warp][g * 16 + lane / 2] = sum;
#else
            const u32 r = lane / 4;
            // Where row r of the group is, of the stages that the group has.
            auto row_at = [&](u32 r) {
                const u32 slot = at.slot + r / UP_ROWS;
                return memory + (slot < STAGES ? slot : slot - STAGES) * STAGE_BYTES + r % UP_ROWS * H + warp * 256 + lane % 4 * 16;
            };
            Place last = at;
#pragma unroll
            for (int i = 0; i < 16; i += UP_ROWS, last.next()) wait_for(shared_address(&s.full[last.slot]), last.parity);
            float gate = 0.0f, up = 0.0f;
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
                Operand x = operands[0][p];
#pragma unroll
                for (int t = 1; t < ROWS; t++)
                    if (row == t) x = operands[t][p];
                float c[4][4] = {};
                multiply(c, row_at(r) + p * 2048, row_at(r + 8) + p * 2048, x);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    gate += (c[2 * h][0] + c[2 * h + 1][0]) * up_ahead[p][h].x;
                    up += (c[2 * h][2] + c[2 * h + 1][2]) * up_ahead[p][h].y;
                }
            }
#pragma unroll
            for (int i = 0; i < 16; i += UP_ROWS) free_stage();
            if (first + g + 1 < end) look_ahead(first + g + 1);
            if (lane % 4 == 0) s.sums[turn][warp][g * 16 + r] = gate * HALF_FACTOR, s.sums[turn][warp][g * 16 + 8 + r] = up * HALF_FACTOR;
#endif
        }
        join();
        // A thread adds up an output; two are a word.
        if (threadIdx.x < BATCH * 8) {
            const u32 g = threadIdx.x / 8, i = threadIdx.x % 8;
            float gate = 0.0f, up = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) gate += s.sums[turn][w][g * 16 + i], up += s.sums[turn][w][g * 16 + 8 + i];
            const float v = __fdividef(gate, 1.0f + __expf(-gate_exponent<ACT>(gate))) * up;
            const u32 pair = pack_bf16(v, __shfl_down_sync(FULL, v, 1));
            if (g < count && i % 2 == 0) send_copies<ACT_WORDS>(exchange + AT_ACT + ((first + g) * 8 + i) / 2, pair, tag);
        }
    }
#if WEIGHT != PLAIN
#pragma unroll
    for (int i = 0; i < (DOWN_SCALES + WARPS * 32 - 1) / (WARPS * 32); i++)
        if (i * WARPS * 32 + threadIdx.x < DOWN_SCALES) s.down_scales[i * WARPS * 32 + threadIdx.x] = early[i];
#endif
    // Down, and the sum.
    u32 tile = share(rows * TILES, blockIdx.x);
    const u32 last = share(rows * TILES, blockIdx.x + 1);
#pragma unroll 1
    while (tile < last) {
        const u32 row = tile / TILES;
        const u64* from = exchange + AT_ACT + blockIdx.x % COPIES * ACT_WORDS + row * (TOP * I / 2) + threadIdx.x * 2;
#if SHARED
        // What a row's experts and the rows after it have in between.
        const u32 gap = (ROWS - 1 - row) * (TOP * I / 2) + row * (SHARED / 2);
#define PAIR_AT(i) (from + (i) * (WARPS * 64) + (ROWS > 1 && (i) * WARPS * 32 + threadIdx.x >= TOP * I / 4 ? gap : 0))
#else
#define PAIR_AT(i) (from + (i) * (WARPS * 64))
#endif
        // The activations of the row before are still being read.
        join();
        Patience patience;
        for (bool all = false; !all; patience.lose()) {
            u64 v[RECEIVED][2];
            all = true;
#pragma unroll
            for (int i = 0; i < RECEIVED; i++) {
                v[i][0] = v[i][1] = (u64)tag << 32;
                if (PAIRS % (WARPS * 32) == 0 || i * WARPS * 32 + threadIdx.x < PAIRS) peek2(PAIR_AT(i), v[i][0], v[i][1]);
            }
#pragma unroll
            for (int i = 0; i < RECEIVED; i++) {
                all &= fresh(v[i][0], tag) && fresh(v[i][1], tag);
                if (PAIRS % (WARPS * 32) == 0 || i * WARPS * 32 + threadIdx.x < PAIRS)
                    *(uint2*)(s.act + (i * WARPS * 32 + threadIdx.x) * 4) = make_uint2((u32)v[i][0], (u32)v[i][1]);
            }
            all = __all_sync(FULL, all);
        }
        join();
#pragma unroll 1
        for (; tile < last && tile / TILES == row; tile++) {
            const u32 out = tile % TILES * 8 + warp;
            const float before = residual ? bf16_to_float(__ldcg(residual + (u64)row * residual_stride + out)) : 0.0f;
            float sum = 0.0f;
#if SHARED
#pragma unroll 1
            for (u32 part = 0; part < SHARED_PARTS; part++) {
                const u32 each = SHARED / SHARED_PARTS;
                const u8* weights = next_stage() + warp * (each * 2) + lane * 16;
#pragma unroll
                for (u32 p = 0; p < (each + 255) / 256; p++) {
                    float v[8];
                    if (each % 256 && p * 256 + lane * 8 >= each) continue;
                    unpack8(*(const uint4*)(s.act + TOP * I + part * each + p * 256 + lane * 8), v);
                    sum += dot8(*(const uint4*)(weights + p * 512), v, 0.0f);
                }
                free_stage();
            }
#if GATED
            sum *= s.gates[row];
#endif
#endif
#if WEIGHT == PLAIN
#pragma unroll 1
            for (u32 k = 0; k < TOP; k++) {
                const u8* weights = next_stage() + warp * (I * 2) + lane * 16;
                float dots[DOWN_PIECES], dot = 0.0f;
#pragma unroll
                for (int p = 0; p < DOWN_PIECES; p++) {
                    float v[8];
                    dots[p] = 0.0f;
                    if (I % 256 && p * 256 + lane * 8 >= I) continue;
                    unpack8(*(const uint4*)(s.act + k * I + p * 256 + lane * 8), v);
                    dots[p] = dot8(*(const uint4*)(weights + p * 512), v, 0.0f);
                }
#pragma unroll
                for (int p = 0; p < DOWN_PIECES; p++) dot += dots[p];
                sum = fmaf(dot, s.gains[row][k], sum);
                free_stage();
            }
#else
            const float* scales = s.down_scales + (tile / 16 - first_block) * (TOP * (I / 128));
#pragma unroll 1
            for (u32 k = 0; k < TOP; k += TOGETHER) {
                const u8* weights = next_stage() + warp * I + lane * 8;
                float dots[TOGETHER][DOWN_PIECES];
#pragma unroll
                for (int t = 0; t < TOGETHER; t++)
#pragma unroll
                    for (int p = 0; p < DOWN_PIECES; p++) {
                        const u32 at = p * 256 + lane * 8;
                        float v[8];
                        dots[t][p] = 0.0f;
                        if (I % 256 && at >= I) continue;
                        const u8* act = (const u8*)(s.act + (k + t) * I + at / 16 * 16 + at / 2 % 8);
                        in_order(*(const uint2*)act, *(const uint2*)(act + 16), v);
                        dots[t][p] = scales[(k + t) * (I / 128) + at / 128] * dot8(*(const uint2*)(weights + t * (8 * I) + p * 256), v, 0.0f);
                    }
#pragma unroll
                for (int t = 0; t < TOGETHER; t++)
#pragma unroll
                    for (int p = 0; p < DOWN_PIECES; p++) sum += dots[t][p];
                free_stage();
            }
#endif
            sum = warp_sum(sum);
            if (lane == 0) y[(u64)row * y_stride + out] = float_to_bf16(before + sum);
        }
    }
    join();
    // Each expert is counted where it comes first.
    if (load && blockIdx.x == 0 && threadIdx.x < rows * TOP) {
        const u32 own = s.experts[0][threadIdx.x];
        bool first = true;
        for (u32 i = 0; i < threadIdx.x; i++) first &= s.experts[0][i] != own;
        add_load(load, own, 1);
        if (first) add_load(load, E, 1);
        if (threadIdx.x == 0) add_load(load, E + 1, 1);
    }
    if (threadIdx.x == 0) s.arrived = add_acquire_release((u32*)(exchange + 16), 1);
    join();
    if (s.arrived != BLOCKS - 1) return;
    // The last block to arrive: all reads are done. Before tags repeat, all words are cleared.
    const bool again = tag >= 0xfffffff0u;
    if (again)
        for (u32 i = AT_LOGITS + threadIdx.x; i < words_in_all; i += WARPS * 32) exchange[i] = 0;
    if (threadIdx.x == 0) exchange[0] = again ? 0 : tag, exchange[16] = 0;
#endif
}
