// One token of each row through a recurrent layer: the gates of each head from the residual stream, a convolution, the gated
// delta rule, a norm of each head and its output gate; conv.cu, scan.cu and gated.cu as one launch. A cluster has the heads
// that share a key: a block has 32 columns of one head's matrix, and the blocks of a head exchange the squares of their
// results. Every block convolves the queries and keys that it needs by itself; the first one keeps their inputs, as conv.cu
// does, when all of the cluster have read what was kept.
//
// What a row carries was written in an earlier step, and the tables by the prologue, which lets its successors start only at
// its end. So all that is read before the predecessor has ended. Roundings and the order of sums of the matrix are those of
// the kernels for prompts: the state has the same bits if the gates have.
//
// KEY (a multiple of 16), VALUE (a multiple of 32), HEADS, SHARE heads for a key, Q_AT, K_AT, V_AT (channels), TAPS, BIAS, SILU
// (else sigmoid). GATES: the gates are made here, of bf16 weights and H (a multiple of 1024) columns, with a norm if NORMED.
// Types XT (inputs and what is kept of them), WT, BT (weights and bias of the convolution), CT (its result), GT (gates), AT, DT,
// ST (the scan's result), ZT, OT (the norm's weight), NT (that of the gates' norm), YT.
#include "prelude.cuh"

#define WARPS 4
#define THREADS (WARPS * 32)
#define COLUMNS (WARPS * 8)
#define PARTS (VALUE / COLUMNS)
#define PER (KEY / 4)
#define KEPT (TAPS - 1)
// Channels of a query, and of a key, that a thread has; pieces of eight columns of H.
#define OWN ((KEY + THREADS - 1) / THREADS)
#define PIECES (GATES ? H / (THREADS * 8) : 0)

struct Shared {
    float q[KEY], k[KEY], v[COLUMNS];
    float sums[WARPS][3], squares[PARTS * WARPS];
};

// From L2: what earlier kernels wrote.
template <int T> DEVICE float load_written(const void* p, u64 i) {
    if (T == F32) return __ldcg((const float*)p + i);
    const u16 v = __ldcg((const u16*)p + i);
    return T == F16 ? f16_to_float(v) : bf16_to_float(v);
}
DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// A channel of the convolution, with the inputs before this token: that of position p is row p mod KEPT of what is kept.
struct Channel {
    float w[TAPS], window[TAPS], bias;
    DEVICE void load(const void* weight, const void* biases, const void* carry, u64 kept, u32 channels, u32 stride, u32 c, int before) {
#pragma unroll
        for (int i = 0; i < TAPS; i++) w[i] = load1<WT>(weight, (u64)c * stride + i);
#pragma unroll
        for (int i = 0; i < KEPT; i++) {
            const int position = before - KEPT + i;
            window[i] = position >= 0 ? load_written<XT>(carry, kept + (u64)(position % KEPT) * channels + c) : 0.0f;
        }
        bias = BIAS ? load1<BT>(biases, c) : 0.0f;
    }
    DEVICE float result() const {
        float sum = bias;
#pragma unroll
        for (int i = 0; i < TAPS; i++) sum = fmaf(window[i], w[i], sum);
        return rounded<CT>(sum / (1.0f + expf(-sum)));
    }
    DEVICE void keep(void* carry, u64 kept, u32 channels, u32 c, int before) const {
        store1<XT>(carry, kept + (u64)(before % KEPT) * channels + c, window[KEPT]);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
recurrent(const void* x, const void* weight, const void* bias, void* conv_carry, const void* gates, const void* a, const void* dt,
          float* carry, const void* z, const void* norm, void* y, const u32* row_seat, const u32* kv_len, u32 channels, u32 seats,
          u32 context, u32 from, u32 x_stride, u32 w_stride, u32 conv_stride, u32 gates_from, u32 gates_stride, u32 carry_stride,
          u32 z_from, u32 z_stride, u32 y_stride, float length_eps, float eps, const void* hidden, const void* hidden_norm,
          const u16* gate_weights, u32 hidden_stride, float hidden_eps) {
#if __CUDA_ARCH__ >= 900
    __shared__ __align__(16) Shared s;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane / 8, own = warp * 8 + lane % 8;
    const u32 group = blockIdx.y, head = group * SHARE + blockIdx.x / PARTS, row = blockIdx.z;
    const u32 first = blockIdx.x % PARTS * COLUMNS, column = first + own;
    const u32 seat = __ldcg(row_seat + row), length = __ldcg(kv_len + row);
    // Pad rows have no seat of their own, and must not change what seats carry.
    const bool live = seat < seats && length > 0 && length <= context;
    const int before = live ? length - 1 : 0;
    const u64 kept = (u64)seat * conv_stride;
    float* const matrix = carry + (u64)seat * carry_stride + (u64)head * KEY * VALUE + column;
    float state[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) state[i] = before > 0 ? __ldcg(matrix + (u64)(i / 4 * 16 + part * 4 + i % 4) * VALUE) : 0.0f;
    Channel q[OWN], k[OWN], v;
    const u32 q_at = Q_AT + group * KEY + threadIdx.x, k_at = K_AT + group * KEY + threadIdx.x, v_at = V_AT + head * VALUE + first + threadIdx.x;
#pragma unroll
    for (int i = 0; i < OWN; i++)
        if (KEY % THREADS == 0 || i * THREADS + threadIdx.x < KEY) {
            q[i].load(weight, bias, conv_carry, kept, channels, w_stride, q_at + i * THREADS, before);
            k[i].load(weight, bias, conv_carry, kept, channels, w_stride, k_at + i * THREADS, before);
        }
    if (threadIdx.x < COLUMNS) v.load(weight, bias, conv_carry, kept, channels, w_stride, v_at, before);
    const float rate = -expf(load1<AT>(a, head)), offset = load1<DT>(dt, head), factor = load1<OT>(norm, column);
#if GATES
    uint4 held[2][PIECES];
    float scales[PIECES][8];
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        const u32 c = (p * THREADS + threadIdx.x) * 8;
        held[0][p] = *(const uint4*)(gate_weights + (u64)head * H + c);
        held[1][p] = *(const uint4*)(gate_weights + (u64)(HEADS + head) * H + c);
        if (NORMED) load8<NT>(hidden_norm, c, scales[p]);
    }
#endif
    let_successor_start();
    wait_for_predecessor();
    if (!live) return;
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    const u64 input = (u64)row * x_stride + from;
#pragma unroll
    for (int i = 0; i < OWN; i++)
        if (KEY % THREADS == 0 || i * THREADS + threadIdx.x < KEY) {
            q[i].window[KEPT] = load_written<XT>(x, input + q_at + i * THREADS);
            k[i].window[KEPT] = load_written<XT>(x, input + k_at + i * THREADS);
        }
    if (threadIdx.x < COLUMNS) v.window[KEPT] = load_written<XT>(x, input + v_at);
    const float out = load_written<ZT>(z, (u64)row * z_stride + z_from + head * VALUE + column);
#if GATES
    float dots[3] = {0.0f, 0.0f, 0.0f};
    uint4 tokens[PIECES];
#pragma unroll
    for (int p = 0; p < PIECES; p++) tokens[p] = __ldcg((const uint4*)((const u16*)hidden + (u64)row * hidden_stride + (p * THREADS + threadIdx.x) * 8));
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        const u32 t[4] = {tokens[p].x, tokens[p].y, tokens[p].z, tokens[p].w};
        const u32 b[2][4] = {{held[0][p].x, held[0][p].y, held[0][p].z, held[0][p].w}, {held[1][p].x, held[1][p].y, held[1][p].z, held[1][p].w}};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float lo = low_half<BF16>(t[i]), hi = high_half<BF16>(t[i]);
            if (NORMED) {
                dots[2] = fmaf(lo, lo, dots[2]), dots[2] = fmaf(hi, hi, dots[2]);
                lo = rounded<BF16>(lo * scales[p][2 * i]), hi = rounded<BF16>(hi * scales[p][2 * i + 1]);
            }
#pragma unroll
            for (int n = 0; n < 2; n++)
                dots[n] = fmaf(low_half<BF16>(b[n][i]), lo, dots[n]), dots[n] = fmaf(high_half<BF16>(b[n][i]), hi, dots[n]);
        }
    }
#pragma unroll
    for (int n = 0; n < 2 + NORMED; n++) {
        dots[n] = warp_sum(dots[n]);
        if (lane == 0) s.sums[warp][n] = dots[n];
    }
#endif
#pragma unroll
    for (int i = 0; i < OWN; i++)
        if (KEY % THREADS == 0 || i * THREADS + threadIdx.x < KEY) {
            s.q[i * THREADS + threadIdx.x] = q[i].result();
            s.k[i * THREADS + threadIdx.x] = k[i].result();
        }
    if (threadIdx.x < COLUMNS) s.v[threadIdx.x] = v.result();
    __syncthreads();

    // The lengths of query and key, in every warp.
    float qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
    for (int i = 0; i < (KEY + 31) / 32; i++) {
        const u32 c = i * 32 + lane;
        const float one = c < KEY ? s.q[c] : 0.0f, other = c < KEY ? s.k[c] : 0.0f;
        qq = fmaf(one, one, qq), kk = fmaf(other, other, kk), qk = fmaf(one, other, qk);
    }
    qk = warp_sum(qk);
    const float q_scale = 1.0f / (sqrtf(warp_sum(qq) + length_eps) * sqrtf((float)KEY)), k_scale = 1.0f / sqrtf(warp_sum(kk) + length_eps);
    const float both = qk * q_scale * k_scale;
#if GATES
    float gate[3] = {0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < WARPS; w++)
#pragma unroll
        for (int n = 0; n < 2 + NORMED; n++) gate[n] += s.sums[w][n];
    const float by = NORMED ? rsqrtf(gate[2] * (1.0f / H) + hidden_eps) : 1.0f;
    const float beta = rounded<GT>(gate[0] * by), alpha = rounded<GT>(gate[1] * by);
#else
    const u64 gates_at = (u64)row * gates_stride + gates_from + head;
    const float beta = load_written<GT>(gates, gates_at), alpha = load_written<GT>(gates, gates_at + HEADS);
#endif
    const float decay = expf(rate * softplus(alpha + offset)), strength = 1.0f / (1.0f + expf(-beta));

    float known = 0.0f, result = 0.0f;
#pragma unroll
    for (int m = 0; m < PER / 4; m++) {
        const float4 q4 = *(const float4*)&s.q[16 * m + 4 * part], k4 = *(const float4*)&s.k[16 * m + 4 * part];
        const float qs[4] = {q4.x, q4.y, q4.z, q4.w}, ks[4] = {k4.x, k4.y, k4.z, k4.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            state[4 * m + i] = __fmul_rn(state[4 * m + i], decay);
            known = fmaf(__fmul_rn(ks[i], k_scale), state[4 * m + i], known);
            result = fmaf(__fmul_rn(qs[i], q_scale), state[4 * m + i], result);
        }
    }
#pragma unroll
    for (int away = 8; away < 32; away *= 2) {
        known += __shfl_xor_sync(FULL, known, away);
        result += __shfl_xor_sync(FULL, result, away);
    }
    const float change = __fmul_rn(strength, s.v[own] - known);
#pragma unroll
    for (int m = 0; m < PER / 4; m++) {
        const float4 k4 = *(const float4*)&s.k[16 * m + 4 * part];
        const float ks[4] = {k4.x, k4.y, k4.z, k4.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            state[4 * m + i] = fmaf(__fmul_rn(ks[i], k_scale), change, state[4 * m + i]);
            matrix[(u64)(m * 16 + part * 4 + i) * VALUE] = state[4 * m + i];
        }
    }
    result = rounded<ST>(fmaf(both, change, result));

    // The squares of a head's results: those of a warp's columns go to all of its blocks.
    float square = result * result;
#pragma unroll
    for (int away = 1; away < 8; away *= 2) square += __shfl_xor_sync(FULL, square, away);
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (lane < PARTS)
        asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nst.shared::cluster.f32 [there], %2;\n}" ::
                         "r"(shared_address(&s.squares[blockIdx.x % PARTS * WARPS + warp])),
                     "r"(blockIdx.x / PARTS * PARTS + lane), "f"(square)
                     : "memory");
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    // All of the cluster have read what was kept.
    if (blockIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < OWN; i++)
            if (KEY % THREADS == 0 || i * THREADS + threadIdx.x < KEY) {
                q[i].keep(conv_carry, kept, channels, q_at + i * THREADS, before);
                k[i].keep(conv_carry, kept, channels, k_at + i * THREADS, before);
            }
    }
    if (threadIdx.x < COLUMNS) v.keep(conv_carry, kept, channels, v_at, before);
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < PARTS * WARPS; w++) total += s.squares[w];
    const float scale = 1.0f / sqrtf(total / (float)VALUE + eps), share = 1.0f / (1.0f + expf(-out));
    result *= scale * factor;
    result *= SILU ? out * share : share;
    if (part == 0) store1<YT>(y, (u64)row * y_stride + head * VALUE + column, result);
#endif
}
