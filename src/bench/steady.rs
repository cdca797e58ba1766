//! Steps of a chosen shape without an engine: what `bench decode` and `bench prefill` measure.

use anyhow::{Context, Result, ensure};
use device::op::Noise;
use device::{Node, Op, Tensor};
use engine::exec::{Executor, Join, Page, PageEntry, Row, Seat, SeatParams, Step};
use engine::model::GraphExecutor;
use std::time::{Duration, Instant};

/// Drives an executor by hand.
pub(crate) struct Steady<'a> {
    executor: &'a mut GraphExecutor,
    number: u64,
}

/// What a run of equal steps took.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timing {
    /// From result to result, sorted.
    pub(crate) steps: Vec<Duration>,
    /// The host's part of each launch, sorted.
    pub(crate) host: Vec<Duration>,
}

impl Timing {
    /// The step time at a share of all steps, in milliseconds.
    pub(crate) fn step_ms(&self, share: f64) -> f64 {
        at(&self.steps, share).as_secs_f64() * 1e3
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

    /// Times `steps` decode steps of `batch` sequences with `context` tokens each, two in flight, after
    /// `warm` steps that do not count.
    pub(crate) fn decode(
        &mut self,
        batch: u32,
        context: u32,
        warm: u32,
        steps: u32,
    ) -> Result<Timing> {
        let mut first = self.seats(batch, context, warm + steps + 4)?;
        let rows: Vec<Row> = (0..batch).map(|seat| decode_row(seat, context)).collect();
        first.rows = rows.clone();
        let mut timing = Timing::default();
        let mut last = None;
        self.launch(first)?;
        for index in 0..warm + steps {
            let step = Step { rows: rows.clone(), ..Step::default() };
            let host = self.launch(step)?;
            self.result()?;
            let now = Instant::now();
            if let Some(before) = last.replace(now).filter(|_| index >= warm) {
                timing.steps.push(now - before);
                timing.host.push(host);
            }
        }
        self.result()?;
        timing.steps.sort();
        timing.host.sort();
        Ok(timing)
    }

    /// Times one prefill step of `prompts` prompts of `tokens` tokens each that start at `context`,
    /// `times` over, one at a time: from launch to result.
    pub(crate) fn prefill(
        &mut self,
        prompts: u32,
        tokens: u32,
        context: u32,
        times: u32,
    ) -> Result<Timing> {
        let vocab = self.executor.geometry().vocab;
        let mut timing = Timing::default();
        for index in 0..times + 2 {
            let mut step = self.seats(prompts, context, tokens)?;
            step.rows = (0..prompts)
                .map(|seat| Row {
                    tokens: (0..tokens)
                        .map(|i| (i * 7919 + seat * 104_729 + index) % vocab)
                        .collect(),
                    ..decode_row(seat, context)
                })
                .collect();
            let start = Instant::now();
            let host = self.launch(step)?;
            self.result()?;
            // The first two warm caches and clocks.
            if index >= 2 {
                timing.steps.push(start.elapsed());
                timing.host.push(host);
            }
        }
        timing.steps.sort();
        timing.host.sort();
        Ok(timing)
    }

    /// A step that seats `batch` sequences of `context` tokens with room for `more`.
    fn seats(&self, batch: u32, context: u32, more: u32) -> Result<Step> {
        let geometry = self.executor.geometry();
        let each = (context + more).div_ceil(geometry.page_size);
        let need = batch * each + 1;
        ensure!(
            each <= geometry.pages_per_seat && need <= geometry.pages && batch <= geometry.seats,
            "{batch} sequences of {} tokens need {need} pages, {each} each; there are {}, {} each",
            context + more,
            geometry.pages,
            geometry.pages_per_seat
        );
        let joins = (0..batch)
            .map(|seat| Join {
                seat: Seat(seat),
                len: context,
                last_token: seat + 1,
                params: SeatParams::greedy(),
            })
            .collect();
        // Pages of one sequence lie apart, as they do after an hour of service.
        let page = |seat: u32, index: u32| Page(1 + index * batch + (seat * 7 + index) % batch);
        let pages = (0..batch)
            .flat_map(|seat| {
                (0..each).map(move |index| PageEntry {
                    seat: Seat(seat),
                    index,
                    page: page(seat, index),
                })
            })
            .collect();
        Ok(Step { joins, pages, ..Step::default() })
    }

    fn launch(&mut self, step: Step) -> Result<Duration> {
        let step = Step { number: self.number + 1, ..step };
        let start = Instant::now();
        self.executor.launch(&step).with_context(|| format!("step {}", step.number))?;
        let host = start.elapsed();
        self.number += 1;
        Ok(host)
    }

    fn result(&mut self) -> Result<()> {
        self.executor.poll(true)?.context("a launched step gave no result")?;
        Ok(())
    }
}

fn decode_row(seat: u32, context: u32) -> Row {
    Row { seat: Seat(seat), tokens: Vec::new(), start: context, sample: true, score: None }
}
