// Runs build.py on PTX. HERE is its folder.
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// The library of a module, translated and compiled, or false.
static _Bool built(const char* ptx, char* path, size_t room) {
    char source[] = "/tmp/emulated-XXXXXX", command[8192];
    const int file = mkstemp(source);
    if (file < 0) return 0;
    const size_t bytes = strlen(ptx);
    const _Bool written = write(file, ptx, bytes) == (ssize_t)bytes;
    close(file);
    const char* python = getenv("DACAPO_EMULATOR_PYTHON");
    // The compiler must not get the emulator's libraries.
    snprintf(command, sizeof command, "env -u LD_LIBRARY_PATH '%s' '%s/build.py' '%s'", python ? python : "python3", HERE, source);
    FILE* lines = written ? popen(command, "r") : NULL;
    const _Bool read = lines && fgets(path, room, lines);
    const int code = lines ? pclose(lines) : 1;
    unlink(source);
    if (!read || code) return 0;
    path[strcspn(path, "\n")] = 0;
    return 1;
}
