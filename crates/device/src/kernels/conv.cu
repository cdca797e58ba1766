// A causal convolution of each channel over the tokens of a row, and SiLU. A thread has one channel. TAPS inputs make a
// result; those of tokens before the step are in the seat's carry, PLACES rows of channels: that of position p is row p mod
// PLACES. So a token that is fed again, because the draft at its position was rejected, finds the inputs before it. BIAS: there
// is one. Q_LEN: tokens of each row of a decode step. PIECE: tokens of a block. Types XT (inputs and carry), WT, BT, YT.
#include "prelude.cuh"

#define KEPT (TAPS - 1)

// The input at a position, in the carry of a seat; zero before the first.
DEVICE float kept_input(const void* carry, u64 seat, int position, u32 channels) {
    return position >= 0 ? load1<XT>(carry, seat + (u64)((u32)position % PLACES) * channels) : 0.0f;
}

// Tokens of the row's sequence before those of this step; -1 if it has none here or no seat of its own.
DEVICE int before(u32 seat, u32 tokens, u32 length, u32 seats, u32 context) {
    return seat < seats && tokens > 0 && length >= tokens && length <= context ? (int)(length - tokens) : -1;
}

DEVICE float convolve(const float* window, const float* w, float bias) {
    float sum = bias;
#pragma unroll
    for (int i = 0; i < TAPS; i++) sum = fmaf(window[i], w[i], sum);
    return sum / (1.0f + expf(-sum));
}

DEVICE float load_weights(const void* weight, const void* bias, u64 at, u32 c, float* w) {
#pragma unroll
    for (int i = 0; i < TAPS; i++) w[i] = load1<WT>(weight, at + i);
    return BIAS ? load1<BT>(bias, c) : 0.0f;
}

// One token of each row, or as many as verify drafts.
extern "C" __global__ void __launch_bounds__(256)
conv_step(const void* x, const void* weight, const void* bias, void* carry, void* y, const u32* row_seat, const u32* q_start,
          const u32* kv_len, const u32* token_row, u32 channels, u32 rows, u32 tokens, u32 seats, u32 context,
          u32 from, u32 x_stride, u32 w_stride, u32 carry_stride, u32 y_stride) {
    const u32 c = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    float w[TAPS], own = 0.0f;
    if (c < channels) own = load_weights(weight, bias, (u64)c * w_stride, c, w);
    let_successor_start();
    wait_for_predecessor();
    const u32 seat = row_seat[row];
    const u32 start = Q_LEN > 1 ? q_start[row] : row, count = Q_LEN > 1 ? q_start[row + 1] - start : 1;
    const int old = before(seat, count, kv_len[row], seats, context);
    if (old < 0 || c >= channels) return;
    const u64 kept = (u64)seat * carry_stride + c;
    float window[TAPS];
#pragma unroll
    for (int i = 0; i < KEPT; i++) window[i] = kept_input(carry, kept, old - KEPT + i, channels);
#pragma unroll
    for (u32 t = 0; t < Q_LEN; t++) {
        if (t >= count) break;
        window[KEPT] = load1<XT>(x, (u64)(start + t) * x_stride + from + c);
        store1<YT>(y, (u64)(start + t) * y_stride + c, convolve(window, w, own));
        store1<XT>(carry, kept + (u64)((old + t) % PLACES) * channels, window[KEPT]);
#pragma unroll
        for (int i = 0; i < KEPT; i++) window[i] = window[i + 1];
    }
}

// A piece of the step's tokens, which may belong to several rows.
extern "C" __global__ void __launch_bounds__(256)
conv(const void* x, const void* weight, const void* bias, void* carry, void* y, const u32* row_seat, const u32* q_start,
     const u32* kv_len, const u32* token_row, u32 channels, u32 rows, u32 tokens, u32 seats, u32 context,
     u32 from, u32 x_stride, u32 w_stride, u32 carry_stride, u32 y_stride) {
    const u32 c = blockIdx.x * 256 + threadIdx.x, first = blockIdx.y * PIECE;
    float w[TAPS], own = 0.0f;
    if (c < channels) own = load_weights(weight, bias, (u64)c * w_stride, c, w);
    let_successor_start();
    wait_for_predecessor();
    if (c >= channels) return;
    float window[TAPS];
    u32 known = 0xffffffffu;
    int old = -1;
    for (u32 t = first; t < min(first + PIECE, tokens); t++) {
        const u32 row = token_row[t];
        if (row >= rows) return;
        if (row != known) {
            known = row;
            const u32 start = q_start[row], seat = row_seat[row];
            old = before(seat, q_start[row + 1] - start, kv_len[row], seats, context);
            if (old < 0) continue;
            // The inputs before this token, one place further on than they are needed.
#pragma unroll
            for (int i = 0; i < KEPT; i++) {
                const int j = (int)(t - start) - KEPT + i;
                float input = 0.0f;
                if (j >= 0) input = load1<XT>(x, (u64)(start + j) * x_stride + from + c);
                else input = kept_input(carry, (u64)seat * carry_stride + c, old + j, channels);
                window[i + 1] = input;
            }
        }
        if (old < 0) continue;
#pragma unroll
        for (int i = 0; i < KEPT; i++) window[i] = window[i + 1];
        window[KEPT] = load1<XT>(x, (u64)t * x_stride + from + c);
        store1<YT>(y, (u64)t * y_stride + c, convolve(window, w, own));
    }
}

// The last inputs of each row are kept.
extern "C" __global__ void __launch_bounds__(256)
conv_carry(const void* x, const void* weight, const void* bias, void* carry, void* y, const u32* row_seat, const u32* q_start,
           const u32* kv_len, const u32* token_row, u32 channels, u32 rows, u32 tokens, u32 seats, u32 context,
           u32 from, u32 x_stride, u32 w_stride, u32 carry_stride, u32 y_stride) {
    const u32 c = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    let_successor_start();
    wait_for_predecessor();
    const u32 seat = row_seat[row], start = q_start[row], count = q_start[row + 1] - start;
    const int old = before(seat, count, kv_len[row], seats, context);
    if (old < 0 || c >= channels) return;
    const u64 kept = (u64)seat * carry_stride + c;
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        const int j = (int)count - KEPT + i;
        if (j < 0) continue;
        const float input = load1<XT>(x, (u64)(start + j) * x_stride + from + c);
        store1<XT>(carry, kept + (u64)((u32)(old + j) % PLACES) * channels, input);
    }
}
