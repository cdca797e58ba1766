// What the lanes of a warp do together, and barriers of blocks and clusters.
#include "runtime.h"

// ---- a warp's collectives ---------------------------------------------------------------------

void emu_matrix(struct warp* w, X* first);

static void shuffle(struct warp* w, u32 members) {
    for (u32 l = 0; l < 32; l++) {
        if (!(members >> l & 1)) continue;
        X* x = w->lanes[l];
        const u32 b = x->b & 31, c = x->c & 31, segment = x->c >> 8 & 31;
        const u32 top = (l & segment) | (c & ~segment), bottom = l & segment;
        s32 from;
        _Bool valid;
        switch (x->mode) {
            case 0: from = (s32)(l - b), valid = from >= (s32)top; break;
            case 1: from = l + b, valid = from <= (s32)top; break;
            case 2: from = l ^ b, valid = from <= (s32)top; break;
            default: from = bottom | (b & ~segment), valid = from <= (s32)top;
        }
        if (!valid) from = l;
        if (!(members >> from & 1)) {
            // The value of a lane that takes no part is undefined.
            x->out = 0xffffffff, x->out_p = valid;
            continue;
        }
        x->out = w->lanes[from]->value, x->out_p = valid;
    }
}

static void vote(struct warp* w, u32 members, X* first) {
    u32 ballot = 0;
    for (u32 l = 0; l < 32; l++)
        if (members >> l & 1 && w->lanes[l]->value) ballot |= 1u << l;
    const u32 result[] = {ballot == members, ballot != 0, ballot == members || ballot == 0, ballot};
    for (u32 l = 0; l < 32; l++)
        if (members >> l & 1) w->lanes[l]->out = result[first->mode];
}

static void match(struct warp* w, u32 members, X* first) {
    for (u32 l = 0; l < 32; l++) {
        if (!(members >> l & 1)) continue;
        u32 same = 0;
        for (u32 o = 0; o < 32; o++)
            if (members >> o & 1 && w->lanes[o]->wide == w->lanes[l]->wide) same |= 1u << o;
        w->lanes[l]->out_p = same == members;
        w->lanes[l]->out = first->mode && same != members ? 0 : same;
    }
}

static void reduce(struct warp* w, u32 members, X* first) {
    u32 sum = first->value;
    for (u32 l = first->t.lane + 1; l < 32; l++) {
        if (!(members >> l & 1)) continue;
        const u32 v = w->lanes[l]->value;
        switch (first->mode) {
            case 0: case 8: sum += v; break;
            case 1: sum = v < sum ? v : sum; break;
            case 2: sum = v > sum ? v : sum; break;
            case 3: case 11: sum &= v; break;
            case 4: case 12: sum |= v; break;
            case 5: case 13: sum ^= v; break;
            case 9: sum = (s32)v < (s32)sum ? v : sum; break;
            case 10: sum = (s32)v > (s32)sum ? v : sum; break;
        }
    }
    for (u32 l = 0; l < 32; l++)
        if (members >> l & 1) w->lanes[l]->out = sum;
}

static void together(struct warp* w, u32 members) {
    X* first = w->lanes[__builtin_ctz(members)];
    switch (first->op) {
        case SHFL: shuffle(w, members); break;
        case VOTE: vote(w, members, first); break;
        case MATCH: match(w, members, first); break;
        case REDUX: reduce(w, members, first); break;
        case ELECT:
            for (u32 l = 0; l < 32; l++)
                if (members >> l & 1) w->lanes[l]->out = first->t.lane, w->lanes[l]->out_p = l == first->t.lane;
            break;
        case SYNC: break;
        default: emu_matrix(w, first);
    }
    w->arrived &= ~members;
    _Bool waited = 0;
    for (u32 l = 0; l < 32; l++) waited |= members >> l & 1 && w->lanes[l]->waited;
    for (u32 l = 0; l < 32; l++)
        if (members >> l & 1) w->lanes[l]->state = READY, w->lanes[l]->waited = waited;
}

// Lanes of `x`'s collective if all of them are there, or 0.
static u32 complete(struct warp* w, X* x) {
    const u32 members = x->mask & w->alive;
    if ((w->arrived & members) != members) return 0;
    for (u32 l = 0; l < 32; l++) {
        if (!(members >> l & 1)) continue;
        const X* o = w->lanes[l];
        if (o->mask != x->mask) return 0;
        if (o->op != x->op) emu_fail(x, x->site, "lanes %u and %u of one mask are at different instructions", l, x->t.lane);
        if (x->op >= ALIGNED && o->site != x->site) emu_fail(x, x->site, "lanes %u and %u of a warp are at different instructions", l, x->t.lane);
    }
    return members;
}

void emu_recheck_warp(struct warp* w) {
    for (u32 l = 0; l < 32; l++)
        if (w->arrived >> l & 1) {
            const u32 members = complete(w, w->lanes[l]);
            if (members) together(w, members);
        }
}

static void collect(X* x, enum warp_op op, u32 site, u32 mask) {
    struct warp* w = &x->block->warp[x->t.warp];
    if (!(mask >> x->t.lane & 1)) emu_fail(x, site, "lane %u is not in the mask %#x of its own instruction", x->t.lane, mask);
    x->op = op, x->mask = mask, x->site = site;
    w->arrived |= 1u << x->t.lane;
    const u32 members = complete(w, x);
    if (members) together(w, members);
    else emu_wait(x, IN_WARP, site);
}

u32 emu_shfl(T* t, u32 site, u32 mode, u32 value, u32 b, u32 c, u32 mask, _Bool* valid) {
    X* x = of(t);
    x->mode = mode, x->value = value, x->b = b, x->c = c;
    collect(x, SHFL, site, mask);
    *valid = x->out_p;
    return x->out;
}
u32 emu_vote(T* t, u32 site, u32 mode, u32 value, u32 mask) {
    X* x = of(t);
    x->mode = mode, x->value = value;
    collect(x, VOTE, site, mask);
    return x->out;
}
u32 emu_match(T* t, u32 site, u32 all, u64 value, u32 mask, _Bool* same) {
    X* x = of(t);
    x->mode = all, x->wide = value;
    collect(x, MATCH, site, mask);
    *same = x->out_p;
    return x->out;
}
u32 emu_redux(T* t, u32 site, u32 op, u32 value, u32 mask) {
    X* x = of(t);
    x->mode = op, x->value = value;
    collect(x, REDUX, site, mask);
    return x->out;
}
u32 emu_elect(T* t, u32 site, u32 mask, _Bool* elected) {
    X* x = of(t);
    collect(x, ELECT, site, mask);
    *elected = x->out_p;
    return x->out;
}
void emu_warp_sync(T* t, u32 site, u32 mask) { collect(of(t), SYNC, site, mask); }

// A GPU answers with the lanes that run together. Here these are the lanes that come to the same instruction before any of them
// can go on.
u32 emu_activemask(T* t, u32 site) {
    if (emu_option("DACAPO_EMULATOR_ALONE", 0)) return 1u << t->lane;
    emu_wait(of(t), AT_MASK, site);
    return of(t)->out;
}
_Bool emu_answer_masks(struct warp* w) {
    _Bool any = 0;
    for (u32 l = 0; l < 32; l++) {
        X* x = w->lanes[l];
        if (!x || x->state != AT_MASK) continue;
        u32 mask = 0;
        for (u32 o = l; o < 32; o++)
            if (w->lanes[o] && w->lanes[o]->state == AT_MASK && w->lanes[o]->site == x->site) mask |= 1u << o;
        for (u32 o = l; o < 32; o++)
            if (mask >> o & 1) w->lanes[o]->state = READY, w->lanes[o]->out = mask;
        any = 1;
    }
    return any;
}

void emu_mma(T* t, u32 site, u32 kind, u32* d, const u32* a, const u32* b, const u32* c) {
    X* x = of(t);
    x->kind = kind, x->d = d, x->ma = a, x->mb = b, x->mc = c;
    collect(x, MMA_SYNC, site, 0xffffffff);
}
void emu_ldmatrix(T* t, u32 site, u32* d, u32 count, u32 transposed, u32 address) {
    X* x = of(t);
    x->d = d, x->kind = count | transposed << 8, x->address = address;
    collect(x, LDMATRIX, site, 0xffffffff);
}
u32 emu_movmatrix(T* t, u32 site, u32 value) {
    X* x = of(t);
    x->value = value;
    collect(x, MOVMATRIX, site, 0xffffffff);
    return x->out;
}

// ---- barriers of a block ----------------------------------------------------------------------

static _Bool try_bar(struct block* b, u32 id) {
    struct bar* bar = &b->bars[id];
    const u32 need = bar->need ? bar->need : b->left;
    if (!bar->arrived || bar->arrived < need) return 0;
    bar->result[0] = bar->value_count, bar->result[1] = bar->value_and, bar->result[2] = bar->value_or;
    for (u32 i = 0; i < b->threads; i++) {
        X* x = &b->thread[i];
        if (x->state == AT_BAR && x->bar_id == id) x->state = READY, x->waited |= bar->waited;
    }
    bar->waited = 0;
    bar->arrived = bar->need = bar->value_count = bar->value_or = 0;
    return 1;
}

void emu_recheck_bars(struct block* b) {
    for (u32 id = 0; id < 16 && b->left; id++)
        if (!b->bars[id].need) try_bar(b, id);
}

u32 emu_bar(T* t, u32 site, u32 id, u32 count, u32 mode, u32 value) {
    X* x = of(t);
    struct block* b = x->block;
    if (id > 15) emu_fail(x, site, "barrier %u: there are 16", id);
    if (count % 32) emu_fail(x, site, "barrier %u for %u threads: whole warps are needed", id, count);
    if (count > b->threads) emu_fail(x, site, "barrier %u for %u threads in a block of %u", id, count, b->threads);
    struct bar* bar = &b->bars[id];
    if (bar->arrived && bar->need != count)
        emu_fail(x, site, "barrier %u for %u threads, while others are there for %u", id, count, bar->need);
    if (!bar->arrived) bar->value_and = 1;
    bar->need = count;
    bar->arrived++;
    bar->waited |= x->waited;
    bar->value_count += value != 0, bar->value_or |= value != 0, bar->value_and &= value != 0;
    // The last one must look up its result itself, so it waits like the others until the barrier is through.
    x->bar_id = id, x->bar_mode = mode, x->site = site;
    if (mode == 1) {
        try_bar(b, id);
        return 0;
    }
    x->state = AT_BAR;
    if (!try_bar(b, id)) emu_wait(x, AT_BAR, site);
    return mode >= 2 ? bar->result[mode - 2] : 0;
}

// ---- barriers of a cluster --------------------------------------------------------------------

void emu_cluster_arrive(T* t, u32 site) {
    X* x = of(t);
    struct cluster* c = x->block->cluster;
    x->cluster_phase = c->phase;
    c->waited |= x->waited;
    emu_progress++;
    if (++c->arrived >= c->left) c->arrived = 0, c->phase++;
}
void emu_cluster_wait(T* t, u32 site) {
    X* x = of(t);
    if (x->block->cluster->phase == x->cluster_phase) emu_wait(x, AT_CLUSTER, site);
    x->waited |= x->block->cluster->waited;
}
