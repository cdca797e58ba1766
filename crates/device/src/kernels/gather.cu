// y[i] = x[index[i]] in words of UNIT bytes; a block per row.
#include "prelude.cuh"

#if UNIT == 16
typedef uint4 Unit;
#elif UNIT == 4
typedef u32 Unit;
#else
typedef u16 Unit;
#endif

extern "C" __global__ void __launch_bounds__(256)
gather(const u32* index, const void* x, void* y, u32 x_rows, u32 units, u64 x_stride, u64 y_stride) {
    let_successor_start();
    wait_for_predecessor();
    u32 from = index[blockIdx.x];
    if (from >= x_rows) from = 0;
    const Unit* source = (const Unit*)x + from * x_stride;
    Unit* to = (Unit*)y + blockIdx.x * y_stride;
    for (u32 i = threadIdx.x; i < units; i += 256) to[i] = source[i];
}
