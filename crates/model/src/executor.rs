//! The engine's device: a step of the engine becomes a step of the graph runners, and back.

use crate::adapter::Adapters;
use crate::observe::{self, PromptLogits, Scored};
use crate::sleep::Holding;
use crate::spec::SpecUse;
use crate::spec::pace::{Candidate, Pace};
use crate::store::Stores;
use device::{Device, DeviceKind, Report, StepLimits, Tensor};
use engine::exec::{
    Coverage, ExecError, Executor, Geometry, Join, Kept, Row, RowResult, Sampled, StateCopy, Step,
    StepKind, StepResult,
};
use engine::request::Pooling;
use engine::store::{Store, StoreUse};
use graph::mail::{
    JoinInput, MailError, PageInput, SeatParams, StateInput, StepInput, StepOutput, TokenOutput,
};
use graph::program::Program;
use graph::runner::{ExpertLoad, Profile, Ran, RunError, Runners};
use graph::{Counters, Phase, Plan, Reason};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Pages at the end of every seat's table that only drafts reach, so that a row has room for drafts to its last token.
pub(crate) fn draft_pages(limits: &StepLimits) -> u32 {
    (limits.tokens_per_row - 1).div_ceil(limits.page_size)
}

/// What the layers of a program keep.
pub(crate) fn kept(program: &Program) -> Kept {
    let graph::program::Kept { full, windowed, window, .. } = program.kept();
    // A program without caches still has a page table.
    if full + windowed == 0 { Kept::ALL } else { Kept { full, windowed, window } }
}

/// Runs steps by replaying device graphs.
#[derive(Debug)]
pub struct GraphExecutor {
    runners: Runners,
    geometry: Geometry,
    /// Width of the vectors that it reports.
    width: u32,
    /// Most tokens of a prompt, where the program publishes vectors.
    whole: Option<u32>,
    /// Kept between steps, so that steady decode allocates nothing for it.
    input: StepInput,
    /// The same for what comes back.
    output: StepOutput,
    spare: Vec<RowResult>,
    /// The steps in flight, oldest first.
    flight: VecDeque<Flight>,
    last: Option<Ran>,
    /// State was lost: the runners restart before the next step.
    lost: bool,
    /// Keeps evicted pages.
    pub(crate) store: Option<Stores>,
    /// What is known about the weights.
    pub(crate) holding: Holding,
    /// The adapters that may be put into slots.
    pub(crate) adapters: Adapters,
    /// Chooses drafts, if steps can have some.
    pace: Option<Pace>,
    /// For benchmarks: the drafts of every row, and how many are accepted whatever they are.
    forced: Option<(u32, u32)>,
    /// The rows of the step to be launched, and lists for later ones.
    candidates: Vec<Vec<Candidate>>,
    /// When the last result came, and when it was last looked for.
    last_result: Option<Instant>,
    looked: Option<Instant>,
}

/// A step in flight.
#[derive(Debug)]
struct Flight {
    number: u64,
    /// What was observed of each row; empty when no row asked.
    observed: Vec<Vec<Scored>>,
    /// If the step publishes vectors: for each row that asked for its own what it is multiplied by.
    vectors: Vec<Option<f64>>,
    /// Of a decode step where drafts are chosen.
    decode: Option<DecodeFlight>,
}

/// What is measured of a decode step.
#[derive(Debug)]
struct DecodeFlight {
    rows: Vec<Candidate>,
    bucket: u32,
    q_len: u32,
    /// It replays a graph.
    replays: bool,
    launched: Instant,
    /// The time of all its steps, on a device that runs them within the launch.
    within: Option<Duration>,
    /// Results so far.
    results: u32,
}

impl GraphExecutor {
    /// Over runners whose graphs are recorded.
    pub fn new(runners: Runners) -> GraphExecutor {
        let bindings = runners.bindings();
        let limits = bindings.state.limits;
        let geometry = Geometry {
            seats: limits.seats,
            pages: bindings.kv.first().map_or(0, |kv| kv.pages),
            page_size: limits.page_size,
            // The rest is for drafts that are not accepted.
            pages_per_seat: limits.pages_per_seat - draft_pages(&limits),
            vocab: limits.vocab,
            kept: kept(runners.program()),
        };
        let program = runners.program();
        let width = program.publishes().unwrap_or(program.shape.hidden);
        let longest = program.shape.max_positions.min(limits.tokens);
        let whole = program.publishes().map(|_| longest);
        let pace = (!runners.decode.config().q_lens.is_empty()).then(Pace::default);
        GraphExecutor {
            runners,
            geometry,
            width,
            whole,
            input: StepInput::default(),
            output: StepOutput::default(),
            spare: Vec::new(),
            flight: VecDeque::new(),
            last: None,
            lost: false,
            store: None,
            holding: Holding::default(),
            adapters: Adapters::new(limits.seats),
            pace,
            forced: None,
            candidates: Vec::new(),
            last_result: None,
            looked: None,
        }
    }

    /// The same with memory for evicted pages.
    pub(crate) fn with_store(self, store: Option<Stores>) -> GraphExecutor {
        GraphExecutor { store, ..self }
    }

    /// No step is in flight.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.flight.is_empty()
    }

    /// The runners: plans, graphs and memory.
    pub fn runners(&self) -> &Runners {
        &self.runners
    }

    /// The runners, to measure them. Do not launch here: the executor would lose track of steps in flight.
    pub fn runners_mut(&mut self) -> &mut Runners {
        &mut self.runners
    }

    /// The device it runs on.
    pub fn device(&self) -> &Device {
        self.runners.device()
    }

    /// Exact sizes of everything it holds.
    pub fn report(&self) -> &Report {
        self.runners.arena().report()
    }

    /// What happened so far to steps of a kind.
    pub fn counters(&self, kind: StepKind) -> &Counters {
        self.runners.counters(match kind {
            StepKind::Decode => Phase::Decode,
            StepKind::Prefill => Phase::Prefill,
        })
    }

    /// What the experts of each layer have done; waits for the steps under way.
    pub fn expert_loads(&self) -> Result<Vec<ExpertLoad>, RunError> {
        self.runners.expert_loads()
    }

    /// How the last step launched ran.
    pub fn last_ran(&self) -> Option<&Ran> {
        self.last.as_ref()
    }

    /// The logits of a row of the last step launched; waits for it. For tests and tools: a server
    /// never reads them.
    pub fn read_logits(&self, row: u32) -> device::Result<Vec<f32>> {
        let logits = self.logits().expect("a step was launched by its bucket's plan");
        let bytes = logits.dtype.bytes(logits.cols as usize) as u64;
        let at = u64::from(row) * logits.dtype.bytes(logits.stride as usize) as u64;
        let raw = self.device().read(self.runners.arena(), logits.span.part(at, bytes))?;
        Ok(logits.dtype.decode(&raw))
    }

    /// The logits after each of the `tokens` tokens that the last step launched fed as one prompt; `None` if that step
    /// was not a prefill step. For tools that compare models.
    pub(crate) fn prompt_logits(&self, tokens: u32) -> device::Result<Option<PromptLogits<'_>>> {
        let Some(plan) = self.last_plan() else { return Ok(None) };
        PromptLogits::of(&self.runners, plan, tokens)
    }

    fn logits(&self) -> Option<Tensor> {
        let nodes = &self.last_plan()?.nodes;
        nodes.iter().find_map(|node| {
            let device::Op::Sample(sample) = &node.op else { return None };
            Some(sample.logits)
        })
    }

    /// The plan of the last step launched.
    pub(crate) fn last_plan(&self) -> Option<&Plan> {
        let key = &self.last.as_ref()?.key;
        match key.phase {
            Phase::Decode => self.runners.decode.plan_of(key),
            Phase::Prefill => self.runners.prefill.plan_of(key),
        }
    }

    fn start(&mut self, step: &Step) -> Result<(), RunError> {
        let (q_len, mut decode) = self.q_len(step);
        let forced = self.forced.map_or(0, |(_, accepted)| accepted);
        let per_table = self.runners.bindings().state.limits.pages_per_seat;
        translate(step, (q_len, forced), per_table, &mut self.input);
        self.input.adapters = self.adapters.serve(step);
        let number = step.number;
        if let Some(pooling) = step.pooling().filter(|_| self.whole.is_none()) {
            let which = usize::from(pooling != Pooling::Mean);
            self.last = Some(self.runners.launch_other(which, &self.input)?.ran);
            let vectors = step.rows.iter().map(factor).collect();
            self.flight.push_back(Flight { number, observed: Vec::new(), vectors, decode: None });
            return Ok(());
        }
        self.last = Some(self.runners.launch(&self.input)?.ran);
        if let Some(decode) = &mut decode {
            decode.replays = self.last.as_ref().is_some_and(|ran| ran.eager.is_none());
            let here = self.device().kind() == DeviceKind::Cpu;
            decode.within = here.then(|| self.runners.replay_call());
        }
        let asked = step.rows.iter().any(|row| row.score().is_some());
        let observed = match self.last_plan().filter(|_| asked) {
            Some(plan) => observe::observe(&self.runners, plan, step)?,
            None => Vec::new(),
        };
        if let Some(last) = self.last.as_mut().filter(|last| asked && last.eager.is_none()) {
            last.eager = Some(Reason::Scored);
            self.runners.count_scored();
        }
        let all = self.whole.map(|_| vec![Some(1.0); step.rows.len()]);
        self.flight.push_back(Flight {
            number,
            observed,
            vectors: all.unwrap_or_default(),
            decode,
        });
        Ok(())
    }

    /// Measures the nodes of some steps.
    pub fn profile(&mut self, profile: Profile) {
        self.runners.profile(profile);
    }

    /// For benchmarks: every decode step has so many drafts, and accepts so many of them whatever they are. What it then
    /// generates is not the model's text.
    pub fn force_drafts(&mut self, drafts: u32, accepted: u32) {
        self.forced = Some((drafts, accepted));
    }

    /// What drafts did so far; `None` if steps have none.
    pub fn spec_use(&self) -> Option<&SpecUse> {
        self.pace.as_ref().map(Pace::used)
    }

    /// Tokens that every row of a step feeds: more than one, with drafts, where that pays. Also what is to be measured.
    fn q_len(&mut self, step: &Step) -> (u32, Option<DecodeFlight>) {
        let Some(pace) = &mut self.pace else { return (1, None) };
        step.joins.iter().for_each(|join| pace.join(join.seat.0));
        let config = self.runners.decode.config();
        let Some(bucket) = config.buckets.fit(step.rows.len() as u32) else { return (1, None) };
        if step.kind() != StepKind::Decode {
            return (1, None);
        }
        let mut rows = self.candidates.pop().unwrap_or_default();
        rows.clear();
        rows.extend(step.rows.iter().map(|row| Candidate { seat: row.seat.0, most: row.most }));
        let covers = |q_len| config.covers(bucket, q_len);
        let q_len = match self.forced {
            Some((drafts, _)) => drafts + 1,
            None => pace.choose(bucket, &rows, covers, &config.q_lens),
        };
        let (launched, replays, within, results) = (Instant::now(), false, None, 0);
        let flight = DecodeFlight { rows, bucket, q_len, replays, launched, within, results };
        (q_len, Some(flight))
    }

    /// Takes the measurements of a result of the oldest step in flight; `late` if it may have been there for a while.
    fn measure(&mut self, late: bool) {
        let now = Instant::now();
        let before = self.last_result.replace(now);
        let Some(flight) = self.flight.front_mut() else { return };
        let (Some(decode), Some(pace)) = (&mut flight.decode, &mut self.pace) else { return };
        decode.results += 1;
        pace.ran(decode.q_len);
        if decode.q_len > 1 {
            for (index, (row, tokens)) in decode.rows.iter().zip(self.output.rows()).enumerate() {
                let limit = row.most.min(decode.q_len) - 1;
                if limit > 0 {
                    let drafted = self.output.drafts(index);
                    pace.returned(row.seat, limit, drafted, tokens.len() as u32);
                }
            }
        }
        let took = match decode.within {
            Some(within) => (!self.output.more_follow).then(|| within / decode.results),
            None => {
                let begin = before.map_or(decode.launched, |before| before.max(decode.launched));
                (!late).then(|| now - begin)
            }
        };
        if let Some(took) = took.filter(|_| decode.replays) {
            pace.measured(decode.bucket, decode.q_len, took.as_secs_f64() * 1e6);
        }
    }

    fn state_lost(&mut self, error: &RunError) -> ExecError {
        self.lost = true;
        self.flight.clear();
        ExecError::StateLost(error.to_string())
    }
}

impl Executor for GraphExecutor {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn coverage(&self) -> Coverage {
        let coverage = self.runners.coverage();
        let limits = self.runners.bindings().state.limits;
        // A disabled phase replays nothing but can still run every step op by op.
        let or = |covered: u32, limit: u32| if covered == 0 { limit } else { covered };
        let prefill_tokens = or(coverage.prefill_tokens, limits.tokens);
        Coverage {
            decode_rows: or(coverage.decode_rows, limits.rows),
            prefill_tokens,
            prefill_rows: or(coverage.prefill_rows, limits.rows.min(prefill_tokens)),
        }
    }

    fn scores_prompts(&self) -> bool {
        self.whole.is_none()
    }

    fn carries_state(&self) -> bool {
        !self.runners.bindings().carries.is_empty()
    }

    fn state_copies(&self) -> u32 {
        self.runners.bindings().carry_copies.first().map_or(0, |copies| copies.rows)
    }

    fn whole_prompts(&self) -> Option<u32> {
        self.whole
    }

    fn hidden(&self) -> Option<u32> {
        Some(self.width)
    }

    fn prefill_buckets(&self) -> Vec<u32> {
        match self.runners.coverage().prefill_tokens {
            // Steps that run op by op have no sizes.
            0 => Vec::new(),
            _ => self.runners.prefill.config().buckets.sizes.clone(),
        }
    }

    fn steps(&self) -> u32 {
        self.runners.decode.config().steps
    }

    fn tokens_per_row(&self) -> u32 {
        self.runners.bindings().state.limits.tokens_per_row
    }

    fn adapters(&self) -> u32 {
        self.adapter_room().map_or(0, |room| room.slots)
    }

    fn begin_adapter(&mut self, slot: u32, adapter: u64) {
        self.fill_slot(slot, adapter);
    }

    fn poll_adapters(
        &mut self,
        filled: &mut Vec<(u32, u64)>,
        block: bool,
    ) -> Result<(), ExecError> {
        self.filled_slots(filled, block)
    }

    fn stop_loop(&mut self) {
        self.runners.stop_loop();
    }

    fn store(&mut self) -> Option<&mut dyn Store> {
        if self.store.is_some() { Some(self) } else { None }
    }

    fn store_uses(&self) -> Vec<StoreUse> {
        self.store.as_ref().map(Stores::uses).unwrap_or_default()
    }

    fn recycle(&mut self, mut result: StepResult) {
        result.rows.clear();
        self.spare = result.rows;
    }

    fn launch(&mut self, step: &Step) -> Result<(), ExecError> {
        if let Some(why) = self.cannot_run() {
            return Err(ExecError::NotLaunched(why.into()));
        }
        if self.lost {
            // A device that cannot even be reset will not run anything again.
            self.runners.reset().map_err(|error| ExecError::Gone(error.to_string()))?;
            self.lost = false;
        }
        match self.start(step) {
            Ok(()) => Ok(()),
            Err(error @ RunError::NotCovered { .. }) => {
                Err(ExecError::NotCovered(error.to_string()))
            }
            Err(error @ RunError::Mail(MailError::Device(_))) => Err(self.state_lost(&error)),
            Err(error @ RunError::Mail(_)) => Err(ExecError::NotLaunched(error.to_string())),
            Err(error) => Err(self.state_lost(&error)),
        }
    }

    fn poll(&mut self, block: bool) -> Result<Option<StepResult>, ExecError> {
        if self.flight.is_empty() {
            return Ok(None);
        }
        let mut vigil = Vigil::default();
        let mut late = self.looked.is_none_or(|looked| looked.elapsed() > LATE);
        loop {
            match self.runners.poll_into(&mut self.output) {
                Err(error) => return Err(self.state_lost(&error)),
                Ok(false) if block => {
                    late = false;
                    std::hint::spin_loop();
                    if vigil.is_over()
                        && let Err(error) = self.device().alive()
                    {
                        return Err(self.state_lost(&error.into()));
                    }
                }
                Ok(false) => {
                    self.looked = Some(Instant::now());
                    return Ok(None);
                }
                Ok(true) => break,
            }
        }
        if self.pace.is_some() {
            self.looked = Some(Instant::now());
            self.measure(late);
        }
        let mut rows = std::mem::take(&mut self.spare);
        rows.extend(self.output.rows_drafted().map(row_result));
        let more_follow = self.output.more_follow;
        let Some(flight) = self.flight.front_mut() else { return Ok(None) };
        for (index, (row, factor)) in rows.iter_mut().zip(flight.vectors.drain(..)).enumerate() {
            let vector = self.output.vector(index).iter();
            let vector = factor.map(|factor| vector.map(|x| f64::from(*x) * factor).collect());
            if vector.is_some() {
                row.detail.get_or_insert_default().hidden = vector;
            }
        }
        for (row, observed) in rows.iter_mut().zip(flight.observed.drain(..)) {
            if !observed.is_empty() {
                row.detail.get_or_insert_default().scores = observed;
            }
        }
        let number = flight.number;
        if !more_follow
            && let Some(decode) = self.flight.pop_front().and_then(|flight| flight.decode)
        {
            self.candidates.push(decode.rows);
        }
        Ok(Some(StepResult { number, more_follow, rows, took: None }))
    }
}

/// What the vector of a row is multiplied by; `None` if it asks for none. The engine adds up the states of all chunks.
fn factor(row: &Row) -> Option<f64> {
    row.hidden().map(|pooling| match pooling {
        Pooling::Mean => row.tokens().len() as f64,
        Pooling::Last | Pooling::Model => 1.0,
    })
}

/// A result that was not looked for during this time may have been there for a while.
const LATE: Duration = Duration::from_micros(200);

/// Decides when a wait for a result checks the device: one whose kernel failed never writes a result.
#[derive(Default)]
struct Vigil {
    polls: u32,
    since: Option<Instant>,
}

impl Vigil {
    /// Longer than any step but a very long prompt's.
    const TIME: Duration = Duration::from_millis(250);
    /// Polls between two looks at the clock.
    const POLLS: u32 = 4096;

    /// Counts a poll that found nothing; returns whether it is time to check.
    fn is_over(&mut self) -> bool {
        self.polls = (self.polls + 1) % Self::POLLS;
        if self.polls > 0 {
            return false;
        }
        let over = self.since.get_or_insert_with(Instant::now).elapsed() >= Self::TIME;
        if over {
            self.since = Some(Instant::now());
        }
        over
    }
}

/// Converts the engine's step to the runners' input, reusing its lists.
/// A step whose rows have `q_len` tokens accepts `forced` drafts whatever they are. A page table has `per_table` entries.
fn translate(step: &Step, (q_len, forced): (u32, u32), per_table: u32, input: &mut StepInput) {
    input.steps = step.steps;
    input.q_len = if q_len > 1 { q_len } else { 0 };
    input.rows.clear();
    input.tokens.clear();
    input.masks.clear();
    for row in &step.rows {
        match q_len {
            1 => input.add(row.seat.0, row.tokens(), row.sample),
            _ => {
                input.add_verified(row.seat.0, row.most.min(q_len) - 1);
                input.force(forced);
            }
        }
    }
    for (row, mask) in &step.masks {
        input.mask(*row, mask.clone());
    }
    input.joins.clear();
    input.joins.extend(step.joins.iter().map(join));
    input.pages.clear();
    input.pages.extend(step.pages.iter().map(|entry| PageInput {
        seat: entry.seat.0,
        index: entry.table * per_table + entry.index,
        page: entry.page.0,
    }));
    input.copies.clear();
    input.copies.extend(step.copies.iter().map(|(from, to)| (from.0, to.0)));
    input.states.clear();
    input.states.extend(step.states.iter().map(|copy| match *copy {
        StateCopy::Restore { slot, seat } => StateInput { seat: seat.0, slot, restores: true },
        StateCopy::Save { seat, slot } => StateInput { seat: seat.0, slot, restores: false },
    }));
}

fn join(join: &Join) -> JoinInput {
    let from = &join.params;
    let params = SeatParams {
        temperature: from.temperature,
        top_k: from.top_k,
        top_p: from.top_p,
        min_p: from.min_p,
        repetition: from.repetition_penalty,
        frequency: from.frequency_penalty,
        presence: from.presence_penalty,
        logprobs: from.logprobs,
        sampled_logprobs: from.sampled_logprobs,
        seed: from.seed,
        min_len: from.min_len,
        adapter: from.adapter,
        stop_tokens: from.stop_tokens.clone(),
        biases: from.logit_bias.clone(),
    };
    let (seat, len, last_token) = (join.seat.0, join.len, join.last_token);
    let (seen, history) = (from.seen.clone(), join.history.clone());
    JoinInput { seat, len, last_token, params, seen, history }
}

fn row_result((row, drafted): (&mut [TokenOutput], u32)) -> RowResult {
    let sampled = |found: &mut TokenOutput| Sampled {
        token: found.token,
        stopped: found.stopped,
        logprob: found.logprob.take().map(Box::new),
    };
    RowResult { tokens: row.iter_mut().map(sampled).collect(), drafted, detail: None }
}
