//! Steps of a chosen shape without an engine: what `bench decode` and `bench prefill` measure.

use anyhow::{Context, Result, ensure};
use device::op::Noise;
use device::{Node, Op, Tensor};
use engine::exec::{Executor, Join, Page, PageEntry, Row, Seat, SeatParams, Step};
use engine::model::GraphExecutor;
use graph::config::MAX_STEPS;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Drives an executor by hand.
pub(crate) struct Steady<'a> {
    executor: &'a mut GraphExecutor,
    number: u64,
}

/// What a run of equal steps took.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timing {
    /// From the last result of a launch to that of the next, shared among its steps, sorted.
    pub(crate) steps: Vec<Duration>,
    /// The host's part of each launch, shared among its steps, sorted.
    pub(crate) host: Vec<Duration>,
    /// Of this, what comes before the call that starts the device, sorted.
    preparation: Vec<Duration>,
    /// Of this, that call, sorted.
    call: Vec<Duration>,
    /// From that call to the first result, sorted; with several launches in flight it includes waiting.
    latency: Vec<Duration>,
    /// A hash of every token of every step, those that do not count included: equal steps are equal
    /// whoever prepares them and however they are recorded.
    pub(crate) tokens: u64,
}

/// What a launch took of the host.
#[derive(Clone, Copy, Debug)]
struct Host {
    start: Instant,
    whole: Duration,
    call: Duration,
    /// When the first of its results came.
    first: Instant,
    /// How many came, of how many.
    steps: u32,
    of: u32,
}

/// Decode steps of one shape.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Sequences.
    pub(crate) batch: u32,
    /// Tokens each has before the first step.
    pub(crate) context: u32,
    /// Steps that do not count.
    pub(crate) warm: u32,
    /// Steps that do.
    pub(crate) steps: u32,
    /// Launches in flight; one of several steps flies alone until its last step.
    pub(crate) depth: usize,
    /// Tokens for which each sequence has pages beyond what the steps need.
    pub(crate) room: u32,
}

impl Pace {
    /// Steps before `steps` that are timed: a whole number of launches however many steps those have, so
    /// that the same steps are timed either way.
    pub(crate) fn warm(steps: u32) -> u32 {
        steps.div_ceil(8).next_multiple_of(MAX_STEPS)
    }
}

impl Timing {
    /// The step time at a share of all steps, in milliseconds.
    pub(crate) fn step_ms(&self, share: f64) -> f64 {
        at(&self.steps, share).as_secs_f64() * 1e3
    }

    /// The mean step time: what throughput follows from.
    pub(crate) fn mean_step(&self) -> Duration {
        self.steps.iter().sum::<Duration>() / (self.steps.len() as u32).max(1)
    }

    /// From the call that starts the device to the result, in milliseconds.
    pub(crate) fn latency_ms(&self, share: f64) -> f64 {
        at(&self.latency, share).as_secs_f64() * 1e3
    }

    /// What the host does before that call, in microseconds.
    pub(crate) fn preparation_us(&self, share: f64) -> f64 {
        at(&self.preparation, share).as_secs_f64() * 1e6
    }

    /// That call, in microseconds.
    pub(crate) fn call_us(&self, share: f64) -> f64 {
        at(&self.call, share).as_secs_f64() * 1e6
    }

    /// All steps of a launch are in.
    fn launched(&mut self, host: &Host) {
        let (steps, before) = (host.steps.max(1), host.whole.saturating_sub(host.call));
        self.host.push(host.whole / steps);
        self.preparation.push(before / steps);
        self.call.push(host.call / steps);
        self.latency.push((host.first - host.start).saturating_sub(before));
    }

    /// As if both runs had been one; tokens are this one's, or the first there are.
    pub(crate) fn append(&mut self, other: Timing) {
        if self.steps.is_empty() {
            self.tokens = other.tokens;
        }
        self.steps.extend(other.steps);
        self.host.extend(other.host);
        self.preparation.extend(other.preparation);
        self.call.extend(other.call);
        self.latency.extend(other.latency);
        self.sort();
    }

    fn sort(&mut self) {
        let Timing { steps, host, preparation, call, latency, .. } = self;
        for list in [steps, host, preparation, call, latency] {
            list.sort();
        }
    }

    /// The host's time at a share of all steps, in microseconds.
    pub(crate) fn host_us(&self, share: f64) -> f64 {
        at(&self.host, share).as_secs_f64() * 1e6
    }
}

fn at(sorted: &[Duration], share: f64) -> Duration {
    let index = (sorted.len() as f64 * share) as usize;
    sorted.get(index.min(sorted.len().saturating_sub(1))).copied().unwrap_or_default()
}

impl<'a> Steady<'a> {
    /// Fills the pages with numbers, so that attention has something to read: time does not depend on
    /// which, but not-a-number would spread.
    pub(crate) fn new(executor: &'a mut GraphExecutor) -> Result<Self> {
        let runners = executor.runners();
        for (layer, kv) in runners.bindings().kv.iter().enumerate() {
            let elems = kv.page_elems() * u64::from(kv.pages);
            let cols = u32::try_from(kv.page_elems())?;
            let to =
                Tensor::dense(kv.span, kv.dtype, u32::try_from(elems / u64::from(cols))?, cols);
            let op = Op::Noise(Noise { to, seed: layer as u64, mean: 0.0, scale: 1.0 });
            let node = Node { op, name: "fill_pages".into(), layer: Some(layer as u32) };
            runners.device().run(runners.arena(), &node)?;
        }
        runners.device().sync()?;
        Ok(Steady { executor, number: 0 })
    }

    /// Times decode steps, result by result. A device that has graphs of several steps runs those.
    pub(crate) fn decode(&mut self, pace: &Pace) -> Result<Timing> {
        let total = pace.warm + pace.steps;
        let mut step = self.seats(pace.batch, pace.context, total + pace.room)?;
        step.rows = (0..pace.batch).map(|seat| Row::decode(Seat(seat), pace.context)).collect();
        // A CPU's launch returns when it is done: nothing flies beside it, and its results come all at once.
        let one_by_one = self.executor.device().gpu().is_some();
        let depth = if one_by_one { pace.depth } else { 1 };
        let mut launched = 0;
        let mut timing = Timing::default();
        let mut flying: VecDeque<Host> = VecDeque::new();
        let mut last = None;
        for index in 0..total {
            // Behind one of several steps the next may be launched once its last step is under way.
            let free = |last: Option<&Host>| last.is_none_or(|host| host.steps + 1 >= host.of);
            while flying.len() < depth && free(flying.back()) && launched < total {
                step.steps = self.executor.steps().min(total - launched);
                launched += step.steps;
                flying.push_back(self.launch(&mut step)?);
                (step.joins, step.pages) = (Vec::new(), Vec::new());
            }
            let ended = self.result(&mut timing.tokens, &mut flying)?;
            let shared = match &ended {
                _ if one_by_one => 1,
                Some(host) => host.steps,
                None => continue,
            };
            let now = Instant::now();
            let before = last.replace(now).filter(|_| index >= pace.warm);
            timing.steps.extend(before.map(|before| (now - before) / shared));
            if let (Some(_), Some(host)) = (before, ended) {
                timing.launched(&host);
            }
        }
        timing.sort();
        Ok(timing)
    }

    /// The share of the time in which the device runs the graphs of such steps.
    pub(crate) fn busy(&mut self, pace: &Pace) -> Result<f64> {
        let many = self.executor.steps();
        self.executor.runners_mut().watch((pace.warm + pace.steps).div_ceil(many) as usize)?;
        let timing = self.decode(pace)?;
        let watched = self.executor.runners_mut().watched()?;
        let counted = watched.get((pace.warm / many) as usize..).unwrap_or_default();
        let mean = counted.iter().sum::<f64>() / (counted.len() as f64).max(1.0);
        Ok(mean / (timing.mean_step().as_secs_f64() * 1e6 * f64::from(many)))
    }

    /// Times one prefill step whose rows have these (tokens, tokens before them), `times` over, one at a
    /// time and each after a `pause`: from launch to result.
    pub(crate) fn prefill(
        &mut self,
        rows: &[(u32, u32)],
        times: u32,
        pause: Duration,
    ) -> Result<Timing> {
        let vocab = self.executor.geometry().vocab;
        let mut timing = Timing::default();
        for index in 0..times + 2 {
            let mut step = self.seated(rows)?;
            step.rows = rows
                .iter()
                .zip(0..)
                .map(|(&(tokens, context), seat)| {
                    let token = |i| (i * 7919 + seat * 104_729 + index) % vocab;
                    Row::feed(Seat(seat), context, (0..tokens).map(token).collect())
                })
                .collect();
            std::thread::sleep(pause);
            let mut flying = VecDeque::from([self.launch(&mut step)?]);
            let done = self.result(&mut timing.tokens, &mut flying)?;
            // The first two warm caches and clocks.
            if let Some(host) = done.filter(|_| index >= 2) {
                timing.steps.push(host.first - host.start);
                timing.launched(&host);
            }
        }
        timing.sort();
        Ok(timing)
    }

    /// A step that seats `batch` sequences of `context` tokens with room for `more`.
    fn seats(&self, batch: u32, context: u32, more: u32) -> Result<Step> {
        self.seated(&vec![(more, context); batch as usize])
    }

    /// A step that seats a sequence for each of these (room, tokens before it).
    fn seated(&self, rows: &[(u32, u32)]) -> Result<Step> {
        let geometry = self.executor.geometry();
        let pages_of =
            |&(more, context): &(u32, u32)| (context + more).div_ceil(geometry.page_size);
        let most = rows.iter().map(pages_of).max().unwrap_or(0);
        let batch = u32::try_from(rows.len())?;
        let need = rows.iter().map(pages_of).sum::<u32>() + 1;
        ensure!(
            most <= geometry.pages_per_seat && need <= geometry.pages && batch <= geometry.seats,
            "{batch} sequences need {need} pages, up to {most} each; there are {}, {} each",
            geometry.pages,
            geometry.pages_per_seat
        );
        let joins = rows
            .iter()
            .zip(0..)
            .map(|(&(_, context), seat)| Join {
                seat: Seat(seat),
                len: context,
                last_token: seat + 1,
                params: SeatParams::greedy(),
            })
            .collect();
        // Pages of one sequence lie apart, as they do after an hour of service.
        let mut pages = Vec::new();
        let mut next = 1;
        for index in 0..most {
            for turn in 0..batch {
                let seat = (turn + 7 * index) % batch;
                if index < pages_of(&rows[seat as usize]) {
                    pages.push(PageEntry { seat: Seat(seat), index, page: Page(next) });
                    next += 1;
                }
            }
        }
        Ok(Step { joins, pages, ..Step::default() })
    }

    fn launch(&mut self, step: &mut Step) -> Result<Host> {
        self.number += 1;
        step.number = self.number;
        let start = Instant::now();
        self.executor.launch(step).with_context(|| format!("step {}", step.number))?;
        let whole = start.elapsed();
        let call = self.executor.runners().replay_call();
        Ok(Host { start, whole, call, first: start, steps: 0, of: step.steps.max(1) })
    }

    /// Waits for the next result, which is one of the oldest launch, and adds its tokens to a hash; gives
    /// the launch if it was its last.
    fn result(&mut self, hash: &mut u64, flying: &mut VecDeque<Host>) -> Result<Option<Host>> {
        let result = self.executor.poll(true)?.context("a launched step gave no result")?;
        let host = flying.front_mut().context("a result that nobody launched")?;
        if host.steps == 0 {
            host.first = Instant::now();
        }
        host.steps += 1;
        for token in result.rows.iter().filter_map(|row| row.token) {
            *hash = (*hash ^ u64::from(token)).wrapping_mul(0x0000_0100_0000_01B3).rotate_left(17);
        }
        let again = result.again;
        self.executor.recycle(result);
        Ok(if again { None } else { flying.pop_front() })
    }
}
