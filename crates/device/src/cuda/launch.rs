//! What an op is lowered to on a GPU: plain data that names a kernel, its shape constants and arguments.

use super::tuned::Tuned;
use crate::{DType, Span};
use serde::{Deserialize, Serialize};

/// A kernel that can be compiled: the same key always gives the same cubin.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KernelKey {
    /// Source file stem under `kernels/`, for example `linear_gemv`.
    pub source: String,
    /// The `extern "C"` function.
    pub entry: String,
    /// Shape constants, given as macros, in order.
    pub defines: Vec<(String, String)>,
}

/// One argument of a launch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arg {
    /// The device address of a span.
    Address(Span),
    /// A null pointer where an optional span is absent.
    Null,
    /// A 32-bit integer.
    U32(u32),
    /// A 64-bit integer.
    U64(u64),
    /// A float.
    F32(f32),
    /// An array of device addresses, passed by value.
    Addresses(Vec<Span>),
    /// A TMA descriptor, passed by value as `__grid_constant__ const CUtensorMap`.
    TensorMap(TensorMap),
}

/// A TMA tensor map over a span.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorMap {
    /// Memory it describes.
    pub span: Span,
    /// F32, F16 or BF16.
    pub dtype: DType,
    /// Sizes in elements, innermost first (1 to 5 of them).
    pub dims: Vec<u64>,
    /// Strides in bytes of dims 1.. (one fewer than `dims`).
    pub strides: Vec<u64>,
    /// Box sizes in elements, innermost first.
    pub tile: Vec<u32>,
    /// Bytes of the shared-memory swizzle: 0, 32, 64 or 128.
    pub swizzle: u32,
}

/// One kernel launch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Launch {
    /// Which kernel.
    pub kernel: KernelKey,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads per block.
    pub block: [u32; 3],
    /// Blocks per cluster; `[1, 1, 1]` for none.
    pub cluster: [u32; 3],
    /// Dynamic shared memory in bytes; above 48 KiB the attribute is raised.
    pub shared: u32,
    /// Arguments in order.
    pub args: Vec<Arg>,
    /// The kernel executes `griddepcontrol.wait` before it touches anything that a predecessor wrote, so it may start
    /// early. Checked when kernels are prepared: a kernel without that instruction is an error.
    pub waits: bool,
}

/// A GEMM through cuBLASLt: `y[rows × n] = x[rows × k] · w[n × k]ᵀ + beta · c`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gemm {
    /// rows × k.
    pub x: crate::Tensor,
    /// n × k.
    pub w: crate::Tensor,
    /// n elements added to each row, if given; of y's format.
    pub bias: Option<crate::Tensor>,
    /// Added, if given (may be y).
    pub residual: Option<crate::Tensor>,
    /// rows × n.
    pub y: crate::Tensor,
    /// Fixed workspace.
    pub workspace: Option<Span>,
}

/// What an op is lowered to, in order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lowered {
    /// A kernel.
    Launch(Launch),
    /// A GEMM of cuBLASLt.
    Gemm(Gemm),
    /// A device-to-device copy node.
    Copy {
        /// Source.
        from: Span,
        /// Destination.
        to: Span,
    },
    /// A memset node of 32-bit words.
    Fill {
        /// Destination.
        to: Span,
        /// The word.
        word: u32,
    },
}

/// What lowering needs to know about a GPU; plain data, so that plans for a GPU can be made without one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Target {
    /// Compute capability, for example (9, 0).
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Most dynamic shared memory a block can have.
    pub shared_per_block: u32,
    /// Shared memory per multiprocessor.
    pub shared_per_sm: u32,
    /// L2 bytes.
    pub l2: u64,
    /// Variants that were measured to be faster than the rules.
    pub tuned: Tuned,
}

impl Target {
    /// An NVIDIA H200, for planning without one.
    pub fn h200() -> Target {
        Target {
            capability: (9, 0),
            sms: 132,
            shared_per_block: 227 << 10,
            shared_per_sm: 228 << 10,
            l2: 60 << 20,
            tuned: Tuned::shipped("sm_90a", 132),
        }
    }

    /// The NVRTC architecture name: `sm_90a`, `sm_80`, …
    pub fn arch(&self) -> String {
        arch(self.capability)
    }
}

/// The NVRTC architecture name of a compute capability.
pub(crate) fn arch((major, minor): (u32, u32)) -> String {
    let suffix = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{suffix}")
}
