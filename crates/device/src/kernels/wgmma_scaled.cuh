// Warpgroup MMA for weights with scales, both with b in shared memory, K-major, 128-byte swizzle. MixedWgmma: c[64×N] +=
// a[64×16] · b[N×16]ᵀ with bf16 a in registers. ByteWgmma: c[64×N] += a[64×32] · b[N×32]ᵀ, e4m3, a in shared memory.
#pragma once
#include "wgmma.cuh"

template <int N_> struct MixedWgmma;
template <int N_> struct ByteWgmma;

#define MIXED_PRODUCT(N_, A, B, C, D, MATRIX, KEEP)                                                            \
    template <> struct MixedWgmma<N_> {                                                                        \
        static DEVICE void add(float (&c)[N_ / 2], const u32 (&a)[4], u64 b, int keep) {                       \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #KEEP ", 0;\n"                                  \
                         "wgmma.mma_async.sync.aligned.m64n" #N_ "k16.f32.bf16.bf16 {" NAMES_##N_ "}, "        \
                         "{%" #A ",%" #B ",%" #C ",%" #D "}, %" #MATRIX ", p, 1, 1, 0;\n}"                     \
                         : SUMS_##N_                                                                           \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));                     \
        }                                                                                                      \
    };
#define BYTE_PRODUCT(N_, A, B, KEEP)                                                                           \
    template <> struct ByteWgmma<N_> {                                                                         \
        static DEVICE void add(float (&c)[N_ / 2], u64 a, u64 b, int keep) {                                   \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #KEEP ", 0;\n"                                  \
                         "wgmma.mma_async.sync.aligned.m64n" #N_ "k32.f32.e4m3.e4m3 {" NAMES_##N_ "}, "        \
                         "%" #A ", %" #B ", p, 1, 1;\n}"                                                       \
                         : SUMS_##N_                                                                           \
                         : "l"(a), "l"(b), "r"(keep));                                                         \
        }                                                                                                      \
    };
#define SCALED_PRODUCT(N_, A, B, C, D, E, F) MIXED_PRODUCT(N_, A, B, C, D, E, F) BYTE_PRODUCT(N_, A, B, C)
SCALED_PRODUCT(8, 4, 5, 6, 7, 8, 9)
SCALED_PRODUCT(16, 8, 9, 10, 11, 12, 13)
SCALED_PRODUCT(24, 12, 13, 14, 15, 16, 17)
SCALED_PRODUCT(32, 16, 17, 18, 19, 20, 21)
SCALED_PRODUCT(40, 20, 21, 22, 23, 24, 25)
SCALED_PRODUCT(48, 24, 25, 26, 27, 28, 29)
SCALED_PRODUCT(56, 28, 29, 30, 31, 32, 33)
SCALED_PRODUCT(64, 32, 33, 34, 35, 36, 37)
SCALED_PRODUCT(72, 36, 37, 38, 39, 40, 41)
SCALED_PRODUCT(80, 40, 41, 42, 43, 44, 45)
SCALED_PRODUCT(88, 44, 45, 46, 47, 48, 49)
SCALED_PRODUCT(96, 48, 49, 50, 51, 52, 53)
SCALED_PRODUCT(104, 52, 53, 54, 55, 56, 57)
SCALED_PRODUCT(112, 56, 57, 58, 59, 60, 61)
SCALED_PRODUCT(120, 60, 61, 62, 63, 64, 65)
SCALED_PRODUCT(128, 64, 65, 66, 67, 68, 69)
SCALED_PRODUCT(136, 68, 69, 70, 71, 72, 73)
SCALED_PRODUCT(144, 72, 73, 74, 75, 76, 77)
SCALED_PRODUCT(152, 76, 77, 78, 79, 80, 81)
SCALED_PRODUCT(160, 80, 81, 82, 83, 84, 85)
SCALED_PRODUCT(168, 84, 85, 86, 87, 88, 89)
SCALED_PRODUCT(176, 88, 89, 90, 91, 92, 93)
SCALED_PRODUCT(184, 92, 93, 94, 95, 96, 97)
SCALED_PRODUCT(192, 96, 97, 98, 99, 100, 101)
SCALED_PRODUCT(200, 100, 101, 102, 103, 104, 105)
SCALED_PRODUCT(208, 104, 105, 106, 107, 108, 109)
SCALED_PRODUCT(216, 108, 109, 110, 111, 112, 113)
SCALED_PRODUCT(224, 112, 113, 114, 115, 116, 117)
SCALED_PRODUCT(232, 116, 117, 118, 119, 120, 121)
SCALED_PRODUCT(240, 120, 121, 122, 123, 124, 125)
SCALED_PRODUCT(248, 124, 125, 126, 127, 128, 129)
SCALED_PRODUCT(256, 128, 129, 130, 131, 132, 133)
