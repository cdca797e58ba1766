// Launches of translated kernels: each thread of the GPU is a fiber, and one host thread runs them in turn.
#include "runtime.h"
#include <dlfcn.h>
#include <sys/mman.h>
#include <time.h>

struct launch* emu_now;
// Counts what other threads can see: stores, arrivals, copies, ends. Loops that poll and vote are no progress.
u64 emu_progress;
enum { FUEL = 1 << 20 };
u32 emu_fuel = FUEL;
u32 emu_poison = 1;
static char message[8192];
static u64 seed;

u32 emu_option(const char* name, u32 otherwise) {
    const char* text = getenv(name);
    return text && *text ? (u32)strtoul(text, NULL, 0) : otherwise;
}

const char* emu_message(void) { return message; }

static u32 chance(u32 below) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return (u32)(seed >> 16) % below;
}

// ---- global memory ----------------------------------------------------------------------------

static struct emu_range** ranges;
static u32 range_count, range_room;

// The first range that begins after an address.
static u32 after(u64 address) {
    u32 low = 0, high = range_count;
    while (low < high) {
        const u32 middle = (low + high) / 2;
        if (ranges[middle]->base <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

struct emu_range* emu_find(u64 address) {
    const u32 at = after(address);
    struct emu_range* r = at ? ranges[at - 1] : NULL;
    return r && address - r->base < r->bytes ? r : NULL;
}

void emu_range_add(u64 base, u64 bytes) {
    if (!bytes) return;
    if (range_count == range_room) ranges = realloc(ranges, (range_room = range_room * 2 + 64) * sizeof *ranges);
    const u32 at = after(base);
    memmove(ranges + at + 1, ranges + at, (range_count - at) * sizeof *ranges);
    ranges[at] = malloc(sizeof **ranges);
    *ranges[at] = (struct emu_range){base, bytes};
    range_count++;
}

void emu_range_remove(u64 base) {
    const u32 at = after(base);
    if (!at || ranges[at - 1]->base != base) return;
    // Kernels keep pointers to ranges, so the range itself stays.
    ranges[at - 1]->bytes = 0;
    memmove(ranges + at - 1, ranges + at, (range_count - at) * sizeof *ranges);
    range_count--;
}

char* emu_global_slow(T* t, u32 site, struct emu_range** cache, u64 address, u32 bytes) {
    const _Bool writes = site & WRITES;
    site &= ~WRITES;
    if (address & (bytes - 1)) emu_fail(of(t), site, "access of %u bytes at %#llx, which is not aligned", bytes, (unsigned long long)address);
    struct emu_range* r = emu_find(address);
    if (!r || address - r->base + bytes > r->bytes) {
        // Parameters are read through pointers, too.
        const u64 in_params = address - (u64)t->params;
        if (in_params + bytes <= of(t)->block->launch->kernel->param_bytes) return (char*)address;
        const u32 at = after(address);
        const struct emu_range *before = at ? ranges[at - 1] : NULL, *next = at < range_count ? ranges[at] : NULL;
        char near[200] = "";
        if (before && address - before->base < before->bytes + (1 << 20))
            snprintf(near, sizeof near, "; memory of %llu bytes ends %llu bytes before", (unsigned long long)before->bytes,
                     (unsigned long long)(address - before->base - before->bytes + (address - before->base < before->bytes ? bytes : 0)));
        else if (next && next->base - address < 1 << 20)
            snprintf(near, sizeof near, "; memory of %llu bytes begins %llu bytes later", (unsigned long long)next->bytes,
                     (unsigned long long)(next->base - address));
        emu_fail(of(t), site, "global access of %u bytes at %#llx, out of bounds%s", bytes, (unsigned long long)address, near);
    }
    if (emu_watch) emu_watch_access(of(t), site, address, bytes, writes);
    else *cache = r;
    return (char*)address;
}

char* emu_shared_at(X* x, u32 site, u32 address, u32 bytes, struct block** owner) {
    struct block* b = x->block;
    const u32 rank = address >> 24, at = address & 0xffffff;
    if (rank) {
        if (rank > b->cluster->blocks) emu_fail(x, site, "shared address %#x of block %u in a cluster of %u", at, rank - 1, b->cluster->blocks);
        b = b->cluster->block[rank - 1];
        if (b->left == 0) emu_fail(x, site, "access to shared memory of block %u of the cluster, which has ended", rank - 1);
    }
    if (at & (bytes - 1) && bytes <= 16) emu_fail(x, site, "shared access of %u bytes at %#x, which is not aligned", bytes, at);
    if (at < x->t.shared_from || (u64)at + bytes > x->t.shared_to)
        emu_fail(x, site, "shared access of %u bytes at %d, out of bounds: the block has %u bytes", bytes, (s32)(at - SHARED_FROM),
                 x->t.shared_to - SHARED_FROM);
    if (owner) *owner = b;
    return b->shared + at;
}

char* emu_shared_slow(T* t, u32 site, u32 address, u32 bytes) { return emu_shared_at(of(t), site, address, bytes, NULL); }

char* emu_local_slow(T* t, u32 site, u64 address, u32 bytes) {
    emu_fail(of(t), site, "local access of %u bytes at %#llx, out of bounds or not aligned", bytes, (unsigned long long)address);
}

char* emu_generic_slow(T* t, u32 site, struct emu_range** cache, u64 address, u32 bytes) {
    const u64 own = address - (u64)t->shared;
    if (own >= t->shared_from && own < t->shared_to) return emu_shared_at(of(t), site & ~WRITES, (u32)own, bytes, NULL);
    if (address - t->stack_from < t->stack_bytes) return (char*)address;
    return emu_global_slow(t, site, cache, address, bytes);
}

u64 emu_to_shared(T* t, u32 site, u64 address) {
    const u64 own = address - (u64)t->shared;
    // One past the end is an address, too.
    if (own >= t->shared_from && own <= t->shared_to) return own;
    emu_fail(of(t), site, "%#llx is not an address of the block's shared memory", (unsigned long long)address);
}

u32 emu_mapa(T* t, u32 site, u32 address, u32 rank) {
    if (rank >= t->cluster_nctarank) emu_fail(of(t), site, "mapa of block %u in a cluster of %u", rank, t->cluster_nctarank);
    return (address & 0xffffff) | (rank + 1) << 24;
}

u64 emu_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

// ---- dependent launches ------------------------------------------------------------------------

// Lines of 16 bytes that launches wrote which may still run: since the last launch that waited for all before it, by threads
// that had let the next launch start. Before its wait, a dependent launch may not touch them.
struct written {
    u64 line;
    const char* kernel;
};
static struct written* table;
static u64 table_room, table_used;
u32 emu_watch;

static struct written* entry(u64 line) {
    u64 at = line * 0x9e3779b97f4a7c15ull >> 20;
    while (table[at &= table_room - 1].line && table[at].line != line) at++;
    return &table[at];
}

static void remember(u64 line, const char* kernel) {
    if (table_used * 2 >= table_room) {
        struct written* old = table;
        const u64 room = table_room;
        table_room = room ? room * 2 : 1 << 16;
        table = calloc(table_room, sizeof *table);
        for (u64 i = 0; i < room; i++)
            if (old[i].line) *entry(old[i].line) = old[i];
        free(old);
    }
    struct written* e = entry(line);
    table_used += !e->line;
    *e = (struct written){line, kernel};
}

void emu_watch_access(X* x, u32 site, u64 address, u64 bytes, _Bool writes) {
    if (!emu_watch) return;
    for (u64 line = address >> 4; line <= (address + bytes - 1) >> 4; line++) {
        if (!x->waited && table_room) {
            const struct written* e = entry(line);
            if (e->line)
                emu_fail(x, site, "%s %#llx before griddepcontrol.wait, while %s, which wrote it, may still run", writes ? "writes" : "reads",
                         (unsigned long long)address, e->kernel);
        }
        if (writes && x->triggered) remember(line, emu_now->kernel->name);
    }
}

static void emu_watch_launch(struct launch* l) {
    emu_watch = emu_option("DACAPO_EMULATOR_DEPENDENT", 0);
    if (!emu_watch) return;
    for (u32 i = 0; i < l->kernel->caches; i++) l->kernel->cache[i] = l->kernel->none;
    if (l->dependent) return;
    free(table);
    table = NULL, table_room = table_used = 0;
}

void emu_grid_wait(T* t) { of(t)->waited = 1; }
void emu_grid_trigger(T* t) { of(t)->triggered = 1; }

// ---- fibers -----------------------------------------------------------------------------------

void emu_switch(void** from, void* to);
__asm__(".text\n.globl emu_switch\n.type emu_switch,@function\nemu_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n.size emu_switch,.-emu_switch\n");

static void fiber(void) {
    X* x = emu_now->current;
    emu_now->kernel->entry(&x->t);
    struct block* b = x->block;
    if (x->copy_count) {
        // They are done by the end of the grid; nobody in this block may have waited.
        emu_deliver_copies(x, ~0u);
    }
    x->state = DONE;
    emu_progress++;
    b->left--, b->cluster->left--;
    struct warp* w = &b->warp[x->t.warp];
    w->alive &= ~(1u << x->t.lane);
    emu_recheck_warp(w);
    emu_recheck_bars(b);
    struct cluster* c = b->cluster;
    if (c->left && c->arrived == c->left) c->arrived = 0, c->phase++;
    if (b->left == 0 && b->bulks) {
        x->site = b->bulk[0].site;
        emu_fail(x, x->site, "the block ended, and a copy of %u bytes into its shared memory was not waited for", b->bulk[0].bytes);
    }
    void* gone;
    emu_switch(&gone, emu_now->scheduler);
}

void emu_step_aside(X* x) { emu_switch(&x->sp, emu_now->scheduler); }

void emu_wait(X* x, enum state state, u32 site) {
    x->state = state, x->site = site;
    emu_step_aside(x);
}

void emu_poll(T* t, u32 site, const char* at, u32 bytes) {
    X* x = of(t);
    struct polled* p = x->places;
    while (p < x->places + POLLED && (p->at != at || p->bytes != bytes)) p++;
    const _Bool known = p < x->places + POLLED;
    if (!known) p = &x->places[x->next_place++ % POLLED];
    const _Bool same = known && memcmp(p->seen, at, bytes) == 0;
    p->at = at, p->bytes = bytes;
    memcpy(p->seen, at, bytes);
    if (!same) {
        // A loop over more places than are remembered waits now and then, too.
        if (++x->looks % 32 == 0) emu_pause(t, site);
        return;
    }
    x->polled = emu_now->round;
    emu_wait(x, POLLING, site);
    memcpy(p->seen, at, bytes);
}

// Whether a place that a thread polls has changed. Now and then it tries again without that: it may look at the clock.
static _Bool changed(const struct launch* l, const X* x) {
    if (x->polled == l->round) return 0;
    if (l->idle || l->round - x->polled > 64) return 1;
    for (u32 i = 0; i < POLLED; i++)
        if (x->places[i].at && memcmp(x->places[i].seen, x->places[i].at, x->places[i].bytes)) return 1;
    return 0;
}

void emu_pause(T* t, u32 site) {
    X* x = of(t);
    x->polled = emu_now->round, x->site = site;
    emu_step_aside(x);
}

void emu_out_of_fuel(T* t) {
    emu_fuel = FUEL;
    of(t)->polled = emu_now->round;
    emu_step_aside(of(t));
}

static const char* last_part(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static void place(const struct emu_kernel* k, u32 site, char* to, size_t room) {
    const struct emu_site* s = &k->sites[site];
    const int n = snprintf(to, room, "%s:%u", last_part(k->files[s->file]), s->line);
    if (s->from_line && n > 0 && (size_t)n < room)
        snprintf(to + n, room - n, " (inlined at %s:%u)", last_part(k->files[s->from_file]), s->from_line);
}

void emu_fail(X* x, u32 site, const char* text, ...) {
    struct launch* l = emu_now;
    char what[4096], where[300];
    va_list args;
    va_start(args, text);
    vsnprintf(what, sizeof what, text, args);
    va_end(args);
    place(l->kernel, site, where, sizeof where);
    const T* t = &x->t;
    snprintf(message, sizeof message, "%s, block (%u, %u, %u), thread (%u, %u, %u): %s, at %s", l->kernel->name, t->ctaid[0], t->ctaid[1],
             t->ctaid[2], t->tid[0], t->tid[1], t->tid[2], what, where);
    l->failed = 1;
    emu_switch(&x->sp, l->scheduler);
    abort();
}

void emu_trap(T* t, u32 site, const char* what) { emu_fail(of(t), site, "%s", what); }

// ---- blocks -----------------------------------------------------------------------------------

static u64 stride_of(const struct launch* l) { return l->stack + 1088; }

// Blocks that ended, for those that follow in the same launch.
static struct block* spare[4096];
static u32 spares;

static struct block* new_block(struct launch* l) {
    if (spares) return spare[--spares];
    struct block* b = calloc(1, sizeof *b);
    const u32 n = l->threads[0] * l->threads[1] * l->threads[2];
    b->threads = n, b->warps = (n + 31) / 32;
    b->warp = calloc(b->warps, sizeof *b->warp);
    b->thread = aligned_alloc(64, (sizeof *b->thread * n + 63) / 64 * 64);
    memset(b->thread, 0, sizeof *b->thread * n);
    b->shared = aligned_alloc(1024, (SHARED_FROM + l->shared + 1023) / 1024 * 1024 + 1024);
    b->stacks = mmap(NULL, stride_of(l) * n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (b->stacks == MAP_FAILED) fprintf(stderr, "emulator: no memory for stacks\n"), abort();
    return b;
}

static void free_block(struct launch* l, struct block* b) {
    munmap(b->stacks, stride_of(l) * b->threads);
    for (u32 i = 0; i < b->threads; i++) free(b->thread[i].copies);
    free(b->warp), free(b->thread), free(b->shared), free(b->bulk);
    for (int i = 0; i < 8; i++) free(b->products[i]);
    free(b);
}

static void start_thread(struct launch* l, struct block* b, u32 i, const u32* ctaid) {
    X* x = &b->thread[i];
    struct pending_copy* copies = x->copies;
    const u32 room = x->copy_room;
    memset(x, 0, sizeof *x);
    x->copies = copies, x->copy_room = room;
    x->block = b, x->waited = !l->dependent;
    T* t = &x->t;
    t->shared = b->shared, t->shared_from = SHARED_FROM, t->shared_to = SHARED_FROM + l->shared;
    t->params = l->params;
    t->tid[0] = i % l->threads[0], t->tid[1] = i / l->threads[0] % l->threads[1], t->tid[2] = i / l->threads[0] / l->threads[1];
    for (int d = 0; d < 3; d++) {
        t->ntid[d] = l->threads[d], t->nctaid[d] = l->grid[d], t->ctaid[d] = ctaid[d];
        t->cluster_nctaid[d] = l->cluster[d], t->cluster_ctaid[d] = ctaid[d] % l->cluster[d];
        t->clusterid[d] = ctaid[d] / l->cluster[d], t->nclusterid[d] = l->grid[d] / l->cluster[d];
    }
    t->cluster_ctarank = b->rank, t->cluster_nctarank = l->per_cluster;
    t->lane = i % 32, t->warp = i / 32;
    t->stack_from = (u64)b->stacks + stride_of(l) * i, t->stack_bytes = stride_of(l);
    u64* top = (u64*)((t->stack_from + t->stack_bytes - 128) & ~15ull);
    top[6] = (u64)fiber;
    x->sp = top;
    b->warp[i / 32].lanes[i % 32] = x;
    b->warp[i / 32].alive |= 1u << i % 32;
}

// Starts the next cluster, if there is one and the GPU has room.
static _Bool start(struct launch* l) {
    if (l->next == l->blocks || (l->actives + 1) * l->per_cluster > l->resident) return 0;
    struct cluster* c = calloc(1, sizeof *c);
    c->blocks = l->per_cluster;
    c->block = calloc(c->blocks, sizeof *c->block);
    const u64 number = l->next / l->per_cluster;
    const u32 wide = l->grid[0] / l->cluster[0], high = l->grid[1] / l->cluster[1];
    const u32 id[3] = {number % wide, number / wide % high, number / wide / high};
    for (u32 rank = 0; rank < c->blocks; rank++) {
        struct block* b = c->block[rank] = new_block(l);
        const u32 in[3] = {rank % l->cluster[0], rank / l->cluster[0] % l->cluster[1], rank / l->cluster[0] / l->cluster[1]};
        u32 ctaid[3];
        for (int d = 0; d < 3; d++) ctaid[d] = id[d] * l->cluster[d] + in[d];
        b->launch = l, b->cluster = c, b->rank = rank, b->left = b->threads, b->bulks = 0;
        memset(b->warp, 0, b->warps * sizeof *b->warp);
        memset(b->bars, 0, sizeof b->bars);
        memset(b->in_group, 0, sizeof b->in_group);
        memset(b->product_count, 0, sizeof b->product_count);
        memset(b->waited, 0, sizeof b->waited);
        memset(b->shared, emu_poison ? 0xff : 0, SHARED_FROM + l->shared);
        for (u32 i = 0; i < b->threads; i++) start_thread(l, b, i, ctaid);
        c->threads += b->threads;
    }
    c->left = c->threads;
    l->active[l->actives++] = c;
    l->next += c->blocks;
    return 1;
}

// ---- the scheduler ----------------------------------------------------------------------------

static _Bool may_run(struct launch* l, X* x) {
    if (x->state == READY) return x->polled != l->round;
    if (x->state == POLLING) return changed(l, x);
    if (x->state == AT_CLUSTER) return x->block->cluster->phase != x->cluster_phase;
    if (x->state != AT_MBAR) return 0;
    if (x->give_up) return 1;
    struct block* owner = x->block;
    for (u32 i = 0; i < owner->bulks; i++)
        if (owner->bulk[i].barrier == x->barrier) {
            emu_deliver_bulk(owner, x->barrier);
            break;
        }
    return emu_mbar_complete_phase(x->barrier, x->parity);
}

static void run_warp(struct launch* l, struct warp* w) {
    const u32 turn = seed ? chance(32) : 0;
    for (_Bool again = 1; again;) {
        again = 0;
        for (u32 i = 0; i < 32; i++) {
            X* x = w->lanes[(i + turn) % 32];
            if (!x || x->state == DONE || !may_run(l, x)) continue;
            x->state = READY;
            l->current = x;
            emu_switch(&l->scheduler, x->sp);
            if (l->failed) return;
            again = 1;
        }
        if (!again) again = emu_answer_masks(w);
    }
}

static void describe(struct launch* l) {
    static const char* const names[] = {"run", "ask which lanes are active", "poll", "wait for other lanes", "wait for their warp group", "wait at a barrier", "wait for the cluster",
                                        "wait for an mbarrier", "ended"};
    char* to = message;
    char* const end = message + sizeof message;
    to += snprintf(to, end - to, "%s: deadlock, %llu of %llu blocks started, %u resident at most", l->kernel->name, (unsigned long long)l->next,
                   (unsigned long long)l->blocks, l->resident);
    u32 lines = 0;
    for (u32 c = 0; c < l->actives; c++)
        for (u32 k = 0; k < l->active[c]->blocks; k++) {
            struct block* b = l->active[c]->block[k];
            for (u32 i = 0; i < b->threads;) {
                X* x = &b->thread[i];
                u32 to_thread = i + 1;
                while (to_thread < b->threads && b->thread[to_thread].state == x->state && b->thread[to_thread].site == x->site) to_thread++;
                if (x->state != DONE && lines++ < 24 && end - to > 400) {
                    char where[300], more[200] = "";
                    place(l->kernel, x->site, where, sizeof where);
                    if (x->state == AT_MBAR) emu_describe_mbar(more, sizeof more, x->barrier, x->parity);
                    if (x->state == AT_BAR)
                        snprintf(more, sizeof more, " %u (%u of %u threads)", x->bar_id, b->bars[x->bar_id].arrived,
                                 b->bars[x->bar_id].need ? b->bars[x->bar_id].need : b->left);
                    if (x->state == IN_WARP) snprintf(more, sizeof more, " (mask %#x, arrived %#x)", x->mask, b->warp[x->t.warp].arrived);
                    to += snprintf(to, end - to, "\n  block (%u, %u, %u), threads %u to %u %s%s, at %s", x->t.ctaid[0], x->t.ctaid[1], x->t.ctaid[2],
                                   i, to_thread - 1, names[x->state], more, where);
                }
                i = to_thread;
            }
        }
    if (lines > 24) snprintf(to, end - to, "\n  and %u more groups of threads", lines - 24);
}

// Lets threads that wait for an mbarrier return from try_wait with "not yet".
static void give_up(struct launch* l) {
    for (u32 c = 0; c < l->actives; c++)
        for (u32 k = 0; k < l->active[c]->blocks; k++) {
            struct block* b = l->active[c]->block[k];
            for (u32 i = 0; i < b->threads; i++) b->thread[i].give_up = b->thread[i].state == AT_MBAR;
        }
}

static void run_all(struct launch* l) {
    for (u32 c = 0; c < l->actives && !l->failed; c++)
        for (u32 k = 0; k < l->active[c]->blocks && !l->failed; k++) {
            struct block* b = l->active[c]->block[k];
            const u32 turn = seed ? chance(b->warps) : 0;
            for (u32 w = 0; w < b->warps && b->left && !l->failed; w++)
                if (!seed || chance(4)) run_warp(l, &b->warp[(w + turn) % b->warps]);
        }
}

static void retire(struct launch* l) {
    u32 kept = 0;
    for (u32 c = 0; c < l->actives; c++) {
        struct cluster* cluster = l->active[c];
        if (cluster->left && !l->failed) {
            l->active[kept++] = cluster;
            continue;
        }
        for (u32 k = 0; k < cluster->blocks; k++) {
            if (spares < sizeof spare / sizeof *spare) spare[spares++] = cluster->block[k];
            else free_block(l, cluster->block[k]);
        }
        free(cluster->block), free(cluster);
    }
    l->actives = kept;
}

static void schedule(struct launch* l) {
    const u32 patience = emu_option("DACAPO_EMULATOR_PATIENCE", 300);
    u32 idle = 0;
    while (!l->failed && (l->actives || start(l))) {
        const u64 before = emu_progress;
        l->round++;
        if (seed && chance(2)) start(l);
        run_all(l);
        if (!l->failed && emu_progress == before && !start(l)) {
            give_up(l);
            l->idle = 1;
            if (++idle > patience) {
                describe(l);
                l->failed = 1;
            }
        } else idle = l->idle = 0;
        retire(l);
    }
    retire(l);
}

static u32 least(u32 a, u32 b) { return a < b ? a : b; }

static const char* refusal(const struct launch* l, u32 n, u32 dynamic) {
    if (!n || n > 1024) return "a block has 1 to 1024 threads";
    if (l->kernel->max_threads && n > l->kernel->max_threads) return "more threads than the launch bounds";
    if (!l->blocks || l->grid[1] > 65535 || l->grid[2] > 65535) return "the grid is empty or too large";
    if (l->shared > SHARED_MOST) return "more shared memory than a block has";
    for (int d = 0; d < 3; d++)
        if (l->grid[d] % l->cluster[d]) return "the grid is no multiple of the cluster";
    if (l->per_cluster > 16) return "a cluster has at most 16 blocks";
    return NULL;
}

int emu_launch(const struct emu_kernel* k, const u32* grid, const u32* threads, const u32* cluster, u32 shared, const void* params,
               u32 dependent) {
    struct launch l = {.kernel = k, .dependent = dependent, .shared = k->static_shared + shared};
    for (int d = 0; d < 3; d++) l.grid[d] = grid[d], l.threads[d] = threads[d], l.cluster[d] = cluster && cluster[d] ? cluster[d] : 1;
    const u32 n = threads[0] * threads[1] * threads[2];
    l.blocks = (u64)grid[0] * grid[1] * grid[2], l.per_cluster = l.cluster[0] * l.cluster[1] * l.cluster[2];
    const char* refused = refusal(&l, n, shared);
    if (refused) {
        snprintf(message, sizeof message, "%s: not launched: %s", k->name, refused);
        return 1;
    }
    l.stack = (128 << 10) + (k->local + 4095) / 4096 * 4096;
    l.resident = SMS * least(least(THREADS_OF_SM / ((n + 31) / 32 * 32), SHARED_OF_SM / (l.shared + 1024)), BLOCKS_OF_SM);
    l.resident = emu_option("DACAPO_EMULATOR_RESIDENT", l.resident);
    if (l.resident < l.per_cluster) l.resident = l.per_cluster;
    l.active = calloc(l.resident / l.per_cluster + 1, sizeof *l.active);
    char* copy = aligned_alloc(128, (k->param_bytes + 255) / 128 * 128);
    memcpy(copy, params, k->param_bytes);
    l.params = copy;
    emu_poison = emu_option("DACAPO_EMULATOR_POISON", 1);
    seed = emu_option("DACAPO_EMULATOR_SEED", 0);
    emu_watch_launch(&l);
    const u64 from = emu_clock();
    emu_now = &l;
    message[0] = 0;
    schedule(&l);
    emu_now = NULL;
    while (spares) free_block(&l, spare[--spares]);
    free(copy), free(l.active);
    if (emu_option("DACAPO_EMULATOR_TRACE", 0))
        fprintf(stderr, "emulator: %s, grid %u %u %u, %u threads, cluster %u, %u bytes shared: %.1f ms%s\n", k->name, grid[0], grid[1], grid[2], n,
                l.per_cluster, l.shared, (emu_clock() - from) * 1e-6, l.failed ? ", failed" : "");
    return l.failed ? 719 : 0;
}

const struct emu_module* emu_load(const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(message, sizeof message, "%s", dlerror());
        return NULL;
    }
    const struct emu_module* m = dlsym(library, "emu_module");
    for (u32 i = 0; i < m->variables; i++)
        if (!emu_find((u64)m->variable[i].at)) emu_range_add((u64)m->variable[i].at, m->variable[i].bytes);
    return m;
}

static void (*condition_handler)(u64, u32);
void emu_condition_handler(void (*f)(u64, u32)) { condition_handler = f; }
void emu_set_condition(T* t, u64 handle, u32 value) {
    if (!condition_handler) emu_trap(t, 0, "there is no graph whose condition could be set");
    condition_handler(handle, value);
}
