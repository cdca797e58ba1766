// Dummy weights from a seed; the same bits as on any other device. YT.
#include "prelude.cuh"

extern "C" __global__ void __launch_bounds__(256)
noise(void* to, u32 rows, u32 cols, u32 stride, u64 seed, float mean, float scale) {
    let_successor_start();
    wait_for_predecessor();
    const u64 count = (u64)rows * cols;
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < count; i += (u64)gridDim.x * 256) {
        u64 z = seed + (i + 1) * 0x9E3779B97F4A7C15ull;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ z >> 27) * 0x94D049BB133111EBull;
        z ^= z >> 31;
        const float u = __fsub_rn(__fmul_rn((float)(z >> 40), 1.1920928955078125e-07f), 1.0f);
        store1<YT>(to, i / cols * stride + i % cols, __fadd_rn(mean, __fmul_rn(scale, u)));
    }
}
