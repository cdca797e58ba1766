// A kernel with a bug for each value of BUG but 0, which the emulator must find. Writes the sum of 32 numbers for each block.
typedef unsigned int u32;
typedef unsigned long long u64;

extern "C" __global__ void planted(const float* x, float* y, u32* arrived) {
    __shared__ __align__(16) float copy[64];
    __shared__ __align__(8) u64 barrier;
    const u32 lane = threadIdx.x, place = (u32)__cvta_generic_to_shared(copy), at = (u32)__cvta_generic_to_shared(&barrier);
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (BUG != 1) asm volatile("griddepcontrol.wait;" ::: "memory");
    if (lane == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
    if (BUG == 7) {
        if (lane < 16) __syncwarp();
    }
    __syncthreads();
    if (lane == 0 && BUG != 2) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 128;" ::"r"(at) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];" ::"r"(place),
                     "l"(x + (BUG == 3 ? 8 : 0)), "r"(at) : "memory");
    }
    if (BUG != 4)
        asm volatile("{ .reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\n@!p bra again; }" ::"r"(at) : "memory");
    float v = BUG == 5 ? copy[lane + 32] : BUG == 6 ? copy[lane + 64 * (lane + 1)] : copy[lane];
    if (BUG == 4) asm volatile("{ .reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\n@!p bra again; }" ::"r"(at) : "memory");
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    if (lane == 0) {
        y[blockIdx.x] = v;
        // Every block waits for all others.
        atomicAdd(arrived, 1);
        while (*(volatile u32*)arrived < gridDim.x) {}
    }
}
