// Warpgroup products whose left operand is held in registers: c[64×N] += a[64×16] · b[16×N], b in shared
// memory, N-major (rows of b are what a copy of [token][dim] leaves there), 128-byte swizzle.
#pragma once
#include "wgmma.cuh"

// 64 columns of b lie side by side in a swizzled row; `apart` bytes on lie the next 64.
DEVICE u64 swizzled_rows(u32 address, u32 apart) {
    return (u64)(address >> 4 & 0x3fff) | (u64)(apart >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

#define HELD_4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define HELD_16(c, i) HELD_4(c, i), HELD_4(c, i + 4), HELD_4(c, i + 8), HELD_4(c, i + 12)
#define HELD_32(c, i) HELD_16(c, i), HELD_16(c, i + 16)
#define NAMES_32                                                       \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"           \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_64                                                       \
    NAMES_32                                                           \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

template <int T, int N_> struct HeldProduct;

#define HELD_PRODUCT(T, NAME)                                                                            \
    template <> struct HeldProduct<T, 64> {                                                              \
        static DEVICE void add(float (&c)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int keep) {        \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                    \
                         "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {" NAMES_32 "}, "  \
                         "{%32,%33,%34,%35}, %36, p, 1, 1, 1;\n}"                                        \
                         : HELD_32(c, 0)                                                                 \
                         : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(keep));                       \
        }                                                                                                \
    };                                                                                                   \
    template <> struct HeldProduct<T, 128> {                                                             \
        static DEVICE void add(float (&c)[64], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int keep) {        \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                    \
                         "wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " {" NAMES_64 "}, " \
                         "{%64,%65,%66,%67}, %68, p, 1, 1, 1;\n}"                                        \
                         : HELD_32(c, 0), HELD_32(c, 32)                                                 \
                         : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(keep));                       \
        }                                                                                                \
    };

HELD_PRODUCT(BF16, "bf16")
HELD_PRODUCT(F16, "f16")

// Both operands in shared memory, K-major, for a width that no other kernel has.
#define NAMES_88                                                                                          \
    NAMES_64                                                                                              \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87"
#define WIDE_PRODUCT(T, NAME)                                                                            \
    template <> struct Product<T, 176> {                                                                 \
        static DEVICE void add(float (&c)[88], u64 a, u64 b, int keep) {                                 \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %90, 0;\n"                                    \
                         "wgmma.mma_async.sync.aligned.m64n176k16.f32." NAME "." NAME " {" NAMES_88 "}, " \
                         "%88, %89, p, 1, 1, 0, 0;\n}"                                                   \
                         : HELD_32(c, 0), HELD_32(c, 32), HELD_16(c, 64), HELD_4(c, 80), HELD_4(c, 84)   \
                         : "l"(a), "l"(b), "r"(keep));                                                   \
        }                                                                                                \
    };

WIDE_PRODUCT(BF16, "bf16")
WIDE_PRODUCT(F16, "f16")
