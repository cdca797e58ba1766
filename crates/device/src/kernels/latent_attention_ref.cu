// Attention over pages of latents for any formats: a block of four warps per token and head. q is already in the space of
// latents and rotated, and this step's latents are in their pages ([page][token][D]; the first LATENT elements are the
// values). D, LATENT, PAGE, SINGLE; types XT (q), KT (pages), YT. A warp takes every fourth position, so the order of
// sums follows from a token's position alone.
#include "prelude.cuh"

#define PER ((D + 31) / 32)

extern "C" __global__ void __launch_bounds__(128)
latent_attention_ref(const void* q, const void* kv, void* out, const u32* row_seat, const u32* q_start,
                     const u32* kv_len, const u32* page_table, const u32* token_row, u32 rows, u32 pages_per_seat,
                     u32 q_stride, u32 out_stride, float scale) {
    __shared__ float merged[4][LATENT];
    __shared__ float maxima[4], totals[4];
    const u32 t = blockIdx.x, h = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    let_successor_start();
    wait_for_predecessor();
    const u32 row = SINGLE ? t : token_row[t];
    if (row >= rows) return;
    const u32 length = kv_len[row];
    const u64 to = (u64)t * out_stride + h * LATENT;
    if (length == 0) {
        if (SINGLE)
            for (u32 i = threadIdx.x; i < LATENT; i += 128) store1<YT>(out, to + i, 0.0f);
        return;
    }
    const u32 place = SINGLE ? length - 1 : length - (q_start[row + 1] - q_start[row]) + (t - q_start[row]);
    const u32* pages = page_table + (u64)row_seat[row] * pages_per_seat;
    float query[PER], sums[PER], maximum = -INFINITY, total = 0.0f;
#pragma unroll
    for (int c = 0; c < PER; c++) {
        const u32 i = lane + 32 * c;
        query[c] = i < D ? load1<XT>(q, (u64)t * q_stride + h * D + i) * scale : 0.0f;
        sums[c] = 0.0f;
    }
    for (u32 p = warp; p <= place; p += 4) {
        const u64 line = ((u64)pages[p / PAGE] * PAGE + p % PAGE) * D;
        float v[PER], score = 0.0f;
#pragma unroll
        for (int c = 0; c < PER; c++) {
            v[c] = lane + 32 * c < D ? load1<KT>(kv, line + lane + 32 * c) : 0.0f;
            score += query[c] * v[c];
        }
        score = warp_sum(score);
        const float top = fmaxf(maximum, score), keep = expf(maximum - top), weight = expf(score - top);
        total = total * keep + weight;
#pragma unroll
        for (int c = 0; c < PER; c++) sums[c] = sums[c] * keep + weight * v[c];
        maximum = top;
    }
#pragma unroll
    for (int c = 0; c < PER; c++)
        if (lane + 32 * c < LATENT) merged[warp][lane + 32 * c] = sums[c];
    if (lane == 0) maxima[warp] = maximum, totals[warp] = total;
    __syncthreads();
    float top = maxima[0];
    for (int w = 1; w < 4; w++) top = fmaxf(top, maxima[w]);
    total = 0.0f;
    for (int w = 0; w < 4; w++) total += totals[w] * expf(maxima[w] - top);
    for (u32 i = threadIdx.x; i < LATENT; i += 128) {
        float v = 0.0f;
        for (int w = 0; w < 4; w++) v += merged[w][i] * expf(maxima[w] - top);
        store1<YT>(out, to + i, v / total);
    }
}
