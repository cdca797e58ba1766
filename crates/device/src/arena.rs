//! Static memory. An arena is laid out while *open*, becomes memory when *sealed* by a device, and
//! is *closed* at the end; each is a type, so what must not happen in a state cannot be written.
//!
//! An open arena is plain data: laying out a 70 GB model needs no memory and no device.

use crate::{ALIGN, ArenaId, Error, Region, Result, Span};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Unused bytes after every span: poisoned under AddressSanitizer, otherwise none.
const RED_ZONE: u64 = if cfg!(dacapo_asan) { ALIGN } else { 0 };

/// An arena that is still being laid out.
#[derive(Debug)]
pub struct OpenArena {
    id: ArenaId,
    sizes: [u64; 5],
    named: Vec<Named>,
    #[cfg(dacapo_asan)]
    spans: Vec<Span>,
}

/// A line of the report: how much a name takes in a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// The region.
    pub region: Region,
    /// What it is for.
    pub name: String,
    /// Bytes, alignment included.
    pub bytes: u64,
}

/// Exact sizes per region and per name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// In order of allocation; equal names of a region are summed.
    pub named: Vec<Named>,
}

impl Report {
    /// Bytes of a region.
    pub fn region(&self, region: Region) -> u64 {
        self.total(|named| named == region)
    }

    /// Bytes of everything on the device (host-mapped memory is not on it).
    pub fn device_total(&self) -> u64 {
        self.total(|region| region != Region::HostMapped)
    }

    fn total(&self, counts: impl Fn(Region) -> bool) -> u64 {
        let lines = self.named.iter().filter(|named| counts(named.region));
        lines.fold(0, |sum, named| sum.saturating_add(named.bytes))
    }
}

impl Default for OpenArena {
    fn default() -> Self {
        Self::new()
    }
}

impl OpenArena {
    /// An empty arena with an id of its own.
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let id = ArenaId(NEXT.fetch_add(1, Ordering::Relaxed));
        OpenArena {
            id,
            sizes: [0; 5],
            named: Vec::new(),
            #[cfg(dacapo_asan)]
            spans: Vec::new(),
        }
    }

    /// Its id.
    pub fn id(&self) -> ArenaId {
        self.id
    }

    /// Takes `bytes` of a region for `name`, aligned to [`ALIGN`].
    pub fn alloc(&mut self, region: Region, name: &str, bytes: u64) -> Span {
        let size = &mut self.sizes[region as usize];
        let offset = *size;
        // On overflow sizes saturate, so that sealing reports how much memory is missing.
        let taken = bytes.checked_next_multiple_of(ALIGN).unwrap_or(u64::MAX);
        let taken = taken.saturating_add(RED_ZONE);
        *size = size.saturating_add(taken);
        match self.named.iter_mut().find(|n| n.region == region && n.name == name) {
            Some(line) => line.bytes = line.bytes.saturating_add(taken),
            None => self.named.push(Named { region, name: name.to_owned(), bytes: taken }),
        }
        let span = Span { arena: self.id, region, offset, len: bytes };
        #[cfg(dacapo_asan)]
        self.spans.push(span);
        span
    }

    /// Bytes of a region so far.
    pub fn size(&self, region: Region) -> u64 {
        self.sizes[region as usize]
    }

    /// Sizes so far.
    pub fn report(&self) -> Report {
        Report { named: self.named.clone() }
    }
}

/// The memory behind a sealed arena; devices implement it.
pub(crate) trait Memory: Send + Sync + std::fmt::Debug {
    /// The address ops use for byte 0 of a region.
    fn base(&self, region: Region) -> u64;
    /// The address the host may use for byte 0 of a region, if it may at all.
    fn host_base(&self, region: Region) -> Option<*mut u8>;
    /// Gives the memory of a region back; its addresses stay reserved. `keep` keeps its contents in host memory. On an
    /// error the region is as it was.
    fn release(&self, region: Region, keep: bool) -> Result<()>;
    /// Memory at the same addresses again, with what was kept, else zero. On an error the region is still released.
    fn restore(&self, region: Region) -> Result<()>;
}

#[derive(Debug)]
pub(crate) struct ArenaInner {
    pub(crate) id: ArenaId,
    pub(crate) sizes: [u64; 5],
    pub(crate) memory: Box<dyn Memory>,
    /// The device whose memory it is.
    device: u32,
    report: Report,
    closed: AtomicBool,
    /// Regions without memory, by number.
    released: [AtomicBool; 5],
}

impl ArenaInner {
    /// Checks that a span may be used here.
    pub(crate) fn check(&self, op: &str, span: Span) -> Result<()> {
        if span.arena != self.id {
            return Err(Error::ForeignSpan { op: op.into(), found: span.arena, expected: self.id });
        }
        self.check_there(op, span.region)?;
        // A region that no arena has is empty.
        let size = self.sizes.get(span.region as usize).copied().unwrap_or(0);
        match span.offset.checked_add(span.len) {
            Some(end) if end <= size => Ok(()),
            _ => Err(Error::OutsideArena {
                op: op.into(),
                region: span.region,
                offset: span.offset,
                len: span.len,
                size,
            }),
        }
    }

    /// Refuses when closed.
    pub(crate) fn check_open(&self, what: &str) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::Closed { what: what.into() });
        }
        Ok(())
    }

    fn check_there(&self, what: &str, region: Region) -> Result<()> {
        let released = self.released.get(region as usize);
        match released.is_some_and(|released| released.load(Ordering::Acquire)) {
            true => Err(Error::Released { what: what.into(), region }),
            false => Ok(()),
        }
    }

    /// Refuses when the memory of any region was released.
    pub(crate) fn check_whole(&self, what: &str) -> Result<()> {
        Region::ALL.into_iter().try_for_each(|region| self.check_there(what, region))
    }

    /// Releases a region; it stays what it is if it is released already.
    pub(crate) fn release(&self, region: Region, keep: bool) -> Result<()> {
        let released = &self.released[region as usize];
        if released.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let outcome = self.memory.release(region, keep);
        released.store(outcome.is_ok(), Ordering::Release);
        outcome
    }

    /// Restores a region that was released.
    pub(crate) fn restore(&self, region: Region) -> Result<()> {
        let released = &self.released[region as usize];
        if released.load(Ordering::Acquire) {
            self.memory.restore(region)?;
            released.store(false, Ordering::Release);
        }
        Ok(())
    }

    /// Refuses when closed, and on any device but its own.
    pub(crate) fn check_usable(&self, what: &str, device: u32) -> Result<()> {
        if self.device != device {
            return Err(Error::ForeignArena { what: what.into(), arena: self.id });
        }
        self.check_open(what)
    }

    /// The address ops use for a span that was checked.
    pub(crate) fn address(&self, span: Span) -> u64 {
        self.memory.base(span.region) + span.offset
    }
}

/// A sealed arena: memory that can be used but no longer laid out. Graphs keep it alive.
#[derive(Clone, Debug)]
pub struct Arena {
    pub(crate) inner: Arc<ArenaInner>,
}

impl Arena {
    pub(crate) fn new(open: OpenArena, memory: Box<dyn Memory>, device: u32) -> Arena {
        #[cfg(dacapo_asan)]
        fence_gaps(&open, &*memory);
        let OpenArena { id, sizes, named, .. } = open;
        let report = Report { named };
        let (closed, released) = (AtomicBool::new(false), Default::default());
        let inner = ArenaInner { id, sizes, memory, device, report, closed, released };
        Arena { inner: Arc::new(inner) }
    }

    /// Its id.
    pub fn id(&self) -> ArenaId {
        self.inner.id
    }

    /// Exact sizes.
    pub fn report(&self) -> &Report {
        &self.inner.report
    }

    /// Bytes of a region.
    pub fn size(&self, region: Region) -> u64 {
        self.inner.sizes[region as usize]
    }

    /// Whether a region has no memory now ([`crate::Device::release`]).
    pub fn is_released(&self, region: Region) -> bool {
        self.inner.check_there("region", region).is_err()
    }

    /// Ends the arena: graphs recorded over it refuse to replay. Its memory is freed with the last graph that points
    /// into it.
    pub fn close(self) -> ClosedArena {
        self.inner.closed.store(true, Ordering::Release);
        ClosedArena { report: self.inner.report.clone() }
    }
}

/// Tells AddressSanitizer that only the spans of an arena may be touched, where the host could touch more.
#[cfg(dacapo_asan)]
fn fence_gaps(open: &OpenArena, memory: &dyn Memory) {
    for region in Region::ALL {
        let Some(base) = memory.host_base(region) else { continue };
        // SAFETY: the region, which has this size, and spans that were laid out in it.
        unsafe {
            crate::cpu::asan::fence(base, open.size(region) as usize);
            for span in open.spans.iter().filter(|span| span.region == region) {
                crate::cpu::asan::open(base.add(span.offset as usize), span.len as usize);
            }
        }
    }
}

/// What is left of a closed arena: its report.
#[derive(Debug)]
pub struct ClosedArena {
    /// What it held.
    pub report: Report,
}
