// A row of plain elements of BYTES bytes, copied by a block of 256 threads.
#pragma once
#include "prelude.cuh"

#if BYTES == 4
typedef u32 Element;
#else
typedef u16 Element;
#endif

// Pieces of 16 bytes that a thread has in flight.
#define PIECES_AT_ONCE 8

// Rows that begin at multiples of 16 bytes go in such pieces: a store may not be overtaken by the next load, so a loop over
// elements waits for each.
DEVICE void copy_row(const Element* from, Element* to, u32 cols) {
    const u32 tid = threadIdx.x;
    u32 done = 0;
    if (((u64)from | (u64)to) % 16 == 0) {
        const u32 pieces = cols / (16 / BYTES);
        for (u32 base = tid; base < pieces; base += 256 * PIECES_AT_ONCE) {
            uint4 held[PIECES_AT_ONCE];
#pragma unroll
            for (int p = 0; p < PIECES_AT_ONCE; p++)
                if (base + p * 256 < pieces) held[p] = ((const uint4*)from)[base + p * 256];
#pragma unroll
            for (int p = 0; p < PIECES_AT_ONCE; p++)
                if (base + p * 256 < pieces) ((uint4*)to)[base + p * 256] = held[p];
        }
        done = pieces * (16 / BYTES);
    }
    for (u32 i = done + tid; i < cols; i += 256) to[i] = from[i];
}
