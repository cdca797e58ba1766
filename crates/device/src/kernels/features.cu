// Hidden states that are kept for a drafter, and recalled by it: copies of rows, a block each. BYTES of an element.
#include "copy_row.cuh"

extern "C" __global__ void __launch_bounds__(256)
tap(const Element* x, Element* kept, u32 cols, u32 x_stride, u32 kept_stride, u32 column) {
    let_successor_start();
    wait_for_predecessor();
    copy_row(x + (u64)blockIdx.x * x_stride, kept + (u64)blockIdx.x * kept_stride + column, cols);
}

extern "C" __global__ void __launch_bounds__(256)
recall(const u32* row_seat, const Element* kept, Element* y, u32 cols, u32 kept_stride, u32 y_stride, u32 drafted,
       u32 seats) {
    let_successor_start();
    wait_for_predecessor();
    const u32 r = blockIdx.x, from = drafted ? r : min(row_seat[r], seats);
    copy_row(kept + (u64)from * kept_stride, y + (u64)r * y_stride, cols);
}
