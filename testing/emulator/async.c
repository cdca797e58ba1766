// Barriers in shared memory, and the copies that arrive at them. A copy arrives as late as it may: when a thread waits for
// its barrier or its group. Until then its place holds a pattern.
#include "runtime.h"

// ---- mbarriers --------------------------------------------------------------------------------

// phase: 1 bit; arrivals to come and arrivals of a phase: 20 each; bytes to come: 21, with a sign; a mark: 2.
enum { MARK = 2 };
struct mbar {
    u32 phase, pending, expected;
    s32 bytes;
};

static struct mbar unpack(u64 v) {
    return (struct mbar){v & 1, v >> 1 & 0xfffff, v >> 21 & 0xfffff, (s32)((s64)(v << 2) >> 43)};
}
static u64 pack(struct mbar m) {
    return (m.phase & 1) | (u64)m.pending << 1 | (u64)m.expected << 21 | (u64)(m.bytes & 0x1fffff) << 41 | (u64)MARK << 62;
}

static u64* at(X* x, u32 site, u32 address, struct block** owner) {
    u64* p = (u64*)emu_shared_at(x, site, address, 8, owner);
    if (*p >> 62 != MARK) emu_fail(x, site, "the mbarrier at %d was not initialised, or was overwritten", (s32)((address & 0xffffff) - SHARED_FROM));
    return p;
}

static struct mbar turned(struct mbar m) {
    if (m.pending == 0 && m.bytes == 0) m.phase ^= 1, m.pending = m.expected, emu_progress++;
    return m;
}

void emu_mbar_init(T* t, u32 site, u32 address, u32 count) {
    if (!count || count > 0xfffff) emu_fail(of(t), site, "an mbarrier for %u arrivals", count);
    u64* p = (u64*)emu_shared_at(of(t), site, address, 8, NULL);
    *p = pack((struct mbar){0, count, count, 0});
    emu_progress++;
}

void emu_mbar_inval(T* t, u32 site, u32 address) { *at(of(t), site, address, NULL) = 0; }

// Threads that wait for a barrier are behind those that arrived at it.
static _Bool* waited_at(struct block* b, const u64* barrier) { return &b->waited[((const char*)barrier - b->shared) / 8 % 256]; }

static u64 arrive(X* x, u32 site, u32 address, u32 count, u32 bytes, _Bool drop) {
    struct block* owner;
    u64 *p = at(x, site, address, &owner), before = *p;
    *waited_at(owner, p) |= x->waited;
    struct mbar m = unpack(before);
    if (count > m.pending)
        emu_fail(x, site, "%u arrivals at the mbarrier at %d, which waits for %u more of %u", count, (s32)((address & 0xffffff) - SHARED_FROM),
                 m.pending, m.expected);
    m.bytes += bytes, m.pending -= count;
    if (drop) m.expected -= count;
    if (m.bytes >= 1 << 20) emu_fail(x, site, "an mbarrier waits for less than 2^20 bytes");
    *p = pack(turned(m));
    emu_progress++;
    return before;
}

u64 emu_mbar_arrive(T* t, u32 site, u32 address, u32 count, u32 bytes, _Bool drop) { return arrive(of(t), site, address, count, bytes, drop); }

static void add_bytes(u64* p, s32 bytes) {
    struct mbar m = unpack(*p);
    m.bytes += bytes;
    *p = pack(turned(m));
    emu_progress++;
}

void emu_mbar_expect(T* t, u32 site, u32 address, u32 bytes) { add_bytes(at(of(t), site, address, NULL), bytes); }
void emu_mbar_complete(T* t, u32 site, u32 address, u32 bytes) { add_bytes(at(of(t), site, address, NULL), -(s32)bytes); }

u32 emu_mbar_parity(u64 state) { return state & 1; }
_Bool emu_mbar_complete_phase(const u64* barrier, u32 parity) { return (*barrier & 1) != (parity & 1); }

void emu_describe_mbar(char* to, size_t room, const u64* barrier, u32 parity) {
    const struct mbar m = unpack(*barrier);
    snprintf(to, room, " (phase %u to end: %u of %u arrivals and %d bytes to come)", parity, m.pending, m.expected, m.bytes);
}

static _Bool wait_for(X* x, u32 site, struct block* owner, u64* p, u32 parity, _Bool only_test) {
    if (emu_mbar_complete_phase(p, parity)) return 1;
    emu_deliver_bulk(owner, p);
    if (emu_mbar_complete_phase(p, parity)) return 1;
    if (only_test) {
        emu_pause(&x->t, site);
        return emu_mbar_complete_phase(p, parity);
    }
    x->barrier = p, x->parity = parity, x->give_up = 0;
    emu_wait(x, AT_MBAR, site);
    if (x->give_up) x->polled = emu_now->round;
    x->give_up = 0;
    return emu_mbar_complete_phase(p, parity);
}

_Bool emu_mbar_wait(T* t, u32 site, u32 address, u32 parity, _Bool only_test) {
    struct block* owner;
    u64* p = at(of(t), site, address, &owner);
    const _Bool done = wait_for(of(t), site, owner, p, parity, only_test);
    if (done) of(t)->waited |= *waited_at(owner, p);
    return done;
}

// ---- cp.async ---------------------------------------------------------------------------------

void emu_deliver_copies(X* x, u32 group) {
    u32 kept = 0;
    for (u32 i = 0; i < x->copy_count; i++) {
        const struct pending_copy* c = &x->copies[i];
        if (c->group >= group) {
            x->copies[kept++] = *c;
            continue;
        }
        if (c->live) memcpy(c->to, (const void*)c->from, c->live);
        memset(c->to + c->live, 0, c->bytes - c->live);
    }
    x->copy_count = kept;
}

static void check_source(X* x, u32 site, u64 from, u32 bytes) {
    struct emu_range* r = emu_find(from);
    if (!r || from - r->base + bytes > r->bytes)
        emu_fail(x, site, "copy of %u bytes from %#llx, out of bounds", bytes, (unsigned long long)from);
}

// As above, and the bytes are read or written now.
static void check_access(X* x, u32 site, u64 from, u32 bytes, _Bool writes) {
    check_source(x, site, from, bytes);
    emu_watch_access(x, site, from, bytes, writes);
}

void emu_cp_async(T* t, u32 site, u32 to, u64 from, u32 bytes, u32 live) {
    X* x = of(t);
    char* place = emu_shared_at(x, site, to, bytes, NULL);
    if (live > bytes) emu_fail(x, site, "copy of %u bytes of %u", live, bytes);
    if (from % bytes) emu_fail(x, site, "copy of %u bytes from %#llx, which is not aligned", bytes, (unsigned long long)from);
    if (live) check_access(x, site, from, live, 0);
    if (x->copy_count == x->copy_room) x->copies = realloc(x->copies, (x->copy_room = x->copy_room * 2 + 16) * sizeof *x->copies);
    x->copies[x->copy_count++] = (struct pending_copy){place, from, bytes, live, x->group};
    if (emu_poison) memset(place, 0xff, bytes);
    emu_progress++;
}

void emu_cp_commit(T* t) { of(t)->group++; }
void emu_cp_wait(T* t, u32 left) {
    X* x = of(t);
    // ~0: all, even those of no group.
    if (left == ~0u) emu_deliver_copies(x, ~0u);
    else if (x->group > left) emu_deliver_copies(x, x->group - left);
}
void emu_cp_arrive(T* t, u32 site, u32 address, _Bool noinc) {
    X* x = of(t);
    emu_deliver_copies(x, ~0u);
    if (noinc) {
        arrive(x, site, address, 1, 0, 0);
        return;
    }
    // One arrival more is expected, and it comes: nothing changes but that the phase may not have ended before.
    at(x, site, address, NULL);
}

// ---- bulk and tensor copies -------------------------------------------------------------------

static u32 swizzled(u32 address, u32 bytes) {
    switch (bytes) {
        case 128: return address ^ (address >> 7 & 7) << 4;
        case 64: return address ^ (address >> 7 & 3) << 4;
        case 32: return address ^ (address >> 7 & 1) << 4;
        default: return address;
    }
}

// Copies a box between memory and shared memory. Elements outside of the tensor are zeros, or are not written. With `x`, nothing
// is copied: the accesses are checked.
enum way { IN, OUT, CHECK_IN, CHECK_OUT };
static void move_box(const struct tensor_map* m, const s32* from, char* shared, u32 to, enum way way, X* x, u32 site) {
    u32 rows = 1, i[5] = {0};
    for (u32 d = 1; d < m->rank; d++) rows *= m->box[d];
    const u32 row_bytes = m->box[0] * m->bytes;
    for (u32 row = 0; row < rows; row++) {
        u64 address = m->address;
        _Bool inside = 1;
        for (u32 d = 1; d < m->rank; d++) {
            const s64 c = (s64)from[d] + i[d];
            inside = inside && c >= 0 && c < m->dims[d];
            address += c * m->strides[d - 1];
        }
        for (u32 d = 1; d < m->rank && ++i[d] == m->box[d]; d++) i[d] = 0;
        if (way >= CHECK_IN) {
            const s64 left = from[0] < 0 ? 0 : from[0], end = (s64)from[0] + m->box[0], right = end < m->dims[0] ? end : m->dims[0];
            if (inside && left < right) emu_watch_access(x, site, address + left * m->bytes, (right - left) * m->bytes, way == CHECK_OUT);
            continue;
        }
        for (u32 b = 0; b < row_bytes; b += m->bytes) {
            char* place = shared + swizzled(to + row * row_bytes + b, m->swizzle);
            const s64 c = (s64)from[0] + b / m->bytes;
            const _Bool in = inside && c >= 0 && c < m->dims[0];
            char* element = (char*)(address + c * m->bytes);
            if (way == IN && in) memcpy(place, element, m->bytes);
            else if (way == IN) memset(place, 0, m->bytes);
            else if (in) memcpy(element, place, m->bytes);
        }
    }
}

static void deliver(const struct pending_bulk* b) {
    if (b->map) move_box(b->map, b->at, b->shared, b->to, IN, NULL, 0);
    else memcpy(b->shared + b->to, (const void*)b->from, b->bytes);
    add_bytes(b->barrier, -(s32)b->bytes);
}

void emu_deliver_bulk(struct block* b, u64* barrier) {
    u32 kept = 0;
    for (u32 i = 0; i < b->bulks; i++) {
        if (b->bulk[i].barrier == barrier) deliver(&b->bulk[i]);
        else b->bulk[kept++] = b->bulk[i];
    }
    b->bulks = kept;
}

static void issue(X* x, u32 site, u32 to, u32 barrier, u32 blocks, struct pending_bulk bulk) {
    struct cluster* c = x->block->cluster;
    for (u32 rank = 0; rank < c->blocks; rank++) {
        if (blocks ? !(blocks >> rank & 1) : rank) continue;
        // With a list of blocks, place and barrier are at the same offsets in each of them.
        const u32 high = (rank + 1) << 24;
        struct block* owner;
        struct pending_bulk b = bulk;
        char* place = emu_shared_at(x, site, blocks ? (to & 0xffffff) | high : to, b.bytes, &owner);
        b.shared = owner->shared, b.to = place - owner->shared, b.site = site;
        struct block* waiting;
        b.barrier = at(x, site, blocks ? (barrier & 0xffffff) | high : barrier, &waiting);
        if (waiting != owner) emu_fail(x, site, "a copy into one block with the mbarrier of another");
        if (owner->bulks == owner->bulk_room)
            owner->bulk = realloc(owner->bulk, (owner->bulk_room = owner->bulk_room * 2 + 16) * sizeof *owner->bulk);
        owner->bulk[owner->bulks++] = b;
        if (emu_poison) memset(place, 0xff, b.bytes);
    }
    emu_progress++;
}

void emu_bulk(T* t, u32 site, u32 to, u64 from, u32 bytes, u32 barrier, u32 blocks) {
    X* x = of(t);
    if (bytes % 16 || from % 16 || to % 16) emu_fail(x, site, "bulk copy of %u bytes, or its addresses, are no multiples of 16", bytes);
    if (!bytes) return;
    check_access(x, site, from, bytes, 0);
    issue(x, site, to, barrier, blocks, (struct pending_bulk){.bytes = bytes, .from = from});
}

void emu_bulk_out(T* t, u32 site, u64 to, u32 from, u32 bytes) {
    X* x = of(t);
    if (bytes % 16 || to % 16 || from % 16) emu_fail(x, site, "bulk copy of %u bytes, or its addresses, are no multiples of 16", bytes);
    check_access(x, site, to, bytes, 1);
    memcpy((void*)to, emu_shared_at(x, site, from, bytes, NULL), bytes);
    emu_progress++;
}

static const struct tensor_map* map_at(X* x, u32 site, u64 address, u32 rank, u32* bytes) {
    const struct tensor_map* m = (const void*)address;
    if (address % 64) emu_fail(x, site, "a tensor map that is not aligned");
    if (address - (u64)x->t.params >= emu_now->kernel->param_bytes) check_source(x, site, address, sizeof *m);
    if (m->magic != TENSOR_MAGIC) emu_fail(x, site, "no tensor map at %#llx", (unsigned long long)address);
    if (m->rank != rank) emu_fail(x, site, "a copy of %u dimensions by a tensor map of %u", rank, m->rank);
    *bytes = m->bytes;
    for (u32 d = 0; d < rank; d++) *bytes *= m->box[d];
    return m;
}

static void check_tensor(X* x, u32 site, const struct tensor_map* m) {
    u64 end = (u64)m->dims[0] * m->bytes;
    for (u32 d = 1; d < m->rank; d++) end += (u64)(m->dims[d] - 1) * m->strides[d - 1];
    check_source(x, site, m->address, end);
}

void emu_tensor(T* t, u32 site, u32 to, u64 map, u32 rank, const s32* from, u32 barrier, u32 blocks) {
    X* x = of(t);
    u32 bytes;
    const struct tensor_map* m = map_at(x, site, map, rank, &bytes);
    check_tensor(x, site, m);
    if (to % 128) emu_fail(x, site, "a tensor copy to %d, no multiple of 128", (s32)((to & 0xffffff) - SHARED_FROM));
    struct pending_bulk b = {.bytes = bytes, .map = m, .rank = rank};
    memcpy(b.at, from, rank * sizeof *from);
    if (emu_watch) move_box(m, from, NULL, 0, CHECK_IN, x, site);
    issue(x, site, to, barrier, blocks, b);
}

void emu_tensor_out(T* t, u32 site, u64 map, u32 rank, const s32* to, u32 from) {
    X* x = of(t);
    u32 bytes;
    const struct tensor_map* m = map_at(x, site, map, rank, &bytes);
    check_tensor(x, site, m);
    char* place = emu_shared_at(x, site, from, bytes, NULL);
    if (emu_watch) move_box(m, to, NULL, 0, CHECK_OUT, x, site);
    move_box(m, to, x->block->shared, place - x->block->shared, OUT, NULL, 0);
    emu_progress++;
}

// Kinds are those of CUtensorMapDataType.
int emu_tensor_map(void* map, u32 kind, u32 rank, u64 address, const u64* dims, const u64* strides, const u32* box, const u32* steps, u32 swizzle) {
    static const u8 sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
    if (kind >= sizeof sizes || !rank || rank > 5 || address % 16 || swizzle > 3) return 1;
    struct tensor_map m = {.magic = TENSOR_MAGIC, .bytes = sizes[kind], .rank = rank, .kind = kind, .address = address};
    m.swizzle = swizzle ? 16 << swizzle : 0;
    for (u32 d = 0; d < rank; d++) {
        if (!dims[d] || dims[d] > 0xffffffffull || !box[d] || box[d] > 256 || steps[d] != 1) return 1;
        m.dims[d] = dims[d], m.box[d] = box[d];
    }
    for (u32 d = 1; d < rank; d++) {
        if (strides[d - 1] % 16 || strides[d - 1] >= 1ull << 40) return 1;
        m.strides[d - 1] = strides[d - 1];
    }
    if (m.box[0] * m.bytes % 16 || (m.swizzle && m.box[0] * m.bytes > m.swizzle)) return 1;
    memcpy(map, &m, sizeof m);
    return 0;
}
