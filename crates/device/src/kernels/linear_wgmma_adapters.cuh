// Adapters inside `linear_wgmma`: y += (x · Aᵀ) · Bᵀ, with A and B of each token's own adapter.
//
// Each block has warps for this beside those of the tile, which never wait for them until the tile's chunks are done.
// x · Aᵀ is cut into units of 16 rows of A, K / SLICES columns and up to eight tokens of an adapter, which all blocks
// share. Each slice has its own sums, and the warp that ends the last slice adds them up in order, so the order of
// addition does not depend on which adapters are in use. When all sums are ready, a warp multiplies 16-row blocks of B
// by them; a token's sums are zero beside an adapter that is not its own. What this adds to the tile follows its chunks
// through the ring, in the layout of the tile's sums. Only adapters that some token has are read, all by plain loads.
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
#define BATCH (STEPS < (GROUPS == 3 ? 2 : 8) ? STEPS : (GROUPS == 3 ? 2 : 8))
// Units that are asked for before their turn.
#define ASKED 3
// Adapters whose B is. A wide tile's are too many for L2, and it has the time to wait.
#define ENTRIES_ASKED (GROUPS == 3 ? 8 : 32)
#define AT_ONCE (SLICES < 8 ? SLICES : 8)

// Which 16-row blocks of a tile and which eights of tokens a helper has: all helpers of a cluster have as many blocks, at
// the price that some share a block and divide the tokens.
__device__ constexpr u32 token_parts() {
    u32 parts = 1;
    while (OWNERS * parts % (SPLIT * HELPERS)) parts++;
    return parts;
}
#define TOKEN_PARTS token_parts()
#define ROW_LANES (SPLIT * HELPERS / TOKEN_PARTS)
#define BLOCKS (OWNERS / ROW_LANES)
#define EIGHTS ((COLUMNS / 8 + TOKEN_PARTS - 1) / TOKEN_PARTS)
// Steps of 16 ranks of an adapter, and how many of them a warp loads ahead.
#define RANK_STEPS (RANK / 16)
#define DEPTH (GROUPS == 3 ? 2 : BLOCKS == 1 ? 8 : BLOCKS == 2 ? 4 : BLOCKS <= 4 ? 2 : 1)
// Eights of tokens that a stage of the ring holds the sums of, and the stages for all of them.
#define EIGHTS_EACH (STAGE_BYTES / (OWNERS * 512))
#define HANDED ((COLUMNS / 8 + EIGHTS_EACH - 1) / EIGHTS_EACH)

static_assert(WEIGHT == PLAIN && !EVEN && COLUMNS <= 64 && ROWS <= COLUMNS && !MOVED, "adapters: plain weights, up to 64 tokens");
static_assert(K % (32 * SLICES) == 0 && SLICES % AT_ONCE == 0 && STAGES <= CHUNKS && HANDED <= STAGES, "adapters: slices, stages");
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
    u32 of_token[64], group_slot[64], slots[64], eights[64];
    u8 group_token[64][8];
    // Of each helper: adapters of its tokens, and in which of its eights.
    u32 entries[HELPERS][64];
    // Tokens' sums of the parts of a tile; rows are 8 bytes apart, so that loads of a warp meet few banks twice.
    __align__(8) u16 sums[PASSES][COLUMNS][RANK == 16 ? 16 : RANK + 4];
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
    u32 mine = NONE, leader = 0, first = 0, count = 0;
    if (thread < 64) {
        const u32 adapter = thread < tokens ? adapter_of(thread, a.token_row, a.row_seat, a.params, a.rows, a.seats, ADAPTERS, a.by_row) : 0;
        use.of_token[thread] = mine = adapter ? adapter - 1 : NONE;
        use.eights[thread] = 0;
        *(u64*)use.group_token[thread] = ~0ull;
    }
    helpers_sync();
    if (thread < 64) {
        for (u32 t = 0; t < COLUMNS; t++)
            if (use.of_token[t] == mine && t <= thread) {
                if (count == 0) first = t;
                if (count++ % 8 == 0) leader = t;
            }
        const u32 leads = __ballot_sync(FULL, mine != NONE && leader == thread), firsts = __ballot_sync(FULL, mine != NONE && first == thread);
        if (thread % 32 == 0) use.leads[thread / 32] = leads, use.firsts[thread / 32] = firsts;
    }
    helpers_sync();
    if (mine != NONE) {
        const u32 group = bits_below(use.leads, leader), at = bits_below(use.firsts, first);
        use.group_token[group][(count - 1) % 8] = thread;
        if (leader == thread) use.group_slot[group] = mine;
        if (first == thread) use.slots[at] = mine;
        atomicOr(use.eights + at, 1u << thread / 8);
    }
    if (thread == 0) use.groups = __popc(use.leads[0]) + __popc(use.leads[1]), use.listed = __popc(use.firsts[0]) + __popc(use.firsts[1]);
    helpers_sync();
}

// Brings contiguous bytes, a multiple of 16, to L2.
DEVICE void prefetch(const void* from, u32 bytes) { asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory"); }

DEVICE uint4 load16(const u16* from) { return __ldcg((const uint4*)from); }

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
// on both sides. The first of A is asked for before the wait.
DEVICE void multiply_by_a(const Adapters& a, const AdaptersInUse& use, u32 helper) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
    const u32 units = use.groups * ROW_BLOCKS * SLICES, stride = gridDim.x * HELPERS;
    uint4 low[BATCH], high[BATCH];
    auto load = [&](u32 unit, u32 first) {
        const u32 slice = unit % SLICES, block = unit / SLICES % ROW_BLOCKS, slot = use.group_slot[unit / SLICES / ROW_BLOCKS];
        const u16* from = a.a + ((u64)slot * INNER + block * 16 + g) * K + (slice * STEPS + first) * 32 + j * 8;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const bool in = STEPS % BATCH == 0 || first + i < STEPS;
            low[i] = in ? load16(from + i * 32) : make_uint4(0, 0, 0, 0);
            high[i] = in ? load16(from + 8 * K + i * 32) : make_uint4(0, 0, 0, 0);
        }
    };
    // A row of a unit for each lane.
    auto ask = [&](u32 unit) {
        if (unit >= units || lane >= 16) return;
        const u32 row = use.group_slot[unit / SLICES / ROW_BLOCKS] * INNER + unit / SLICES % ROW_BLOCKS * 16 + lane;
        prefetch(a.a + (u64)row * K + unit % SLICES * (K / SLICES), K / SLICES * 2);
    };
    u32 unit = helper * gridDim.x + blockIdx.x;
    if (unit < units) load(unit, 0);
    if (BATCH < STEPS) ask(unit);
    for (int i = 1; i < ASKED; i++) ask(unit + i * stride);
    wait_for_predecessor();
#pragma unroll 1
    for (; unit < units; unit += stride) {
        ask(unit + ASKED * stride);
        const u32 slice = unit % SLICES, block = unit / SLICES % ROW_BLOCKS, group = unit / SLICES / ROW_BLOCKS;
        const u32 token = use.group_token[group][g];
        const u16* x = a.x + (u64)token * a.x_stride + slice * STEPS * 32 + j * 8;
        float c[2][4] = {};
#pragma unroll 1
        for (u32 first = 0; first < STEPS; first += BATCH) {
            uint4 v[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                v[i] = make_uint4(0, 0, 0, 0);
                if (token != NO_TOKEN && (STEPS % BATCH == 0 || first + i < STEPS)) v[i] = load16(x + (first + i) * 32);
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                mma_16x8x16<TYPE>(c[0], low[i].x, high[i].x, low[i].y, high[i].y, v[i].x, v[i].y);
                mma_16x8x16<TYPE>(c[1], low[i].z, high[i].z, low[i].w, high[i].w, v[i].z, v[i].w);
            }
            if (first + BATCH < STEPS) load(unit, first + BATCH);
            else if (unit + stride < units) load(unit + stride, 0);
        }
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const u32 to = use.group_token[group][2 * j + t];
            float* sum = a.sums + ((u64)slice * ROWS + to) * INNER + block * 16 + g;
            if (to != NO_TOKEN) sum[0] = c[0][t] + c[1][t], sum[8] = c[0][2 + t] + c[1][2 + t];
        }
        u32* counter = a.counters + 2 + unit / SLICES;
        u32 before = 0;
        __syncwarp();
        if (lane == 0) before = add_acquire_release(counter, 1);
        if (__shfl_sync(FULL, before, 0) != SLICES - 1) continue;
        __syncwarp();
        add_slices(a, use, group, block);
        __syncwarp();
        if (lane == 0) {
            *counter = 0;
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(a.counters) : "memory");
        }
    }
}

// Waits until all sums are ready. The last block to see this clears the counters for the next launch.
DEVICE void wait_for_sums(const Adapters& a, u32 all) {
    u32 done = 0;
    for (u32 turns = 0; done < all; turns++) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(done) : "l"(a.counters) : "memory");
        if (turns > 1u << 25) __trap();
    }
    if (atomicAdd(a.counters + 1, 1u) == gridDim.x - 1) a.counters[0] = a.counters[1] = 0;
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

// The parts of a tile: tokens' sums come to shared memory.
DEVICE void copy_sums(const Adapters& a, AdaptersInUse& use, u32 part) {
    helpers_sync();
    for (u32 i = threadIdx.x - FIRST_HELPER; i < PASSES * COLUMNS * (RANK / 4); i += (32 * HELPERS)) {
        const u32 four = i % (RANK / 4), token = i / (RANK / 4) % COLUMNS, pass = i / (RANK / 4) / COLUMNS;
        if (use.of_token[token] == NONE || part + pass >= PARTS) continue;
        *(uint2*)(use.sums[pass][token] + four * 4) = __ldcg((const uint2*)(a.ready() + token * INNER + (part + pass) * RANK + four * 4));
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
        const u32 rows = tile * WIDE, row = rows + (ALTERNATE ? 2 * g : g);
        uint2 held[DEPTH][BLOCKS][2];
        // Four consecutive ranks for each lane, of B as of the sums.
        auto load = [&](uint2(&to)[BLOCKS][2], u32 step) {
            const u16* from = a.b + ((u64)(use.entries[helper][step / RANK_STEPS] & 0xffffff) * N + row) * RANK + step % RANK_STEPS * 16 + j * 4;
#pragma unroll
            for (int i = 0; i < BLOCKS; i++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const u32 more = row_of(lane_of_rows, i) + h * (ALTERNATE ? 16 : 8);
                    to[i][h] = N % WIDE == 0 || row + more < N ? __ldg((const uint2*)(from + more * RANK)) : make_uint2(0, 0);
                }
        };
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
            if (d < steps) load(held[d], d);
        // What the warp will load next is brought to L2 meanwhile, an adapter for each lane.
        if (lane < ENTRIES_ASKED && DEPTH / RANK_STEPS + lane < steps / RANK_STEPS) {
            const u16* from = a.b + ((u64)(use.entries[helper][DEPTH / RANK_STEPS + lane] & 0xffffff) * N + rows) * RANK;
#pragma unroll
            for (int i = 0; i < BLOCKS; i++) {
                const u32 first = row_of(lane_of_rows, i) / 16 * 16, count = ALTERNATE ? 32 : 16;
                if (N % WIDE == 0 || rows + first + count <= N) prefetch(from + first * RANK, count * RANK * 2);
            }
        }
        if (fill == 0 && thread == 0) wait_for_sums(a, use.groups * ROW_BLOCKS);
        const u32 first_part = ALTERNATE ? 0 : a.part_of(rows);
        copy_sums(a, use, first_part);
        u32 pass[BLOCKS];
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) pass[i] = ALTERNATE ? (lane_of_rows + i * ROW_LANES) % 2 : a.part_of(rows + row_of(lane_of_rows, i)) - first_part;
        float sums[BLOCKS][EIGHTS][4] = {};
#pragma unroll 1
        for (u32 from = 0; from < steps; from += DEPTH)
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                const u32 step = from + d;
                if (step >= steps) continue;
                const u32 entry = use.entries[helper][step / RANK_STEPS], at = step % RANK_STEPS * 16 + j * 4;
#pragma unroll
                for (int e = 0; e < EIGHTS; e++) {
                    if (!(entry >> (24 + e) & 1)) continue;
                    const u32 token = (part + e * TOKEN_PARTS) * 8 + g;
                    const bool mine = own[e] == (entry & 0xffffff);
#pragma unroll
                    for (int i = 0; i < BLOCKS; i++) {
                        uint2 s = *(const uint2*)(use.sums[PASSES == 1 ? 0 : pass[ALTERNATE && ROW_LANES % 2 == 0 ? 0 : i]][token] + at);
                        if (!mine) s = make_uint2(0, 0);
                        mma_16x8x16<TYPE>(sums[i][e], held[d][i][0].x, held[d][i][1].x, held[d][i][0].y, held[d][i][1].y, s.x, s.y);
                    }
                }
                if (step + DEPTH < steps) load(held[d], step + DEPTH);
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
