//! An arena's memory on a GPU, and copies between it and the host.

use super::context::{Context, Event, may_wait, report};
use super::region::DeviceRegion;
use crate::arena::{ArenaInner, Memory};
use crate::{Error, Look, Region, Result, Span};
use cudarc::driver::sys;
use std::sync::{Arc, Mutex, MutexGuard};

/// Memory of every region, zeroed.
#[derive(Debug)]
pub(crate) struct CudaMemory {
    context: Arc<Context>,
    sizes: [u64; 5],
    regions: [Option<DeviceRegion>; 5],
    host: Pinned,
    /// Pinned memory for the contents of released regions, allocated when first needed and then kept: pinning takes
    /// longer than copying.
    kept: Mutex<[Kept; 5]>,
}

/// The contents of a released region.
#[derive(Debug, Default)]
struct Kept {
    pinned: Option<Pinned>,
    /// It holds them.
    filled: bool,
}

impl CudaMemory {
    /// Allocates and zeroes.
    pub(crate) fn new(context: &Arc<Context>, sizes: [u64; 5]) -> Result<CudaMemory> {
        let host = Pinned::new(context, sizes[Region::HostMapped as usize] as usize)
            .map_err(|problem| out_of_memory(context, Region::HostMapped, sizes, problem))?;
        let (regions, kept) = (Default::default(), Mutex::default());
        let mut memory = CudaMemory { context: context.clone(), sizes, regions, host, kept };
        for region in Region::ALL {
            let bytes = sizes[region as usize] as usize;
            if region == Region::HostMapped || bytes == 0 {
                continue;
            }
            let made = DeviceRegion::new(context, bytes);
            let made = made.map_err(|problem| out_of_memory(context, region, sizes, problem))?;
            memory.regions[region as usize] = Some(made);
            memory.zero(region)?;
        }
        context.sync()?;
        Ok(memory)
    }

    /// Zeroes a region in stream order.
    fn zero(&self, region: Region) -> Result<()> {
        let words = self.sizes[region as usize] as usize / 4;
        let (api, stream) = (self.context.bind()?, self.context.stream.raw);
        // SAFETY: the region has memory of this size; arena sizes are whole words.
        unsafe { api.cuMemsetD32Async(self.base(region), 0, words, stream) }
    }

    fn kept(&self) -> MutexGuard<'_, [Kept; 5]> {
        self.kept.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Copies a region to pinned memory.
    fn keep(&self, region: Region, kept: &mut Kept) -> Result<()> {
        let bytes = self.sizes[region as usize] as usize;
        let pinned = match kept.pinned.take() {
            Some(pinned) => pinned,
            None => Pinned::new(&self.context, bytes)?,
        };
        let pinned = kept.pinned.insert(pinned);
        let (api, stream) = (self.context.bind()?, self.context.stream.raw);
        // SAFETY: both have this many bytes and stay until the copy is done below.
        unsafe { api.cuMemcpyDtoHAsync_v2(pinned.host.cast(), self.base(region), bytes, stream) }?;
        self.context.sync()
    }
}

fn out_of_memory(context: &Context, region: Region, sizes: [u64; 5], problem: Error) -> Error {
    match (&problem, context.memory_free()) {
        (Error::Driver { code, .. }, Ok(available)) if code.starts_with("2 ") => {
            Error::OutOfMemory { region, needed: sizes[region as usize], available }
        }
        _ => problem,
    }
}

impl Memory for CudaMemory {
    fn base(&self, region: Region) -> u64 {
        match region {
            Region::HostMapped => self.host.device,
            _ => self.regions[region as usize].as_ref().map_or(0, DeviceRegion::base),
        }
    }

    fn host_base(&self, region: Region) -> Option<*mut u8> {
        (region == Region::HostMapped).then_some(self.host.host)
    }

    fn release(&self, region: Region, keep: bool) -> Result<()> {
        let Some(memory) = &self.regions[region as usize] else { return Ok(()) };
        let kept = &mut self.kept()[region as usize];
        if keep {
            self.keep(region, kept)?;
        }
        memory.unmap()?;
        kept.filled = keep;
        Ok(())
    }

    fn restore(&self, region: Region) -> Result<()> {
        let Some(memory) = &self.regions[region as usize] else { return Ok(()) };
        let kept = &mut self.kept()[region as usize];
        let problem = |problem| out_of_memory(&self.context, region, self.sizes, problem);
        memory.map().map_err(problem)?;
        let (api, stream) = (self.context.bind()?, self.context.stream.raw);
        match kept.pinned.as_ref().filter(|_| kept.filled) {
            Some(pinned) => {
                let bytes = self.sizes[region as usize] as usize;
                let from = pinned.host.cast_const().cast();
                // SAFETY: both have this many bytes and stay until the copy is done below.
                unsafe { api.cuMemcpyHtoDAsync_v2(self.base(region), from, bytes, stream) }?;
            }
            None => self.zero(region)?,
        }
        self.context.sync()?;
        kept.filled = false;
        Ok(())
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        // Wait for work that still uses the memory: the host-mapped part is freed without waiting.
        report(self.context.sync());
    }
}

/// Pinned host memory the GPU can address, zeroed.
#[derive(Debug)]
struct Pinned {
    context: Arc<Context>,
    host: *mut u8,
    device: u64,
}

// SAFETY: plain memory; its owner decides which bytes are accessed when.
unsafe impl Send for Pinned {}
// SAFETY: as above; access goes through raw pointers with their own discipline.
unsafe impl Sync for Pinned {}

impl Pinned {
    fn new(context: &Arc<Context>, bytes: usize) -> Result<Pinned> {
        let api = context.bind()?;
        let mut pinned = Pinned { context: context.clone(), host: std::ptr::null_mut(), device: 0 };
        if bytes == 0 {
            return Ok(pinned);
        }
        // Declared after `pinned`, so that on failure this lock is released before `pinned` is dropped.
        let _turn = may_wait();
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        let mut host = std::ptr::null_mut();
        // SAFETY: the context is current; the result is owned by `pinned`.
        unsafe { api.cuMemHostAlloc(&mut host, bytes, flags) }?;
        pinned.host = host.cast();
        // SAFETY: exactly the allocation above.
        unsafe { std::ptr::write_bytes(pinned.host, 0, bytes) };
        // SAFETY: the memory was allocated as mapped.
        unsafe { api.cuMemHostGetDevicePointer_v2(&mut pinned.device, host, 0) }?;
        Ok(pinned)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if !self.host.is_null() {
            report(self.context.bind().map(|_| ()));
            let _turn = may_wait();
            // SAFETY: allocated once, freed once.
            report(unsafe { self.context.api.cuMemFreeHost(self.host.cast()) });
        }
    }
}

const CHUNK: usize = 8 << 20;

/// Two pinned chunks: one is filled while the other is being copied.
#[derive(Debug)]
pub(crate) struct Staging {
    chunks: Mutex<Option<[(Pinned, Event); 2]>>,
}

impl Staging {
    /// Allocates nothing before it is used.
    pub(crate) fn new() -> Staging {
        Staging { chunks: Mutex::new(None) }
    }

    fn with<T>(
        &self,
        context: &Arc<Context>,
        f: impl FnOnce(&[(Pinned, Event); 2]) -> Result<T>,
    ) -> Result<T> {
        let mut chunks = self.chunks.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if chunks.is_none() {
            let api = context.bind()?;
            let chunk = || Ok((Pinned::new(context, CHUNK)?, Event::new(api)?));
            *chunks = Some([chunk()?, chunk()?]);
        }
        f(chunks.as_ref().expect("made above"))
    }

    /// Host → device in stream order; done when it returns.
    pub(crate) fn write(
        &self,
        context: &Arc<Context>,
        arena: &ArenaInner,
        to: &[Span],
        bytes: &[u8],
    ) -> Result<()> {
        let Packed { mapped, loads } = pack(arena, to);
        if !mapped.is_empty() {
            context.sync()?;
        }
        for (host, at, len) in mapped {
            // SAFETY: the span was checked against the region; the stream is idle, so no kernel reads it.
            unsafe { std::ptr::copy_nonoverlapping(bytes[at..at + len].as_ptr(), host, len) };
        }
        if loads.is_empty() {
            return Ok(());
        }
        let api = context.bind()?;
        self.with(context, |chunks| {
            for (index, load) in loads.iter().enumerate() {
                let (pinned, free) = &chunks[index % 2];
                // An event that was never recorded counts as done.
                free.wait()?;
                for part in load {
                    let (staged, stream) = (part.within(pinned), context.stream.raw);
                    let from = bytes[part.at..part.at + part.len].as_ptr();
                    // SAFETY: the chunk's last copies are done.
                    unsafe { std::ptr::copy_nonoverlapping(from, staged, part.len) };
                    // SAFETY: the span was checked; the chunk stays until the event below is done.
                    unsafe {
                        api.cuMemcpyHtoDAsync_v2(part.address, staged.cast(), part.len, stream)
                    }?;
                }
                free.record(&context.stream)?;
            }
            context.sync()
        })
    }

    /// Device → host, after everything launched.
    pub(crate) fn read(
        &self,
        context: &Arc<Context>,
        arena: &ArenaInner,
        from: &[Span],
        look: Look<'_>,
    ) -> Result<()> {
        let Packed { mapped, loads } = pack(arena, from);
        if !mapped.is_empty() {
            context.sync()?;
        }
        for (host, at, len) in mapped {
            // SAFETY: the span was checked against the region; the stream is idle, so no kernel writes it.
            look(at, unsafe { std::slice::from_raw_parts(host, len) });
        }
        if loads.is_empty() {
            return Ok(());
        }
        let api = context.bind()?;
        self.with(context, |chunks| {
            let fetch = |index: usize| {
                let (pinned, done) = &chunks[index % 2];
                for part in &loads[index] {
                    let (staged, stream) = (part.within(pinned), context.stream.raw);
                    // SAFETY: the span was checked; the previous contents of the chunk have been read.
                    unsafe {
                        api.cuMemcpyDtoHAsync_v2(staged.cast(), part.address, part.len, stream)
                    }?;
                }
                done.record(&context.stream)
            };
            fetch(0)?;
            for index in 0..loads.len() {
                if index + 1 < loads.len() {
                    fetch(index + 1)?;
                }
                let (pinned, done) = &chunks[index % 2];
                done.wait()?;
                for part in &loads[index] {
                    let staged = part.within(pinned);
                    // SAFETY: the copies into the chunk are done, and the next ones use the other chunk.
                    look(part.at, unsafe { std::slice::from_raw_parts(staged, part.len) });
                }
            }
            Ok(())
        })
    }
}

/// A piece of a span to be copied: its address on the device, its places in a chunk and among the host's bytes.
struct Part {
    address: u64,
    staged: usize,
    at: usize,
    len: usize,
}

impl Part {
    /// Its address in the chunk.
    fn within(&self, chunk: &Pinned) -> *mut u8 {
        // SAFETY: a load fits into its chunk.
        unsafe { chunk.host.add(self.staged) }
    }
}

/// Spans whose bytes are consecutive on the host.
struct Packed {
    /// Spans in mapped memory: address, place among the bytes, length.
    mapped: Vec<(*mut u8, usize, usize)>,
    /// The pieces of the other spans, grouped by chunk.
    loads: Vec<Vec<Part>>,
}

fn pack(arena: &ArenaInner, spans: &[Span]) -> Packed {
    let (mut mapped, mut loads) = (Vec::new(), Vec::new());
    let (mut at, mut staged) = (0, CHUNK);
    for &span in spans {
        if span.len == 0 {
            // An empty region has no address, so no slice can be made there, not even an empty one.
            continue;
        }
        let end = at + span.len as usize;
        if let Some(base) = arena.memory.host_base(span.region) {
            mapped.push((base.wrapping_add(span.offset as usize), at, span.len as usize));
            at = end;
            continue;
        }
        let mut address = arena.address(span);
        while at < end {
            if staged == CHUNK {
                loads.push(Vec::new());
                staged = 0;
            }
            let len = (end - at).min(CHUNK - staged);
            let load: &mut Vec<Part> = loads.last_mut().expect("pushed above");
            load.push(Part { address, staged, at, len });
            (address, staged, at) = (address + len as u64, staged + len, at + len);
        }
    }
    Packed { mapped, loads }
}
