//! Memory of another process. What lies there is copied straight to its place in an arena: on a GPU by handles that
//! `cuIpcGetMemHandle` made, on a CPU from a file that both processes have open, such as one in `/dev/shm`.

use crate::cuda::ipc::IpcMemory;
use crate::{Arena, Device, DeviceKind, Error, Result, Span};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// How another process names its memory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SharedName {
    /// A CUDA IPC handle.
    CudaIpc([u8; 64]),
    /// A file.
    File(PathBuf),
}

/// Memory of another process.
#[derive(Debug)]
pub struct SharedMemory {
    place: Place,
    bytes: u64,
}

#[derive(Debug)]
enum Place {
    File(File),
    Cuda(IpcMemory),
}

/// Pieces of equal length at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// Where the first is in the shared memory.
    pub from: u64,
    /// From one to the next there.
    pub from_step: u64,
    /// Where the first goes.
    pub to: Span,
    /// From one to the next there.
    pub to_step: u64,
    /// How many.
    pub count: u64,
}

impl SharedMemory {
    /// Bytes of it.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

fn wrong(problem: impl Into<String>) -> Error {
    Error::Contract { op: "shared memory".into(), problem: problem.into() }
}

impl Device {
    /// Opens memory of another process.
    pub fn open_shared(&self, name: &SharedName) -> Result<SharedMemory> {
        match (self.kind(), name) {
            (DeviceKind::Cpu, SharedName::File(path)) => {
                let failed = |error| wrong(format!("{}: {error}", path.display()));
                let file = File::open(path).map_err(failed)?;
                let bytes = file.metadata().map_err(failed)?.len();
                Ok(SharedMemory { place: Place::File(file), bytes })
            }
            (DeviceKind::Cuda, SharedName::CudaIpc(handle)) => {
                let cuda = self.driver.as_cuda().expect("a CUDA device");
                let memory = IpcMemory::open(cuda.context(), handle)?;
                let bytes = memory.bytes();
                Ok(SharedMemory { place: Place::Cuda(memory), bytes })
            }
            (DeviceKind::Cpu, SharedName::CudaIpc(_)) => Err(wrong("a CPU has no CUDA handles")),
            (DeviceKind::Cuda, SharedName::File(_)) => {
                Err(wrong("tensors in files go to a GPU as safetensors: name their folder"))
            }
        }
    }

    /// Copies pieces to their places, after everything launched so far, and waits for that.
    pub fn copy_shared(&self, arena: &Arena, from: &SharedMemory, all: &[Pieces]) -> Result<()> {
        self.own(arena, "copy")?;
        for pieces in all {
            let last = pieces.count.saturating_sub(1);
            let end = last.checked_mul(pieces.from_step).and_then(|at| at.checked_add(pieces.from));
            let end = end.and_then(|at| at.checked_add(pieces.to.len));
            if end.is_none_or(|end| end > from.bytes) {
                return Err(wrong(format!("{pieces:?} is outside of {} bytes", from.bytes)));
            }
            let to = Span { len: last * pieces.to_step + pieces.to.len, ..pieces.to };
            arena.inner.check("copy", to)?;
        }
        match &from.place {
            Place::Cuda(memory) => {
                let to = |pieces: &Pieces| arena.inner.address(pieces.to);
                // SAFETY: both ends were checked, and both memories stay until the copies are done.
                unsafe { memory.copy(all.iter().map(|pieces| (pieces, to(pieces)))) }
            }
            Place::File(file) => {
                self.sync()?;
                all.iter().try_for_each(|pieces| read_pieces(arena, file, pieces))
            }
        }
    }

    /// Reads a part of it.
    pub fn read_shared(&self, from: &SharedMemory, at: u64, bytes: u64) -> Result<Vec<u8>> {
        if at.checked_add(bytes).is_none_or(|end| end > from.bytes) {
            return Err(wrong(format!("{bytes} bytes at {at} are outside of {}", from.bytes)));
        }
        let mut read = vec![0; bytes as usize];
        match &from.place {
            Place::Cuda(memory) => memory.read(at, &mut read)?,
            Place::File(file) => {
                file.read_exact_at(&mut read, at).map_err(|error| wrong(error.to_string()))?;
            }
        }
        Ok(read)
    }
}

/// Reads straight into the arena of a CPU.
fn read_pieces(arena: &Arena, file: &File, pieces: &Pieces) -> Result<()> {
    let base = arena.inner.address(pieces.to);
    let joined = pieces.from_step == pieces.to.len && pieces.to_step == pieces.to.len;
    let (count, len) = match joined {
        true => (1, pieces.count * pieces.to.len),
        false => (pieces.count, pieces.to.len),
    };
    for index in 0..count {
        let to = (base + index * pieces.to_step) as *mut u8;
        // SAFETY: the span was checked, nothing was launched that uses it, and the caller keeps others away as for any write.
        let to = unsafe { std::slice::from_raw_parts_mut(to, len as usize) };
        let at = pieces.from + index * pieces.from_step;
        file.read_exact_at(to, at).map_err(|error| wrong(error.to_string()))?;
    }
    Ok(())
}
