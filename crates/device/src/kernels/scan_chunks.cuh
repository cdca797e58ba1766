// What scan_prepare.cu makes of a chunk of tokens and a head, and scan_chunks.cu reads. A row's chunks have CHUNK tokens, the last
// one fewer. With G the sum of the logarithms of a chunk's decays up to a token, only exp(G_t − G_s) of s <= t is ever computed, so
// nothing overflows, however strong decays are.
#pragma once
#include "prelude.cuh"

#define CHUNK 64
// Blocks of 16 × 16 on and below a chunk's diagonal.
#define BLOCKS 10
// Elements from row to row of a tile in shared memory: an odd number of 16 bytes, so that eight rows are in different banks.
#define ROW (KEY + 8)
#if SHARE
#define GROUP(head) ((head) / SHARE)
#define MEMBER(group, i) ((group) * SHARE + (i))
#else
#define GROUP(head) ((head) % GROUPS)
#define MEMBER(group, i) ((i) * GROUPS + (group))
#endif

// Blocks are in the order in which lanes hold them as the second operand of a product: tokens t are its columns, s its rows.
struct Record {
#if DELTA
    // (I + A)^-1, where A_ts = β_t exp(G_t − G_s) k_t·k_s for s < t.
    uint4 inverse[BLOCKS][32];
#endif
    // exp(G_t − G_s) q_t·k_s for s <= t.
    uint4 mix[BLOCKS][32];
    // Factors of a token's value, of k·S, of q·S, and of what it adds to the matrix at the end of the chunk; lengths are in them.
    float value[CHUNK], known[CHUNK], query[CHUNK], late[CHUNK];
    // Of the matrix, from chunk to chunk.
    float whole[4];
};

// What a row has to do.
struct Fed {
    u32 start, count, length, seat;
    // Rows of fewer than LONG tokens, and those that take drafts from a log, are scan.cu's. Pad rows have no seat of their own, and
    // must not change what seats carry.
    DEVICE bool load(const u32* row_seat, const u32* q_start, const u32* kv_len, const u32* row_replay, u32 row, u32 seats, u32 context) {
        seat = row_seat[row], start = q_start[row], count = q_start[row + 1] - start, length = kv_len[row];
        if (seat >= seats || length < count || length > context) return false;
        return count >= LONG && !(DRAFTS && length > count && row_replay[row] > 0);
    }
    // Chunks of rows are numbered in order, with gaps: a row has fewer than count / CHUNK + 2 of them.
    DEVICE static u32 slot(u32 start, u32 row) { return start / CHUNK + row; }
};

DEVICE u32 block_of(u32 t, u32 s) { return t * (t + 1) / 2 + s; }

// Where a lane finds its row of the four 8 × 8 tiles at (row, column) of a tile in shared memory: the second one is below the
// first (DOWN) or right of it.
template <bool DOWN> DEVICE u32 quad(const u16* tile, u32 stride, u32 row, u32 column, u32 lane) {
    const u32 low = lane / 8 % 2 * 8, high = lane / 16 * 8;
    return shared_address(tile + (row + (DOWN ? low : high) + lane % 8) * stride + column + (DOWN ? high : low));
}

// Copies rows of cols elements, zeros after the first there.
template <int THREADS> DEVICE void fetch(u16* to, u32 to_stride, const u16* from, u32 from_stride, u32 cols, u32 there, u32 thread) {
    const u32 pieces = cols / 8;
    for (u32 i = thread; i < CHUNK * pieces; i += THREADS) {
        const u32 t = i / pieces, c = i % pieces * 8;
        const bool live = t < there;
        copy16_async_or_zero(shared_address(to + t * to_stride + c), from + (u64)(live ? t : 0) * from_stride + c, live);
    }
}
