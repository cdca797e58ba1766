//! Models: families, loading, and the executor that replays their graphs.
//!
//! A family ([`families`]) is one file: the configuration fields it reads, its weights with the checkpoint tensors
//! they come from, its program. [`OpenModel`] reads a model's files and writes its program for a device;
//! [`load_executor`] does everything from a path to a [`GraphExecutor`], which an [`engine::Engine`] drives.
//!
//! ```
//! use model::{ModelConfig, ModelSource, OpenModel, precision};
//!
//! # fn main() -> Result<(), model::LoadError> {
//! let config = ModelConfig::bundled("qwen3-0.6b")?;
//! let model = OpenModel::open(&ModelSource::Dummy { config: Box::new(config), seed: 0 })?;
//! let target = device::target::CpuTarget;
//! let numerics = device::cpu::Numerics::Fast;
//! let written = model.write(&target, numerics, precision(&target), 4096)?;
//! assert_eq!(written.program.shape.layers, 28);
//! # Ok(())
//! # }
//! ```

mod adapter;
mod blocks;
mod builder;
pub mod config;
pub mod executor;
pub mod families;
mod fill;
mod lane;
mod load;
mod observe;
mod open;
mod precision;
pub mod quality;
mod quantise;
mod reading;
mod rope;
mod sleep;
mod spec;
mod store;
mod stored;
mod update;
pub mod weights;

pub use adapter::{Adapter, AdapterError, AdapterReader, AdapterRoom};
pub use builder::{Builder, Source, Written, tensor};
pub use config::{Classes, Embedding, HeadConfig, ModelConfig, Task};
pub use executor::GraphExecutor;
pub use load::{
    Configured, LoadOptions, LoadedExecutor, Progress, configure, load_executor, precision,
};
pub use observe::PromptLogits;
pub use open::{ModelSource, OpenModel};
pub use precision::{Precision, Quantise};
pub use quantise::{QuantiseError, QuantiseOptions, Quantiser, Texts};
pub use reading::{ReadError, Reading};
pub use sleep::{Parts, SleepError};
pub use spec::{Choice, Method, SpecError, SpecUse, Speculation, Why};
pub use store::{DiskError, KeepOptions};
pub use update::{SharedTensor, SharedUpdate, Update, UpdateError};

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
    /// The memory budget has no room for graphs, and steps without one are refused.
    #[error(
        "memory.budget has no room for any of {graphs}, and fallback = error refuses steps without a graph"
    )]
    Budget {
        /// Their names.
        graphs: String,
    },
    /// A size for KV pages that this model or device has no use for.
    #[error("a KV cache of {} {}", graph::plan::bytes(*asked), problem)]
    KvSize {
        /// Bytes asked for.
        asked: u64,
        /// What is wrong with them.
        problem: String,
    },
    /// The file for evicted pages cannot be used.
    #[error("keeping KV pages on disk: {0}")]
    Disk(#[from] DiskError),
    /// ggml's order of sums was asked for, and the model has experts.
    #[error("ggml's numerics are not there for models with experts")]
    GgmlExperts,
    /// Adapters were asked for, and the model cannot have any.
    #[error("adapters are for models that generate text, from safetensors")]
    NoAdapters,
    /// Drafts were asked for, and the model generates no text.
    #[error("speculation is for models that generate text")]
    NoText,
    /// Something was asked for that a model with recurrent layers cannot have.
    #[error("the model has recurrent layers: {0}")]
    Recurrent(&'static str),
    /// A model that is to draft and cannot, or that is missing.
    #[error("drafting by `{method}` {problem}")]
    SpecModel {
        /// The method.
        method: &'static str,
        /// What is wrong.
        problem: &'static str,
    },
    /// A model that is to draft for one with other tokens.
    #[error(
        "the model that drafts has a vocabulary of {own} tokens, the one it drafts for of {wanted}: they must be the same"
    )]
    Vocabulary {
        /// Its tokens.
        own: usize,
        /// Those of the model that verifies.
        wanted: usize,
    },
    /// The model does not make a program.
    #[error(transparent)]
    Program(#[from] graph::program::ProgramError),
}
