//! The GPU's figures, taken below the ops: bandwidth, the price of a boundary between kernels, of a
//! launch, of recording, and of crossing to the host.

use super::{Row, host_us, median};
use crate::cuda::context::Event;
use crate::cuda::driver::Cuda;
use crate::cuda::launch::{Arg, KernelKey, Launch, Lowered};
use crate::cuda::record::{CudaGraph, Step};
use crate::graph::{RecordOptions, Recorded};
use crate::mail::{Mapped, Words};
use crate::{Arena, Device, Error, OpenArena, Region, Result, Span};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Bytes from a chain's word to the next.
const LINE: u64 = 128;
/// Between launches, as between steps of a model of 8 billion parameters.
const SELDOM: Duration = Duration::from_millis(4);

struct Bench<'a> {
    device: &'a Device,
    cuda: &'a Cuda,
    arena: Arena,
    /// Read by the bandwidth rows.
    big: Span,
    /// Written by them.
    other: Span,
    /// One word per block of a chain, a line apart.
    words: Span,
    /// Host memory: a word asked, a word answered, and sources of small copies.
    host: Span,
}

/// The read bandwidth alone, in bytes per second.
pub(super) fn read_bandwidth(device: &Device) -> Result<f64> {
    Bench::new(device)?.read_rate()
}

pub(super) fn measure(
    device: &Device,
    rows: &mut Vec<Row>,
    progress: &mut dyn FnMut(&str),
) -> Result<()> {
    let bench = Bench::new(device)?;
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
    fn new(device: &'a Device) -> Result<Bench<'a>> {
        let cuda = device.driver.as_cuda().ok_or_else(|| Error::NoDevice {
            asked: "cuda".into(),
            reason: "GPU figures need a GPU".into(),
        })?;
        let size = (device.memory_free()? / 4).min(8 * GIB) / MIB * MIB;
        let mut open = OpenArena::new();
        let big = open.alloc(Region::Weights, "read", size);
        let other = open.alloc(Region::Workspace, "copy", size / 2);
        let words = open.alloc(Region::State, "words", 1024 * LINE);
        let host = open.alloc(Region::HostMapped, "host", 4096);
        let arena = device.seal(open)?;
        Ok(Bench { device, cuda, arena, big, other, words, host })
    }
}

impl Bench<'_> {
    fn launch(&self, source: &str, entry: &str, args: Vec<Arg>) -> Launch {
        Launch {
            kernel: KernelKey { source: source.into(), entry: entry.into(), defines: Vec::new() },
            grid: [self.cuda.context().gpu.target.sms, 1, 1],
            block: [32, 1, 1],
            cluster: [1, 1, 1],
            shared: 0,
            args,
            waits: false,
        }
    }

    fn read(&self, from: Span, unroll: u32) -> Lowered {
        let args = vec![Arg::Address(from), Arg::U64(from.len / 16), Arg::Address(self.words)];
        let mut launch = self.launch("bench_read", "bench_read", args);
        launch.kernel.defines.push(("UNROLL".into(), unroll.to_string()));
        launch.grid[0] *= 4;
        launch.block[0] = 512;
        Lowered::Launch(launch)
    }

    fn record(&self, work: Vec<Lowered>, dependent_launch: bool) -> Result<CudaGraph> {
        let steps = [Step::Work(work)];
        self.cuda.executor().prepare(&steps)?;
        let options = RecordOptions { dependent_launch };
        CudaGraph::new(self.cuda.executor(), &self.arena, &steps, options)
    }

    /// Microseconds the device spends between two marks around `f`.
    fn device_us(&self, f: impl FnOnce() -> Result<()>) -> Result<f64> {
        let context = self.cuda.context();
        let api = context.bind()?;
        let (start, end) = (Event::new(api)?, Event::new(api)?);
        start.record(&context.stream)?;
        f()?;
        end.record(&context.stream)?;
        end.wait()?;
        end.since(&start)
    }

    /// Bytes per second of reading the big span once.
    fn read_rate(&self) -> Result<f64> {
        // Memory nobody wrote may not be backed as memory in use is, and zeroes are not data.
        let noise = self.launch_fill();
        self.record(noise, false)?.replay()?;
        let read = self.record(vec![self.read(self.big, 8)], false)?;
        let us = median(9, || self.device_us(|| read.replay()))?;
        Ok(self.big.len as f64 / (us * 1e-6))
    }

    fn bandwidth(&self, rows: &mut Vec<Row>) -> Result<()> {
        let what = format!("read bandwidth, {} GiB", self.big.len / GIB);
        rows.push(Row { what, value: self.read_rate()? * 1e-12, unit: "TB/s" });
        let half = self.big.len / 2;
        let (from, to) = (self.big.part(0, half), self.other);
        let args = vec![Arg::Address(from), Arg::Address(to), Arg::U64(half / 16)];
        let mut kernel = self.launch("bench_copy", "bench_copy", args);
        kernel.grid[0] *= 4;
        kernel.block[0] = 512;
        let by = [("kernel", Lowered::Launch(kernel)), ("copy node", Lowered::Copy { from, to })];
        for (name, copy) in by {
            let copy = self.record(vec![copy], false)?;
            let us = median(9, || self.device_us(|| copy.replay()))?;
            let what = format!("copy bandwidth, read + write, by a {name}");
            rows.push(Row { what, value: 2.0 * half as f64 / us / 1e6, unit: "TB/s" });
        }
        Ok(())
    }

    /// Fills the big span with a different word per MiB.
    fn launch_fill(&self) -> Vec<Lowered> {
        let part = |index: u64| Lowered::Fill {
            to: self.big.part(index * 64 * MIB, 64 * MIB),
            word: (index as u32).wrapping_mul(2_654_435_761) | 1,
        };
        (0..self.big.len / (64 * MIB)).map(part).collect()
    }

    fn chain(&self, nodes: usize, entry: &str, waits: bool) -> Vec<Lowered> {
        let mut link = self.launch("bench_chain", entry, vec![Arg::Address(self.words)]);
        link.kernel.defines.push(("LINE".into(), LINE.to_string()));
        link.waits = waits;
        vec![Lowered::Launch(link); nodes]
    }

    /// The words of a chain, each of which must be `expected`.
    fn check_words(&self, expected: u32) -> Result<()> {
        let bytes = self.device.read(&self.arena, self.words)?;
        let blocks = self.cuda.context().gpu.target.sms as usize;
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
            ("plain", "chain_plain", false),
            ("dependent launch", "chain_dependent", true),
            ("plain, reading nothing", "add_plain", false),
            ("dependent launch, reading nothing", "add_dependent", true),
        ];
        for (name, entry, waits) in cases {
            let graph = self.record(self.chain(nodes, entry, waits), waits)?;
            let zero = vec![0; self.words.len as usize];
            self.device.write(&self.arena, self.words, &zero)?;
            let us = median(9, || self.device_us(|| graph.replay()))?;
            self.check_words(10 * nodes as u32)?;
            let what = format!("chain of dependent kernels in a graph, {name}");
            rows.push(Row { what, value: us / nodes as f64, unit: "µs per node" });
        }
        let work = self.chain(nodes, "chain_plain", false);
        let executor = self.cuda.executor();
        let stream = &self.cuda.context().stream;
        let us = median(5, || {
            self.device_us(|| {
                work.iter()
                    .try_for_each(|link| executor.launch(stream, &self.arena.inner, link, false))
            })
        })?;
        let what = "chain of kernels launched eagerly".into();
        rows.push(Row { what, value: us / nodes as f64, unit: "µs per kernel" });
        for nodes in [100, 300, 500] {
            self.launches(nodes, rows)?;
            let work = self.chain(nodes, "chain_dependent", true);
            let us = median(9, || {
                Ok(self.record(work.clone(), true)?.instantiation().as_secs_f64() * 1e3)
            })?;
            let what = format!("instantiate, {nodes} nodes");
            rows.push(Row { what, value: us, unit: "ms" });
            let ms =
                median(5, || Ok(host_us(|| self.record(work.clone(), true).map(drop))? / 1e3))?;
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
        let mut work = self.chain(nodes - 1, "chain_dependent", true);
        let count = self.host.part(0, LINE);
        let mut last = self.launch("bench_chain", "chain_plain", vec![Arg::Address(count)]);
        last.kernel.defines.push(("LINE".into(), LINE.to_string()));
        last.grid[0] = 1;
        work.push(Lowered::Launch(last));
        let graph = self.record(work, true)?;
        let words = Mapped::new(&self.arena, self.host)?;
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
            let nodes = (2 * GIB).min(self.big.len) / bytes;
            let unroll = if mib < 8 { 2 } else { 8 };
            let work = (0..nodes)
                .map(|node| self.read(self.big.part(node * bytes, bytes), unroll))
                .collect();
            let graph = self.record(work, false)?;
            let us = median(5, || self.device_us(|| graph.replay()))?;
            let what = format!("cold read inside a graph, {mib} MiB per node");
            rows.push(Row { what, value: (nodes * bytes) as f64 / us / 1e6, unit: "TB/s" });
        }
        Ok(())
    }

    fn crossing(&self, rows: &mut Vec<Row>) -> Result<()> {
        let rounds = 10_000u32;
        let (asked, answered) = (self.host.part(0, 4), self.host.part(256, 4));
        let args = vec![Arg::Address(asked), Arg::Address(answered), Arg::U32(rounds)];
        let mut launch = self.launch("bench_ring", "bench_ring", args);
        (launch.grid, launch.block) = ([1, 1, 1], [1, 1, 1]);
        let graph = self.record(vec![Lowered::Launch(launch)], false)?;
        let words = Mapped::new(&self.arena, self.host)?;
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
        let copies: Vec<Lowered> = (0..7)
            .map(|k| Lowered::Copy {
                from: self.host.part(512 + k * 256, 64),
                to: self.words.part(k * 256, 64),
            })
            .collect();
        let us = median(1001, || {
            let (executor, stream) = (self.cuda.executor(), &self.cuda.context().stream);
            let us = host_us(|| {
                copies
                    .iter()
                    .try_for_each(|copy| executor.launch(stream, &self.arena.inner, copy, false))
            })?;
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
