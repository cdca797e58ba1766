//! All buckets × backends on a device: what `dacapo graph verify` runs.

use crate::backend::BackendKind;
use crate::bucket::Buckets;
use crate::compile::{Bindings, CompileTarget};
use crate::program::Program;
use crate::runner::{Debug, RunError, RunnerConfig, Runners};
use crate::traffic::{Rng, Traffic};
use crate::{Phase, ShapeKey};
use device::{Arena, Device};
use std::time::{Duration, Instant};

/// A bucket of a backend that was verified.
#[derive(Clone, Debug)]
pub struct Verified {
    /// The backend.
    pub backend: BackendKind,
    /// The bucket.
    pub key: ShapeKey,
    /// Steps that were run both ways.
    pub steps: u32,
    /// Bytes of its recording.
    pub bytes: u64,
    /// What was wrong, if anything.
    pub problem: Option<String>,
}

/// What a sweep covers.
#[derive(Clone, Debug)]
pub struct Sweep {
    /// Backends to try.
    pub backends: Vec<BackendKind>,
    /// Decode buckets.
    pub decode: Buckets,
    /// Prefill buckets.
    pub prefill: Buckets,
    /// Random steps per bucket.
    pub steps: u32,
    /// Replays of each step.
    pub replays: u32,
    /// Where the random steps start.
    pub seed: u64,
}

/// What a sweep found.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// One per backend and bucket.
    pub verified: Vec<Verified>,
    /// Recording time per backend.
    pub recording: Vec<(BackendKind, Duration)>,
}

impl Findings {
    /// Whether everything agreed.
    pub fn passed(&self) -> bool {
        self.verified.iter().all(|line| line.problem.is_none())
    }
}

impl Sweep {
    /// Runs it. Weights must be there; the state is used up.
    pub fn run(
        &self,
        device: &Device,
        arena: &Arena,
        program: &Program,
        target: &CompileTarget,
        bindings: &Bindings,
        tell: &mut dyn FnMut(&Verified),
    ) -> Result<Findings, RunError> {
        let mut findings = Findings::default();
        for &backend in &self.backends {
            let config = |buckets: &Buckets| RunnerConfig {
                debug: Debug::Verify,
                replays: self.replays,
                ..RunnerConfig::new(backend, buckets.clone())
            };
            let (decode, prefill) = (config(&self.decode), config(&self.prefill));
            let (program, bound) = (program.clone(), bindings.clone());
            let mut runners =
                Runners::new(device, arena, program, target.clone(), bound, decode, prefill)?;
            let start = Instant::now();
            runners.record_all(&mut |_, _| {})?;
            findings.recording.push((backend, start.elapsed()));
            for buckets in [&self.decode, &self.prefill] {
                let mut found = |line: Verified| {
                    tell(&line);
                    findings.verified.push(line);
                };
                self.buckets(&mut runners, backend, buckets, bindings, &mut found)?;
            }
        }
        Ok(findings)
    }

    fn buckets(
        &self,
        runners: &mut Runners,
        backend: BackendKind,
        buckets: &Buckets,
        bindings: &Bindings,
        found: &mut dyn FnMut(Verified),
    ) -> Result<(), RunError> {
        let limits = bindings.state.limits;
        let recorded = match buckets.phase {
            Phase::Decode => runners.decode.recorded(),
            Phase::Prefill => runners.prefill.recorded(),
        };
        let mut rng = Rng::new(self.seed);
        let mut smaller = 0;
        for &bucket in &buckets.sizes {
            runners.reset()?;
            let pages = bindings.kv.first().map_or(0, |kv| kv.pages);
            let mut traffic = Traffic::new(limits, pages, rng.bits());
            let key = buckets.key(bucket, &limits);
            let bytes = recorded.iter().find(|(k, _)| *k == key).map_or(0, |(_, bytes)| *bytes);
            let mut line = Verified { backend, key, steps: 0, bytes, problem: None };
            while line.steps < self.steps && line.problem.is_none() {
                // The fullest step first, then any that takes this bucket.
                let spread = if line.steps == 0 { 0 } else { rng.below(bucket - smaller) };
                let size = bucket - spread;
                let input = match buckets.phase {
                    Phase::Decode => traffic.decode(size),
                    Phase::Prefill if size > traffic.most_tokens() => break,
                    Phase::Prefill => traffic.prefill(size),
                };
                match runners.launch(&input).and_then(|_| runners.wait()) {
                    Ok(_) => line.steps += 1,
                    Err(RunError::Mismatch(mismatch)) => line.problem = Some(mismatch.to_string()),
                    Err(error) => return Err(error),
                }
            }
            smaller = bucket;
            found(line);
        }
        Ok(())
    }
}
