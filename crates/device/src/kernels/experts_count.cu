// Counts a step of experts where no plan is made (experts_ref.cu). E (to 512), TOP.
#include "experts_plan.cuh"

extern "C" __global__ void __launch_bounds__(256)
experts_count(const u32* choice, const u32* live, u32 most, u64* load) {
    __shared__ u32 counts[E];
    for (u32 i = threadIdx.x; i < E; i += 256) counts[i] = 0;
    let_successor_start();
    wait_for_predecessor();
    __syncthreads();
    const u32 tokens = live ? min(*live, most) : most;
    for (u32 i = threadIdx.x; i < tokens * TOP; i += 256) atomicAdd(counts + choice[i / TOP * 2 * TOP + i % TOP], 1);
    __syncthreads();
    u32 chosen = 0;
    for (u32 i = threadIdx.x; i < E; i += 256)
        if (counts[i]) add_load(load, i, counts[i]), chosen++;
    if (chosen) add_load(load, E, chosen);
    if (threadIdx.x == 0) add_load(load, E + 1, 1);
}
