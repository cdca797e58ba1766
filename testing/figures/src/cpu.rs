//! The CPU's figures: read bandwidth, cache misses after a wait, the cost of dispatching an op, the cost of a replay.

use super::{Row, host_us, median};
use device::op::Fill;
use device::{Device, Graph, Item, Node, Op, OpenArena, RecordOptions, Region, Result, Span};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

pub(super) fn measure(
    device: &Device,
    rows: &mut Vec<Row>,
    progress: &mut dyn FnMut(&str),
) -> Result<()> {
    progress("CPU read bandwidth");
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let words = memory();
    let mut counts: Vec<usize> = std::iter::successors(Some(1), |n| Some(n * 2)).take(8).collect();
    counts.retain(|n| *n < threads);
    counts.push(threads);
    for count in counts {
        let rate = read_rate(&words, count)?;
        let what = format!("CPU read bandwidth, {count} thread(s)");
        rows.push(Row { what, value: rate * 1e-9, unit: "GB/s" });
    }
    for wait in [1, 13] {
        let us = walk(&words, Duration::from_millis(wait))?;
        let what = format!("CPU walk over {LINES} cache lines, {wait} ms after the last");
        rows.push(Row { what, value: us, unit: "µs" });
    }
    drop(words);
    progress("CPU dispatch and replay");
    let mut open = OpenArena::new();
    let span = open.alloc(Region::Workspace, "bench", 256);
    let arena = device.seal(open)?;
    let graph = |nodes: usize| -> Result<_> {
        let mut recording = device.record(&arena, "bench", RecordOptions::default())?;
        for _ in 0..nodes {
            recording.push(Item::Node(fill(span)))?;
        }
        Ok(recording.finish()?.remove(0))
    };
    let many = 1000;
    let (one, thousand) = (graph(1)?, graph(many)?);
    let timed = |graph: &Graph| median(101, || host_us(|| graph.replay()));
    let (short, long) = (timed(&one)?, timed(&thousand)?);
    rows.push(Row { what: "CPU replay of one op".into(), value: short, unit: "µs" });
    let per_op = (long - short).max(0.0) / (many - 1) as f64;
    rows.push(Row { what: "CPU op dispatch in a replay".into(), value: per_op, unit: "µs" });
    let node = fill(span);
    let eager = median(101, || host_us(|| device.run(&arena, &node)))?;
    rows.push(Row { what: "CPU op run eagerly".into(), value: eager, unit: "µs" });
    Ok(())
}

/// The read bandwidth of all threads together, in bytes per second.
pub(super) fn read_bandwidth() -> Result<f64> {
    read_rate(&memory(), std::thread::available_parallelism().map_or(1, |n| n.get()))
}

/// More than any cache holds.
fn memory() -> Vec<u64> {
    vec![1; (512 * MIB / 8) as usize]
}

/// Cache lines of a walk: some two for each node of a large graph.
const LINES: usize = 400;

/// Microseconds to read scattered cache lines again after a wait of this length. This process does not evict them
/// meanwhile, but others may. A driver that launches a graph only now and then finds its lists in the same
/// state.
fn walk(words: &[u64], wait: Duration) -> Result<f64> {
    median(61, || {
        let start = Instant::now();
        while start.elapsed() < wait {
            std::hint::spin_loop();
        }
        host_us(|| {
            let line = |i: usize| words[i * 999_983 * 8 % words.len()];
            std::hint::black_box((0..LINES).map(line).sum::<u64>());
            Ok(())
        })
    })
}

fn read_rate(words: &[u64], threads: usize) -> Result<f64> {
    let us = median(3, || {
        host_us(|| {
            std::hint::black_box(sum(words, threads));
            Ok(())
        })
    })?;
    Ok((words.len() * 8) as f64 / (us * 1e-6))
}

fn fill(to: Span) -> Node {
    Node { op: Op::Fill(Fill { to, word: 1 }), name: "fill".into(), layer: None }
}

/// The sum of all words, an even part per thread.
fn sum(words: &[u64], threads: usize) -> u64 {
    let part = words.len().div_ceil(threads);
    std::thread::scope(|scope| {
        let parts: Vec<_> = words
            .chunks(part)
            .map(|part| {
                scope.spawn(move || {
                    // Several sums side by side, so that the adds do not wait for each other.
                    let mut sums = [0u64; 32];
                    for chunk in part.chunks_exact(32) {
                        for (sum, word) in sums.iter_mut().zip(chunk) {
                            *sum = sum.wrapping_add(*word);
                        }
                    }
                    sums.iter().fold(0u64, |all, sum| all.wrapping_add(*sum))
                })
            })
            .collect();
        parts.into_iter().map(|part| part.join().expect("adding does not panic")).sum()
    })
}
