//! `dacapo graph tune`.

use crate::exit::{bad_file, bad_input};
use crate::output::say;
use crate::trace;
use anyhow::Result;
use clap::Args;
use graph::Phase;
use graph::bucket::{BucketSpec, Buckets};
use graph::tune::{Tuned, tune};
use serde::Deserialize;
use serde_json::json;
use server::link::{self, StepRecord};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Find the bucket lists with the least padding for the sizes of real steps
#[derive(Args, Debug)]
pub(super) struct TuneArgs {
    /// The file of `serve --trace`, or JSON with the number of steps by size: {"decode": {"3": 1000, "9": 500},
    /// "prefill": {"512": 40}}
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

/// The number of steps by size.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Counts {
    #[serde(default)]
    decode: BTreeMap<u32, u64>,
    #[serde(default)]
    prefill: BTreeMap<u32, u64>,
}

/// The steps of a phase.
#[derive(Default)]
struct Steps {
    sizes: BTreeMap<u32, u64>,
    /// Buckets that ran, each with its steps and their time on the device; empty if only sizes are known.
    ran: BTreeMap<u32, (u64, u64)>,
}

impl Steps {
    fn add(&mut self, size: u32, bucket: u32, time: u32) {
        *self.sizes.entry(size).or_default() += 1;
        let (steps, all) = self.ran.entry(bucket).or_default();
        *steps += 1;
        *all += u64::from(time);
    }

    /// The part of the device's time that other buckets would save; `None` if no times are known. The time of a bucket
    /// that did not run lies on the line between its neighbours.
    fn gain(&self, buckets: &[u32]) -> Option<f64> {
        let before: u64 = self.ran.values().map(|(_, time)| time).sum();
        let mean = |(&bucket, &(steps, time)): (&u32, &(u64, u64))| {
            (f64::from(bucket), time as f64 / steps as f64)
        };
        let time = |bucket: u32| {
            let below = self.ran.range(..=bucket).next_back().map(mean);
            let above = self.ran.range(bucket..).next().map(mean);
            match (below, above) {
                (Some(a), Some(b)) if b.0 > a.0 => {
                    Some(a.1 + (f64::from(bucket) - a.0) / (b.0 - a.0) * (b.1 - a.1))
                }
                (one, other) => one.or(other).map(|(_, time)| time),
            }
        };
        let mut after = 0.0;
        for (&size, &steps) in &self.sizes {
            let bucket = buckets.iter().copied().find(|&bucket| bucket >= size).unwrap_or(size);
            after += steps as f64 * time(bucket)?;
        }
        (before > 0).then(|| 1.0 - after / before as f64)
    }
}

/// Reads either kind of file. The sizes of steps that ran op by op count, too: they want a bucket.
fn read(path: &Path) -> Result<[(Phase, Steps); 2]> {
    let text = std::fs::read_to_string(path).map_err(bad_file(path))?;
    let first = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    if serde_json::from_str::<StepRecord>(first).is_err() {
        let Counts { decode, prefill } = serde_json::from_str(&text).map_err(bad_file(path))?;
        let steps = |sizes| Steps { sizes, ..Steps::default() };
        return Ok([(Phase::Decode, steps(decode)), (Phase::Prefill, steps(prefill))]);
    }
    let (mut decode, mut prefill) = (Steps::default(), Steps::default());
    for record in trace::read(path)? {
        match record.phase {
            link::Phase::Decode => {
                decode.add(record.live_rows, record.bucket_rows, record.device_us);
            }
            link::Phase::Prefill if record.live_tokens == 0 => {
                let text = "an old trace: its steps have no live tokens; record it again";
                return Err(bad_input(format!("{}: {text}", path.display())));
            }
            link::Phase::Prefill => {
                prefill.add(record.live_tokens, record.bucket_tokens, record.device_us);
            }
        }
    }
    Ok([(Phase::Decode, decode), (Phase::Prefill, prefill)])
}

pub(super) fn run(args: &TuneArgs) -> Result<()> {
    let mut found = Vec::new();
    for (phase, steps) in read(&args.trace)? {
        let Some((&largest, _)) = steps.sizes.last_key_value() else { continue };
        let in_use: Vec<u32> = match steps.ran.is_empty() {
            true => Buckets::generate(&BucketSpec::Auto, phase, largest.max(1), None)?.sizes,
            false => steps.ran.keys().copied().collect(),
        };
        let bytes = |_: u32| args.graph_size << 10;
        let tuned = tune(phase, &steps.sizes, &in_use, &bytes, args.budget << 20);
        let gain = steps.gain(&tuned.buckets);
        found.push((tuned, in_use.len(), gain));
    }
    if args.json {
        let list = |(tuned, _, gain): &(Tuned, usize, Option<f64>)| -> Result<serde_json::Value> {
            let mut list = serde_json::to_value(tuned)?;
            list["device_time_saved"] = json!(gain);
            Ok(list)
        };
        let lists: Vec<_> = found.iter().map(list).collect::<Result<_>>()?;
        say!("{}", serde_json::to_string_pretty(&lists)?)?;
        return Ok(());
    }
    for (tuned, in_use, gain) in &found {
        let list: Vec<String> = tuned.buckets.iter().map(u32::to_string).collect();
        let share = |padded: u64| 100.0 * padded as f64 / (tuned.live + padded).max(1) as f64;
        say!("--graph-buckets-{} {}", tuned.phase, list.join(","))?;
        say!(
            "  {} graphs instead of {}, {:.1} MiB; {:.1} % padding instead of {:.1} % ({} {} saved)",
            tuned.buckets.len(),
            in_use,
            tuned.bytes as f64 / f64::from(1 << 20),
            share(tuned.padded),
            share(tuned.padded_before),
            tuned.padded_before.saturating_sub(tuned.padded),
            tuned.phase.unit(),
        )?;
        if let Some(gain) = gain {
            say!("  predicted: {:.1} % less time on the device", 100.0 * gain)?;
        }
        if tuned.uncovered > 0 {
            say!("  {} steps are larger than every bucket: raise --budget", tuned.uncovered)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(all: &[(u32, u32, u32)]) -> Steps {
        let mut steps = Steps::default();
        all.iter().for_each(|&(size, bucket, time)| steps.add(size, bucket, time));
        steps
    }

    #[test]
    fn times_between_buckets_are_on_a_line() {
        // Three steps of 96 tokens ran in a bucket of 128.
        let steps = steps(&[(64, 64, 1000), (96, 128, 2000), (96, 128, 2000), (96, 128, 2000)]);
        assert_eq!(steps.gain(&[64, 128]), Some(0.0));
        let gain = steps.gain(&[64, 96]).unwrap();
        assert!((gain - (1.0 - 5500.0 / 7000.0)).abs() < 1e-9, "{gain}");
        assert_eq!(Steps::default().gain(&[64]), None);
    }

    #[test]
    fn a_servers_trace_gives_sizes_buckets_and_times() {
        let line = |phase: &str, rows: u32, tokens: u32, bucket: u32| {
            format!(
                r#"{{"step":1,"at":1,"phase":"{phase}","bucket_rows":{bucket},"bucket_tokens":{bucket},"live_rows":{rows},"live_tokens":{tokens},"padded_rows":0,"run":"replayed","host_us":1,"device_us":50}}"#
            )
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = [line("decode", 3, 3, 4), line("decode", 3, 3, 4), line("prefill", 2, 40, 64)];
        std::fs::write(file.path(), text.join("\n")).unwrap();
        let [(_, decode), (_, prefill)] = read(file.path()).unwrap();
        assert_eq!(decode.sizes, BTreeMap::from([(3, 2)]));
        assert_eq!(decode.ran, BTreeMap::from([(4, (2, 100))]));
        assert_eq!(prefill.sizes, BTreeMap::from([(40, 1)]));

        std::fs::write(file.path(), line("prefill", 2, 0, 64)).unwrap();
        let error = read(file.path()).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("record it again"), "{error}");
        std::fs::write(file.path(), r#"{"decode": {"3": 7}}"#).unwrap();
        let [(_, decode), _] = read(file.path()).unwrap();
        assert_eq!(decode.sizes, BTreeMap::from([(3, 7)]));
        assert_eq!(decode.gain(&[4]), None);
    }
}
