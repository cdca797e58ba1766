//! An executor that is watched: what each step was, how it ran, how long it took.

use engine::exec::{Coverage, ExecError, Executor, Geometry, Step, StepKind, StepResult};
use engine::request::Micros;
use graph::runner::Ran;
use server::link::{Phase, Run, StepRecord};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Steps kept for the page.
const KEPT: usize = 512;
/// Nobody looks for so long only when nobody waits: what the device did meanwhile is not known.
const UNWATCHED: Duration = Duration::from_millis(50);

/// Says how the last launch ran.
pub(crate) trait Traced {
    /// `None` before the first.
    fn last(&self) -> Option<&Ran>;
}

/// An executor, and the records of its last steps.
pub(crate) struct Watched<X> {
    inner: X,
    /// The server's clock, as last told.
    pub(crate) now: Micros,
    records: VecDeque<StepRecord>,
    flight: VecDeque<(Instant, StepRecord)>,
    last_result: Option<Instant>,
    /// When the device was last launched or asked.
    looked: Instant,
    launched: u64,
}

impl<X: Executor + Traced> Watched<X> {
    pub(crate) fn new(inner: X) -> Self {
        let (records, flight) = (VecDeque::new(), VecDeque::new());
        let looked = Instant::now();
        Self { inner, now: 0, records, flight, last_result: None, looked, launched: 0 }
    }

    /// The last steps that are done, oldest first.
    pub(crate) fn records(&self) -> Vec<StepRecord> {
        self.records.iter().cloned().collect()
    }

    fn record(&mut self, step: &Step, launch: Instant) -> StepRecord {
        self.launched += 1;
        let rows = step.rows.len() as u32;
        let last = self.inner.last();
        let (bucket_rows, bucket_tokens) =
            last.map_or((rows, step.tokens() as u32), |ran| (ran.key.rows, ran.key.tokens));
        if let Some(Ran { key, eager: Some(reason), warn: true }) = last {
            tracing::warn!(%key, %reason, "a step does not replay a graph");
        }
        StepRecord {
            step: self.launched,
            at: self.now,
            phase: match step.kind() {
                StepKind::Decode => Phase::Decode,
                StepKind::Prefill => Phase::Prefill,
            },
            bucket_rows,
            bucket_tokens,
            live_rows: rows,
            padded_rows: bucket_rows.saturating_sub(rows),
            run: match last.and_then(|ran| ran.eager) {
                None => Run::Replayed,
                Some(reason) => Run::Eager(reason.name().into()),
            },
            host_us: micros(launch.elapsed()),
            device_us: 0,
        }
    }
}

fn micros(time: Duration) -> u32 {
    time.as_micros().try_into().unwrap_or(u32::MAX)
}

impl<X: Executor + Traced> Executor for Watched<X> {
    const DEPTH: usize = X::DEPTH;

    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn coverage(&self) -> Coverage {
        self.inner.coverage()
    }

    fn scores_prompts(&self) -> bool {
        self.inner.scores_prompts()
    }

    fn hidden(&self) -> Option<u32> {
        self.inner.hidden()
    }

    fn steps(&self) -> u32 {
        self.inner.steps()
    }

    fn leave(&mut self) {
        self.inner.leave();
    }

    fn recycle(&mut self, result: StepResult) {
        self.inner.recycle(result);
    }

    fn launch(&mut self, step: &Step) -> Result<(), ExecError> {
        let launch = Instant::now();
        self.inner.launch(step)?;
        let record = self.record(step, launch);
        self.flight.push_back((launch, record));
        self.looked = Instant::now();
        Ok(())
    }

    fn poll(&mut self, block: bool) -> Result<Option<StepResult>, ExecError> {
        let unwatched = self.looked.elapsed() > UNWATCHED;
        let polled = self.inner.poll(block);
        let before = std::mem::replace(&mut self.looked, Instant::now());
        let result = match polled {
            Ok(Some(result)) => result,
            Ok(None) => return Ok(None),
            Err(error) => {
                // Whatever was on its way is lost, and its records with it.
                self.flight.clear();
                return Err(error);
            }
        };
        let done =
            if result.again { self.flight.front().cloned() } else { self.flight.pop_front() };
        if let Some((launch, mut record)) = done {
            // The device does one step after the other: a step begins when it is launched or when
            // the one before it is done, whichever is later.
            let begin = self.last_result.map_or(launch, |last| last.max(launch));
            let end = if unwatched { before.max(begin) } else { self.looked };
            record.device_us = micros(end - begin);
            self.last_result = Some(end);
            if self.records.len() == KEPT {
                self.records.pop_front();
            }
            self.records.push_back(record);
        }
        Ok(Some(result))
    }
}
