//! The GPU's figures, measured below the ops: bandwidth, and the cost of a boundary between kernels, of a
//! launch, of recording, and of a round trip to the host.

use super::{Row, host_us, median};
use device::mail::{Mapped, Words};
use device::probe::{LINE, Link, Probe, ProbeGraph, Work};
use device::{Arena, Device, Error, OpenArena, Region, Result, Span};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Between launches, as between steps of a model of 8 billion parameters.
const SELDOM: Duration = Duration::from_millis(4);

struct Bench<'a> {
    device: &'a Device,
    probe: Probe<'a>,
    arena: &'a Arena,
    memory: Memory,
}

/// What the figures work on.
#[derive(Clone, Copy)]
struct Memory {
    /// Read by the bandwidth rows.
    big: Span,
    /// Written by them.
    other: Span,
    /// One word per block of a chain, a line apart.
    words: Span,
    /// Host memory: a word asked, a word answered, and sources of small copies.
    host: Span,
}

impl Memory {
    fn seal(device: &Device) -> Result<(Arena, Memory)> {
        let size = (device.memory_free()? / 4).min(8 * GIB) / MIB * MIB;
        let mut open = OpenArena::new();
        let memory = Memory {
            big: open.alloc(Region::Weights, "read", size),
            other: open.alloc(Region::Workspace, "copy", size / 2),
            words: open.alloc(Region::State, "words", 1024 * LINE),
            host: open.alloc(Region::HostMapped, "host", 4096),
        };
        Ok((device.seal(open)?, memory))
    }
}

/// The read bandwidth alone, in bytes per second.
pub(super) fn read_bandwidth(device: &Device) -> Result<f64> {
    let (arena, memory) = Memory::seal(device)?;
    Bench::new(device, &arena, memory)?.read_rate()
}

pub(super) fn measure(
    device: &Device,
    rows: &mut Vec<Row>,
    progress: &mut dyn FnMut(&str),
) -> Result<()> {
    let (arena, memory) = Memory::seal(device)?;
    let bench = Bench::new(device, &arena, memory)?;
    progress("GPU bandwidth");
    bench.bandwidth(rows)?;
    progress("GPU kernel chains and launches");
    bench.chains(rows)?;
    progress("GPU cold reads");
    bench.cold_reads(rows)?;
    progress("GPU to host");
    bench.crossing(rows)
}

impl<'a> Bench<'a> {
    fn new(device: &'a Device, arena: &'a Arena, memory: Memory) -> Result<Bench<'a>> {
        Ok(Bench { device, probe: Probe::new(device, arena)?, arena, memory })
    }
}

impl Bench<'_> {
    fn read(&self, from: Span, unroll: u32) -> Work {
        Work::Read { from, unroll, out: self.memory.words }
    }

    fn record(&self, work: &[Work], dependent_launch: bool) -> Result<ProbeGraph> {
        self.probe.record(work, dependent_launch)
    }

    /// Microseconds the device spends between two marks around `f`.
    fn device_us(&self, f: impl FnOnce() -> Result<()>) -> Result<f64> {
        let mut watch = self.device.stopwatch(2)?;
        watch.mark(0)?;
        f()?;
        watch.mark(1)?;
        watch.micros(0, 1)
    }

    /// Bytes per second of reading the big span once.
    fn read_rate(&self) -> Result<f64> {
        // Unwritten memory may not be backed like memory in use, and zeroes are not typical data.
        let noise = self.launch_fill();
        self.record(&noise, false)?.replay()?;
        let read = self.record(&[self.read(self.memory.big, 8)], false)?;
        let us = median(9, || self.device_us(|| read.replay()))?;
        Ok(self.memory.big.len as f64 / (us * 1e-6))
    }

    fn bandwidth(&self, rows: &mut Vec<Row>) -> Result<()> {
        let what = format!("read bandwidth, {} GiB", self.memory.big.len / GIB);
        rows.push(Row { what, value: self.read_rate()? * 1e-12, unit: "TB/s" });
        let half = self.memory.big.len / 2;
        let (from, to) = (self.memory.big.part(0, half), self.memory.other);
        let by = [("kernel", Work::Copy { from, to }), ("copy node", Work::CopyNode { from, to })];
        for (name, copy) in by {
            let copy = self.record(&[copy], false)?;
            let us = median(9, || self.device_us(|| copy.replay()))?;
            let what = format!("copy bandwidth, read + write, by a {name}");
            rows.push(Row { what, value: 2.0 * half as f64 / us / 1e6, unit: "TB/s" });
        }
        Ok(())
    }

    /// Fills the big span with a different word per MiB.
    fn launch_fill(&self) -> Vec<Work> {
        let part = |index: u64| Work::Fill {
            to: self.memory.big.part(index * 64 * MIB, 64 * MIB),
            word: (index as u32).wrapping_mul(2_654_435_761) | 1,
        };
        (0..self.memory.big.len / (64 * MIB)).map(part).collect()
    }

    fn chain(&self, nodes: usize, link: Link) -> Vec<Work> {
        let blocks = self.probe.multiprocessors();
        vec![Work::Chain { link, words: self.memory.words, blocks }; nodes]
    }

    /// The words of a chain, each of which must be `expected`.
    fn check_words(&self, expected: u32) -> Result<()> {
        let bytes = self.device.read(self.arena, self.memory.words)?;
        let blocks = self.probe.multiprocessors() as usize;
        let words = bytes.chunks_exact(LINE as usize).take(blocks);
        let wrong = words.filter(|line| line[..4] != expected.to_ne_bytes()).count();
        if wrong != 0 {
            let problem = format!("{wrong} of {blocks} blocks lost a step of the chain");
            return Err(Error::Contract { op: "bench chain".into(), problem });
        }
        Ok(())
    }

    fn chains(&self, rows: &mut Vec<Row>) -> Result<()> {
        let nodes = 1000;
        let cases = [
            ("plain", Link::Plain, false),
            ("dependent launch", Link::Dependent, true),
            ("plain, reading nothing", Link::AddPlain, false),
            ("dependent launch, reading nothing", Link::AddDependent, true),
        ];
        for (name, link, waits) in cases {
            let graph = self.record(&self.chain(nodes, link), waits)?;
            let zero = vec![0; self.memory.words.len as usize];
            self.device.write(self.arena, self.memory.words, &zero)?;
            let us = median(9, || self.device_us(|| graph.replay()))?;
            self.check_words(10 * nodes as u32)?;
            let what = format!("chain of dependent kernels in a graph, {name}");
            rows.push(Row { what, value: us / nodes as f64, unit: "µs per node" });
        }
        let eager = self.probe.prepare(&self.chain(nodes, Link::Plain))?;
        let us = median(5, || self.device_us(|| eager.launch()))?;
        let what = "chain of kernels launched eagerly".into();
        rows.push(Row { what, value: us / nodes as f64, unit: "µs per kernel" });
        for nodes in [100, 300, 500] {
            self.launches(nodes, rows)?;
            let work = self.chain(nodes, Link::Dependent);
            let us =
                median(9, || Ok(self.record(&work, true)?.instantiation().as_secs_f64() * 1e3))?;
            let what = format!("instantiate, {nodes} nodes");
            rows.push(Row { what, value: us, unit: "ms" });
            let ms = median(5, || Ok(host_us(|| self.record(&work, true).map(drop))? / 1e3))?;
            let what =
                format!("record whole (capture, instantiate, upload, release), {nodes} nodes");
            rows.push(Row { what, value: ms, unit: "ms" });
        }
        Ok(())
    }

    /// What one launch of a graph costs the thread that makes it. The last node counts in host memory, and the
    /// thread watches that word between launches, as the engine watches its ring: until the launch before has
    /// ended (`idle`), or until the one before that has, so that one is always running (`busy`, as in the
    /// engine's loop), or for as long as a step of a large model takes (`seldom`).
    fn launches(&self, nodes: usize, rows: &mut Vec<Row>) -> Result<()> {
        let mut work = self.chain(nodes - 1, Link::Dependent);
        let count = self.memory.host.part(0, LINE);
        work.push(Work::Chain { link: Link::Plain, words: count, blocks: 1 });
        let graph = self.record(&work, true)?;
        let words = Mapped::new(self.arena, self.memory.host)?;
        words.set(0, 0, Ordering::Release);
        let mut launched = 0;
        let often = Duration::ZERO;
        let ways = [("idle", 0, often, 2001), ("busy", 1, often, 2001), ("seldom", 0, SELDOM, 301)];
        for (name, running, pause, times) in ways {
            let us = median(times, || {
                let start = Instant::now();
                let us = host_us(|| graph.replay())?;
                launched += 1;
                while words.get(0, Ordering::Acquire) + running < launched
                    || start.elapsed() < pause
                {
                    std::hint::spin_loop();
                }
                Ok(us)
            })?;
            let what = format!("graph launch, host, {nodes} nodes, {name}");
            rows.push(Row { what, value: us, unit: "µs" });
        }
        self.device.sync()
    }

    /// Reads of different memory by successive nodes: what a chain of weight matrices would reach if
    /// nothing overlapped.
    fn cold_reads(&self, rows: &mut Vec<Row>) -> Result<()> {
        for mib in [2, 8, 24, 50] {
            let bytes = mib * MIB;
            // Enough distinct memory that none is still in the cache.
            let nodes = (2 * GIB).min(self.memory.big.len) / bytes;
            let unroll = if mib < 8 { 2 } else { 8 };
            let work: Vec<Work> = (0..nodes)
                .map(|node| self.read(self.memory.big.part(node * bytes, bytes), unroll))
                .collect();
            let graph = self.record(&work, false)?;
            let us = median(5, || self.device_us(|| graph.replay()))?;
            let what = format!("cold read inside a graph, {mib} MiB per node");
            rows.push(Row { what, value: (nodes * bytes) as f64 / us / 1e6, unit: "TB/s" });
        }
        Ok(())
    }

    fn crossing(&self, rows: &mut Vec<Row>) -> Result<()> {
        let rounds = 10_000u32;
        let (asked, answered) = (self.memory.host.part(0, 4), self.memory.host.part(256, 4));
        let graph = self.record(&[Work::Answer { asked, answered, rounds }], false)?;
        let words = Mapped::new(self.arena, self.memory.host)?;
        graph.replay()?;
        let mut times = Vec::with_capacity(rounds as usize);
        for round in 1..=rounds {
            times.push(host_us(|| {
                words.set(0, round, Ordering::Release);
                while words.get(64, Ordering::Acquire) != round {
                    std::hint::spin_loop();
                }
                Ok(())
            })?);
        }
        self.device.sync()?;
        times.sort_by(f64::total_cmp);
        let at = |part: f64| times[(f64::from(rounds) * part) as usize];
        let what = "mapped memory: host to kernel to host, median".into();
        rows.push(Row { what, value: at(0.5), unit: "µs" });
        let what = "mapped memory: host to kernel to host, 99 %".into();
        rows.push(Row { what, value: at(0.99), unit: "µs" });
        let copies: Vec<Work> = (0..7)
            .map(|k| Work::CopyNode {
                from: self.memory.host.part(512 + k * 256, 64),
                to: self.memory.words.part(k * 256, 64),
            })
            .collect();
        let copies = self.probe.prepare(&copies)?;
        let us = median(1001, || {
            let us = host_us(|| copies.launch())?;
            self.device.sync()?;
            Ok(us)
        })?;
        rows.push(Row {
            what: "7 small host-to-device copies, host".into(),
            value: us,
            unit: "µs",
        });
        Ok(())
    }
}
