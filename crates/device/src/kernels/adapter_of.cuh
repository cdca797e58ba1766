// The adapter of a token: its number, or 0. By row: token t is row t of the batch. The tables are the prologue's.
#pragma once
#include "prelude.cuh"

DEVICE u32 adapter_of(u32 token, const u32* token_row, const u32* row_seat, const u32* params, u32 rows, u32 seats,
                      u32 slots, u32 by_row) {
    const u32 row = by_row ? token : __ldcg(token_row + token);
    if (row >= rows) return 0;
    const u32 seat = __ldcg(row_seat + row);
    if (seat >= seats) return 0;
    const u32 adapter = __ldcg(params + (u64)seat * PARAM_WORDS + PARAM_ADAPTER);
    return adapter <= slots ? adapter : 0;
}
