//! An executor that is watched: what each step was, how it ran, how long it took.

use engine::exec::{Coverage, ExecError, Executor, Geometry, Step, StepKind, StepResult};
use engine::request::Micros;
use graph::runner::Ran;
use server::link::{PUBLISH_CALLS, Phase, Run, StepRecord};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Steps kept for the page, at least.
const KEPT: usize = 512;
/// Nobody looks for so long only when nobody waits: what the device did meanwhile is not known.
const UNWATCHED: Duration = Duration::from_millis(50);

/// Says how the last launch ran.
pub(crate) trait Traced {
    /// `None` before the first.
    fn last(&self) -> Option<&Ran>;

    /// How long the device ran before the last launch returned; `None` if it runs on its own.
    fn ran_within(&self) -> Option<Duration>;
}

/// An executor, and the records of its last steps.
pub(crate) struct Watched<X> {
    inner: X,
    /// The server's clock, as last told, and when that was.
    now: (Micros, Instant),
    records: VecDeque<StepRecord>,
    /// How many of them: whoever publishes them sees all.
    kept: usize,
    flight: VecDeque<Launch>,
    last_result: Option<Instant>,
    /// When the device was last launched or asked.
    looked: Instant,
    /// Steps that are done.
    done: u64,
}

/// A launch under way.
struct Launch {
    began: Instant,
    /// Its first step, as far as that is known.
    record: StepRecord,
    /// Steps that are done, and those it may still run.
    done: u32,
    left: u32,
    /// What it took the host and no step has been told of yet.
    host_us: u32,
    /// The same of the device, if that ran before the launch returned.
    device_us: Option<u32>,
}

impl Launch {
    /// The record of a step that the device, as far as one could see, began and ended then; `again` if it
    /// is not the last. Steps share what the launch took.
    fn step(&mut self, begin: Instant, end: Instant, again: bool) -> StepRecord {
        let of = if again { self.left.max(1) } else { 1 };
        let mut record =
            StepRecord { host_us: share(&mut self.host_us, of), ..self.record.clone() };
        match &mut self.device_us {
            Some(untold) => {
                record.device_us = share(untold, of);
                self.record.at += Micros::from(record.device_us);
            }
            None => {
                record.device_us = micros(end - begin);
                if self.done > 0 {
                    record.at += Micros::from(micros(begin - self.began));
                }
            }
        }
        self.done += 1;
        self.left = self.left.saturating_sub(1);
        record
    }
}

/// Takes one part of several; the last takes what is left.
fn share(untold: &mut u32, of: u32) -> u32 {
    let part = *untold / of;
    *untold -= part;
    part
}

impl<X: Executor + Traced> Watched<X> {
    pub(crate) fn new(inner: X) -> Self {
        let (records, flight) = (VecDeque::new(), VecDeque::new());
        // Between two publications the engine is called so often, and may see this many steps each time.
        let unseen = PUBLISH_CALLS as usize * X::DEPTH * inner.steps() as usize;
        let looked = Instant::now();
        let kept = KEPT.max(unseen);
        Self { inner, now: (0, looked), records, kept, flight, last_result: None, looked, done: 0 }
    }

    /// Tells it the server's clock.
    pub(crate) fn set_clock(&mut self, now: Micros) {
        self.now = (now, Instant::now());
    }

    /// The last steps that are done, oldest first.
    pub(crate) fn records(&self) -> Vec<StepRecord> {
        self.records.iter().cloned().collect()
    }

    /// What is known of a step that was launched then.
    fn record(&self, step: &Step, began: Instant) -> StepRecord {
        let rows = step.rows.len() as u32;
        let last = self.inner.last();
        let (bucket_rows, bucket_tokens) =
            last.map_or((rows, step.tokens() as u32), |ran| (ran.key.rows, ran.key.tokens));
        if let Some(Ran { key, eager: Some(reason), warn: true }) = last {
            tracing::warn!(%key, %reason, "a step does not replay a graph");
        }
        StepRecord {
            step: 0,
            at: self.now.0 + Micros::from(micros(began - self.now.1)),
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
            host_us: 0,
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
        let began = Instant::now();
        self.inner.launch(step)?;
        let (took, within) = (began.elapsed(), self.inner.ran_within());
        self.flight.push_back(Launch {
            began,
            record: self.record(step, began),
            done: 0,
            left: step.steps,
            host_us: micros(took.saturating_sub(within.unwrap_or_default())),
            device_us: within.map(micros),
        });
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
        if let Some(launch) = self.flight.front_mut() {
            // The device does one step after the other: a step begins when it is launched or when
            // the one before it is done, whichever is later.
            let begin = self.last_result.map_or(launch.began, |last| last.max(launch.began));
            let end = if unwatched { before.max(begin) } else { self.looked };
            self.last_result = Some(end);
            self.done += 1;
            let record = launch.step(begin, end, result.again);
            if self.records.len() == self.kept {
                self.records.pop_front();
            }
            self.records.push_back(StepRecord { step: self.done, ..record });
            if !result.again {
                self.flight.pop_front();
            }
        }
        Ok(Some(result))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::exec::{Row, Seat};
    use graph::ShapeKey;

    /// A device whose launches run as many of their steps as it was told.
    struct Scripted {
        ran: Ran,
        within: Option<Duration>,
        runs: VecDeque<u32>,
        left: VecDeque<u32>,
    }

    impl Traced for Scripted {
        fn last(&self) -> Option<&Ran> {
            Some(&self.ran)
        }

        fn ran_within(&self) -> Option<Duration> {
            self.within
        }
    }

    impl Executor for Scripted {
        fn geometry(&self) -> Geometry {
            Geometry { seats: 4, pages: 9, page_size: 16, pages_per_seat: 2, vocab: 10 }
        }

        fn coverage(&self) -> Coverage {
            Coverage { decode_rows: 4, prefill_tokens: 64, prefill_rows: 4 }
        }

        fn steps(&self) -> u32 {
            16
        }

        fn launch(&mut self, _: &Step) -> Result<(), ExecError> {
            // Long enough for a clock of microseconds.
            std::thread::sleep(Duration::from_millis(2));
            self.left.extend(self.runs.pop_front());
            Ok(())
        }

        fn poll(&mut self, _: bool) -> Result<Option<StepResult>, ExecError> {
            let Some(left) = self.left.front_mut() else { return Ok(None) };
            *left -= 1;
            let again = *left > 0;
            if !again {
                self.left.pop_front();
            }
            Ok(Some(StepResult { again, ..StepResult::default() }))
        }
    }

    /// The records of three launches, of one step, of eight and of eight that is cut short after three.
    fn records(within: Option<Duration>) -> Vec<StepRecord> {
        let ran = Ran { key: ShapeKey::decode(4), eager: None, warn: false };
        let (runs, left) = (VecDeque::from([1, 8, 3]), VecDeque::new());
        let mut watched = Watched::new(Scripted { ran, within, runs, left });
        assert!(watched.kept >= PUBLISH_CALLS as usize * 2 * 16);
        for (number, steps) in [(1, 1), (2, 8), (3, 8)] {
            watched.set_clock(number * 1_000_000);
            let rows = vec![Row::decode(Seat(0), 5), Row::decode(Seat(1), 6)];
            watched.launch(&Step { number, rows, steps, ..Step::default() }).unwrap();
            while watched.poll(true).unwrap().is_some() {}
        }
        watched.records()
    }

    #[test]
    fn every_step_of_a_launch_has_its_own_record() {
        let records = records(None);
        let numbers: Vec<u64> = records.iter().map(|record| record.step).collect();
        assert_eq!(numbers, (1..=12).collect::<Vec<_>>());
        for (number, launch) in [(1, &records[..1]), (2, &records[1..9]), (3, &records[9..])] {
            assert!(launch[0].at >= number * 1_000_000);
            // What comes after the first begins when the one before is done.
            assert!(launch.is_sorted_by_key(|record| record.at), "{launch:?}");
            assert!(
                launch[1..].iter().all(|record| record.at >= launch[0].at + 2000),
                "{launch:?}"
            );
            let host: u32 = launch.iter().map(|record| record.host_us).sum();
            assert!(host >= 2000, "{launch:?}");
            assert!(launch[0].host_us <= host / launch.len() as u32, "shared: {launch:?}");
            assert!(launch.iter().all(|record| record.live_rows == 2 && record.padded_rows == 2));
        }
    }

    #[test]
    fn what_runs_within_the_launch_is_the_devices_time() {
        let records = records(Some(Duration::from_micros(1600)));
        let device: Vec<u32> = records.iter().map(|record| record.device_us).collect();
        assert_eq!(device, [1600, 200, 200, 200, 200, 200, 200, 200, 200, 200, 200, 1200]);
        assert_eq!(records[8].at, records[1].at + 7 * 200);
        assert!(records[0].host_us >= 400, "the rest of two milliseconds");
    }
}
