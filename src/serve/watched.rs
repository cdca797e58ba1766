//! An executor that records each step: its shape, how it ran, how long it took.

use engine::exec::{Coverage, ExecError, Executor, Geometry, Step, StepKind, StepResult};
use engine::request::Micros;
use engine::store::{Store, StoreUse};
use graph::runner::{ExpertLoad, Ran};
use model::{
    Adapter, AdapterError, AdapterReader, SharedTensor, SharedUpdate, SleepError, SpecUse, Update,
    UpdateError,
};
use server::link::{PUBLISH_CALLS, Parts, Phase, Rest, Run, StepRecord};
use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The least number of records kept.
const KEPT: usize = 512;
/// If the device was not polled for this long, the time of its results is unknown.
const UNWATCHED: Duration = Duration::from_millis(50);

/// An executor that reports how its last launch ran.
pub(crate) trait Traced {
    /// The last launch; `None` before the first.
    fn last(&self) -> Option<&Ran>;

    /// How long the device ran within the last launch call; `None` if it runs asynchronously.
    fn ran_within(&self) -> Option<Duration>;

    /// What experts have done; waits for steps under way.
    fn expert_loads(&self) -> Vec<ExpertLoad>;

    /// What drafts did; `None` if steps have none.
    fn spec_use(&self) -> Option<&SpecUse>;

    /// Gives memory back; no step is in flight.
    fn sleep(&mut self, parts: Parts, keep: bool) -> Result<(), SleepError>;

    /// Brings memory back.
    fn wake(&mut self, parts: Parts, reload: bool) -> Result<(), SleepError>;

    /// Opens files with weights and compares them with the model.
    fn check_update(&self, path: &Path) -> Result<Update, UpdateError>;

    /// Opens memory of another process and compares what is there with the model.
    fn check_shared(&self, tensors: &[SharedTensor]) -> Result<SharedUpdate, UpdateError>;

    /// Replaces weights by what is there; no step is in flight.
    fn update_shared(&mut self, update: SharedUpdate) -> Result<(), UpdateError>;

    /// Replaces weights; no step is in flight.
    fn update(&mut self, update: Update) -> Result<(), UpdateError>;

    /// What reads adapters for it.
    fn adapter_reader(&self) -> Result<AdapterReader, AdapterError>;

    /// Lets requests use an adapter.
    fn load_adapter(&mut self, number: u64, adapter: Arc<Adapter>);

    /// Forgets an adapter that no request uses.
    fn unload_adapter(&mut self, number: u64);

    /// Whether it can run steps.
    fn rest(&self) -> Rest;
}

/// An executor, and the records of its last steps.
pub(crate) struct Watched<X> {
    inner: X,
    /// The server's clock at the last `set_clock`, and when that was.
    now: (Micros, Instant),
    records: VecDeque<StepRecord>,
    /// The most records kept, enough that none is lost between two publications.
    kept: usize,
    flight: VecDeque<Launch>,
    last_result: Option<Instant>,
    /// When the device was last launched or polled.
    looked: Instant,
    /// Steps that are done.
    done: u64,
}

/// A launch in flight.
struct Launch {
    began: Instant,
    /// The record of its next step, as far as known.
    record: StepRecord,
    /// Steps that are done, and the most that are left.
    done: u32,
    left: u32,
    /// Host time not yet assigned to a step.
    host_us: u32,
    /// Device time not yet assigned to a step, if the device ran within the launch call.
    device_us: Option<u32>,
}

impl Launch {
    /// The record of a step that ran from `begin` to `end`; `more_follow` if more steps follow. The steps
    /// of a launch share its host time.
    fn step(&mut self, begin: Instant, end: Instant, more_follow: bool) -> StepRecord {
        let of = if more_follow { self.left.max(1) } else { 1 };
        let mut record =
            StepRecord { host_us: share(&mut self.host_us, of), ..self.record.clone() };
        match &mut self.device_us {
            Some(left) => {
                record.device_us = share(left, of);
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

/// Takes one of `of` equal parts; the last takes the rest.
fn share(left: &mut u32, of: u32) -> u32 {
    let part = *left / of;
    *left -= part;
    part
}

impl<X: Executor + Traced> Watched<X> {
    pub(crate) fn new(inner: X) -> Self {
        let (records, flight) = (VecDeque::new(), VecDeque::new());
        // The most steps between two publications: calls × launches in flight × steps of a launch.
        let unseen = PUBLISH_CALLS as usize * X::DEPTH * inner.steps() as usize;
        let looked = Instant::now();
        let kept = KEPT.max(unseen);
        Self { inner, now: (0, looked), records, kept, flight, last_result: None, looked, done: 0 }
    }

    /// Sets the server's clock.
    pub(crate) fn set_clock(&mut self, now: Micros) {
        self.now = (now, Instant::now());
    }

    /// What experts have done; waits for steps under way.
    pub(crate) fn expert_loads(&self) -> Vec<ExpertLoad> {
        self.inner.expert_loads()
    }

    /// What drafts did; `None` if steps have none.
    pub(crate) fn spec_use(&self) -> Option<&SpecUse> {
        self.inner.spec_use()
    }

    /// The executor.
    pub(crate) fn adapter_reader(&self) -> Result<AdapterReader, AdapterError> {
        self.inner.adapter_reader()
    }

    pub(crate) fn inner_mut(&mut self) -> &mut X {
        &mut self.inner
    }

    /// Whether it can run steps.
    pub(crate) fn rest(&self) -> Rest {
        self.inner.rest()
    }

    /// The last steps that are done, oldest first.
    pub(crate) fn records(&self) -> Vec<StepRecord> {
        self.records.iter().cloned().collect()
    }

    /// The record of a launched step, as far as known.
    fn record(&self, step: &Step, began: Instant) -> StepRecord {
        let rows = step.rows.len() as u32;
        let last = self.inner.last();
        let (bucket_rows, bucket_tokens) =
            last.map_or((rows, step.tokens() as u32), |ran| (ran.key.rows, ran.key.tokens));
        if let Some(Ran { key, eager: Some(reason), warn: true }) = last {
            tracing::warn!(%key, %reason, "a step runs without a graph");
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
            live_tokens: step.tokens() as u32,
            share: step.share.name().map(Into::into),
            drafts: match (step.kind(), self.inner.spec_use()) {
                (StepKind::Decode, Some(used)) => Some(used.last.to_string().into()),
                _ => None,
            },
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

    fn prefill_buckets(&self) -> Vec<u32> {
        self.inner.prefill_buckets()
    }

    fn whole_prompts(&self) -> Option<u32> {
        self.inner.whole_prompts()
    }

    fn carries_state(&self) -> bool {
        self.inner.carries_state()
    }

    fn state_copies(&self) -> u32 {
        self.inner.state_copies()
    }

    fn steps(&self) -> u32 {
        self.inner.steps()
    }

    fn tokens_per_row(&self) -> u32 {
        self.inner.tokens_per_row()
    }

    fn adapters(&self) -> u32 {
        self.inner.adapters()
    }

    fn begin_adapter(&mut self, slot: u32, adapter: u64) {
        self.inner.begin_adapter(slot, adapter);
    }

    fn poll_adapters(
        &mut self,
        filled: &mut Vec<(u32, u64)>,
        block: bool,
    ) -> Result<(), ExecError> {
        self.inner.poll_adapters(filled, block)
    }

    fn stop_loop(&mut self) {
        self.inner.stop_loop();
    }

    fn store(&mut self) -> Option<&mut dyn Store> {
        self.inner.store()
    }

    fn store_uses(&self) -> Vec<StoreUse> {
        self.inner.store_uses()
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
        let mut result = match polled {
            Ok(Some(result)) => result,
            Ok(None) => return Ok(None),
            Err(error) => {
                // Steps in flight are lost, and so are their records.
                self.flight.clear();
                return Err(error);
            }
        };
        if let Some(launch) = self.flight.front_mut() {
            // The device runs steps one after another: a step begins when it is launched or when
            // the previous one is done, whichever is later.
            let begin = self.last_result.map_or(launch.began, |last| last.max(launch.began));
            let end = if unwatched { before.max(begin) } else { self.looked };
            self.last_result = Some(end);
            self.done += 1;
            let record = launch.step(begin, end, result.more_follow);
            result.took = (!unwatched).then(|| Micros::from(record.device_us));
            if self.records.len() == self.kept {
                self.records.pop_front();
            }
            self.records.push_back(StepRecord { step: self.done, ..record });
            if !result.more_follow {
                self.flight.pop_front();
            }
        }
        Ok(Some(result))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::exec::{Kept, Row, Seat};
    use graph::ShapeKey;

    /// A device whose launches run a scripted number of steps.
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

        fn expert_loads(&self) -> Vec<ExpertLoad> {
            Vec::new()
        }

        fn spec_use(&self) -> Option<&SpecUse> {
            None
        }

        fn sleep(&mut self, _: Parts, _: bool) -> Result<(), SleepError> {
            Err(SleepError::Busy)
        }

        fn wake(&mut self, _: Parts, _: bool) -> Result<(), SleepError> {
            Err(SleepError::Busy)
        }

        fn check_update(&self, _: &Path) -> Result<Update, UpdateError> {
            Err(UpdateError::Busy)
        }

        fn check_shared(&self, _: &[SharedTensor]) -> Result<SharedUpdate, UpdateError> {
            Err(UpdateError::NoOrigin)
        }

        fn update_shared(&mut self, _: SharedUpdate) -> Result<(), UpdateError> {
            Err(UpdateError::NoOrigin)
        }

        fn update(&mut self, _: Update) -> Result<(), UpdateError> {
            Err(UpdateError::Busy)
        }

        fn adapter_reader(&self) -> Result<AdapterReader, AdapterError> {
            Err(AdapterError::NoRoom)
        }

        fn load_adapter(&mut self, _: u64, _: Arc<Adapter>) {}

        fn unload_adapter(&mut self, _: u64) {}

        fn rest(&self) -> Rest {
            Rest::Awake
        }
    }

    impl Executor for Scripted {
        fn geometry(&self) -> Geometry {
            Geometry {
                seats: 4,
                pages: 9,
                page_size: 16,
                pages_per_seat: 2,
                vocab: 10,
                kept: Kept::ALL,
            }
        }

        fn coverage(&self) -> Coverage {
            Coverage { decode_rows: 4, prefill_tokens: 64, prefill_rows: 4 }
        }

        fn steps(&self) -> u32 {
            16
        }

        fn launch(&mut self, _: &Step) -> Result<(), ExecError> {
            // Long enough to measure in microseconds.
            std::thread::sleep(Duration::from_millis(2));
            self.left.extend(self.runs.pop_front());
            Ok(())
        }

        fn poll(&mut self, _: bool) -> Result<Option<StepResult>, ExecError> {
            let Some(left) = self.left.front_mut() else { return Ok(None) };
            *left -= 1;
            let more_follow = *left > 0;
            if !more_follow {
                self.left.pop_front();
            }
            Ok(Some(StepResult { more_follow, ..StepResult::default() }))
        }
    }

    /// The records of three launches: of one step, of eight, and of eight that stops after three.
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
            // Later steps begin when the previous one is done.
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
    fn time_within_the_launch_call_is_device_time() {
        let records = records(Some(Duration::from_micros(1600)));
        let device: Vec<u32> = records.iter().map(|record| record.device_us).collect();
        assert_eq!(device, [1600, 200, 200, 200, 200, 200, 200, 200, 200, 200, 200, 1200]);
        assert_eq!(records[8].at, records[1].at + 7 * 200);
        assert!(records[0].host_us >= 400, "the rest of two milliseconds");
    }
}
