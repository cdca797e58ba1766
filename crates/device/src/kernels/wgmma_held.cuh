// Warpgroup MMA with the left operand in registers: c[64×N] += a[64×16] · b[16×N], b in shared memory, N-major (a
// copy of [token][dim] has rows of b in this order), 128-byte swizzle.
#pragma once
#include "wgmma.cuh"

// 64 columns of b lie side by side in a swizzled row; the next 64 are `apart` bytes further.
DEVICE u64 swizzled_rows(u32 address, u32 apart) {
    return (u64)(address >> 4 & 0x3fff) | (u64)(apart >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

template <int T, int N_> struct HeldWgmma;

#define HELD_PRODUCT(T, NAME, N_, A, B, C, D, MATRIX, KEEP)                                                     \
    template <> struct HeldWgmma<T, N_> {                                                                     \
        static DEVICE void add(float (&c)[N_ / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int keep) {           \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #KEEP ", 0;\n"                                 \
                         "wgmma.mma_async.sync.aligned.m64n" #N_ "k16.f32." NAME "." NAME " {" NAMES_##N_ "}, " \
                         "{%" #A ",%" #B ",%" #C ",%" #D "}, %" #MATRIX ", p, 1, 1, 1;\n}"                     \
                         : SUMS_##N_                                                                            \
                         : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(keep));                              \
        }                                                                                                       \
    };

HELD_PRODUCT(BF16, "bf16", 64, 32, 33, 34, 35, 36, 37)
HELD_PRODUCT(F16, "f16", 64, 32, 33, 34, 35, 36, 37)
HELD_PRODUCT(BF16, "bf16", 128, 64, 65, 66, 67, 68, 69)
HELD_PRODUCT(F16, "f16", 128, 64, 65, 66, 67, 68, 69)
