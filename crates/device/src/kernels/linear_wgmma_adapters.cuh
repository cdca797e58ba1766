// Adapters inside `linear_wgmma`: y += (x · Aᵀ) · Bᵀ, with A and B of each token's own adapter.
//
// x · Aᵀ is cut into pieces of up to 64 rows of A and K / SLICES columns, which all blocks share. A block computes its
// pieces after the first stages of its tile and stores, for each token, the sums of the token's own adapter. Each slice
// has its own sums, so the order of addition does not depend on which adapters are in use. Later in the tile, when all
// blocks have stored their sums, B comes through the ring, 64 columns (adapter, rank) at a time. The tokens' sums are the
// other operand of these products: zero where an adapter is not the token's. Only adapters that some token has are read.
//
// ADAPTERS: slots. RANK: 16, 32 or 64. PARTS: of the weight, up to 3. ALTERNATE: rows of parts alternate, else parts follow
// each other. SLICES: slices of K. One tile of tokens, COLUMNS up to 64; a tile of weights has rows of two parts at most. All blocks are resident.
#pragma once
#include "adapter_of.cuh"
#include "wgmma_scaled.cuh"

#define INNER (PARTS * RANK)
// Rows of A that a warp multiplies at a time, and how many of them an adapter has, and a piece.
#define UNIT 16
#define UNITS_OF (INNER / UNIT)
#define UNITS_EACH (OWNERS < 4 ? OWNERS : 4)
#define PIECE_CHUNKS (K / 64 / SLICES)
// Adapters of a chunk of B.
#define TOGETHER (64 / RANK)
// Chunks of the tile before the pieces, and before B.
#define BEFORE_A (STAGES < CHUNKS ? STAGES : CHUNKS)
#ifndef BEFORE_B
#define BEFORE_B (CHUNKS * 5 / 8 > BEFORE_A ? CHUNKS * 5 / 8 : BEFORE_A)
#endif
// The ranges of chunks of a tile: the pieces come after the first range of a block's first tile, B after the second range.
#define RANGES 3
#define RANGE_END(range) ((range) == 0 ? BEFORE_A : (range) == 1 ? BEFORE_B : CHUNKS)
// Parts that a tile can have rows of.
#define PASSES (PARTS > 1 ? 2 : 1)
#define NONE FULL
// Slices that a thread loads at once: with three warpgroups it has registers for eight.
#define AT_ONCE (GROUPS == 3 ? 8 : SLICES < 16 ? SLICES : 16)

// A ring of stages, and the stage that comes next.
struct Ring {
    u32 base, full, empty, stage, phase;
    DEVICE u32 at() const { return base + stage * STAGE_BYTES; }
    DEVICE u32 arrival() const { return full + 8 * stage; }
    DEVICE void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    DEVICE void wait() const { barrier_wait(arrival(), phase); }
    // A warpgroup has read it.
    DEVICE void release() {
        if (threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * stage);
        next();
    }
};

struct Adapters {
    const void* b;
    float* sums;
    u32* counters;
    const u32 *token_row, *row_seat, *params;
    u32 rows, seats, by_row, end0, end1;
};

struct AdaptersInUse {
    u32 mask[(ADAPTERS + 31) / 32], list[ADAPTERS], of_token[COLUMNS];
    // Sums of tokens, as pairs of bf16.
    __align__(16) u32 sums[PASSES][COLUMNS][RANK / 2];
};

// The part that a row of the weight belongs to.
DEVICE u32 part_of(const Adapters& a, u32 row) { return ALTERNATE ? row % PARTS : (PARTS > 1 && row >= a.end0) + (PARTS > 2 && row >= a.end1); }

// Finds the adapters of all tokens; returns how many there are. All threads of the block. Before the wait: the tables are
// the prologue's.
DEVICE u32 find_adapters(const Adapters& a, u32 tokens, AdaptersInUse& use) {
    for (u32 i = threadIdx.x; i < (ADAPTERS + 31) / 32; i += THREADS) use.mask[i] = 0;
    __syncthreads();
    for (u32 t = threadIdx.x; t < COLUMNS; t += THREADS) {
        const u32 adapter = t < tokens ? adapter_of(t, a.token_row, a.row_seat, a.params, a.rows, a.seats, ADAPTERS, a.by_row) : 0;
        const u32 slot = adapter ? adapter - 1 : NONE;
        use.of_token[t] = slot;
        if (slot != NONE) atomicOr(use.mask + slot / 32, 1u << slot % 32);
    }
    __syncthreads();
    u32 count = 0;
    for (u32 w = 0; w < (ADAPTERS + 31) / 32; w++) {
        const u32 mask = use.mask[w];
        for (u32 s = threadIdx.x; s < 32; s += THREADS)
            if (mask >> s & 1) use.list[count + __popc(mask & ((1u << s) - 1))] = w * 32 + s;
        count += __popc(mask);
    }
    __syncthreads();
    return count;
}

DEVICE u32 pieces_of(u32 used) { return (used * UNITS_OF + UNITS_EACH - 1) / UNITS_EACH * SLICES; }

DEVICE u32 load_shared(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}

// Stores the sums of a unit for the tokens whose adapter it belongs to: lane 4·g + j has rows g and g + 8 of tokens 2j, 2j + 1 of each eight.
DEVICE void store_sums(const Adapters& a, const AdaptersInUse& use, u32 unit, u32 slice, const float (&e)[COLUMNS / 2]) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, j = lane % 4, slot = use.list[unit / UNITS_OF];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i += 2) {
        const u32 row = unit % UNITS_OF * UNIT + g + i % 4 / 2 * 8;
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const u32 token = i / 4 * 8 + 2 * j + t;
            if (use.of_token[token] == slot) a.sums[((u64)slice * ROWS + token) * INNER + row] = e[i + t];
        }
    }
}

// Waits until all blocks have stored their sums. The last block to see this clears the counters for the next launch.
DEVICE void wait_for_sums(const Adapters& a, u32 pieces) {
    u32 done = 0;
    for (u32 turns = 0; done < pieces; turns++) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(done) : "l"(a.counters) : "memory");
        if (turns > 1u << 25) __trap();
    }
    if (atomicAdd(a.counters + 1, 1u) == gridDim.x - 1) {
        a.counters[1] = 0;
        asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(a.counters), "r"(0) : "memory");
    }
}

// Adds up the slices for all tokens with an adapter, rounded to bf16.
DEVICE void add_slices(const Adapters& a, AdaptersInUse& use, u32 part, u32 parts) {
    for (u32 i = threadIdx.x; i < parts * COLUMNS * (RANK / 4); i += WORKERS) {
        const u32 four = i % (RANK / 4), token = i / (RANK / 4) % COLUMNS, pass = i / (RANK / 4) / COLUMNS;
        if (use.of_token[token] == NONE) continue;
        const float* from = a.sums + (u64)token * INNER + (part + pass) * RANK + four * 4;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
        for (int from_slice = 0; from_slice < SLICES; from_slice += AT_ONCE) {
            float4 slice[AT_ONCE];
#pragma unroll
            for (int s = 0; s < AT_ONCE; s++) slice[s] = __ldcg((const float4*)(from + (u64)(from_slice + s) * (ROWS * INNER)));
#pragma unroll
            for (int s = 0; s < AT_ONCE; s++) sum.x += slice[s].x, sum.y += slice[s].y, sum.z += slice[s].z, sum.w += slice[s].w;
        }
        use.sums[pass][token][four * 2] = pack2<TYPE>(sum.x, sum.y);
        use.sums[pass][token][four * 2 + 1] = pack2<TYPE>(sum.z, sum.w);
    }
}

// Lays out tokens' sums for the chunk of adapters from `first` of the list, 16 bytes at a time, in 128-byte swizzle.
DEVICE void lay_out(const AdaptersInUse& use, u32 first, u32 used, u32 parts, u32 to, u32 second) {
    for (u32 i = threadIdx.x; i < parts * COLUMNS * 8; i += WORKERS) {
        const u32 piece = i % 8, token = i / 8 % COLUMNS, pass = i / 8 / COLUMNS, at = first + piece / (RANK / 8);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (at < used && use.of_token[token] == use.list[at]) v = *(const uint4*)(use.sums[pass][token] + piece % (RANK / 8) * 4);
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"((pass ? second : to) + token * 128 + ((piece ^ token % 8) * 16)), "r"(v.x), "r"(v.y),
                     "r"(v.z), "r"(v.w)
                     : "memory");
    }
    asm volatile("fence.proxy.async;" ::: "memory");
}

// ---- the thread that copies ----

// The first weights of the tile, before the wait.
DEVICE void ask_first(Ring ring, const Map* w_map) {
    const u64 pass = pass_policy();
    for (u32 chunk = 0; chunk < BEFORE_A; chunk++, ring.next()) {
        barrier_expect(ring.arrival(), STAGE_BYTES);
        tensor_copy(ring.at(), w_map, (blockIdx.x % SPLIT * CHUNKS + chunk) * 64, blockIdx.x / SPLIT * WIDE, ring.arrival(), pass);
    }
}

DEVICE void copy_with_adapters(Ring ring, const Adapters& a, const AdaptersInUse& use, u32 used, const Map* w_map, const Map* x_map, const Map* a_map,
                               u64 pass, u64 keep) {
    const u32 share = blockIdx.x % SPLIT, first = blockIdx.x / SPLIT, stride = gridDim.x / SPLIT, pieces = pieces_of(used);
    u32 fills = 0;
    auto take = [&](u32 bytes) {
        if (fills >= STAGES) barrier_wait(ring.empty + 8 * ring.stage, ring.phase ^ 1);
        barrier_expect(ring.arrival(), bytes);
    };
    auto copy_x = [&](u32 column) {
        tensor_copy(ring.at() + WEIGHT_BYTES, x_map, column, 0, ring.arrival(), keep);
        fills++;
        ring.next();
    };
    for (u32 tile = first; tile < TILES; tile += stride) {
        auto copy = [&](u32 from, u32 to) {
            for (u32 chunk = from; chunk < to; chunk++) {
                const u32 column = (share * CHUNKS + chunk) * 64;
                take(STAGE_BYTES);
                tensor_copy(ring.at(), w_map, column, tile * WIDE, ring.arrival(), pass);
                copy_x(column);
            }
        };
        u32 chunk = 0;
        if (tile == first) {
            for (; chunk < BEFORE_A; chunk++) copy_x((share * CHUNKS + chunk) * 64);
            for (u32 piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
                const u32 unit = piece / SLICES * UNITS_EACH, units = min((u32)UNITS_EACH, used * UNITS_OF - unit);
                for (u32 i = 0; i < PIECE_CHUNKS; i++) {
                    const u32 column = (piece % SLICES * PIECE_CHUNKS + i) * 64;
                    take(units * UNIT * 128 + TOKEN_BYTES);
                    for (u32 u = 0; u < units; u++)
                        tensor_copy(ring.at() + u * UNIT * 128, a_map, column, use.list[(unit + u) / UNITS_OF] * INNER + (unit + u) % UNITS_OF * UNIT, ring.arrival(), pass);
                    copy_x(column);
                }
            }
        }
        copy(chunk, BEFORE_B);
        for (u32 i = share * TOGETHER; i < used; i += SPLIT * TOGETHER) {
            const u32 some = min((u32)TOGETHER, used - i), bytes = min((u32)WIDE, N - tile * WIDE) * RANK * 2;
            take(some * bytes);
            for (u32 s = 0; s < some; s++)
                bulk_copy(ring.at() + s * WIDE * RANK * 2, (const u16*)a.b + ((u64)use.list[i + s] * N + tile * WIDE) * RANK, bytes, ring.arrival(), pass);
            fills++;
            ring.next();
        }
        copy(BEFORE_B, CHUNKS);
    }
}

// ---- the warpgroups ----

DEVICE void multiply_by_a(Ring& ring, const Adapters& a, const AdaptersInUse& use, u32 used) {
    const u32 warp = threadIdx.x / 32;
    for (u32 piece = blockIdx.x; piece < pieces_of(used); piece += gridDim.x) {
        float e[COLUMNS / 2];
#pragma unroll 1
        for (u32 i = 0; i < PIECE_CHUNKS; i++) {
            ring.wait();
            if (warp < 4) {
                const u64 rows = swizzled_tile(ring.at()), tokens = swizzled_tile(ring.at() + WEIGHT_BYTES);
                product_begin();
#pragma unroll
                for (int k = 0; k < 4; k++) Wgmma<TYPE, COLUMNS>::add(e, rows + 2 * k, tokens + 2 * k, i + k > 0);
                product_commit();
                product_wait<0>();
            }
            ring.release();
        }
        if (warp >= 4) continue;
        const u32 unit = piece / SLICES * UNITS_EACH + warp;
        if (warp < UNITS_EACH && unit < used * UNITS_OF) store_sums(a, use, unit, piece % SLICES, e);
        __threadfence();
        asm volatile("bar.sync 2, 128;" ::: "memory");
        if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(a.counters) : "memory");
    }
}

// Adds to the sums c of a tile. Thread 0 has seen that all blocks have stored theirs. With rows of two parts, the operand for the second part is in
// `second`, and each part multiplies its own rows of B, the others being zero.
DEVICE void multiply_by_b(Ring& ring, const Adapters& a, AdaptersInUse& use, u32 used, u32 rows, u8 (*second)[PASSES > 1 ? COLUMNS * 128 : 16],
                          float (&c)[COLUMNS / 2]) {
    asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
    const u32 part = part_of(a, rows), parts = (ALTERNATE ? 1 : part_of(a, min(rows + WIDE, (u32)N) - 1)) - part + 1;
    add_slices(a, use, part, parts);
    asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
    // A lane has two rows.
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp * 16 + lane / 4;
    const u32 low = part_of(a, rows + row), high = part_of(a, rows + row + 8);
    u32 turn = 0;
#pragma unroll 1
    for (u32 i = blockIdx.x % SPLIT * TOGETHER; i < used; i += SPLIT * TOGETHER, turn ^= 1) {
        const u32 tokens = ring.at() + WEIGHT_BYTES, other = shared_address(second[turn]);
        ring.wait();
        lay_out(use, i, used, parts, tokens, other);
        asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
        u32 b[PASSES][4][4];
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const u32 from = (k / (RANK / 16) * WIDE + row + q % 2 * 8) * (RANK * 2) + k % (RANK / 16) * 32 + q / 2 * 16 + lane % 4 * 4;
                const u32 v = i + k / (RANK / 16) < used ? load_shared(ring.at() + from) : 0;
#pragma unroll
                for (int p = 0; p < PASSES; p++) b[p][k][q] = PASSES == 1 || (q % 2 ? high : low) == part + p ? v : 0;
            }
        product_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) MixedWgmma<COLUMNS>::add(c, b[0][k], swizzled_tile(tokens) + 2 * k, 1);
        if (PASSES > 1 && parts > 1)
#pragma unroll
            for (int k = 0; k < 4; k++) MixedWgmma<COLUMNS>::add(c, b[PASSES - 1][k], swizzled_tile(other) + 2 * k, 1);
        product_commit();
        product_wait<0>();
        ring.release();
    }
}
