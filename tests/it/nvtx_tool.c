/* A tool for NVTX ranges, as a profiler brings it: written by the layout of NVTX 3's nvtxTypes.h. It writes every push with
 * its depth and name, and every pop, to the file of the variable NVTX_TOOL_LOG. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef void (*function)(void);
typedef const void *(*export_table)(uint32_t id);

struct callbacks {
    size_t size;
    int (*table)(int module, function ***table, unsigned int *size);
};

struct version_info {
    size_t size;
    uint32_t version;
    uint32_t reserved;
    void (*set_tools_version)(uint32_t version);
};

enum { CALLBACKS = 1, VERSION_INFO = 3, CORE = 1, PUSH_A = 9, POP = 11, CORE_SIZE = 16 };

static FILE *out;
static __thread int depth;

static int push(const char *name) {
    fprintf(out, "push %d %s\n", depth++, name);
    fflush(out);
    return -1; /* as Nsight Systems */
}

static int pop(void) {
    fprintf(out, "pop %d\n", --depth);
    fflush(out);
    return -1;
}

int InitializeInjectionNvtx2(export_table get) {
    const struct callbacks *callbacks = get(CALLBACKS);
    const struct version_info *version = get(VERSION_INFO);
    const char *path = getenv("NVTX_TOOL_LOG");
    function **table = NULL;
    unsigned int size = 0;
    int module;
    if (!path || !callbacks || callbacks->size < sizeof *callbacks) return 0;
    if (!version || version->size < sizeof *version || version->version != 3) return 0;
    version->set_tools_version(3);
    /* As a profiler does: every module is looked at. */
    for (module = 1; module <= 6; module++) {
        unsigned int number;
        if (!callbacks->table(module, &table, &size) || !table) return 0;
        for (number = 1; number < size; number++)
            if (!table[number]) return 0;
        if (table[0] || table[size]) return 0;
    }
    if (!callbacks->table(CORE, &table, &size) || size != CORE_SIZE) return 0;
    out = fopen(path, "a");
    if (!out) return 0;
    *table[PUSH_A] = (function)push;
    *table[POP] = (function)pop;
    return 1;
}
