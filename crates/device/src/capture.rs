//! Recording as one state machine, the same for every device: idle → recording (⇄ broken) → idle.
//! It decides what is refused; devices only execute.
//!
//! What is refused is refused to the thread that records: others run and replay meanwhile. A device has one recording at
//! a time; another thread that begins one waits for its turn.

use crate::{Error, Result, error::Forbidden};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread::{self, ThreadId};

/// Where a device's recording stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Capture {
    /// No recording.
    #[default]
    Idle,
    /// Ops are being recorded into the named graph.
    Recording(String),
    /// Between two segments of the named graph: ops run eagerly, the host may look.
    Broken(String),
}

/// A device's capture state, and the number that tells the device from others.
#[derive(Debug)]
pub(crate) struct CaptureState {
    device: u32,
    capture: Mutex<Turn>,
    ended: Condvar,
}

/// A recording, and the thread that has it.
#[derive(Debug, Default)]
struct Turn {
    owner: Option<ThreadId>,
    capture: Capture,
}

impl Turn {
    fn is_mine(&self) -> bool {
        self.owner == Some(thread::current().id())
    }
}

impl Default for CaptureState {
    fn default() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let device = NEXT.fetch_add(1, Ordering::Relaxed);
        CaptureState { device, capture: Mutex::default(), ended: Condvar::new() }
    }
}

impl CaptureState {
    /// The device's number, unique within the process.
    pub(crate) fn device(&self) -> u32 {
        self.device
    }

    fn turn(&self) -> MutexGuard<'_, Turn> {
        self.capture.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// With the state of the recording that this thread has.
    fn with<T>(&self, f: impl FnOnce(&mut Capture) -> T) -> T {
        let mut turn = self.turn();
        match turn.is_mine() {
            true => f(&mut turn.capture),
            false => f(&mut Capture::Idle),
        }
    }

    /// Refuses `what` while this thread records.
    pub(crate) fn allow(&self, what: Forbidden) -> Result<()> {
        self.with(|capture| match capture {
            Capture::Recording(graph) => Err(Error::WhileRecording { what, graph: graph.clone() }),
            Capture::Broken(graph) if what == Forbidden::Allocation => {
                Err(Error::WhileRecording { what, graph: graph.clone() })
            }
            _ => Ok(()),
        })
    }

    /// Idle → recording, when no other thread records.
    pub(crate) fn begin(&self, graph: &str) -> Result<()> {
        let mut turn = self.turn();
        if turn.is_mine() {
            let (Capture::Recording(open) | Capture::Broken(open)) = &turn.capture else {
                unreachable!("who has the turn records")
            };
            let what = Forbidden::NestedRecording;
            return Err(Error::WhileRecording { what, graph: open.clone() });
        }
        while turn.owner.is_some() {
            turn = self.ended.wait(turn).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        let capture = Capture::Recording(graph.into());
        *turn = Turn { owner: Some(thread::current().id()), capture };
        Ok(())
    }

    /// Refuses to add an item outside a segment.
    pub(crate) fn in_segment(&self) -> Result<()> {
        self.with(|capture| match capture {
            Capture::Recording(_) => Ok(()),
            other => Err(out_of_turn(other, "an item outside a segment")),
        })
    }

    /// Recording → broken.
    pub(crate) fn pause(&self) -> Result<()> {
        self.with(|capture| match capture {
            Capture::Recording(graph) => {
                *capture = Capture::Broken(std::mem::take(graph));
                Ok(())
            }
            other => Err(out_of_turn(other, "break outside a segment")),
        })
    }

    /// Broken → recording.
    pub(crate) fn resume(&self) -> Result<()> {
        self.with(|capture| match capture {
            Capture::Broken(graph) => {
                *capture = Capture::Recording(std::mem::take(graph));
                Ok(())
            }
            other => Err(out_of_turn(other, "resume without a break")),
        })
    }

    /// Recording or broken → idle. A dropped recording is abandoned this way, too, by whichever thread drops it.
    pub(crate) fn end(&self) {
        *self.turn() = Turn::default();
        self.ended.notify_one();
    }
}

fn out_of_turn(capture: &Capture, problem: &'static str) -> Error {
    let graph = match capture {
        Capture::Idle => "none".into(),
        Capture::Recording(graph) | Capture::Broken(graph) => graph.clone(),
    };
    Error::RecordingState { graph, problem }
}
