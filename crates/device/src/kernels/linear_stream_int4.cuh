// Chunks of int4 for `linear_stream.cu` in fewer instructions (LEAN). A lane's bits of two weights are two subnormal f16 as
// they are, which tensor cores multiply exactly: q · 2^-24 for rows 0 to 7, and 16 · q · 2^-24 for the other rows, whose bits
// are not shifted. Zeros are taken off the sums of a group: a row's zero times what x adds up to.
#pragma once

// Groups of a chunk.
#define CHUNK_GROUPS (CHUNK / GROUP)
// What x adds up to is kept in registers if there is room beside x; else it is added up again for every tile.
#define KEEPS_X_SUMS (HELD && PER_WARP * WORDS * SETS <= 16 && PER_WARP * CHUNK_GROUPS * SETS <= 8)
#define CHAINS (2 / SETS)
// The units of sums of rows 0 to 7 and of the others; x is divided by HALF_FACTOR.
#define LOW_UNIT (16777216.0f * HALF_FACTOR)
#define HIGH_UNIT (1048576.0f * HALF_FACTOR)

// Adds what 32 columns of x of eight tokens add up to: c[0], c[1] for tokens 2j, 2j + 1.
DEVICE void add_x(float (&c)[4], uint4 v) {
    const u32 ones = 0x3c003c00u;
    mma_16x8x16<F16>(c, ones, ones, ones, ones, v.x, v.y);
    mma_16x8x16<F16>(c, ones, ones, ones, ones, v.z, v.w);
}
// The same as a factor of zeros.
DEVICE float2 of_zeros(const float (&c)[4]) { return make_float2(c[0] * (-1.0f / 16777216.0f), c[1] * (-1.0f / 16777216.0f)); }

// What differs between the groups of a row: scale, and zero (of rows 8 to 15 times 16).
struct GroupOfRows {
    float low, high, zero_low, zero_high;
    DEVICE void load(u32 piece, u32 g) {
        low = f16_to_float((u16)shared_u16(piece + PIECE_SCALES + 2 * g)), high = f16_to_float((u16)shared_u16(piece + PIECE_SCALES + 16 + 2 * g));
        zero_low = __uint_as_float(0x4b000000u | shared_u8(piece + PIECE_ZEROS + g)) - 8388608.0f;
        zero_high = __uint_as_float(0x4d000000u | shared_u8(piece + PIECE_ZEROS + 8 + g)) - 134217728.0f;
    }
};

// Adds a chunk's sums: word(set, i) is word i of x of eight tokens, x_sums(set, group) what they add up to.
template <typename Word, typename Sums> DEVICE void multiply_lean(float (&sums)[SETS][4], u32 stage, u32 lane, Word word, Sums x_sums) {
    const u32 g = lane / 4;
    GroupOfRows of;
    // An MMA waits for the one before it with the same sums.
    float part[SETS][CHAINS][4], added[SETS][4];
#pragma unroll
    for (int quarter = 0; quarter < CHUNK / 64; quarter++) {
        uint4 a;
        if (GROUP == 32) {
            const u32 from = stage + 2 * quarter * PIECE + lane * 8;
            asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(a.x), "=r"(a.y) : "r"(from) : "memory");
            asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(a.z), "=r"(a.w) : "r"(from + PIECE) : "memory");
        } else {
            const u32 from = stage + quarter * 64 / GROUP * PIECE + quarter * 64 % GROUP * 8 + lane * 16;
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(a.x), "=r"(a.y), "=r"(a.z), "=r"(a.w) : "r"(from) : "memory");
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = quarter * 64 + i * 16, group = column / GROUP;
            if (column % GROUP == 0) {
                of.load(stage + group * PIECE, g);
#pragma unroll
                for (int set = 0; set < SETS; set++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        added[set][e] = 0.0f;
#pragma unroll
                        for (int c = 0; c < CHAINS; c++) part[set][c][e] = 0.0f;
                    }
            }
            const u32 w = part_of(a, i), even = 0x000f000fu, odd = 0x00f000f0u;
#pragma unroll
            for (int set = 0; set < SETS; set++) {
                const uint4 v = word(set, column / 32);
                if (!KEEPS_X_SUMS && i % 2 == 0) add_x(added[set], v);
                mma_16x8x16<F16>(part[set][i % CHAINS], w & even, w & odd, w >> 8 & even, w >> 8 & odd, i % 2 ? v.z : v.x, i % 2 ? v.w : v.y);
            }
            if ((column + 16) % GROUP == 0)
#pragma unroll
                for (int set = 0; set < SETS; set++) {
                    const float2 x = KEEPS_X_SUMS ? x_sums(set, group) : of_zeros(added[set]);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float v = part[set][0][e];
                        if (CHAINS == 2) v += part[set][CHAINS - 1][e];
                        v += (e < 2 ? of.zero_low : of.zero_high) * (e % 2 ? x.y : x.x);
                        sums[set][e] += (e < 2 ? of.low : of.high) * v;
                    }
                }
        }
    }
}
