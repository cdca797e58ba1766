// A row of plain elements of BYTES bytes, copied by a block of 256 threads.
#pragma once
#include "prelude.cuh"

#if BYTES == 4
typedef u32 Element;
#else
typedef u16 Element;
#endif

DEVICE void copy_row(const Element* from, Element* to, u32 cols) {
    for (u32 i = threadIdx.x; i < cols; i += 256) to[i] = from[i];
}
