//! The CUDA device. Lowering an op to launches is a pure function over plain data (`lower`), so that
//! plans can be explained, counted and compiled on a machine without a GPU; only `driver` talks to one.

mod api;
pub mod cache;
pub mod compile;
pub(crate) mod context;
pub(crate) mod driver;
mod gemm;
pub(crate) mod ipc;
mod kernel;
pub mod launch;
pub mod library;
pub mod lower;
mod memory;
pub(crate) mod record;
mod region;
pub mod source;
pub mod tune;
pub mod tuned;
pub mod usage;

pub use context::Gpu;
pub(crate) use context::gpus;

#[cfg(test)]
mod tests;
