//! Work below the level of ops, for measurements of the hardware: the kernels `bench_*.cu`, copies and fills,
//! launched one by one or recorded as a graph. GPUs only; callers decide what is measured.

use crate::cuda::driver::Cuda;
use crate::cuda::launch::{Arg, KernelKey, Launch, Lowered};
use crate::cuda::record::{CudaGraph, Step};
use crate::graph::{RecordOptions, Recorded};
use crate::ops::require;
use crate::{Arena, Device, Error, Result, Span};
use std::time::Duration;

/// Bytes between the words of a chain's blocks: a cache line each.
pub const LINE: u64 = 128;

/// How a link of a chain starts and what it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// After the previous link has ended; reads its word and writes it.
    Plain,
    /// By dependent launch; reads its word and writes it.
    Dependent,
    /// After the previous link has ended; adds in memory and reads nothing.
    AddPlain,
    /// By dependent launch; adds in memory and reads nothing.
    AddDependent,
}

/// One piece of work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// Reads a span once with this many loads in flight per thread.
    Read {
        /// What to read.
        from: Span,
        /// Loads in flight per thread.
        unroll: u32,
        /// At least a word; written if the sum has one value in 2^32, so that no load can be optimised away.
        out: Span,
    },
    /// Copies a span to one of the same length with a kernel.
    Copy {
        /// What to read.
        from: Span,
        /// What to write.
        to: Span,
    },
    /// Copies a span to one of the same length with a copy node.
    CopyNode {
        /// What to read.
        from: Span,
        /// What to write.
        to: Span,
    },
    /// Fills a span with a word.
    Fill {
        /// What to write.
        to: Span,
        /// The word.
        word: u32,
    },
    /// Each of `blocks` blocks adds one to its word in `words`; the words are [`LINE`] bytes apart.
    Chain {
        /// How it starts.
        link: Link,
        /// The words.
        words: Span,
        /// Blocks.
        blocks: u32,
    },
    /// Waits `rounds` times for the next number in `asked` and writes it to `answered`.
    Answer {
        /// A word of host memory that the host writes.
        asked: Span,
        /// A word of host memory that the kernel writes.
        answered: Span,
        /// Numbers to answer, from 1.
        rounds: u32,
    },
}

/// Launches [`Work`] on one GPU over one arena.
#[derive(Debug)]
pub struct Probe<'a> {
    cuda: &'a Cuda,
    arena: &'a Arena,
}

/// Recorded [`Work`].
#[derive(Debug)]
pub struct ProbeGraph(CudaGraph);

impl ProbeGraph {
    /// Launches it; does not wait for its end.
    pub fn replay(&self) -> Result<()> {
        self.0.replay()
    }

    /// How long the driver took to make it executable.
    pub fn instantiation(&self) -> Duration {
        self.0.instantiation()
    }
}

impl<'a> Probe<'a> {
    /// An error unless the device is a GPU.
    pub fn new(device: &'a Device, arena: &'a Arena) -> Result<Probe<'a>> {
        let cuda = device.driver.as_cuda().ok_or_else(|| Error::NoDevice {
            asked: "cuda".into(),
            reason: "GPU figures need a GPU".into(),
        })?;
        Ok(Probe { cuda, arena })
    }

    /// Multiprocessors of the GPU.
    pub fn multiprocessors(&self) -> u32 {
        self.cuda.context().gpu.target.sms
    }

    /// Records work as one graph and uploads it.
    pub fn record(&self, work: &[Work], dependent_launch: bool) -> Result<ProbeGraph> {
        let steps = [Step::Work(self.lower(work)?)];
        self.cuda.executor().prepare(&steps)?;
        let options = RecordOptions { dependent_launch };
        Ok(ProbeGraph(CudaGraph::new(self.cuda.executor(), self.arena, &steps, options)?))
    }

    /// Work that can be launched one by one.
    pub fn prepare(&self, work: &[Work]) -> Result<Eager<'_>> {
        let steps = [Step::Work(self.lower(work)?)];
        self.cuda.executor().prepare(&steps)?;
        let [Step::Work(work)] = steps else { unreachable!("made above") };
        Ok(Eager { probe: self, work })
    }

    fn lower(&self, work: &[Work]) -> Result<Vec<Lowered>> {
        work.iter().map(|work| self.lower_one(work)).collect()
    }

    fn lower_one(&self, work: &Work) -> Result<Lowered> {
        let sms = self.multiprocessors();
        let same = |from: &Span, to: &Span| {
            require(from.len == to.len, "probe", || {
                format!("{} bytes cannot be copied to {}", from.len, to.len)
            })
        };
        let word = |span: &Span| require(span.len >= 4, "probe", || "a word has 4 bytes".into());
        Ok(match *work {
            Work::Read { from, unroll, out } => {
                word(&out)?;
                let args = vec![Arg::Address(from), Arg::U64(from.len / 16), Arg::Address(out)];
                let mut launch = launch("bench_read", "bench_read", [4 * sms, 512], args);
                launch.kernel.defines.push(("UNROLL".into(), unroll.to_string()));
                Lowered::Launch(launch)
            }
            Work::Copy { from, to } => {
                same(&from, &to)?;
                let args = vec![Arg::Address(from), Arg::Address(to), Arg::U64(from.len / 16)];
                Lowered::Launch(launch("bench_copy", "bench_copy", [4 * sms, 512], args))
            }
            Work::CopyNode { from, to } => {
                same(&from, &to)?;
                Lowered::Copy { from, to }
            }
            Work::Fill { to, word } => Lowered::Fill { to, word },
            Work::Chain { link, words, blocks } => {
                require(u64::from(blocks) * LINE <= words.len, "probe", || {
                    format!("{} bytes have no words for {blocks} blocks", words.len)
                })?;
                let entry = match link {
                    Link::Plain => "chain_plain",
                    Link::Dependent => "chain_dependent",
                    Link::AddPlain => "add_plain",
                    Link::AddDependent => "add_dependent",
                };
                let args = vec![Arg::Address(words)];
                let mut launch = launch("bench_chain", entry, [blocks, 32], args);
                launch.kernel.defines.push(("LINE".into(), LINE.to_string()));
                launch.waits = matches!(link, Link::Dependent | Link::AddDependent);
                Lowered::Launch(launch)
            }
            Work::Answer { asked, answered, rounds } => {
                word(&asked)?;
                word(&answered)?;
                let args = vec![Arg::Address(asked), Arg::Address(answered), Arg::U32(rounds)];
                Lowered::Launch(launch("bench_ring", "bench_ring", [1, 1], args))
            }
        })
    }
}

/// Work that is launched one by one, without a graph.
#[derive(Debug)]
pub struct Eager<'a> {
    probe: &'a Probe<'a>,
    work: Vec<Lowered>,
}

impl Eager<'_> {
    /// Launches all of it.
    pub fn launch(&self) -> Result<()> {
        let Probe { cuda, arena } = self.probe;
        let (executor, stream) = (cuda.executor(), &cuda.context().stream);
        self.work.iter().try_for_each(|work| executor.launch(stream, &arena.inner, work, false))
    }
}

fn launch(source: &str, entry: &str, [blocks, threads]: [u32; 2], args: Vec<Arg>) -> Launch {
    Launch {
        kernel: KernelKey { source: source.into(), entry: entry.into(), defines: Vec::new() },
        grid: [blocks, 1, 1],
        block: [threads, 1, 1],
        cluster: [1, 1, 1],
        shared: 0,
        args,
        waits: false,
    }
}
