//! `sim`: runs the simulator and reports violations.

use clap::Parser;
use engine::plant::Plant;
use sim::campaign::{Failure, Plan, Totals, failing_call};
use sim::device::Fault;
use std::process::ExitCode;
use std::time::Instant;

/// Runs the engine against seeded clients and a device that fails on schedule.
#[derive(Parser)]
struct Args {
    /// Number of seeds.
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// Only this seed.
    #[arg(long)]
    seed: Option<u64>,
    /// With --seed: print this many steps.
    #[arg(long, default_value_t = 0, requires = "seed")]
    steps: u64,
    /// Limit the cache to this share of the demand and compare every answer with a run without the
    /// limit.
    #[arg(long)]
    cache_share: Option<f64>,
    /// Every device returns several tokens or none per row; without it some seeds do.
    #[arg(long)]
    several: bool,
    /// Some or all layers of every device see a window of tokens, and give back the pages before it.
    #[arg(long)]
    windows: bool,
    /// Layers of every device are recurrent: seats carry state from token to token.
    #[arg(long)]
    carries: bool,
    /// Plant one bug: finding it is success.
    #[arg(long)]
    plant: Option<String>,
    /// Lists the bugs that can be planted.
    #[arg(long)]
    list_plants: bool,
    /// Run only the seeds, not the small cache, the failing calls and the planted bugs.
    #[arg(long)]
    only_seeds: bool,
    /// Seeds tried before a planted bug counts as not found.
    #[arg(long, default_value_t = 2000)]
    plant_seeds: u64,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.list_plants {
        for plant in Plant::ALL {
            println!("{:20} {}", plant.name(), plant.what());
        }
        return ExitCode::SUCCESS;
    }
    // A panic inside a run is reported once, with its seed.
    std::panic::set_hook(Box::new(|_| {}));
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(usage) => {
            eprintln!("{usage}");
            ExitCode::from(2)
        }
    }
}

fn run(args: &Args) -> Result<bool, String> {
    let plant = args.plant.as_deref().map(named).transpose()?;
    let (cache_share, several, windows) = (args.cache_share, args.several, args.windows);
    let carries = args.carries;
    let plan = Plan { cache_share, several, windows, carries, plant, printed: args.steps };
    let (first, count) = match args.seed {
        Some(seed) => (seed, 1),
        None => (0, args.seeds),
    };
    if plant.is_some() {
        let (_, failure) = plan.seeds(first, count, |_| {});
        return Ok(match failure {
            Some(Failure { seed, what, replay }) => {
                println!("found at seed {seed}: {what}\n  {replay}");
                true
            }
            None => {
                println!("not found in {count} seeds");
                false
            }
        });
    }
    let mut good = seeds("seeds", plan, first, count);
    if args.seed.is_none() && args.cache_share.is_none() && !args.only_seeds {
        let pressure =
            Plan { cache_share: Some(0.3), several, windows, carries, ..Plan::default() };
        good &= seeds("cache at 30 %", pressure, first, count.div_ceil(10));
        if !windows {
            let windows = Plan { windows: true, several, ..Plan::default() };
            good &= seeds("windows", windows, first, count.div_ceil(4));
            let pressure = Plan { windows: true, ..pressure };
            good &= seeds("windows, cache at 30 %", pressure, first, count.div_ceil(10));
        }
        if !carries {
            let carries = Plan { carries: true, ..Plan::default() };
            good &= seeds("recurrent layers", carries, first, count.div_ceil(4));
            let pressure = Plan { cache_share: Some(0.3), ..carries };
            good &= seeds("recurrent layers, cache at 30 %", pressure, first, count.div_ceil(10));
        }
        good &= calls();
        good &= plants(args.plant_seeds);
    }
    println!("{}", if good { "no violations" } else { "VIOLATIONS" });
    Ok(good)
}

fn named(name: &str) -> Result<Plant, String> {
    let found = Plant::ALL.iter().find(|plant| plant.name() == name);
    found.copied().ok_or_else(|| format!("unknown planted bug {name}; see --list-plants"))
}

fn seeds(title: &str, plan: Plan, first: u64, count: u64) -> bool {
    let start = Instant::now();
    let (totals, failure) = plan.seeds(first, count, |done| {
        if done.is_multiple_of(1000) {
            eprintln!("{title}: {done} of {count}");
        }
    });
    let Totals { runs, steps, tokens, preemptions, restarts, copies, cached, .. } = totals;
    let Totals { extra, empty, .. } = totals;
    println!(
        "{title}: {runs} runs, {steps} steps, {tokens} tokens, {preemptions} preemptions, \
         {restarts} restarts, {copies} copies, {cached} cached tokens, \
         {extra} tokens beside the first of their row, {empty} rows without one, {:.1} s",
        start.elapsed().as_secs_f64()
    );
    match failure {
        Some(Failure { seed, what, replay }) => {
            println!("VIOLATION at seed {seed}: {what}\n  {replay}");
            false
        }
        None => true,
    }
}

/// Runs one script with each of its calls failing in every way.
fn calls() -> bool {
    let whole = match failing_call(u64::MAX, Fault::StateLost) {
        Ok(report) => report,
        Err(what) => {
            println!("VIOLATION in the script: {what}");
            return false;
        }
    };
    let steps = whole.stats.decode_steps + whole.stats.prefill_steps;
    for call in 1..=whole.calls {
        for fault in Fault::ALL {
            if let Err(what) = failing_call(call, fault) {
                println!("VIOLATION with {fault:?} at call {call}: {what}");
                return false;
            }
        }
    }
    println!(
        "failing calls: each of {} calls of {steps} steps, in {} ways",
        whole.calls,
        Fault::ALL.len()
    );
    true
}

/// Plants each bug and checks that it is found.
fn plants(limit: u64) -> bool {
    let mut missed = 0;
    for &plant in Plant::ALL {
        let plan = Plan::planted(plant);
        match plan.seeds(0, limit, |_| {}).1 {
            Some(failure) => {
                println!("planted {:20} seed {:4}: {}", plant.name(), failure.seed, failure.what);
            }
            None => {
                missed += 1;
                println!("planted {:20} NOT FOUND: {}", plant.name(), plant.what());
            }
        }
    }
    println!("planted bugs: {} of {} found", Plant::ALL.len() - missed, Plant::ALL.len());
    missed == 0
}
