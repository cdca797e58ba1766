// cuBLASLt for the emulated GPU: the one form of GEMM that `crates/device` asks for, by the plain triple loop.
#include "driver.h"

enum { SUCCESS = 0, INVALID = 7, NOT_SUPPORTED = 15 };
enum { TRANSA = 3, EPILOGUE = 7, BIAS_POINTER = 8, EPILOGUE_BIAS = 4 };

struct desc {
    u32 transposed, epilogue;
    u64 bias;
};
struct layout {
    u32 type;
    u64 rows, columns;
    s64 stride;
};
struct gemm {
    struct desc desc;
    struct layout a, b, c, d;
    u64 a_at, b_at, c_at, d_at;
    f32 alpha, beta;
};

size_t cublasLtGetVersion(void) { return 130000; }
int cublasLtCreate(void** handle) { return *handle = (void*)1, SUCCESS; }
int cublasLtDestroy(void* handle) { return SUCCESS; }
int cublasLtMatmulDescCreate(struct desc** desc, int compute, int scale) { return *desc = calloc(1, sizeof **desc), SUCCESS; }
int cublasLtMatmulDescDestroy(struct desc* desc) { return free(desc), SUCCESS; }
int cublasLtMatmulDescSetAttribute(struct desc* desc, int which, const void* value, size_t bytes) {
    switch (which) {
        case TRANSA: return memcpy(&desc->transposed, value, 4), SUCCESS;
        case EPILOGUE: return memcpy(&desc->epilogue, value, 4), SUCCESS;
        case BIAS_POINTER: return memcpy(&desc->bias, value, 8), SUCCESS;
        default: return NOT_SUPPORTED;
    }
}
int cublasLtMatrixLayoutCreate(struct layout** layout, int type, u64 rows, u64 columns, s64 stride) {
    *layout = malloc(sizeof **layout);
    **layout = (struct layout){type, rows, columns, stride};
    return SUCCESS;
}
int cublasLtMatrixLayoutDestroy(struct layout* layout) { return free(layout), SUCCESS; }
int cublasLtMatmulPreferenceCreate(void** preference) { return *preference = malloc(1), SUCCESS; }
int cublasLtMatmulPreferenceDestroy(void* preference) { return free(preference), SUCCESS; }
int cublasLtMatmulPreferenceSetAttribute(void* preference, int which, const void* value, size_t bytes) { return SUCCESS; }
int cublasLtMatmulAlgoGetHeuristic(void* handle, struct desc* desc, struct layout* a, struct layout* b, struct layout* c, struct layout* d,
                                   void* preference, int asked, void* results, int* given) {
    return *given = 1, SUCCESS;
}

static f32 get(u64 base, u32 type, u64 at) {
    switch (type) {
        case 0: return ((f32*)base)[at];
        case 2: return h2f(((u16*)base)[at]);
        default: return b2f(((u16*)base)[at]);
    }
}
static void put(u64 base, u32 type, u64 at, f32 v) {
    switch (type) {
        case 0: ((f32*)base)[at] = v; break;
        case 2: ((u16*)base)[at] = f2h(v); break;
        default: ((u16*)base)[at] = f2b(v);
    }
}

static int run(void* data) {
    const struct gemm* g = data;
    const u64 k = g->a.rows;
    f32* row = malloc(2 * k * sizeof *row);
    for (u64 j = 0; j < g->d.columns; j++) {
        for (u64 i = 0; i < k; i++) row[i] = get(g->b_at, g->b.type, j * g->b.stride + i);
        for (u64 n = 0; n < g->d.rows; n++) {
            f32 sum = 0.0f;
            for (u64 i = 0; i < k; i++) sum += get(g->a_at, g->a.type, n * g->a.stride + i) * row[i];
            sum *= g->alpha;
            if (g->beta != 0.0f) sum += g->beta * get(g->c_at, g->c.type, j * g->c.stride + n);
            if (g->desc.epilogue == EPILOGUE_BIAS) sum += get(g->desc.bias, g->d.type, n);
            put(g->d_at, g->d.type, j * g->d.stride + n, sum);
        }
    }
    free(row);
    return SUCCESS;
}

int cublasLtMatmul(void* handle, struct desc* desc, const void* alpha, const void* a, struct layout* al, const void* b, struct layout* bl,
                   const void* beta, const void* c, struct layout* cl, void* d, struct layout* dl, const void* algo, void* workspace,
                   size_t workspace_bytes, struct stream* stream) {
    if (!desc->transposed || (desc->epilogue && desc->epilogue != EPILOGUE_BIAS) || al->rows != bl->rows) return NOT_SUPPORTED;
    const struct gemm g = {*desc, *al, *bl, *cl, *dl, (u64)a, (u64)b, (u64)c, (u64)d, *(const f32*)alpha, *(const f32*)beta};
    return emu_enqueue(stream, run, &g, sizeof g) ? INVALID : SUCCESS;
}
