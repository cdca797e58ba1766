// Adapters inside `linear_wgmma`: y += (x · Aᵀ) · Bᵀ, with A and B of each token's own adapter.
//
// Each block has warps for this beside those of the tile, which never wait for them until the tile's chunks are done.
// x · Aᵀ is cut into units of 16 rows of A, K / SLICES columns and up to eight tokens of an adapter, which all helpers
// share, each as many consecutive ones as any other. Each slice has its own sums, and the warp that ends the last slice of
// a unit's rows adds them up in order, so the order of addition does not depend on which adapters are in use. A warp
// tells of all its units at once: what it has stored is then waited for once, not for each of them. When all sums are
// ready, a warp multiplies 16-row blocks of B by them; a token's sums are zero beside an adapter that is not its own. What
// this adds to the tile follows its chunks through the ring, in the layout of the tile's sums. Only adapters that some
// token has are read. A, x and B come by asynchronous copies to a ring of each warp, so that none waits for a load alone.
//
// ADAPTERS: slots. RANK: 16, 32 or 64. PARTS: of the weight, up to 3; ends of parts are multiples of 16. ALTERNATE: rows
// of two parts alternate, else parts follow each other. SLICES: slices of K, of 32 columns or a multiple. One tile of
// tokens, COLUMNS up to 64; a tile of weights has rows of two parts at most. All blocks are resident.
// Needs: counters, 2 + COLUMNS · INNER / 16 zeros, which are zeros again afterwards; `sums`, SLICES · ROWS · INNER floats and
// ROWS · INNER numbers of TYPE.
#pragma once
#include "adapter_of.cuh"

#define INNER (PARTS * RANK)
#define ROW_BLOCKS (INNER / 16)
#define NONE FULL
#define NO_TOKEN 0xff
// Parts that a tile can have rows of.
#define PASSES (PARTS > 1 ? 2 : 1)
// Steps of 32 columns in a slice, and how many of them are loaded at once.
#define STEPS (K / SLICES / 32)
// Bytes of the ring of each helper. A wide tile leaves no more beside its own ring.
#ifndef HELPER_RING
#define HELPER_RING (GROUPS == 3 ? 3072 : RANK == 16 ? 12288 : 9216)
#endif
// A step is 16 rows of A and eight tokens, 32 columns of each. Steps that are copied together, and how many of those in the ring.
#define A_STEP 1536
#define A_EACH (STEPS % 2 == 0 && HELPER_RING >= 6 * A_STEP ? 2 : 1)
#define A_DEPTH (HELPER_RING / (A_EACH * A_STEP))
// Units that are asked for before their turn.
#ifndef ASKED
#define ASKED 3
#endif
// Adapters whose B is. A wide tile's are too many for L2, and it has the time to wait.
#ifndef ENTRIES_ASKED
#define ENTRIES_ASKED (GROUPS == 3 ? 8 : 64)
#endif
#define AT_ONCE (SLICES < 8 ? SLICES : SLICES % 16 == 0 && GROUPS < 3 ? 16 : 8)

// Which 16-row blocks of a tile and which eights of tokens a helper has: all helpers of a cluster have as many blocks, at
// the price that some share a block and divide the tokens. Three helpers alone divide the tokens: eight eights of them
// for one block are eight tests for each adapter.
__device__ constexpr u32 token_parts() {
    u32 parts = HELPERS == 3 && SPLIT == 1 ? 3 : 1;
    while (OWNERS * parts % (SPLIT * HELPERS)) parts++;
    return parts;
}
#define TOKEN_PARTS token_parts()
#define ROW_LANES (SPLIT * HELPERS / TOKEN_PARTS)
#define BLOCKS (OWNERS / ROW_LANES)
#define EIGHTS ((COLUMNS / 8 + TOKEN_PARTS - 1) / TOKEN_PARTS)
// Steps of 16 ranks of an adapter; those that are copied together, and how many of those in the ring.
#define RANK_STEPS (RANK / 16)
#define B_STEP (BLOCKS * 512)
#define B_EACH (BLOCKS == 1 ? 4 : BLOCKS == 2 ? 2 : 1)
#define B_DEPTH (HELPER_RING / (B_EACH * B_STEP))
// Eights of tokens that a stage of the ring holds the sums of, and the stages for all of them.
#define EIGHTS_EACH (STAGE_BYTES / (OWNERS * 512))
#define HANDED ((COLUMNS / 8 + EIGHTS_EACH - 1) / EIGHTS_EACH)

static_assert(WEIGHT == PLAIN && !EVEN && COLUMNS <= 64 && ROWS <= COLUMNS && !MOVED, "adapters: plain weights, up to 64 tokens");
static_assert(K % (32 * SLICES) == 0 && SLICES % AT_ONCE == 0 && STAGES <= CHUNKS && HANDED <= STAGES, "adapters: slices, stages");
static_assert(A_DEPTH > 1 && B_DEPTH > 1 && HELPER_RING % 16 == 0, "adapters: rings");
static_assert(SPLIT * HELPERS % TOKEN_PARTS == 0 && OWNERS % ROW_LANES == 0, "adapters: shares of a tile");
static_assert(!ALTERNATE || (PARTS == 2 && OWNERS % 2 == 0), "adapters: rows that alternate");

struct Adapters {
    const u16 *x, *a, *b;
    float* sums;
    u32* counters;
    const u32 *token_row, *row_seat, *params;
    u32 x_stride, rows, seats, by_row, end0, end1;
    // x · Aᵀ of each token, in TYPE.
    DEVICE u16* ready() const { return (u16*)(sums + (u64)SLICES * ROWS * INNER); }
    DEVICE u32 part_of(u32 row) const { return (PARTS > 1 && row >= end0) + (PARTS > 2 && row >= end1); }
};

struct AdaptersInUse {
    // Groups of up to eight tokens with one adapter; the adapters, and a bit for each eight of tokens in which one has any.
    u32 groups, listed, leads[2], firsts[2];
    __align__(16) u32 of_token[64];
    u32 group_slot[64], slots[64], eights[64];
    u8 group_token[64][8];
    // Of each helper: adapters of its tokens, and in which of its eights.
    u32 entries[HELPERS][64];
    // Tokens' sums of the parts of a tile; rows are 8 bytes apart, so that loads of a warp meet few banks twice.
    __align__(16) u8 ring[HELPERS][HELPER_RING];
    __align__(16) u16 sums[PASSES][COLUMNS][RANK == 16 ? 16 : RANK + 4];
};

DEVICE void helpers_sync() { asm volatile("bar.sync 2, %0;" ::"n"((32 * HELPERS)) : "memory"); }

DEVICE u32 bits_below(const u32 (&words)[2], u32 at) {
    const u32 low = __popc(words[0] & (at < 32 ? (1u << at) - 1 : FULL));
    return at < 32 ? low : low + __popc(words[1] & ((1u << at - 32) - 1));
}

// Finds the adapters of all tokens, and groups of tokens with the same. All helpers. Before the wait for the predecessor:
// the tables are the prologue's.
DEVICE void find_adapters(const Adapters& a, u32 tokens, AdaptersInUse& use) {
    const u32 thread = threadIdx.x - FIRST_HELPER;
    u32 mine = NONE, leader = 0, first = 0, before = 0;
    if (thread < 64) {
        // Not behind the number of live tokens: there are entries for all.
        const u32 adapter = thread < ROWS ? adapter_of(thread, a.token_row, a.row_seat, a.params, a.rows, a.seats, ADAPTERS, a.by_row) : 0;
        use.of_token[thread] = mine = adapter && thread < tokens ? adapter - 1 : NONE;
        use.eights[thread] = 0;
        *(u64*)use.group_token[thread] = ~0ull;
    }
    helpers_sync();
    if (thread < 64) {
        u32 same[2] = {0, 0};
#pragma unroll
        for (u32 t = 0; t < 64; t += 4) {
            const uint4 four = *(const uint4*)(use.of_token + t);
            same[t / 32] |= (four.x == mine ? 1u << t % 32 : 0) | (four.y == mine ? 2u << t % 32 : 0) | (four.z == mine ? 4u << t % 32 : 0) |
                            (four.w == mine ? 8u << t % 32 : 0);
        }
        first = same[0] ? __ffs(same[0]) - 1 : 31 + __ffs(same[1]);
        before = bits_below(same, thread);
        u64 left = same[0] | (u64)same[1] << 32;
        for (u32 i = before / 8 * 8; i; i--) left &= left - 1;
        leader = __ffsll(left) - 1;
        const u32 leads = __ballot_sync(FULL, mine != NONE && leader == thread), firsts = __ballot_sync(FULL, mine != NONE && first == thread);
        if (thread % 32 == 0) use.leads[thread / 32] = leads, use.firsts[thread / 32] = firsts;
    }
    helpers_sync();
    if (mine != NONE) {
        const u32 group = bits_below(use.leads, leader), at = bits_below(use.firsts, first);
        use.group_token[group][before % 8] = thread;
        if (leader == thread) use.group_slot[group] = mine;
        if (first == thread) use.slots[at] = mine;
        atomicOr(use.eights + at, 1u << thread / 8);
    }
    if (thread == 0) use.groups = __popc(use.leads[0]) + __popc(use.leads[1]), use.listed = __popc(use.firsts[0]) + __popc(use.firsts[1]);
    helpers_sync();
}

// Brings contiguous bytes, a multiple of 16, to L2.
DEVICE void prefetch(const void* from, u32 bytes) { asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory"); }

// Adds up the slices of 16 columns of x · Aᵀ for a group of tokens.
DEVICE void add_slices(const Adapters& a, const AdaptersInUse& use, u32 group, u32 block) {
    const u32 lane = threadIdx.x % 32, token = use.group_token[group][lane / 4], at = token * INNER + block * 16 + lane % 4 * 4;
    if (token == NO_TOKEN) return;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int first = 0; first < SLICES; first += AT_ONCE) {
        float4 slice[AT_ONCE];
#pragma unroll
        for (int s = 0; s < AT_ONCE; s++) slice[s] = __ldcg((const float4*)(a.sums + (u64)(first + s) * (ROWS * INNER) + at));
#pragma unroll
        for (int s = 0; s < AT_ONCE; s++) sum.x += slice[s].x, sum.y += slice[s].y, sum.z += slice[s].z, sum.w += slice[s].w;
    }
    *(uint2*)(a.ready() + at) = make_uint2(pack2<TYPE>(sum.x, sum.y), pack2<TYPE>(sum.z, sum.w));
}

// x · Aᵀ: the units of this warp. Eight consecutive elements of K for each lane: any order of K will do, if it is the same
// on both sides. A lane reads what it copied itself. The first of A is copied before the wait.
DEVICE void multiply_by_a(const Adapters& a, AdaptersInUse& use, u32 helper) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
    const u32 units = use.groups * ROW_BLOCKS * SLICES, warps = gridDim.x * HELPERS, at = blockIdx.x * HELPERS + helper;
    const u32 begin = at * units / warps, end = (at + 1) * units / warps, batches = (end - begin) * (STEPS / A_EACH);
    const u32 ring = shared_address(use.ring[helper]) + lane * 16;
    auto column = [&](u32 batch) { return (((begin + batch / (STEPS / A_EACH)) % SLICES) * STEPS + batch % (STEPS / A_EACH) * A_EACH) * 32 + j * 8; };
    auto copy_a = [&](u32 batch, u32 to) {
        if (batch >= batches) return;
        const u32 rows = (begin + batch / (STEPS / A_EACH)) / SLICES, row = use.group_slot[rows / ROW_BLOCKS] * INNER + rows % ROW_BLOCKS * 16 + g;
        const u16* from = a.a + (u64)row * K + column(batch);
#pragma unroll
        for (int i = 0; i < A_EACH; i++) {
            copy16_async(ring + to * (A_EACH * A_STEP) + i * A_STEP, from + i * 32);
            copy16_async(ring + to * (A_EACH * A_STEP) + i * A_STEP + 512, from + 8 * K + i * 32);
        }
    };
    auto copy_x = [&](u32 batch, u32 to) {
        const u32 token = batch < batches ? use.group_token[(begin + batch / (STEPS / A_EACH)) / (SLICES * ROW_BLOCKS)][g] : NO_TOKEN;
        if (token != NO_TOKEN)
#pragma unroll
            for (int i = 0; i < A_EACH; i++)
                copy16_async(ring + to * (A_EACH * A_STEP) + i * A_STEP + 1024, a.x + (u64)token * a.x_stride + column(batch) + i * 32);
        commit_copies();
    };
    // A row of a unit for each lane.
    auto ask = [&](u32 unit) {
        if (unit >= end || lane >= 16) return;
        const u32 row = use.group_slot[unit / SLICES / ROW_BLOCKS] * INNER + unit / SLICES % ROW_BLOCKS * 16 + lane;
        prefetch(a.a + (u64)row * K + unit % SLICES * (K / SLICES), K / SLICES * 2);
    };
    for (u32 i = 0; i < A_DEPTH; i++) copy_a(i, i);
    for (u32 i = A_DEPTH * A_EACH < STEPS ? 0 : 1; i < ASKED; i++) ask(begin + i);
    wait_for_predecessor();
    for (u32 i = 0; i < A_DEPTH; i++) copy_x(i, i);
    u32 batch = 0, slot = 0;
#pragma unroll 1
    for (u32 unit = begin; unit < end; unit++) {
        if (ASKED > 0) ask(unit + ASKED);
        const u32 slice = unit % SLICES, block = unit / SLICES % ROW_BLOCKS, group = unit / SLICES / ROW_BLOCKS;
        const bool some = use.group_token[group][g] != NO_TOKEN;
        float c[2][4] = {};
#pragma unroll 1
        for (u32 i = 0; i < STEPS / A_EACH; i++, batch++) {
            wait_copies<A_DEPTH - 1>();
            const u8* from = use.ring[helper] + slot * (A_EACH * A_STEP) + lane * 16;
#pragma unroll
            for (int s = 0; s < A_EACH; s++) {
                const uint4 low = *(const uint4*)(from + s * A_STEP), high = *(const uint4*)(from + s * A_STEP + 512);
                uint4 v = make_uint4(0, 0, 0, 0);
                if (some) v = *(const uint4*)(from + s * A_STEP + 1024);
                mma_16x8x16<TYPE>(c[0], low.x, high.x, low.y, high.y, v.x, v.y);
                mma_16x8x16<TYPE>(c[1], low.z, high.z, low.w, high.w, v.z, v.w);
            }
            copy_a(batch + A_DEPTH, slot);
            copy_x(batch + A_DEPTH, slot);
            if (++slot == A_DEPTH) slot = 0;
        }
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const u32 to = use.group_token[group][2 * j + t];
            float* sum = a.sums + ((u64)slice * ROWS + to) * INNER + block * 16 + g;
            if (to != NO_TOKEN) sum[0] = c[0][t] + c[1][t], sum[8] = c[0][2 + t] + c[1][2 + t];
        }
    }
    __syncwarp();
    // A lane for each 16 rows that the units are of.
    u32 added = 0;
#pragma unroll 1
    for (u32 rows = begin / SLICES; rows * SLICES < end; rows += 32) {
        const u32 mine = rows + lane, from = max(mine * SLICES, begin), to = min((mine + 1) * SLICES, end);
        bool last = false;
        if (from < to) last = add_acquire_release(a.counters + 2 + mine, to - from) + to - from == SLICES;
        u32 ended = __ballot_sync(FULL, last);
        __syncwarp();
        added += __popc(ended);
        if (last) a.counters[2 + mine] = 0;
#pragma unroll 1
        for (; ended; ended &= ended - 1) {
            const u32 done = rows + __ffs(ended) - 1;
            add_slices(a, use, done / ROW_BLOCKS, done % ROW_BLOCKS);
        }
    }
    __syncwarp();
    if (lane == 0 && added) asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(a.counters), "r"(added) : "memory");
}

// Waits until all sums are ready.
DEVICE void wait_for_sums(const Adapters& a, u32 all) {
    u32 done = 0;
    for (u32 turns = 0; done < all; turns++) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(done) : "l"(a.counters) : "memory");
        if (turns > 1u << 25) __trap();
    }
}

// A helper's list of adapters that some of its tokens have; returns how many there are.
DEVICE u32 list_entries(AdaptersInUse& use, u32 helper, u32 part) {
    const u32 lane = threadIdx.x % 32;
    u32 count = 0;
    for (u32 at = lane; at < 64; at += 32) {
        u32 mask = 0;
        if (at < use.listed)
#pragma unroll
            for (int i = 0; i < EIGHTS; i++) mask |= (use.eights[at] >> (part + i * TOKEN_PARTS) & 1) << i;
        const u32 some = __ballot_sync(FULL, mask != 0);
        if (mask) use.entries[helper][count + __popc(some & ((1u << lane) - 1))] = use.slots[at] | mask << 24;
        count += __popc(some);
    }
    __syncwarp();
    return count;
}

// The parts of a tile: tokens' sums come to shared memory, all loads before the first store.
DEVICE void copy_sums(const Adapters& a, AdaptersInUse& use, u32 part, u32 passes) {
    constexpr u32 eights = RANK / 8, all = PASSES * COLUMNS * eights, threads = 32 * HELPERS;
    const u32 thread = threadIdx.x - FIRST_HELPER;
    uint4 v[(all + threads - 1) / threads];
    helpers_sync();
#pragma unroll
    for (u32 i = 0; i < all; i += threads) {
        const u32 at = i + thread, eight = at % eights, token = at / eights % COLUMNS, pass = at / eights / COLUMNS;
        if (at < all && pass < passes && use.of_token[token] != NONE)
            v[i / threads] = __ldcg((const uint4*)(a.ready() + token * INNER + (part + pass) * RANK + eight * 8));
    }
#pragma unroll
    for (u32 i = 0; i < all; i += threads) {
        const u32 at = i + thread, eight = at % eights, token = at / eights % COLUMNS, pass = at / eights / COLUMNS;
        if (at >= all || pass >= passes || use.of_token[token] == NONE) continue;
        uint2* to = (uint2*)(use.sums[pass][token] + eight * 8);
        to[0] = make_uint2(v[i / threads].x, v[i / threads].y);
        to[1] = make_uint2(v[i / threads].z, v[i / threads].w);
    }
    helpers_sync();
}

// What a helper has of a tile goes to the ring: [eight of tokens][16 rows][lane] of four sums, as the tile's warps hold theirs.
// With rows that alternate a block has every second of 32 rows.
DEVICE void hand_over(u32 to, u32 stage, u32 part, u32 lane_of_rows, const float (&sums)[BLOCKS][EIGHTS][4]) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) {
        const u32 n = part + e * TOKEN_PARTS;
        if (n >= COLUMNS / 8 || n / EIGHTS_EACH != stage) continue;
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            const u32 block = lane_of_rows + i * ROW_LANES;
            const float(&c)[4] = sums[i][e];
            if (ALTERNATE) {
                const u32 row = 2 * g + block % 2, at = to + ((n % EIGHTS_EACH * OWNERS + block / 2 * 2) * 32 + row % 8 * 4 + j) * 16 + row / 8 * 8;
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(c[0]), "f"(c[1]) : "memory");
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + 512), "f"(c[2]), "f"(c[3]) : "memory");
            } else
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + ((n % EIGHTS_EACH * OWNERS + block) * 32 + lane) * 16), "f"(c[0]),
                             "f"(c[1]), "f"(c[2]), "f"(c[3])
                             : "memory");
        }
    }
}

// Where a block of 16 rows begins in a tile. With rows that alternate it has every second of 32.
DEVICE u32 row_of(u32 block) { return ALTERNATE ? block / 2 * 32 + block % 2 : block * 16; }
// The i-th of those that a helper has.
DEVICE u32 row_of(u32 first, u32 i) { return ROW_LANES % 2 ? row_of(first + i * ROW_LANES) : row_of(first) + i * ROW_LANES * 16; }

// All that the helpers do. `known` tells the tile's warps that `use` is complete, `room` the helpers that stages are free.
DEVICE void help(const Adapters& a, AdaptersInUse& use, u32 tokens, u32 known, u32 room, u32 base, u32 full) {
    const u32 thread = threadIdx.x - FIRST_HELPER, helper = thread / 32, lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
    find_adapters(a, tokens, use);
    if (thread == 0) barrier_arrive(known);
    if (use.groups == 0) return;
    multiply_by_a(a, use, helper);
    const u32 share = blockIdx.x % SPLIT, part = (share * HELPERS + helper) % TOKEN_PARTS, lane_of_rows = (share * HELPERS + helper) / TOKEN_PARTS;
    const u32 steps = list_entries(use, helper, part) * RANK_STEPS;
    u32 own[EIGHTS];
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) own[e] = part + e * TOKEN_PARTS < COLUMNS / 8 ? use.of_token[(part + e * TOKEN_PARTS) * 8 + g] : NONE;
    u32 fill = 0, turn = 0;
#pragma unroll 1
    for (u32 tile = blockIdx.x / SPLIT; tile < TILES; tile += gridDim.x / SPLIT) {
        const u32 rows = tile * WIDE;
        // Half of a row's 16 ranks for each lane. Rows past N are the last one, and not stored.
        auto copy_b = [&](u32 batch, u32 to) {
#pragma unroll
            for (u32 s = 0; s < B_EACH; s++) {
                const u32 step = batch * B_EACH + s;
                if (step >= steps) break;
                const u16* from = a.b + (u64)(use.entries[helper][step / RANK_STEPS] & 0xffffff) * (N * RANK) + step % RANK_STEPS * 16 + lane % 2 * 8;
#pragma unroll
                for (int i = 0; i < BLOCKS; i++) {
                    const u32 row = rows + row_of(lane_of_rows, i) + lane / 2 * (ALTERNATE ? 2 : 1);
                    copy16_async(shared_address(use.ring[helper]) + ((to * B_EACH + s) * BLOCKS + i) * 512 + lane * 16, from + (N % WIDE == 0 ? row : min(row, N - 1u)) * RANK);
                }
            }
            commit_copies();
        };
        for (u32 i = 0; i < B_DEPTH; i++) copy_b(i, i);
        // What the warp will copy next is brought to L2 meanwhile. Of two warps with rows that alternate the first asks for both.
        auto ask = [&](u32 entry, int i) {
            if (entry >= steps / RANK_STEPS || (ALTERNATE && ROW_LANES % 2 == 0 && lane_of_rows % 2)) return;
            const u32 first = row_of(lane_of_rows, i) / 16 * 16, count = ALTERNATE ? 32 : 16;
            if (N % WIDE && rows + first + count > N) return;
            prefetch(a.b + ((u64)(use.entries[helper][entry] & 0xffffff) * N + rows + first) * RANK, count * RANK * 2);
        };
        for (u32 more = lane; more < ENTRIES_ASKED; more += 32)
#pragma unroll
            for (int i = 0; i < BLOCKS; i++) ask(B_DEPTH * B_EACH / RANK_STEPS + more, i);
        if (fill == 0 && thread == 0) wait_for_sums(a, use.groups * ROW_BLOCKS);
        const u32 first_part = ALTERNATE ? 0 : a.part_of(rows);
        copy_sums(a, use, first_part, ALTERNATE ? 2 : a.part_of(min(rows + WIDE, (u32)N) - 1) - first_part + 1);
        u32 pass[BLOCKS];
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) pass[i] = ALTERNATE ? (lane_of_rows + i * ROW_LANES) % 2 : a.part_of(rows + row_of(lane_of_rows, i)) - first_part;
        float sums[BLOCKS][EIGHTS][4] = {};
#pragma unroll 1
        for (u32 batch = 0, slot = 0; batch * B_EACH < steps; batch++) {
            wait_copies<B_DEPTH - 1>();
            __syncwarp();
#pragma unroll
            for (u32 s = 0; s < B_EACH; s++) {
                const u32 step = batch * B_EACH + s;
                if (step >= steps) break;
                const u32 entry = use.entries[helper][step / RANK_STEPS], at = step % RANK_STEPS * 16 + j * 4;
                // Four consecutive ranks for each lane, of B as of the sums.
                const u8* from = use.ring[helper] + (slot * B_EACH + s) * B_STEP + lane * 8;
                uint2 low[BLOCKS], high[BLOCKS];
#pragma unroll
                for (int i = 0; i < BLOCKS; i++) low[i] = *(const uint2*)(from + i * 512), high[i] = *(const uint2*)(from + i * 512 + 256);
#pragma unroll
                for (int e = 0; e < EIGHTS; e++) {
                    if (!(entry >> (24 + e) & 1)) continue;
                    const u32 token = (part + e * TOKEN_PARTS) * 8 + g;
                    const bool mine = own[e] == (entry & 0xffffff);
#pragma unroll
                    for (int i = 0; i < BLOCKS; i++) {
                        uint2 v = *(const uint2*)(use.sums[PASSES == 1 ? 0 : pass[ALTERNATE && ROW_LANES % 2 == 0 ? 0 : i]][token] + at);
                        if (!mine) v = make_uint2(0, 0);
                        mma_16x8x16<TYPE>(sums[i][e], low[i].x, high[i].x, low[i].y, high[i].y, v.x, v.y);
                    }
                }
            }
            __syncwarp();
            copy_b(batch + B_DEPTH, slot);
            if (ENTRIES_ASKED < 64 && ENTRIES_ASKED > 0 && lane < BLOCKS && (batch + B_DEPTH) * B_EACH % RANK_STEPS == 0)
                ask((batch + B_DEPTH) * B_EACH / RANK_STEPS + ENTRIES_ASKED, lane);
            if (++slot == B_DEPTH) slot = 0;
        }
        fill += CHUNKS;
        barrier_wait(room, turn++ & 1);
        for (u32 h = 0; h < HANDED; h++, fill++) {
            const u32 stage = fill % STAGES;
            hand_over(base + stage * STAGE_BYTES, h, part, lane_of_rows, sums);
            asm volatile("fence.proxy.async;" ::: "memory");
            helpers_sync();
            if (thread == 0) barrier_arrive(full + 8 * stage);
        }
    }
    // The last block that needs the counters no more clears them for the next launch.
    if (thread == 0 && atomicAdd(a.counters + 1, 1u) == gridDim.x - 1) a.counters[0] = a.counters[1] = 0;
}

// ---- the warps of the tile ----

DEVICE bool any_adapter(const AdaptersInUse& use, u32 known) {
    barrier_wait(known, 0);
    return *(const volatile u32*)&use.groups > 0;
}

// Adds what the helpers handed over to the sums c of a tile. `more`: the stages will be filled again.
DEVICE void take_handed(u32 base, u32 full, u32 empty, u32& stage, u32& phase, bool more, float (&c)[COLUMNS / 2]) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // The block of this lane's rows, and the helpers of this share.
    const u32 block = ALTERNATE ? warp / 2 * 2 + lane / 4 % 2 : warp, first = blockIdx.x % SPLIT * HELPERS;
#pragma unroll
    for (int h = 0; h < HANDED; h++) {
        barrier_wait(full + 8 * stage, phase);
#pragma unroll
        for (int n = h * EIGHTS_EACH; n < (h + 1) * EIGHTS_EACH && n < COLUMNS / 8; n++) {
            const u32 helper = block % ROW_LANES * TOKEN_PARTS + n % TOKEN_PARTS;
            if (warp >= OWNERS || (SPLIT > 1 && helper - first >= HELPERS)) continue;
            float p0, p1, p2, p3;
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(p0), "=f"(p1), "=f"(p2), "=f"(p3)
                         : "r"(base + stage * STAGE_BYTES + ((n % EIGHTS_EACH * OWNERS + warp) * 32 + lane) * 16)
                         : "memory");
            c[n * 4] += p0, c[n * 4 + 1] += p1, c[n * 4 + 2] += p2, c[n * 4 + 3] += p3;
        }
        if (more) {
            asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
            release_stage(empty + 8 * stage);
        }
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
}
