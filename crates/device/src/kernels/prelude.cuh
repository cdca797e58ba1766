// The base of every kernel: number formats by bit operations, dependent launch, reductions, asynchronous copies and
// matrix instructions. No CUDA header is needed.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// The values of the dtype macros (XT, WT, …).
#define F32 0
#define F16 1
#define BF16 2
#define E4M3 3
#define Q4_0 10
#define Q4_1 11
#define Q5_0 12
#define Q5_1 13
#define Q8_0 14
#define Q2K 20
#define Q3K 21
#define Q4K 22
#define Q5K 23
#define Q6K 24
// With scales: `scaled.cuh`.
#define F8_ROW 30
#define F8_BLOCK 31
#define F8_PAIRS 32
#define F8_TURNS 33
#define I4_128 34
#define I4_64 35
#define I4_32 36
#define MXFP4 37

#define DEVICE __device__ __forceinline__
#define FULL 0xffffffffu
#define INFINITY __int_as_float(0x7f800000)

// ---- dependent launch -------------------------------------------------------------------------
// Nothing that an earlier kernel wrote may be read before `wait_for_predecessor`, in any thread; the clobber keeps
// the compiler from hoisting loads. No activation pointer is `__restrict__` for the same reason.
// `let_successor_start` gives no visibility and comes as early as possible. A successor may be resident while several
// kernels before it still run, so before its wait it may read only weights and what the prologue wrote (the prologue
// lets its successor start only at its end, when its tables are written).

DEVICE void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void let_successor_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- number formats ---------------------------------------------------------------------------

DEVICE float bf16_to_float(u16 v) { return __uint_as_float((u32)v << 16); }
DEVICE u16 float_to_bf16(float v) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
}
DEVICE u32 pack_bf16(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
DEVICE float f16_to_float(u16 v) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
    return r;
}
DEVICE u16 float_to_f16(float v) {
    u16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
}
DEVICE u32 pack_f16(float lo, float hi) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

// Two floats as e4m3 bytes, rounded to even, clamped to ±448.
#if __CUDA_ARCH__ >= 890
DEVICE u32 pack_e4m3(float lo, float hi) {
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
    return r;
}
#else
DEVICE u32 float_to_e4m3(float v) {
    const u32 bits = __float_as_uint(v), size = bits & 0x7fffffffu, sign = bits >> 24 & 0x80;
    if (size > 0x7f800000u) return sign | 0x7f;
    // Below 2^-6 values are 2^-9 apart.
    if (size < 0x3c800000u) return sign | (u32)__float2int_rn(__uint_as_float(size) * 512.0f);
    return sign | min((size + 0x7ffffu + (size >> 20 & 1) >> 20) - (120u << 3), 0x7eu);
}
DEVICE u32 pack_e4m3(float lo, float hi) { return float_to_e4m3(lo) | float_to_e4m3(hi) << 8; }
#endif
// Four e4m3 as two pairs of f16, exactly: bytes 0 and 1, bytes 2 and 3.
DEVICE void widen_fp8_half(u32 v, u32& low, u32& high) {
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}" : "=r"(low), "=r"(high) : "r"(v));
}
// On every GPU: exponent and mantissa in the fields of a float, whose bias is 120 larger; this holds for subnormal
// numbers, too.
DEVICE float e4m3_to_float(u8 v) {
    const u32 size = v & 0x7f;
    const float f = size == 0x7f ? __uint_as_float(0x7fc00000u) : __uint_as_float(size << 20) * __uint_as_float(247u << 23);
    return v & 0x80 ? -f : f;
}

template <int T> DEVICE u32 pack2(float lo, float hi) {
    return T == F16 ? pack_f16(lo, hi) : pack_bf16(lo, hi);
}
template <int T> DEVICE float low_half(u32 v) {
    return T == F16 ? f16_to_float((u16)v) : __uint_as_float(v << 16);
}
template <int T> DEVICE float high_half(u32 v) {
    return T == F16 ? f16_to_float((u16)(v >> 16)) : __uint_as_float(v & 0xffff0000u);
}

// One element of a plain type.
template <int T> DEVICE float load1(const void* p, u64 i) {
    if (T == F32) return ((const float*)p)[i];
    if (T == F16) return f16_to_float(((const u16*)p)[i]);
    if (T == E4M3) return e4m3_to_float(((const u8*)p)[i]);
    return bf16_to_float(((const u16*)p)[i]);
}
template <int T> DEVICE void store1(void* p, u64 i, float v) {
    if (T == F32) ((float*)p)[i] = v;
    else if (T == F16) ((u16*)p)[i] = float_to_f16(v);
    else if (T == E4M3) ((u8*)p)[i] = (u8)pack_e4m3(v, 0.0f);
    else ((u16*)p)[i] = float_to_bf16(v);
}
// A value after it was stored and loaded again.
template <int T> DEVICE float rounded(float v) {
    if (T == F32) return v;
    if (T == F16) return f16_to_float(float_to_f16(v));
    return bf16_to_float(float_to_bf16(v));
}

// Eight elements from 16-byte aligned memory (32 bytes for F32).
template <int T> DEVICE void load8(const void* p, u64 i, float (&out)[8]) {
    if (T == F32) {
        const float4* q = (const float4*)((const float*)p + i);
        float4 a = q[0], b = q[1];
        out[0] = a.x; out[1] = a.y; out[2] = a.z; out[3] = a.w;
        out[4] = b.x; out[5] = b.y; out[6] = b.z; out[7] = b.w;
    } else {
        uint4 a = *(const uint4*)((const u16*)p + i);
        out[0] = low_half<T>(a.x); out[1] = high_half<T>(a.x);
        out[2] = low_half<T>(a.y); out[3] = high_half<T>(a.y);
        out[4] = low_half<T>(a.z); out[5] = high_half<T>(a.z);
        out[6] = low_half<T>(a.w); out[7] = high_half<T>(a.w);
    }
}
template <int T> DEVICE void store8(void* p, u64 i, const float (&v)[8]) {
    if (T == F32) {
        float4* q = (float4*)((float*)p + i);
        q[0] = make_float4(v[0], v[1], v[2], v[3]);
        q[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
        *(uint4*)((u16*)p + i) = make_uint4(pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]),
                                            pack2<T>(v[4], v[5]), pack2<T>(v[6], v[7]));
    }
}

// ---- activations ------------------------------------------------------------------------------

// A gate v becomes v / (1 + e^-z), where z is v itself for SiLU. For GELU by tanh it is 2·√(2/π)·(v + 0.044715·v³),
// because (1 + tanh u) / 2 = 1 / (1 + e^-2u). `ACT_` 4 is GELU, everything else SiLU.
template <int ACT_> DEVICE float gate_exponent(float v) {
    return ACT_ == 4 ? v * (1.5957691216f + 0.0713548162726f * v * v) : v;
}

// A function by its number: 2 SiLU, 4 GELU by tanh, 5 GELU, 6 tanh, 7 ReLU, 8 its square.
template <int ACT_> DEVICE float activated(float v) {
    if (ACT_ == 5) return 0.5f * v * (1.0f + erff(v * 0.70710678118655f));
    if (ACT_ == 6) return tanhf(v);
    if (ACT_ == 7) return fmaxf(v, 0.0f);
    if (ACT_ == 8) return fmaxf(v, 0.0f) * fmaxf(v, 0.0f);
    return v / (1.0f + __expf(-gate_exponent<ACT_>(v)));
}

// What a linear applies to its sums before it stores them; 0: nothing. GELU by a polynomial times e^(−x²/2) for the smaller
// side of the normal distribution, to 2e-7.
#ifndef AFTER
#define AFTER 0
#endif
DEVICE float after(float v) {
    if (AFTER == 0) return v;
    if (AFTER != 5) return activated<AFTER>(v);
    const float z = fabsf(v) * 0.70710678118655f, t = __fdividef(1.0f, fmaf(z, 0.3275911f, 1.0f));
    const float p = fmaf(fmaf(fmaf(fmaf(0.5307027f, t, -0.72657603f), t, 0.7107069f), t, -0.14224837f), t, 0.1274148f);
    const float tail = p * t * __expf(-z * z);
    return v * (v < 0.0f ? tail : 1.0f - tail);
}

// A score times `factor`, or with SOFTCAP (a float, 0: none) SOFTCAP · tanh(score · scale / SOFTCAP), either way times
// log₂e, so that weights are powers of 2. The exponential form of tanh is good to 1e-7 of the cap; the instruction
// for tanh to 5e-4.
#ifndef SOFTCAP
#define SOFTCAP 0.0f
#endif
DEVICE float score_factor(float scale) { return SOFTCAP > 0.0f ? scale * (2.88539008177793f / SOFTCAP) : scale * 1.44269504088896f; }
DEVICE float capped_score(float score, float factor) {
    if (SOFTCAP == 0.0f) return score * factor;
    const float top = SOFTCAP * 1.44269504088896f;
    return top - __fdividef(2.0f * top, 1.0f + exp2f(score * factor));
}

// ---- reductions -------------------------------------------------------------------------------

DEVICE float warp_sum(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(FULL, v, o);
    return v;
}
DEVICE float warp_max(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL, v, o));
    return v;
}

// ---- asynchronous copies ----------------------------------------------------------------------

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void copy16_async(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Copies 16 bytes, or writes zeros when `live` is false.
DEVICE void copy16_async_or_zero(u32 to, const void* from, bool live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(live ? 16 : 0)
                 : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEVICE void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// ---- matrix instructions ----------------------------------------------------------------------

// c[16×8] += a[16×16] · b[16×8]; lane = 4·g + j holds rows g, g+8 of a and c, column g of b.
template <int T>
DEVICE void mma_16x8x16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (T == F16)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
DEVICE void load_matrices_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
DEVICE u32 transpose_8x8(u32 v) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}

// ---- ordered memory ---------------------------------------------------------------------------

DEVICE u64 load_relaxed_system(const u64* p) {
    u64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void store_release_system(u64* p, u64 v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DEVICE u32 add_acquire_release(u32* p, u32 v) {
    u32 r;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(r)
                 : "l"(p), "r"(v)
                 : "memory");
    return r;
}
