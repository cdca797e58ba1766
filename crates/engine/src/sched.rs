//! The scheduler: every decision about requests, seats and pages. It does not touch the device.
//!
//! It forms steps (`form`), takes their results (`apply`), and starts over when a device loses
//! its state (`recover`). All of it is a function of the events and results it was given.
//!
//! **Fairness.** Calls take turns (`turns`): a call of many requests does not keep others waiting until
//! its last one is seated. If it holds more seats than an equal share with a newly arrived call, it
//! gives some up. The first waiting request of a call is overtaken by at most
//! [`EngineConfig::patience`] requests that arrived later; then it is *due*, goes before all others, and
//! cannot be preempted by them. Admission takes requests in order of service; one that needs more than there is,
//! or whose prefix a seated prompt is computing, lets a few others pass until it is due. A seated
//! sequence gets its row in every step that has room for it; decode rows go first, and when they leave
//! no room for prompts the two take turns. Short prompts that come one by one may wait a few steps
//! ([`EngineConfig::gather`]) to be fed together.

mod accept;
mod adapters;
mod admit;
mod apply;
mod audit;
mod balance;
mod fetch;
mod fork;
mod form;
mod queue;
mod recover;
mod states;
mod turns;

pub(crate) use audit::Holding;

use crate::exec::{Coverage, Geometry, Page, Seat, Step};
use crate::pages::{CacheEvent, PageCounts, Pool};
use crate::plant::{Plant, planted};
use crate::request::{Event, Finish, Micros, Output, Pooling, RequestId, Token, TokenLogprob};
use crate::sequence::{Key, Leaving, Place, Sequence, Sequences};
use adapters::Slots;
use balance::Balance;
use fetch::Fetch;
use queue::Queue;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use turns::Turns;

/// Settings that do not follow from the device.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Most tokens of a step that feeds prompts, decode rows included; the device's coverage limits
    /// it further. Smaller keeps decode smooth, larger finishes prompts sooner.
    pub step_tokens: u32,
    /// The same while other sequences decode beside the prompts: such a step delays their next token
    /// by as long as it takes.
    pub mixed_tokens: u32,
    /// The longest gap between tokens that is aimed at, in microseconds, where the device measures its steps: prompts are
    /// then fed in small parts beside the rows that decode. `None` feeds as many tokens as a step may have.
    pub target_gap: Option<Micros>,
    /// Most requests that wait; more are refused.
    pub max_waiting: u32,
    /// Most tokens of a sequence, prompt included; the device's page table limits it further.
    pub max_len: u32,
    /// Whether pages are shared between requests with equal prefixes.
    pub prefix_cache: bool,
    /// Seeds the hash by which pages are found. The same seed gives the same run. Where prompts come
    /// from untrusted clients it should be secret, so that they cannot choose colliding prompts.
    pub prefix_seed: u64,
    /// Whether [`crate::Engine::take_cache_events`] reports what is cached and evicted. Then it has to be called: the
    /// list grows until it is taken.
    pub cache_events: bool,
    /// How often a waiting request may be overtaken by later ones.
    pub patience: u32,
    /// Most steps that short prompts wait for others after a step that fed prompts: beside many decode
    /// rows such a step costs far more than its few tokens. 0 feeds them at once.
    pub gather: u32,
    /// Steps launched ahead of results; the executor's depth limits it further.
    pub depth: usize,
    /// Most tokens that count for penalties in the joins of one step, and most tokens of their histories, unless one
    /// join alone has more: a device's mail holds no more.
    pub max_seen: u32,
    /// How often a failed launch is retried before the device is restarted.
    pub launch_retries: u32,
    /// How many restarts without a confirmed step in between are allowed before every request fails.
    pub restarts: u32,
    /// The model's own stop tokens.
    pub eos: Vec<Token>,
    /// What the masks of one step may cost ([`grammar::Mask::cost`], about microseconds); rows beyond it
    /// wait for the next step, so that grammars do not delay the other rows.
    pub mask_cost: u64,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            step_tokens: 2048,
            mixed_tokens: u32::MAX,
            target_gap: None,
            max_waiting: 4096,
            max_len: u32::MAX,
            prefix_cache: true,
            prefix_seed: 0,
            cache_events: false,
            patience: 64,
            gather: 8,
            depth: 2,
            max_seen: 1 << 20,
            launch_retries: 8,
            restarts: 3,
            eos: Vec::new(),
            mask_cost: 20_000,
        }
    }
}

/// The state of the engine, for metrics and tests. Counters only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Sequences that wait for a seat.
    pub waiting: u32,
    /// Sequences on a seat.
    pub running: u32,
    /// Steps launched and not yet confirmed.
    pub in_flight: u32,
    /// Pages by state.
    pub pages: PageCounts,
    /// Requests accepted.
    pub accepted: u64,
    /// Requests refused.
    pub rejected: u64,
    /// Continuations ended, whatever the reason.
    pub finished: u64,
    /// Prompt tokens of sequences that were seated; counted again after a preemption.
    pub prompt_tokens: u64,
    /// Of these, found in the prefix tree.
    pub cached_tokens: u64,
    /// Pages that came back from the store for a waiting request.
    pub fetched_pages: u64,
    /// Tokens emitted.
    pub tokens: u64,
    /// Sequences sent back to the queue because pages or seats ran out.
    pub preemptions: u64,
    /// Decode steps launched.
    pub decode_steps: u64,
    /// Steps launched that fed prompts.
    pub prefill_steps: u64,
    /// Rows whose result was discarded because their sequence had ended.
    pub discarded_rows: u64,
    /// Rows that a grammar kept from being launched ahead.
    pub held_back_rows: u64,
    /// Page copies for sequences that shared a page.
    pub copies: u64,
    /// Copies of what seats carry that were saved behind prefixes, where layers are recurrent.
    pub states_saved: u64,
    /// Sequences that began with such a copy.
    pub states_restored: u64,
    /// Launches that failed and were retried.
    pub retries: u64,
    /// Times the device's state was lost.
    pub restarts: u64,
    /// Results where the device and the engine disagreed whether a token stops.
    pub stop_disagreements: u64,
    /// The most often any request was overtaken by later ones.
    pub most_overtaken: u32,
}

/// One accepted request with continuations that have not ended.
struct Live {
    sequences: Vec<Key>,
    deadline: Option<Micros>,
    call: u64,
}

/// A launched step, or the one being formed.
#[derive(Default)]
struct Flight {
    number: u64,
    /// Steps it may still run, this one included.
    steps: u32,
    /// Tokens it feeds if it feeds prompts, and its rows that decode.
    fed: (u32, u32),
    rows: Vec<FlightRow>,
}

#[derive(Clone, Copy)]
struct FlightRow {
    key: Key,
    /// Of a prompt: one past the last position it feeds. Of a decode row: one past the last it may feed.
    end: u32,
    /// Most tokens it may return; 0 if it does not sample.
    most: u32,
    /// It feeds part of a prompt, and nothing else.
    prompt: bool,
    /// It returns exactly as many tokens as it may.
    exact: bool,
    targets: u32,
    hidden: bool,
}

/// A sequence that could decode.
#[derive(Clone, Copy)]
struct Ready {
    key: Key,
    /// Its seat and start position; set here only if `steady` ([`Sequence::is_steady_decode`]).
    seat: Seat,
    start: u32,
    steady: bool,
}

/// What the device can do besides sampling one token per row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reports {
    /// Log-probabilities of prompt tokens.
    pub(crate) scores: bool,
    /// Width of hidden states; 0 for none.
    pub(crate) hidden: u32,
    /// Most tokens of a prompt, where each is fed whole.
    pub(crate) whole: Option<u32>,
    /// Seats carry state that is not in pages.
    pub(crate) carries: bool,
    /// Copies of it that the device has room for.
    pub(crate) states: u32,
    /// Most decode steps of one launch.
    pub(crate) steps: u32,
    /// Most tokens that a decode row returns.
    pub(crate) tokens: u32,
    /// It has a store for evicted pages.
    pub(crate) store: bool,
    /// Adapters that rows of one step may have.
    pub(crate) adapters: u32,
}

pub(crate) struct Scheduler {
    config: EngineConfig,
    geometry: Geometry,
    coverage: Coverage,
    reports: Reports,
    pool: Pool,
    sequences: Sequences,
    live: BTreeMap<RequestId, Live>,
    deadlines: BTreeSet<(Micros, RequestId)>,
    queue: Queue,
    arrivals: u64,
    turns: Turns,
    /// The sequence on each seat.
    seats: Vec<Option<Key>>,
    /// Most seats in use at once: no more than a decode step covers.
    seat_limit: u32,
    seated: u32,
    /// Seats kept for choices that have not split off.
    reserved: u32,
    slots: Slots,
    /// Sequences that are leaving.
    leaving: u32,
    /// The pool's epoch when admission last found no sequence that could be seated; unchanged while no request or page
    /// came or went.
    refused: Option<u64>,
    /// The step being formed; while it is stalled it must be launched before another is formed.
    pub(crate) step: Step,
    forming: Flight,
    /// Tokens for penalties in the joins of the step being formed.
    seen: u32,
    /// Tokens of histories in these joins.
    told: u32,
    /// Cost of its masks so far.
    mask_cost: u64,
    /// Sequences that got no mask because the step's mask cost was used up, the longest wait first.
    unmasked: VecDeque<Key>,
    /// The prompt that has the first mask of the step.
    mask_first: Option<Key>,
    pub(crate) stalled: bool,
    tries: u32,
    flights: VecDeque<Flight>,
    spare: Vec<Vec<FlightRow>>,
    numbered: u64,
    /// Results up to this number are from before the last restart and are ignored.
    void: u64,
    /// Launches from before the last restart that the device has still to report.
    pub(crate) stale_in_flight: usize,
    /// Restarts since the last confirmed step.
    strikes: u32,
    balance: Balance,
    /// The last step fed no prompt although some were waiting for room.
    prompts_turn: bool,
    /// What the last step that fed prompts made of them.
    last_pooling: Option<Pooling>,
    /// Steps launched since a row came or went, where launches may have several.
    settled: u32,
    /// Rows of the last step, to notice that one came or went.
    settled_rows: usize,
    /// Steps since prompts were last fed.
    since_prompts: u32,
    /// Rows that prompts could have had in these steps.
    rows_waited: u32,
    ready: Vec<Ready>,
    prompts: Vec<Key>,
    /// Waiting requests whose pages come from the store.
    fetches: Vec<Fetch>,
    /// Pages that are being saved.
    saving: Vec<Page>,
    /// Copies of the store are from before a restart.
    pub(crate) store_stale: bool,
    stats: EngineStats,
    pub(crate) out: Vec<Output>,
}

impl Scheduler {
    pub(crate) fn new(
        geometry: Geometry,
        coverage: Coverage,
        reports: Reports,
        buckets: Vec<u32>,
        mut config: EngineConfig,
    ) -> Self {
        // Pages without the state behind them are no prefix.
        config.prefix_cache &= !reports.carries || reports.states > 0;
        let states = if reports.carries { reports.states } else { 0 };
        let balance = Balance::new(config.target_gap, buckets);
        let seat_limit = geometry.seats.min(coverage.decode_rows);
        let Geometry { pages, page_size, kept, .. } = geometry;
        let pool = Pool::new(pages, page_size, kept, config.prefix_cache, config.prefix_seed);
        Self {
            pool: pool
                .with_names(config.cache_events, reports.store)
                .with_states(states, reports.store),
            config,
            geometry,
            coverage,
            reports,
            sequences: Sequences::default(),
            live: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            queue: Queue::default(),
            arrivals: 0,
            turns: Turns::default(),
            seats: vec![None; geometry.seats as usize],
            seat_limit,
            seated: 0,
            reserved: 0,
            slots: Slots::new(reports.adapters),
            leaving: 0,
            refused: None,
            step: Step::default(),
            forming: Flight::default(),
            seen: 0,
            told: 0,
            mask_cost: 0,
            unmasked: VecDeque::new(),
            mask_first: None,
            stalled: false,
            tries: 0,
            flights: VecDeque::new(),
            spare: Vec::new(),
            numbered: 0,
            void: 0,
            stale_in_flight: 0,
            strikes: 0,
            balance,
            prompts_turn: false,
            last_pooling: None,
            settled: 0,
            settled_rows: 0,
            since_prompts: u32::MAX,
            rows_waited: 0,
            ready: Vec::new(),
            prompts: Vec::new(),
            fetches: Vec::new(),
            saving: Vec::new(),
            store_stale: false,
            stats: EngineStats::default(),
            out: Vec::new(),
        }
    }

    pub(crate) fn event(&mut self, event: Event) {
        match event {
            Event::Submit(request) => self.submit(*request),
            Event::Cancel(id) => {
                if planted(Plant::IgnoreCancel) && self.is_prefilling(id) {
                    return;
                }
                self.end_request(id, &Finish::Cancelled);
            }
        }
    }

    /// Ends requests whose deadline has passed.
    pub(crate) fn time(&mut self, now: Micros) {
        while let Some(&(deadline, id)) = self.deadlines.first()
            && deadline < now
            && !planted(Plant::IgnoreDeadline)
        {
            self.end_request(id, &Finish::Deadline);
        }
    }

    /// Ends every continuation of a request that has not ended. An unknown id is ignored: the
    /// request may have ended before the caller could know it.
    fn end_request(&mut self, id: RequestId, finish: &Finish) {
        let Some(live) = self.live.get(&id) else { return };
        for key in live.sequences.clone() {
            self.end(key, finish.clone());
        }
    }

    /// The one place where a continuation ends: it emits the end, and frees what the continuation holds
    /// as soon as no step in flight can touch it.
    fn end(&mut self, key: Key, finish: Finish) {
        self.end_with(key, finish, None);
    }

    /// The same, with what is known about the stop token.
    fn end_with(&mut self, key: Key, finish: Finish, stop: Option<TokenLogprob>) {
        let stop_logprob = stop.map(Box::new);
        let (id, choice, unforked, drafts) = {
            let sequence = &self.sequences[key];
            (sequence.id, sequence.choice, sequence.cold.unforked, sequence.cold.drafts)
        };
        // Choices that never split off end with the one they would have split from.
        for choice in choice..=choice + unforked {
            self.stats.finished += 1;
            let (finish, stop_logprob) = (finish.clone(), stop_logprob.clone());
            self.out.push(Output::Finished { id, choice, finish, stop_logprob, drafts });
            if planted(Plant::FinishTwice) && self.stats.finished.is_multiple_of(7) {
                self.out.extend(self.out.last().cloned());
            }
        }
        let live = self.live.get_mut(&id).expect("an ended request has no sequences");
        live.sequences.retain(|&other| other != key);
        if live.sequences.is_empty() {
            if let Some(deadline) = live.deadline {
                self.deadlines.remove(&(deadline, id));
            }
            self.turns.leave(live.call);
            self.live.remove(&id);
        }
        let sequence = &mut self.sequences[key];
        let rank = sequence.rank();
        match &mut sequence.place {
            Place::Waiting => {
                self.queue.remove(rank);
                self.refused = None;
                self.sequences.remove(key);
            }
            Place::Seated(at) => {
                if at.leaving.is_none() {
                    self.leaving += 1;
                }
                at.leaving = Some(Leaving::Ended);
                if planted(Plant::LeakOnCancel) && finish == Finish::Cancelled {
                    at.table.pop();
                }
                if planted(Plant::HoldAfterCancel) && finish == Finish::Cancelled {
                    at.flying += 1;
                }
                if planted(Plant::DoubleRelease)
                    && let Some(&page) = at.table.last()
                {
                    at.table.push(page);
                }
                if at.flying == 0 || planted(Plant::FreeInFlight) {
                    self.vacate(key);
                }
            }
        }
    }

    /// Frees the seat and pages of a sequence that is leaving, then queues it again or removes it.
    fn vacate(&mut self, key: Key) {
        self.drop_states(key);
        let sequence = &mut self.sequences[key];
        let Place::Seated(at) = std::mem::replace(&mut sequence.place, Place::Waiting) else {
            return;
        };
        self.refused = None;
        self.leaving -= 1;
        self.seated -= 1;
        self.reserved -= sequence.cold.unforked;
        self.seats[at.seat.0 as usize] = None;
        self.pool.give_table(&std::mem::take(&mut sequence.cold.reserve));
        self.pool.give_table(&at.table);
        for (source, _) in sequence.cold.copies.drain(..) {
            self.pool.give(source);
        }
        self.pool.close(at.cursor);
        match at.leaving {
            Some(Leaving::ToQueue) => self.wait_again(key),
            _ => drop(self.sequences.remove(key)),
        }
    }

    /// Vacates a leaving sequence unless a row of it is in flight. It may be gone already.
    fn vacate_if_done(&mut self, key: Key) {
        let at = self.sequences.get(key).and_then(Sequence::seated);
        if at.is_some_and(|at| at.leaving.is_some() && at.flying == 0) {
            self.vacate(key);
        }
    }

    fn wait_again(&mut self, key: Key) {
        let sequence = &mut self.sequences[key];
        if !sequence.announced {
            sequence.cold.scores.clear();
            if !planted(Plant::KeepHidden) {
                sequence.cold.hidden.clear();
            }
        }
        if planted(Plant::ForgetAnswer) && sequence.answer_len() > 0 {
            sequence.tokens.pop();
        }
        if planted(Plant::LoseRequeued) && sequence.answer_len() == 3 {
            return;
        }
        self.queue.push(sequence.rank(), sequence.cold.arrival, key);
    }

    fn is_prefilling(&self, id: RequestId) -> bool {
        self.live.get(&id).is_some_and(|live| {
            live.sequences.iter().any(|&key| {
                let sequence = &self.sequences[key];
                sequence.seated().is_some_and(|at| at.fed < sequence.prompt_len)
            })
        })
    }

    /// Whether a request was accepted and has not ended.
    pub(crate) fn holds(&self, id: RequestId) -> bool {
        self.live.contains_key(&id)
    }

    /// Steps launched and not yet confirmed.
    pub(crate) fn in_flight(&self) -> usize {
        self.flights.len() + self.stale_in_flight
    }

    /// Whether a launch of several steps is in flight. If so, it is the last one launched.
    pub(crate) fn repeating(&self) -> bool {
        self.flights.back().is_some_and(|flight| flight.steps > 1)
    }

    /// Whether the next step should be formed soon: a request waits that admission has not refused since
    /// pages or seats last changed, or a leaving sequence holds its seat until its row is back.
    pub(crate) fn is_urgent(&self) -> bool {
        let refused = self.refused == Some(self.pool.epoch());
        self.leaving > 0 || (!self.queue.is_empty() && !refused)
    }

    /// Whether events of the cache are collected.
    pub(crate) fn tells(&self) -> bool {
        self.config.cache_events
    }

    pub(crate) fn take_cache_events(&mut self) -> Vec<CacheEvent> {
        self.pool.take_events()
    }

    pub(crate) fn depth(&self) -> usize {
        self.config.depth
    }

    /// No live request, no step in flight, no sequence, no copy under way.
    pub(crate) fn is_idle(&self) -> bool {
        let copies = self.fetches.len() + self.saving.len();
        let steps = self.in_flight() > 0 || self.stalled;
        self.live.is_empty() && !steps && self.sequences.is_empty() && copies == 0
    }

    pub(crate) fn stats(&self) -> EngineStats {
        EngineStats {
            waiting: self.queue.len() as u32,
            running: self.seated,
            in_flight: self.in_flight() as u32,
            pages: self.pool.counts(),
            ..self.stats
        }
    }

    /// Invariants that hold after every step. Cheap, so they are always checked.
    pub(crate) fn check(&self) {
        let pages = self.pool.counts();
        assert!(pages.balances(), "the page ledger does not balance: {pages:?}");
        assert!(self.seated + self.reserved <= self.seat_limit, "more seats in use than covered");
        assert!(!self.live.is_empty() || self.turns.is_empty(), "a call outlived its requests");
    }
}
