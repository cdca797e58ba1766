// Which TOP of E experts a token goes to, and with what weight. Logits are products of bf16 with sums in f32.
// A cluster of SHARES blocks takes TOKENS tokens; each block has E / SHARES experts, a warp sixteen of the tokens and
// a share of H, and a token's logits meet in the shared memory of the block that chooses for it. Fragments come
// straight from memory: 16 bytes of a row are the same eight of H in both operands, whatever their order in the
// product. Where they fit into registers, the router's weights are read before the wait for the predecessor.
//
// PLANS: there is one cluster of at most 16 tokens, and no expert has more than a task holds; the first block then makes
// the plan (experts_plan.cu) as well.
//
// H, E (a multiple of 32), TOKENS (16, 32, 64), SHARES, WARPS, PLANS, and what route_choose.cuh wants.
#include "experts_plan.cuh"
#include "route_choose.cuh"

#define EACH (E / SHARES)
// The block that chooses for a token, and which of its tokens that is. To plan, one block must know all of them.
#define OWNER(token) (PLANS ? 0 : (token) % SHARES)
#define PLACE(token) (PLANS ? (token) : (token) / SHARES)
#define OWN (PLANS ? TOKENS : TOKENS / SHARES)
#define TILES_T (TOKENS / 16)
#define PARTS (WARPS / TILES_T)
#define STEPS (H / PARTS / 32)
#define EARLY (STEPS * (EACH / 8) <= 16)
#define LIMIT (EARLY ? STEPS : 4)

#if PLANS
// Each of the first E threads has an expert, each of those behind them an assignment. What comes before it is counted by
// looking at all assignments: there are at most 128.
DEVICE void make_plan(const u32* ids, const float* weights, u32 all, const Plan& plan) {
    __shared__ u32 present[E / 32];
    const u32 id = threadIdx.x;
    const bool expert = id < E;
    const u32 own = expert ? id : id - E < all ? ids[id - E] : E;
    u32 below = 0, same = 0;
#pragma unroll 8
    for (u32 i = 0; i < all; i++) {
        const u32 e = ids[i];
        below += e < own;
        same += e == own && (expert || i < id - E);
    }
    const u32 some = __ballot_sync(FULL, expert && same > 0);
    if (expert && id % 32 == 0) present[id / 32] = some;
    __syncthreads();
    u32 used = 0, before = 0;
#pragma unroll
    for (int w = 0; w < E / 32; w++) {
        if (w < id / 32) before += __popc(present[w]);
        used += __popc(present[w]);
    }
    if (expert) {
        before += __popc(some & ((1u << id % 32) - 1));
        plan.counts[id] = same;
        plan.offsets[id] = below;
        if (same) plan.tasks[before] = {(int)id, below, same, 1};
    } else if (own < E) {
        plan.rows[below + same] = id - E;
        plan.place[id - E] = below + same;
        plan.gains[below + same] = weights[id - E];
    }
    for (u32 i = id; i < plan.most_tasks; i += WARPS * 32) {
        plan.ready[i] = 0;
        if (i >= used) plan.tasks[i] = {-1, 0, 0, 0};
    }
    if (id == 0) plan.offsets[E] = all, plan.head[0] = used;
    if (plan.load) {
        if (expert && same) add_load(plan.load, id, same);
        if (id == 0) add_load(plan.load, E, used), add_load(plan.load, E + 1, 1);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32)
route(const u16* x, const u16* w, const void* bias, u32* choice, const u32* live, u32 most, u32 x_stride, float scale
#if PLANS
      , PLAN_ARGUMENTS
#endif
) {
    // Padded as far as 48 KB allow.
    __shared__ float parts[PARTS][TOKENS][EACH + (EACH < 64)];
    __shared__ float logits[OWN][E];
#if PLANS
    __shared__ u32 all_ids[TOKENS * TOP];
    __shared__ float all_weights[TOKENS * TOP];
#endif
    u32 rank = 0;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
    const u32 top = blockIdx.x / SHARES * TOKENS, group = warp % TILES_T, part = warp / TILES_T;
    const u16* from = w + (u64)(rank * EACH + g) * H + part * (H / PARTS) + j * 8;
    uint4 held[EARLY ? STEPS : 1][EARLY ? EACH / 8 : 1];
    if (EARLY)
#pragma unroll
        for (int s = 0; s < (EARLY ? STEPS : 0); s++)
#pragma unroll
            for (int n = 0; n < EACH / 8; n++) held[s][EARLY ? n : 0] = *(const uint4*)(from + n * 8 * H + s * 32);
    let_successor_start();
    wait_for_predecessor();

    const u32 rows = live ? min(*live, most) : most;
    // Rows beyond the live ones repeat the last; their results are not used.
    const u16* low = x + (u64)min(top + group * 16 + g, most - 1) * x_stride + part * (H / PARTS) + j * 8;
    const u16* high = x + (u64)min(top + group * 16 + g + 8, most - 1) * x_stride + part * (H / PARTS) + j * 8;
    float c[EACH / 8][4] = {};
#pragma unroll LIMIT
    for (int s = 0; s < STEPS; s++) {
        const uint4 a = *(const uint4*)(low + s * 32), b = *(const uint4*)(high + s * 32);
        uint4 v[EACH / 8];
#pragma unroll
        for (int n = 0; n < EACH / 8; n++) v[n] = EARLY ? held[EARLY ? s : 0][EARLY ? n : 0] : *(const uint4*)(from + n * 8 * H + s * 32);
#pragma unroll
        for (int n = 0; n < EACH / 8; n++) {
            mma_16x8x16<BF16>(c[n], a.x, b.x, a.y, b.y, v[n].x, v[n].y);
            mma_16x8x16<BF16>(c[n], a.z, b.z, a.w, b.w, v[n].z, v[n].w);
        }
    }
#pragma unroll
    for (int n = 0; n < EACH / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) parts[part][group * 16 + g + i / 2 * 8][n * 8 + 2 * j + i % 2] = c[n][i];
    __syncthreads();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    for (u32 i = threadIdx.x; i < TOKENS * EACH; i += WARPS * 32) {
        const u32 token = i / EACH, e = i % EACH;
        float sum = 0.0f;
#pragma unroll
        for (int p = 0; p < PARTS; p++) sum += parts[p][token][e];
        sum = logit_of(sum, bias, rank * EACH + e);
        const u32 to = shared_address(&logits[PLACE(token)][rank * EACH + e]);
        asm volatile(
            "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nst.shared::cluster.f32 [there], %2;\n}"
            ::"r"(to), "r"(OWNER(token)), "f"(sum) : "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (PLANS && rank > 0) return;
    for (u32 i = warp; i < OWN; i += WARPS) {
        const u32 token = PLANS ? i : top + i * SHARES + rank;
        if (token >= rows) continue;
        u32 expert;
        float weight;
        choose(logits[i], bias, scale, expert, weight);
        if (lane >= TOP) continue;
        choice[(u64)token * 2 * TOP + lane] = expert;
        choice[(u64)token * 2 * TOP + TOP + lane] = __float_as_uint(weight);
#if PLANS
        all_ids[token * TOP + lane] = expert;
        all_weights[token * TOP + lane] = weight;
#endif
    }
#if PLANS
    __syncthreads();
    make_plan(all_ids, all_weights, rows * TOP, PLAN);
#endif
}
