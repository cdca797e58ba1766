// Hopper's asynchronous features: barriers in shared memory, tensor copies, warpgroup MMA. c[64×N] += a[64×16] ·
// b[N×16]ᵀ, both operands in shared memory, K-major, 128-byte swizzle; the fourth argument 0 starts a new sum. Lane
// 4·g + j of warp w holds rows 16w + g (c[4i], c[4i+1]) and + 8 of columns 8i + 2j and + 1.
#pragma once
#include "prelude.cuh"

DEVICE void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void barrier_wait(u32 barrier, u32 phase) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra ready;\nbra again;\nready:\n}"
        ::"r"(barrier), "r"(phase) : "memory");
}
// L2 policies: weights are read once, activations are read by every block.
DEVICE u64 keep_policy() {
    u64 p;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(p));
    return p;
}
DEVICE u64 pass_policy() {
    u64 p;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
    return p;
}
DEVICE u64 normal_policy() {
    u64 p;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(p));
    return p;
}
DEVICE void tensor_copy(u32 to, const void* map, u32 x, u32 y, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier), "l"(policy) : "memory");
}
DEVICE void tensor_copy(u32 to, const void* map, u32 x, u32 y, u32 z, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;"
        ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy) : "memory");
}
DEVICE void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
DEVICE u64 swizzled_tile(u32 address) {
    return (u64)(address >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
DEVICE void product_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> DEVICE void product_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// The sums of N columns are N / 2 registers of a thread: their operand names, and the registers.
#define NAMES_8 "%0,%1,%2,%3"
#define NAMES_16 NAMES_8 ",%4,%5,%6,%7"
#define NAMES_24 NAMES_16 ",%8,%9,%10,%11"
#define NAMES_32 NAMES_24 ",%12,%13,%14,%15"
#define NAMES_40 NAMES_32 ",%16,%17,%18,%19"
#define NAMES_48 NAMES_40 ",%20,%21,%22,%23"
#define NAMES_56 NAMES_48 ",%24,%25,%26,%27"
#define NAMES_64 NAMES_56 ",%28,%29,%30,%31"
#define NAMES_72 NAMES_64 ",%32,%33,%34,%35"
#define NAMES_80 NAMES_72 ",%36,%37,%38,%39"
#define NAMES_88 NAMES_80 ",%40,%41,%42,%43"
#define NAMES_96 NAMES_88 ",%44,%45,%46,%47"
#define NAMES_104 NAMES_96 ",%48,%49,%50,%51"
#define NAMES_112 NAMES_104 ",%52,%53,%54,%55"
#define NAMES_120 NAMES_112 ",%56,%57,%58,%59"
#define NAMES_128 NAMES_120 ",%60,%61,%62,%63"
#define NAMES_136 NAMES_128 ",%64,%65,%66,%67"
#define NAMES_144 NAMES_136 ",%68,%69,%70,%71"
#define NAMES_152 NAMES_144 ",%72,%73,%74,%75"
#define NAMES_160 NAMES_152 ",%76,%77,%78,%79"
#define NAMES_168 NAMES_160 ",%80,%81,%82,%83"
#define NAMES_176 NAMES_168 ",%84,%85,%86,%87"
#define NAMES_184 NAMES_176 ",%88,%89,%90,%91"
#define NAMES_192 NAMES_184 ",%92,%93,%94,%95"
#define NAMES_200 NAMES_192 ",%96,%97,%98,%99"
#define NAMES_208 NAMES_200 ",%100,%101,%102,%103"
#define NAMES_216 NAMES_208 ",%104,%105,%106,%107"
#define NAMES_224 NAMES_216 ",%108,%109,%110,%111"
#define NAMES_232 NAMES_224 ",%112,%113,%114,%115"
#define NAMES_240 NAMES_232 ",%116,%117,%118,%119"
#define NAMES_248 NAMES_240 ",%120,%121,%122,%123"
#define NAMES_256 NAMES_248 ",%124,%125,%126,%127"
#define FOUR(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SUMS_8 FOUR(0)
#define SUMS_16 SUMS_8, FOUR(4)
#define SUMS_24 SUMS_16, FOUR(8)
#define SUMS_32 SUMS_24, FOUR(12)
#define SUMS_40 SUMS_32, FOUR(16)
#define SUMS_48 SUMS_40, FOUR(20)
#define SUMS_56 SUMS_48, FOUR(24)
#define SUMS_64 SUMS_56, FOUR(28)
#define SUMS_72 SUMS_64, FOUR(32)
#define SUMS_80 SUMS_72, FOUR(36)
#define SUMS_88 SUMS_80, FOUR(40)
#define SUMS_96 SUMS_88, FOUR(44)
#define SUMS_104 SUMS_96, FOUR(48)
#define SUMS_112 SUMS_104, FOUR(52)
#define SUMS_120 SUMS_112, FOUR(56)
#define SUMS_128 SUMS_120, FOUR(60)
#define SUMS_136 SUMS_128, FOUR(64)
#define SUMS_144 SUMS_136, FOUR(68)
#define SUMS_152 SUMS_144, FOUR(72)
#define SUMS_160 SUMS_152, FOUR(76)
#define SUMS_168 SUMS_160, FOUR(80)
#define SUMS_176 SUMS_168, FOUR(84)
#define SUMS_184 SUMS_176, FOUR(88)
#define SUMS_192 SUMS_184, FOUR(92)
#define SUMS_200 SUMS_192, FOUR(96)
#define SUMS_208 SUMS_200, FOUR(100)
#define SUMS_216 SUMS_208, FOUR(104)
#define SUMS_224 SUMS_216, FOUR(108)
#define SUMS_232 SUMS_224, FOUR(112)
#define SUMS_240 SUMS_232, FOUR(116)
#define SUMS_248 SUMS_240, FOUR(120)
#define SUMS_256 SUMS_248, FOUR(124)

template <int T, int N_> struct Wgmma;

#define PRODUCT_OF(T, NAME, N_, A, B, KEEP)                                                                    \
    template <> struct Wgmma<T, N_> {                                                                        \
        static DEVICE void add(float (&c)[N_ / 2], u64 a, u64 b, int keep) {                                   \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #KEEP ", 0;\n"                                \
                         "wgmma.mma_async.sync.aligned.m64n" #N_ "k16.f32." NAME "." NAME " {" NAMES_##N_ "}, " \
                         "%" #A ", %" #B ", p, 1, 1, 0, 0;\n}"                                                \
                         : SUMS_##N_                                                                           \
                         : "l"(a), "l"(b), "r"(keep));                                                         \
        }                                                                                                      \
    };
// N, and the operand numbers after its sums.
#define PRODUCT(N_, A, B, KEEP) PRODUCT_OF(BF16, "bf16", N_, A, B, KEEP) PRODUCT_OF(F16, "f16", N_, A, B, KEEP)
PRODUCT(8, 4, 5, 6)
PRODUCT(16, 8, 9, 10)
PRODUCT(24, 12, 13, 14)
PRODUCT(32, 16, 17, 18)
PRODUCT(40, 20, 21, 22)
PRODUCT(48, 24, 25, 26)
PRODUCT(56, 28, 29, 30)
PRODUCT(64, 32, 33, 34)
PRODUCT(72, 36, 37, 38)
PRODUCT(80, 40, 41, 42)
PRODUCT(88, 44, 45, 46)
PRODUCT(96, 48, 49, 50)
PRODUCT(104, 52, 53, 54)
PRODUCT(112, 56, 57, 58)
PRODUCT(120, 60, 61, 62)
PRODUCT(128, 64, 65, 66)
PRODUCT(136, 68, 69, 70)
PRODUCT(144, 72, 73, 74)
PRODUCT(152, 76, 77, 78)
PRODUCT(160, 80, 81, 82)
PRODUCT(168, 84, 85, 86)
PRODUCT(176, 88, 89, 90)
PRODUCT(184, 92, 93, 94)
PRODUCT(192, 96, 97, 98)
PRODUCT(200, 100, 101, 102)
PRODUCT(208, 104, 105, 106)
PRODUCT(216, 108, 109, 110)
PRODUCT(224, 112, 113, 114)
PRODUCT(232, 116, 117, 118)
PRODUCT(240, 120, 121, 122)
PRODUCT(248, 124, 125, 126)
PRODUCT(256, 128, 129, 130)

// A 4 × 4 transposition in the quad; its own inverse.
DEVICE void exchange(u32 (&v)[4]) {
    const u32 j = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 got = __shfl_xor_sync(FULL, j & 1 ? v[i] : v[i + 1], 1);
        if (j & 1) v[i] = got;
        else v[i + 1] = got;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 got = __shfl_xor_sync(FULL, j & 2 ? v[i] : v[i + 2], 2);
        if (j & 2) v[i] = got;
        else v[i + 2] = got;
    }
}
