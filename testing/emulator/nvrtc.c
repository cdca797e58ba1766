// NVRTC for the emulated GPU: calls the real library, asks it for PTX of a virtual architecture, and hands that out as
// the machine code. REAL is the real library; its builtins lie beside it.
#include "build.h"
#include <dlfcn.h>
#include <glob.h>

typedef void* Program;

static void* real(const char* name) {
    static void* library;
    if (!library) {
        const char* path = getenv("DACAPO_EMULATOR_NVRTC");
        if (!path) path = REAL;
        char pattern[4096];
        const char* slash = strrchr(path, '/');
        glob_t found;
        // The compiler opens its builtins by name, so loading them is enough.
        snprintf(pattern, sizeof pattern, "%.*slibnvrtc-builtins.so*", slash ? (int)(slash + 1 - path) : 0, path);
        if (glob(pattern, 0, NULL, &found) == 0) dlopen(found.gl_pathv[0], RTLD_NOW | RTLD_GLOBAL);
        library = dlopen(path, RTLD_NOW);
        if (!library) fprintf(stderr, "emulator: NVRTC cannot be loaded: %s\n", dlerror()), exit(2);
    }
    void* symbol = dlsym(library, name);
    if (!symbol) fprintf(stderr, "emulator: NVRTC lacks %s\n", name), exit(2);
    return symbol;
}

#define FORWARD(name, params, args) \
    int name params { return ((int(*) params)real(#name)) args; }

// A minor version of its own: what is cached by version is never mistaken for machine code of a GPU.
int nvrtcVersion(int* major, int* minor) {
    const int code = ((int (*)(int*, int*))real("nvrtcVersion"))(major, minor);
    *minor += 1000;
    return code;
}

FORWARD(nvrtcCreateProgram,
        (Program * program, const char* source, const char* name, int count, const char* const* texts, const char* const* names),
        (program, source, name, count, texts, names))
FORWARD(nvrtcDestroyProgram, (Program * program), (program))
FORWARD(nvrtcGetProgramLogSize, (Program program, size_t* size), (program, size))
FORWARD(nvrtcGetProgramLog, (Program program, char* log), (program, log))
FORWARD(nvrtcGetPTXSize, (Program program, size_t* size), (program, size))
FORWARD(nvrtcGetPTX, (Program program, char* text), (program, text))

int nvrtcGetCUBINSize(Program program, size_t* size) { return nvrtcGetPTXSize(program, size); }
int nvrtcGetCUBIN(Program program, char* text) { return nvrtcGetPTX(program, text); }

int nvrtcCompileProgram(Program program, int count, const char* const* options) {
    char arch[64];
    const char** changed = malloc((count + 1) * sizeof *changed);
    const char* machine = "--gpu-architecture=sm_";
    for (int i = 0; i < count; i++) {
        changed[i] = options[i];
        if (strncmp(options[i], machine, strlen(machine)) == 0) {
            snprintf(arch, sizeof arch, "--gpu-architecture=compute_%s", options[i] + strlen(machine));
            changed[i] = arch;
        }
    }
    const int code = ((int (*)(Program, int, const char* const*))real("nvrtcCompileProgram"))(program, count, changed);
    free(changed);
    size_t size = 0;
    if (code == 0 && nvrtcGetPTXSize(program, &size) == 0) {
        // The driver will need it; compilations run in several threads, and modules are loaded one by one.
        char *text = malloc(size), path[4096];
        if (nvrtcGetPTX(program, text) == 0) built(text, path, sizeof path);
        free(text);
    }
    return code;
}
