//! Device graphs from models: a [`program::Program`] says what a model computes, [`compile()`] turns
//! it into a [`Plan`] per [`ShapeKey`], and a runner records and replays plans through one of four
//! backends. Program and plan are plain data, so that explaining, diffing, checking and accounting are
//! ordinary functions, and everything can be tested on a CPU.
//!
//! This crate knows shapes and phases. It knows no requests, no models and no addresses.

pub mod backend;
pub mod bucket;
pub mod compile;
pub mod config;
mod counters;
pub mod explain;
mod key;
pub mod layout;
pub mod mail;
pub mod memory;
pub mod plan;
pub mod prep;
pub mod program;
pub mod runner;
pub(crate) mod slot;
pub mod tune;
pub mod verify;

pub use backend::BackendKind;
pub use compile::{Bindings, CompileError, CompileTarget, compile};
pub use counters::{BucketCount, Counters, Reason};
pub use key::{Form, Phase, ShapeKey};
pub use plan::Plan;
pub use prep::Prep;
