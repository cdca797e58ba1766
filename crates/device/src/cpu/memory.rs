//! Memory of a CPU arena: one mapping per region, zeroed by the system when first touched.

use super::asan;
use crate::arena::{ArenaInner, Memory};
use crate::{Error, Region, Result, Span};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering::Relaxed};

/// Regions start at a huge page, so that the system can back them with huge pages throughout.
const HUGE_PAGE: usize = 2 << 20;

/// A private anonymous mapping, aligned to a huge page.
#[derive(Debug)]
pub(crate) struct Mapping {
    raw: *mut libc::c_void,
    raw_len: usize,
    start: *mut u8,
    len: usize,
}

// SAFETY: the mapping is plain memory owned by this value; the device, which runs one replay at a time, decides which
// bytes are accessed when.
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared `Mapping` only gives out its address.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` zeroed bytes; nothing for 0.
    pub(crate) fn new(len: usize) -> Option<Mapping> {
        if len == 0 {
            let dangling = HUGE_PAGE as *mut u8;
            return Some(Mapping { raw: std::ptr::null_mut(), raw_len: 0, start: dangling, len });
        }
        let raw_len = len.checked_next_multiple_of(HUGE_PAGE)?.checked_add(HUGE_PAGE)?;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice.
        let raw = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                raw_len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if raw == libc::MAP_FAILED {
            return None;
        }
        let start = raw.cast::<u8>().wrapping_add(raw.align_offset(HUGE_PAGE));
        // SAFETY: `start..start + len` lies inside the mapping; the advice may be refused harmlessly.
        unsafe { libc::madvise(start.cast(), len, libc::MADV_HUGEPAGE) };
        Some(Mapping { raw, raw_len, start, len })
    }

    /// Gives the memory back to the system; the mapping stays, zeroed when it is next touched.
    fn discard(&self) -> Result<()> {
        if self.len == 0 {
            return Ok(());
        }
        // SAFETY: pages of this mapping, which starts at a page; whoever calls this no longer needs their contents.
        match unsafe { libc::madvise(self.start.cast(), self.len, libc::MADV_DONTNEED) } {
            0 => Ok(()),
            _ => {
                let code = std::io::Error::last_os_error().to_string();
                Err(Error::Driver { call: "madvise".into(), code })
            }
        }
    }

    /// First byte.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.raw_len != 0 {
            // SAFETY: exactly what `new` mapped, and nothing points into it any more: graphs and
            // arenas hold the mapping itself.
            unsafe {
                asan::open(self.raw.cast(), self.raw_len);
                libc::munmap(self.raw, self.raw_len);
            }
        }
    }
}

/// The memory of a sealed arena.
#[derive(Debug)]
pub(crate) struct Regions {
    mappings: [Mapping; 5],
    /// Whose memory was given back to the system.
    discarded: [AtomicBool; 5],
}

impl Regions {
    /// Maps every region.
    pub(crate) fn new(sizes: [u64; 5], available: u64) -> Result<Regions> {
        let total = sizes.iter().fold(0u64, |sum, size| sum.saturating_add(*size));
        let refused = |region: Region| Error::OutOfMemory {
            region,
            needed: sizes[region as usize],
            available,
        };
        if total > available {
            let largest = Region::ALL.into_iter().max_by_key(|region| sizes[*region as usize]);
            return Err(refused(largest.unwrap_or(Region::Weights)));
        }
        let map = |region: Region| {
            let size = usize::try_from(sizes[region as usize]).ok();
            size.and_then(Mapping::new).ok_or_else(|| refused(region))
        };
        let [weights, state, workspace, kv, mapped] = Region::ALL.map(map);
        let mappings = [weights?, state?, workspace?, kv?, mapped?];
        Ok(Regions { mappings, discarded: Default::default() })
    }

    /// The system gives memory when it is touched, and ends processes when there is none: so it is asked before.
    fn restore_from(&self, region: Region, available: u64) -> Result<()> {
        let discarded = &self.discarded[region as usize];
        let needed = self.mappings[region as usize].len() as u64;
        if discarded.load(Relaxed) && needed > available {
            return Err(Error::OutOfMemory { region, needed, available });
        }
        discarded.store(false, Relaxed);
        Ok(())
    }
}

impl Memory for Regions {
    fn base(&self, region: Region) -> u64 {
        self.mappings[region as usize].start() as u64
    }

    fn host_base(&self, region: Region) -> Option<*mut u8> {
        Some(self.mappings[region as usize].start())
    }

    fn release(&self, region: Region, keep: bool) -> Result<()> {
        // This is host memory: what is to be kept stays where it is.
        if !keep {
            self.mappings[region as usize].discard()?;
            self.discarded[region as usize].store(true, Relaxed);
        }
        Ok(())
    }

    fn restore(&self, region: Region) -> Result<()> {
        self.restore_from(region, available())
    }
}

/// The addresses of a CPU arena's regions, with which ops resolve their spans. Its owner also holds the arena.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuMemory {
    bases: [u64; 5],
    /// Of the values between the members of a fused op; 0 outside of one.
    inside: u64,
}

/// Memory for the values between the members of a fused op.
#[derive(Debug)]
pub(crate) struct InsideMemory(Mapping);

impl InsideMemory {
    /// `bytes` zeroed bytes.
    ///
    /// # Panics
    /// If the system has no memory left.
    pub(crate) fn new(bytes: u64) -> InsideMemory {
        let mapped = usize::try_from(bytes).ok().and_then(Mapping::new);
        InsideMemory(mapped.unwrap_or_else(|| panic!("no {bytes} bytes inside a fused op")))
    }
}

impl CpuMemory {
    /// Of a sealed CPU arena.
    pub(crate) fn of(arena: &ArenaInner) -> CpuMemory {
        CpuMemory { bases: Region::ALL.map(|region| arena.memory.base(region)), inside: 0 }
    }

    /// The same addresses inside a fused op.
    pub(crate) fn with_inside(&self, inside: &InsideMemory) -> CpuMemory {
        CpuMemory { inside: inside.0.start() as u64, ..*self }
    }

    /// The address of a span that was checked against its arena.
    pub(crate) fn address(&self, span: Span) -> *mut u8 {
        let base = match span.region {
            Region::Inside => self.inside,
            region => self.bases[region as usize],
        };
        assert!(base != 0, "{span:?} outside of a fused op");
        (base + span.offset) as *mut u8
    }
}

/// Copies bytes. `shared`: one of the two places is host-mapped memory, which a [`crate::mail::Mapped`] of another
/// thread may be using. The copy is then word by word, so that a word may be old but is never torn.
///
/// # Safety
/// `from` is readable and `to` writable for `bytes`, and the two do not overlap.
pub(crate) unsafe fn copy_bytes(from: *const u8, to: *mut u8, bytes: usize, shared: bool) {
    if !shared {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
        return;
    }
    let aligned = from.cast::<u32>().is_aligned() && to.cast::<u32>().is_aligned();
    let words = if aligned { bytes / 4 } else { 0 };
    // SAFETY: the caller's promise; words are aligned.
    unsafe {
        for i in 0..words {
            let word = AtomicU32::from_ptr(from.cast_mut().cast::<u32>().add(i));
            AtomicU32::from_ptr(to.cast::<u32>().add(i)).store(word.load(Relaxed), Relaxed);
        }
        for i in 4 * words..bytes {
            let byte = AtomicU8::from_ptr(from.cast_mut().add(i)).load(Relaxed);
            AtomicU8::from_ptr(to.add(i)).store(byte, Relaxed);
        }
    }
}

/// Bytes of memory the system says are available.
pub(crate) fn available() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.map_or(u64::MAX / 4, |kib| kib * 1024).min(cgroup_left().unwrap_or(u64::MAX))
}

fn cgroup_left() -> Option<u64> {
    let word = |name: &str| -> Option<u64> {
        std::fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?.trim().parse().ok()
    };
    Some(word("memory.max")?.saturating_sub(word("memory.current")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_comes_back_only_where_there_is_memory_for_it() {
        let sizes = [8192, 4096, 4096, 1 << 20, 0];
        let regions = Regions::new(sizes, u64::MAX).expect("a megabyte");
        // What was kept needs no memory.
        regions.release(Region::Weights, true).expect("kept");
        regions.restore_from(Region::Weights, 0).expect("it is there");
        regions.release(Region::Kv, false).expect("given back");
        let refused = regions.restore_from(Region::Kv, (1 << 20) - 1);
        let expected =
            Error::OutOfMemory { region: Region::Kv, needed: 1 << 20, available: (1 << 20) - 1 };
        assert_eq!(refused, Err(expected));
        // It can be tried again.
        regions.restore_from(Region::Kv, 1 << 20).expect("enough");
        regions.release(Region::HostMapped, false).expect("an empty region");
    }
}
