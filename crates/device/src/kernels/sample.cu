// Ends a step: chooses a token per row, advances the seats, publishes the ring entry. PARTS blocks share a row; the
// last to arrive finishes it, and the last of all rows publishes. Greedy rows need one pass over the logits; other
// rows are finished by one block with radix selection over integer keys and masses, so that the same logits always
// give the same token. Record layouts are given as macros; XT: logits' type.
// With Q_LEN every row has as many rows of logits. All are evaluated at once, each as if the drafts before it were
// accepted; the last block then accepts what agrees.
#include "prelude.cuh"

#define THREADS 512
// Blocks on a multiprocessor. For compute capability 10.0 the compiler would spill with half of the registers.
#if __CUDA_ARCH__ >= 1000
#define BLOCKS 1
#else
#define BLOCKS 2
#endif
#define WARPS (THREADS / 32)
#ifdef HISTORY
#define HISTORY_ARGUMENT , u32* history
#define CONTEXT (PAGES_PER_SEAT * PAGE)
#else
#define HISTORY_ARGUMENT
#endif
#ifdef Q_LEN
#define DRAFT_ARGUMENTS , const u32* fed, const u32* row_drafts, u32* chosen
#else
#define DRAFT_ARGUMENTS
#endif

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

#ifdef Q_LEN
// The drafts before this token, which count as seen, and at the end how many there are.
__shared__ u32 earlier[Q_LEN + 1];
#endif

DEVICE float as_float(u32 v) { return __uint_as_float(v); }

DEVICE float adjusted(const Row& row, u32 i) {
    float l = load1<XT>(row.logits, row.base + i);
    if (row.plain) return l;
    if (row.seen) {
        u32 s = row.seen[i];
#ifdef Q_LEN
        for (u32 d = 0; d < earlier[Q_LEN]; d++)
            if (earlier[d] == i) s = (s + 1) | 0x80000000u;
#endif
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

// A key that sorts like the float.
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

#include "select.cuh"

// A distribution: logits are multiplied by `inverse`, and those are kept that the cut keeps and that are not below the
// floor.
struct Kept {
    Cut cut;
    float inverse, floor;
};

// Draws from the tokens that the filters keep; all threads get the token. `kept` says which those are, if
// their log-probabilities are wanted; it is in shared memory, because registers are few.
DEVICE u32 draw(const Row& row, Best best, u32 counter, Kept& kept, Select& s) {
    const float inverse = 1.0f / as_float(row.params[PARAM_TEMPERATURE]);
    const float maximum = best.value * inverse;
    const u32 top_k = row.params[PARAM_TOP_K];
    const float top_p = as_float(row.params[PARAM_TOP_P]), min_p = as_float(row.params[PARAM_MIN_P]);
    Cut cut = {key_of(-INFINITY), 0};
    // Not unrolled: one copy of the code for both filters.
#pragma unroll 1
    for (int filter = 0; filter < 2; filter++) {
        const bool asked = filter == 0 ? top_k > 0 && top_k < VOCAB : top_p < 1.0f;
        if (asked) cut = select_top(row, inverse, maximum, cut, filter == 0 ? top_k : 0, top_p, s);
    }
    const float floor = min_p > 0.0f ? maximum + logf(min_p) : -INFINITY;
    if (threadIdx.x == 0 && row.params[PARAM_SAMPLED_LOGPROBS]) kept = {cut, inverse, floor};
    const u64 tie_mass = value_of(cut.key) >= floor ? mass_of(value_of(cut.key), maximum, false) : 0;
    const u32 lane = threadIdx.x % 32;
    // Mass above the cut, by chunks of consecutive tokens; the number of ties with the cut is in the top bits.
    const u64 one_tie = 1ull << 52, mass_bits = one_tie - 1;
    const auto packed = [&](float l) {
        const u32 key = key_of(l);
        return key == cut.key ? one_tie : key > cut.key && l >= floor ? mass_of(l, maximum, false) : 0;
    };
#pragma unroll 1
    for (u32 chunk = threadIdx.x / 32; chunk < CHUNKS; chunk += WARPS) {
        u64 sum = 0;
#pragma unroll 1
        for (u32 i = chunk * CHUNK + lane * 8; i < (chunk + 1) * CHUNK; i += 256) {
            if (ALIGNED && row.plain && i + 8 <= VOCAB) {
                float v[8];
                load8<XT>(row.logits, row.base + i, v);
#pragma unroll
                for (int t = 0; t < 8; t++) sum += packed(v[t] * inverse);
            } else
#pragma unroll 1
                for (u32 t = i; t < min(i + 8, (u32)VOCAB); t++) sum += packed(adjusted(row, t) * inverse);
        }
#pragma unroll
        for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(FULL, sum, o);
        if (lane == 0) s.bins[chunk] = sum;
    }
    if (threadIdx.x == 0) s.found = CHUNKS;
    __syncthreads();
    const u32 own = threadIdx.x * (BINS / THREADS);
    u64 ties = 0, all;
    for (u32 c = own; c < own + BINS / THREADS && c < CHUNKS; c++) ties += s.bins[c] >> 52;
    u64 ties_before = block_prefix(ties, all, s);
    const auto kept_ties = [&](u64 from, u64 count) { return from < cut.ties ? min(cut.ties - from, count) : 0; };
    const auto chunk_mass = [&](u64 packed, u64 from) {
        return (packed & mass_bits) + kept_ties(from, packed >> 52) * tie_mass;
    };
    u64 mass = 0, at = ties_before;
    for (u32 c = own; c < own + BINS / THREADS && c < CHUNKS; c++) {
        mass += chunk_mass(s.bins[c], at);
        at += s.bins[c] >> 52;
    }
    u64 total, before = block_prefix(mass, total, s);
    const u32 word = philox(counter, row.params[PARAM_SEED_LO], row.params[PARAM_SEED_HI]);
    const double u = (double)((float)(word >> 8) * 5.9604644775390625e-08f + 2.98023223876953125e-08f);
    const u64 goal = (u64)(u * (double)total);
    if (goal >= before && goal < before + mass)
        for (u32 c = own; c < own + BINS / THREADS && c < CHUNKS; c++) {
            const u64 here = chunk_mass(s.bins[c], ties_before);
            if (goal >= before && goal < before + here) {
                s.found = c;
                s.target = goal - before;
                s.ties = ties_before;
            }
            before += here;
            ties_before += s.bins[c] >> 52;
        }
    __syncthreads();
    const u32 chunk = s.found;
    if (threadIdx.x == 0) s.members = best.index;
    __syncthreads();
    if (chunk < CHUNKS && threadIdx.x < 32) {
        u64 left = s.target, rank = s.ties;
#pragma unroll 1
        for (u32 i = chunk * CHUNK; i < (chunk + 1) * CHUNK; i += 32) {
            const u32 token = i + lane;
            const float l = token < VOCAB ? adjusted(row, token) * inverse : -INFINITY;
            const u32 key = key_of(l);
            const u32 tied = __ballot_sync(FULL, token < VOCAB && key == cut.key);
            const bool first = rank + __popc(tied & ((1u << lane) - 1)) < cut.ties;
            const bool keep = (key > cut.key || (key == cut.key && first)) && l >= floor && token < VOCAB;
            const u64 mass = keep ? mass_of(l, maximum, false) : 0;
            u64 sum = mass;
#pragma unroll
            for (u32 o = 1; o < 32; o *= 2) {
                const u64 other = __shfl_up_sync(FULL, sum, o);
                if (lane >= o) sum += other;
            }
            if (left >= sum - mass && left < sum) s.members = token;
            const u64 group = __shfl_sync(FULL, sum, 31);
            if (left < group) break;
            left -= group;
            rank += __popc(tied);
        }
    }
    __syncthreads();
    return s.members;
}

// Log-probabilities of the chosen token and of the likeliest, into the row's ring words. `kept` is read again for
// every token, and the function is called, not inlined: registers are few.
__device__ __noinline__ void report(const Row& row, Best best, u32 token, u32 wanted, const volatile Kept& kept, volatile u32* ring_row,
                   Select& s) {
    const auto maximum = [&] { return best.value * kept.inverse; };
    float own = 0.0f;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < VOCAB; i += THREADS) {
        const float l = adjusted(row, i) * kept.inverse;
        const u32 key = key_of(l);
        if (key > kept.cut.key && l >= kept.floor) own += expf(l - maximum());
    }
    const float together = warp_sum(own);
    float* part = (float*)s.bins;
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = together;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll 1
    for (int w = 0; w < WARPS; w++) sum += part[w];
    // Tokens without mass count as any number of ties.
    const float edge = value_of(kept.cut.key);
    if (kept.cut.ties && edge >= kept.floor) sum += fminf((float)kept.cut.ties, (float)VOCAB) * expf(edge - maximum());
    const float log_total = maximum() + logf(sum);
    const auto logprob = [&](float l) { return __float_as_uint(l * kept.inverse - log_total); };
    if (threadIdx.x == 0) ring_row[2] = logprob(adjusted(row, token));
    Best previous = {INFINITY, 0};
    // The likeliest tokens are kept, up to some place in their order.
    u32 listed = 0;
    for (u32 a = 0; a < wanted && a < MAX_TOP; a++) {
        Best next = {-INFINITY, VOCAB};
        for (u32 i = threadIdx.x; i < VOCAB; i += THREADS) {
            const Best here = {adjusted(row, i), i};
            const bool after = a == 0 || here.value < previous.value || (here.value == previous.value && i > previous.index);
            if (after) next = better(next, here);
        }
        previous = block_best(next, s.best);
        if (threadIdx.x == 0) {
            const float l = previous.value * kept.inverse;
            const u32 key = key_of(l);
            const bool above = key > kept.cut.key || (key == kept.cut.key && listed++ < kept.cut.ties);
            ring_row[4 + 2 * a] = previous.index;
            ring_row[5 + 2 * a] = above && l >= kept.floor ? logprob(previous.value) : __float_as_uint(-INFINITY);
        }
    }
}

#ifdef Q_LEN
// Accepts a row's drafts as long as they agree with what was chosen, advances its seat by the tokens it returns, and
// writes them to their places in the ring. Only this thread touches the row and its seat.
DEVICE void accept(u32 r, u32* entry, u32* seat_len, u32* seat_token, const u32* params, u32* seen, u32* counts,
                   const u32* row_seat, const u32* row_flags, const u32* row_q_len, u32* history, const u32* fed,
                   const u32* row_drafts, const u32* chosen) {
    const u32 seat = row_seat[r], length = seat_len[seat], drafted = row_drafts[r], forced = row_flags[r] >> ROW_FORCED;
    volatile u32* place = entry + RING_HEADER_WORDS + (u64)r * RING_ROW_WORDS;
    if (!(row_flags[r] & ROW_SAMPLE)) {
        seat_len[seat] = length + row_q_len[r];
        place[0] = place[1] = place[3] = 0;
        return;
    }
    const u32* own = params + (u64)seat * PARAM_WORDS;
    const u32 stop_count = min(own[PARAM_STOPS], (u32)MAX_STOPS);
    u32 count = 0, token;
    bool accepted;
    do {
        token = __ldcg(chosen + r * Q_LEN + count);
        u32 bits = RING_SAMPLED | (own[PARAM_LOGPROBS] ? RING_LOGPROBS : 0);
        for (u32 i = 0; i < stop_count; i++)
            if (own[PARAM_STOP + i] == token) bits |= RING_STOPPED;
        if (seen && own[PARAM_PENALISED]) {
            u32* counted = seen + (u64)seat * VOCAB + token;
            *counted = (*counted + 1) | 0x80000000u;
        }
        const u32 position = length + count + 1;
        if (position < CONTEXT) history[(u64)seat * CONTEXT + position] = token;
        place[0] = token;
        place[1] = bits;
        place[3] = count ? 0 : drafted;
        place += RING_PLACE_WORDS;
        count++;
        accepted = count <= drafted && !(bits & RING_STOPPED) && (fed[r * Q_LEN + count] == token || count <= forced);
#if REPEATS
        // A repeating launch stops here; every row that stops writes the same value.
        if (bits & RING_STOPPED) counts[COUNT_LEFT] = 0;
#endif
    } while (accepted);
    seat_len[seat] = length + count;
    seat_token[seat] = token;
    if (count * RING_PLACE_WORDS < RING_ROW_WORDS) place[1] = 0; // the row's list ends here
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
sample(const void* logits, u32* seat_len, u32* seat_token, const u32* params, const u32* biases, u32* seen,
       u32* counts, const u32* row_seat, const u32* row_flags, const u32* row_q_len, const u32* mail0,
       const u32* mail1, u32* ring, u32* semaphores, Best* partial, u32 stride HISTORY_ARGUMENT DRAFT_ARGUMENTS) {
    __shared__ Select s;
    __shared__ u32 order;
    __shared__ Kept kept;
    __shared__ Row held; // in shared memory, which leaves registers for the sums
    extern __shared__ u32 marked[];
    // `at` is a row of logits, `r` its row of the step.
    const u32 at = blockIdx.y, part = blockIdx.x;
#ifdef Q_LEN
    const u32 r = at / Q_LEN, before = at % Q_LEN;
#else
    const u32 r = at;
#endif
    // All of this was written by the prologue or earlier, so it is loaded before the wait for the logits.
    const u32 rows = __ldcg(counts + COUNT_ROWS);
    const u64 launch = (u64)__ldcg(counts + COUNT_LAUNCH_HI) << 32 | __ldcg(counts + COUNT_LAUNCH_LO);
    u32* entry = ring + (u64)(launch % RING_ENTRIES) * RING_ENTRY_WORDS;
    const u32 flags = r < rows ? __ldcg(row_flags + r) : 0;
#ifdef Q_LEN
    const u32 drafted = r < rows ? __ldcg(row_drafts + r) : 0;
    const bool sampled = flags & ROW_SAMPLE && before <= drafted;
#else
    const bool sampled = flags & ROW_SAMPLE;
#endif
    u32 seat = SEATS, length = 0;
    Row row;
    if (r < rows) {
        seat = __ldcg(row_seat + r);
#ifdef Q_LEN
        length = __ldcg(seat_len + seat) + before + 1;
#else
        length = __ldcg(seat_len + seat) + __ldcg(row_q_len + r);
#endif
        row.logits = logits;
        row.base = (u64)at * stride;
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
    if (rows == 0 && at == 0 && part == 0 && threadIdx.x == 0) {
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
#ifdef Q_LEN
            if (threadIdx.x < before) earlier[threadIdx.x] = fed[r * Q_LEN + 1 + threadIdx.x];
            if (threadIdx.x == before) earlier[Q_LEN] = before;
#endif
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
            partial[at * PARTS + part] = best;
            order = add_acquire_release(&semaphores[at + 1], 1);
        }
        __syncthreads();
        if (order != PARTS - 1) return;
        if (threadIdx.x == 0) semaphores[at + 1] = 0;
        best.value = -INFINITY;
        best.index = VOCAB;
        if (sampled)
            for (u32 p = threadIdx.x; p < PARTS; p += THREADS) {
                Best other;
                other.value = __ldcg(&partial[at * PARTS + p].value);
                other.index = __ldcg(&partial[at * PARTS + p].index);
                best = better(best, other);
            }
        best = block_best(best, s.best);
    }
    volatile u32* ring_row = entry + RING_HEADER_WORDS + (u64)r * RING_ROW_WORDS;
#ifdef Q_LEN
    ring_row += before * RING_PLACE_WORDS;
#endif
    u32 token = best.index < VOCAB ? best.index : 0, wanted = 0;
    if (sampled) {
        if (threadIdx.x == 0) held = row, kept = {{key_of(-INFINITY), 0}, 1.0f, -INFINITY};
        __syncthreads();
        const bool drawn = as_float(held.params[PARAM_TEMPERATURE]) > 0.0f && best.index < VOCAB;
        if (drawn) token = draw(held, best, length, kept, s);
        wanted = held.params[PARAM_LOGPROBS];
        if (wanted) report(held, best, token, wanted - 1, kept, ring_row, s);
    }
#ifdef Q_LEN
    if (threadIdx.x == 0) {
        chosen[at] = token;
        order = add_acquire_release(&semaphores[0], 1);
    }
    __syncthreads();
    if (order != rows * Q_LEN - 1) return;
    for (u32 row = threadIdx.x; row < rows; row += THREADS)
        accept(row, entry, seat_len, seat_token, params, seen, counts, row_seat, row_flags, row_q_len, history, fed,
               row_drafts, chosen);
    __syncthreads();
    if (threadIdx.x == 0) {
        semaphores[0] = 0;
        entry[RING_ROWS] = rows;
#if REPEATS
        entry[RING_AGAIN] = counts[COUNT_AGAIN] = counts[COUNT_LEFT] ? REPEAT_NEXT : REPEAT_DONE;
#endif
        store_release_system((u64*)entry, launch);
    }
#else
    if (threadIdx.x == 0) {
        u32 bits = sampled ? RING_SAMPLED : 0;
        seat_len[seat] = length;
        if (sampled) {
            seat_token[seat] = token;
#ifdef HISTORY
            if (length < CONTEXT) history[(u64)seat * CONTEXT + length] = token;
#endif
            if (held.seen) {
                u32* count = seen + (u64)seat * VOCAB + token;
                *count = (*count + 1) | 0x80000000u;
            }
            for (u32 i = 0; i < held.stop_count; i++)
                if (held.params[PARAM_STOP + i] == token) bits |= RING_STOPPED;
#if REPEATS
            // A repeating launch stops here; every row that stops writes the same value.
            if (bits & RING_STOPPED) counts[COUNT_LEFT] = 0;
#endif
            if (wanted) bits |= RING_LOGPROBS;
        }
        ring_row[0] = sampled ? token : 0;
        ring_row[1] = bits;
#ifdef HISTORY
        ring_row[3] = 0;
        if (sampled) ring_row[RING_PLACE_WORDS + 1] = 0; // the row's list ends here
#endif
        // A row's words are released to the GPU by its arrival; the last arrival acquires them and releases all of
        // them to the host: one round trip, whatever the number of rows.
        if (rows == 1 || add_acquire_release(&semaphores[0], 1) == rows - 1) {
            if (rows > 1) semaphores[0] = 0;
            entry[RING_ROWS] = rows;
#if REPEATS
            entry[RING_AGAIN] = counts[COUNT_AGAIN] = __ldcg(&counts[COUNT_LEFT]) ? REPEAT_NEXT : REPEAT_DONE;
#endif
            store_release_system((u64*)entry, launch);
        }
    }
#endif
}
