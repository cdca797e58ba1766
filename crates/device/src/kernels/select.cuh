// Which of a row's tokens are the likeliest, by count or by share of the mass: radix selection over integer keys and masses,
// the same for the same logits. For `sample.cu`, after its rows.
#pragma once

#define BINS 1024
// A warp takes 256 tokens at a time; a chunk is a multiple of that, such that there are at most BINS chunks.
#define CHUNK (256 * ((VOCAB + 256 * BINS - 1) / (256 * BINS)))
#define CHUNKS ((VOCAB + CHUNK - 1) / CHUNK)

struct Select {
    u64 bins[BINS];
    u32 keys[BINS];
    u64 warps[WARPS];
    Best best[WARPS];
    u64 target, ties;
    u32 found, members;
};

// Which tokens are kept: all with a larger key, and the first `ties` in index order with this key.
struct Cut {
    u32 key;
    u64 ties;
};

DEVICE float value_of(u32 key) { return as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// Mass of a token: 1 for counting, or its probability against the maximum as a 2^-36 integer. Sums of
// integers do not depend on their order.
DEVICE u64 mass_of(float scaled, float maximum, bool counting) {
    return counting ? 1 : (u64)(expf(scaled - maximum) * 68719476736.0f);
}

// Calls `take` with the scaled logits of all tokens, in no particular order.
template <class F> DEVICE void every(const Row& row, float inverse, F take) {
    u32 rest = 0;
    if (ALIGNED && row.plain) {
        rest = VOCAB / 8 * 8;
#pragma unroll 1
        for (u32 i = threadIdx.x * 8; i < rest; i += THREADS * 8) {
            float v[8];
            load8<XT>(row.logits, row.base + i, v);
#pragma unroll
            for (int t = 0; t < 8; t++) take(v[t] * inverse);
        }
    }
#pragma unroll 1
    for (u32 i = rest + threadIdx.x; i < VOCAB; i += THREADS) take(adjusted(row, i) * inverse);
}

// The sum over all threads before this one; `total` is the sum over all.
DEVICE u64 block_prefix(u64 v, u64& total, Select& s) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 sum = v;
#pragma unroll
    for (u32 o = 1; o < 32; o *= 2) {
        const u64 other = __shfl_up_sync(FULL, sum, o);
        if (lane >= o) sum += other;
    }
    __syncthreads();
    if (lane == 31) s.warps[warp] = sum;
    __syncthreads();
    u64 before = sum - v;
    total = 0;
    for (u32 w = 0; w < WARPS; w++) {
        if (w == warp) before += total;
        total += s.warps[w];
    }
    return before;
}

// A window of distances from the maximum, from `low` to less than `high`, divided into bins.
struct Window {
    float low, high, scale;
    DEVICE bool holds(float distance) const { return distance >= low && distance < high; }
    DEVICE u32 bin(float distance) const { return (u32)fminf((distance - low) * scale, (float)(BINS - 1)); }
};

// Which of a row's tokens count (those the cut keeps), and whether by number or by mass.
struct Asked {
    float inverse, maximum;
    Cut cut;
    bool counting;
    DEVICE u64 mass(float l) const { return mass_of(l, maximum, counting); }
    DEVICE u64 tie_mass() const { return cut.ties ? cut.ties * mass(value_of(cut.key)) : 0; }
};

// Finds, byte by byte, the key at which the mass of larger keys reaches the target, among the keys of a bin: for bins
// with more members than fit. Leaves it in `found`, and the mass that its ties must contribute in `target`.
DEVICE void select_bytes(const Row& row, Asked asked, Window window, u32 bin, bool tied, u64 target, Select& s) {
    u32 prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        for (u32 b = threadIdx.x; b < 256; b += THREADS) s.bins[b] = 0;
        __syncthreads();
        every(row, asked.inverse, [&](float l) {
            const float distance = asked.maximum - l;
            const u32 key = key_of(l);
            if (key <= asked.cut.key || !window.holds(distance) || window.bin(distance) != bin) return;
            if (shift == 24 || key >> (shift + 8) == prefix) atomicAdd(&s.bins[key >> shift & 255], asked.mass(l));
        });
        __syncthreads();
        if (threadIdx.x == 0) {
            const u32 tie = asked.cut.key;
            if (tied && (shift == 24 || tie >> (shift + 8) == prefix)) s.bins[tie >> shift & 255] += asked.tie_mass();
            u64 above = target, b = 255;
            while (b > 0 && s.bins[b] < above) above -= s.bins[b--];
            s.target = above;
            s.found = prefix << 8 | (u32)b;
        }
        __syncthreads();
        prefix = s.found;
        target = s.target;
    }
}

// The same for members that fit: each is compared with all.
DEVICE void select_members(const Asked& asked, u32 members, bool tied, u64 target, Select& s) {
    if (tied && threadIdx.x == 0) {
        s.keys[members] = asked.cut.key;
        s.bins[members] = asked.tie_mass();
    }
    members += tied;
    __syncthreads();
    for (u32 j = threadIdx.x; j < members; j += THREADS) {
        const u32 key = s.keys[j];
        u64 larger = 0, equal = 0;
        bool first = true;
        for (u32 i = 0; i < members; i++) {
            if (s.keys[i] > key) larger += s.bins[i];
            if (s.keys[i] == key) {
                equal += s.bins[i];
                first &= i >= j;
            }
        }
        if (first && larger < target && target <= larger + equal) {
            s.found = key;
            s.target = target - larger;
        }
    }
}

// The smallest set of largest keys, among those that `cut` keeps, that has `count` members or, if that is 0, the
// share `part` of their mass. In most rows the likeliest tokens are few: windows of growing distance from the maximum
// are divided into bins until one bin holds the end of the set, and its members are ordered.
DEVICE Cut select_top(const Row& row, float inverse, float maximum, Cut cut, u32 count, float part, Select& s) {
    const Asked asked = {inverse, maximum, cut, count > 0};
    // Ties at an earlier cut are kept in index order; equal keys have equal mass, so one multiplication gives their
    // mass.
    const float tie_distance = maximum - value_of(cut.key);
    const u64 tie_mass = asked.tie_mass();
    Window window = {0.0f, 1.0f, (float)BINS};
    u64 target = 0, above = 0;
    for (int number = 0;; number++) {
        for (u32 b = threadIdx.x; b < BINS; b += THREADS) s.bins[b] = 0;
        __syncthreads();
        u64 rest = 0;
        every(row, inverse, [&](float l) {
            const float distance = maximum - l;
            if (key_of(l) <= cut.key) return;
            if (window.holds(distance)) atomicAdd(&s.bins[window.bin(distance)], asked.mass(l));
            else if (number == 0) rest += asked.mass(l);
        });
        __syncthreads();
        if (threadIdx.x == 0 && tie_mass) {
            if (window.holds(tie_distance)) s.bins[window.bin(tie_distance)] += tie_mass;
            else rest += tie_mass;
        }
        __syncthreads();
        const u32 own = threadIdx.x * (BINS / THREADS);
        u64 inside, outside, mass = 0;
        for (u32 b = own; b < own + BINS / THREADS; b++) mass += s.bins[b];
        u64 before = above + block_prefix(mass, inside, s);
        if (number == 0) {
            block_prefix(rest, outside, s);
            const u64 total = inside + outside, share = (u64)((double)part * (double)total);
            target = asked.counting ? count : share ? share : 1;
            if (target > total) return cut;
        }
        above += inside;
        if (above >= target) {
            for (u32 b = own; b < own + BINS / THREADS; b++) {
                if (before < target && target <= before + s.bins[b]) {
                    s.found = b;
                    s.target = target - before;
                }
                before += s.bins[b];
            }
            break;
        }
        // The third window has no end: everything further away falls into its last bin.
        window.low = window.high;
        window.high = number == 0 ? 4.0f : INFINITY;
        window.scale = number == 0 ? BINS / 3.0f : BINS / 28.0f;
    }
    if (threadIdx.x == 0) s.members = 0;
    __syncthreads();
    const u32 bin = s.found;
    target = s.target;
    every(row, inverse, [&](float l) {
        const float distance = maximum - l;
        const u32 key = key_of(l);
        if (key <= cut.key || !window.holds(distance) || window.bin(distance) != bin) return;
        const u32 at = atomicAdd(&s.members, 1);
        if (at >= BINS) return;
        s.keys[at] = key;
        s.bins[at] = asked.mass(l);
    });
    __syncthreads();
    const u32 members = s.members;
    const bool tied = tie_mass && window.holds(tie_distance) && window.bin(tie_distance) == bin;
    if (members + tied > BINS) select_bytes(row, asked, window, bin, tied, target, s);
    else select_members(asked, members, tied, target, s);
    __syncthreads();
    Cut next;
    next.key = s.found;
    const u64 each = asked.mass(value_of(next.key));
    next.ties = each ? (s.target + each - 1) / each : ~0ull;
    if (next.key == cut.key && next.ties > cut.ties) next.ties = cut.ties;
    __syncthreads();
    return next;
}
