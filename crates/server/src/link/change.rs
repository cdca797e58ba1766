//! Changes of what the engine holds, which an operator asks for: its memory and its weights.

use engine::request::Output;
use std::any::Any;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Parts of a model's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Weights.
    pub weights: bool,
    /// The KV cache.
    pub kv: bool,
}

impl Parts {
    /// All of them.
    pub const ALL: Parts = Parts { weights: true, kv: true };
}

/// What is to change.
#[derive(Clone, Debug)]
pub enum Change {
    /// Give memory back; what the KV cache holds is forgotten.
    Sleep {
        /// Which.
        parts: Parts,
        /// Whether weights are kept in host memory.
        keep: bool,
    },
    /// Bring memory back.
    Wake {
        /// Which.
        parts: Parts,
        /// Whether weights that were forgotten are read again; else they have to be updated.
        reload: bool,
    },
    /// Run no steps until [`Change::Resume`]; steps under way end first.
    Pause {
        /// Whether running requests keep their pages; else these are computed again.
        keep: bool,
    },
    /// Go on.
    Resume,
    /// Replace weights.
    Update {
        /// Where some or all of the model's tensors are.
        from: NewWeights,
    },
    /// Let requests use an adapter under this number.
    LoadAdapter {
        /// Not 0, and never used before.
        number: u64,
        /// What [`super::AdapterReader`] read.
        adapter: ReadAdapter,
    },
    /// Forget an adapter; refused while requests use it.
    UnloadAdapter {
        /// Its number.
        number: u64,
    },
}

/// Where new weights are.
#[derive(Clone, Debug)]
pub enum NewWeights {
    /// In a checkpoint.
    Files(PathBuf),
    /// In the memory of another process.
    Shared(Vec<SharedTensor>),
}

/// A tensor in the memory of another process.
#[derive(Clone, Debug)]
pub struct SharedTensor {
    /// Its name in the model's checkpoint.
    pub name: String,
    /// Its type, as safetensors names it.
    pub dtype: String,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// What it lies in.
    pub memory: SharedPlace,
    /// Where its first byte is in there.
    pub offset: u64,
}

/// How another process names its memory.
#[derive(Clone, Debug)]
pub enum SharedPlace {
    /// A CUDA IPC handle.
    CudaIpc([u8; 64]),
    /// A file, such as one in `/dev/shm`.
    File(PathBuf),
}

/// Reads an adapter from a folder that `peft` saved, on any thread. Steps run meanwhile.
pub type AdapterReader = Arc<dyn Fn(&Path) -> Result<ReadAdapter, ChangeError> + Send + Sync>;

/// An adapter that was read: only the backend whose reader it was knows what it is.
#[derive(Clone)]
pub struct ReadAdapter(pub Arc<dyn Any + Send + Sync>);

impl fmt::Debug for ReadAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadAdapter")
    }
}

/// What happens to running requests first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Running {
    /// They finish.
    Finish,
    /// They end with an error.
    Drop,
    /// They go on afterwards, with the tokens they have.
    Pause,
}

/// Why something was not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// The backend has nothing of the kind.
    #[error("this backend cannot do that")]
    Unsupported,
    /// It cannot be done as asked, and nothing was changed.
    #[error("{0}")]
    Refused(String),
    /// It was begun and failed.
    #[error("{0}")]
    Failed(String),
}

/// The outcome of a change.
#[derive(Debug)]
pub struct Changed {
    /// Outputs of steps that had to be waited for.
    pub outputs: Vec<Output>,
    /// Whether it was made.
    pub result: Result<(), ChangeError>,
}

/// Whether a backend can run steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// It can.
    Awake,
    /// Some of its memory was given back.
    Asleep,
    /// It has memory for its weights, and no weights.
    NoWeights,
}
