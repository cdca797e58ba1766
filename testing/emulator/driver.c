// A CUDA driver whose GPU is the emulator: contexts, memory, streams, events, modules and graphs as far as `crates/device`
// uses them. Work is done when it is launched, in the thread that launches it.
#define _GNU_SOURCE
#include "driver.h"
#include "build.h"
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

enum { SUCCESS = 0, INVALID = 1, NO_MEMORY = 2, NO_IMAGE = 200, NO_SYMBOL = 500, LAUNCH_FAILED = 719, NOT_SUPPORTED = 801 };
enum { GRANULE = 4096 };
static const u64 MEMORY = 64ull << 30;
static u64 used;

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static void enter(void) { pthread_mutex_lock(&lock); }
static int leave(int code) {
    pthread_mutex_unlock(&lock);
    return code;
}

// ---- devices ----------------------------------------------------------------------------------

static u32 conditions[4096];
static u32 condition_count;

static void set_condition(u64 handle, u32 value) {
    if (handle && handle <= condition_count) conditions[handle - 1] = value;
}

int cuInit(unsigned flags) {
    // Kernels find the runtime by its names, but this library may have been loaded without giving them to others.
    if (!dlopen(RUNTIME, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD)) return INVALID;
    emu_condition_handler(set_condition);
    return SUCCESS;
}
// NVRTC asks the driver for tables of more functions; a table that is this short has none that it calls.
int cuGetExportTable(const void** table, const void* id) {
    static const u64 none[6] = {sizeof none};
    return *table = none, SUCCESS;
}
int cuDriverGetVersion(int* version) { return *version = 13000, SUCCESS; }
int cuGetErrorName(unsigned code, const char** name) {
    switch (code) {
        case SUCCESS: *name = "CUDA_SUCCESS"; break;
        case INVALID: *name = "CUDA_ERROR_INVALID_VALUE"; break;
        case NO_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
        case NO_IMAGE: *name = "CUDA_ERROR_INVALID_IMAGE"; break;
        case NO_SYMBOL: *name = "CUDA_ERROR_NOT_FOUND"; break;
        case LAUNCH_FAILED: *name = "CUDA_ERROR_LAUNCH_FAILED"; break;
        case NOT_SUPPORTED: *name = "CUDA_ERROR_NOT_SUPPORTED"; break;
        default: return INVALID;
    }
    return SUCCESS;
}
int cuGetErrorString(unsigned code, const char** text) {
    *text = code == LAUNCH_FAILED || code == NO_IMAGE ? emu_message() : "see the name";
    return SUCCESS;
}
int cuDeviceGetCount(int* count) { return *count = 1, SUCCESS; }
int cuDeviceGet(int* device, int ordinal) { return *device = 0, ordinal ? 101 : SUCCESS; }
int cuDeviceGetName(char* name, int room, int device) { return snprintf(name, room, "emulated sm_90a"), SUCCESS; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { return *bytes = MEMORY, SUCCESS; }
int cuDeviceGetAttribute(int* value, int which, int device) {
    switch (which) {
        case 16: *value = SMS; break;
        case 38: *value = 60 << 20; break;
        case 75: *value = 9; break;
        case 76: *value = 0; break;
        case 81: *value = SHARED_OF_SM; break;
        case 97: *value = SHARED_MOST; break;
        case 102: *value = 1; break;
        default: *value = 0;
    }
    return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = (void*)1, SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }
int cuCtxSetCurrent(void* context) { return SUCCESS; }
int cuCtxSynchronize(void) { return SUCCESS; }
int cuMemGetInfo_v2(size_t* free, size_t* total) { return *total = MEMORY, *free = MEMORY - used, SUCCESS; }

// ---- memory -----------------------------------------------------------------------------------

static void* reserve(size_t bytes, int access) {
    void* at = mmap(NULL, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

int cuMemAlloc_v2(u64* address, size_t bytes) {
    if (used + bytes > MEMORY) return NO_MEMORY;
    enter();
    // A page more, so that the range says exactly where it ends.
    u64* head = reserve(bytes + GRANULE, PROT_READ | PROT_WRITE);
    if (!head) return leave(NO_MEMORY);
    *head = bytes, used += bytes;
    *address = (u64)head + GRANULE;
    emu_range_add(*address, bytes);
    return leave(SUCCESS);
}
int cuMemFree_v2(u64 address) {
    if (!address) return SUCCESS;
    enter();
    u64* head = (u64*)(address - GRANULE);
    used -= *head;
    emu_range_remove(address);
    munmap(head, *head + GRANULE);
    return leave(SUCCESS);
}
int cuMemGetAllocationGranularity(size_t* bytes, const void* properties, int option) { return *bytes = GRANULE, SUCCESS; }
int cuMemAddressReserve(u64* address, size_t bytes, size_t alignment, u64 wish, unsigned long long flags) {
    return (*address = (u64)reserve(bytes, PROT_NONE)) ? SUCCESS : NO_MEMORY;
}
int cuMemAddressFree(u64 address, size_t bytes) { return munmap((void*)address, bytes) ? INVALID : SUCCESS; }
int cuMemCreate(u64* handle, size_t bytes, const void* properties, unsigned long long flags) {
    enter();
    if (used + bytes > MEMORY) return leave(NO_MEMORY);
    used += bytes;
    return *handle = bytes, leave(SUCCESS);
}
int cuMemRelease(u64 handle) {
    enter();
    used -= handle;
    return leave(SUCCESS);
}
int cuMemMap(u64 address, size_t bytes, size_t offset, u64 handle, unsigned long long flags) { return bytes == handle ? SUCCESS : INVALID; }
int cuMemSetAccess(u64 address, size_t bytes, const void* access, size_t count) {
    enter();
    if (mprotect((void*)address, bytes, PROT_READ | PROT_WRITE)) return leave(INVALID);
    emu_range_add(address, bytes);
    return leave(SUCCESS);
}
int cuMemUnmap(u64 address, size_t bytes) {
    enter();
    emu_range_remove(address);
    madvise((void*)address, bytes, MADV_DONTNEED);
    mprotect((void*)address, bytes, PROT_NONE);
    return leave(SUCCESS);
}
int cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
    enter();
    if (posix_memalign(address, GRANULE, bytes)) return leave(NO_MEMORY);
    emu_range_add((u64)*address, bytes);
    return leave(SUCCESS);
}
int cuMemFreeHost(void* address) {
    enter();
    emu_range_remove((u64)address);
    free(address);
    return leave(SUCCESS);
}
int cuMemHostGetDevicePointer_v2(u64* address, void* host, unsigned flags) { return *address = (u64)host, SUCCESS; }
int cuMemGetAddressRange_v2(u64* base, size_t* bytes, u64 address) {
    struct emu_range* r = emu_find(address);
    if (!r) return INVALID;
    return *base = r->base, *bytes = r->bytes, SUCCESS;
}
struct ipc_handle {
    char reserved[64];
};
int cuIpcOpenMemHandle_v2(u64* address, struct ipc_handle handle, unsigned flags) { return NOT_SUPPORTED; }
int cuIpcCloseMemHandle(u64 address) { return NOT_SUPPORTED; }

// ---- streams and graphs -----------------------------------------------------------------------

struct node {
    int (*run)(void*);
    void* data;
    struct graph* body;
    u64 condition;
    _Bool repeat;
};
struct graph {
    struct node* nodes;
    u32 count, room;
};
struct stream {
    struct graph* capturing;
};

static struct node* append(struct graph* g) {
    if (g->count == g->room) g->nodes = realloc(g->nodes, (g->room = g->room * 2 + 16) * sizeof *g->nodes);
    g->nodes[g->count] = (struct node){0};
    return &g->nodes[g->count++];
}

int emu_enqueue(struct stream* stream, int (*run)(void*), const void* data, size_t bytes) {
    enter();
    if (stream && stream->capturing) {
        struct node* n = append(stream->capturing);
        n->run = run, n->data = memcpy(malloc(bytes), data, bytes);
        return leave(SUCCESS);
    }
    return leave(run((void*)data));
}

static int run_graph(struct graph* g) {
    for (u32 i = 0; i < g->count; i++) {
        const struct node* n = &g->nodes[i];
        if (!n->body) {
            const int code = n->run(n->data);
            if (code) return code;
            continue;
        }
        while (conditions[n->condition - 1]) {
            const int code = run_graph(n->body);
            if (code) return code;
            if (!n->repeat) break;
        }
    }
    return SUCCESS;
}

int cuStreamCreate(struct stream** stream, unsigned flags) { return *stream = calloc(1, sizeof **stream), SUCCESS; }
int cuStreamDestroy_v2(struct stream* stream) { return free(stream), SUCCESS; }
int cuStreamSynchronize(struct stream* stream) { return SUCCESS; }
int cuStreamQuery(struct stream* stream) { return SUCCESS; }
int cuStreamBeginCaptureToGraph(struct stream* stream, struct graph* graph, const void* after, const void* edges, size_t count, int mode) {
    if (stream->capturing || count) return INVALID;
    return stream->capturing = graph, SUCCESS;
}
int cuStreamEndCapture(struct stream* stream, struct graph** graph) {
    *graph = stream->capturing;
    stream->capturing = NULL;
    return *graph ? SUCCESS : INVALID;
}
int cuStreamGetCaptureInfo_v3(struct stream* stream, unsigned* status, u64* id, struct graph** graph, const void** after, const void** edges,
                              size_t* count) {
    *status = stream->capturing != NULL, *id = 1, *graph = stream->capturing, *after = NULL, *edges = NULL, *count = 0;
    return SUCCESS;
}
// Nodes run in the order in which they were captured.
int cuStreamUpdateCaptureDependencies_v2(struct stream* stream, void* after, const void* edges, size_t count, unsigned flags) { return SUCCESS; }
int cuGraphCreate(struct graph** graph, unsigned flags) { return *graph = calloc(1, sizeof **graph), SUCCESS; }
int cuGraphDestroy(struct graph* graph) {
    enter();
    for (u32 i = 0; i < graph->count; i++) {
        if (graph->nodes[i].body) cuGraphDestroy(graph->nodes[i].body);
        free(graph->nodes[i].data);
    }
    free(graph->nodes), free(graph);
    return leave(SUCCESS);
}
int cuGraphGetNodes(struct graph* graph, void* nodes, size_t* count) { return *count = graph->count, nodes ? NOT_SUPPORTED : SUCCESS; }
int cuGraphConditionalHandleCreate(u64* handle, struct graph* graph, void* context, unsigned value, unsigned flags) {
    enter();
    // Handles are used again after so many; graphs of tests do not live that long.
    const u32 at = condition_count < 4096 ? condition_count++ : (condition_count = 1, 0);
    conditions[at] = value;
    *handle = at + 1;
    return leave(SUCCESS);
}
struct conditional_params {
    int type, reserved[3];
    u64 handle;
    unsigned kind, size;
    struct graph** bodies;
    void* context;
};
int cuGraphAddNode_v2(void** node, struct graph* graph, const void* after, const void* edges, size_t count, struct conditional_params* p) {
    enum { CONDITIONAL = 13 };
    if (p->type != CONDITIONAL || p->size != 1 || p->kind > 1) return NOT_SUPPORTED;
    enter();
    struct node* n = append(graph);
    n->body = calloc(1, sizeof *n->body), n->condition = p->handle, n->repeat = p->kind == 1;
    struct graph** list = malloc(sizeof *list);
    *list = n->body;
    n->data = list;
    p->bodies = list;
    *node = n->body;
    return leave(SUCCESS);
}
int cuGraphInstantiateWithFlags(struct graph** exec, struct graph* graph, unsigned long long flags) { return *exec = graph, SUCCESS; }
int cuGraphExecDestroy(struct graph* exec) { return SUCCESS; }
int cuGraphUpload(struct graph* exec, struct stream* stream) { return SUCCESS; }
int cuGraphLaunch(struct graph* exec, struct stream* stream) {
    enter();
    return leave(run_graph(exec));
}

struct event {
    u64 at;
};
int cuEventCreate(struct event** event, unsigned flags) { return *event = calloc(1, sizeof **event), SUCCESS; }
int cuEventDestroy_v2(struct event* event) { return free(event), SUCCESS; }
int cuEventRecord(struct event* event, struct stream* stream) { return event->at = emu_clock(), SUCCESS; }
int cuEventSynchronize(struct event* event) { return SUCCESS; }
int cuStreamWaitEvent(struct stream* stream, struct event* event, unsigned flags) { return SUCCESS; }
int cuEventElapsedTime(float* ms, struct event* from, struct event* to) { return *ms = (to->at - from->at) * 1e-6f, SUCCESS; }

// ---- copies -----------------------------------------------------------------------------------

struct copy {
    u64 to, from;
    size_t bytes, rows, to_pitch, from_pitch;
};
static int run_copy(void* data) {
    const struct copy* c = data;
    for (size_t i = 0; i < c->rows; i++) memmove((void*)(c->to + i * c->to_pitch), (void*)(c->from + i * c->from_pitch), c->bytes);
    return SUCCESS;
}
int cuMemcpyAsync(u64 to, u64 from, size_t bytes, struct stream* stream) {
    const struct copy c = {to, from, bytes, 1};
    return emu_enqueue(stream, run_copy, &c, sizeof c);
}
int cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t bytes, struct stream* stream) { return cuMemcpyAsync(to, (u64)from, bytes, stream); }
int cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t bytes, struct stream* stream) { return cuMemcpyAsync((u64)to, from, bytes, stream); }
int cuMemcpyBatchAsync_v2(u64* to, u64* from, size_t* bytes, size_t count, void* how, size_t* first, size_t kinds, struct stream* stream) {
    for (size_t i = 0; i < count; i++) cuMemcpyAsync(to[i], from[i], bytes[i], stream);
    return SUCCESS;
}
struct copy_2d {
    size_t from_x, from_y;
    int from_type;
    const void* from_host;
    u64 from_device;
    void* from_array;
    size_t from_pitch, to_x, to_y;
    int to_type;
    void* to_host;
    u64 to_device;
    void* to_array;
    size_t to_pitch, bytes, rows;
};
int cuMemcpy2DAsync_v2(const struct copy_2d* p, struct stream* stream) {
    const struct copy c = {p->to_device, p->from_device, p->bytes, p->rows, p->to_pitch, p->from_pitch};
    return emu_enqueue(stream, run_copy, &c, sizeof c);
}
struct fill {
    u64 to;
    u32 word;
    size_t words;
    u8 size;
};
static int run_fill(void* data) {
    const struct fill* f = data;
    if (f->size == 1) memset((void*)f->to, f->word, f->words);
    else
        for (size_t i = 0; i < f->words; i++) ((u32*)f->to)[i] = f->word;
    return SUCCESS;
}
int cuMemsetD32Async(u64 to, unsigned word, size_t words, struct stream* stream) {
    const struct fill f = {to, word, words, 4};
    return emu_enqueue(stream, run_fill, &f, sizeof f);
}
int cuMemsetD8Async(u64 to, unsigned char byte, size_t bytes, struct stream* stream) {
    const struct fill f = {to, byte, bytes, 1};
    return emu_enqueue(stream, run_fill, &f, sizeof f);
}
int cuTensorMapEncodeTiled(void* map, int type, u32 rank, void* address, const u64* dims, const u64* strides, const u32* box, const u32* steps,
                           int interleave, int swizzle, int promotion, int fill) {
    if (interleave || fill) return NOT_SUPPORTED;
    return emu_tensor_map(map, type, rank, (u64)address, dims, strides, box, steps, swizzle) ? INVALID : SUCCESS;
}

// ---- kernels ----------------------------------------------------------------------------------

struct function {
    const struct emu_kernel* kernel;
    u32 allowed;
};

int cuModuleLoadData(const struct emu_module** module, const void* image) {
    char path[4096];
    if (strncmp(image, "//", 2) && strncmp(image, "\n", 1) && strncmp(image, ".version", 8)) return NO_IMAGE;
    enter();
    if (!built(image, path, sizeof path)) return leave(NO_IMAGE);
    *module = emu_load(path);
    return leave(*module ? SUCCESS : NO_IMAGE);
}
// Its ranges stay: the same code may be loaded twice.
int cuModuleUnload(const struct emu_module* module) { return SUCCESS; }
int cuModuleGetFunction(struct function** function, const struct emu_module* module, const char* name) {
    for (u32 i = 0; i < module->kernels; i++)
        if (strcmp(module->kernel[i].name, name) == 0) {
            *function = calloc(1, sizeof **function);
            (*function)->kernel = &module->kernel[i];
            return SUCCESS;
        }
    return NO_SYMBOL;
}
int cuFuncSetAttribute(struct function* f, int which, int value) {
    enum { DYNAMIC_SHARED = 8 };
    if (which != DYNAMIC_SHARED) return NOT_SUPPORTED;
    if (value + f->kernel->static_shared > SHARED_MOST) return INVALID;
    return f->allowed = value, SUCCESS;
}
int cuFuncGetAttribute(int* value, int which, struct function* f) {
    switch (which) {
        case 0: *value = f->kernel->max_threads ? f->kernel->max_threads : 1024; break;
        case 1: *value = f->kernel->static_shared; break;
        case 3: *value = f->kernel->local; break;
        case 4: *value = 32; break;
        case 8: *value = f->allowed; break;
        default: *value = 0;
    }
    return SUCCESS;
}

struct attribute {
    u32 id, pad;
    union {
        u32 cluster[3];
        int flag;
        char room[64];
    };
};
struct config {
    u32 grid[3], threads[3], shared;
    struct stream* stream;
    const struct attribute* attributes;
    u32 count;
};
struct kernel_launch {
    const struct emu_kernel* kernel;
    u32 grid[3], threads[3], cluster[3], shared, dependent;
    char params[4096] __attribute__((aligned(128)));
};
static int run_kernel(void* data) {
    const struct kernel_launch* l = data;
    const int code = emu_launch(l->kernel, l->grid, l->threads, l->cluster, l->shared, l->params, l->dependent);
    if (code) fprintf(stderr, "emulator: %s\n", emu_message());
    return code;
}
int cuLaunchKernelEx(const struct config* config, struct function* f, void** args, void** extra) {
    enum { CLUSTER = 4, DEPENDENT = 6 };
    static __thread struct kernel_launch l;
    const struct emu_kernel* k = f->kernel;
    memset(&l, 0, sizeof l);
    l.kernel = k, l.shared = config->shared;
    if (l.shared > f->allowed && l.shared + k->static_shared > 48 << 10) return INVALID;
    for (int d = 0; d < 3; d++) l.grid[d] = config->grid[d], l.threads[d] = config->threads[d], l.cluster[d] = 1;
    for (u32 i = 0; i < config->count; i++) {
        const struct attribute* a = &config->attributes[i];
        if (a->id == CLUSTER) memcpy(l.cluster, a->cluster, sizeof l.cluster);
        else if (a->id == DEPENDENT) l.dependent = a->flag;
        else return NOT_SUPPORTED;
    }
    for (u32 i = 0; i < k->params; i++) memcpy(l.params + k->param_at[i], args[i], k->param_size[i]);
    return emu_enqueue(config->stream, run_kernel, &l, sizeof l);
}
