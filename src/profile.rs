//! `--profile-steps A-B`: the device times of the nodes of some steps, as a file for Perfetto or `chrome://tracing`.

use crate::exit::bad_file;
use crate::output::note;
use anyhow::Result;
use graph::runner::{Profile, ProfiledStep};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// Parses `A-B` or `A`.
pub(crate) fn parse_steps(text: &str) -> Result<RangeInclusive<u64>, String> {
    let number = |text: &str| text.trim().parse::<u64>().ok().filter(|&number| number > 0);
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (number(first), number(last)) {
        (Some(first), Some(last)) if last < first => {
            Err("the last step is before the first".into())
        }
        (Some(first), Some(last)) if last - first >= MOST => {
            Err(format!("at most {MOST} steps can be profiled"))
        }
        (Some(first), Some(last)) => Ok(first..=last),
        _ => Err("expected the numbers of steps, such as 100-110; the first is 1".into()),
    }
}

/// Steps of one profile: a file of more would be too large to open.
const MOST: u64 = 1000;

/// A profile that is written to a file. The file is made now, so that one that cannot be written is an error at start.
pub(crate) fn to_file(steps: RangeInclusive<u64>, path: &Path) -> Result<Profile> {
    let mut file = File::create(path).map_err(bad_file(path))?;
    let path: PathBuf = path.to_owned();
    let report = move |steps: &[ProfiledStep]| {
        let text = trace(steps).to_string();
        match file.write_all(text.as_bytes()) {
            Ok(()) => note!("[profile: {} steps in {}]", steps.len(), path.display()),
            Err(error) => note!("error: {}: {error}", path.display()),
        }
    };
    Ok(Profile::new(steps, report))
}

/// The trace events of steps: each step is one bar, its nodes are bars below it.
fn trace(steps: &[ProfiledStep]) -> Value {
    let mut events = vec![
        json!({ "ph": "M", "pid": 1, "name": "process_name", "args": { "name": "device" } }),
        json!({ "ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": { "name": "steps" } }),
    ];
    for step in steps {
        let total: f64 = step.nodes.iter().map(|node| node.micros).sum();
        let bar = |name: &str, ts: f64, dur: f64, args: Value| json!({ "ph": "X", "pid": 1, "tid": 1, "name": name, "ts": ts, "dur": dur, "args": args });
        let args = json!({ "step": step.number, "nodes": step.nodes.len() });
        events.push(bar(&step.key.to_string(), step.at, total, args));
        let mut at = step.at;
        for node in &step.nodes {
            events.push(bar(&node.name, at, node.micros, json!({ "op": node.op })));
            at += node.micros;
        }
    }
    json!({ "displayTimeUnit": "ns", "traceEvents": events })
}

#[cfg(test)]
mod tests {
    use super::*;
    use graph::ShapeKey;
    use graph::runner::ProfiledNode;

    #[test]
    fn steps_are_a_number_or_two() {
        assert_eq!(parse_steps("7"), Ok(7..=7));
        assert_eq!(parse_steps("5-9"), Ok(5..=9));
        for wrong in ["", "0", "9-5", "a-b", "1-", "1-99999", "-3"] {
            assert!(parse_steps(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn nodes_lie_within_their_step() {
        let node = |name: &str, micros| ProfiledNode { name: name.into(), op: "op".into(), micros };
        let nodes = vec![node("embed", 2.0), node("0.qkv", 3.5)];
        let step = ProfiledStep { number: 4, key: ShapeKey::decode(2), at: 10.0, nodes };
        let trace = trace(&[step]);
        let bars: Vec<_> = trace["traceEvents"].as_array().unwrap()[2..]
            .iter()
            .map(|bar| (bar["name"].as_str().unwrap(), bar["ts"].as_f64(), bar["dur"].as_f64()))
            .collect();
        let expected = [("decode/2", 10.0, 5.5), ("embed", 10.0, 2.0), ("0.qkv", 12.0, 3.5)];
        assert_eq!(bars, expected.map(|(name, ts, dur)| (name, Some(ts), Some(dur))));
    }
}
