// A link of a chain of dependent small kernels. The host checks the words at the end.
#include "prelude.cuh"

DEVICE void add_one(u32* word) { asm volatile("red.global.add.u32 [%0], 1;" ::"l"(word) : "memory"); }

extern "C" __global__ void chain_plain(u32* words) {
    if (threadIdx.x == 0) add_one(words + blockIdx.x);
}

extern "C" __global__ void chain_dependent(u32* words) {
    let_successor_start();
    wait_for_predecessor();
    if (threadIdx.x == 0) add_one(words + blockIdx.x);
}

// Reads what the link before wrote: a link that runs too early loses a step.
extern "C" __global__ void chain_ordered(u32* words) {
    let_successor_start();
    wait_for_predecessor();
    if (threadIdx.x == 0) *(volatile u32*)(words + blockIdx.x) += 1;
}
