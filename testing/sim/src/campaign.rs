//! Campaigns of many runs: seeds, planted bugs, a small cache, a failure at every call.

use crate::client::{Kind, Scenario};
use crate::device::{Fault, Faults};
use crate::run::{Report, Run};
use engine::plant::{Plant, plant};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A seed that failed, and how to replay it.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// The violation that a checker found.
    pub what: String,
    /// The command that replays it.
    pub replay: String,
}

/// The totals over many seeds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// Runs without a violation.
    pub runs: u64,
    /// Engine ticks.
    pub ticks: u64,
    /// Steps launched on the device.
    pub steps: u64,
    /// Tokens, all equal to the oracle's.
    pub tokens: u64,
    /// Sequences preempted.
    pub preemptions: u64,
    /// Times the device lost its state or returned a corrupt result.
    pub restarts: u64,
    /// Steps that were not the first of their launch.
    pub repeated: u64,
    /// Tokens that were not the first of their row.
    pub extra: u64,
    /// Decode rows that returned no token.
    pub empty: u64,
    /// Page copies.
    pub copies: u64,
    /// Prompt tokens found in the prefix tree.
    pub cached: u64,
}

impl Totals {
    fn add(&mut self, report: &Report) {
        let stats = &report.stats;
        self.runs += 1;
        self.ticks += report.ticks;
        self.steps += stats.decode_steps + stats.prefill_steps;
        self.tokens += stats.tokens;
        self.preemptions += stats.preemptions;
        self.restarts += stats.restarts;
        self.repeated += report.repeated;
        self.extra += report.extra.0;
        self.empty += report.extra.1;
        self.copies += stats.copies;
        self.cached += stats.cached_tokens;
    }

    fn join(&mut self, other: &Totals) {
        self.runs += other.runs;
        self.ticks += other.ticks;
        self.steps += other.steps;
        self.tokens += other.tokens;
        self.preemptions += other.preemptions;
        self.restarts += other.restarts;
        self.repeated += other.repeated;
        self.extra += other.extra;
        self.empty += other.empty;
        self.copies += other.copies;
        self.cached += other.cached;
    }
}

/// Runs a seed and prints its first `printed` ticks; a panic counts as a violation.
fn one(seed: u64, plan: &Plan) -> Result<Report, String> {
    guarded(plan.plant, || {
        let run = Run::new(plan.scenario(seed, Kind::Everything), seed, None);
        if plan.printed > 0 { run.print_ticks(plan.printed).finish() } else { run.finish() }
    })
}

/// Runs a seed twice: with all the pages it needs, then with `share` of what it used. Every answer
/// must be the same.
fn with_small_cache(seed: u64, share: f64, plan: &Plan) -> Result<Report, String> {
    guarded(plan.plant, || {
        let mut scenario = plan.scenario(seed, Kind::Steady);
        // Enough seats and pages for all clients, so that their full demand is measured.
        scenario.geometry.seats = scenario.geometry.seats.max(6);
        scenario.coverage.decode_rows = scenario.geometry.seats;
        scenario.config.max_waiting = 1000;
        let each = scenario.one_sequence();
        let longest = scenario.geometry.pages_per_seat * scenario.geometry.page_size;
        scenario.geometry.pages = 1 + each * scenario.geometry.seats;
        scenario.config.max_len = scenario.config.max_len.min(longest);
        for visit in &mut scenario.visits {
            let choices = visit.request.choices;
            visit.request.choices = choices.min(scenario.geometry.seats);
        }
        let free = Run::new(scenario.clone(), seed, None).finish()?;
        // One sequence must still fit, or it would be refused.
        let pages = (f64::from(free.peak_pages) * share) as u32;
        scenario.geometry.pages = 1 + pages.max(each);
        let pressed = Run::new(scenario, seed, None).finish()?;
        if pressed.answers != free.answers {
            return Err("answers differ with a small cache".into());
        }
        Ok(pressed)
    })
}

/// A script of more than 200 steps with many sequences in them.
const SCRIPT: u64 = 24;

/// Runs the script with one failing call; `u64::MAX` is a call it never makes.
pub fn failing_call(call: u64, fault: Fault) -> Result<Report, String> {
    guarded(None, || {
        let mut scenario = Scenario::new(SCRIPT, Kind::Steady);
        scenario.config.launch_retries = 2;
        scenario.config.restarts = 2;
        Run::new(scenario, SCRIPT, Some(Faults::At(call, fault))).finish()
    })
}

fn guarded(
    planted: Option<Plant>,
    run: impl FnOnce() -> Result<Report, String>,
) -> Result<Report, String> {
    plant(planted);
    let result = catch_unwind(AssertUnwindSafe(run));
    plant(None);
    result.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("panic: {}", text.unwrap_or_default()))
    })
}

/// The configuration of a campaign.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plan {
    /// Limit the cache to this share of the demand.
    pub cache_share: Option<f64>,
    /// Rows return several tokens or none, whatever the seed says.
    pub several: bool,
    /// Some or all layers see a window of tokens.
    pub windows: bool,
    /// Layers are recurrent: seats carry state from token to token.
    pub carries: bool,
    /// A bug to plant.
    pub plant: Option<Plant>,
    /// Print this many ticks.
    pub printed: u64,
}

impl Plan {
    /// Seeds that can find a planted bug.
    pub fn planted(plant: Plant) -> Plan {
        let windows = matches!(plant, Plant::FreeTooEarly | Plant::ReadPast);
        let states = [
            Plant::ForgetState,
            Plant::SaveOtherPage,
            Plant::ReplaceWhileSaving,
            Plant::KeepRejected,
        ];
        let (carries, several) = (states.contains(&plant), plant == Plant::KeepRejected);
        Plan { plant: Some(plant), several, windows, carries, ..Plan::default() }
    }

    /// Runs one seed.
    pub fn run(&self, seed: u64) -> Result<Report, String> {
        match self.cache_share {
            Some(share) => with_small_cache(seed, share, self),
            None => one(seed, self),
        }
    }

    fn scenario(&self, seed: u64, kind: Kind) -> Scenario {
        let mut scenario = Scenario::new(seed, kind);
        if self.several {
            scenario = scenario.with_several(seed);
        }
        if self.windows {
            scenario = scenario.with_windows(seed);
        }
        if self.carries { scenario.with_states(seed) } else { scenario }
    }

    /// The command that replays one seed.
    pub fn replay(&self, seed: u64) -> String {
        let mut line = format!("cargo run --release -p sim -- --seed {seed}");
        if let Some(share) = self.cache_share {
            line += &format!(" --cache-share {share}");
        }
        if self.several {
            line += " --several";
        }
        if self.windows {
            line += " --windows";
        }
        if self.carries {
            line += " --carries";
        }
        if let Some(plant) = self.plant {
            line += &format!(" --plant {}", plant.name());
        }
        line
    }

    /// Runs seeds `first..first + count` on all cores until one fails. `progress` gets the number
    /// of seeds done.
    pub fn seeds(
        &self,
        first: u64,
        count: u64,
        progress: impl Fn(u64) + Sync,
    ) -> (Totals, Option<Failure>) {
        let next = AtomicU64::new(first);
        let stop = AtomicBool::new(false);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let worker = || {
            let mut totals = Totals::default();
            while !stop.load(Ordering::Relaxed) {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= first + count {
                    break;
                }
                match self.run(seed) {
                    Ok(report) => totals.add(&report),
                    Err(what) => {
                        stop.store(true, Ordering::Relaxed);
                        let replay = self.replay(seed);
                        return (totals, Some(Failure { seed, what, replay }));
                    }
                }
                progress(seed + 1 - first);
            }
            (totals, None)
        };
        let mut totals = Totals::default();
        let mut failure: Option<Failure> = None;
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
            for handle in workers {
                let (part, failed) = handle.join().expect("runs are guarded");
                totals.join(&part);
                // Report the smallest seed, so that the result depends less on timing.
                failure = match (failure.take(), failed) {
                    (Some(a), Some(b)) => Some(if a.seed < b.seed { a } else { b }),
                    (a, b) => a.or(b),
                };
            }
        });
        (totals, failure)
    }
}
