// Tiles of `attention_wgmma.cu` from pages in e4m3: one warp copies pages as they are into a ring of RAW slots, three
// warps widen them to f16, in the order that MMA wants. Included after the shapes and `find_item`.
#pragma once

#define RAW_BYTES (KV * D)
#define WIDENING 96

struct RawRing {
    u32 slot = 0, phase = 0;
    DEVICE void next() {
        if (++slot == RAW) slot = 0, phase ^= 1;
    }
};

DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Calls `keys` and `values` with the tiles of an item, in the order in which they are needed.
template <class K_, class V_> DEVICE void in_order(const Item& item, K_ keys, V_ values) {
    keys(item.end - 1);
    for (u32 tile = item.end - 1; tile > item.begin; tile--) keys(tile - 1), values(tile);
    values(item.begin);
}

DEVICE void produce_bytes(Shared& s, const u32* list, const Rows& t, const Map& q_map, const u8* kv, const u32* page_table,
                          u32 pages_per_seat, u32 base) {
    const u32 lane = threadIdx.x % 32, raw_base = base + Q_STAGES * Q_BYTES + 2 * STAGES * TILE_BYTES;
    RawRing raw;
    raw.phase = 1;
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
        const u32* pages = page_table + (u64)item.seat * pages_per_seat;
        const u32 first = first_page(item.position), last = (item.length - 1) / PAGE;
        auto fetch = [&](u32 tile, u32 which) {
            // A lane per page.
            const u32 page = lane < PAGES ? pages[max(min(tile * PAGES + lane, last), first)] : 0;
            barrier_wait(shared_address(&s.raw_empty[raw.slot]), raw.phase);
            const u32 barrier = shared_address(&s.raw_full[raw.slot]);
            if (lane == 0) barrier_expect(barrier, RAW_BYTES);
            __syncwarp();
            if (lane < PAGES)
                copy_bulk(raw_base + raw.slot * RAW_BYTES + lane * (PAGE * D), kv + (((u64)page * 2 + which) * HKV + item.head) * (PAGE * D), PAGE * D, barrier);
            raw.next();
        };
        in_order(item, [&](u32 tile) { fetch(tile, 0); }, [&](u32 tile) { fetch(tile, 1); });
    }
}

// Four lanes widen 64 columns of a token. Neighbouring groups of lanes have tokens next to each other and different
// halves of a head, so that reads and writes of eight lanes are in different banks.
DEVICE void widen_tile(u32 to, u32 from) {
    const u32 j = threadIdx.x % 4;
#pragma unroll 4
    for (u32 id = (threadIdx.x - 32) / 4; id < PARTS * KV; id += WIDENING / 4) {
        const u32 token = id % KV, part = PARTS == 2 ? (id / KV ^ token) % 2 : 0;
        u32 v[4], w[8];
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(from + token * D + part * 64 + j * 16) : "memory");
#pragma unroll
        for (int i = 0; i < 4; i++) widen_fp8_half(v[i], w[2 * i], w[2 * i + 1]);
        const u32 row = to + part * PART_BYTES + token * 128;
#pragma unroll
        for (int i = 0; i < 2; i++)
            asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(row + ((2 * j + i) ^ token % 8) * 16), "r"(w[4 * i]), "r"(w[4 * i + 1]), "r"(w[4 * i + 2]), "r"(w[4 * i + 3]) : "memory");
    }
}

DEVICE void widen(Shared& s, const u32* list, const Rows& t, u32 base) {
    const u32 k_base = base + Q_STAGES * Q_BYTES, raw_base = k_base + 2 * STAGES * TILE_BYTES;
    RawRing raw;
    Ring k, v;
    k.phase = v.phase = 1;
    Item item;
    for (u32 round = 0; find_item(item, s, list, t, round); round++) {
        auto turn = [&](Ring& ring, u64* fulls, u64* empties, u32 offset) {
            barrier_wait(shared_address(&s.raw_full[raw.slot]), raw.phase);
            barrier_wait(shared_address(&empties[ring.stage]), ring.phase);
            widen_tile(k_base + offset + ring.stage * TILE_BYTES, raw_base + raw.slot * RAW_BYTES);
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            barrier_arrive(shared_address(&fulls[ring.stage]));
            barrier_arrive(shared_address(&s.raw_empty[raw.slot]));
            ring.next();
            raw.next();
        };
        in_order(item, [&](u32) { turn(k, s.k_full, s.k_empty, 0); }, [&](u32) { turn(v, s.v_full, s.v_empty, STAGES * TILE_BYTES); });
    }
}

// The 64 rows of q of a warpgroup as f16, in place. Rows that no copy fills become zero, or what they were before could
// change the other rows' rounding.
DEVICE void narrow_queries(u32 q_at, u32 group) {
    if (TYPE == F16 && Q_TOKENS * G == 128) return;
#pragma unroll 2
    for (u32 i = threadIdx.x % 128; i < PARTS * 512; i += 128) {
        const u32 at = q_at + i / 512 * (128 * 128) + i % 512 * 16;
        uint4 v;
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
        v = to_half<TYPE>(v);
        if (Q_TOKENS * G < 128 && group * 64 + i % 512 / 8 >= Q_TOKENS * G) v = make_uint4(0, 0, 0, 0);
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    named_sync(1 + group, 128);
}
