// The runtime's own view of threads, blocks and launches.
#pragma once
#include "device.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

// Most shared memory that a block has on a Hopper GPU, and what the driver keeps of it.
enum { SHARED_FROM = 1024, SHARED_MOST = 227 << 10, SHARED_OF_SM = 228 << 10, THREADS_OF_SM = 2048, BLOCKS_OF_SM = 32, SMS = 132 };

enum state { READY, AT_MASK, POLLING, IN_WARP, IN_GROUP, AT_BAR, AT_CLUSTER, AT_MBAR, DONE };

// What a warp executes together.
enum warp_op { SHFL, VOTE, MATCH, REDUX, ELECT, SYNC, MMA_SYNC, LDMATRIX, MOVMATRIX };
enum { ALIGNED = MMA_SYNC };

struct thread;
struct launch;

// A copy by cp.async that is under way.
struct pending_copy {
    char* to;
    u64 from;
    u32 bytes, live, group;
};

// A bulk or tensor copy that is under way: it arrives when somebody waits for its barrier.
struct pending_bulk {
    u64* barrier;
    char* shared;
    u32 to, bytes, site;
    u64 from;
    // A tensor copy, if this is not null: bytes of the box at `at`.
    const struct tensor_map* map;
    u32 rank;
    s32 at[5];
};

// A place that a thread read and may be waiting for.
struct polled {
    const char* at;
    u32 bytes;
    char seen[16];
};
enum { POLLED = 8 };

struct warp {
    struct thread* lanes[32];
    // Lanes that have not returned, and those that wait for others.
    u32 alive, arrived;
};

struct bar {
    _Bool waited;
    u32 arrived, need, value_or, value_and, value_count, result[3];
};

struct cluster {
    _Bool waited;
    u32 arrived, phase, blocks, threads, left;
    struct block** block;
};

// Operands of a warp group's matrix instruction in shared memory.
struct product {
    u64 a_desc, b_desc, hash;
    u32 kind, columns, site, group;
    _Bool held, a_transposed, b_transposed;
};

struct block {
    struct launch* launch;
    struct cluster* cluster;
    char* shared;
    u32 threads, left, warps, rank;
    struct warp* warp;
    struct thread* thread;
    struct bar bars[16];
    struct pending_bulk* bulk;
    u32 bulks, bulk_room;
    char* stacks;
    // Threads of each warp group at a matrix instruction.
    u32 in_group[8];
    // Matrix instructions of each warp group whose wait is to come.
    struct product* products[8];
    u32 product_count[8], product_room[8], product_group[8];
    // mbarriers, by address, at which a thread arrived that had waited for the launch before.
    _Bool waited[256];
};

struct thread {
    T t;
    struct block* block;
    void* sp;
    enum state state;
    u32 site, polled;
    struct polled places[POLLED];
    u32 next_place, looks;
    // A warp's collective.
    enum warp_op op;
    u32 mask, mode, value, b, c, out;
    u64 wide;
    _Bool out_p;
    u32 kind, address;
    u32* d;
    const u32 *ma, *mb, *mc;
    // A warp group's.
    u64 a_desc, b_desc;
    u32 columns, add, a_transposed, b_transposed;
    s32 a_sign, b_sign;
    u32 bar_id, bar_mode;
    u32 cluster_phase;
    u64* barrier;
    u32 parity;
    // Has waited for the launch before, or is behind a thread that has; lets the next launch start.
    _Bool give_up, waited, triggered;
    struct pending_copy* copies;
    u32 copy_count, copy_room, group;
};
typedef struct thread X;

struct launch {
    const struct emu_kernel* kernel;
    u32 grid[3], threads[3], cluster[3], shared, stack;
    const char* params;
    u64 blocks;
    u32 resident, per_cluster;
    struct cluster** active;
    u32 actives;
    u64 next;
    X* current;
    void* scheduler;
    u32 round;
    // Nothing else can go on: threads that poll try again.
    _Bool idle;
    _Bool failed, dependent;
};

struct tensor_map {
    u32 magic;
    u8 bytes, rank, swizzle, kind;
    u64 address;
    u32 dims[5];
    u16 box[5];
    u16 pad;
    u64 strides[4];
    u64 rest[6];
};
enum { TENSOR_MAGIC = 0x70a3d001 };

extern struct launch* emu_now;

INLINE X* of(T* t) { return (X*)t; }
// Ends the launch with a message. Never returns to the kernel.
__attribute__((noreturn, format(printf, 3, 4))) void emu_fail(X* x, u32 site, const char* text, ...);
// Runs others until this thread may go on.
void emu_wait(X* x, enum state state, u32 site);
void emu_step_aside(X* x);
// A host address for an address in shared memory, of any block of the cluster.
char* emu_shared_at(X* x, u32 site, u32 address, u32 bytes, struct block** owner);
struct emu_range* emu_find(u64 address);
// Gives lanes that asked which lanes are active those that asked together. False if there are none.
_Bool emu_answer_masks(struct warp* warp);
void emu_recheck_warp(struct warp* warp);
void emu_recheck_bars(struct block* block);
void emu_deliver_bulk(struct block* block, u64* barrier);
void emu_deliver_copies(X* x, u32 group);
_Bool emu_mbar_complete_phase(const u64* barrier, u32 parity);
void emu_describe_mbar(char* to, size_t room, const u64* barrier, u32 parity);
u32 emu_option(const char* name, u32 otherwise);
extern u32 emu_poison;
// Whether accesses before `griddepcontrol.wait` are checked, and the check.
extern u32 emu_watch;
void emu_watch_access(X* x, u32 site, u64 address, u64 bytes, _Bool writes);

// ---- for drivers ------------------------------------------------------------------------------

void emu_range_add(u64 base, u64 bytes);
void emu_range_remove(u64 base);
const struct emu_module* emu_load(const char* path);
// 0, or an error of which `emu_message` tells more.
int emu_launch(const struct emu_kernel*, const u32* grid, const u32* threads, const u32* cluster, u32 shared, const void* params,
               u32 dependent);
const char* emu_message(void);
int emu_tensor_map(void* map, u32 kind, u32 rank, u64 address, const u64* dims, const u64* strides, const u32* box, const u32* steps, u32 swizzle);
void emu_condition_handler(void (*)(u64, u32));
