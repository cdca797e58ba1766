// What adapters add to the result of a linear, for bf16 matrices: blocks belong to an adapter and take all rows that have
// it, so its matrices are read once for CHUNK rows. Tables and matrices are loaded before the wait for the rows.
//
// lora_shrink: sums = x · Aᵀ by matrix instructions. A block has TILES · 8 columns of one part, and SLICE elements of k,
// which its warps divide; the sums of slices are kept apart, so the order of addition depends on k alone.
// lora_expand: y += sums · Bᵀ, a thread per column, which keeps its row of B.
//
// RANK: columns of a part. WIDE: k. SLICES: slices of k. INNER: columns of all parts. Type YT of y.
#include "adapter_of.cuh"

#define CHUNK 256
#define WARPS 8
#define PER_WARP (SLICE / WARPS)
#define TILES 2

// The rows of a chunk that have this adapter, in their order; all threads get how many. Uses no result of a linear.
DEVICE u32 rows_with(u32 adapter, u32 first, u32 count, const u32* token_row, const u32* row_seat, const u32* params,
                     u32 rows, u32 seats, u32 by_row, u32* list, u32* counts) {
    const u32 row = first + threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool mine = row < count && adapter_of(row, token_row, row_seat, params, rows, seats, FULL, by_row) == adapter;
    const u32 found = __ballot_sync(FULL, mine);
    if (lane == 0) counts[warp] = __popc(found);
    __syncthreads();
    u32 before = 0, all = 0;
    for (u32 w = 0; w < WARPS; w++) {
        before += w < warp ? counts[w] : 0;
        all += counts[w];
    }
    if (mine) list[before + __popc(found & ((1u << lane) - 1))] = row;
    __syncthreads();
    return all;
}

DEVICE uint4 load_words(const void* p, u64 element) { return *(const uint4*)((const u16*)p + element); }

#ifdef SHRINK
extern "C" __global__ void __launch_bounds__(CHUNK)
lora_shrink(const void* x, const void* a, float* sums, const u32* token_row, const u32* row_seat, const u32* params,
            u32 count, u32 x_stride, u32 a_stride, u32 rows, u32 seats, u32 by_row, u32 groups, const u32* live) {
    __shared__ u32 list[CHUNK], counts[WARPS];
    __shared__ float partial[WARPS][16][TILES * 8];
    let_successor_start();
    const u32 group = blockIdx.x % groups, slice = blockIdx.x / groups, slot = blockIdx.y, first = blockIdx.z * CHUNK;
    if (live) count = min(count, __ldcg(live));
    const u32 found =
        rows_with(slot + 1, first, count, token_row, row_seat, params, rows, seats, by_row, list, counts);
    if (found == 0) {
        // What comes next relies on it that the linear is done when this is.
        wait_for_predecessor();
        return;
    }
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    // Eight consecutive elements of k for each thread: any order of k will do, if it is the same on both sides.
    const u32 column = group * (TILES * 8), k0 = slice * SLICE + warp * PER_WARP + t * 8;
    uint4 held[TILES][PER_WARP / 32];
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int s = 0; s < PER_WARP / 32; s++) {
            const u32 k = k0 + s * 32, c = column + n * 8 + g;
            held[n][s] = k < WIDE && c < INNER ? load_words(a, ((u64)slot * INNER + c) * a_stride + k) : make_uint4(0, 0, 0, 0);
        }
    wait_for_predecessor();
    for (u32 at = 0; at < found; at += 16) {
        const u32 r0 = at + g, r1 = at + g + 8;
        const u64 x0 = (u64)list[min(r0, found - 1)] * x_stride, x1 = (u64)list[min(r1, found - 1)] * x_stride;
        float acc[TILES][4] = {};
#pragma unroll
        for (int s = 0; s < PER_WARP / 32; s++) {
            const u32 k = k0 + s * 32;
            uint4 u = make_uint4(0, 0, 0, 0), v = u;
            if (k < WIDE) u = load_words(x, x0 + k), v = load_words(x, x1 + k);
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                mma_16x8x16<BF16>(acc[n], u.x, v.x, u.y, v.y, held[n][s].x, held[n][s].y);
                mma_16x8x16<BF16>(acc[n], u.z, v.z, u.w, v.w, held[n][s].z, held[n][s].w);
            }
        }
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) partial[warp][g + i / 2 * 8][n * 8 + t * 2 + i % 2] = acc[n][i];
        __syncthreads();
        // A thread per sum.
        const u32 r = threadIdx.x / (TILES * 8), c = threadIdx.x % (TILES * 8);
        if (at + r < found && column + c < INNER) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += partial[w][r][c];
            sums[((u64)list[at + r] * SLICES + slice) * INNER + column + c] = sum;
        }
        __syncthreads();
    }
}
#else
extern "C" __global__ void __launch_bounds__(CHUNK)
lora_expand(const float* sums, const void* b, void* y, const u32* token_row, const u32* row_seat, const u32* params,
            u32 count, u32 cols, u32 y_stride, u32 rows, u32 seats, u32 by_row, u32 turns, u32 end0, u32 end1, u32 end2,
            u32 end3, const u32* live) {
    __shared__ u32 list[CHUNK], counts[WARPS];
    __shared__ float own[GROUP][INNER];
    let_successor_start();
    const u32 slot = blockIdx.y, first = blockIdx.z * CHUNK, col = blockIdx.x * CHUNK + threadIdx.x;
    if (live) count = min(count, __ldcg(live));
    const u32 found =
        rows_with(slot + 1, first, count, token_row, row_seat, params, rows, seats, by_row, list, counts);
    if (found == 0) {
        // What comes next relies on it that the linear is done when this is.
        wait_for_predecessor();
        return;
    }
    const u32 stacked = (col >= end0) + (col >= end1) + (col >= end2) + (col >= end3);
    const u32 part = (turns ? col % turns : stacked) * RANK;
    uint4 held[RANK / 8];
    if (col < cols)
#pragma unroll
        for (int i = 0; i < RANK / 8; i++) held[i] = load_words(b, ((u64)slot * cols + col) * RANK + i * 8);
    wait_for_predecessor();
    for (u32 at = 0; at < found; at += GROUP) {
        const u32 some = min((u32)GROUP, found - at);
        __syncthreads();
        for (u32 i = threadIdx.x; i < some * INNER; i += CHUNK) {
            const float* from = sums + (u64)list[at + i / INNER] * (SLICES * INNER) + i % INNER;
            float sum = 0.0f;
#pragma unroll
            for (int s = 0; s < SLICES; s++) sum += __ldcg(from + s * INNER);
            own[i / INNER][i % INNER] = sum;
        }
        __syncthreads();
        if (col >= cols) continue;
        for (u32 r = 0; r < some; r++) {
            const u64 to = (u64)list[at + r] * y_stride + col;
            const float* with = own[r] + part;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < RANK / 8; i++) {
                const u32 words[4] = {held[i].x, held[i].y, held[i].z, held[i].w};
#pragma unroll
                for (int w = 0; w < 4; w++)
                    sum += with[i * 8 + w * 2] * low_half<BF16>(words[w]) + with[i * 8 + w * 2 + 1] * high_half<BF16>(words[w]);
            }
            store1<YT>(y, to, load1<YT>(y, to) + sum);
        }
    }
}
#endif
