//! Models: what their weights are, what their programs look like, and how both reach a device.

pub mod dense;
pub mod executor;
pub mod fill;
mod observe;
pub mod place;
mod ready;
pub mod rope;
pub mod weights;

pub use executor::GraphExecutor;
pub use ready::{
    CPU_KV_BYTES, LoadOptions, LoadedExecutor, ModelSource, Progress, load_executor, numbers,
    program,
};
use std::path::PathBuf;

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Tensors that are missing, extra or of the wrong shape: all of them.
    #[error("{}: {} tensors do not fit the model:\n  {}", path.display(), problems.len(), problems.join("\n  "))]
    Tensors {
        /// The checkpoint.
        path: PathBuf,
        /// One line each.
        problems: Vec<String>,
    },
    /// The file is not what it claims to be.
    #[error(transparent)]
    Format(#[from] formats::Error),
    /// A tensor that cannot be converted.
    #[error(transparent)]
    Quant(formats::quant::QuantError),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] device::Error),
    /// No plan could be made.
    #[error(transparent)]
    Compile(#[from] graph::CompileError),
    /// A graph configuration that does not hold together.
    #[error(transparent)]
    Graphs(#[from] graph::config::ConfigError),
    /// Graphs could not be recorded.
    #[error(transparent)]
    Run(#[from] graph::runner::RunError),
    /// Weights, state and workspace leave no room for pages.
    #[error("the device has no room for this model: {} MB before the first KV page", needed >> 20)]
    NoRoom {
        /// Bytes taken before pages.
        needed: u64,
    },
    /// A size for KV pages that this model or device has no use for.
    #[error("a KV cache of {} {}", graph::plan::bytes(*asked), problem)]
    KvSize {
        /// Bytes asked for.
        asked: u64,
        /// What is wrong with them.
        problem: String,
    },
    /// The model does not make a program.
    #[error(transparent)]
    Program(#[from] graph::program::ProgramError),
}
