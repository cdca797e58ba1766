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
        self.decode_with_room(batch, context, warm, steps, 0)
    }

    /// The same, with pages for `room` more tokens of each sequence.
    pub(crate) fn decode_with_room(
        &mut self,
        batch: u32,
        context: u32,
        warm: u32,
        steps: u32,
        room: u32,
    ) -> Result<Timing> {
        let mut first = self.seats(batch, context, warm + steps + 4 + room)?;
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

    /// Times one prefill step whose rows have these (tokens, tokens before them), `times` over, one at a
    /// time: from launch to result.
    pub(crate) fn prefill(&mut self, rows: &[(u32, u32)], times: u32) -> Result<Timing> {
        let vocab = self.executor.geometry().vocab;
        let mut timing = Timing::default();
        for index in 0..times + 2 {
            let mut step = self.seated(rows)?;
            step.rows = rows
                .iter()
                .zip(0..)
                .map(|(&(tokens, context), seat)| Row {
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
    Row::decode(Seat(seat), context)
}
