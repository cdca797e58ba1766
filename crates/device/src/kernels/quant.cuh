// Eight consecutive elements of a row in any weight format. `i` is a multiple of 8, so all eight lie in
// one sub-block and share its scale. Layouts are those of GGUF files.
#pragma once
#include "prelude.cuh"

DEVICE float half_at(const u8* p) { return f16_to_float((u16)(p[0] | (u16)p[1] << 8)); }

// A sub-block's 6-bit scale and minimum in the 12-byte table of Q4K and Q5K.
DEVICE void k4_scale(const u8* s, int i, float& scale, float& minimum) {
    if (i < 4) {
        scale = (float)(s[i] & 63);
        minimum = (float)(s[i + 4] & 63);
    } else {
        scale = (float)((s[i + 4] & 15) | (s[i - 4] >> 6) << 4);
        minimum = (float)((s[i + 4] >> 4) | (s[i] >> 6) << 4);
    }
}

template <int T> DEVICE void weights8(const void* row, u32 i, float (&w)[8]) {
    if (T <= BF16) {
        load8<T>(row, i, w);
    } else if (T < Q2K) {
        const int size = T == Q4_0 ? 18 : T == Q4_1 ? 20 : T == Q5_0 ? 22 : T == Q5_1 ? 24 : 34;
        const u8* b = (const u8*)row + (u64)(i / 32) * size;
        const int e = i % 32;
        const float d = half_at(b);
        if (T == Q8_0) {
            for (int t = 0; t < 8; t++) w[t] = d * (float)(signed char)b[2 + e + t];
            return;
        }
        const bool offset = T == Q4_1 || T == Q5_1;
        const bool five = T == Q5_0 || T == Q5_1;
        const float m = offset ? half_at(b + 2) : 0.0f;
        const u8* q = b + (offset ? 4 : 2);
        u32 high = 0;
        if (five) {
            high = q[0] | (u32)q[1] << 8 | (u32)q[2] << 16 | (u32)q[3] << 24;
            q += 4;
        }
        for (int t = 0; t < 8; t++) {
            int v = q[(e & 15) + t];
            v = e < 16 ? v & 15 : v >> 4;
            if (five) v |= (int)(high >> (e + t) & 1) << 4;
            w[t] = T == Q4_0 ? d * (float)(v - 8)
                 : T == Q5_0 ? d * (float)(v - 16) : d * (float)v + m;
        }
    } else {
        const int size = T == Q2K ? 84 : T == Q3K ? 110 : T == Q4K ? 144 : T == Q5K ? 176 : 210;
        const u8* b = (const u8*)row + (u64)(i / 256) * size;
        const int e = i % 256, n = e / 128, j = e % 128 / 32, l = e % 32, s = n * 8 + j * 2 + l / 16;
        if (T == Q2K) {
            const float d = half_at(b + 80) * (float)(b[s] & 15), m = half_at(b + 82) * (float)(b[s] >> 4);
            for (int t = 0; t < 8; t++)
                w[t] = d * (float)(b[16 + n * 32 + l + t] >> (2 * j) & 3) - m;
        } else if (T == Q3K) {
            const u8* scales = b + 96;
            const int low = s < 8 ? scales[s] & 15 : scales[s - 8] >> 4;
            const int scale = low | (scales[8 + s % 4] >> (2 * (s / 4)) & 3) << 4;
            const float d = half_at(b + 108) * (float)(scale - 32);
            for (int t = 0; t < 8; t++) {
                const int v = b[32 + n * 32 + l + t] >> (2 * j) & 3;
                w[t] = d * (float)(v - (b[l + t] >> (n * 4 + j) & 1 ? 0 : 4));
            }
        } else if (T == Q6K) {
            const float d = half_at(b + 208) * (float)(signed char)b[192 + s];
            for (int t = 0; t < 8; t++) {
                const int low = b[n * 64 + (j & 1) * 32 + l + t];
                const int v = (j < 2 ? low & 15 : low >> 4) | (b[128 + n * 32 + l + t] >> (2 * j) & 3) << 4;
                w[t] = d * (float)(v - 32);
            }
        } else {
            const int sub = e / 32;
            float scale, minimum;
            k4_scale(b + 4, sub, scale, minimum);
            const float d = half_at(b) * scale, m = half_at(b + 2) * minimum;
            const u8* q = b + (T == Q5K ? 48 : 16) + e / 64 * 32 + l;
            for (int t = 0; t < 8; t++) {
                int v = sub & 1 ? q[t] >> 4 : q[t] & 15;
                if (T == Q5K) v |= (b[16 + l + t] >> sub & 1) << 4;
                w[t] = d * (float)v - m;
            }
        }
    }
}

// The first byte of row `r` of a matrix whose rows hold `stride` elements.
template <int T> DEVICE const u8* weight_row(const void* w, u64 r, u64 stride) {
    const u64 start = r * stride;
    if (T == F32) return (const u8*)w + start * 4;
    if (T == F16 || T == BF16) return (const u8*)w + start * 2;
    const u64 size = T == Q4_0 ? 18 : T == Q4_1 ? 20 : T == Q5_0 ? 22 : T == Q5_1 ? 24 : T == Q8_0 ? 34
                   : T == Q2K ? 84 : T == Q3K ? 110 : T == Q4K ? 144 : T == Q5K ? 176 : 210;
    return (const u8*)w + start / (T < Q2K ? 32 : 256) * size;
}
