// Experts for any formats and shapes: no plan, a warp for each output. `experts_up` makes act(gate)·up of every
// assignment of a token, `experts_down` the weighed sum over a token's experts. Without GATED there are rows of up alone,
// and its sums are cut off at 0 and squared.
// XT (x, act), UT (gate_up), DT (down), RT (residual), YT, H, I, EXPERTS, TOP, GATED, what experts_gate.cuh wants, RESIDUAL,
// ALIGNED (rows of x, gate_up and down).
#include "experts_gate.cuh"
#include "scaled.cuh"

template <int T> DEVICE float product(const void* x, u64 at, const void* w, u32 rows, u32 row, u32 k) {
    float sum = 0.0f;
    for (u32 i = threadIdx.x % 32 * 8; i < k; i += 256) {
        float a[8], b[8];
        if (ALIGNED) load8<XT>(x, at + i, a);
        else
            for (u32 t = 0; t < 8; t++) a[t] = i + t < k ? load1<XT>(x, at + i + t) : 0.0f;
        if (T > BF16 || ALIGNED) elements8<T>(w, rows, k, k, row, i, b);
        else
            for (u32 t = 0; t < 8; t++) b[t] = i + t < k ? load1<T>(w, (u64)row * k + i + t) : 0.0f;
#pragma unroll
        for (int t = 0; t < 8; t++) sum += a[t] * b[t];
    }
    return warp_sum(sum);
}

extern "C" __global__ void __launch_bounds__(256)
experts_up(const void* x, const u32* choice, const void* w, void* act, const u32* live, u32 most, u32 x_stride
           UP_BIAS_PARAMETER) {
    const u32 token = blockIdx.x / TOP, slot = blockIdx.x % TOP, i = blockIdx.y * 8 + threadIdx.x / 32;
    let_successor_start();
    wait_for_predecessor();
    if (token >= (live ? min(*live, most) : most) || i >= I) return;
    const u32 expert = choice[(u64)token * 2 * TOP + slot];
#if GATED
    // Rows of gate and up take turns of eight.
    const u32 row = expert * 2 * I + i / 8 * 16 + i % 8;
    float gate = product<UT>(x, (u64)token * x_stride, w, EXPERTS * 2 * I, row, H);
    float up = product<UT>(x, (u64)token * x_stride, w, EXPERTS * 2 * I, row + 8, H);
#ifdef UP_BIAS
    gate += BIAS_OF_UP(row), up += BIAS_OF_UP(row + 8);
#endif
    const float result = gated_exactly(gate, up);
#else
    const u32 row = expert * I + i;
    const float up = fmaxf(product<UT>(x, (u64)token * x_stride, w, EXPERTS * I, row, H) + BIAS_OF_UP(row), 0.0f);
    const float result = up * up;
#endif
    if (threadIdx.x % 32 == 0) store1<XT>(act, (u64)blockIdx.x * I + i, result);
}

extern "C" __global__ void __launch_bounds__(256)
experts_down(const void* act, const u32* choice, const void* w, const void* residual, void* y, const u32* live, u32 most,
             u32 r_stride, u32 y_stride DOWN_BIAS_PARAMETER) {
    const u32 token = blockIdx.x, column = blockIdx.y * 8 + threadIdx.x / 32;
    let_successor_start();
    wait_for_predecessor();
    if (token >= (live ? min(*live, most) : most) || column >= H) return;
    float sum = RESIDUAL ? load1<RT>(residual, (u64)token * r_stride + column) : 0.0f;
    for (u32 slot = 0; slot < TOP; slot++) {
        const u32 expert = choice[(u64)token * 2 * TOP + slot];
        const float weight = __uint_as_float(choice[(u64)token * 2 * TOP + TOP + slot]);
        float out = product<DT>(act, ((u64)token * TOP + slot) * I, w, EXPERTS * H, expert * H + column, I);
#ifdef DOWN_BIAS
        out += BIAS_OF_DOWN(expert * H + column);
#endif
        sum += weight * out;
    }
    if (threadIdx.x % 32 == 0) store1<YT>(y, (u64)token * y_stride + column, sum);
}
