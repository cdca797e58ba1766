// Attention for any formats: a block of four warps per token and query head. q is already rotated and
// this step's k and v are already in their pages. D, HQ, HKV, PAGE, WINDOW (0: none), CAUSAL, SINGLE;
// types XT (q), KT (pages; for E4M3 see pages.cuh), YT; SOFTCAP if scores are capped; SINKS (pages.cuh).
#include "pages.cuh"

#define PER ((D + 31) / 32)

extern "C" __global__ void __launch_bounds__(128)
attention_ref(const void* qkv, const void* kv, void* out, const u32* row_seat, const u32* q_start, const u32* kv_len,
              const u32* page_table, const u32* token_row, u32 rows, u32 pages_per_seat, u32 q_stride,
              u32 out_stride, float scale SCALES_OF_PAGES SINKS_PARAMETER) {
    __shared__ float merged[4][D];
    __shared__ float maxima[4], totals[4];
    const u32 t = blockIdx.x, h = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 head = h / (HQ / HKV);
    let_successor_start();
    wait_for_predecessor();
    const u32 row = SINGLE ? t : token_row[t];
    if (row >= rows) return;
    const u32 length = kv_len[row];
    if (length == 0) {
        if (SINGLE)
            for (u32 i = threadIdx.x; i < D; i += 128) store1<YT>(out, (u64)t * out_stride + h * D + i, 0.0f);
        return;
    }
    const u32 place = SINGLE ? length - 1 : length - (q_start[row + 1] - q_start[row]) + (t - q_start[row]);
    const u32 begin = WINDOW && place + 1 > WINDOW ? place + 1 - WINDOW : 0;
    const u32 last = CAUSAL ? place : WINDOW ? min(length - 1, place + WINDOW - 1) : length - 1;
    const u32* pages = page_table + (u64)row_seat[row] * pages_per_seat;
#if NARROW
    scale *= __ldg(k_scale + head);
    const float scale_of_v = __ldg(v_scale + head);
#else
    const float scale_of_v = 1.0f;
#endif
    float q[PER], sums[PER], maximum = -INFINITY, total = 0.0f;
#pragma unroll
    for (int c = 0; c < PER; c++) {
        const u32 i = lane + 32 * c;
        q[c] = i < D ? load1<XT>(qkv, (u64)t * q_stride + h * D + i) * scale : 0.0f;
        sums[c] = 0.0f;
    }
    for (u32 p = begin + warp; p <= last; p += 4) {
        const u64 k = ((u64)pages[p / PAGE] * 2 * HKV + head) * (PAGE * D) + p % PAGE * D;
        const u64 v = k + (u64)HKV * PAGE * D;
        float score = 0.0f;
#pragma unroll
        for (int c = 0; c < PER; c++)
            if (lane + 32 * c < D) score += q[c] * load1<KT>(kv, k + lane + 32 * c);
        score = warp_sum(score);
        if (SOFTCAP > 0.0f) score = SOFTCAP * tanhf(score / SOFTCAP);
        const float top = fmaxf(maximum, score), keep = expf(maximum - top), weight = expf(score - top);
        total = total * keep + weight;
#pragma unroll
        for (int c = 0; c < PER; c++)
            if (lane + 32 * c < D) sums[c] = sums[c] * keep + weight * load1<KT>(kv, v + lane + 32 * c);
        maximum = top;
    }
#pragma unroll
    for (int c = 0; c < PER; c++)
        if (lane + 32 * c < D) merged[warp][lane + 32 * c] = sums[c];
    if (lane == 0) maxima[warp] = maximum, totals[warp] = total;
    __syncthreads();
    float top = maxima[0];
    for (int w = 1; w < 4; w++) top = fmaxf(top, maxima[w]);
    total = 0.0f;
    for (int w = 0; w < 4; w++) total += totals[w] * expf(maxima[w] - top);
#ifdef SINKS
    total += expf(load1<SINKS>(sinks, h) - top);
#endif
    for (u32 i = threadIdx.x; i < D; i += 128) {
        float v = 0.0f;
        for (int w = 0; w < 4; w++) v += merged[w][i] * expf(maxima[w] - top);
        store1<YT>(out, (u64)t * out_stride + h * D + i, NARROW ? v * scale_of_v / total : v / total);
    }
}
