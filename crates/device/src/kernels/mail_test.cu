// The device's half of the mail and ring protocol, alone: for each launch number, waits for its mail, answers every
// row, publishes. The answer to a row of another launch would be different, which the host notices.

__device__ __forceinline__ unsigned load_acquire(const unsigned* p) {
    unsigned v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ void store_release(unsigned* p, unsigned v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ unsigned rotate(unsigned v, int by) {
    return v << by | v >> (32 - by);
}

extern "C" __global__ void mail_test(
    const unsigned* even, const unsigned* odd, unsigned* ring, unsigned count) {
    unsigned lane = threadIdx.x;
    for (unsigned launch = 1; launch <= count; ++launch) {
        const unsigned* bank = launch & 1 ? odd : even;
        // Every lane acquires for itself, so that its next reads are ordered after its own load. If the host process
        // is gone, trap instead of spinning forever.
        for (unsigned spins = 0; load_acquire(bank) != launch; ++spins) {
            if (spins > 20000000u) return;
        }
        unsigned rows = load_acquire(bank + 2);
        unsigned* entry = ring + launch % RING_ENTRIES * ENTRY_WORDS;
        if (lane < rows) {
            const volatile unsigned* row = bank + MAIL_ROWS + 3 * lane;
            unsigned seat = row[0], q_len = row[1], flags = row[2];
            volatile unsigned* out = entry + 16 + lane * 44;
            out[0] = (seat + rotate(q_len, 11)) ^ flags;
            out[1] = 1;
        }
        __threadfence_system();
        __syncwarp();
        if (lane == 0) {
            entry[2] = rows;
            entry[1] = 0;
            store_release(entry, launch);
        }
        __syncwarp();
    }
}
