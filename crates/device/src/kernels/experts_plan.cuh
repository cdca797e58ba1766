// What the router, the plan and the products of experts share.
#pragma once
#include "prelude.cuh"

// An expert and some of its assignments: `count` from `first` in the list of rows.
struct alignas(16) Task {
    int expert;
    u32 first, count, tiles;
};

// What a plan consists of.
struct Plan {
    // place[rows[i]] is i.
    u32 *counts, *offsets, *rows, *place;
    float* gains;
    Task* tasks;
    u32 *ready, *head;
    u32 most_tasks;
};
