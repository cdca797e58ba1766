//! An op lowered for this processor, and the threads and scratch it runs with.

use super::memory::CpuMemory;
use super::pool::Pool;

/// An op with everything decided: addresses, kernel, chunks of work. Running it allocates nothing.
pub(crate) trait Step: Send + Sync {
    /// Scratch it needs.
    fn scratch(&self) -> Scratch {
        Scratch::default()
    }

    /// Runs on the calling thread, and on the pool where the step uses it.
    fn run(&self, team: &Team<'_>);
}

/// Bytes of scratch a step needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Scratch {
    /// Seen by all workers.
    pub(crate) shared: usize,
    /// For each worker alone.
    pub(crate) own: usize,
}

impl Scratch {
    /// Enough for either of the two.
    pub(crate) fn max(self, other: Scratch) -> Scratch {
        Scratch { shared: self.shared.max(other.shared), own: self.own.max(other.own) }
    }

    /// Both rounded up to whole cache lines.
    pub(crate) fn rounded(self) -> Scratch {
        Scratch { shared: self.shared.next_multiple_of(4096), own: self.own.next_multiple_of(4096) }
    }
}

/// The threads and the scratch a step runs with.
pub(crate) struct Team<'a> {
    pub(crate) pool: &'a Pool,
    pub(crate) scratch: *mut u8,
    /// How the scratch is divided: enough for every step.
    pub(crate) size: Scratch,
    /// What this step asked for.
    pub(crate) asked: Scratch,
}

// SAFETY: the scratch is plain memory; steps give each chunk its own part of it.
unsafe impl Sync for Team<'_> {}

impl Team<'_> {
    /// How many threads run chunks.
    pub(crate) fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Runs `work(chunk, worker)` for every chunk, on all threads; returns when all are done.
    pub(crate) fn parallel(&self, chunks: usize, work: &(dyn Fn(usize, usize) + Sync)) {
        self.pool.run(chunks, work);
    }

    /// `bytes` of scratch that all workers see.
    ///
    /// # Panics
    /// If the step did not ask for as many.
    pub(crate) fn shared(&self, bytes: usize) -> *mut u8 {
        let asked = self.asked.shared;
        assert!(bytes <= asked, "{bytes} bytes of {asked} of shared scratch");
        self.scratch
    }

    /// A worker's own scratch.
    pub(crate) fn own(&self, worker: usize) -> Own {
        assert!(worker < self.threads());
        let start = self.scratch.wrapping_add(self.size.shared + worker * self.size.own);
        Own { start, bytes: self.asked.own }
    }
}

/// A worker's own scratch: where it lies, and how much of it the step asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Own {
    start: *mut u8,
    bytes: usize,
}

impl Own {
    /// The address of the first `bytes` of it.
    ///
    /// # Panics
    /// If the step did not ask for as many.
    #[track_caller]
    pub(crate) fn bytes(self, bytes: usize) -> *mut u8 {
        assert!(bytes <= self.bytes, "{bytes} bytes of {} of a worker's scratch", self.bytes);
        self.start
    }

    /// The first words of it.
    ///
    /// # Panics
    /// If the step did not ask for as many.
    ///
    /// # Safety
    /// As for [`Own::floats`].
    #[track_caller]
    pub(crate) unsafe fn words<'a>(self, words: usize) -> &'a mut [u32] {
        let start = self.bytes(words * size_of::<u32>()).cast();
        // SAFETY: as for floats.
        unsafe { std::slice::from_raw_parts_mut(start, words) }
    }

    /// The first floats of it.
    ///
    /// # Panics
    /// If the step did not ask for as many.
    ///
    /// # Safety
    /// It belongs to the calling worker, which does not use it in any other way meanwhile.
    #[track_caller]
    pub(crate) unsafe fn floats<'a>(self, floats: usize) -> &'a mut [f32] {
        let start = self.bytes(floats * size_of::<f32>()).cast();
        // SAFETY: at least as much was asked for, and it was zeroed when mapped; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(start, floats) }
    }
}

/// Lays out parts one after the other, each starting at a cache line. A step uses the same code to compute how much
/// scratch it needs and to find the parts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Parts {
    floats: usize,
}

/// The place of a part, in floats.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part(usize);

impl Parts {
    /// The next `floats` floats.
    pub(crate) fn take(&mut self, floats: usize) -> Part {
        let part = Part(self.floats);
        self.floats += floats.next_multiple_of(16);
        part
    }

    /// Bytes of all parts taken.
    pub(crate) fn bytes(self) -> usize {
        self.floats * size_of::<f32>()
    }
}

impl Part {
    /// Its address, in scratch that begins at `start` and holds all parts.
    pub(crate) fn of(self, start: *mut u8) -> *mut f32 {
        start.cast::<f32>().wrapping_add(self.0)
    }
}

/// An op that runs its reference on the calling thread, because it is too small to divide.
pub(crate) struct Serial<O> {
    op: O,
    memory: CpuMemory,
    run: fn(&O, &CpuMemory),
}

impl<O: Send + Sync + 'static> Serial<O> {
    /// `run(op, memory)` as a step; it must not allocate.
    pub(crate) fn boxed(op: O, memory: &CpuMemory, run: fn(&O, &CpuMemory)) -> Box<dyn Step> {
        Box::new(Serial { op, memory: *memory, run })
    }
}

impl<O: Send + Sync> Step for Serial<O> {
    fn run(&self, _team: &Team<'_>) {
        (self.run)(&self.op, &self.memory);
    }
}

/// How many chunks to divide `items` into: a few per thread, so that a slow thread gets fewer.
pub(crate) fn chunks(items: usize, threads: usize) -> usize {
    if threads == 1 { 1.min(items) } else { items.min(4 * threads) }
}

/// How many chunks of decreasing size `items` are divided into: large ones first, so that a thread works on
/// neighbouring items for long, and single items last, so that all threads end together.
pub(crate) fn falling(items: usize, threads: usize) -> usize {
    let mut left = items;
    let sizes = std::iter::from_fn(|| {
        let size = fall(left, threads);
        left -= size;
        (size > 0).then_some(size)
    });
    sizes.count()
}

/// The items of a chunk of decreasing size.
pub(crate) fn falling_part(items: usize, threads: usize, chunk: usize) -> std::ops::Range<usize> {
    let from = (0..chunk).fold(0, |from, _| from + fall(items - from, threads));
    from..from + fall(items - from, threads)
}

fn fall(left: usize, threads: usize) -> usize {
    left.div_ceil(2 * threads)
}

/// The items of a chunk.
pub(crate) fn part(items: usize, chunks: usize, chunk: usize) -> std::ops::Range<usize> {
    chunk * items / chunks..(chunk + 1) * items / chunks
}
