//! A backend without a model. It behaves like the engine (events, outputs, pages, buckets,
//! cancellation within a step) and can fail on schedule. For tests, load tests and demos of the
//! page.

mod nap;
mod oracle;
mod picture;

pub use oracle::{Oracle, demo, echo};

use engine::request::{
    Drafts, Embed, Event, Finish, Micros, Output, Pooling, Reject, Request, RequestId, Token,
    TokenLogprob,
};
use nap::Nap;
use server::link::{
    AdapterReader, Backend, Change, ChangeError, Changed, ConfigRow, GraphInfo, Pages, Phase,
    PlanPicture, PrefixUse, ReadAdapter, Rest, Run, Snapshot, StepRecord,
};
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use text::bytes::END;

const PAGE: u64 = 16;
const RING: usize = 512;
/// The most prompt pages remembered; beyond it the mock clears the set.
const SEEN: usize = 4096;

/// How the mock behaves.
#[derive(Clone)]
pub struct MockConfig {
    /// Generates the answers.
    pub oracle: Oracle,
    /// The duration of a step.
    pub step_time: Duration,
    /// Sequences that run at once.
    pub seats: u64,
    /// Requests that may wait.
    pub waiting: u64,
    /// KV pages of 16 tokens.
    pub pages: u64,
    /// The most tokens of prompt and answer together.
    pub context: u64,
    /// Size of the vocabulary.
    pub vocab: u32,
    /// Panics at every step whose number this divides.
    pub panic_every: Option<u64>,
    /// Fails every request whose id this divides, half-way through its answer.
    pub fail_every: Option<u64>,
    /// From this step on the backend reports that it has failed.
    pub gone_at: Option<u64>,
    /// Blocks in this step for this long.
    pub stall: Option<(u64, Duration)>,
    /// Width of the embeddings; 0 for no support.
    pub embedding: usize,
    /// Most tokens that a sequence gets in a step; with more than one, sometimes none.
    pub tokens_per_row: u64,
    /// There is no memory to wake up with.
    pub cannot_wake: bool,
}

impl Default for MockConfig {
    fn default() -> Self {
        Self {
            oracle: echo(),
            step_time: Duration::ZERO,
            seats: 256,
            waiting: 100_000,
            pages: 65_536,
            context: 8192,
            vocab: 259,
            panic_every: None,
            fail_every: None,
            gone_at: None,
            stall: None,
            embedding: 0,
            tokens_per_row: 1,
            cannot_wake: false,
        }
    }
}

/// The backend. Sequences are admitted in order of arrival when a seat and all the pages they may
/// need are free.
pub struct Mock {
    config: MockConfig,
    waiting: VecDeque<Request>,
    running: Vec<Sequence>,
    used: u64,
    steps: u64,
    ring: VecDeque<StepRecord>,
    prefix: PrefixUse,
    /// Hashes of full prompt pages seen, in place of a prefix tree.
    seen: HashSet<u64>,
    graph: Arc<GraphInfo>,
    nap: Nap,
}

struct Sequence {
    id: RequestId,
    choice: u32,
    answer: Vec<Token>,
    at: usize,
    max: usize,
    min: usize,
    ignore_eos: bool,
    stop: Vec<Token>,
    logprobs: Option<u32>,
    pages: u64,
    deadline: Option<Micros>,
}

impl Mock {
    /// An idle mock.
    pub fn new(config: MockConfig) -> Self {
        let graph = Arc::new(describe(&config));
        Self {
            config,
            waiting: VecDeque::new(),
            running: Vec::new(),
            used: 0,
            steps: 0,
            ring: VecDeque::new(),
            prefix: PrefixUse::default(),
            seen: HashSet::new(),
            graph,
            nap: Nap::default(),
        }
    }

    fn check(&self, request: &Request) -> Result<(), Reject> {
        let found = request.prompt.len() as u64;
        let allowed = (self.config.context - 1).min(self.config.pages * PAGE);
        let unknown = request.prompt.iter().find(|token| **token >= self.config.vocab);
        if request.embed.is_some() && self.config.embedding == 0 {
            let problem = "the mock is configured without embeddings".into();
            Err(Reject::BadParameter { field: "embed", problem })
        } else if u64::from(request.choices) > self.config.seats {
            let problem = format!("at most {} run at once", self.config.seats);
            Err(Reject::BadParameter { field: "choices", problem })
        } else if found == 0 {
            Err(Reject::EmptyPrompt)
        } else if found > allowed {
            Err(Reject::TooLong { found, allowed })
        } else if let Some(token) = unknown {
            Err(Reject::UnknownToken(*token))
        } else if self.waiting.len() as u64 >= self.config.waiting {
            Err(Reject::QueueFull { waiting: self.config.waiting })
        } else {
            Ok(())
        }
    }

    /// Prompt tokens found in pages seen before.
    fn look_up(&mut self, prompt: &[Token]) -> u32 {
        let (mut found, mut hash, mut all) = (0, 0xcbf2_9ce4_8422_2325u64, true);
        for page in prompt.chunks_exact(PAGE as usize) {
            for token in page {
                hash = (hash ^ u64::from(*token)).wrapping_mul(0x100_0000_01b3);
            }
            all &= !self.seen.insert(hash);
            found += if all { page.len() as u32 } else { 0 };
        }
        if self.seen.len() > SEEN {
            self.seen.clear();
        }
        // The last token is always computed, because sampling needs its logits.
        let found = found.min(prompt.len() as u32 - 1);
        self.prefix.looked_up += prompt.len() as u64;
        self.prefix.found += u64::from(found);
        found
    }

    /// Admits one waiting request if it fits; returns the length of its prompt.
    fn admit(&mut self, outputs: &mut Vec<Output>) -> Option<u64> {
        let request = self.waiting.front()?;
        let choices = u64::from(request.choices.max(1));
        let prompt = request.prompt.len() as u64;
        let room = (self.config.context - prompt).min(u64::from(request.sampling.max_tokens));
        let mut pages = (prompt + room).div_ceil(PAGE).min(self.config.pages / choices);
        if self.running.len() as u64 + choices > self.config.seats {
            return None;
        }
        if self.used + pages * choices > self.config.pages {
            if !self.running.is_empty() {
                return None;
            }
            pages = (self.config.pages - self.used) / choices;
        }
        let request = self.waiting.pop_front()?;
        let cached_tokens = self.look_up(&request.prompt);
        let prompt_logprobs = match request.prompt_logprobs {
            Some(top) => request.prompt.iter().skip(1).map(|token| logprob(*token, top)).collect(),
            None => Vec::new(),
        };
        outputs.push(Output::Prefilled {
            id: request.id,
            prompt_tokens: prompt as u32,
            cached_tokens,
            prompt_logprobs,
        });
        if let Some(embed) = request.embed {
            let id = request.id;
            let vector = vector(&request.prompt, embed, self.config.embedding);
            outputs.push(Output::Embedded { id, vector });
            outputs.push(Output::Finished {
                id,
                choice: 0,
                finish: Finish::Stop(None),
                stop_logprob: None,
                drafts: Drafts::default(),
            });
            return Some(prompt);
        }
        for choice in 0..choices as u32 {
            self.used += pages;
            self.running.push(Sequence {
                id: request.id,
                choice,
                answer: (self.config.oracle)(&request, choice),
                at: 0,
                max: room as usize,
                min: request.sampling.min_tokens as usize,
                ignore_eos: request.sampling.ignore_eos,
                stop: request.sampling.stop_tokens.clone(),
                logprobs: request.sampling.logprobs,
                pages,
                deadline: request.deadline,
            });
        }
        Some(prompt)
    }

    fn cancel(&mut self, id: RequestId, outputs: &mut Vec<Output>) {
        if let Some(i) = self.waiting.iter().position(|r| r.id == id) {
            let request = self.waiting.remove(i).map_or(1, |r| r.choices.max(1));
            for choice in 0..request {
                outputs.push(Output::Finished {
                    id,
                    choice,
                    finish: Finish::Cancelled,
                    stop_logprob: None,
                    drafts: Drafts::default(),
                });
            }
        }
        let used = &mut self.used;
        self.running.retain(|s| {
            if s.id == id {
                *used -= s.pages;
                let finish = Finish::Cancelled;
                outputs.push(Output::Finished {
                    id,
                    choice: s.choice,
                    finish,
                    stop_logprob: None,
                    drafts: Drafts::default(),
                });
            }
            s.id != id
        });
    }

    fn decode(&mut self, now: Micros, outputs: &mut Vec<Output>) {
        let fail_every = self.config.fail_every;
        let (used, steps, most) = (&mut self.used, self.steps, self.config.tokens_per_row);
        self.running.retain_mut(|s| {
            // Every count from 0 to the most comes up, at other steps for other sequences.
            let turn = steps + s.id.0 + u64::from(s.choice);
            let count = if most == 1 { 1 } else { turn % (most + 1) };
            let ended = (0..count).find_map(|_| s.advance(now, fail_every, outputs));
            if let Some(finish) = ended {
                *used -= s.pages;
                let stop_logprob = match finish {
                    Finish::Stop(Some(token)) => s.logprobs.map(|top| logprob(token, top)),
                    _ => None,
                };
                outputs.push(Output::Finished {
                    id: s.id,
                    choice: s.choice,
                    finish,
                    stop_logprob: stop_logprob.map(Box::new),
                    drafts: Drafts::default(),
                });
                return false;
            }
            true
        });
    }

    fn record(&mut self, at: Micros, phase: Phase, live: u32, tokens: u32, host_us: u32) {
        let largest = 128;
        let bucket = live.next_power_of_two().max(1);
        let (bucket_rows, run) = if bucket > largest {
            (live, Run::Eager(format!("{live} rows; the largest bucket has {largest}")))
        } else {
            (bucket, Run::Replayed)
        };
        let device_us = self.config.step_time.as_micros() as u32;
        self.steps += 1;
        self.ring.push_back(StepRecord {
            step: self.steps,
            at,
            phase,
            bucket_rows,
            bucket_tokens: match phase {
                Phase::Decode => bucket_rows,
                Phase::Prefill => tokens.next_multiple_of(128),
            },
            live_rows: live,
            live_tokens: tokens,
            share: None,
            drafts: None,
            padded_rows: bucket_rows - live,
            run,
            host_us,
            device_us,
        });
        if self.ring.len() > RING {
            self.ring.pop_front();
        }
    }
}

impl Sequence {
    /// Generates the next token, or returns why the sequence finished.
    fn advance(
        &mut self,
        now: Micros,
        fail_every: Option<u64>,
        outputs: &mut Vec<Output>,
    ) -> Option<Finish> {
        if self.deadline.is_some_and(|deadline| now > deadline) {
            return Some(Finish::Deadline);
        }
        if fail_every.is_some_and(|n| self.id.0.is_multiple_of(n))
            && self.at * 2 >= self.answer.len()
        {
            return Some(Finish::Failed("the device lost its state".into()));
        }
        if self.at >= self.max {
            return Some(Finish::Length);
        }
        let may_end = self.at >= self.min;
        let token = match self.answer.get(self.at) {
            Some(token) => *token,
            None if may_end && !self.ignore_eos => return Some(Finish::Stop(Some(END))),
            // Past the end of the answer (`ignore_eos` or `min_tokens`): repeat it.
            None if self.answer.is_empty() => Token::from(b'.'),
            None => self.answer[self.at % self.answer.len()],
        };
        if may_end && self.stop.contains(&token) {
            return Some(Finish::Stop(Some(token)));
        }
        self.at += 1;
        let logprob = self.logprobs.map(|top| logprob(token, top));
        outputs.push(Output::Token { id: self.id, choice: self.choice, token, logprob });
        (self.at >= self.max).then_some(Finish::Length)
    }
}

/// Invented log-probabilities of the right shape: the token first, then the following ids.
fn logprob(token: Token, top: u32) -> TokenLogprob {
    let top = (0..top).map(|i| ((token + i) % 256, -0.25 - i as f32)).collect();
    TokenLogprob { token, logprob: -0.25, top }
}

impl Backend for Mock {
    fn step(&mut self, now: Micros, events: Vec<Event>, wait: bool) -> Vec<Output> {
        assert_eq!(self.nap.rest(), Rest::Awake, "a step without memory");
        let began = Instant::now();
        let next = self.steps + 1;
        if let Some((step, time)) = self.config.stall
            && step == next
        {
            std::thread::sleep(time);
        }
        if self.config.panic_every.is_some_and(|n| next.is_multiple_of(n)) {
            panic!("a planted panic at step {next}");
        }
        let mut outputs = Vec::new();
        for event in events {
            match event {
                Event::Submit(request) => match self.check(&request) {
                    Ok(()) => self.waiting.push_back(*request),
                    Err(reason) => outputs.push(Output::Rejected { id: request.id, reason }),
                },
                Event::Cancel(id) => self.cancel(id, &mut outputs),
            }
        }
        let (mut rows, mut tokens) = (0, 0);
        while let Some(prompt) = self.admit(&mut outputs) {
            rows += 1;
            tokens += prompt as u32;
        }
        let host = began.elapsed();
        if wait && !self.running.is_empty() && !self.config.step_time.is_zero() {
            std::thread::sleep(self.config.step_time.saturating_sub(began.elapsed()));
        }
        let live = self.running.len() as u32;
        self.decode(now, &mut outputs);
        let host_us = host.as_micros() as u32 + 1;
        if rows > 0 {
            self.record(now, Phase::Prefill, rows, tokens, host_us);
        } else if live > 0 {
            self.record(now, Phase::Decode, live, live, host_us);
        }
        outputs
    }

    fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    fn gone(&self) -> Option<String> {
        let gone = self.config.gone_at.is_some_and(|step| self.steps + 1 >= step);
        gone.then(|| "the device failed".into())
    }

    fn change(&mut self, change: &Change) -> Changed {
        self.seen.clear();
        Changed { outputs: Vec::new(), result: self.nap.change(change, self.config.cannot_wake) }
    }

    fn adapter_reader(&self) -> Option<AdapterReader> {
        Some(Arc::new(|path| match path.join("wrong").exists() {
            true => Err(ChangeError::Refused("the adapter does not fit".into())),
            false => Ok(ReadAdapter(Arc::new(()))),
        }))
    }

    fn rest(&self) -> Rest {
        self.nap.rest()
    }

    fn weight_version(&self) -> u64 {
        self.nap.version
    }

    fn snapshot(&self) -> Snapshot {
        let cached = (self.seen.len() as u64).min((self.config.pages - self.used) / 2);
        Snapshot {
            queue: self.waiting.len() as u64,
            running: self.running.len() as u64,
            seats: self.config.seats,
            pages: Pages { used: self.used, cached, free: self.config.pages - self.used - cached },
            page_tokens: PAGE,
            prefix: self.prefix,
            preemptions: 0,
            tiers: Vec::new(),
            experts: Vec::new(),
            drafts: None,
            steps: self.ring.iter().cloned().collect(),
            graph: self.graph.clone(),
        }
    }
}

/// Token counts, hashed into the width of the vector.
fn vector(tokens: &[Token], embed: Embed, width: usize) -> Vec<f32> {
    let mut vector = vec![0f32; width];
    let from = if embed.pooling == Pooling::Last { tokens.len().saturating_sub(1) } else { 0 };
    for token in &tokens[from..] {
        vector[*token as usize % width] += 1.0;
    }
    let length = match embed.unit {
        true => vector.iter().map(|x| x * x).sum::<f32>().sqrt(),
        false => (tokens.len() - from) as f32,
    };
    vector.iter_mut().for_each(|x| *x /= length.max(1e-9));
    vector
}

fn describe(config: &MockConfig) -> GraphInfo {
    let row = |key: &str, value: &str, reason: &str| ConfigRow {
        key: key.into(),
        value: value.into(),
        reason: reason.into(),
    };
    let buckets = [1, 2, 4, 8, 16, 32, 64, 128];
    GraphInfo {
        about: vec![
            row("model", "mock", "no weights: answers come from a function"),
            row("device", "none", "the mock sleeps instead of running a device"),
            row("context", &config.context.to_string(), "configured"),
        ],
        config: vec![
            row("decode.backend", "full", "default: the whole step is one device graph"),
            row("decode.buckets", "1 2 4 8 16 32 64 128", "powers of two up to the largest batch"),
            row("prefill.backend", "breakable", "attention is a break on this device"),
            row("prefill.buckets", "128 … 4096", "multiples of 128 up to the chunk size"),
            row("fallback", "eager", "configured: steps larger than every bucket run op by op"),
        ],
        plans: buckets
            .iter()
            .map(|rows| PlanPicture { bucket: format!("decode/{rows}"), svg: picture::plan(*rows) })
            .collect(),
    }
}
