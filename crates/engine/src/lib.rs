//! Schedules many requests on one device.
//!
//! [`engine::Engine`] is a step function: events in, outputs out. It owns no clock, no thread and
//! no socket, so a run can be repeated from its inputs; `testing/sim` does that ten thousand times
//! with a device that fails on schedule. A caller's requests and the engine's outputs are in [`request`];
//! the interface of a device is in [`exec`]. [`offline`] wraps it for programs that only need answers,
//! [`batch`] for files of prompts.

mod adapters;
pub mod batch;
pub mod engine;
pub mod exec;
pub mod offline;
pub mod pages;
pub mod plant;
pub mod request;
pub mod sampling;
pub(crate) mod sched;
mod sequence;
pub mod store;
mod thought;

pub use engine::Engine;
pub use sched::{EngineConfig, EngineStats};
