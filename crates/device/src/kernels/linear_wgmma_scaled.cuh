// What `linear_wgmma.cu` needs for weights with scales; its macros are defined before this is included.
#pragma once

DEVICE float block_scale(const float* scales, u32 rows, u32 share, u32 i) {
    const u32 chunk = i % CHUNKS, odd = i / CHUNKS % 2, group = i / CHUNKS / 2;
    const u32 row = min(scale_row(rows + group * 64 + odd, GATED), (N - 1u) / 128);
    return scales[(u64)row * (K / SCALED) + share * CHUNKS + chunk];
}

// A chunk of this warp's 16 rows as the left operands of eight MMAs.
DEVICE void widen(u32 (&a)[8][4], float2& scale, u32 at, u32 group) {
    const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4;
    if (INT4) {
        const u32 first = at + (group * 4 + warp) * PIECE_128;
        scale.x = scale.y = 1.0f;
#pragma unroll
        for (int p = 0; p < PIECES_128; p++) {
            const u32 piece = first + p * PIECE;
            const u32 low = zero_pair(shared_u8(piece + PIECE_ZEROS + g)), high = zero_pair(shared_u8(piece + PIECE_ZEROS + 8 + g));
            const float of_low = f16_to_float((u16)shared_u16(piece + PIECE_SCALES + 2 * g)), of_high = f16_to_float((u16)shared_u16(piece + PIECE_SCALES + 16 + 2 * g));
            if (GROUP == 128) scale.x = of_low, scale.y = of_high;
            // Sums have one scale for 128 columns; of smaller groups the weights are scaled, as bf16.
            const u32 by[2] = {pack_bf16(of_low, of_low), pack_bf16(of_high, of_high)};
#pragma unroll
            for (int h = 0; h < (GROUP == 128 ? 2 : 1); h++) {
                u32 v[4];
                if (GROUP == 32) asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(piece + lane * 8) : "memory");
                else asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(piece + h * 512 + lane * 16) : "memory");
#pragma unroll
                for (int i = 0; i < (GROUP == 32 ? 2 : 4); i++)
#pragma unroll
                    for (int r = 0; r < 4; r++) {
                        u32 wide = widen_int4(v[i], r, r % 2 ? high : low);
                        if (GROUP < 128) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(wide) : "r"(wide), "r"(by[r % 2]));
                        a[p * (GROUP / 16) + h * 4 + i][r] = wide;
                    }
            }
        }
        return;
    }
    const u32 row = warp * 16 + lane % 16, from = at + group * 8192 + row * 128;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        u32 v[4];
        load_matrices(v, from + ((i + lane / 16 ^ row % 8) << 4));
        widen_fp8(v[0], a[i][0], a[i][2]);
        widen_fp8(v[1], a[i][1], a[i][3]);
        widen_fp8(v[2], a[i + 1][0], a[i + 1][2]);
        widen_fp8(v[3], a[i + 1][1], a[i + 1][3]);
    }
}

// Scales a chunk's sums and adds them to those before. x's scales are loaded before the wait for the MMAs.
// x's scales for this thread's columns: of the first eight pairs, then of those that follow.
#define AT_ONCE (EACH / 8 < 8 ? EACH / 8 : 8)
struct TokenScales {
    u32 at;
    float2 of[AT_ONCE];
    DEVICE void load_one(int n) {
        if (n < EACH / 8) asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(of[n % AT_ONCE].x), "=f"(of[n % AT_ONCE].y) : "r"(at + n * 32) : "memory");
    }
    DEVICE void load(u32 from) {
        at = from + threadIdx.x % 4 * 8;
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) load_one(n);
    }
};
DEVICE void promote(float (&c)[EACH / 2], const float (&part)[EACH / 2], float2 scale, TokenScales& x) {
#pragma unroll
    for (int n = 0; n < EACH / 8; n++) {
        const float2 of_x = x.of[n % AT_ONCE];
        const float left = BYTES ? scale.x * of_x.x : scale.x, right = BYTES ? scale.x * of_x.y : scale.x;
        if (BYTES) x.load_one(n + AT_ONCE);
        c[4 * n] += left * part[4 * n], c[4 * n + 1] += right * part[4 * n + 1];
        c[4 * n + 2] += (BYTES ? left : scale.y) * part[4 * n + 2], c[4 * n + 3] += (BYTES ? right : scale.y) * part[4 * n + 3];
    }
}

#if MIXED && LEAN
// Half a chunk of this warp's 16 rows as the left operands of four MMAs.
DEVICE void widen_half(u32 (&a)[4][4], u32 at, u32 group, int half) {
    const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4;
    const u32 first = at + (group * 4 + warp) * PIECE_128 + (GROUP == 128 ? half * 512 : half * PIECES_128 / 2 * PIECE);
#pragma unroll
    for (int p = 0; p < (GROUP == 32 ? 2 : 1); p++) {
        const u32 piece = first + p * PIECE, behind = GROUP == 128 ? piece - half * 512 : piece;
        const u32 low = zero_pair(shared_u8(behind + PIECE_ZEROS + g)), high = zero_pair(shared_u8(behind + PIECE_ZEROS + 8 + g));
        u32 v[4], by[2];
        if (GROUP == 32) asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(piece + lane * 8) : "memory");
        else asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(piece + lane * 16) : "memory");
        // Sums have one scale for 128 columns; of smaller groups the weights are scaled, as bf16.
        if (GROUP < 128)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float scale = f16_to_float((u16)shared_u16(behind + PIECE_SCALES + 16 * r + 2 * g));
                by[r] = pack_bf16(scale, scale);
            }
#pragma unroll
        for (int i = 0; i < (GROUP == 32 ? 2 : 4); i++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                u32 wide = widen_int4(v[i], r, r % 2 ? high : low);
                if (GROUP < 128) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(wide) : "r"(wide), "r"(by[r % 2]));
                a[p * 2 + i][r] = wide;
            }
    }
}

// The sums of a tile's chunks that are this warpgroup's. While MMAs of one half of a chunk run, the next half is widened.
template <typename Release> DEVICE void multiply_lean(float (&c)[EACH / 2], u32 base, u32 full, u32& stage, u32& phase, u32 group, u32 turn, Release release) {
    u32 a[2][4][4];
    float part[EACH / 2];
    auto issue = [&](int half) {
        const u64 b = swizzled_tile(base + stage * STAGE_BYTES + WEIGHT_BYTES + half * TOKEN_BYTES);
        product_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) MixedWgmma<EACH>::add(part, a[half][k], b + k * 2, half > 0 || k > 0);
        product_commit();
    };
    barrier_wait(full + 8 * stage, phase);
    widen_half(a[0], base + stage * STAGE_BYTES, group, 0);
#pragma unroll 1
    for (u32 chunk = turn; chunk < CHUNKS; chunk += TURNS) {
        const u32 mine = stage, at = base + mine * STAGE_BYTES;
        issue(0);
        widen_half(a[1], at, group, 1);
        float2 with = make_float2(1.0f, 1.0f);
        if (GROUP == 128) {
            const u32 scales = at + (group * 4 + threadIdx.x / 32 % 4) * PIECE_128 + PIECE_SCALES + threadIdx.x % 32 / 4 * 2;
            with.x = f16_to_float((u16)shared_u16(scales)), with.y = f16_to_float((u16)shared_u16(scales + 16));
        }
        issue(1);
        if ((stage += TURNS) >= STAGES) stage -= STAGES, phase ^= 1;
        if (chunk + TURNS < CHUNKS) {
            barrier_wait(full + 8 * stage, phase);
            product_wait<1>();
            widen_half(a[0], base + stage * STAGE_BYTES, group, 0);
        }
        product_wait<0>();
        release(mine);
        TokenScales none;
        promote(c, part, with, none);
    }
}
#endif
