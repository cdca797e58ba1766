// Starts a step: applies the mail, derives the step's tables. One block.
// The layout of records comes as macros: see `cuda.rs` beside the op.
#include "fed.cuh"

#define THREADS 1024
// A step without input blocks: the usual case.
#define PLAIN (!GIVEN)
// With a history (the tokens of each sequence are kept, for drafts) there are more arguments.
#ifdef HISTORY
#define HISTORY_ARGUMENT , u32* history, u32* settled, u32* row_replay
#define HISTORY_PASSED , history, settled, row_replay
#else
#define HISTORY_ARGUMENT
#define HISTORY_PASSED
#endif

// A row's KV length after `q_len` more tokens; 0 if its page table is too short.
DEVICE u32 held(u32 length, u32 q_len) { return length <= CONTEXT && q_len <= CONTEXT - length ? length + q_len : 0; }

#ifdef HISTORY
// Accepted drafts before a row's tokens that its seat's recurrent states take from their logs. `fed` more tokens are in the states
// after this step: none of a row that sees nothing.
DEVICE u32 replay(u32* settled, u32 seat, u32 length, u32 fed) {
    const u32 done = settled[seat];
    if (fed) settled[seat] = length + fed;
    return min(length - min(done, length), (u32)MOST_DRAFTS);
}
#endif

// Exclusive sum of one value per thread; the total in `total`.
DEVICE u32 scan(u32 v, u32* shared, u32& total) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 sum = v;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        const u32 other = __shfl_up_sync(FULL, sum, o);
        if (lane >= o) sum += other;
    }
    if (lane == 31) shared[warp] = sum;
    __syncthreads();
    u32 before = 0;
    total = 0;
    for (u32 w = 0; w < THREADS / 32; w++) {
        if (w < warp) before += shared[w];
        total += shared[w];
    }
    __syncthreads();
    return before + sum - v;
}

// Room in shared memory for what is needed of each join later: its seat, its tokens in the history, whether it has penalties.
struct Joined {
    u32 *seat, *told, *penalised;
};

DEVICE void apply_mail(const volatile u32* mail, Joined joined, u32* seat_len, u32* seat_token, u32* page_table, u32* params,
                       u32* biases, u32* seen, u32* counts, u32* row_seat, u32* row_flags, u32* row_q_len, u32 bucket,
                       u32 page_count HISTORY_ARGUMENT) {
    const u32 tid = threadIdx.x;
#ifdef HISTORY
    u32 told = 0;
#endif
    const u32 joins = min(mail[MAIL_JOINS], ROWS_LIMIT), pages = min(mail[MAIL_PAGES], PAGES_CAP);
    const u32 bias_count = min(mail[MAIL_BIASES], BIASES_CAP), seen_count = min(mail[MAIL_SEEN], SEEN_CAP);
    // A warp for each: host memory is far away, and a join is one round trip.
    for (u32 j = tid / 32; j < joins; j += THREADS / 32) {
        const volatile u32* join = mail + AREA_JOINS + j * JOIN_WORDS;
        const u32 lane = tid % 32, seat = join[0], length = join[1], last = join[2], tells = join[3];
        u32 own[(PARAM_WORDS + 31) / 32];
#pragma unroll
        for (u32 i = 0; i < (PARAM_WORDS + 31) / 32; i++) own[i] = join[4 + min(lane + 32 * i, PARAM_WORDS - 1u)];
        if (lane == PARAM_PENALISED % 32) joined.seat[j] = seat, joined.told[j] = tells, joined.penalised[j] = own[PARAM_PENALISED / 32];
        if (seat >= SEATS) continue;
        if (lane == 0) seat_len[seat] = length, seat_token[seat] = last;
#ifdef HISTORY
        if (lane == 0) settled[seat] = length;
#endif
#pragma unroll
        for (u32 i = 0; i < (PARAM_WORDS + 31) / 32; i++)
            if (lane + 32 * i < PARAM_WORDS) params[seat * PARAM_WORDS + lane + 32 * i] = own[i];
#pragma unroll 1
        for (u32 table = 0; table < TABLES; table++)
            for (u32 i = lane; i < PAGES_PER_SEAT; i += 32) page_table[(u64)table * TABLE_WORDS + (u64)seat * PAGES_PER_SEAT + i] = 0;
    }
    __syncthreads();
    for (u32 j = 0; j < joins; j++) {
        const u32 seat = joined.seat[j];
#ifdef HISTORY
        const u32 from = told, count = min(joined.told[j], (u32)HISTORY_CAP - told);
        told += count;
#endif
        if (seat >= SEATS) continue;
#ifdef HISTORY
        for (u32 i = tid; i < min(count, (u32)CONTEXT); i += THREADS)
            history[(u64)seat * CONTEXT + i] = mail[AREA_HISTORY + from + i];
#endif
        if (seen && joined.penalised[j])
            for (u32 i = tid; i < VOCAB; i += THREADS) seen[(u64)seat * VOCAB + i] = 0;
    }
    __syncthreads();
    for (u32 i = tid; i < pages; i += THREADS) {
        const volatile u32* entry = mail + AREA_PAGES + 3 * i;
        const u32 seat = entry[0], index = entry[1], page = entry[2];
        // The entries of table t begin at t · PAGES_PER_SEAT.
        const u32 table = TABLES == 1 ? 0 : index / PAGES_PER_SEAT, at = index - table * PAGES_PER_SEAT;
        if (seat < SEATS && table < TABLES && at < PAGES_PER_SEAT)
            page_table[(u64)table * TABLE_WORDS + (u64)seat * PAGES_PER_SEAT + at] = page < page_count ? page : 0;
    }
    for (u32 i = tid; i < bias_count; i += THREADS) {
        const volatile u32* entry = mail + AREA_BIASES + 4 * i;
        const u32 seat = entry[0], index = entry[1];
        if (seat < SEATS && index < MAX_BIASES) {
            u32* to = biases + ((u64)seat * MAX_BIASES + index) * 2;
            to[0] = entry[2];
            to[1] = entry[3];
        }
    }
    if (seen)
        for (u32 i = tid; i < seen_count; i += THREADS) {
            const volatile u32* entry = mail + AREA_SEEN + 3 * i;
            const u32 seat = entry[0], counted = entry[1];
            if (seat >= SEATS || counted >= VOCAB) continue;
            u32* to = seen + (u64)seat * VOCAB + counted;
            atomicOr(to, 0x80000000u);
            if (entry[2]) atomicAdd(to, 1);
        }
#if REPEATS
    if (tid == 0 && mail[MAIL_STEPS]) counts[COUNT_STEPS] = mail[MAIL_STEPS];
#endif
    if (mail[MAIL_ROWS_CHANGED]) {
        const u32 rows = min(mail[MAIL_ROWS], bucket);
        for (u32 r = tid; r < rows; r += THREADS) {
            const volatile u32* entry = mail + AREA_ROWS + 3 * r;
            row_seat[r] = min(entry[0], SEATS);
            row_q_len[r] = entry[1];
            row_flags[r] = entry[2];
        }
        if (tid == 0) counts[COUNT_ROWS] = rows;
    }
    __syncthreads();
}

#if GIVEN
// Copies the rows, and the state of their seats, from the block that the host prepared.
DEVICE void adopt(const u32* given, u32* seat_len, u32* seat_token, u32* page_table, u32* params, u32* counts,
                  u32* row_seat, u32* row_flags, u32* row_q_len, u32 bucket, u32 page_count) {
    const u32 tid = threadIdx.x, rows = min(given[INPUT_ROWS], bucket), width = min(given[INPUT_WIDTH], PAGES_PER_SEAT);
    for (u32 r = tid; r < rows; r += THREADS) {
        const u32* entry = given + INPUT_ROWS_AT + INPUT_ROW_WORDS * r;
        const u32 seat = min(entry[0], SEATS), length = given[INPUT_LENGTHS_AT + r], known = given[INPUT_TOKENS_AT + r];
        row_seat[r] = seat;
        row_flags[r] = entry[1];
        row_q_len[r] = 1;
        seat_len[seat] = length - (length ? 1 : 0);
        if (known != FULL) seat_token[seat] = known;
    }
    for (u32 i = tid; i < rows * PARAM_WORDS; i += THREADS) {
        const u32 seat = min(given[INPUT_ROWS_AT + INPUT_ROW_WORDS * (i / PARAM_WORDS)], SEATS);
        params[seat * PARAM_WORDS + i % PARAM_WORDS] = given[INPUT_PARAMS_AT + i];
    }
    for (u32 i = tid; i < rows * width; i += THREADS) {
        const u32 seat = min(given[INPUT_ROWS_AT + INPUT_ROW_WORDS * (i / width)], SEATS);
        const u32 page = given[INPUT_PAGES_AT + i];
        page_table[(u64)seat * PAGES_PER_SEAT + i % width] = page < page_count ? page : 0;
    }
    if (tid == 0) counts[COUNT_ROWS] = rows;
    __syncthreads();
}
#endif

// The inputs of a row.
struct Entry {
    u32 q_len, flags, seat, length, token, page, next_page;
};

// Loads of a row that depend only on the tables; `page` is where its next token goes, `next_page` where the token
// after it goes, in launches that repeat.
DEVICE Entry entry_of(u32 r, u32 rows, const u32* row_seat, const u32* row_flags, const u32* row_q_len,
                      const u32* seat_len, const u32* seat_token, const u32* page_table) {
    Entry e = {0, 0, SEATS, 0, 0, 0, 0};
    if (r < rows) e.q_len = row_q_len[r], e.flags = row_flags[r], e.seat = min(row_seat[r], (u32)SEATS);
    e.length = seat_len[e.seat];
    e.token = seat_token[e.seat];
    const u32* pages = page_table + (u64)e.seat * PAGES_PER_SEAT;
    if (e.length / PAGE < PAGES_PER_SEAT) e.page = pages[e.length / PAGE];
#if REPEATS
    if ((e.length + 1) / PAGE < PAGES_PER_SEAT) e.next_page = pages[(e.length + 1) / PAGE];
#endif
    return e;
}

// Where a token goes in the tables after the first; `seat` is SEATS for a pad token.
DEVICE void write_slots(u32* kv_slot, const u32* page_table, u32 t, u32 seat, u32 at) {
#pragma unroll 1
    for (u32 table = 1; table < TABLES; table++) {
        const u32* pages = page_table + (u64)table * TABLE_WORDS + (u64)seat * PAGES_PER_SEAT;
        const u32 page = seat < SEATS && at / PAGE < PAGES_PER_SEAT ? pages[at / PAGE] : 0;
        kv_slot[(u64)table * SLOT_WORDS + t] = seat < SEATS ? page * PAGE + at % PAGE : t % PAGE;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
prologue(u32* seat_len, u32* seat_token, u32* page_table, u32* params, u32* biases, u32* seen, u32* counts,
         u32* row_seat, u32* row_flags, u32* row_q_len, u32* q_start, u32* kv_len, u32* last_index, u32* token,
         u32* position, u32* kv_slot, u32* token_row, const u32* mail0, const u32* mail1, const u32* leave,
         const u32* given0, const u32* given1, u32 bucket_rows, u32 bucket_tokens, u32 ways,
         u32 page_count HISTORY_ARGUMENT) {
    __shared__ u32 shared[THREADS / 32], sums[THREADS / 32];
    __shared__ u64 shared_launch[2];
#if REPEATS
    // Whether this is the first or a later step of a repeating launch, how many more steps may follow, whether the
    // host asked it to stop; rows without a page for the next step.
    __shared__ u32 repeat, steps_left, asked, pageless;
#endif
    // The rows of this step: first token, KV length before it, seat, place in the mail's tokens.
    __shared__ u32 starts[ROWS_LIMIT + 1], lengths[ROWS_LIMIT], seats[ROWS_LIMIT], prompts[ROWS_LIMIT];
    const u32 tid = threadIdx.x;
    wait_for_predecessor();
    // The round trip to host memory takes longest in this kernel. Everything there is requested at once, and
    // meanwhile every thread loads its row from the current tables: a step without mail then has everything it needs.
    // (The last warp makes the requests: it seldom has a row to wait for.)
    if (tid == THREADS - 32) {
        const u64 first = load_relaxed_system((const u64*)mail0), second = load_relaxed_system((const u64*)mail1);
#if REPEATS
        const u32 leaving = *(const volatile u32*)leave, again = counts[COUNT_AGAIN];
        const u32 most = counts[COUNT_STEPS], left = counts[COUNT_LEFT];
        u32 base = counts[COUNT_BASE];
#endif
        const u64 launch = ((u64)counts[COUNT_LAUNCH_HI] << 32 | counts[COUNT_LAUNCH_LO]) + 1;
        counts[COUNT_LAUNCH_LO] = (u32)launch;
        counts[COUNT_LAUNCH_HI] = (u32)(launch >> 32);
        shared_launch[0] = launch;
        shared_launch[1] = launch & 1 ? second : first;
#if REPEATS
        if (again != REPEAT_NEXT) counts[COUNT_BASE] = base = (u32)launch;
        repeat = again;
        steps_left = again == REPEAT_FIRST ? most : again == REPEAT_NEXT ? left : 0;
        asked = leaving == base;
        pageless = 0;
#endif
    }
    u32 rows = min(counts[COUNT_ROWS], bucket_rows);
#if PLAIN
    Entry own = entry_of(tid, min(rows, (u32)THREADS), row_seat, row_flags, row_q_len, seat_len, seat_token, page_table);
#endif
    __syncthreads();
    const bool mailed = shared_launch[0] == shared_launch[1];
    const volatile u32* mail = shared_launch[0] & 1 ? mail1 : mail0;
    if (mailed) {
        __threadfence_system();
        // These tables are filled below.
        apply_mail(mail, {starts, lengths, seats}, seat_len, seat_token, page_table, params, biases, seen, counts, row_seat,
                   row_flags, row_q_len, bucket_rows, page_count HISTORY_PASSED);
        rows = min(counts[COUNT_ROWS], bucket_rows);
#if PLAIN
        own = entry_of(tid, min(rows, (u32)THREADS), row_seat, row_flags, row_q_len, seat_len, seat_token, page_table);
#endif
    }
#if GIVEN
    const u32* given = shared_launch[0] & 1 ? given1 : given0;
    adopt(given, seat_len, seat_token, page_table, params, counts, row_seat, row_flags, row_q_len, bucket_rows, page_count);
    rows = min(counts[COUNT_ROWS], bucket_rows);
#endif
#if REPEATS
    // Steps this launch may run after this one. The mail's number counts only for the first step of a launch.
    u32 left = mailed && repeat == REPEAT_FIRST ? counts[COUNT_STEPS] : steps_left;
    left = left && !asked ? left - 1 : 0;
#endif

#if PLAIN
    // Decode: one token per row, so token and row are the same and no search is needed.
    const bool plain = tid >= rows || (own.q_len == 1 && !(own.flags & ROW_PROMPT));
    if (__syncthreads_and(plain && bucket_rows <= THREADS && rows <= bucket_tokens)) {
        const bool live = tid < rows;
        if (tid < bucket_rows) {
            q_start[tid] = min(tid, rows);
            kv_len[tid] = live ? held(own.length, 1) : 0;
            last_index[tid] = live ? tid : 0;
            if (!live) row_seat[tid] = SEATS, row_flags[tid] = 0, row_q_len[tid] = 0;
#ifdef HISTORY
            row_replay[tid] = live ? replay(settled, own.seat, own.length, held(own.length, 1) ? 1 : 0) : 0;
#endif
        }
        for (u32 t = tid; t < bucket_tokens; t += THREADS) {
            const bool fed = t < rows;
            token[t] = fed ? own.token : 0;
            position[t] = fed ? own.length : 0;
            kv_slot[t] = fed ? own.page * PAGE + own.length % PAGE : t % PAGE;
            write_slots(kv_slot, page_table, t, fed ? own.seat : SEATS, own.length);
            token_row[t] = fed ? t : ROWS_LIMIT;
#ifdef HISTORY
            if (fed && own.length < CONTEXT) history[(u64)own.seat * CONTEXT + own.length] = own.token;
#endif
        }
        u32 longest = live ? held(own.length, 1) : 0, pages = (longest + PAGE - 1) / PAGE;
#if REPEATS
        // Several rows may store the same value here; `fed_totals` waits for all of them.
        if (live && !own.next_page) pageless = 1;
#endif
        fed_totals(longest, pages, shared, sums);
        if (tid == 0) {
            q_start[bucket_rows] = rows;
            fed_counts(counts, rows, rows, longest, pages, ways);
#if REPEATS
            counts[COUNT_LEFT] = pageless ? 0 : left;
#endif
        }
        __threadfence();
        __syncthreads();
        let_successor_start();
        return;
    }
#endif

    // Rows, THREADS at a time.
    u32 tokens = 0, prompt_tokens = 0, longest = 0, pages = 0;
    for (u32 base = 0; base < bucket_rows; base += THREADS) {
        const u32 r = base + tid;
        u32 q_len = 0, flags = 0, seat = SEATS;
        if (r < rows) q_len = row_q_len[r], flags = row_flags[r], seat = min(row_seat[r], (u32)SEATS);
        if (q_len > bucket_tokens) q_len = bucket_tokens;
        u32 total, prompt_total;
        const u32 start = tokens + scan(q_len, shared, total);
        const u32 prompt = prompt_tokens + scan(flags & ROW_PROMPT ? q_len : 0, shared, prompt_total);
        if (r < bucket_rows) {
            const u32 clamped = min(start, bucket_tokens), length = seat_len[seat];
            if (start + q_len > bucket_tokens) q_len = bucket_tokens - clamped;
            starts[r] = clamped;
            seats[r] = seat;
            lengths[r] = length;
            prompts[r] = mailed && flags & ROW_PROMPT ? prompt : FULL;
            q_start[r] = clamped;
            if (r < rows) {
                const u32 total_length = held(length, q_len);
#if REPEATS
                if (left) {
                    // Several rows may store the same value here.
                    const u32 next = total_length ? total_length / PAGE : PAGES_PER_SEAT;
                    if (next >= PAGES_PER_SEAT || !page_table[(u64)seat * PAGES_PER_SEAT + next]) pageless = 1;
                }
#endif
                kv_len[r] = total_length;
#ifdef HISTORY
                // Of a row with drafts only the first token is certain to stay.
                const u32 stay = flags & ROW_PROMPT ? q_len : min(q_len, 1u);
                row_replay[r] = replay(settled, seat, length, total_length ? stay : 0);
#endif
                last_index[r] = clamped + q_len - (q_len ? 1 : 0);
                longest = max(longest, total_length);
                pages += (total_length + PAGE - 1) / PAGE;
            } else {
                row_seat[r] = SEATS;
                row_flags[r] = 0;
                row_q_len[r] = 0;
                kv_len[r] = 0;
                last_index[r] = 0;
#ifdef HISTORY
                row_replay[r] = 0;
#endif
            }
        }
        tokens += total;
        prompt_tokens += prompt_total;
    }
    tokens = min(tokens, bucket_tokens);
    if (tid == 0) starts[bucket_rows] = tokens;
    for (u32 r = rows + tid; r <= bucket_rows; r += THREADS) q_start[r] = tokens;
    fed_totals(longest, pages, shared, sums);
    if (tid == 0) {
        fed_counts(counts, rows, tokens, longest, pages, ways);
#if REPEATS
        counts[COUNT_LEFT] = pageless ? 0 : left;
#endif
    }
    for (u32 t = tid; t < bucket_tokens; t += THREADS) {
        if (t >= tokens) {
            token[t] = 0;
            position[t] = 0;
            kv_slot[t] = t % PAGE;
            write_slots(kv_slot, page_table, t, SEATS, 0);
            token_row[t] = ROWS_LIMIT;
            continue;
        }
        // The last row that starts at or before t and is not empty: the last start ≤ t.
        u32 low = 0, high = rows;
        while (high - low > 1) {
            const u32 middle = (low + high) / 2;
            if (starts[middle] <= t) low = middle;
            else high = middle;
        }
        const u32 j = t - starts[low], at = lengths[low] + j, seat = seats[low];
        token[t] = prompts[low] != FULL ? mail[AREA_TOKENS + min(prompts[low] + j, TOKENS_LIMIT - 1)] : seat_token[seat];
#if GIVEN
        (void)at;
        position[t] = given[INPUT_POSITIONS_AT + t];
        const u32 slot = given[INPUT_ROWS_AT + INPUT_ROW_WORDS * t + 2];
        kv_slot[t] = slot / PAGE < page_count ? slot : t % PAGE;
#else
        const u32 page = at / PAGE < PAGES_PER_SEAT ? page_table[(u64)seat * PAGES_PER_SEAT + at / PAGE] : 0;
        position[t] = at;
        kv_slot[t] = page * PAGE + at % PAGE;
        write_slots(kv_slot, page_table, t, seat, at);
#endif
        token_row[t] = low;
#ifdef HISTORY
        if (at < CONTEXT) history[(u64)seat * CONTEXT + at] = token[t];
#endif
    }
    // Only now: attention kernels read these tables before they wait.
    __threadfence();
    __syncthreads();
    let_successor_start();
}
