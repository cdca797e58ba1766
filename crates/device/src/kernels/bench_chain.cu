// A link of a chain of dependent small kernels: every block adds one to its own word, which the link
// before wrote. The host checks the sums, so a link that ran too early is noticed.
#include "prelude.cuh"

extern "C" __global__ void chain_plain(u32* words) {
    if (threadIdx.x == 0) *(volatile u32*)(words + blockIdx.x) += 1;
}

extern "C" __global__ void chain_dependent(u32* words) {
    let_successor_start();
    wait_for_predecessor();
    if (threadIdx.x == 0) *(volatile u32*)(words + blockIdx.x) += 1;
}
