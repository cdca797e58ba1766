//! Seeded steps of any shape: what `graph verify`, the tests and the benchmarks feed a model with.
//! Sequences join, are fed prompts in chunks, decode, run full and start again; parameters, masks and
//! pages vary. The same seed gives the same steps.

use crate::mail::{JoinInput, PageInput, SeatParams, StepInput};
use device::StepLimits;

/// Random numbers: SplitMix64.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// From a seed.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In `0..below`.
    pub fn below(&mut self, below: u32) -> u32 {
        (((self.bits() >> 32) * u64::from(below)) >> 32) as u32
    }

    /// True once in `times`.
    pub fn once_in(&mut self, times: u32) -> bool {
        self.below(times) == 0
    }

    /// In `[0, 1)`.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Puts a list in random order.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for last in (1..list.len()).rev() {
            list.swap(last, self.below(last as u32 + 1) as usize);
        }
    }
}

/// See the module's words.
#[derive(Clone, Debug)]
pub struct Traffic {
    limits: StepLimits,
    rng: Rng,
    /// Tokens each seat has in its pages; `None` before its first join.
    lens: Vec<Option<u32>>,
    /// Pages in random order; seat s owns `pages[s * each ..][.. each]`.
    pages: Vec<u32>,
    each: u32,
}

impl Traffic {
    /// Traffic for a device with `pages` pages per layer, the scratch page included.
    ///
    /// # Panics
    /// If there is not a page for every seat.
    pub fn new(limits: StepLimits, pages: u32, seed: u64) -> Traffic {
        let mut rng = Rng::new(seed);
        let each = ((pages - 1) / limits.seats).min(limits.pages_per_seat);
        assert!(each > 0, "{pages} pages for {} seats", limits.seats);
        let mut pages: Vec<u32> = (1..pages).collect();
        rng.shuffle(&mut pages);
        Traffic { limits, rng, lens: vec![None; limits.seats as usize], pages, each }
    }

    /// Most tokens a step can feed.
    pub fn most_tokens(&self) -> u32 {
        let room = self.each * self.limits.page_size * self.limits.rows.min(self.limits.seats);
        self.limits.tokens.min(room)
    }

    /// Pages that hold live tokens, and how many of each page's slots do.
    pub fn live_pages(&self) -> Vec<(u32, u32)> {
        let mut live = Vec::new();
        for (seat, len) in self.lens.iter().enumerate() {
            let len = len.unwrap_or(0);
            for index in 0..len.div_ceil(self.limits.page_size) {
                let page = self.pages[seat * self.each as usize + index as usize];
                live.push((page, (len - index * self.limits.page_size).min(self.limits.page_size)));
            }
        }
        live
    }

    /// A decode step of `rows` sequences.
    pub fn decode(&mut self, rows: u32) -> StepInput {
        let seats = self.pick(rows);
        let mut input = StepInput::default();
        for seat in seats {
            self.feed(&mut input, seat, 1, false);
        }
        input
    }

    /// The launch of this decode step ran another one by itself.
    pub fn went_on(&mut self, input: &StepInput) {
        for row in &input.rows {
            self.lens[row.seat as usize].iter_mut().for_each(|len| *len += 1);
        }
    }

    /// A step of `tokens` tokens in a random number of rows, decode rows among them.
    pub fn prefill(&mut self, tokens: u32) -> StepInput {
        let capacity = self.each * self.limits.page_size;
        let fewest = tokens.div_ceil(capacity);
        let most = tokens.min(self.limits.rows).min(self.limits.seats);
        let rows = fewest + self.rng.below(most - fewest + 1);
        let mut parts = vec![1; rows as usize];
        let mut left = tokens - rows;
        while left > 0 {
            let row = self.rng.below(rows) as usize;
            let more = (1 + self.rng.below(left)).min(capacity - parts[row]);
            parts[row] += more;
            left -= more;
        }
        // Decode rows first; at least one row must be a prompt, or it is a decode step.
        parts.sort_unstable();
        let mut input = StepInput::default();
        let seats = self.pick(rows);
        let singles = parts.iter().take(rows as usize - 1).filter(|&&part| part == 1).count();
        let decoding = self.rng.below(singles as u32 + 1) as usize;
        for (index, (seat, part)) in seats.into_iter().zip(parts).enumerate() {
            self.feed(&mut input, seat, part, index >= decoding);
        }
        input
    }

    fn pick(&mut self, rows: u32) -> Vec<u32> {
        let mut seats: Vec<u32> = (0..self.limits.seats).collect();
        // Steady decode repeats its rows: often the same seats in the same order.
        if self.rng.once_in(3) {
            self.rng.shuffle(&mut seats);
        }
        seats.truncate(rows as usize);
        seats
    }

    fn feed(&mut self, input: &mut StepInput, seat: u32, tokens: u32, prompt: bool) {
        let capacity = self.each * self.limits.page_size;
        let len = self.lens[seat as usize];
        let full = len.is_none_or(|len| len + tokens > capacity);
        let start = match len {
            Some(len) if !full && !self.rng.once_in(24) => len,
            _ => {
                let join = self.join(seat);
                input.joins.push(join);
                0
            }
        };
        let size = self.limits.page_size;
        for index in start.div_ceil(size)..(start + tokens).div_ceil(size) {
            let page = self.pages[(seat * self.each + index) as usize];
            input.pages.push(PageInput { seat, index, page });
        }
        self.lens[seat as usize] = Some(start + tokens);
        let sample = !prompt || !self.rng.once_in(4);
        let token = |rng: &mut Rng| rng.below(self.limits.vocab);
        let tokens: Vec<u32> =
            if prompt { (0..tokens).map(|_| token(&mut self.rng)).collect() } else { vec![] };
        input.add(seat, &tokens, sample);
        if self.rng.once_in(16) {
            input.mask(input.rows.len() as u32 - 1, self.mask());
        }
    }

    fn mask(&mut self) -> Vec<u32> {
        let words = self.limits.vocab.div_ceil(32);
        // Never empty: token 0 is always allowed.
        (0..words).map(|word| self.rng.bits() as u32 | u32::from(word == 0)).collect()
    }

    fn join(&mut self, seat: u32) -> JoinInput {
        let mut params = SeatParams::greedy();
        let rng = &mut self.rng;
        if !rng.once_in(3) {
            params.temperature = 0.2 + rng.unit();
            params.top_k = if rng.once_in(2) { 1 + rng.below(20) } else { 0 };
            params.top_p = if rng.once_in(2) { 0.3 + 0.7 * rng.unit() } else { 1.0 };
            params.min_p = if rng.once_in(3) { 0.2 * rng.unit() } else { 0.0 };
        }
        params.seed = rng.bits();
        params.logprobs = rng.once_in(4).then(|| rng.below(5));
        if rng.once_in(3) {
            params.biases = vec![(rng.below(self.limits.vocab), 4.0 * rng.unit() - 2.0)];
        }
        if rng.once_in(3) {
            params.stop_tokens = vec![rng.below(self.limits.vocab), rng.below(self.limits.vocab)];
            params.min_len = rng.below(8);
        }
        let mut seen = Vec::new();
        if self.limits.penalties && rng.once_in(3) {
            params.repetition = 1.0 + rng.unit();
            params.presence = rng.unit();
            seen =
                vec![(rng.below(self.limits.vocab), false), (rng.below(self.limits.vocab), true)];
        }
        let last_token = rng.below(self.limits.vocab);
        JoinInput { seat, len: 0, last_token, params, seen }
    }
}
