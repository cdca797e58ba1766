//! Recording as one state machine, the same for every device: idle → recording (⇄ broken) → idle.
//! It decides what is refused; devices only execute.

use crate::{Error, Result, error::Forbidden};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

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
    capture: Mutex<Capture>,
}

impl Default for CaptureState {
    fn default() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let device = NEXT.fetch_add(1, Ordering::Relaxed);
        CaptureState { device, capture: Mutex::default() }
    }
}

impl CaptureState {
    /// The device's number, unique within the process.
    pub(crate) fn device(&self) -> u32 {
        self.device
    }

    fn with<T>(&self, f: impl FnOnce(&mut Capture) -> T) -> T {
        f(&mut self.capture.lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }

    /// Refuses `what` while recording.
    pub(crate) fn allow(&self, what: Forbidden) -> Result<()> {
        self.with(|capture| match capture {
            Capture::Recording(graph) => Err(Error::WhileRecording { what, graph: graph.clone() }),
            Capture::Broken(graph) if what == Forbidden::Allocation => {
                Err(Error::WhileRecording { what, graph: graph.clone() })
            }
            _ => Ok(()),
        })
    }

    /// Idle → recording.
    pub(crate) fn begin(&self, graph: &str) -> Result<()> {
        self.with(|capture| match capture {
            Capture::Idle => {
                *capture = Capture::Recording(graph.into());
                Ok(())
            }
            Capture::Recording(open) | Capture::Broken(open) => {
                Err(Error::WhileRecording { what: Forbidden::NestedRecording, graph: open.clone() })
            }
        })
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

    /// Recording or broken → idle. A dropped recording is abandoned this way, too.
    pub(crate) fn end(&self) {
        self.with(|capture| *capture = Capture::Idle);
    }
}

fn out_of_turn(capture: &Capture, problem: &'static str) -> Error {
    let graph = match capture {
        Capture::Idle => "none".into(),
        Capture::Recording(graph) | Capture::Broken(graph) => graph.clone(),
    };
    Error::RecordingState { graph, problem }
}
