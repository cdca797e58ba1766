//! Errors of a device. They are typed, so that tests can check for a particular one.

use crate::{ArenaId, Region};

/// A device call's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A refusal or a failure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An operation that cannot be recorded was called during a recording.
    #[error("{what} while recording `{graph}`: finish the recording first")]
    WhileRecording {
        /// What was asked for.
        what: Forbidden,
        /// The open recording.
        graph: String,
    },
    /// Break, resume or finish at the wrong time.
    #[error("recording `{graph}`: {problem}")]
    RecordingState {
        /// The recording.
        graph: String,
        /// What was called at the wrong time.
        problem: &'static str,
    },
    /// A span that does not lie inside its region.
    #[error("{op}: span {offset}+{len} is outside {region} ({size} bytes)", region = region.name())]
    OutsideArena {
        /// The op or call.
        op: String,
        /// The region.
        region: Region,
        /// First byte.
        offset: u64,
        /// Length.
        len: u64,
        /// The region's size.
        size: u64,
    },
    /// A span of another arena (another device's, usually).
    #[error("{op}: span belongs to arena {found:?}, not to {expected:?}")]
    ForeignSpan {
        /// The op or call.
        op: String,
        /// The span's arena.
        found: ArenaId,
        /// The arena in use.
        expected: ArenaId,
    },
    /// Memory that was given back.
    #[error("{what}: the memory of {} was released: restore it first", region.name())]
    Released {
        /// The op or call.
        what: String,
        /// The region.
        region: Region,
    },
    /// An arena that another device sealed.
    #[error("{what}: arena {arena:?} is another device's memory")]
    ForeignArena {
        /// What was tried.
        what: String,
        /// The arena.
        arena: ArenaId,
    },
    /// The arena was closed.
    #[error("{what}: the arena is closed")]
    Closed {
        /// What was tried.
        what: String,
    },
    /// A folder or file that others could have written.
    #[error(transparent)]
    NotPrivate(crate::private::NotPrivate),
    /// Not enough memory for a region.
    #[error("{region} needs {needed} bytes; {available} are available", region = region.name())]
    OutOfMemory {
        /// The region.
        region: Region,
        /// Bytes asked for.
        needed: u64,
        /// Bytes there are.
        available: u64,
    },
    /// Limits of a step that its tables cannot have.
    #[error("the limits of a step: {problem}")]
    Limits {
        /// What is wrong.
        problem: String,
    },
    /// Shapes, dtypes or strides that break an op's contract.
    #[error("{op}: {problem}")]
    Contract {
        /// The op.
        op: String,
        /// What is wrong.
        problem: String,
    },
    /// A kernel that is launched dependently but does not wait for its predecessor.
    #[error("kernel `{kernel}` is launched dependently but never waits for its predecessor")]
    EdgeWithoutWait {
        /// The kernel.
        kernel: String,
    },
    /// A mail bank whose last launch has not been confirmed.
    #[error("mail for launch {launch}: launch {last} is not confirmed (last confirmed: {confirmed})", last = launch - 2)]
    MailBusy {
        /// The launch the mail is for.
        launch: u64,
        /// The last launch whose ring entry was read.
        confirmed: u64,
    },
    /// More mail than a bank holds.
    #[error("mail: {area} holds {limit} entries, {asked} are given")]
    MailFull {
        /// Which area.
        area: &'static str,
        /// What fits.
        limit: u32,
        /// What was given.
        asked: u32,
    },
    /// The ring wrapped around before its entry was read.
    #[error("ring: launch {expected} was overwritten by launch {found} before it was read")]
    RingOverrun {
        /// The launch to be read.
        expected: u64,
        /// What is there.
        found: u64,
    },
    /// A library that is needed was not found.
    #[error("{library} not found; looked in: {looked}. {fix}")]
    MissingLibrary {
        /// The library.
        library: String,
        /// Where it was looked for.
        looked: String,
        /// What to do.
        fix: String,
    },
    /// A device that does not exist.
    #[error("no device `{asked}`: {reason}")]
    NoDevice {
        /// What was asked for.
        asked: String,
        /// Why not.
        reason: String,
    },
    /// A kernel did not compile.
    #[error("kernel `{kernel}` did not compile:\n{log}")]
    Compile {
        /// The kernel.
        kernel: String,
        /// The compiler's log.
        log: String,
    },
    /// A driver call failed.
    #[error("{call}: {code}")]
    Driver {
        /// The call.
        call: String,
        /// The driver's code and name.
        code: String,
    },
    /// A file of the kernel cache could not be read or written.
    #[error("{path}: {problem}")]
    Io {
        /// The file.
        path: String,
        /// What happened.
        problem: String,
    },
}

/// Operations that cannot be recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forbidden {
    /// Laying out or sealing an arena.
    Allocation,
    /// Reading device memory.
    HostRead,
    /// Writing device memory from the host.
    HostWrite,
    /// Waiting for the device.
    HostSync,
    /// Replaying a graph.
    Replay,
    /// Starting another recording.
    NestedRecording,
    /// Running an op eagerly.
    EagerRun,
}

impl std::fmt::Display for Forbidden {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Forbidden::Allocation => "an allocation",
            Forbidden::HostRead => "a host read",
            Forbidden::HostWrite => "a host write",
            Forbidden::HostSync => "a host sync",
            Forbidden::Replay => "a replay",
            Forbidden::NestedRecording => "a second recording",
            Forbidden::EagerRun => "an eager run",
        })
    }
}
