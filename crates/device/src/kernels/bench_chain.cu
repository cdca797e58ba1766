// A link of a chain of dependent small kernels: every block adds one to its own word, in a separate cache line so
// that blocks do not queue at one slice of the cache. The host checks the words at the end. The links of `chain` read
// what the previous link wrote, so one that runs too early loses an increment; those of `add` use atomic additions in
// memory and read nothing.
#include "prelude.cuh"

// Bypasses the first-level cache, which may be stale. No stronger ordering is needed: the boundary between the
// kernels orders the links.
DEVICE void chain(u32* word) {
    u32 value;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    asm volatile("st.global.cg.u32 [%0], %1;" ::"l"(word), "r"(value + 1) : "memory");
}
DEVICE void add(u32* word) { asm volatile("red.global.add.u32 [%0], 1;" ::"l"(word) : "memory"); }

DEVICE u32* own_word(u32* words) { return words + blockIdx.x * (LINE / 4); }

// Before the wait a link does what every kernel should do: it computes its address and prefetches it, which also
// loads the translation.
DEVICE u32* expected_word(u32* words) {
    u32* word = own_word(words);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(word));
    return word;
}

extern "C" __global__ void chain_plain(u32* words) {
    if (threadIdx.x == 0) chain(own_word(words));
}

extern "C" __global__ void chain_dependent(u32* words) {
    let_successor_start();
    if (threadIdx.x != 0) return;
    u32* word = expected_word(words);
    wait_for_predecessor();
    chain(word);
}

extern "C" __global__ void add_plain(u32* words) {
    if (threadIdx.x == 0) add(own_word(words));
}

extern "C" __global__ void add_dependent(u32* words) {
    let_successor_start();
    if (threadIdx.x != 0) return;
    u32* word = expected_word(words);
    wait_for_predecessor();
    add(word);
}
