// Experts with e4m3 weights and e4m3 tokens; `experts.cu` defines its macros before this is included. Tokens and activations
// are bf16 in memory: the threads that copy them quantise them, 128 columns of a token at a time. Few tokens are much less
// work than widening all weights.
#pragma once

// Tokens of a task that a thread has 16 columns of.
#define OWN_ROWS ((TILE * 8 + COPIERS - 1) / COPIERS)
// Chunks that it asks for ahead, as far as registers reach.
#define LOADED (OWN_ROWS <= 3 ? 2 : 1)

DEVICE u32 larger_magnitudes(u32 a, u32 b) {
    u32 r;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
    return r;
}

// By COPIERS threads, eight for a token.
DEVICE void copy_tokens_as_bytes(Ring ring, Units units, float (&x_scales)[STAGES][TILE], const u16* x, u32 x_stride, const u32* rows,
                                 const u32* ready, const u16* act) {
    const u32 id = threadIdx.x - WORKERS - 32, piece = id % 8;
    auto row_of = [&](int i) { return i * (COPIERS / 8) + id / 8; };
    u32 ahead[OWN_ROWS];
    auto look_ahead = [&]() {
#pragma unroll
        for (int i = 0; i < OWN_ROWS; i++)
            if (units.next_at != FULL && !units.next_is_down && row_of(i) < units.next_task.count) ahead[i] = rows[units.next_task.first + row_of(i)];
    };
    look_ahead();
    while (units.next()) {
        const Task task = units.task;
        const u32 chunks = units.chunks();
        const u16* base = (units.is_down ? act : x) + piece * 16;
        u32 from[OWN_ROWS];
#pragma unroll
        for (int i = 0; i < OWN_ROWS; i++) from[i] = units.is_down ? (task.first + row_of(i)) * I : ahead[i] / TOP * x_stride;
        if (units.is_down && PHASES == 3) {
            u32 seen;
            if (id == 0)
                do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(ready + units.number()) : "memory");
                while (seen < UP_UNITS * GROUPS);
            copiers_meet();
        }
        look_ahead();
        uint4 raw[LOADED][OWN_ROWS][2];
        auto load = [&](int d, u32 chunk) {
#pragma unroll
            for (int i = 0; i < OWN_ROWS; i++) {
                if (chunk >= chunks || row_of(i) >= task.count) continue;
                raw[d][i][0] = __ldcg((const uint4*)(base + from[i] + chunk * 128));
                raw[d][i][1] = __ldcg((const uint4*)(base + from[i] + chunk * 128 + 8));
            }
        };
#pragma unroll
        for (int d = 0; d < LOADED; d++) load(d, d);
#pragma unroll 1
        for (u32 chunk = 0; chunk < chunks; chunk += LOADED)
#pragma unroll
            for (int d = 0; d < LOADED; d++) {
                if (chunk + d >= chunks) break;
                const u32 to = ring.at() + WEIGHT_BYTES;
                barrier_wait(ring.empty + 8 * ring.stage, ring.phase);
#pragma unroll
                for (int i = 0; i < OWN_ROWS; i++) {
                    // The same in the whole warp.
                    if (i * (COPIERS / 8) >= task.count) break;
                    const u32 w[8] = {raw[d][i][0].x, raw[d][i][0].y, raw[d][i][0].z, raw[d][i][0].w, raw[d][i][1].x, raw[d][i][1].y, raw[d][i][1].z, raw[d][i][1].w};
                    u32 most = larger_magnitudes(w[0], w[1]);
                    float v[16];
#pragma unroll
                    for (int e = 0; e < 8; e++) {
                        if (e > 1) most = larger_magnitudes(most, w[e]);
                        v[2 * e] = low_half<BF16>(w[e]), v[2 * e + 1] = high_half<BF16>(w[e]);
                    }
#pragma unroll
                    for (int lanes = 1; lanes < 8; lanes *= 2) most = larger_magnitudes(most, __shfl_xor_sync(FULL, most, lanes));
                    const Fit fit = fit_e4m3(fmaxf(low_half<BF16>(most), high_half<BF16>(most)));
                    const uint4 bytes = pack16_e4m3(v, fit.inverse);
                    const u32 row = row_of(i);
                    if (row >= task.count) continue;
                    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to + row * 128 + ((piece ^ row % 8) << 4)), "r"(bytes.x), "r"(bytes.y), "r"(bytes.z), "r"(bytes.w) : "memory");
                    if (piece == 0) x_scales[ring.stage][row] = fit.scale;
                }
                barrier_arrive(ring.full + 8 * ring.stage);
                load(d, chunk + d + LOADED);
                ring.advance();
            }
    }
}

// The sums over the inner dimension. A chunk's sums are scaled and added to those before.
template <int M_> DEVICE void multiply(float* c, Ring& ring, u32 chunks, Scales& scales) {
    const u32 group = __shfl_sync(FULL, threadIdx.x / 128, 0), j = threadIdx.x % 4;
    scales.begin(chunks);
    scales.look_ahead();
#pragma unroll
    for (int i = 0; i < M_ / 2; i++) c[i] = 0.0f;
    float part[M_ / 2];
#pragma unroll 1
    for (u32 chunk = 0; chunk < chunks; chunk++) {
        barrier_wait(ring.full + 8 * ring.stage, ring.phase);
        // Tokens were written by plain stores.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        const u64 a = swizzled_tile(ring.at() + group * 8192), b = swizzled_tile(ring.at() + WEIGHT_BYTES);
        product_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) ByteWgmma<M_>::add(part, a + 2 * k, b + 2 * k, k > 0);
        product_commit();
        const float2 by = Scales::pick(scales.ratio, chunk);
        float2 of_tokens[M_ / 8];
#pragma unroll
        for (int n = 0; n < M_ / 8; n++)
            asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(of_tokens[n].x), "=f"(of_tokens[n].y) : "r"(scales.of_tokens + (ring.stage * TILE + n * 8 + 2 * j) * 4) : "memory");
        product_wait<0>();
        release(ring.empty + 8 * ring.stage);
        ring.advance();
#pragma unroll
        for (int n = 0; n < M_ / 8; n++) {
            c[4 * n] += by.x * of_tokens[n].x * part[4 * n], c[4 * n + 1] += by.x * of_tokens[n].y * part[4 * n + 1];
            c[4 * n + 2] += by.y * of_tokens[n].x * part[4 * n + 2], c[4 * n + 3] += by.y * of_tokens[n].y * part[4 * n + 3];
        }
    }
}
