// Ends a step: chooses a token per row, advances the seats, publishes the ring entry. PARTS blocks share
// a row; the last to arrive finishes it, and the last of all rows publishes. Greedy rows need one pass
// over the logits; others are finished by one block with radix selection over integer keys and masses, so
// that the same logits always give the same token. Record layouts come as macros; XT: logits' type.
#include "prelude.cuh"

#define THREADS 512
#define WARPS (THREADS / 32)

struct Best {
    float value;
    u32 index;
};
DEVICE Best better(Best a, Best b) {
    return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}
DEVICE Best block_best(Best v, Best* shared) {
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        Best other;
        other.value = __shfl_xor_sync(FULL, v.value, o);
        other.index = __shfl_xor_sync(FULL, v.index, o);
        v = better(v, other);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    v = shared[0];
    for (int w = 1; w < WARPS; w++) v = better(v, shared[w]);
    return v;
}

// Everything a logit depends on, for one row.
struct Row {
    const void* logits;
    u64 base;
    const u32* params;
    const u32* biases;
    const u32* seen;
    const volatile u32* mask;
    const u32* marked; // in shared memory: a bit per token that is biased or a stop token
    u32 bias_count, stop_count;
    bool plain, too_short;
};

DEVICE float as_float(u32 v) { return __uint_as_float(v); }

DEVICE float adjusted(const Row& row, u32 i) {
    float l = load1<XT>(row.logits, row.base + i);
    if (row.plain) return l;
    if (row.seen) {
        const u32 s = row.seen[i];
        if (s & 0x80000000u) {
            const float r = as_float(row.params[PARAM_REPETITION]);
            l = l > 0.0f ? l / r : l * r;
        }
        const u32 count = s & 0xffffu;
        l -= as_float(row.params[PARAM_FREQUENCY]) * (float)count;
        if (count) l -= as_float(row.params[PARAM_PRESENCE]);
    }
    if (row.marked[i / 32] >> (i % 32) & 1) {
        for (u32 b = 0; b < row.bias_count; b++)
            if (row.biases[2 * b] == i) l += as_float(row.biases[2 * b + 1]);
        if (row.too_short)
            for (u32 s = 0; s < row.stop_count; s++)
                if (row.params[PARAM_STOP + s] == i) l = -INFINITY;
    }
    if (row.mask && !(row.mask[i / 32] >> (i % 32) & 1)) l = -INFINITY;
    return l;
}

// Orders like the float.
DEVICE u32 key_of(float v) {
    const u32 b = __float_as_uint(v);
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}

// Philox4x32-10, the first word.
DEVICE u32 philox(u32 c0, u32 k0, u32 k1) {
    u32 c1 = 0, c2 = 0, c3 = 0;
    for (int round = 0; round < 10; round++) {
        const u32 h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
        const u32 h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
        c0 = h1 ^ c1 ^ k0;
        c1 = l1;
        c2 = h0 ^ c3 ^ k1;
        c3 = l0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0;
}

struct Select {
    u64 bins[256];
    u64 scan[THREADS];
    Best best[WARPS];
    u64 target;
    u32 prefix;
};

// Which tokens are kept: all with a larger key, and the first `ties` in index order with this key.
struct Cut {
    u32 key;
    u64 ties;
};

// Mass of a token: 1 for counting, or its probability against the maximum as a 2^-36 integer.
DEVICE u64 mass_of(float scaled, float maximum, bool counting) {
    return counting ? 1 : (u64)(expf(scaled - maximum) * 68719476736.0f);
}

DEVICE bool kept(u32 key, u64 rank, Cut cut) { return key > cut.key || (key == cut.key && rank < cut.ties); }

// The smallest set of largest keys, among those `cut` keeps, whose mass reaches `target` (> 0).
DEVICE Cut select_mass(const Row& row, float inverse, float maximum, Cut cut, bool counting, u64 target, Select& s) {
    u32 prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (u32 b = threadIdx.x; b < 256; b += THREADS) s.bins[b] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < VOCAB; i += THREADS) {
            const float l = adjusted(row, i) * inverse;
            const u32 key = key_of(l);
            if (key < cut.key || (shift < 24 && key >> (shift + 8) != prefix)) continue;
            // Ties at an earlier cut are kept in index order; equal keys have equal mass, so the count does.
            if (key == cut.key) continue;
            atomicAdd(&s.bins[key >> shift & 255], mass_of(l, maximum, counting));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            if (cut.ties && (shift == 24 || cut.key >> (shift + 8) == prefix)) {
                const u32 b = cut.key;
                const float l = __uint_as_float(b & 0x80000000u ? b & 0x7fffffffu : ~b);
                s.bins[b >> shift & 255] += cut.ties * mass_of(l, maximum, counting);
            }
            u64 above = target, b = 255;
            while (b > 0 && s.bins[b] < above) above -= s.bins[b--];
            s.target = above;
            s.prefix = prefix << 8 | (u32)b;
        }
        __syncthreads();
        prefix = s.prefix;
        target = s.target;
        __syncthreads();
    }
    const float l = __uint_as_float(prefix & 0x80000000u ? prefix & 0x7fffffffu : ~prefix);
    const u64 each = mass_of(l, maximum, counting);
    Cut next;
    next.key = prefix;
    next.ties = each ? (target + each - 1) / each : ~0ull;
    if (next.key == cut.key && next.ties > cut.ties) next.ties = cut.ties;
    return next;
}

// The sum of masses the cut keeps.
DEVICE u64 block_sum(u64 v, Select& s) {
    s.scan[threadIdx.x] = v;
    __syncthreads();
    for (u32 o = THREADS / 2; o; o /= 2) {
        if (threadIdx.x < o) s.scan[threadIdx.x] += s.scan[threadIdx.x + o];
        __syncthreads();
    }
    const u64 sum = s.scan[0];
    __syncthreads();
    return sum;
}
DEVICE u64 block_prefix(u64 v, Select& s) {
    s.scan[threadIdx.x] = v;
    __syncthreads();
    for (u32 o = 1; o < THREADS; o *= 2) {
        const u64 other = threadIdx.x >= o ? s.scan[threadIdx.x - o] : 0;
        __syncthreads();
        s.scan[threadIdx.x] += other;
        __syncthreads();
    }
    const u64 before = s.scan[threadIdx.x] - v;
    __syncthreads();
    return before;
}

DEVICE u64 kept_mass(const Row& row, float inverse, float maximum, Cut cut, Select& s) {
    u64 sum = 0;
    for (u32 i = threadIdx.x; i < VOCAB; i += THREADS) {
        const float l = adjusted(row, i) * inverse;
        if (key_of(l) > cut.key) sum += mass_of(l, maximum, false);
    }
    sum = block_sum(sum, s);
    if (cut.ties && cut.ties != ~0ull) {
        const float l = __uint_as_float(cut.key & 0x80000000u ? cut.key & 0x7fffffffu : ~cut.key);
        sum += cut.ties * mass_of(l, maximum, false);
    }
    return sum;
}

// Draws from what the filters keep; all threads get the token.
DEVICE u32 draw(const Row& row, Best best, u32 counter, Select& s) {
    const float inverse = 1.0f / as_float(row.params[PARAM_TEMPERATURE]);
    const float maximum = best.value * inverse;
    const u32 top_k = row.params[PARAM_TOP_K];
    const float top_p = as_float(row.params[PARAM_TOP_P]), min_p = as_float(row.params[PARAM_MIN_P]);
    Cut cut = {key_of(-INFINITY), 0};
    if (top_k > 0 && top_k < VOCAB) cut = select_mass(row, inverse, maximum, cut, true, top_k, s);
    if (top_p < 1.0f) {
        const u64 total = kept_mass(row, inverse, maximum, cut, s);
        const u64 target = (u64)((double)top_p * (double)total);
        cut = select_mass(row, inverse, maximum, cut, false, target ? target : 1, s);
    }
    const float floor = min_p > 0.0f ? maximum + logf(min_p) : -INFINITY;
    // Each thread owns a run of consecutive tokens, so that sums are in index order.
    const u32 run = (VOCAB + THREADS - 1) / THREADS, begin = threadIdx.x * run, end = min(begin + run, (u32)VOCAB);
    u64 ties = 0;
    for (u32 i = begin; i < end; i++) ties += key_of(adjusted(row, i) * inverse) == cut.key;
    const u64 ties_before = block_prefix(ties, s);
    u64 mass = 0, rank = ties_before;
    for (u32 i = begin; i < end; i++) {
        const float l = adjusted(row, i) * inverse;
        const u32 key = key_of(l);
        const bool keep = kept(key, rank, cut) && l >= floor;
        rank += key == cut.key;
        if (keep) mass += mass_of(l, maximum, false);
    }
    const u64 before = block_prefix(mass, s), total = block_sum(mass, s);
    const u32 word = philox(counter, row.params[PARAM_SEED_LO], row.params[PARAM_SEED_HI]);
    const double u = (double)((float)(word >> 8) * 5.9604644775390625e-08f + 2.98023223876953125e-08f);
    const u64 goal = (u64)(u * (double)total);
    if (threadIdx.x == 0) s.prefix = best.index;
    __syncthreads();
    if (mass && goal >= before && goal < before + mass) {
        u64 sum = before;
        rank = ties_before;
        for (u32 i = begin; i < end; i++) {
            const float l = adjusted(row, i) * inverse;
            const u32 key = key_of(l);
            const bool keep = kept(key, rank, cut) && l >= floor;
            rank += key == cut.key;
            if (!keep) continue;
            sum += mass_of(l, maximum, false);
            if (sum > goal) {
                s.prefix = i;
                break;
            }
        }
    }
    __syncthreads();
    return s.prefix;
}

// Log-probabilities of the chosen token and of the likeliest, into the row's ring words.
DEVICE void report(const Row& row, Best best, u32 token, u32 wanted, volatile u32* ring_row, Select& s) {
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < VOCAB; i += THREADS) sum += expf(adjusted(row, i) - best.value);
    sum = warp_sum(sum);
    float* part = (float*)s.bins;
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int w = 0; w < WARPS; w++) sum += part[w];
    const float log_total = best.value + logf(sum);
    if (threadIdx.x == 0) ring_row[2] = __float_as_uint(adjusted(row, token) - log_total);
    Best previous = {INFINITY, 0};
    for (u32 a = 0; a < wanted && a < MAX_TOP; a++) {
        Best next = {-INFINITY, VOCAB};
        for (u32 i = threadIdx.x; i < VOCAB; i += THREADS) {
            const Best here = {adjusted(row, i), i};
            const bool after = a == 0 || here.value < previous.value || (here.value == previous.value && i > previous.index);
            if (after) next = better(next, here);
        }
        previous = block_best(next, s.best);
        if (threadIdx.x == 0) {
            ring_row[4 + 2 * a] = previous.index;
            ring_row[5 + 2 * a] = __float_as_uint(previous.value - log_total);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
sample(const void* logits, u32* seat_len, u32* seat_token, const u32* params, const u32* biases, u32* seen,
       u32* counts, const u32* row_seat, const u32* row_flags, const u32* row_q_len, const u32* mail0,
       const u32* mail1, u32* ring, u32* semaphores, Best* partial, u32 stride) {
    __shared__ Select s;
    __shared__ u32 order;
    extern __shared__ u32 marked[];
    const u32 r = blockIdx.y, part = blockIdx.x;
    // All of this is the prologue's or older, so it is loaded before the wait for the logits.
    const u32 rows = __ldcg(counts + COUNT_ROWS);
    const u64 launch = (u64)__ldcg(counts + COUNT_LAUNCH_HI) << 32 | __ldcg(counts + COUNT_LAUNCH_LO);
    u32* entry = ring + (u64)(launch % RING_ENTRIES) * RING_ENTRY_WORDS;
    const u32 flags = r < rows ? __ldcg(row_flags + r) : 0;
    const bool sampled = flags & ROW_SAMPLE;
    u32 seat = SEATS, length = 0;
    Row row;
    if (r < rows) {
        seat = __ldcg(row_seat + r);
        length = __ldcg(seat_len + seat) + __ldcg(row_q_len + r);
        row.logits = logits;
        row.base = (u64)r * stride;
        row.params = params + (u64)seat * PARAM_WORDS;
        row.biases = biases + (u64)seat * (2 * MAX_BIASES);
        row.seen = seen && __ldcg(row.params + PARAM_PENALISED) ? seen + (u64)seat * VOCAB : (const u32*)0;
        row.mask = flags & ROW_MASKED ? (launch & 1 ? mail1 : mail0) + AREA_MASKS + (u64)r * MASK_WORDS : (const u32*)0;
        row.marked = marked;
        row.bias_count = min(__ldcg(row.params + PARAM_BIASES), (u32)MAX_BIASES);
        row.stop_count = min(__ldcg(row.params + PARAM_STOPS), (u32)MAX_STOPS);
        row.too_short = length < __ldcg(row.params + PARAM_MIN_LEN) && row.stop_count;
        row.plain = !row.seen && !row.mask && !row.bias_count && !row.too_short;
    }
    let_successor_start();
    wait_for_predecessor();
    if (rows == 0 && r == 0 && part == 0 && threadIdx.x == 0) {
        entry[RING_ROWS] = 0;
#if REPEATS
        entry[RING_AGAIN] = counts[COUNT_AGAIN] = REPEAT_DONE;
#endif
        store_release_system((u64*)entry, launch);
    }
    if (r >= rows) return;
    Best best = {-INFINITY, VOCAB};
    if (sampled) {
        if (!row.plain) {
            for (u32 i = threadIdx.x; i < MASK_WORDS; i += THREADS) marked[i] = 0;
            __syncthreads();
            for (u32 b = threadIdx.x; b < row.bias_count; b += THREADS) {
                const u32 id = row.biases[2 * b];
                if (id < VOCAB) atomicOr(&marked[id / 32], 1u << (id % 32));
            }
            if (row.too_short && threadIdx.x < row.stop_count) {
                const u32 id = row.params[PARAM_STOP + threadIdx.x];
                if (id < VOCAB) atomicOr(&marked[id / 32], 1u << (id % 32));
            }
            __syncthreads();
        }
        const u32 slice = (VOCAB + PARTS * 8 - 1) / (PARTS * 8) * 8, end = min((part + 1) * slice, (u32)VOCAB);
        if (ALIGNED && row.plain) {
#pragma unroll 4
            for (u32 i = part * slice + threadIdx.x * 8; i < end; i += THREADS * 8) {
                if (i + 8 <= end) {
                    float v[8];
                    load8<XT>(logits, row.base + i, v);
#pragma unroll
                    for (int t = 0; t < 8; t++)
                        if (v[t] > best.value) best.value = v[t], best.index = i + t;
                } else
                    for (u32 t = i; t < end; t++) {
                        const float v = load1<XT>(logits, row.base + t);
                        if (v > best.value) best.value = v, best.index = t;
                    }
            }
        } else
            for (u32 i = part * slice + threadIdx.x; i < end; i += THREADS) {
                const Best here = {adjusted(row, i), i};
                best = better(best, here);
            }
        best = block_best(best, s.best);
    }
    if (PARTS > 1) {
        if (threadIdx.x == 0) {
            partial[r * PARTS + part] = best;
            order = add_acquire_release(&semaphores[r + 1], 1);
        }
        __syncthreads();
        if (order != PARTS - 1) return;
        if (threadIdx.x == 0) semaphores[r + 1] = 0;
        best.value = -INFINITY;
        best.index = VOCAB;
        if (sampled)
            for (u32 p = threadIdx.x; p < PARTS; p += THREADS) {
                Best other;
                other.value = __ldcg(&partial[r * PARTS + p].value);
                other.index = __ldcg(&partial[r * PARTS + p].index);
                best = better(best, other);
            }
        best = block_best(best, s.best);
    }
    volatile u32* ring_row = entry + RING_HEADER_WORDS + (u64)r * RING_ROW_WORDS;
    u32 token = best.index < VOCAB ? best.index : 0, wanted = 0;
    if (sampled) {
        if (as_float(row.params[PARAM_TEMPERATURE]) > 0.0f && best.index < VOCAB) token = draw(row, best, length, s);
        wanted = row.params[PARAM_LOGPROBS];
        if (wanted) report(row, best, token, wanted - 1, ring_row, s);
    }
    if (threadIdx.x == 0) {
        u32 bits = sampled ? RING_SAMPLED : 0;
        seat_len[seat] = length;
        if (sampled) {
            seat_token[seat] = token;
            if (row.seen) {
                u32* count = seen + (u64)seat * VOCAB + token;
                *count = (*count + 1) | 0x80000000u;
            }
            for (u32 i = 0; i < row.stop_count; i++)
                if (row.params[PARAM_STOP + i] == token) bits |= RING_STOPPED;
#if REPEATS
            // A launch that repeats goes no further; every row that stops writes the same.
            if (bits & RING_STOPPED) counts[COUNT_LEFT] = 0;
#endif
            if (wanted) bits |= RING_LOGPROBS;
        }
        ring_row[0] = sampled ? token : 0;
        ring_row[1] = bits;
        // A row's words are released to the GPU by its arrival; the last arrival acquires them and releases
        // all of them to the host: one journey there, whatever the number of rows.
        if (rows == 1 || add_acquire_release(&semaphores[0], 1) == rows - 1) {
            if (rows > 1) semaphores[0] = 0;
            entry[RING_ROWS] = rows;
#if REPEATS
            entry[RING_AGAIN] = counts[COUNT_AGAIN] = __ldcg(&counts[COUNT_LEFT]) ? REPEAT_NEXT : REPEAT_DONE;
#endif
            store_release_system((u64*)entry, launch);
        }
    }
}
