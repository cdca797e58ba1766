//! Both runners and the mailbox they share.

use super::Debug as Debugging;
use super::base::Choice;
use super::profile::Profile;
use super::{Decode, Prefill, Progress, Ran, RunError, Runner, RunnerConfig, StepShape};
use crate::compile::{Bindings, CompileError, CompileTarget};
use crate::mail::{GivenRows, MailError, Mailbox, StateInput, StepInput, StepOutput};
use crate::prep::Inputs;
use crate::program::Program;
use crate::{Counters, Form, Phase, Prep, Reason, ShapeKey};
use device::{Arena, Device, Node, Region, Span, Stopwatch, Tensor, nvtx};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A step that is on its way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    /// Its launch number, as the device counts: 1, 2, 3, …
    pub number: u64,
    /// How it ran.
    pub ran: Ran,
}

/// What the experts of a layer have done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertLoad {
    /// The layer.
    pub layer: u32,
    /// Tokens of each expert.
    pub tokens: Vec<u64>,
    /// Experts that had tokens, added up over all steps.
    pub chosen: u64,
    /// Steps.
    pub steps: u64,
}

/// What can replay, so that a scheduler never forms a step that cannot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coverage {
    /// Most rows of a decode step.
    pub decode_rows: u32,
    /// Most tokens of a prefill step.
    pub prefill_tokens: u32,
    /// Most rows of a prefill step.
    pub prefill_rows: u32,
}

/// A model that is ready to run steps.
#[derive(Debug)]
pub struct Runners {
    device: Device,
    arena: Arena,
    bindings: Arc<Bindings>,
    /// Steps of one token per row.
    pub decode: Runner<Decode>,
    /// Steps with prompt chunks.
    pub prefill: Runner<Prefill>,
    /// Programs over the same weights whose prefill steps publish vectors.
    others: Vec<Other>,
    mailbox: Mailbox,
    /// The host's mirror of the seats, where it prepares decode steps.
    inputs: Option<Inputs>,
    /// Key and rows of the launch under way that repeats.
    repeating: Option<(ShapeKey, u32)>,
    /// What the last launch's call to the device took.
    replay: Duration,
    watch: Option<Watch>,
    profile: Option<Profile>,
}

/// A program beside the model's own. Its graphs are recorded when a step first needs them.
#[derive(Debug)]
struct Other {
    program: Arc<Program>,
    runner: Option<Runner<Prefill>>,
}

/// Marks around launches.
#[derive(Debug)]
struct Watch {
    stopwatch: Stopwatch,
    launches: usize,
    seen: usize,
}

impl Runners {
    /// Makes all plans and initialises the step's state. The caller fills the weights and the rope
    /// table, before or after.
    pub fn new(
        device: &Device,
        arena: &Arena,
        program: Program,
        target: CompileTarget,
        mut bindings: Bindings,
        decode: RunnerConfig,
        prefill: RunnerConfig,
    ) -> Result<Runners, RunError> {
        bindings.state.repeats = decode.steps > 1;
        match (decode.prep, bindings.inputs) {
            (Prep::Device, _) => bindings.inputs = None,
            (_, Some(_)) => {}
            (prep, None) => {
                let (what, problem) = (format!("inputs for {prep}"), "not bound".into());
                return Err(CompileError::Binding { what, problem }.into());
            }
        }
        let (program, bindings) = (Arc::new(program), Arc::new(bindings));
        let mailbox = Mailbox::new(arena, &bindings.state)?;
        let decode =
            Runner::new(device, arena, program.clone(), target.clone(), bindings.clone(), decode)?;
        let prefill = Runner::new(device, arena, program, target, bindings.clone(), prefill)?;
        let (device, arena) = (device.clone(), arena.clone());
        let (inputs, repeating, replay, watch) = (None, None, Duration::ZERO, None);
        let mut runners = Runners {
            device,
            arena,
            bindings,
            decode,
            prefill,
            others: Vec::new(),
            mailbox,
            inputs,
            repeating,
            replay,
            watch,
            profile: None,
        };
        runners.reset()?;
        Ok(runners)
    }

    /// The same with programs over the same weights that publish vectors, for which memory was laid out.
    pub fn with_others(mut self, others: Vec<Program>) -> Runners {
        let other = |program| Other { program: Arc::new(program), runner: None };
        self.others = others.into_iter().map(other).collect();
        self
    }

    /// The runner of another program; makes its plans the first time.
    fn other(&mut self, which: usize) -> Result<&mut Runner<Prefill>, RunError> {
        let other = &mut self.others[which];
        if let Some(ref mut runner) = other.runner {
            return Ok(runner);
        }
        let (device, arena, bindings) = (&self.device, &self.arena, self.bindings.clone());
        let (target, config) = (self.prefill.target().clone(), self.prefill.config().clone());
        let program = other.program.clone();
        let runner = Runner::new(device, arena, program, target, bindings, config)?;
        Ok(other.runner.insert(runner))
    }

    /// What happened so far to steps of another program; `None` if it had none.
    pub fn counters_of_other(&self, which: usize) -> Option<&Counters> {
        Some(self.others.get(which)?.runner.as_ref()?.counters())
    }

    /// What happened so far, of both phases and of other programs.
    pub fn all_counters(&self) -> impl Iterator<Item = &Counters> {
        let others = self.others.iter().filter_map(|other| other.runner.as_ref());
        let own = Phase::ALL.map(|phase| self.counters(phase));
        own.into_iter().chain(others.map(Runner::counters))
    }

    /// Counts that the end of a prefill step that replayed ran again, op by op, for log-probabilities of prompts.
    pub fn count_scored(&mut self) {
        self.prefill.scored();
    }

    /// Records all graphs of both phases, decode first.
    pub fn record_all(
        &mut self,
        progress: &mut dyn FnMut(Phase, Progress),
    ) -> Result<(), RunError> {
        // Compile both phases' kernels together: with a cold cache this takes as long as the slowest kernels.
        let mut wanted = self.decode.wanted();
        wanted.extend(self.prefill.wanted());
        self.decode.prepare(&wanted)?;
        self.decode.record_buckets(&mut |at| progress(Phase::Decode, at))?;
        self.prefill.record_buckets(&mut |at| progress(Phase::Prefill, at))
    }

    /// A summary of recording at start, in one line: graphs, seconds without compiling, bytes.
    pub fn recording(&self) -> String {
        fn phase(what: &str, recorded: &[(ShapeKey, u64)], time: Duration) -> String {
            let bytes = recorded.iter().map(|(_, bytes)| bytes).sum();
            let (count, seconds) = (recorded.len(), time.as_secs_f64());
            format!("{count} {what} in {seconds:.3} s, {}", crate::plan::bytes(bytes))
        }
        let (decode, prefill) = (&self.decode, &self.prefill);
        let decode = phase("decode", &decode.recorded(), decode.recording_time());
        let prefill = phase("prefill", &prefill.recorded(), prefill.recording_time());
        format!("graphs recorded: {decode}; {prefill}")
    }

    /// Records all graphs again, after a weight change.
    pub fn re_record(&mut self, progress: &mut dyn FnMut(Phase, Progress)) -> Result<(), RunError> {
        self.others.iter_mut().for_each(|other| other.runner = None);
        self.decode.re_record(&mut |at| progress(Phase::Decode, at))?;
        self.prefill.re_record(&mut |at| progress(Phase::Prefill, at))
    }

    /// What the experts of each layer have done since the last reset; waits for the steps under way.
    pub fn expert_loads(&self) -> Result<Vec<ExpertLoad>, RunError> {
        let loads = self.program().experts().filter_map(|experts| {
            let span = *self.bindings.loads.get(&experts.gate_up.name)?;
            Some((experts.layer, span, experts.count as usize))
        });
        let read = |(layer, span, experts): (u32, Span, usize)| {
            let bytes = self.device.read(&self.arena, span)?;
            let counts = bytes.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
            let mut tokens: Vec<u64> = counts.take(experts + 2).collect();
            let (steps, chosen) = (tokens.pop().unwrap_or(0), tokens.pop().unwrap_or(0));
            Ok(ExpertLoad { layer, tokens, chosen, steps })
        };
        loads.map(read).collect()
    }

    /// Empties every seat and restarts the launch count; used after an error that may have lost state.
    pub fn reset(&mut self) -> Result<(), RunError> {
        self.device.sync()?;
        let state = &self.bindings.state;
        let tables = crate::slot::SLOTS.iter().filter_map(|slot| (slot.table)(state));
        let spans: Vec<Span> = tables
            .map(|table| table.span)
            .chain(self.bindings.scratch)
            .chain(self.bindings.exchange)
            .chain(self.bindings.loads.values().copied())
            .chain(state.mail)
            .chain([state.ring, state.leave])
            .chain(self.bindings.inputs.iter().flat_map(|inputs| inputs.blocks))
            .collect();
        for span in spans {
            debug_assert!(span.region != Region::Weights && span.region != Region::Kv);
            self.device.write(&self.arena, span, &vec![0; span.len as usize])?;
        }
        let prep = self.decode.config().prep;
        let spans = self.bindings.inputs.filter(|_| prep != Prep::Device);
        let inputs = |spans| Inputs::new(&self.arena, prep, spans, state.limits);
        self.inputs = spans.map(inputs).transpose()?;
        self.mailbox = Mailbox::new(&self.arena, state)?.with_given(self.inputs.is_some());
        self.repeating = None;
        Ok(())
    }

    /// What it computes.
    pub fn program(&self) -> &Program {
        self.decode.program()
    }

    /// What can replay.
    pub fn coverage(&self) -> Coverage {
        let prefill_tokens = self.prefill.coverage();
        let prefill_rows = prefill_tokens.min(self.bindings.state.limits.rows);
        Coverage { decode_rows: self.decode.coverage(), prefill_tokens, prefill_rows }
    }

    /// What happened so far, per phase.
    pub fn counters(&self, phase: Phase) -> &Counters {
        match phase {
            Phase::Decode => self.decode.counters(),
            Phase::Prefill => self.prefill.counters(),
        }
    }

    /// Launches whose results have not been taken.
    pub fn in_flight(&self) -> u64 {
        self.mailbox.in_flight()
    }

    /// Starts a step. An error leaves the device unchanged unless it is [`RunError::Device`].
    pub fn launch(&mut self, input: &StepInput) -> Result<Launched, RunError> {
        self.launch_as(None, input)
    }

    /// Starts a prefill step of another program, which publishes vectors and samples nothing.
    ///
    /// # Panics
    /// If there is none ([`Runners::with_others`]).
    pub fn launch_other(&mut self, which: usize, input: &StepInput) -> Result<Launched, RunError> {
        self.launch_as(Some(which), input)
    }

    fn launch_as(&mut self, other: Option<usize>, input: &StepInput) -> Result<Launched, RunError> {
        let shape = input.shape();
        for given in &input.given {
            self.place_of(given)?;
        }
        let next = self.mailbox.launched() + 1;
        let mut choice = match shape.phase {
            Phase::Decode => {
                // A profile sees every step.
                let steps = if self.profile.is_some() { 1 } else { input.steps };
                let form = self.decode.form(&shape, next, steps);
                self.decode.choose(&shape, form)?
            }
            Phase::Prefill => match other {
                Some(which) => {
                    let runner = self.other(which)?;
                    runner.make_ready(&shape)?;
                    runner.choose(&shape, Form::Once)?
                }
                None => self.prefill.choose(&shape, Form::Once)?,
            },
        };
        if self.profile.as_ref().is_some_and(|profile| profile.wants(next)) {
            choice.eager = choice.eager.or(Some(Reason::Profiled));
        }
        let _range = nvtx::range(|| {
            let how = if choice.eager.is_some() { ", op by op" } else { "" };
            format!("step {next} {}: {} tokens{how}", choice.key, shape.tokens)
        });
        let number = self.mailbox.post(input, &choice.key)?;
        let prepared = self.prepare(input, &choice.key, choice.eager.is_none(), number);
        let start = Instant::now();
        let ran = prepared.and_then(|()| self.run(other, &shape, &choice, number));
        self.replay = start.elapsed();
        match ran {
            Ok(ran) => {
                self.mailbox.sent();
                if other.is_some() || self.program().publishes().is_some() {
                    self.mailbox.publishes();
                }
                if let Some(inputs) = &mut self.inputs {
                    inputs.launched(input, number);
                }
                if choice.key.form == Form::Repeated {
                    self.repeating = Some((choice.key, shape.rows));
                }
                Ok(Launched { number, ran })
            }
            Err(error) => {
                self.mailbox.not_sent();
                Err(error)
            }
        }
    }

    /// Puts on the device what the graph needs first: copied pages, and the inputs if the host prepares
    /// them.
    fn prepare(
        &mut self,
        input: &StepInput,
        key: &ShapeKey,
        replays: bool,
        number: u64,
    ) -> Result<(), RunError> {
        self.copy_pages(&input.copies)?;
        self.copy_states(&input.states)?;
        for given in &input.given {
            let place = self.place_of(given)?;
            // A step under way may still read the previous rows.
            self.device.sync()?;
            let mut bytes = Vec::new();
            place.dtype.encode(&given.values, &mut bytes);
            self.device.write(&self.arena, place.span, &bytes)?;
        }
        let Some(inputs) = &mut self.inputs else { return Ok(()) };
        inputs.learn(input);
        if key.single() {
            // The copy recorded in the graph runs only in a replay.
            let in_graph = replays && self.decode.config().debug == Debugging::Off;
            inputs.prepare(&self.device, &self.arena, input, key.rows, number, in_graph)?;
        }
        Ok(())
    }

    /// Where given rows are written; an error if they are not whole rows of an input.
    fn place_of(&self, given: &GivenRows) -> Result<Tensor, MailError> {
        let &GivenRows { input, row, ref values } = given;
        let refused = MailError::Given { input, row, values: values.len() };
        let Some(all) = self.bindings.given.get(input as usize) else { return Err(refused) };
        let (cols, from) = (all.cols as usize, row as usize);
        if !values.len().is_multiple_of(cols) || from + values.len() / cols > all.rows as usize {
            return Err(refused);
        }
        let bytes = |values: usize| all.dtype.bytes(values) as u64;
        let span = all.span.part(bytes(from * cols), bytes(values.len()));
        Ok(Tensor::dense(span, all.dtype, (values.len() / cols) as u32, all.cols))
    }

    fn run(
        &mut self,
        other: Option<usize>,
        shape: &StepShape,
        choice: &Choice,
        number: u64,
    ) -> Result<Ran, RunError> {
        let profile = self.profile.as_mut().filter(|profile| profile.wants(number));
        let profile = profile.map(|profile| (profile, number));
        let mut mark = |after: usize| match &mut self.watch {
            Some(watch) if watch.seen < watch.launches => {
                watch.stopwatch.mark(2 * watch.seen + after)?;
                watch.seen += after;
                Ok(())
            }
            _ => Ok::<(), RunError>(()),
        };
        mark(0)?;
        let others = &mut self.others;
        let ran = match (other.and_then(|which| others[which].runner.as_mut()), shape.phase) {
            (Some(runner), _) => runner.run(shape, choice, profile),
            (None, Phase::Decode) => self.decode.run(shape, choice, profile),
            (None, Phase::Prefill) => self.prefill.run(shape, choice, profile),
        }?;
        mark(1)?;
        // The last step reports the profile.
        self.profile.take_if(|profile| profile.is_over(number));
        Ok(ran)
    }

    /// Measures the nodes of some launches.
    pub fn profile(&mut self, profile: Profile) {
        self.profile = Some(profile);
    }

    /// Watches the next `launches` launches on the device's clock; see [`Runners::watched`].
    pub fn watch(&mut self, launches: usize) -> Result<(), RunError> {
        let stopwatch = self.device.stopwatch(2 * launches)?;
        self.watch = Some(Watch { stopwatch, launches, seen: 0 });
        Ok(())
    }

    /// Microseconds that the device worked on each launch watched, graphs only; ends the watch.
    pub fn watched(&mut self) -> Result<Vec<f64>, RunError> {
        let Some(watch) = self.watch.take() else { return Ok(Vec::new()) };
        let micros = |launch| Ok(watch.stopwatch.micros(2 * launch, 2 * launch + 1)?);
        (0..watch.seen).map(micros).collect()
    }

    /// What the last launch's call to the device took, without what was prepared for it. On the CPU
    /// that is the whole step.
    pub fn replay_call(&self) -> Duration {
        self.replay
    }

    /// Asks a launch of several steps to end early: the one under way, or else the next one.
    pub fn stop_loop(&mut self) {
        self.mailbox.stop_loop();
    }

    /// The result of the oldest step whose result has not been taken, when it is there.
    pub fn poll(&mut self) -> Result<Option<StepOutput>, RunError> {
        let mut output = StepOutput::default();
        Ok(self.poll_into(&mut output)?.then_some(output))
    }

    /// As [`Runners::poll`], into a reused output; returns whether there was a result.
    pub fn poll_into(&mut self, output: &mut StepOutput) -> Result<bool, RunError> {
        if !self.mailbox.take_into(output)? {
            return Ok(false);
        }
        if let Some(inputs) = &mut self.inputs {
            inputs.heard(self.mailbox.taken_seats(), output);
        }
        match &self.repeating {
            Some((key, rows)) if output.more_follow => self.decode.repeated(key, *rows),
            _ if self.mailbox.in_flight() == 0 => self.repeating = None,
            _ => {}
        }
        Ok(true)
    }

    /// Waits for everything launched, then takes the oldest result.
    pub fn wait(&mut self) -> Result<Option<StepOutput>, RunError> {
        self.device.sync()?;
        self.poll()
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The memory.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Where things lie in it.
    pub fn bindings(&self) -> &Bindings {
        &self.bindings
    }

    fn copy_states(&self, states: &[StateInput]) -> Result<(), RunError> {
        let Bindings { carries, carry_copies, .. } = &*self.bindings;
        let row = |tensor: &Tensor, row: u32, cols: u32| {
            let bytes = |cols: u32| tensor.dtype.bytes(cols as usize) as u64;
            tensor.span.part(u64::from(row) * bytes(tensor.cols), bytes(cols))
        };
        for &StateInput { seat, slot, restores } in states {
            for (carry, copies) in carries.iter().zip(carry_copies) {
                // A log is not copied: it is empty where a prompt is fed.
                let (own, copy) = (row(carry, seat, copies.cols), row(copies, slot, copies.cols));
                let (from, to) = if restores { (copy, own) } else { (own, copy) };
                let op = device::Op::Copy(device::op::Copy { from, to });
                let node = Node { op, name: "copy_state".into(), layer: None };
                self.device.run(&self.arena, &node)?;
            }
        }
        Ok(())
    }

    fn copy_pages(&self, copies: &[(u32, u32)]) -> Result<(), RunError> {
        for &(from, to) in copies {
            for node in self.decode.copy_page(from, to) {
                self.device.run(&self.arena, &node)?;
            }
        }
        Ok(())
    }
}
