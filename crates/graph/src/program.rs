//! A model as plain data: ops over named values with symbolic shapes. It holds no address, no device
//! and no batch size, so it can be printed, stored as JSON, checked and compiled anywhere.
//!
//! A program is *unfused*: norm, linear, add, silu·mul, rope and attention stand apart, as in the
//! paper. What runs together is decided by [`mod@crate::compile`].

mod builder;
mod check;
pub mod sample;

pub use builder::ProgramBuilder;
pub use check::ProgramError;

pub use device::op::Pairs;

use crate::Phase;
use device::DType;
use serde::{Deserialize, Serialize};

/// A length that is known only per bucket, or always.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dim {
    /// Tokens of the step.
    Tokens,
    /// Rows (sequences) of the step.
    Rows,
    /// A constant.
    Const(u32),
}

impl Dim {
    /// The length in a bucket.
    pub fn size(self, key: &crate::ShapeKey) -> u32 {
        match self {
            Dim::Tokens => key.tokens,
            Dim::Rows => key.rows,
            Dim::Const(n) => n,
        }
    }
}

/// Names a value of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ValueId(pub u32);

/// Names a weight of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct WeightId(pub u32);

/// A matrix that one step of the program makes and others read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Value {
    /// Unique, for example `3.qkv`.
    pub name: String,
    /// Rows.
    pub rows: Dim,
    /// Columns.
    pub cols: u32,
    /// Element type.
    pub dtype: DType,
}

/// How the rows of a weight must be arranged when it is loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightLayout {
    /// As in the checkpoint (parts of a joined matrix one after the other).
    #[default]
    Rows,
    /// Rows of gate and up alternate: gate 0, up 0, gate 1, up 1, …
    GateUp,
}

/// A weight the program needs: a parameter by name, bound to memory when a plan is made.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WeightRef {
    /// The name it is bound by.
    pub name: String,
    /// How it is stored.
    pub dtype: DType,
    /// Output features, or 1 for a vector.
    pub rows: u32,
    /// Input features, or the length of a vector.
    pub cols: u32,
    /// What the loader must do with its rows.
    pub layout: WeightLayout,
}

impl WeightRef {
    /// A matrix of `rows` output features and `cols` input features.
    pub fn matrix(name: impl Into<String>, dtype: DType, rows: u32, cols: u32) -> WeightRef {
        WeightRef { name: name.into(), dtype, rows, cols, layout: WeightLayout::Rows }
    }

    /// A vector, such as a norm's weight or a bias.
    pub fn vector(name: impl Into<String>, dtype: DType, len: u32) -> WeightRef {
        WeightRef::matrix(name, dtype, 1, len)
    }

    /// The same matrix with alternating gate and up rows.
    pub fn gate_up(self) -> WeightRef {
        WeightRef { layout: WeightLayout::GateUp, ..self }
    }

    /// Bytes it takes.
    pub fn bytes(&self) -> u64 {
        self.dtype.bytes(self.rows as usize * self.cols as usize) as u64
    }
}

/// RMS normalisation by a weight.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct NormRef {
    /// The weight.
    pub weight: WeightId,
    /// Added to the mean square.
    pub eps: f32,
}

/// One operation on values. `out` is made here and nowhere else.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum ProgramOp {
    /// The step's tokens through the embedding table.
    Embed {
        /// vocab × hidden.
        table: WeightId,
        /// tokens × hidden.
        out: ValueId,
    },
    /// RMS normalisation of each row.
    RmsNorm {
        /// Input.
        x: ValueId,
        /// Weight and epsilon.
        norm: NormRef,
        /// Output.
        out: ValueId,
    },
    /// `x · wᵀ + bias`.
    Linear {
        /// Input.
        x: ValueId,
        /// Weight.
        w: WeightId,
        /// Added to each row.
        bias: Option<WeightId>,
        /// Output.
        out: ValueId,
    },
    /// `a + b`. One of the two must come from a linear that nothing else reads: it becomes that
    /// linear's epilogue, always (no device has, or needs, an addition of its own).
    Add {
        /// The residual stream, usually.
        a: ValueId,
        /// What is added.
        b: ValueId,
        /// The sum.
        out: ValueId,
    },
    /// `silu(x[2i]) · x[2i + 1]` over alternating gate and up columns; becomes the epilogue of the
    /// linear that made `x`, always.
    SiluMul {
        /// 2n columns.
        x: ValueId,
        /// n columns.
        out: ValueId,
    },
    /// Normalises and rotates q and k, writes k and v to the layer's pages. `out` is `qkv`, changed
    /// in place: `qkv` may not be read by anything else.
    RopeKv {
        /// q, k and v heads side by side.
        qkv: ValueId,
        /// Per-head norm of q.
        q_norm: Option<NormRef>,
        /// Per-head norm of k.
        k_norm: Option<NormRef>,
        /// Which layer's pages.
        kv: u32,
        /// The same with q rotated.
        out: ValueId,
    },
    /// Causal attention over the layer's pages.
    Attention {
        /// What [`ProgramOp::RopeKv`] made.
        qkv: ValueId,
        /// Multiplies q·k.
        scale: f32,
        /// A token sees at most this many tokens back, itself included.
        window: Option<u32>,
        /// Which layer's pages.
        kv: u32,
        /// tokens × q_heads·head_dim.
        out: ValueId,
    },
    /// The last token of each row.
    GatherLast {
        /// tokens × n.
        x: ValueId,
        /// rows × n.
        out: ValueId,
    },
    /// Chooses the next tokens and advances the seats. The last step of a program.
    Sample {
        /// rows × vocab.
        logits: ValueId,
    },
}

/// A mark a model puts on a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mark {
    /// `breakable` runs it between two recorded segments.
    Break,
    /// `piecewise` cuts here.
    Split,
}

/// An op with its name and place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// What to do.
    #[serde(flatten)]
    pub op: ProgramOp,
    /// Its name within the layer, for example `qkv`.
    pub name: String,
    /// Which layer, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<u32>,
    /// An explicit mark, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mark: Option<Mark>,
}

/// The numbers of a model that shapes follow from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ModelShape {
    /// Width of the residual stream.
    pub hidden: u32,
    /// Query heads.
    pub q_heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Elements per head.
    pub head_dim: u32,
    /// Vocabulary.
    pub vocab: u32,
    /// Layers; each has KV pages of its own.
    pub layers: u32,
    /// Positions the rope table covers.
    pub max_positions: u32,
    /// Activations.
    pub act_dtype: DType,
    /// KV pages.
    pub kv_dtype: DType,
}

impl ModelShape {
    /// Columns of the joined q, k and v projection.
    pub const fn qkv_cols(&self) -> u32 {
        (self.q_heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Columns of attention's output.
    pub const fn q_cols(&self) -> u32 {
        self.q_heads * self.head_dim
    }
}

/// A model. See the module's words.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// The model's name.
    pub name: String,
    /// Its numbers.
    pub shape: ModelShape,
    /// How the elements of q and k heads are paired for rotation; weights are loaded accordingly.
    #[serde(default, skip_serializing_if = "Pairs::is_halves")]
    pub pairs: Pairs,
    /// Phases it may run in.
    pub phases: Vec<Phase>,
    /// Parameters, in order of first use.
    pub weights: Vec<WeightRef>,
    /// Values, in order of making.
    pub values: Vec<Value>,
    /// Ops, in a valid order.
    pub steps: Vec<Step>,
}

impl Program {
    /// A value by id.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    /// A weight by id.
    pub fn weight(&self, id: WeightId) -> &WeightRef {
        &self.weights[id.0 as usize]
    }

    /// Bytes of all weights.
    pub fn weight_bytes(&self) -> u64 {
        self.weights.iter().map(WeightRef::bytes).sum()
    }

    /// As JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain data serialises")
    }

    /// From JSON, checked.
    pub fn from_json(text: &str) -> Result<Program, ProgramError> {
        let program: Program = serde_json::from_str(text)
            .map_err(|error| ProgramError::Json { problem: error.to_string() })?;
        program.check()?;
        Ok(program)
    }
}

impl ProgramOp {
    /// The name in listings.
    pub const fn name(&self) -> &'static str {
        match self {
            ProgramOp::Embed { .. } => "embed",
            ProgramOp::RmsNorm { .. } => "rms_norm",
            ProgramOp::Linear { .. } => "linear",
            ProgramOp::Add { .. } => "add",
            ProgramOp::SiluMul { .. } => "silu_mul",
            ProgramOp::RopeKv { .. } => "rope_kv",
            ProgramOp::Attention { .. } => "attention",
            ProgramOp::GatherLast { .. } => "gather_last",
            ProgramOp::Sample { .. } => "sample",
        }
    }

    /// The value it makes.
    pub const fn out(&self) -> Option<ValueId> {
        match self {
            ProgramOp::Embed { out, .. }
            | ProgramOp::RmsNorm { out, .. }
            | ProgramOp::Linear { out, .. }
            | ProgramOp::Add { out, .. }
            | ProgramOp::SiluMul { out, .. }
            | ProgramOp::RopeKv { out, .. }
            | ProgramOp::Attention { out, .. }
            | ProgramOp::GatherLast { out, .. } => Some(*out),
            ProgramOp::Sample { .. } => None,
        }
    }

    /// The values it reads.
    pub fn inputs(&self) -> Vec<ValueId> {
        match *self {
            ProgramOp::Embed { .. } => vec![],
            ProgramOp::RmsNorm { x, .. }
            | ProgramOp::Linear { x, .. }
            | ProgramOp::SiluMul { x, .. }
            | ProgramOp::GatherLast { x, .. } => vec![x],
            ProgramOp::Add { a, b, .. } => vec![a, b],
            ProgramOp::RopeKv { qkv, .. } | ProgramOp::Attention { qkv, .. } => vec![qkv],
            ProgramOp::Sample { logits } => vec![logits],
        }
    }

    /// The weights it reads.
    pub fn weights(&self) -> Vec<WeightId> {
        match *self {
            ProgramOp::Embed { table, .. } => vec![table],
            ProgramOp::RmsNorm { norm, .. } => vec![norm.weight],
            ProgramOp::Linear { w, bias, .. } => std::iter::once(w).chain(bias).collect(),
            ProgramOp::RopeKv { q_norm, k_norm, .. } => {
                [q_norm, k_norm].into_iter().flatten().map(|norm| norm.weight).collect()
            }
            _ => vec![],
        }
    }
}
