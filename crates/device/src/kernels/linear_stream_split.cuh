// The end of `linear_stream.cu` where SPLIT blocks of a cluster share K: each block adds up its warps' parts, and finishes every
// SPLIT-th tile of a batch with the sums of all blocks, in the order of their shares.
#pragma once

DEVICE void finish_together(const float* parts, u32 which, u32 item, bool has, u32 tile, u32 out, u32 row, float before, const void* bias, void* y, u32 stride, const float* scales) {
    // Of two batches: a block writes one while another may still read the one before.
    __shared__ float shares[2][BATCH * 16 * ROWS];
    float sum = 0.0f;
    if (has) {
#pragma unroll
        for (int i = 0; i < WARPS; i++) sum += parts[i * (16 * ROWS) + row * 16 + out];
        shares[which][threadIdx.x] = sum;
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    const u32 column = tile * 16 + out;
    if (!has || item % SPLIT != blockIdx.x % SPLIT || column >= N) return;
    sum = 0.0f;
#pragma unroll
    for (u32 from = 0; from < SPLIT; from++) {
        float v;
        asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.f32 %0, [there];\n}" : "=f"(v) : "r"(shared_address(&shares[which][threadIdx.x])), "r"(from) : "memory");
        sum += v;
    }
    if (WEIGHT == FP8_CHANNEL) sum *= scales[column];
    if (BIAS) sum += load1<BT>(bias, column);
    store1<YT>(y, (u64)row * stride + column, after(sum + before));
}
