//! A device runs, records and replays ops. It is chosen at run time; the CPU is always available.

use crate::arena::{ArenaInner, Memory};
use crate::capture::CaptureState;
use crate::cpu::Numerics;
use crate::cuda::{driver::Cuda, launch::Target};
use crate::error::Forbidden;
use crate::graph::{Graph, Item, Node, RecordOptions, Recorded};
use crate::ops::{Contract, require_word};
use crate::stopwatch::{Marks, Stopwatch};
use crate::target::CpuTarget;
use crate::{Arena, OpenArena, Region, Result, Span, notice, nvtx};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Receives the bytes of spans piece by piece, in any order, each with its offset among all of them. It must not use
/// the device, which waits until the last piece was received.
pub type Look<'a> = &'a mut dyn FnMut(usize, &[u8]);

/// The operations of a device; one implementation per kind of device. State, spans and contracts are checked before a
/// driver is called, so drivers contain no policy.
pub(crate) trait Driver: Send + Sync + std::fmt::Debug {
    /// The device's capture state.
    fn capture(&self) -> &CaptureState;
    /// What it is, in one line.
    fn describe(&self) -> String;
    /// Which kind.
    fn kind(&self) -> DeviceKind;
    /// Where the CPU rounds.
    fn numerics(&self) -> Numerics {
        Numerics::Fast
    }
    /// What lowering needs to know, if the device is a GPU.
    fn target(&self) -> Option<Target> {
        None
    }
    /// The CUDA driver, if it is one; for measurements that ops cannot express.
    fn as_cuda(&self) -> Option<&Cuda> {
        None
    }
    /// Bytes that could still be allocated.
    fn memory_free(&self) -> Result<u64>;
    /// One allocation per region, zeroed.
    fn allocate(&self, sizes: [u64; 5]) -> Result<Box<dyn Memory>>;
    /// Host → device, done when it returns. `bytes` are those of the spans, in order and without gaps.
    fn write(&self, arena: &ArenaInner, to: &[Span], bytes: &[u8]) -> Result<()>;
    /// Device → host, after everything launched so far.
    fn read(&self, arena: &ArenaInner, from: &[Span], look: Look<'_>) -> Result<()>;
    /// A copy in order with everything launched before, or, with `beside`, at the same time: then only what is
    /// launched from now on waits for it.
    fn copy(&self, arena: &Arena, from: Span, to: Span, beside: bool) -> Result<()>;
    /// Copies bytes on a stream of its own and waits for them on this thread. Nothing that is launched waits.
    ///
    /// # Safety
    /// Every place is one of this device's memory or of the host's that stays until the call returns, `bytes` long, and
    /// nothing else uses the targets or changes the sources meanwhile.
    unsafe fn transfer(&self, pieces: &[Transfer], way: Way) -> Result<()>;
    /// Marks in the launched work, between which time can be measured.
    fn marks(&self, count: usize) -> Result<Box<dyn Marks>>;
    /// Prepares everything that the items need (compiles kernels), so that running allocates nothing.
    fn prepare(&self, items: &[Item], options: RecordOptions) -> Result<()>;
    /// Runs one op now, in order with everything launched before.
    fn run(&self, arena: &Arena, node: &Node, options: RecordOptions) -> Result<()>;
    /// Records items for replay.
    fn record(
        &self,
        arena: &Arena,
        name: &str,
        items: &[Item],
        options: RecordOptions,
    ) -> Result<Box<dyn Recorded>>;
    /// Waits until everything launched is done.
    fn sync(&self) -> Result<()>;
    /// As [`Device::alive`]; the default is for drivers whose launches are done when they return.
    fn alive(&self) -> Result<()> {
        Ok(())
    }
}

/// A copy between two addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) bytes: usize,
    /// One of them is host-mapped.
    pub(crate) shared: bool,
    /// Both are memory of the device or host memory that it can reach.
    pub(crate) pinned: bool,
}

/// Which way bytes go. Each has a stream of its own: a GPU copies both ways at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    ToHost,
    ToDevice,
}

/// Gives a notice of the first copy that fails: callers take failures for pages that are not there.
fn told(outcome: Result<()>) -> Result<()> {
    static SAID: AtomicBool = AtomicBool::new(false);
    if let Err(problem) = &outcome
        && !SAID.swap(true, Ordering::Relaxed)
    {
        notice::say(format_args!(
            "a copy of pages failed: {problem} (later failures are not shown)"
        ));
    }
    outcome
}

/// The kinds of device there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// This machine's processor.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

/// A device that is ready.
#[derive(Clone, Debug)]
pub struct Device {
    pub(crate) driver: Arc<dyn Driver>,
}

impl Device {
    /// What it is, in one line.
    pub fn describe(&self) -> String {
        self.driver.describe()
    }

    /// Which kind.
    pub fn kind(&self) -> DeviceKind {
        self.driver.kind()
    }

    /// How it rounds, if it is the CPU; a GPU has one way only.
    pub fn numerics(&self) -> Numerics {
        self.driver.numerics()
    }

    /// The target that plans for it are made for.
    pub fn target(&self) -> Arc<dyn crate::Target> {
        match self.gpu() {
            Some(gpu) => Arc::new(gpu),
            None => Arc::new(CpuTarget),
        }
    }

    /// What lowering needs to know about the GPU; `None` for the CPU.
    pub fn gpu(&self) -> Option<Target> {
        self.driver.target()
    }

    /// Bytes that could still be allocated.
    pub fn memory_free(&self) -> Result<u64> {
        self.driver.memory_free()
    }

    /// Turns a layout into memory, all zero. Nothing can be added afterwards: the layout is consumed.
    pub fn seal(&self, open: OpenArena) -> Result<Arena> {
        self.driver.capture().allow(Forbidden::Allocation)?;
        let memory = self.driver.allocate(Region::ALL.map(|region| open.size(region)))?;
        Ok(Arena::new(open, memory, self.driver.capture().device()))
    }

    /// Gives the memory of a region back, when everything launched so far is done. Its addresses stay, and so do graphs
    /// that were recorded with them; whatever would touch the region is refused until [`Device::restore`]. `keep` keeps
    /// its contents in host memory; the CPU then gives nothing back, because there they are. No copy of another thread
    /// may be under way in it.
    ///
    /// # Panics
    /// For host-mapped memory, which the host uses at any time.
    pub fn release(&self, arena: &Arena, region: Region, keep: bool) -> Result<()> {
        assert!(region != Region::HostMapped, "the host uses host-mapped memory at any time");
        self.driver.capture().allow(Forbidden::Allocation)?;
        self.own(arena, "release")?;
        self.driver.sync()?;
        arena.inner.release(region, keep)
    }

    /// Gives a released region memory at the same addresses, with what was kept, else zero. An error leaves it released.
    pub fn restore(&self, arena: &Arena, region: Region) -> Result<()> {
        self.driver.capture().allow(Forbidden::Allocation)?;
        self.own(arena, "restore")?;
        arena.inner.restore(region)
    }

    /// Writes host bytes into a span.
    pub fn write(&self, arena: &Arena, to: Span, bytes: &[u8]) -> Result<()> {
        self.write_all(arena, &[to], bytes)
    }

    /// Writes consecutive host bytes into spans. Thousands of small spans take hardly longer than one of the same
    /// total length.
    pub fn write_all(&self, arena: &Arena, to: &[Span], bytes: &[u8]) -> Result<()> {
        self.driver.capture().allow(Forbidden::HostWrite)?;
        self.own(arena, "write")?;
        to.iter().try_for_each(|&span| arena.inner.check("write", span))?;
        let total: u64 = to.iter().map(|span| span.len).sum();
        assert_eq!(bytes.len() as u64, total, "write of a different length");
        self.driver.write(&arena.inner, to, bytes)
    }

    /// Reads a span, after everything launched so far.
    pub fn read(&self, arena: &Arena, from: Span) -> Result<Vec<u8>> {
        self.read_all(arena, &[from])
    }

    /// Reads spans into consecutive bytes.
    pub fn read_all(&self, arena: &Arena, from: &[Span]) -> Result<Vec<u8>> {
        // Checked before bytes are allocated for what a span claims to hold.
        from.iter().try_for_each(|&span| arena.inner.check("read", span))?;
        let mut bytes = vec![0; from.iter().map(|span| span.len as usize).sum()];
        self.look_at(arena, from, &mut |at, piece| {
            bytes[at..at + piece.len()].copy_from_slice(piece);
        })?;
        Ok(bytes)
    }

    /// Passes the bytes of spans to `look`, for callers that need not keep them.
    pub fn look_at(&self, arena: &Arena, from: &[Span], look: Look<'_>) -> Result<()> {
        self.driver.capture().allow(Forbidden::HostRead)?;
        self.own(arena, "read")?;
        from.iter().try_for_each(|&span| arena.inner.check("read", span))?;
        self.driver.read(&arena.inner, from, look)
    }

    /// Copies a span to another of the same length, in order with everything launched so far. It does not wait: a
    /// host-mapped source must not change until the copy is known to be done.
    pub fn copy(&self, arena: &Arena, from: Span, to: Span) -> Result<()> {
        self.checked_copy(arena, from, to, false)
    }

    /// As [`Device::copy`], but on a second stream: the copy starts immediately, beside what is running, and only
    /// what is launched from now on waits for it. Nothing that is running may use the target.
    pub fn copy_beside(&self, arena: &Arena, from: Span, to: Span) -> Result<()> {
        self.checked_copy(arena, from, to, true)
    }

    /// Copies spans to others of the same length, apart from all that is launched, and returns when that is done: call it
    /// from another thread. Until then nothing may use the targets or change the sources, running or launched.
    pub fn copy_apart(&self, arena: &Arena, copies: &[(Span, Span)]) -> Result<()> {
        self.own(arena, "copy")?;
        let host = |span: &Span| span.region == Region::HostMapped;
        let transfer = |&(from, to): &(Span, Span)| {
            Contract::check(&crate::op::Copy { from, to })?;
            arena.inner.check("copy", from)?;
            arena.inner.check("copy", to)?;
            let [source, target] = [from, to].map(|span| arena.inner.address(span));
            let (bytes, shared) = (from.len as usize, host(&from) || host(&to));
            Ok(Transfer { from: source, to: target, bytes, shared, pinned: true })
        };
        let pieces = copies.iter().map(transfer).collect::<Result<Vec<_>>>()?;
        let down = copies.first().is_some_and(|(_, to)| host(to));
        let way = if down { Way::ToHost } else { Way::ToDevice };
        // SAFETY: the spans were checked and are equally long; the arena stays, and the caller keeps others away.
        told(unsafe { self.driver.transfer(&pieces, way) })
    }

    /// As [`Device::copy_apart`], from spans into consecutive bytes.
    pub fn read_apart(&self, arena: &Arena, from: &[Span]) -> Result<Vec<u8>> {
        from.iter().try_for_each(|&span| arena.inner.check("read", span))?;
        let mut bytes = vec![0u8; from.iter().map(|span| span.len as usize).sum()];
        let pieces = self.pieces(arena, from, bytes.as_mut_ptr() as u64, true)?;
        // SAFETY: the spans were checked, `bytes` are as many as they are; the caller keeps others away.
        told(unsafe { self.driver.transfer(&pieces, Way::ToHost) })?;
        Ok(bytes)
    }

    /// As [`Device::copy_apart`], from consecutive bytes into spans.
    pub fn write_apart(&self, arena: &Arena, to: &[Span], bytes: &[u8]) -> Result<()> {
        let total: u64 = to.iter().map(|span| span.len).sum();
        assert_eq!(bytes.len() as u64, total, "write of a different length");
        let pieces = self.pieces(arena, to, bytes.as_ptr() as u64, false)?;
        // SAFETY: as in `read_apart`.
        told(unsafe { self.driver.transfer(&pieces, Way::ToDevice) })
    }

    /// Copies between spans and consecutive host bytes.
    fn pieces(&self, arena: &Arena, spans: &[Span], host: u64, out: bool) -> Result<Vec<Transfer>> {
        self.own(arena, "copy")?;
        let mut at = host;
        let piece = |&span: &Span| {
            arena.inner.check("copy", span)?;
            let (place, host) = (arena.inner.address(span), at);
            at += span.len;
            let (from, to) = if out { (place, host) } else { (host, place) };
            let shared = span.region == Region::HostMapped;
            Ok(Transfer { from, to, bytes: span.len as usize, shared, pinned: false })
        };
        spans.iter().map(piece).collect()
    }

    fn checked_copy(&self, arena: &Arena, from: Span, to: Span, beside: bool) -> Result<()> {
        self.driver.capture().allow(Forbidden::EagerRun)?;
        self.own(arena, "copy")?;
        Contract::check(&crate::op::Copy { from, to })?;
        arena.inner.check("copy", from)?;
        arena.inner.check("copy", to)?;
        self.driver.copy(arena, from, to, beside)
    }

    /// A stopwatch with `count` marks.
    pub fn stopwatch(&self, count: usize) -> Result<Stopwatch> {
        Ok(Stopwatch { marks: self.driver.marks(count)? })
    }

    pub(crate) fn own(&self, arena: &Arena, what: &str) -> Result<()> {
        arena.inner.check_usable(what, self.driver.capture().device())
    }

    /// Waits until everything launched is done.
    pub fn sync(&self) -> Result<()> {
        self.driver.capture().allow(Forbidden::HostSync)?;
        self.driver.sync()
    }

    /// An error if something that was launched failed, so that its results will never arrive. Never waits.
    pub fn alive(&self) -> Result<()> {
        self.driver.alive()
    }

    /// Compiles what the items need, so that running and recording them does not stall.
    pub fn prepare(&self, items: &[Item], options: RecordOptions) -> Result<()> {
        check_contracts(items)?;
        let _range = nvtx::range(|| format!("compile: {} nodes", items.len()));
        self.driver.prepare(items, options)
    }

    /// Runs one op now.
    pub fn run(&self, arena: &Arena, node: &Node) -> Result<()> {
        self.driver.capture().allow(Forbidden::EagerRun)?;
        self.own(arena, &node.name)?;
        check_node(arena, node)?;
        self.driver.run(arena, node, RecordOptions::default())
    }

    /// Starts a recording.
    pub fn record(&self, arena: &Arena, name: &str, options: RecordOptions) -> Result<Recording> {
        self.own(arena, name)?;
        self.driver.capture().begin(name)?;
        Ok(Recording {
            device: self.clone(),
            arena: arena.clone(),
            name: name.into(),
            options,
            items: Vec::new(),
            segments: Vec::new(),
        })
    }
}

fn check_node(arena: &Arena, node: &Node) -> Result<()> {
    node.op.check()?;
    let mut outcome = Ok(());
    node.op.visit_spans(&mut |span, _access| {
        if outcome.is_ok() {
            outcome = arena.inner.check(&node.name, span);
        }
    });
    outcome
}

fn check_contracts(items: &[Item]) -> Result<()> {
    items.iter().try_for_each(|item| match item {
        Item::Node(node) => node.op.check(),
        Item::If { body, .. } | Item::While { body, .. } => check_contracts(body),
    })
}

fn check_items(arena: &Arena, items: &[Item]) -> Result<()> {
    for item in items {
        match item {
            Item::Node(node) => check_node(arena, node)?,
            Item::If { cond, body } | Item::While { cond, body } => {
                require_word(*cond, "condition", "the tested word")?;
                arena.inner.check("condition", *cond)?;
                check_items(arena, body)?;
            }
        }
    }
    Ok(())
}

/// An open recording. Dropping it abandons what was recorded.
#[derive(Debug)]
pub struct Recording {
    device: Device,
    arena: Arena,
    name: String,
    options: RecordOptions,
    items: Vec<Item>,
    segments: Vec<Graph>,
}

impl Recording {
    /// Adds an item; its spans and contract are checked now.
    pub fn push(&mut self, item: Item) -> Result<()> {
        self.device.driver.capture().in_segment()?;
        check_items(&self.arena, std::slice::from_ref(&item))?;
        self.items.push(item);
        Ok(())
    }

    /// Ends the current segment: until [`Recording::resume`], ops run eagerly and the host may look.
    pub fn pause(&mut self) -> Result<()> {
        self.device.driver.capture().pause()?;
        self.close_segment()
    }

    /// Starts the next segment.
    pub fn resume(&mut self) -> Result<()> {
        self.device.driver.capture().resume()
    }

    /// Ends the recording: one graph per segment, in order.
    pub fn finish(mut self) -> Result<Vec<Graph>> {
        self.close_segment()?;
        Ok(std::mem::take(&mut self.segments))
    }

    fn close_segment(&mut self) -> Result<()> {
        if self.items.is_empty() {
            return Ok(());
        }
        let items = std::mem::take(&mut self.items);
        let name = format!("{}#{}", self.name, self.segments.len());
        let driver = &self.device.driver;
        let _range = nvtx::range(|| format!("record {name}"));
        driver.prepare(&items, self.options)?;
        let recorded = driver.record(&self.arena, &name, &items, self.options)?;
        let (arena, driver) = (self.arena.clone(), driver.clone());
        self.segments.push(Graph { name, items, arena, driver, recorded });
        Ok(())
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.device.driver.capture().end();
    }
}
