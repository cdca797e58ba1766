// Pages of keys and values: [page][keys, values][KV head][token][D]. Elements have the type of q (TYPE), or with KT =
// E4M3 they are bytes, in the same order, times a scale per KV head: k = byte · k_scale[head], v = byte ·
// v_scale[head]. Who writes a page stores value · (1 / scale), rounded to even and clamped to ±448. Readers widen bytes
// to f16, which is exact, so q and weights are f16 in their MMAs; the scale of keys becomes part of the factor of scores,
// that of values part of the result. Kernels have the arrays of scales as last arguments, only with E4M3.
#pragma once
#include "prelude.cuh"

#ifndef KT
#define KT TYPE
#endif
#define NARROW (KT == E4M3)
// Bytes of an element, the type of MMA.
#define ELEMENT (NARROW ? 1 : 2)
#define MT (NARROW ? F16 : TYPE)
#if NARROW
#define SCALES_OF_PAGES , const float* k_scale, const float* v_scale
#else
#define SCALES_OF_PAGES
#endif

// With SINKS (the type of their elements) a query head's softmax has one more term, which has no value. They are the last
// argument.
#ifdef SINKS
#define SINKS_PARAMETER , const void* sinks
#define SINKS_ARGUMENT , sinks
// What the sink adds to the sum of a head's weights, which are powers of 2 relative to `top`.
#define SINK_WEIGHT(query_head, top) exp2f(load1<SINKS>(sinks, query_head) * 1.44269504088896f - (top))
#define WITH_SINK(sum, query_head, top) ((sum) + SINK_WEIGHT(query_head, top))
#else
#define SINKS_PARAMETER
#define SINKS_ARGUMENT
#define WITH_SINK(sum, query_head, top) (sum)
#endif

// Two q as f16.
template <int T> DEVICE u32 to_half(u32 v) {
    if (T == F16) return v;
    u32 r;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high_half<T>(v)), "f"(low_half<T>(v)));
    return r;
}
template <int T> DEVICE uint4 to_half(uint4 v) {
    return make_uint4(to_half<T>(v.x), to_half<T>(v.y), to_half<T>(v.z), to_half<T>(v.w));
}

// Sixteen bytes of a token are a chunk. Eight tokens' chunks of one column lie in different banks.
#define BYTE_PITCH (D % 128 ? (D / 16 | 1) * 16 : D)
DEVICE u32 byte_place(u32 token, u32 chunk) { return token * BYTE_PITCH + (D % 128 ? chunk : chunk ^ token % 8) * 16; }

// The left operand of an MMA from two 8 × 8 matrices of pairs of bytes. Keys (not transposed): rows g and g + 8 are
// tokens, and lane j has elements 4j to 4j + 3 of the chunk, which the right operand must have in the same places.
DEVICE void widen_keys(u32 (&a)[4], u32 low, u32 high) {
    widen_fp8_half(low, a[0], a[2]);
    widen_fp8_half(high, a[1], a[3]);
}
// Values (transposed): rows g and g + 8 are elements 2g and 2g + 1 of the chunk, columns are tokens.
DEVICE void widen_values(u32 (&a)[4], u32 low, u32 high) {
    widen_fp8_half(__byte_perm(low, 0, 0x3120), a[0], a[1]);
    widen_fp8_half(__byte_perm(high, 0, 0x3120), a[2], a[3]);
}
