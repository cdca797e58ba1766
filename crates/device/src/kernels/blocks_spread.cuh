// The products of `linear_blocks.cu` for up to four rows of x (SPREAD). An MMA has eight columns for tokens; here a token has
// SHARES of them, and every group of 32 columns of K has its own: lanes of other columns have zeros instead of x. So sums of all
// groups of a chunk lie side by side in FRAGMENTS accumulators, and a lane scales those of two groups of two rows, once a chunk.
//
// Column c of fragment f belongs to token c / SHARES and group f · SHARES + c % SHARES. A lane's two columns have groups 2p and
// 2p + 1 (`pair_of`).
#pragma once

#define SHARES (ROWS == 1 ? 8 : ROWS == 2 ? 4 : 2)
#define FRAGMENTS (8 / SHARES)
// Blocks two bytes beyond a multiple of four: their words are read from there on and hold columns 14, 15, 0, 1 of sixteen, then 2
// to 5, and so on; x lies in the same order. Q6K: every second chunk; Q8_0: every second group.
#define TURNED_WORDS (WT == Q8_0 ? K % 256 == 0 : WT == Q6K && K % 512 == 0)
// x of a warp's only chunk stays in registers, if there are enough.
#define HELD (PER_WARP == 1 && (WT != Q6K || ROWS <= 2))
#define ROW_WORDS (TURNED_WORDS ? WT == Q6K ? 12 : 16 : 1)

DEVICE u32 pair_of(int f, u32 j) { return SHARES == 8 ? j : SHARES == 4 ? 2 * f + j % 2 : f; }
// Values of these groups are 16 times as large.
DEVICE bool sixteenfold(u32 sub) { return WT == Q4K ? sub % 2 : WT == Q6K ? sub / 2 % 2 : false; }

// Eight columns of token `token` of a chunk, to where lanes of an MMA read them, and what groups of columns add up to, in the form
// that products want. Behind a row of x are zeros.
DEVICE void place_spread(u8* row, float* sums, u32 token, u32 lane, bool odd_chunk, const float (&v)[8]) {
    u32 w[4];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        w[i] = pack_half(v[2 * i], v[2 * i + 1]);
        sum += low_half<F16>(w[i]) + high_half<F16>(w[i]);
    }
    sum += __shfl_xor_sync(FULL, sum, 1);
    if (!HALVES) sum += __shfl_xor_sync(FULL, sum, 2);
    if (MINIMA) {
        // An MMA multiplies minima with f16 in two parts; a token has every SHARES-th column, and the others have zeros.
        if (token == 0) *(float2*)(sums + 2 * lane) = make_float2(0.0f, 0.0f);
        __syncwarp();
        const u16 high = float_to_f16(sum);
        u16* at = (u16*)sums + (token * SHARES * 4 + lane / 8) * 4 + lane / 4 % 2;
        if (lane % 4 == 0) at[0] = high, at[2] = float_to_f16(sum - f16_to_float(high));
    } else if (lane % (HALVES ? 2 : 4) == 0) {
        const float by = (MIDDLE ? -(float)MIDDLE / 16777216.0f : 1.0f) * (sixteenfold(lane / 4) ? 16.0f : 1.0f);
        sums[lane / (HALVES ? 2 : 4) * 8 + token] = by * sum;
    }
    if (TURNED_WORDS) {
        const u32 last = __shfl_xor_sync(FULL, w[3], 1);
        if (WT == Q8_0 ? lane / 4 % 2 == 0 : odd_chunk) w[3] = w[2], w[2] = w[1], w[1] = w[0], w[0] = last;
    }
    if (lane < 16) *(u32*)(row + 512 + lane * 4) = 0;
    u8* to = row + (lane / 4 * 4 + lane % 2 * 2) * 16 + lane % 4 / 2 * 8;
    *(uint2*)to = make_uint2(__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[0], w[1], 0x7632));
    *(uint2*)(to + 16) = make_uint2(__byte_perm(w[2], w[3], 0x5410), __byte_perm(w[2], w[3], 0x7632));
}

// One lane's words of a row of a chunk. `select` brings the first word of sixteen columns into place: 0x3254, or 0x3210.
struct Words {
    u32 w[ROW_WORDS];
    DEVICE Words(const u8* p, u32 j, bool turned, u32 select) {
        if (WT == Q6K && TURNED_WORDS) {
            const u8* from = p - (turned ? 2 : 0);
            u32 next = *(const u32*)(from + 4 * j);
#pragma unroll
            for (int i = 0; i < 12; i++) {
                const u32 here = next;
                next = *(const u32*)(from + 16 * i + 16 + (i == 11 ? 0 : 4 * j));
                w[i % ROW_WORDS] = __byte_perm(here, next, select);
            }
        }
        if (WT == Q8_0 && TURNED_WORDS)
#pragma unroll
            for (int sub = 0; sub < 8; sub++) {
                const u8* from = p + sub * BLOCK_BYTES + (sub % 2 ? 2 : 0) + 4 * j;
                u32 a = *(const u32*)from, b = *(const u32*)(from + 16);
                if (sub % 2 == 0) {
                    a = __byte_perm(a, b, select);
                    b = __byte_perm(b, *(const u16*)(p + sub * BLOCK_BYTES + 32), select);
                }
                w[2 * sub % ROW_WORDS] = a, w[(2 * sub + 1) % ROW_WORDS] = b;
            }
    }
    DEVICE void halves_of(const u8* p, int sub, int h, u32 j, u32& even, u32& odd) const {
        if (WT == Q6K && TURNED_WORDS) {
            const int i = sub % 4;
            const u32 l = w[(sub / 4 * 4 + i % 2 * 2 + h) % ROW_WORDS], u = w[(8 + sub / 4 * 2 + h) % ROW_WORDS];
            const u32 low = i < 2 ? 0x000f000fu : 0x00f000f0u, high = i < 2 ? 0x00300030u : 0x03000300u;
            even = (l & low) | ((i % 2 ? u << 2 : u << 4) & high), odd = (l >> 8 & low) | ((i % 2 ? u >> 6 : u >> 4) & high);
        } else if (WT == Q8_0 && TURNED_WORDS) {
            const u32 v = w[(2 * sub + h) % ROW_WORDS];
            even = __byte_perm(v ^ 0x80808080u, 0, 0x4240), odd = __byte_perm(v ^ 0x80808080u, 0, 0x4341);
        } else {
            pairs(p, sub, h, j, even, odd);
            if (WT == Q6K && sixteenfold(sub)) even <<= 4, odd <<= 4;
        }
    }
};

// What a row's sums are multiplied with, and its minima.
struct RowScales {
    float d, m;
    u32 scales, last, minima, last_minima;
    DEVICE RowScales(const u8* p) {
        d = 1.0f, m = 1.0f;
        if (WT == Q6K) d = half_of_two(p + 208);
        if (!MINIMA) return;
        uint4 v;
        if (K % 256 == 0) v = *(const uint4*)p;
        else v = make_uint4(four(p), four(p + 4), four(p + 8), four(p + 12));
        // Scales and minima are numbers of f16 in units of 2^-24.
        d = f16_to_float((u16)v.x) * 16777216.0f, m = -f16_to_float((u16)(v.x >> 16));
        scales = v.y & 0x3f3f3f3fu, last = (v.w & 0x0f0f0f0fu) | (v.y >> 2 & 0x30303030u);
        minima = v.z & 0x3f3f3f3fu, last_minima = (v.w >> 4 & 0x0f0f0f0fu) | (v.z >> 2 & 0x30303030u);
    }
    // Of groups 2p and 2p + 1 as a pair.
    DEVICE static u32 two_of(u32 first, u32 last, u32 p) { return __byte_perm(p < 2 ? first : last, 0, p % 2 ? 0x4342 : 0x4140); }
    DEVICE float2 of(const u8* at, u32 p, u32 groups) const {
        if (MINIMA) {
            const u32 v = two_of(scales, last, p);
            return make_float2(low_half<F16>(v), high_half<F16>(v) * (WT == Q4K ? 1.0f / 16.0f : 1.0f));
        }
        const float a = half_of_two(at + 2 * p * BLOCK_BYTES), b = half_of_two(at + (2 * p + 1) * BLOCK_BYTES);
        return make_float2(K % 256 && 2 * p >= groups ? 0.0f : a, K % 256 && 2 * p + 1 >= groups ? 0.0f : b);
    }
};

// Adds the products of a chunk for rows g and g + 8: word(sub) is x, begin(f, h) what sums of a lane's columns begin with (or
// sums of x), less_x sums of x for minima (MINIMA).
template <typename Word, typename Begin>
DEVICE void multiply_spread(float (&sums)[2], const u8* low, const u8* high, Word word, Begin begin, uint2 less_x, bool turned, u32 groups, u32 lane) {
    const u32 j = lane % 4, select = j == 0 && (turned || WT == Q8_0) ? 0x3254 : 0x3210;
    const RowScales of_low(low), of_high(high);
    const Words words_low(low, j, turned, select), words_high(high, j, turned, select);
    float part[FRAGMENTS][2][4], here[2] = {}, less[4] = {};
#pragma unroll
    for (int sub = 0; sub < 8; sub++) {
        const int f = sub / SHARES;
        const bool none = K % 256 && sub >= groups;
        const uint4 v = word(sub);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (none) {
                if (sub % SHARES == 0) part[f][h][0] = part[f][h][1] = part[f][h][2] = part[f][h][3] = 0.0f;
                continue;
            }
            u32 a0, a1, a2, a3;
            words_low.halves_of(low, sub, h, j, a0, a2), words_high.halves_of(high, sub, h, j, a1, a3);
            const u32 b0 = h ? v.z : v.x, b1 = h ? v.w : v.y;
            if (sub % SHARES) mma_16x8x16<F16>(part[f][h], a0, a1, a2, a3, b0, b1);
            else begin_sums(part[f][h], a0, a1, a2, a3, b0, b1, MIDDLE && (HALVES || h == 0) ? begin(f, h) : make_float2(0.0f, 0.0f));
        }
    }
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
        const u32 p = pair_of(f, j);
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const u8* at = row ? high : low;
            const RowScales& of = row ? of_high : of_low;
            const float *a = part[f][0] + 2 * row, *b = part[f][1] + 2 * row;
            if (HALVES) {
                // Bytes with a sign: 128 is added to them, and taken off with what makes a float of a byte.
                const u32 bytes = four(at + 192 + 4 * p) ^ 0x80808080u;
                auto scale = [&](int i) { return __uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7440 | i)) - 8388736.0f; };
                here[row] += (scale(0) * a[0] + scale(1) * b[0] + scale(2) * a[1] + scale(3) * b[1]) * (p % 2 ? 0.0625f : 1.0f);
            } else {
                const float2 s = of.of(at, p, groups);
                here[row] += s.x * (a[0] + b[0]) + s.y * (a[1] + b[1]);
            }
            if (!MIDDLE && !MINIMA) {
                const float2 x = begin(f, 0);
                const float l = half_of_two(at + 2 * p * BLOCK_BYTES + 2), u = half_of_two(at + (2 * p + 1) * BLOCK_BYTES + 2);
                less[2 * row] += (K % 256 && 2 * p >= groups ? 0.0f : l * x.x) + (K % 256 && 2 * p + 1 >= groups ? 0.0f : u * x.y);
            }
        }
    }
    if (MINIMA) {
        const u32 a0 = RowScales::two_of(of_low.minima, of_low.last_minima, j), a1 = RowScales::two_of(of_high.minima, of_high.last_minima, j);
        begin_sums(less, a0, a1, a0, a1, less_x.x, less_x.y);
    }
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const RowScales& of = row ? of_high : of_low;
        if (WT == Q4_1 || WT == Q5_1) sums[row] += here[row] + less[2 * row] * (1.0f / 16777216.0f);
        else sums[row] += MINIMA ? of.d * here[row] + of.m * less[2 * row] : of.d * here[row];
    }
}
// Adds up a tile's sums of the lanes that share a token.
DEVICE void join_lanes(float (&sums)[2]) {
#pragma unroll
    for (int o = SHARES / 4; o; o >>= 1) {
        sums[0] += __shfl_xor_sync(FULL, sums[0], o);
        sums[1] += __shfl_xor_sync(FULL, sums[1], o);
    }
}
