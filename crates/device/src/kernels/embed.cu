// out[t] = table[ids[t]], or with GIVEN_ROW given[ids[t] - GIVEN_ROW] where there is such a row; a block per token. XT:
// table's type, YT: out's. LOW: ids modulo it, HIGH: ids divided by it.
#include "quant.cuh"

extern "C" __global__ void __launch_bounds__(256)
embed(const u32* ids, const void* table, void* out, const void* given, u32 vocab, u32 width, u32 table_stride,
      u32 out_stride, u32 given_rows, u32 given_stride) {
    let_successor_start();
    wait_for_predecessor();
    const u32 t = blockIdx.x;
    u32 id = ids[t];
#ifdef GIVEN_ROW
    // A row that the host gave, of out's type.
    if (id - GIVEN_ROW < given_rows) {
        const u64 from = (u64)(id - GIVEN_ROW) * given_stride, at = (u64)t * out_stride;
        for (u32 i = threadIdx.x; i < width; i += 256) store1<YT>(out, at + i, load1<YT>(given, from + i));
        return;
    }
#endif
#ifdef LOW
    id %= LOW;
#endif
#ifdef HIGH
    id /= HIGH;
#endif
    if (id >= vocab) id = 0;
    const u8* row = weight_row<XT>(table, id, table_stride);
    const u64 to = (u64)t * out_stride;
    for (u32 i = threadIdx.x * 8; i < width; i += 256 * 8) {
        if (ALIGNED) {
            float v[8];
            weights8<XT>(row, i, v);
            store8<YT>(out, to + i, v);
        } else {
#if XT <= BF16
            for (u32 e = i; e < width && e < i + 8; e++) store1<YT>(out, to + e, load1<XT>(row, e));
#else
            float v[8];
            weights8<XT>(row, i, v);
            for (u32 e = 0; e < 8; e++) store1<YT>(out, to + i + e, v[e]);
#endif
        }
    }
}
