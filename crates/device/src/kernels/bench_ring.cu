// Answers `count` words of mapped host memory: waits for `asked` to become n, writes n to `answered`.
#include "prelude.cuh"

extern "C" __global__ void bench_ring(const u32* asked, u32* answered, u32 count) {
    for (u32 n = 1; n <= count; n++) {
        u32 seen = 0;
        // If the host process is gone, trap instead of spinning forever.
        for (u32 spins = 0; seen != n; spins++) {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(asked) : "memory");
            if (spins > 20000000u) return;
        }
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(answered), "r"(n) : "memory");
    }
}
