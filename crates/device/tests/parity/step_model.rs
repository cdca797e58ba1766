//! Random launches of prologue and sampler against a simple model of the state: mail applied or absent, launches
//! counted, rows padded, slots derived, the ring published.

use crate::support::*;
use device::op::{Prologue, Sample};
use device::step::{JOIN_WORDS, PARAM_WORDS, count, mail, param, ring, row};
use device::{
    Arena, DType, Device, Graph, Item, Node, Op, OpenArena, RecordOptions, Region, Span,
    StepLimits, StepState, Tensor,
};

/// Number of pages; mail also names pages past the end.
const PAGES: u32 = 151;

const LIMITS: StepLimits = StepLimits {
    seats: 5,
    rows: 4,
    tokens: 24,
    pages_per_seat: 6,
    page_size: 8,
    vocab: 64,
    penalties: true,
    tokens_per_row: 1,
    tables: 1,
};
const BUCKETS: [(u32, u32); 3] = [(1, 1), (3, 3), (4, 24)];

#[derive(Clone, Default)]
struct Seat {
    len: u32,
    token: u32,
    pages: Vec<u32>,
    stops: Vec<u32>,
    penalised: bool,
    seen: Vec<u32>,
}

#[derive(Clone, Copy)]
struct Row {
    seat: usize,
    q_len: u32,
    flags: u32,
}

/// The expected state of the device.
struct Model {
    launch: u64,
    seats: Vec<Seat>,
    rows: Vec<Row>,
}

/// The mail of a launch.
#[derive(Default)]
struct Mail {
    joins: Vec<(usize, Seat)>,
    pages: Vec<(usize, u32, u32)>,
    seen: Vec<(usize, u32, u32)>,
    rows: Option<Vec<Row>>,
    tokens: Vec<u32>,
}

impl Mail {
    fn encode(&self, launch: u64) -> Vec<u32> {
        let areas = LIMITS.mail_layout();
        let mut bank = vec![0xDEAD_BEEF; areas.words as usize];
        bank[..mail::HEADER_WORDS as usize].fill(0);
        bank[mail::LAUNCH_LO as usize] = launch as u32;
        bank[mail::LAUNCH_HI as usize] = (launch >> 32) as u32;
        bank[mail::JOINS as usize] = self.joins.len() as u32;
        bank[mail::PAGES as usize] = self.pages.len() as u32;
        bank[mail::SEEN as usize] = self.seen.len() as u32;
        bank[mail::TOKENS as usize] = self.tokens.len() as u32;
        for (i, (seat, state)) in self.joins.iter().enumerate() {
            let at = areas.joins as usize + i * JOIN_WORDS as usize;
            bank[at..at + 4].copy_from_slice(&[*seat as u32, state.len, state.token, 0]);
            let params = &mut bank[at + 4..][..PARAM_WORDS as usize];
            params.fill(0);
            params[param::TOP_P as usize] = 1f32.to_bits();
            params[param::REPETITION as usize] = 1f32.to_bits();
            params[param::PENALISED as usize] = u32::from(state.penalised);
            params[param::STOPS as usize] = state.stops.len() as u32;
            for (i, stop) in state.stops.iter().enumerate() {
                params[param::STOP as usize + i] = *stop;
            }
        }
        for (i, (seat, index, page)) in self.pages.iter().enumerate() {
            let at = areas.pages as usize + 3 * i;
            bank[at..at + 3].copy_from_slice(&[*seat as u32, *index, *page]);
        }
        for (i, (seat, token, answer)) in self.seen.iter().enumerate() {
            let at = areas.seen as usize + 3 * i;
            bank[at..at + 3].copy_from_slice(&[*seat as u32, *token, *answer]);
        }
        if let Some(rows) = &self.rows {
            bank[mail::ROWS_CHANGED as usize] = 1;
            bank[mail::ROWS as usize] = rows.len() as u32;
            for (i, row) in rows.iter().enumerate() {
                let at = areas.rows as usize + 3 * i;
                bank[at..at + 3].copy_from_slice(&[row.seat as u32, row.q_len, row.flags]);
            }
        }
        let at = areas.tokens as usize;
        bank[at..at + self.tokens.len()].copy_from_slice(&self.tokens);
        bank
    }
}

/// Everything that the model predicts after a launch.
#[derive(Debug, PartialEq)]
struct Expected {
    token: Vec<u32>,
    position: Vec<u32>,
    kv_slot: Vec<u32>,
    token_row: Vec<u32>,
    q_start: Vec<u32>,
    kv_len: Vec<u32>,
    last_index: Vec<u32>,
    row_seat: Vec<u32>,
    row_flags: Vec<u32>,
    row_q_len: Vec<u32>,
    counts: Vec<u32>,
    seat_len: Vec<u32>,
    seat_token: Vec<u32>,
    page_table: Vec<u32>,
    seen: Vec<u32>,
    ring: Vec<u32>,
}

impl Model {
    fn new() -> Model {
        let seat = Seat {
            pages: vec![0; LIMITS.pages_per_seat as usize],
            seen: vec![0; LIMITS.vocab as usize],
            ..Seat::default()
        };
        Model { launch: 0, seats: vec![seat; LIMITS.seats as usize + 1], rows: Vec::new() }
    }

    fn receive(&mut self, mail: &Mail) {
        for (seat, state) in &mail.joins {
            let seen = std::mem::take(&mut self.seats[*seat].seen);
            self.seats[*seat] = state.clone();
            self.seats[*seat].pages = vec![0; LIMITS.pages_per_seat as usize];
            self.seats[*seat].seen =
                if state.penalised { vec![0; LIMITS.vocab as usize] } else { seen };
        }
        for (seat, index, page) in &mail.pages {
            self.seats[*seat].pages[*index as usize] = if *page < PAGES { *page } else { 0 };
        }
        for (seat, token, answer) in &mail.seen {
            let seen = &mut self.seats[*seat].seen[*token as usize];
            *seen = ((*seen & 0xffff) + answer) | (1 << 31);
        }
        if let Some(rows) = &mail.rows {
            self.rows = rows.clone();
        }
    }

    /// One launch over a bucket; `winners[r]` is the largest logit of row r.
    fn launch(&mut self, mail: Option<&Mail>, bucket: (u32, u32), winners: &[u32]) -> Expected {
        self.launch += 1;
        if let Some(mail) = mail {
            self.receive(mail);
        }
        let (rows, tokens) = (bucket.0 as usize, bucket.1 as usize);
        let size = LIMITS.page_size;
        let live = self.rows.len();
        let mut prompt = mail.map(|mail| mail.tokens.iter().copied()).into_iter().flatten();
        let (mut token, mut position, mut kv_slot, mut token_row) =
            (vec![], vec![], vec![], vec![]);
        let (mut q_start, mut kv_len, mut last_index) = (vec![], vec![], vec![]);
        for (r, row) in self.rows.iter().enumerate() {
            let seat = &self.seats[row.seat];
            q_start.push(token.len() as u32);
            for j in 0..row.q_len {
                let at = seat.len + j;
                let from_mail = row.flags & row::PROMPT != 0;
                let id = if from_mail { prompt.next().expect("a token") } else { seat.token };
                token.push(id);
                position.push(at);
                kv_slot.push(seat.pages[(at / size) as usize] * size + at % size);
                token_row.push(r as u32);
            }
            kv_len.push(seat.len + row.q_len);
            last_index.push(token.len() as u32 - 1);
        }
        let sent = token.len();
        q_start.resize(rows + 1, sent as u32);
        kv_len.resize(rows, 0);
        last_index.resize(rows, 0);
        for pad in sent..tokens {
            token.push(0);
            position.push(0);
            kv_slot.push(pad as u32 % size);
            token_row.push(LIMITS.rows);
        }
        let max_kv = kv_len.iter().copied().max().unwrap_or(0);
        let mut ring_words = vec![self.launch as u32, (self.launch >> 32) as u32, live as u32];
        for (r, row) in self.rows.iter().enumerate() {
            let seat = &mut self.seats[row.seat];
            seat.len += row.q_len;
            if row.flags & row::SAMPLE == 0 {
                ring_words.extend([0, 0]);
                continue;
            }
            let token = winners[r];
            seat.token = token;
            if seat.penalised {
                let seen = &mut seat.seen[token as usize];
                *seen = ((*seen & 0xffff) + 1) | (1 << 31);
            }
            let stopped = if seat.stops.contains(&token) { ring::STOPPED } else { 0 };
            ring_words.extend([token, ring::SAMPLED | stopped]);
        }
        let per_row = |f: &dyn Fn(&Row) -> u32, pad: u32| {
            let mut column: Vec<u32> = self.rows.iter().map(f).collect();
            column.resize(rows, pad);
            column
        };
        Expected {
            token,
            position,
            kv_slot,
            token_row,
            q_start,
            kv_len,
            last_index,
            row_seat: per_row(&|row| row.seat as u32, LIMITS.seats),
            row_flags: per_row(&|row| row.flags, 0),
            row_q_len: per_row(&|row| row.q_len, 0),
            counts: vec![self.launch as u32, 0, live as u32, sent as u32, max_kv],
            seat_len: self.seats.iter().map(|seat| seat.len).collect(),
            seat_token: self.seats.iter().map(|seat| seat.token).collect(),
            page_table: self.seats.iter().flat_map(|seat| seat.pages.clone()).collect(),
            seen: self.seats.iter().flat_map(|seat| seat.seen.clone()).collect(),
            ring: ring_words,
        }
    }
}

/// The device side: state, logits, and a graph per bucket.
struct Machine {
    device: Device,
    arena: Arena,
    state: StepState,
    logits: Span,
    graphs: Vec<Graph>,
}

impl Machine {
    fn new(device: Device) -> Machine {
        let mut open = OpenArena::new();
        let state =
            StepState::lay_out(LIMITS, |region, name, bytes| open.alloc(region, name, bytes))
                .expect("limits of a few rows");
        let bytes = u64::from(LIMITS.rows * LIMITS.vocab) * 4;
        let logits = open.alloc(Region::Workspace, "logits", bytes);
        let mut steps = BUCKETS.map(|(rows, tokens)| {
            let logits = Tensor::dense(logits, DType::F32, rows, LIMITS.vocab);
            [
                Op::Prologue(Prologue { state, rows, tokens, pages: PAGES, given: None }),
                Op::Sample(Sample { logits, state, scratch: None, rows, q_len: 1 }),
            ]
        });
        for ops in &mut steps {
            give_scratch(&device, &mut open, ops);
        }
        let arena = device.seal(open).expect("memory");
        let record = |ops: [Op; 2]| {
            let mut recording =
                device.record(&arena, "step", RecordOptions::default()).expect("idle");
            for op in ops {
                let node = Node { op, name: "step".into(), layer: None };
                recording.push(Item::Node(node)).expect("a valid op");
            }
            recording.finish().expect("a recording").remove(0)
        };
        let graphs = steps.map(record).into_iter().collect();
        Machine { device, arena, state, logits, graphs }
    }

    fn words(&self, span: Span) -> Vec<u32> {
        bytes_to_words(&self.device.read(&self.arena, span).expect("a read"))
    }

    fn front(&self, tensor: &Tensor, count: u32) -> Vec<u32> {
        self.words(tensor.span.part(0, u64::from(count) * 4))
    }

    fn launch(&self, launch: u64, mail: Option<&Mail>, bucket: usize, logits: &[f32]) -> Expected {
        if let Some(mail) = mail {
            let bank = self.state.mail[(launch % 2) as usize];
            let bytes = words_to_bytes(&mail.encode(launch));
            self.device.write(&self.arena, bank, &bytes).expect("a write");
        }
        let bytes = encode(DType::F32, logits);
        self.device.write(&self.arena, self.logits, &bytes).expect("a write");
        self.graphs[bucket].replay().expect("a replay");
        let (state, (rows, tokens)) = (&self.state, BUCKETS[bucket]);
        let entry_words = LIMITS.ring_entry_words() as u64;
        let at = launch % u64::from(ring::ENTRIES) * entry_words * 4;
        let entry = self.words(state.ring.part(at, entry_words * 4));
        let live = entry[ring::ROWS as usize];
        let mut ring_words = entry[..3].to_vec();
        for r in 0..live {
            let at = (ring::HEADER_WORDS + r * LIMITS.ring_row_words()) as usize;
            ring_words.extend(&entry[at..at + 2]);
        }
        Expected {
            token: self.front(&state.token, tokens),
            position: self.front(&state.position, tokens),
            kv_slot: self.front(&state.kv_slot, tokens),
            token_row: self.front(&state.token_row, tokens),
            q_start: self.front(&state.q_start, rows + 1),
            kv_len: self.front(&state.kv_len, rows),
            last_index: self.front(&state.last_index, rows),
            row_seat: self.front(&state.row_seat, rows),
            row_flags: self.front(&state.row_flags, rows),
            row_q_len: self.front(&state.row_q_len, rows),
            counts: self.front(&state.counts, count::MAX_KV + 1),
            seat_len: self.words(state.seat_len.span),
            seat_token: self.words(state.seat_token.span),
            page_table: self.words(state.page_table.span),
            seen: self.words(state.seen.expect("penalties").span),
            ring: ring_words,
        }
    }
}

/// Random mail that keeps the contract of the model: rows of different seats, tokens that fit.
fn random_mail(rng: &mut Rng, model: &Model) -> (Mail, usize) {
    let bucket = rng.below(BUCKETS.len());
    let (rows, tokens) = BUCKETS[bucket];
    let mut mail = Mail::default();
    let mut seats: Vec<usize> = (0..LIMITS.seats as usize).collect();
    for i in (1..seats.len()).rev() {
        seats.swap(i, rng.below(i + 1));
    }
    let mut left = tokens;
    let mut list = Vec::new();
    for seat in seats.into_iter().take(1 + rng.below(rows as usize)) {
        let others = rows - list.len() as u32 - 1;
        let q_len = if tokens == rows { 1 } else { 1 + rng.below(5) as u32 };
        if q_len + others > left {
            break;
        }
        left -= q_len;
        let room = LIMITS.pages_per_seat * LIMITS.page_size;
        let fresh = model.seats[seat].len + q_len + 8 > room || rng.below(4) == 0;
        let len = if fresh { rng.below(10) as u32 } else { model.seats[seat].len };
        if fresh {
            let stops = (0..rng.below(5)).map(|_| rng.below(64) as u32).collect();
            let token = rng.below(64) as u32;
            let penalised = rng.below(2) == 0;
            let state = Seat { len, token, stops, penalised, ..Seat::default() };
            mail.joins.push((seat, state));
        }
        for page in 0..=(len + q_len) / LIMITS.page_size {
            if fresh || rng.below(3) == 0 {
                mail.pages.push((seat, page, 1 + rng.below(200) as u32));
            }
        }
        if rng.below(3) == 0 {
            mail.seen.push((seat, rng.below(64) as u32, rng.below(2) as u32));
        }
        let prompt = q_len > 1 || rng.below(3) == 0;
        if prompt {
            mail.tokens.extend((0..q_len).map(|_| rng.below(64) as u32));
        }
        let flags = rng.pick(&[row::SAMPLE, row::SAMPLE, 0]) | if prompt { row::PROMPT } else { 0 };
        list.push(Row { seat, q_len, flags });
    }
    mail.rows = Some(list);
    (mail, bucket)
}

fn play(device: Device, seed: u64, launches: usize) {
    let machine = Machine::new(device);
    let mut model = Model::new();
    let rng = &mut Rng::new(seed);
    let mut last_bucket = 0;
    for _ in 0..launches {
        let logits = rng.floats((LIMITS.rows * LIMITS.vocab) as usize, 5.0);
        let winners: Vec<u32> = logits
            .chunks_exact(LIMITS.vocab as usize)
            .map(|row| {
                (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap_or(0) as u32
            })
            .collect();
        // Without mail the rows of the last step continue, one token each, while they have room.
        let steady = !model.rows.is_empty()
            && model.rows.iter().all(|row| {
                let room = LIMITS.pages_per_seat * LIMITS.page_size;
                row.flags & row::PROMPT == 0 && model.seats[row.seat].len + row.q_len < room
            });
        let (mail, bucket) = if steady && rng.below(2) == 0 {
            (None, last_bucket)
        } else {
            let (mail, bucket) = random_mail(rng, &model);
            (Some(mail), bucket)
        };
        let launch = model.launch + 1;
        let want = model.launch(mail.as_ref(), BUCKETS[bucket], &winners);
        let got = machine.launch(launch, mail.as_ref(), bucket, &logits);
        assert_eq!(want, got, "seed {seed}, launch {launch}");
        last_bucket = bucket;
    }
}

#[test]
fn random_launches_follow_the_model() {
    for seed in 0..8 {
        play(device::cpu::open(None, true).expect("a CPU"), seed, 120);
        for (_, device) in devices() {
            play(device, seed, 60);
        }
    }
}
