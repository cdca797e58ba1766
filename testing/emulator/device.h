// What a translated kernel sees: number types, the state of its thread, checked memory, and the calls of the runtime.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;

#define INLINE static inline __attribute__((always_inline, unused))
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

// Set in the site of an access that writes.
#define WRITES 0x80000000u

// Where an instruction comes from: a line of a source, and the line it was inlined at (0: not inlined).
struct emu_site {
    u16 file, line, from_file, from_line;
};

// Addresses that a kernel may use. It is never freed: one that is gone has no bytes.
struct emu_range {
    u64 base, bytes;
};

// What instructions read of a thread; the runtime has more behind it.
struct emu_thread {
    // Host address of shared address 0 of the own block; valid addresses are from `shared_from` to `shared_to`.
    char* shared;
    u32 shared_from, shared_to;
    const char* params;
    u32 tid[3], ntid[3], ctaid[3], nctaid[3];
    u32 lane, warp;
    // The stack, with the local arrays.
    u64 stack_from, stack_bytes;
    // Of the cluster: the block in it, blocks of it, the cluster in the grid, clusters of the grid.
    u32 cluster_ctaid[3], cluster_nctaid[3], clusterid[3], nclusterid[3], cluster_ctarank, cluster_nctarank;
};
typedef struct emu_thread T;

struct emu_kernel {
    const char* name;
    void (*entry)(T*);
    // Bytes of static shared memory, of local arrays and of the parameters; offsets and sizes of these.
    u32 static_shared, local, param_bytes, params;
    const u32* param_at;
    const u32* param_size;
    u32 max_threads;
    const struct emu_site* sites;
    const char* const* files;
    // What each access of global memory met last.
    struct emu_range **cache, *none;
    u32 caches;
};
struct emu_variable {
    const char* name;
    void* at;
    u64 bytes;
};
struct emu_module {
    u32 kernels, variables;
    const struct emu_kernel* kernel;
    const struct emu_variable* variable;
};

// ---- the runtime ------------------------------------------------------------------------------

extern u64 emu_progress;
extern u32 emu_fuel;
char* emu_global_slow(T*, u32 site, struct emu_range** cache, u64 address, u32 bytes);
char* emu_generic_slow(T*, u32 site, struct emu_range** cache, u64 address, u32 bytes);
char* emu_local_slow(T*, u32 site, u64 address, u32 bytes);
char* emu_shared_slow(T*, u32 site, u32 address, u32 bytes);
void emu_out_of_fuel(T*);
// Others run.
void emu_pause(T*, u32 site);
// Before a load that may wait for another thread: if the thread has read this place and it has not changed, others run until it has.
void emu_poll(T*, u32 site, const char* at, u32 bytes);
void emu_trap(T*, u32 site, const char* what);
u64 emu_to_shared(T*, u32 site, u64 address);
u32 emu_mapa(T*, u32 site, u32 address, u32 rank);
u64 emu_clock(void);

u32 emu_shfl(T*, u32 site, u32 mode, u32 value, u32 b, u32 c, u32 mask, _Bool* valid);
u32 emu_vote(T*, u32 site, u32 mode, u32 value, u32 mask);
u32 emu_match(T*, u32 site, u32 all, u64 value, u32 mask, _Bool* same);
u32 emu_redux(T*, u32 site, u32 op, u32 value, u32 mask);
u32 emu_elect(T*, u32 site, u32 mask, _Bool* elected);
void emu_warp_sync(T*, u32 site, u32 mask);
u32 emu_activemask(T*, u32 site);
void emu_mma(T*, u32 site, u32 kind, u32* d, const u32* a, const u32* b, const u32* c);
void emu_ldmatrix(T*, u32 site, u32* d, u32 count, u32 transposed, u32 address);
u32 emu_movmatrix(T*, u32 site, u32 value);
void emu_wgmma(T*, u32 site, u32 kind, u32 columns, u32* d, const u32* a, u64 a_desc, u64 b_desc, _Bool add, s32 a_sign, s32 b_sign,
               u32 a_transposed, u32 b_transposed);
void emu_wgmma_sync(T*, u32 site, u32 what, u32 left);

u32 emu_bar(T*, u32 site, u32 id, u32 count, u32 mode, u32 value);
void emu_cluster_arrive(T*, u32 site);
void emu_cluster_wait(T*, u32 site);
void emu_mbar_init(T*, u32 site, u32 address, u32 count);
void emu_mbar_inval(T*, u32 site, u32 address);
u64 emu_mbar_arrive(T*, u32 site, u32 address, u32 count, u32 bytes, _Bool drop);
void emu_mbar_expect(T*, u32 site, u32 address, u32 bytes);
void emu_mbar_complete(T*, u32 site, u32 address, u32 bytes);
// Whether the phase of this parity is complete; waits for it unless `only_test`.
_Bool emu_mbar_wait(T*, u32 site, u32 address, u32 parity, _Bool only_test);
u32 emu_mbar_parity(u64 state);

void emu_cp_async(T*, u32 site, u32 to, u64 from, u32 bytes, u32 live);
void emu_cp_commit(T*);
void emu_cp_wait(T*, u32 left);
void emu_cp_arrive(T*, u32 site, u32 address, _Bool noinc);
void emu_bulk(T*, u32 site, u32 to, u64 from, u32 bytes, u32 barrier, u32 blocks);
void emu_bulk_out(T*, u32 site, u64 to, u32 from, u32 bytes);
void emu_tensor(T*, u32 site, u32 to, u64 map, u32 rank, const s32* at, u32 barrier, u32 blocks);
void emu_tensor_out(T*, u32 site, u64 map, u32 rank, const s32* at, u32 from);
// griddepcontrol: the thread has waited for the launch before, or lets the next one start.
void emu_grid_wait(T*);
void emu_grid_trigger(T*);
void emu_set_condition(T*, u64 handle, u32 value);

// ---- memory -----------------------------------------------------------------------------------

INLINE char* emu_global(T* t, u32 site, struct emu_range** cache, u64 address, u32 bytes) {
    const struct emu_range* r = *cache;
    const u64 at = address - r->base;
    if (UNLIKELY(at >= r->bytes || at + bytes > r->bytes || (address & (bytes - 1)))) return emu_global_slow(t, site, cache, address, bytes);
    return (char*)address;
}
INLINE char* emu_shared(T* t, u32 site, u32 address, u32 bytes) {
    if (UNLIKELY(address < t->shared_from || address + bytes > t->shared_to || (address & (bytes - 1))))
        return emu_shared_slow(t, site, address, bytes);
    return t->shared + address;
}
INLINE char* emu_generic(T* t, u32 site, struct emu_range** cache, u64 address, u32 bytes) {
    const struct emu_range* r = *cache;
    const u64 at = address - r->base;
    if (UNLIKELY(at >= r->bytes || at + bytes > r->bytes || (address & (bytes - 1)))) return emu_generic_slow(t, site, cache, address, bytes);
    return (char*)address;
}
INLINE char* emu_local(T* t, u32 site, u64 address, u32 bytes) {
    if (UNLIKELY(address - t->stack_from + bytes > t->stack_bytes || (address & (bytes - 1)))) return emu_local_slow(t, site, address, bytes);
    return (char*)address;
}
#define READ(type, at) ({ type v_; memcpy(&v_, (at), sizeof v_); v_; })
#define WRITE(type, at, value) do { type v_ = (value); memcpy((at), &v_, sizeof v_); } while (0)

// ---- arithmetic -------------------------------------------------------------------------------

INLINE f32 u2f(u32 v) { f32 r; memcpy(&r, &v, 4); return r; }
INLINE u32 f2u(f32 v) { u32 r; memcpy(&r, &v, 4); return r; }
INLINE f64 u2d(u64 v) { f64 r; memcpy(&r, &v, 8); return r; }
INLINE u64 d2u(f64 v) { u64 r; memcpy(&r, &v, 8); return r; }
INLINE f32 ftz(f32 v) { return fabsf(v) < 0x1p-126f ? copysignf(0.0f, v) : v; }
INLINE f32 sat(f32 v) { return v > 0.0f ? (v < 1.0f ? v : 1.0f) : 0.0f; }
INLINE f32 h2f(u16 v) { return _cvtsh_ss(v); }
INLINE f32 b2f(u16 v) { return u2f((u32)v << 16); }
INLINE u16 f2h(f32 v) { return isnan(v) ? 0x7fff : _cvtss_sh(v, 0); }
INLINE u16 f2b(f32 v) {
    const u32 u = f2u(v);
    return isnan(v) ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
// To odd, so that a second rounding is that of the exact value.
INLINE f32 d2f_odd(f64 v) {
    f32 r = (f32)v;
    if (isnan(v) || isinf(v) || (f64)r == v) return r;
    u32 u = f2u(r);
    if (fabs((f64)r) > fabs(v)) u--;
    return u2f(u | 1);
}
// Towards zero, down or up.
INLINE f32 d2f_rz(f64 v) {
    const f32 r = (f32)v;
    return fabs((f64)r) > fabs(v) ? u2f(f2u(r) - 1) : r;
}
INLINE f32 d2f_rm(f64 v) {
    const f32 r = (f32)v;
    return (f64)r > v ? nextafterf(r, -INFINITY) : r;
}
INLINE f32 d2f_rp(f64 v) {
    const f32 r = (f32)v;
    return (f64)r < v ? nextafterf(r, INFINITY) : r;
}
// PTX: of a number and a NaN, the number; of zeros, +0 is larger.
INLINE f32 fmin_(f32 a, f32 b) { return isnan(a) ? (isnan(b) ? u2f(0x7fffffff) : b) : isnan(b) ? a : a < b || (a == b && signbit(a)) ? a : b; }
INLINE f32 fmax_(f32 a, f32 b) { return isnan(a) ? (isnan(b) ? u2f(0x7fffffff) : b) : isnan(b) ? a : a > b || (a == b && signbit(b)) ? a : b; }
INLINE f32 fmin_nan(f32 a, f32 b) { return isnan(a) || isnan(b) ? u2f(0x7fffffff) : fmin_(a, b); }
INLINE f32 fmax_nan(f32 a, f32 b) { return isnan(a) || isnan(b) ? u2f(0x7fffffff) : fmax_(a, b); }
u8 emu_f2e4m3(f32 v);
u8 emu_f2e5m2(f32 v);
u8 emu_f2e2m1(f32 v);
f32 emu_e4m3(u8 v);
f32 emu_e5m2(u8 v);
f32 emu_e2m1(u8 v);

INLINE s64 to_int(f64 v, int mode, f64 low, f64 high) {
    if (isnan(v)) return 0;
    v = mode == 0 ? nearbyint(v) : mode == 1 ? trunc(v) : mode == 2 ? floor(v) : ceil(v);
    return v <= low ? (s64)low : v >= high ? (high >= 0x1p63 ? INT64_MAX : (s64)high) : (s64)v;
}
INLINE u64 to_u64(f64 v, int mode) {
    if (isnan(v)) return 0;
    v = mode == 0 ? nearbyint(v) : mode == 1 ? trunc(v) : mode == 2 ? floor(v) : ceil(v);
    return v <= 0 ? 0 : v >= 0x1p64 ? UINT64_MAX : (u64)v;
}
INLINE u32 shl32(u32 a, u32 n) { return n > 31 ? 0 : a << n; }
INLINE u64 shl64(u64 a, u32 n) { return n > 63 ? 0 : a << n; }
INLINE u32 shr32(u32 a, u32 n) { return n > 31 ? 0 : a >> n; }
INLINE u64 shr64(u64 a, u32 n) { return n > 63 ? 0 : a >> n; }
INLINE s32 sar32(s32 a, u32 n) { return a >> (n > 31 ? 31 : n); }
INLINE s64 sar64(s64 a, u32 n) { return a >> (n > 63 ? 63 : n); }
INLINE u32 shf_l(u32 a, u32 b, u32 n) { return n == 0 ? b : n > 31 ? a : b << n | a >> (32 - n); }
INLINE u32 shf_r(u32 a, u32 b, u32 n) { return n == 0 ? a : n > 31 ? b : b << (32 - n) | a >> n; }
INLINE u64 mulhi64(u64 a, u64 b) { return (unsigned __int128)a * b >> 64; }
INLINE s64 mulhi64s(s64 a, s64 b) { return (__int128)a * b >> 64; }
INLINE u32 clz32(u32 a) { return a ? __builtin_clz(a) : 32; }
INLINE u32 clz64(u64 a) { return a ? __builtin_clzll(a) : 64; }
INLINE u32 brev32(u32 a) {
    u32 r = 0;
    for (int i = 0; i < 32; i++) r |= (a >> i & 1) << (31 - i);
    return r;
}
INLINE u64 brev64(u64 a) { return (u64)brev32((u32)a) << 32 | brev32(a >> 32); }
INLINE u64 bfe_u(u64 a, u32 at, u32 len, u32 bits) {
    at &= 255, len &= 255;
    if (at >= bits || len == 0) return 0;
    return len >= 64 ? a >> at : (a >> at) & ((1ull << len) - 1);
}
INLINE s64 bfe_s(s64 a, u32 at, u32 len, u32 bits) {
    at &= 255, len &= 255;
    if (len == 0) return 0;
    if (at >= bits) return a < 0 ? -1 : 0;
    if (at + len >= bits) return a >> at;
    return (s64)((u64)a << (64 - at - len)) >> (64 - len);
}
INLINE u64 bfi_(u64 a, u64 b, u32 at, u32 len, u32 bits) {
    at &= 255, len &= 255;
    if (at >= bits || len == 0) return b;
    u64 mask = (len >= 64 ? ~0ull : (1ull << len) - 1) << at;
    return (a << at & mask) | (b & ~mask);
}
INLINE u32 prmt_(u32 a, u32 b, u32 c) {
    const u64 all = (u64)b << 32 | a;
    u32 r = 0;
    for (int i = 0; i < 4; i++) {
        u32 byte = all >> (c >> 4 * i & 7) * 8 & 255;
        if (c >> 4 * i & 8) byte = byte & 128 ? 255 : 0;
        r |= byte << 8 * i;
    }
    return r;
}
INLINE u32 lop3_(u32 a, u32 b, u32 c, u32 table) {
    return (table & 1 ? ~a & ~b & ~c : 0) | (table & 2 ? ~a & ~b & c : 0) | (table & 4 ? ~a & b & ~c : 0) | (table & 8 ? ~a & b & c : 0) |
           (table & 16 ? a & ~b & ~c : 0) | (table & 32 ? a & ~b & c : 0) | (table & 64 ? a & b & ~c : 0) | (table & 128 ? a & b & c : 0);
}
INLINE u32 dp4a_(u32 a, u32 b, u32 c, int a_signed, int b_signed) {
    for (int i = 0; i < 4; i++) {
        const s32 x = a_signed ? (s8)(a >> 8 * i) : (u8)(a >> 8 * i), y = b_signed ? (s8)(b >> 8 * i) : (u8)(b >> 8 * i);
        c += (u32)(x * y);
    }
    return c;
}
