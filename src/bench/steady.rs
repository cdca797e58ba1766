//! Runs steps of a given shape without an engine, for `bench decode` and `bench prefill`.

use crate::exit::bad_input;
use anyhow::{Context, Result};
use device::op::Noise;
use device::{Node, Op, Tensor};
use engine::exec::{Executor, Join, Page, Row, Seat, SeatParams, Step};
use graph::config::MAX_STEPS;
use model::GraphExecutor;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Drives an executor without an engine.
pub(crate) struct Steady<'a> {
    executor: &'a mut GraphExecutor,
    number: u64,
}

/// The times of a run of equal steps.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timing {
    /// From the last result of a launch to that of the next, divided by its steps, sorted.
    pub(crate) steps: Vec<Duration>,
    /// Host time of each launch, divided by its steps, sorted.
    pub(crate) host: Vec<Duration>,
    /// The part of it before the call that starts the device, sorted.
    preparation: Vec<Duration>,
    /// The part of it in that call, sorted.
    call: Vec<Duration>,
    /// From that call to the first result, sorted; with several launches in flight it includes waiting.
    latency: Vec<Duration>,
    /// A hash of every token of every step, including the warm-up: it does not depend on how steps
    /// are prepared or recorded.
    pub(crate) tokens: u64,
}

/// The host times of a launch.
#[derive(Clone, Copy, Debug)]
struct Host {
    start: Instant,
    whole: Duration,
    call: Duration,
    /// When its first result arrived.
    first: Instant,
    /// Results received, and results expected.
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
    /// Warm-up steps.
    pub(crate) warm: u32,
    /// Measured steps.
    pub(crate) steps: u32,
    /// Launches in flight; after a launch of several steps, the next starts at its last step.
    pub(crate) depth: usize,
    /// Tokens for which each sequence has spare pages.
    pub(crate) room: u32,
    /// Drafts of each sequence in every step.
    pub(crate) drafts: u32,
    /// Adapters that the sequences have in turn; 0 for none.
    pub(crate) adapters: u32,
}

impl Pace {
    /// Steps without drafts, adapters and spare pages, two in flight.
    pub(crate) fn plain(batch: u32, context: u32, warm: u32, steps: u32) -> Pace {
        let (depth, room, drafts, adapters) = (2, 0, 0, 0);
        Pace { batch, context, warm, steps, depth, room, drafts, adapters }
    }

    /// Warm-up steps for `steps` measured ones: a multiple of the steps of a launch, so that the
    /// same steps are measured for every launch length.
    pub(crate) fn warm(steps: u32) -> u32 {
        steps.div_ceil(8).next_multiple_of(MAX_STEPS)
    }
}

impl Timing {
    /// The step time at a share of all steps, in milliseconds.
    pub(crate) fn step_ms(&self, share: f64) -> f64 {
        at(&self.steps, share).as_secs_f64() * 1e3
    }

    /// The mean step time, which determines the throughput.
    pub(crate) fn mean_step(&self) -> Duration {
        self.steps.iter().sum::<Duration>() / (self.steps.len() as u32).max(1)
    }

    /// From the call that starts the device to the result, in milliseconds.
    pub(crate) fn latency_ms(&self, share: f64) -> f64 {
        at(&self.latency, share).as_secs_f64() * 1e3
    }

    /// Host time before that call, in microseconds.
    pub(crate) fn preparation_us(&self, share: f64) -> f64 {
        at(&self.preparation, share).as_secs_f64() * 1e6
    }

    /// The time of that call, in microseconds.
    pub(crate) fn call_us(&self, share: f64) -> f64 {
        at(&self.call, share).as_secs_f64() * 1e6
    }

    /// Records a launch whose results have all arrived.
    fn launched(&mut self, host: &Host) {
        let (steps, before) = (host.steps.max(1), host.whole.saturating_sub(host.call));
        self.host.push(host.whole / steps);
        self.preparation.push(before / steps);
        self.call.push(host.call / steps);
        self.latency.push((host.first - host.start).saturating_sub(before));
    }

    /// Merges another run into this one; the hash of the tokens is that of the first run.
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
    /// The executor, between runs.
    pub(crate) fn executor(&self) -> &GraphExecutor {
        self.executor
    }

    /// Fills the KV pages with random numbers, because NaNs in them would spread. The values do not
    /// affect the time.
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

    /// Measures decode steps. If the device has graphs of several steps, those are used.
    pub(crate) fn decode(&mut self, pace: &Pace) -> Result<Timing> {
        let total = pace.warm + pace.steps;
        // Drafts that happen to be right are accepted too, so there are pages for all of them.
        let most = if pace.drafts > 0 { pace.drafts + 1 } else { 1 };
        let mut step = self.seats(pace.batch, pace.context, total * most + pace.room)?;
        for join in step.joins.iter_mut().filter(|_| pace.adapters > 0) {
            join.params.adapter = join.seat.0 % pace.adapters + 1;
        }
        let row = |seat| Row { most, ..Row::decode(Seat(seat), pace.context) };
        step.rows = (0..pace.batch).map(row).collect();
        // On a CPU a launch returns when it is done: only one is in flight, and its results arrive
        // together.
        let one_by_one = self.executor.device().gpu().is_some();
        let depth = if one_by_one { pace.depth } else { 1 };
        let mut launched = 0;
        let mut timing = Timing::default();
        let mut in_flight: VecDeque<Host> = VecDeque::new();
        let mut last = None;
        for index in 0..total {
            // After a launch of several steps, the next may start once the last step is running.
            let free = |last: Option<&Host>| last.is_none_or(|host| host.steps + 1 >= host.of);
            while in_flight.len() < depth && free(in_flight.back()) && launched < total {
                step.steps = self.executor.steps().min(total - launched);
                launched += step.steps;
                in_flight.push_back(self.launch(&mut step)?);
                (step.joins, step.pages) = (Vec::new(), Vec::new());
            }
            let ended = self.result(&mut timing.tokens, &mut in_flight)?;
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

    /// The fraction of the time that the device runs graphs during such steps.
    pub(crate) fn busy(&mut self, pace: &Pace) -> Result<f64> {
        let many = self.executor.steps();
        self.executor.runners_mut().watch((pace.warm + pace.steps).div_ceil(many) as usize)?;
        let timing = self.decode(pace)?;
        let watched = self.executor.runners_mut().watched()?;
        let counted = watched.get((pace.warm / many) as usize..).unwrap_or_default();
        let mean = counted.iter().sum::<f64>() / (counted.len() as f64).max(1.0);
        Ok(mean / (timing.mean_step().as_secs_f64() * 1e6 * f64::from(many)))
    }

    /// Measures a prefill step with these rows (tokens, tokens before them), `times` times, each
    /// after a `pause`, from launch to result.
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
                    let other = seat * 104_729 + index;
                    let token = |i: u32| i.wrapping_mul(7919).wrapping_add(other) % vocab;
                    Row::feed(Seat(seat), context, (0..tokens).map(token).collect())
                })
                .collect();
            std::thread::sleep(pause);
            let mut in_flight = VecDeque::from([self.launch(&mut step)?]);
            let done = self.result(&mut timing.tokens, &mut in_flight)?;
            // The first two steps are a warm-up.
            if let Some(host) = done.filter(|_| index >= 2) {
                timing.steps.push(host.first - host.start);
                timing.launched(&host);
            }
        }
        timing.sort();
        Ok(timing)
    }

    /// A step that seats `batch` sequences of `context` tokens with pages for `more` tokens.
    fn seats(&self, batch: u32, context: u32, more: u32) -> Result<Step> {
        self.seated(&vec![(more, context); batch as usize])
    }

    /// A step that seats a sequence for each of these (tokens to come, tokens before).
    fn seated(&self, rows: &[(u32, u32)]) -> Result<Step> {
        let geometry = self.executor.geometry();
        let pages_of =
            |&(more, context): &(u32, u32)| (context + more).div_ceil(geometry.page_size);
        let most = rows.iter().map(pages_of).max().unwrap_or(0);
        let batch = u32::try_from(rows.len())?;
        let (kept, all) = (geometry.kept, rows.iter().map(|row| u64::from(pages_of(row))));
        let need = all.sum::<u64>() * u64::from(kept.width()) + 1;
        let (pages, each) = (geometry.pages, geometry.pages_per_seat);
        if most > each || need > u64::from(pages) || batch > geometry.seats {
            return Err(bad_input(format!(
                "{batch} sequences need {need} pages, up to {most} each; there are {pages}, {each} each"
            )));
        }
        let joins = rows
            .iter()
            .zip(0..)
            .map(|(&(_, context), seat)| Join {
                seat: Seat(seat),
                len: context,
                last_token: seat + 1,
                params: SeatParams::greedy(),
                history: Vec::new(),
            })
            .collect();
        // Pages of a sequence are scattered, as on a server that has run for a while.
        let mut pages = Vec::new();
        let mut next = 1;
        for index in 0..most {
            for turn in 0..batch {
                let seat = (turn + 7 * index) % batch;
                if index < pages_of(&rows[seat as usize]) {
                    pages.extend(kept.entries(Seat(seat), index, Page(next)));
                    next += kept.width();
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

    /// Waits for the next result, which belongs to the oldest launch, and adds its tokens to a
    /// hash; returns the launch if it was its last result.
    fn result(&mut self, hash: &mut u64, in_flight: &mut VecDeque<Host>) -> Result<Option<Host>> {
        let result =
            self.executor.poll(true)?.context("internal error: a launched step gave no result")?;
        let host = in_flight.front_mut().context("internal error: a result without a launch")?;
        if host.steps == 0 {
            host.first = Instant::now();
        }
        host.steps += 1;
        for sampled in result.rows.iter().flat_map(|row| row.tokens.iter()) {
            *hash = (*hash ^ u64::from(sampled.token))
                .wrapping_mul(0x0000_0100_0000_01B3)
                .rotate_left(17);
        }
        let more_follow = result.more_follow;
        self.executor.recycle(result);
        Ok(if more_follow { None } else { in_flight.pop_front() })
    }
}
