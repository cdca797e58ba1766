// What the router, the plan and the products of experts share.
#pragma once
#include "prelude.cuh"

// An expert and some of its assignments: `count` from `first` in the list of rows.
struct alignas(16) Task {
    int expert;
    u32 first, count, tiles;
};

// Counts a step for whoever asks how busy experts are, unless `load` is null: an expert's tokens (64 bits for each), then experts
// that have any, then steps.
DEVICE void add_load(u64* load, u32 at, u32 more) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(load + at), "l"((u64)more) : "memory");
}

// What a plan consists of.
struct Plan {
    // place[rows[i]] is i.
    u32 *counts, *offsets, *rows, *place;
    float* gains;
    Task* tasks;
    u32 *ready, *head;
    u32 most_tasks;
    u64* load;
};
#define PLAN_ARGUMENTS                                                                                            \
    u32 *counts_, u32 *offsets_, u32 *rows_, u32 *place_, float *gains_, Task *tasks_, u32 *ready_, u32 *head_, \
        u32 most_tasks_, u64* load_
#define PLAN (Plan{counts_, offsets_, rows_, place_, gains_, tasks_, ready_, head_, most_tasks_, load_})
