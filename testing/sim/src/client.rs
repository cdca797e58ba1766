//! Seeded clients: their requests, arrivals and cancellations.

use crate::oracle::{EOS, VOCAB};
use crate::rng::Rng;
use engine::EngineConfig;
use engine::exec::{Coverage, Geometry, Kept};
use engine::request::{Embed, Micros, Pooling, Request, RequestId, Sampling, Thinking, Token};
use grammar::{Compiled, Compiler, Grammar, Limits, Vocabulary};
use std::sync::{Arc, OnceLock};

/// One request of a client.
#[derive(Clone, Debug)]
pub(crate) struct Visit {
    /// The tick it arrives at.
    pub at: u64,
    /// The request.
    pub request: Request,
    /// Ticks after arrival when it cancels.
    pub cancel_after: Option<u64>,
    /// A slow client reads one output per this many ticks, and is cancelled if too many are unread.
    pub reads_every: Option<u64>,
}

/// The complete input of a run.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    /// The device.
    pub geometry: Geometry,
    /// The steps that its graphs cover.
    pub coverage: Coverage,
    /// The configuration of the engine.
    pub config: EngineConfig,
    /// The requests, in order of arrival.
    pub visits: Vec<Visit>,
    /// Most polls before a result is available.
    pub max_delay: u32,
    /// One call in this many fails; 0 for none.
    pub faults: u32,
    /// Microseconds per tick.
    pub tick: Micros,
    /// Most decode steps of one launch.
    pub steps: u32,
    /// Most tokens that a decode row returns; with more than one also none.
    pub tokens: u32,
    /// Copies of what seats carry, where layers are recurrent; 0 where they are not.
    pub states: u32,
}

/// The kind of scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Anything may happen.
    Everything,
    /// No faults, cancels or deadlines: every answer runs to its end.
    Steady,
}

/// The only grammar that clients use, simple enough to reimplement in the checker: [`GRAMMAR_MIN`]
/// to [`GRAMMAR_MAX`] letters from a to f.
pub(crate) const GRAMMAR: &str = "[a-f]{2,8}";
/// Letters before an answer may end.
pub(crate) const GRAMMAR_MIN: u32 = 2;
/// Letters after which it must end.
pub(crate) const GRAMMAR_MAX: u32 = 8;

/// The tokens of `a` to `f`.
pub(crate) fn grammar_letters() -> std::ops::RangeInclusive<Token> {
    let token = |byte: u8| Token::from(byte) - 31;
    token(b'a')..=token(b'f')
}

fn compiled() -> Compiled {
    static SHARED: OnceLock<Compiled> = OnceLock::new();
    let build = || {
        let bytes: Vec<Vec<u8>> = (0..VOCAB)
            .map(|token| if token == EOS { vec![] } else { vec![token as u8 + 31] })
            .collect();
        let vocabulary = Vocabulary::new(&bytes, &[EOS], &[EOS]).expect("a small vocabulary");
        let compiler = Compiler::new(vocabulary, Limits::default());
        compiler.compile(&Grammar::Regex(GRAMMAR.into())).expect("a small grammar")
    };
    SHARED.get_or_init(build).clone()
}

impl Scenario {
    /// The scenario of a seed. Sizes are small, so that every boundary is reached often.
    pub(crate) fn new(seed: u64, kind: Kind) -> Self {
        let mut rng = Rng::new(seed, 1);
        let page_size = *rng.pick(&[1, 2, 4, 4, 8, 16]);
        let seats = rng.range(1, 12);
        let longest = rng.range(24, 120);
        let pages_per_seat = longest.div_ceil(page_size);
        // From barely one sequence to more than all clients need.
        let pages = 1 + pages_per_seat * rng.range(4, 4 + 3 * seats) / 4;
        let (vocab, kept) = (VOCAB, Kept::ALL);
        let geometry = Geometry { seats, pages, page_size, pages_per_seat, vocab, kept };
        let coverage = Coverage {
            decode_rows: rng.range(1, seats + 2),
            prefill_tokens: rng.range(1, 48),
            prefill_rows: rng.range(1, seats + 2),
        };
        let config = EngineConfig {
            step_tokens: rng.range(1, 64),
            mixed_tokens: Rng::new(seed, 9).range(1, 80),
            // Steps of this device take 500 and 40 for each token.
            target_gap: *Rng::new(seed, 11).pick(&[None, Some(600), Some(1000), Some(2000)]),
            max_waiting: if rng.one_in(8) { rng.range(1, 10) } else { 1000 },
            max_len: if rng.one_in(4) { rng.range(20, longest) } else { u32::MAX },
            prefix_cache: !rng.one_in(4),
            prefix_seed: seed,
            cache_events: true,
            patience: rng.range(1, 8),
            gather: Rng::new(seed, 6).range(0, 10),
            depth: if rng.one_in(6) { 1 } else { 2 },
            max_seen: Rng::new(seed, 4).range(1, 200),
            launch_retries: rng.range(0, 4),
            restarts: rng.range(1, 4),
            eos: vec![EOS],
            mask_cost: u64::from(Rng::new(seed, 7).range(0, 40)),
        };
        let everything = kind == Kind::Everything;
        let mut scenario = Self {
            geometry,
            coverage,
            config,
            visits: Vec::new(),
            max_delay: rng.range(0, 3),
            faults: if everything && rng.one_in(3) { rng.range(8, 200) } else { 0 },
            tick: 100,
            steps: *Rng::new(seed, 5).pick(&[1, 1, 2, 3, 8]),
            tokens: *Rng::new(seed, 10).pick(&[1, 1, 1, 2, 3, 5]),
            states: 0,
        };
        scenario.fill(&mut rng, everything);
        scenario.turn_some_into_embeddings(&mut Rng::new(seed, 5));
        scenario.join_some_into_calls(&mut Rng::new(seed, 8));
        scenario.let_some_think(&mut Rng::new(seed, 12));
        scenario
    }

    /// The same, where rows return several tokens or none: a device of up to five whatever the seed says.
    pub(crate) fn with_several(mut self, seed: u64) -> Self {
        self.tokens = Rng::new(seed, 11).range(2, 5);
        self
    }

    /// The same on a device some or all of whose layers see a window, with as many sequences' pages.
    pub(crate) fn with_windows(mut self, seed: u64) -> Self {
        let mut rng = Rng::new(seed, 14);
        let full = *rng.pick(&[0, 1, 1, 1, 2]);
        let each = self.geometry.pages_per_seat;
        let share = f64::from(self.geometry.pages - 1) / f64::from(each);
        let (windowed, window) = (rng.range(1, 4), rng.range(2, 40));
        self.geometry.kept = Kept { full, windowed, window };
        self.geometry.pages = 1 + (f64::from(self.one_sequence()) * share.max(1.0)) as u32;
        self
    }

    /// The same on a device whose layers are recurrent, with room for a few copies of what seats carry.
    pub(crate) fn with_states(mut self, seed: u64) -> Self {
        self.states = *Rng::new(seed, 23).pick(&[1, 2, 4, 16]);
        self
    }

    /// Most tokens of a sequence.
    pub(crate) fn longest(&self) -> u32 {
        let Geometry { pages, page_size, pages_per_seat, kept, .. } = self.geometry;
        // Devices with windows have pages for a whole page table.
        let held = if kept.windowed > 0 { pages_per_seat } else { pages - 1 };
        (pages_per_seat.min(held) * page_size).min(self.config.max_len)
    }

    /// Pages that the longest sequence takes.
    pub(crate) fn one_sequence(&self) -> u32 {
        let Geometry { pages_per_seat, page_size, kept, .. } = self.geometry;
        let step = self.config.step_tokens.min(self.coverage.prefill_tokens);
        // With windows also pages of the tree that are not its own.
        let others = if kept.windowed > 0 { kept.width() } else { 0 };
        kept.pages_of(pages_per_seat, page_size, step) + others
    }

    /// Turns some requests into embeddings.
    fn turn_some_into_embeddings(&mut self, rng: &mut Rng) {
        for visit in &mut self.visits {
            let (last, unit, chosen) = (rng.one_in(3), rng.one_in(2), rng.one_in(9));
            let request = &mut visit.request;
            if chosen && request.sampling.grammar.is_none() {
                let pooling = if last { Pooling::Last } else { Pooling::Mean };
                request.embed = Some(Embed { pooling, unit });
                (request.choices, request.prompt_logprobs) = (1, None);
            }
        }
    }

    /// Joins some requests into calls of several.
    fn join_some_into_calls(&mut self, rng: &mut Rng) {
        let mut call = None;
        for visit in &mut self.visits {
            call = match call {
                Some(call) if !rng.one_in(6) => Some(call),
                _ => rng.one_in(5).then_some(visit.request.id),
            };
            visit.request.call = call;
        }
    }

    /// Lets some requests think first. Tags are short, so that models write them too.
    fn let_some_think(&mut self, rng: &mut Rng) {
        for visit in &mut self.visits {
            let (chosen, opened) = (rng.one_in(6), rng.one_in(2));
            let tag = |rng: &mut Rng| -> Arc<[Token]> {
                (0..rng.range(1, 2)).map(|_| rng.range(0, 20)).collect()
            };
            let (open, close) = (tag(rng), tag(rng));
            let open = if opened { [].into() } else { open };
            let budget = rng.range(0, 30);
            if chosen {
                let sampling = &mut visit.request.sampling;
                sampling.thinking = Some(Thinking { open, close, budget });
                sampling.min_tokens = 0;
            }
        }
    }

    fn fill(&mut self, rng: &mut Rng, everything: bool) {
        let longest = self.longest();
        let shared: Vec<Vec<Token>> = (0..rng.range(1, 3))
            .map(|_| (0..rng.range(1, longest)).map(|_| rng.range(0, VOCAB - 1)).collect())
            .collect();
        let count = rng.range(4, 28);
        let spacing = rng.range(0, 12);
        let mut at = 0;
        for id in 0..u64::from(count) {
            // Several requests may arrive at one tick.
            at += if rng.one_in(5) { 0 } else { u64::from(rng.range(0, spacing)) };
            let request = self.request(rng, id, &shared, longest, everything, at);
            let cancels = everything && rng.one_in(6);
            let slow = everything && rng.one_in(10);
            self.visits.push(Visit {
                at,
                request,
                cancel_after: cancels.then(|| u64::from(rng.range(0, 40))),
                reads_every: slow.then(|| u64::from(rng.range(1, 5))),
            });
        }
    }

    fn request(
        &self,
        rng: &mut Rng,
        id: u64,
        shared: &[Vec<Token>],
        longest: u32,
        everything: bool,
        at: u64,
    ) -> Request {
        let mut prompt = rng.pick(shared).clone();
        prompt.truncate(rng.range(0, prompt.len() as u32) as usize);
        for _ in 0..rng.range(0, 12) {
            prompt.push(rng.range(0, VOCAB - 1));
        }
        if prompt.is_empty() {
            prompt.push(3);
        }
        let valid = !(everything && rng.one_in(40));
        if valid {
            prompt.truncate(longest as usize - 1);
        }
        let max_tokens = if rng.one_in(30) { 0 } else { rng.range(1, 40) };
        let most = self.geometry.seats.min(self.coverage.decode_rows).min(4);
        let choices = if rng.one_in(4) { rng.range(1, most) } else { 1 };
        let late = everything && rng.one_in(10);
        Request {
            id: RequestId(id),
            prompt: prompt.into(),
            sampling: sampling(rng, max_tokens),
            choices,
            priority: if rng.one_in(3) { rng.range(0, 2) as i32 - 1 } else { 0 },
            deadline: late.then(|| (at + u64::from(rng.range(0, 120))) * self.tick),
            call: None,
            tenant: u64::from(rng.range(0, 2) / 2),
            adapter: 0,
            prompt_logprobs: rng.one_in(12).then(|| rng.range(0, 3)),
            embed: None,
        }
    }
}

fn sampling(rng: &mut Rng, max_tokens: u32) -> Sampling {
    let grammar = max_tokens > 0 && rng.one_in(25);
    let mut sampling = Sampling { max_tokens, ..Sampling::default() };
    if rng.one_in(2) {
        sampling.temperature = 1.0;
        sampling.seed = u64::from(rng.range(0, 1000));
    }
    if rng.one_in(6) {
        sampling.presence_penalty = 0.5;
    }
    if rng.one_in(8) {
        sampling.logprobs = Some(rng.range(0, 5));
    }
    if rng.one_in(6) {
        sampling.stop_tokens = (0..rng.range(1, 15)).map(|_| rng.range(0, VOCAB - 1)).collect();
    }
    if rng.one_in(6) && !grammar {
        sampling.min_tokens = rng.range(0, max_tokens);
    }
    sampling.ignore_eos = rng.one_in(5);
    if grammar {
        sampling.grammar = Some(compiled());
        // Only the grammar decides where such an answer ends.
        sampling.stop_tokens.clear();
    }
    sampling
}
