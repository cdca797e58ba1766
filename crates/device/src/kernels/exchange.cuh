// Kernels whose blocks stay and wait for each other: words with a tag from block to block, and a ring of stages in shared
// memory that one warp keeps full.
//
// COPIES (of words that every block reads), STAGES.
#pragma once
#include "prelude.cuh"

// ---- the exchange -----------------------------------------------------------------------------

DEVICE void send(u64* to, u32 data, u32 tag) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"((u64)tag << 32 | data) : "memory");
}
template <int WORDS> DEVICE void send_copies(u64* to, u32 data, u32 tag) {
#pragma unroll
    for (int c = 0; c < COPIES; c++) send(to + c * WORDS, data, tag);
}
DEVICE u64 peek(const u64* from) {
    u64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
    return v;
}
DEVICE void peek2(const u64* from, u64& a, u64& b) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
}
DEVICE bool fresh(u64 word, u32 tag) { return (u32)(word >> 32) == tag; }

// Traps if another block never arrives, so that the GPU does not spin forever.
struct Patience {
    u32 spins = 0;
    DEVICE void lose() {
        if (++spins > (1u << 25)) __trap();
    }
};

// ---- the ring of stages -----------------------------------------------------------------------

DEVICE void wait_for(u32 barrier, u32 parity) {
    asm volatile("{ .reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again; }" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}
DEVICE void wait_for_both(u32 a, u32 a_parity, u32 b, u32 b_parity) {
    asm volatile("{ .reg .pred p, q;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 q, [%2], %3;\nand.pred p, p, q;\n@!p bra again; }" ::"r"(a),
                 "r"(a_parity), "r"(b), "r"(b_parity)
                 : "memory");
}
// Every lane that has read arrives itself. One lane for its warp, after a `__syncwarp`, would be enough, but
// racecheck does not understand it.
DEVICE void arrive(u32 barrier, u32 warps = 1) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(warps) : "memory");
}
DEVICE void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}

// A place in the ring; the fetching and the computing warps advance it in the same way.
struct Place {
    u32 slot, parity;
    DEVICE void next() {
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    DEVICE Place after(u32 stages) const {
        Place p = {slot + stages, parity};
        while (p.slot >= STAGES) p.slot -= STAGES, p.parity ^= 1;
        return p;
    }
};
