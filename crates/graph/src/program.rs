//! A model as plain data: ops over named values with symbolic shapes. It holds no address, no device
//! and no batch size, so it can be printed, stored as JSON, checked and compiled anywhere.
//!
//! A program is *unfused*: norm, linear, add, gate·mul, rope and attention are separate ops.
//! [`mod@crate::compile`] decides which of them to fuse.

mod builder;
mod check;
mod drafter;
mod kept;

pub use builder::{ExpertWeights, Heads, ProgramBuilder};
pub use check::ProgramError;
pub use drafter::Drafter;
pub use kept::Kept;

pub use device::op::{Activation, Gate, Lookup, Pairs, Pooling, Routing, Rule, Score};

use crate::Phase;
use device::operand::{Operands, Plain, Unset};
use device::{DType, StepLimits};
use serde::{Deserialize, Serialize};

/// A length: constant, or set by the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dim {
    /// Tokens of the step.
    Tokens,
    /// Rows (sequences) of the step; in a decode step its tokens, because each of them is sampled after.
    Rows,
    /// A constant.
    Const(u32),
}

impl Dim {
    /// The length in a bucket.
    pub fn size(self, key: &crate::ShapeKey) -> u32 {
        match self {
            Dim::Rows if key.phase == Phase::Prefill => key.rows,
            Dim::Tokens | Dim::Rows => key.tokens,
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
    /// Rows of gate and up of each expert take turns of eight: gate 0 to 7, up 0 to 7, gate 8 to 15, …
    GateUpTurns,
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

    /// The same matrix with alternating gate and up rows; so do its blocks of scales.
    pub fn gate_up(self) -> WeightRef {
        let dtype = if self.dtype == DType::F8Block { DType::F8Pairs } else { self.dtype };
        WeightRef { layout: WeightLayout::GateUp, dtype, ..self }
    }

    /// The same matrix with gate and up rows in turns of eight, and their blocks of scales by turns.
    pub fn gate_up_turns(self) -> WeightRef {
        let dtype = if self.dtype == DType::F8Block { DType::F8Turns } else { self.dtype };
        WeightRef { layout: WeightLayout::GateUpTurns, dtype, ..self }
    }

    /// Bytes it takes.
    pub fn bytes(&self) -> u64 {
        self.dtype.matrix_bytes(self.rows as usize, self.cols as usize) as u64
    }
}

/// Names a table of rotations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RopeId(pub u32);

/// A table of rotations: for each position of the longest context, cosines and sines of `dim / 2` angles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RopeTable {
    /// Elements of a head that it rotates.
    pub dim: u32,
}

/// Names a cache of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CacheId(pub u32);

/// What a program keeps of tokens between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cache {
    /// Keys and values of tokens, in pages. All such caches of a program share page numbers ([`Kept`]).
    Paged {
        /// KV heads.
        heads: u32,
        /// Elements per head.
        head_dim: u32,
        /// Element type.
        dtype: DType,
        /// Only the last so many tokens are ever read again: older ones need not be kept. `None` keeps all.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        window: Option<u32>,
    },
    /// What the keys and values of all heads are made of, in the same pages.
    Latent {
        /// Elements of a latent.
        latent: u32,
        /// Elements of the key behind it that is rotated and the same for all heads.
        rotated: u32,
        /// Element type.
        dtype: DType,
    },
}

impl Cache {
    /// How many of the last tokens are kept; `None` for all.
    pub const fn window(&self) -> Option<u32> {
        match *self {
            Cache::Paged { window, .. } => window,
            Cache::Latent { .. } => None,
        }
    }

    /// Keeps the last `window` tokens, or all.
    pub(crate) fn keep(&mut self, tokens: Option<u32>) {
        match self {
            Cache::Paged { window, .. } => *window = tokens,
            Cache::Latent { .. } => {}
        }
    }

    /// Bytes that a token takes.
    pub fn token_bytes(&self) -> u64 {
        match *self {
            Cache::Paged { heads, head_dim, dtype, .. } => {
                2 * u64::from(heads) * dtype.bytes(head_dim as usize) as u64
            }
            Cache::Latent { latent, rotated, dtype } => {
                dtype.bytes((latent + rotated) as usize) as u64
            }
        }
    }
}

/// Names a recurrent state of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CarryId(pub u32);

/// What a layer carries from token to token instead of keeping tokens: as large for a long sequence as for a short one.
/// Every seat has one. The ops that use it ignore what it holds where a sequence begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Carry {
    /// Elements of a seat.
    pub cols: u32,
    /// Element type.
    pub dtype: DType,
    /// What it has besides where steps verify drafts, so that rejected ones leave no trace.
    pub more: More,
}

/// What a seat carries besides its state where steps verify drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum More {
    /// So many elements of each draft that a row may have.
    Inputs(u32),
    /// A log with so many elements of each of its tokens ([`StepLimits::logged`]). It is empty where a prompt is fed.
    Log(u32),
}

impl Carry {
    /// Elements of a seat, where steps have these limits.
    pub(crate) fn seat_cols(&self, limits: &StepLimits) -> u32 {
        self.cols
            + match self.more {
                More::Inputs(each) => each * limits.drafts(),
                More::Log(each) => each * limits.logged(),
            }
    }

    /// The first elements of a seat, which copies behind prefixes have: all but a log.
    pub(crate) fn copied_cols(&self, limits: &StepLimits) -> u32 {
        match self.more {
            More::Inputs(_) => self.seat_cols(limits),
            More::Log(_) => self.cols,
        }
    }

    /// Bytes of so many elements.
    pub(crate) fn bytes(&self, cols: u32) -> u64 {
        self.dtype.bytes(cols as usize) as u64
    }
}

/// Names an input of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct InputId(pub u32);

/// Rows that the host gives a step, such as the embeddings of an image's patches. They stay until others are given.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Input {
    /// Its name.
    pub name: String,
    /// Most rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
    /// Element type.
    pub dtype: DType,
}

/// Operands are names: of values, weights, caches, recurrent states and inputs of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symbolic;

impl Operands for Symbolic {
    type Value = ValueId;
    type Weight = WeightId;
    type Table = RopeId;
    type Cache = CacheId;
    type Carry = CarryId;
    type Input = InputId;
    type Bytes = ValueId;
    type Late<T: Plain> = Unset;
}

/// An op of a program. Each value is made by one step.
pub type ProgramOp = device::Op<Symbolic>;

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

/// The numbers of a model that determine its shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ModelShape {
    /// Width of the residual stream.
    pub hidden: u32,
    /// Query heads.
    pub q_heads: u32,
    /// KV heads, of layers that declare no cache of their own.
    pub kv_heads: u32,
    /// Elements per head.
    pub head_dim: u32,
    /// Vocabulary.
    pub vocab: u32,
    /// Layers.
    pub layers: u32,
    /// Positions the rope table covers.
    pub max_positions: u32,
    /// Activations.
    pub act_dtype: DType,
    /// KV pages, of layers that declare no cache of their own.
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

    /// The cache of a layer that declares none of its own.
    pub const fn cache(&self) -> Cache {
        let (heads, head_dim, dtype) = (self.kv_heads, self.head_dim, self.kv_dtype);
        Cache::Paged { heads, head_dim, dtype, window: None }
    }
}

/// A model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// The model's name.
    pub name: String,
    /// Its numbers.
    pub shape: ModelShape,
    /// Phases it may run in.
    pub phases: Vec<Phase>,
    /// Tables of rotations, by [`RopeId`].
    pub ropes: Vec<RopeTable>,
    /// Parameters, in order of first use.
    pub weights: Vec<WeightRef>,
    /// What is kept between steps, in order of declaration.
    pub caches: Vec<Cache>,
    /// Recurrent states, in order of declaration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub carries: Vec<Carry>,
    /// What the host gives besides tokens.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inputs: Vec<Input>,
    /// Values, in order of making.
    pub values: Vec<Value>,
    /// Ops, in a valid order.
    pub steps: Vec<Step>,
    /// A model that drafts for this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drafter: Option<Box<Drafter>>,
}

impl Step {
    /// Layer and name.
    pub(crate) fn full_name(&self) -> String {
        self.layer.map_or(self.name.clone(), |layer| format!("{layer}.{}", self.name))
    }
}

/// The experts of a layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerExperts<'a> {
    /// The layer.
    pub layer: u32,
    /// The gate and up weights of all experts.
    pub gate_up: &'a WeightRef,
    /// Their down weights.
    pub down: &'a WeightRef,
    /// How many there are.
    pub count: u32,
    /// How many a token has.
    pub top: u32,
}

impl LayerExperts<'_> {
    /// Bytes of one expert's weights.
    pub fn bytes_each(&self) -> u64 {
        (self.gate_up.bytes() + self.down.bytes()) / u64::from(self.count)
    }
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

    /// The experts of each layer that has some.
    pub fn experts(&self) -> impl Iterator<Item = LayerExperts<'_>> {
        self.steps.iter().filter_map(|step| {
            let ProgramOp::Experts(experts) = &step.op else { return None };
            Some(LayerExperts {
                layer: step.layer.unwrap_or(0),
                gate_up: self.weight(experts.gate_up),
                down: self.weight(experts.down),
                count: experts.experts,
                top: self.value(experts.choice).cols / 2,
            })
        })
    }

    /// The width of the vectors that it publishes, if it samples nothing.
    pub fn publishes(&self) -> Option<u32> {
        self.steps.iter().find_map(|step| {
            let ProgramOp::Publish(publish) = &step.op else { return None };
            Some(self.value(publish.vectors).cols)
        })
    }

    /// Bytes of a sequence's recurrent states; 0 if it has none.
    pub fn carry_bytes(&self) -> u64 {
        self.carries.iter().map(|carry| carry.bytes(carry.cols)).sum()
    }

    /// The same with what a seat has besides, where steps have these limits.
    pub fn seat_bytes(&self, limits: &StepLimits) -> u64 {
        self.carries.iter().map(|carry| carry.bytes(carry.seat_cols(limits))).sum()
    }

    /// Bytes of a copy of them behind a prefix.
    pub fn copy_bytes(&self, limits: &StepLimits) -> u64 {
        self.carries.iter().map(|carry| carry.bytes(carry.copied_cols(limits))).sum()
    }

    /// Whether it has nodes for adapters.
    pub(crate) fn has_adapters(&self) -> bool {
        self.steps.iter().any(|step| matches!(step.op, ProgramOp::Lora(_)))
    }

    /// Bytes of all weights.
    pub fn weight_bytes(&self) -> u64 {
        self.all_weights().map(WeightRef::bytes).sum()
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
