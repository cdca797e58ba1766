//! Ops as plain data. An op names operands and shapes; it holds no pointer, no closure and no device. Over
//! [`Bound`] operands it is what a plan runs; over a program's names it is what a model is written in.

use crate::operand::{Bound, Operands};
use crate::ops::Named;
use serde::{Deserialize, Serialize};

pub use crate::kv::KvLayer;
pub use crate::ops::add::Add;
pub use crate::ops::attention::Attention;
pub use crate::ops::attention::chain::AttentionChain;
pub use crate::ops::copy::Copy;
pub use crate::ops::embed::Embed;
pub use crate::ops::fill::Fill;
pub use crate::ops::fused::{Fused, FusedKernel};
pub use crate::ops::gather::Gather;
pub use crate::ops::linear::Linear;
pub use crate::ops::linear::chain::{Epilogue, LinearChain, NormHandoff};
pub use crate::ops::noise::Noise;
pub use crate::ops::prologue::Prologue;
pub use crate::ops::rms_norm::{Norm, RmsNorm};
pub use crate::ops::rope_kv::{Pairs, RopeKv};
pub use crate::ops::sample::Sample;
pub use crate::ops::silu_mul::SiluMul;

/// Makes the enum of ops, their names, and `for_each_op!`, which does the same for whichever op it is.
macro_rules! ops {
    (($d:tt) $($(#[$doc:meta])* $Op:ident = $name:literal,)*) => {
        /// One operation. Each variant's contract stands in the file of the same name under `ops/`.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(tag = "op", rename_all = "snake_case", bound = "")]
        pub enum Op<O: Operands = Bound> {
            $($(#[$doc])* $Op($Op<O>),)*
        }

        $(impl<O: Operands> Named for $Op<O> {
            const NAME: &'static str = $name;
        }

        impl<O: Operands> $Op<O> {
            /// The op's name in errors and listings.
            pub const NAME: &'static str = $name;
        }

        impl<O: Operands> From<$Op<O>> for Op<O> {
            fn from(op: $Op<O>) -> Op<O> {
                Op::$Op(op)
            }
        })*

        macro_rules! for_each_op {
            ($d self:expr, $d op:ident => $d body:expr) => {
                match $d self {
                    $($crate::Op::$Op($d op) => $d body,)*
                }
            };
            ($d self:expr, $d op:ident => $d body:expr, again) => {
                match $d self {
                    $($crate::Op::$Op($d op) => $crate::Op::$Op($d body),)*
                }
            };
        }
    };
}

ops! { ($)
    /// Applies the mail and derives the step's tables.
    Prologue = "prologue",
    /// Gathers embedding rows.
    Embed = "embed",
    /// Normalises rows.
    RmsNorm = "rms_norm",
    /// Multiplies by a weight matrix.
    Linear = "linear",
    /// Adds two matrices.
    Add = "add",
    /// Multiplies by an activated gate.
    SiluMul = "silu_mul",
    /// Normalises and rotates q and k, writes k and v to their pages.
    RopeKv = "rope_kv",
    /// Attends over pages.
    Attention = "attention",
    /// Gathers rows by index.
    Gather = "gather",
    /// Chooses tokens, advances the seats, publishes to the ring.
    Sample = "sample",
    /// Copies bytes.
    Copy = "copy",
    /// Fills with a repeated word.
    Fill = "fill",
    /// Fills with numbers drawn from a seed.
    Noise = "noise",
    /// Several ops as one.
    Fused = "fused",
}

pub(crate) use for_each_op;
