//! `dacapo graph tune`.

use crate::exit::bad_file;
use crate::output::say;
use anyhow::Result;
use clap::Args;
use graph::Phase;
use graph::bucket::{BucketSpec, Buckets};
use graph::tune::tune;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Find the bucket lists with the least padding for observed sizes
#[derive(Args, Debug)]
pub(super) struct TuneArgs {
    /// JSON with the number of steps by size: {"decode": {"3": 1000, "9": 500}, "prefill": {"512":
    /// 40}}
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// Memory limit of the graphs of a phase, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 64)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1 << 24))]
    budget: u64,
    /// Size of one graph in KiB, as reported by `graph verify` and at the server's start
    #[arg(long, value_name = "KIB", default_value_t = 4096)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    graph_size: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Trace {
    #[serde(default)]
    decode: BTreeMap<u32, u64>,
    #[serde(default)]
    prefill: BTreeMap<u32, u64>,
}

pub(super) fn run(args: &TuneArgs) -> Result<()> {
    let text = std::fs::read_to_string(&args.trace).map_err(bad_file(&args.trace))?;
    let trace: Trace = serde_json::from_str(&text).map_err(bad_file(&args.trace))?;
    let mut found = Vec::new();
    for (phase, sizes) in [(Phase::Decode, trace.decode), (Phase::Prefill, trace.prefill)] {
        let Some((&largest, _)) = sizes.last_key_value() else { continue };
        let in_use = Buckets::generate(&BucketSpec::Auto, phase, largest.max(1), None)?;
        let bytes = |_: u32| args.graph_size << 10;
        found.push((tune(phase, &sizes, &in_use.sizes, &bytes, args.budget << 20), in_use));
    }
    if args.json {
        let lists: Vec<_> = found.iter().map(|(tuned, _)| tuned).collect();
        say!("{}", serde_json::to_string_pretty(&lists)?)?;
        return Ok(());
    }
    for (tuned, in_use) in &found {
        let list: Vec<String> = tuned.buckets.iter().map(u32::to_string).collect();
        let share = |padded: u64| 100.0 * padded as f64 / (tuned.live + padded).max(1) as f64;
        say!("--graph-buckets-{} {}", tuned.phase, list.join(","))?;
        say!(
            "  {} graphs instead of {}, {:.1} MiB; {:.1} % padding instead of {:.1} % ({} {} saved)",
            tuned.buckets.len(),
            in_use.sizes.len(),
            tuned.bytes as f64 / f64::from(1 << 20),
            share(tuned.padded),
            share(tuned.padded_before),
            tuned.padded_before.saturating_sub(tuned.padded),
            tuned.phase.unit(),
        )?;
        if tuned.uncovered > 0 {
            say!("  {} steps are larger than every bucket: raise --budget", tuned.uncovered)?;
        }
    }
    Ok(())
}
