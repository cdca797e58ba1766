// What the emulator's driver offers its own cuBLASLt.
#pragma once
#include "runtime.h"

struct stream;
// Runs now, or becomes a node of the graph that the stream records; `data` is copied.
int emu_enqueue(struct stream*, int (*run)(void*), const void* data, size_t bytes);
