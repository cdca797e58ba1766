// A matrix for each head, for any formats: a block per row and head. K inputs, N outputs, EACH elements of a head of x;
// TURNED: the head's matrix is K × N, else N × K. Types XT, WT, YT. A warp computes a result of the plain form, a thread
// one of the turned form: either way neighbouring lanes read neighbouring weights.
#include "prelude.cuh"

extern "C" __global__ void __launch_bounds__(256)
head_linear_ref(const void* x, const void* w, void* y, u32 x_stride, u32 w_stride, u32 y_stride, const u32* live) {
    __shared__ float input[K];
    const u32 row = blockIdx.x, head = blockIdx.y;
    let_successor_start();
    wait_for_predecessor();
    if (live && row >= *live) return;
    const u64 from = (u64)row * x_stride + head * EACH, to = (u64)row * y_stride + head * (N + EACH - K);
    for (u32 i = threadIdx.x; i < K; i += 256) input[i] = load1<XT>(x, from + i);
    for (u32 i = K + threadIdx.x; i < EACH; i += 256) store1<YT>(y, to + N + i - K, load1<XT>(x, from + i));
    __syncthreads();
#if TURNED
    for (u32 j = threadIdx.x; j < N; j += 256) {
        float sum = 0.0f;
        for (u32 i = 0; i < K; i++) sum += input[i] * load1<WT>(w, (u64)(head * K + i) * w_stride + j);
        store1<YT>(y, to + j, sum);
    }
#else
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 j = warp; j < N; j += 8) {
        float sum = 0.0f;
        for (u32 i = lane; i < K; i += 32) sum += input[i] * load1<WT>(w, (u64)(head * N + j) * w_stride + i);
        sum = warp_sum(sum);
        if (lane == 0) store1<YT>(y, to + j, sum);
    }
#endif
}
