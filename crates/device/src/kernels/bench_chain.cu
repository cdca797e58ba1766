// A link of a chain of dependent small kernels: every block adds one to its own word. The host checks
// the words at the end. The links of `chain` read what the link before wrote, so that one that runs
// too early loses a step; those of `add` leave the adding to the memory and read nothing.
#include "prelude.cuh"

DEVICE void chain(u32* word) { *(volatile u32*)word += 1; }
DEVICE void add(u32* word) { asm volatile("red.global.add.u32 [%0], 1;" ::"l"(word) : "memory"); }

extern "C" __global__ void chain_plain(u32* words) {
    if (threadIdx.x == 0) chain(words + blockIdx.x);
}

extern "C" __global__ void chain_dependent(u32* words) {
    let_successor_start();
    wait_for_predecessor();
    if (threadIdx.x == 0) chain(words + blockIdx.x);
}

extern "C" __global__ void add_plain(u32* words) {
    if (threadIdx.x == 0) add(words + blockIdx.x);
}

extern "C" __global__ void add_dependent(u32* words) {
    let_successor_start();
    wait_for_predecessor();
    if (threadIdx.x == 0) add(words + blockIdx.x);
}
