// Matrix instructions. Products are exact, sums are in f32 (integers in s32), in the order of k.
#include "runtime.h"

enum { F16, BF16, TF32, E4M3, E5M2, S8, U8 };

// ---- small floats -----------------------------------------------------------------------------

// A float of `exponent` and `mantissa` bits; `top` is the largest finite one.
static f32 widen(u32 v, u32 exponent, u32 mantissa) {
    const u32 sign = v >> (exponent + mantissa), e = v >> mantissa & ((1u << exponent) - 1), m = v & ((1u << mantissa) - 1);
    const s32 bias = (1 << (exponent - 1)) - 1;
    const f32 size = e ? ldexpf((f32)(m | 1u << mantissa), (s32)e - bias - (s32)mantissa) : ldexpf((f32)m, 1 - bias - (s32)mantissa);
    return sign ? -size : size;
}
static u32 narrow(f32 v, u32 exponent, u32 mantissa, f32 top) {
    const u32 sign = (signbit(v) != 0) << (exponent + mantissa);
    f32 size = fabsf(v);
    if (size >= top) size = top;
    int at;
    frexpf(size, &at);
    const s32 lowest = 2 - (1 << (exponent - 1));
    // The distance of neighbours.
    const s32 step = (at - 1 < lowest ? lowest : at - 1) - (s32)mantissa;
    u32 n = (u32)nearbyintf(ldexpf(size, -step));
    const s32 up = step + (s32)mantissa - lowest;
    // With the hidden bit, the number counts on into the exponent.
    return sign | (n + ((u32)up << mantissa));
}
f32 emu_e4m3(u8 v) { return (v & 0x7f) == 0x7f ? NAN : widen(v, 4, 3); }
f32 emu_e5m2(u8 v) { return (v & 0x7f) > 0x7c ? NAN : (v & 0x7f) == 0x7c ? (v & 0x80 ? -INFINITY : INFINITY) : widen(v, 5, 2); }
f32 emu_e2m1(u8 v) { return widen(v & 15, 2, 1); }
u8 emu_f2e4m3(f32 v) { return isnan(v) ? 0x7f : narrow(v, 4, 3, 448.0f); }
u8 emu_f2e5m2(f32 v) { return isnan(v) ? 0x7f : narrow(v, 5, 2, 57344.0f); }
u8 emu_f2e2m1(f32 v) { return isnan(v) ? 7 : narrow(v, 2, 1, 6.0f); }

static f32 table[2][256];
__attribute__((constructor)) static void fill(void) {
    for (u32 i = 0; i < 256; i++) table[0][i] = emu_e4m3(i), table[1][i] = emu_e5m2(i);
}

static u32 elements(u32 kind) { return kind == TF32 ? 1 : kind <= BF16 ? 2 : 4; }

INLINE f32 number(u32 kind, u32 bits) {
    switch (kind) {
        case F16: return h2f(bits);
        case BF16: return b2f(bits);
        case TF32: return u2f(bits & ~0x1fffu);
        case E4M3: return table[0][bits];
        case E5M2: return table[1][bits];
        case S8: return (s8)bits;
        default: return (u8)bits;
    }
}
// The numbers of a register, `stride` apart.
INLINE void spread(u32 kind, u32 v, f32* to, u32 stride) {
    const u32 n = elements(kind), bits = 32 / n, mask = bits == 32 ? ~0u : (1u << bits) - 1;
    for (u32 i = 0; i < n; i++) to[i * stride] = number(kind, v >> (i * bits % 32) & mask);
}

// ---- of a warp --------------------------------------------------------------------------------

static void multiply(struct warp* w, X* first) {
    const u32 kind = first->kind & 255, k = first->kind >> 8, n = elements(kind), halves = k / (4 * n);
    f32 a[16][64] = {0}, b[64][8], c[16][8];
    s32 whole[16][8];
    const _Bool integer = kind >= S8;
    for (u32 l = 0; l < 32; l++) {
        const X* x = w->lanes[l];
        const u32 g = l / 4, j = l % 4;
        for (u32 r = 0; r < 2 * halves; r++) spread(kind, x->ma[r], &a[g + 8 * (r % 2)][j * n + r / 2 * 4 * n], 1);
        for (u32 r = 0; r < halves; r++) spread(kind, x->mb[r], &b[j * n + r * 4 * n][g], 8);
        for (u32 i = 0; i < 4; i++) {
            c[g + i / 2 * 8][2 * j + i % 2] = u2f(x->mc[i]);
            whole[g + i / 2 * 8][2 * j + i % 2] = x->mc[i];
        }
    }
    for (u32 row = 0; row < 16; row++)
        for (u32 i = 0; i < k; i++)
            for (u32 column = 0; column < 8; column++) {
                if (integer) whole[row][column] += (s32)a[row][i] * (s32)b[i][column];
                else c[row][column] = fmaf(a[row][i], b[i][column], c[row][column]);
            }
    for (u32 l = 0; l < 32; l++)
        for (u32 i = 0; i < 4; i++) {
            const u32 row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
            w->lanes[l]->d[i] = integer ? (u32)whole[row][column] : f2u(c[row][column]);
        }
}

static void load(struct warp* w, X* first) {
    const u32 count = first->kind & 255, transposed = first->kind >> 8;
    for (u32 m = 0; m < count; m++) {
        u16 rows[8][8];
        for (u32 r = 0; r < 8; r++) {
            X* x = w->lanes[8 * m + r];
            memcpy(rows[r], emu_shared_at(x, x->site, x->address, 16, NULL), 16);
        }
        for (u32 l = 0; l < 32; l++) {
            const u32 g = l / 4, j = 2 * (l % 4);
            w->lanes[l]->d[m] = transposed ? rows[j][g] | (u32)rows[j + 1][g] << 16 : rows[g][j] | (u32)rows[g][j + 1] << 16;
        }
    }
}

static void transpose(struct warp* w) {
    u16 rows[8][8];
    for (u32 l = 0; l < 32; l++) rows[l / 4][2 * (l % 4)] = w->lanes[l]->value, rows[l / 4][2 * (l % 4) + 1] = w->lanes[l]->value >> 16;
    for (u32 l = 0; l < 32; l++) w->lanes[l]->out = rows[2 * (l % 4)][l / 4] | (u32)rows[2 * (l % 4) + 1][l / 4] << 16;
}

void emu_matrix(struct warp* w, X* first) {
    if (w->alive != 0xffffffff) emu_fail(first, first->site, "a matrix instruction in a warp whose lanes are not all there");
    if (first->op == MMA_SYNC) multiply(w, first);
    else if (first->op == LDMATRIX) load(w, first);
    else transpose(w);
}

// ---- of a warp group --------------------------------------------------------------------------

static u32 swizzle(u32 address, u32 mode) {
    switch (mode) {
        case 1: return address ^ (address >> 7 & 7) << 4;
        case 2: return address ^ (address >> 7 & 3) << 4;
        case 3: return address ^ (address >> 7 & 1) << 4;
        default: return address;
    }
}

// Reads `rows` × `k` numbers that a descriptor names; to[i · stride + row] with `by_k`, else to[row · stride + i].
static void operand(X* x, u64 desc, u32 kind, u32 rows, u32 k, _Bool transposed, f32* to, u32 stride, _Bool by_k) {
    const u32 start = (desc & 0x3fff) << 4, leading = (desc >> 16 & 0x3fff) << 4, step = (desc >> 32 & 0x3fff) << 4, mode = desc >> 62;
    const u32 size = 4 / elements(kind), wide = mode == 1 ? 128 : mode == 2 ? 64 : mode == 3 ? 32 : 16;
    if (desc >> 49 & 7) emu_fail(x, x->site, "a matrix descriptor with a base offset");
    for (u32 row = 0; row < rows; row++)
        for (u32 i = 0; i < k; i++) {
            u32 at;
            if (transposed) {
                const u32 per = wide / size;
                at = row / per * leading + row % per * size + i / 8 * step + i % 8 * wide;
            } else {
                const u32 byte = i * size;
                at = row / 8 * step + row % 8 * wide;
                // Without a swizzle, cores of 8 × 16 bytes are `leading` apart.
                at += mode ? byte : byte / 16 * leading + byte % 16;
            }
            const u32 address = swizzle(start + at, mode);
            u32 bits = 0;
            memcpy(&bits, (address >= x->t.shared_from && address + size <= x->t.shared_to) ? x->t.shared + address
                                                                                       : emu_shared_at(x, x->site, address, size, NULL), size);
            to[by_k ? i * stride + row : row * stride + i] = number(kind, bits);
        }
}

static void held(struct block* b, u32 group, u32 kind, f32 (*a)[64]) {
    const u32 n = elements(kind);
    for (u32 i = 0; i < 128; i++) {
        const X* x = &b->thread[group * 128 + i];
        const u32 row = i / 32 * 16 + i % 32 / 4, j = i % 4;
        for (u32 r = 0; r < 4; r++) spread(kind, x->ma[r], &a[row + 8 * (r % 2)][j * n + r / 2 * 4 * n], 1);
    }
}

static f32 a[64][64], w[64][256], c[64][256];

// Reads the operands that are in shared memory, and hashes them.
static u64 read_operands(X* x, const struct product* p) {
    const u32 kind = p->kind & 255, k = p->kind >> 8;
    u64 hash = 0;
    if (!p->held) operand(x, p->a_desc, kind, 64, k, p->a_transposed, a[0], 64, 0);
    operand(x, p->b_desc, kind, p->columns, k, p->b_transposed, w[0], 256, 1);
    for (u32 i = 0; i < k; i++)
        for (u32 column = 0; column < p->columns; column++) hash = hash * 0x100000001b3ull ^ f2u(w[i][column]);
    for (u32 row = 0; row < 64 && !p->held; row++)
        for (u32 i = 0; i < k; i++) hash = hash * 0x100000001b3ull ^ f2u(a[row][i]);
    return hash;
}

static void multiply_group(struct block* b, u32 group) {
    X* first = &b->thread[group * 128];
    const u32 kind = first->kind & 255, k = first->kind >> 8, n = first->columns;
    for (u32 i = 1; i < 128; i++) {
        const X* x = first + i;
        if (x->site != first->site || x->a_desc != first->a_desc || x->b_desc != first->b_desc || x->add != first->add || x->kind != first->kind)
            emu_fail(&b->thread[group * 128 + i], x->site, "threads of a warp group give different operands to a matrix instruction");
    }
    struct product p = {first->a_desc, first->b_desc, 0, first->kind, n, first->site, b->product_group[group],
                        first->ma != NULL, first->a_transposed, first->b_transposed};
    p.hash = read_operands(first, &p);
    if (first->ma) held(b, group, kind, a);
    if (b->product_count[group] == b->product_room[group])
        b->products[group] = realloc(b->products[group], (b->product_room[group] = b->product_room[group] * 2 + 16) * sizeof p);
    b->products[group][b->product_count[group]++] = p;
    for (u32 i = 0; i < 128; i++) {
        const X* x = first + i;
        const u32 row = i / 32 * 16 + i % 32 / 4, column = 2 * (i % 4);
        for (u32 r = 0; r < n / 2; r++)
            c[row + r / 2 % 2 * 8][column + r / 4 * 8 + r % 2] = x->add ? u2f(x->d[r]) : 0.0f;
    }
    const f32 sign = first->a_sign * first->b_sign;
    for (u32 row = 0; row < 64; row++)
        for (u32 i = 0; i < k; i++) {
            const f32 v = a[row][i] * sign;
            for (u32 column = 0; column < n; column++) c[row][column] = fmaf(v, w[i][column], c[row][column]);
        }
    for (u32 i = 0; i < 128; i++) {
        const X* x = first + i;
        const u32 row = i / 32 * 16 + i % 32 / 4, column = 2 * (i % 4);
        for (u32 r = 0; r < n / 2; r++) x->d[r] = f2u(c[row + r / 2 % 2 * 8][column + r / 4 * 8 + r % 2]);
    }
}

// Whether the calling thread is the last of its warp group.
static _Bool last(X* x, u32 site) {
    struct block* b = x->block;
    const u32 group = x->t.warp / 4;
    if (group * 128 + 128 > b->threads) emu_fail(x, site, "an instruction of warp groups in a block of %u threads", b->threads);
    x->site = site;
    return ++b->in_group[group] == 128;
}

static void release(X* x) {
    struct block* b = x->block;
    const u32 group = x->t.warp / 4;
    b->in_group[group] = 0;
    for (u32 i = 0; i < 128; i++) b->thread[group * 128 + i].state = READY;
}

void emu_wgmma(T* t, u32 site, u32 kind, u32 columns, u32* d, const u32* a, u64 a_desc, u64 b_desc, _Bool add, s32 a_sign, s32 b_sign,
               u32 a_transposed, u32 b_transposed) {
    X* x = of(t);
    x->kind = kind, x->columns = columns, x->d = d, x->ma = a, x->a_desc = a_desc, x->b_desc = b_desc, x->add = add;
    x->a_sign = a_sign, x->b_sign = b_sign, x->a_transposed = a_transposed, x->b_transposed = b_transposed;
    if (last(x, site)) {
        multiply_group(x->block, t->warp / 4);
        release(x);
    } else emu_wait(x, IN_GROUP, site);
}

// Products are complete when they are issued, but their operands must stay until the wait.
void emu_wgmma_sync(T* t, u32 site, u32 what, u32 left) {
    X* x = of(t);
    struct block* b = x->block;
    const u32 group = t->warp / 4;
    enum { FENCE, COMMIT, WAIT };
    if (what == FENCE) {
        emu_warp_sync(t, site, 0xffffffff);
        return;
    }
    if (!last(x, site)) {
        emu_wait(x, IN_GROUP, site);
        return;
    }
    if (what == COMMIT) b->product_group[group]++;
    u32 kept = 0;
    for (u32 i = 0; i < b->product_count[group]; i++) {
        const struct product p = b->products[group][i];
        if (what == COMMIT || p.group + left >= b->product_group[group]) b->products[group][kept++] = p;
        else if (read_operands(x, &p) != p.hash) emu_fail(x, p.site, "an operand of a matrix instruction changed before the wait for it");
    }
    b->product_count[group] = kept;
    release(x);
}
