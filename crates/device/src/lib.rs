//! The ground everything stands on: an arena of static memory, ops as plain data, and two devices
//! that run, record and replay them with the same refusals.
pub mod allocs;
pub mod arena;
pub mod bench;
mod capture;
mod choice;
pub mod cpu;
pub mod cuda;
pub mod device;
pub mod doctor;
pub mod dtype;
pub mod error;
pub mod graph;
pub mod mail;
mod memory;
pub mod notice;
pub mod op;
pub mod ops;
pub mod private;
pub mod span;
pub mod step;
pub mod stopwatch;
pub mod tensor;
pub mod variant;

pub use arena::{Arena, ClosedArena, OpenArena, Report};
pub use choice::DeviceChoice;
pub use device::{Device, DeviceKind, Look, Recording};
pub use dtype::DType;
pub use error::{Error, Result};
pub use graph::{Graph, Item, Node, RecordOptions};
pub use memory::return_memory;
pub use op::Op;
pub use span::{ALIGN, ArenaId, Region, Span};
pub use step::{StepLimits, StepState};
pub use stopwatch::Stopwatch;
pub use tensor::Tensor;
