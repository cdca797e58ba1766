//! Ops as plain data. An op names spans and shapes; it holds no pointer, no closure and no device.
//! Running it is the business of a device; planning, printing, checking and diffing it is not.

use crate::step::HostInputs;
use crate::variant::{AttentionVariant, LinearVariant, Pick};
use crate::{DType, Span, StepState, Tensor};
use serde::{Deserialize, Serialize};

/// One operation. Each variant's contract stands in the file of the same name under `ops/`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Op {
    /// Applies the mail and derives the step's tables.
    Prologue(Prologue),
    /// Gathers embedding rows.
    Embed(Embed),
    /// Normalises rows.
    RmsNorm(RmsNorm),
    /// Multiplies by a weight matrix, with prologue and epilogues.
    Linear(Linear),
    /// Normalises and rotates q and k, writes k and v to their pages.
    RopeKv(RopeKv),
    /// Attends over pages.
    Attention(Attention),
    /// Gathers rows by index.
    Gather(Gather),
    /// Chooses tokens, advances the seats, publishes to the ring.
    Sample(Sample),
    /// Copies bytes.
    Copy(Copy),
    /// Fills with a repeated word.
    Fill(Fill),
    /// Fills with numbers drawn from a seed.
    Noise(Noise),
    /// A run of decoder layers as one node.
    Layers(Layers),
}

/// RMS normalisation of the input of another op: y = x / sqrt(mean(x²) + eps) · weight.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Norm {
    /// One element per column.
    pub weight: Tensor,
    /// Added to the mean square.
    pub eps: f32,
}

/// See `ops/prologue.rs`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prologue {
    /// The state it advances.
    pub state: StepState,
    /// Rows of the bucket; rows past the live ones become pad rows.
    pub rows: u32,
    /// Tokens of the bucket.
    pub tokens: u32,
    /// Pages that every layer has, the scratch page included: an entry past them becomes the scratch page.
    pub pages: u32,
    /// The step's inputs come from these blocks instead of being derived. Only with one token per row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given: Option<HostInputs>,
}

/// See `ops/embed.rs`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Embed {
    /// Token ids, u32, one per row of `out`.
    pub ids: Tensor,
    /// vocab × width; any dtype.
    pub table: Tensor,
    /// tokens × width.
    pub out: Tensor,
}

/// See `ops/rms_norm.rs`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNorm {
    /// Input.
    pub x: Tensor,
    /// Weight and epsilon.
    pub norm: Norm,
    /// Output; may be `x`.
    pub y: Tensor,
}

/// What happens to a product before it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Epilogue {
    /// y = p
    Store,
    /// y = residual + p; the residual may be y itself.
    Residual(Tensor),
    /// Weight rows alternate gate and up: `y[i] = silu(p[2i]) · p[2i + 1]`.
    SiluMul,
}

/// What two products with a norm between them do for each other, where kernels can: it saves the norm a launch.
/// What the ops compute is the same either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hand {
    /// Nothing.
    #[default]
    Nothing,
    /// The very next op applies this norm to `y`: it finds `y` prepared in its scratch.
    Gives(Norm),
    /// The op before has prepared `x` for `norm` in this op's scratch.
    Takes,
}

impl Hand {
    /// Whether it is [`Hand::Nothing`].
    pub fn is_nothing(&self) -> bool {
        *self == Hand::Nothing
    }
}

/// See `ops/linear.rs`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Linear {
    /// rows × k activations.
    pub x: Tensor,
    /// n × k weights.
    pub w: Tensor,
    /// n elements added to each row's product.
    pub bias: Option<Tensor>,
    /// Applied to `x` first.
    pub norm: Option<Norm>,
    /// Applied last.
    pub epilogue: Epilogue,
    /// The fused form: do this to `y` afterwards, whose columns of k and v are then not worth reading. Only
    /// with [`Epilogue::Store`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope: Option<Box<RopeKv>>,
    /// rows × n, or rows × n/2 for [`Epilogue::SiluMul`].
    pub y: Tensor,
    /// Rows past this device-side count need not be computed (a u32 in a `counts` tensor).
    pub live: Option<Span>,
    /// What it does for the next op, or the one before did for it.
    #[serde(default, skip_serializing_if = "Hand::is_nothing")]
    pub hand: Hand,
    /// Room for partial sums and prepared inputs; see [`crate::cuda::lower::scratch_bytes`].
    pub scratch: Option<Span>,
    /// Which kernel.
    #[serde(default, skip_serializing_if = "Pick::is_best")]
    pub pick: Pick<LinearVariant>,
}

impl Linear {
    /// The product and nothing else.
    pub fn new(x: Tensor, w: Tensor, y: Tensor) -> Linear {
        Linear {
            x,
            w,
            bias: None,
            norm: None,
            epilogue: Epilogue::Store,
            rope: None,
            y,
            live: None,
            hand: Hand::Nothing,
            scratch: None,
            pick: Pick::Best,
        }
    }
}

/// Which elements of a head a rotation turns together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pairs {
    /// Element i and i + head_dim/2.
    #[default]
    Halves,
    /// Elements 2i and 2i + 1, as GGUF files of the `llama` architecture have them. The CPU only.
    Neighbours,
}

impl Pairs {
    /// Whether this is what every device has.
    pub fn is_halves(&self) -> bool {
        *self == Pairs::Halves
    }

    /// The two elements of pair `i` of a head.
    pub const fn pair(self, i: usize, head_dim: usize) -> (usize, usize) {
        match self {
            Pairs::Halves => (i, i + head_dim / 2),
            Pairs::Neighbours => (2 * i, 2 * i + 1),
        }
    }
}

/// How q and k are prepared and where k and v go.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeKv {
    /// tokens × (q_heads + 2·kv_heads)·head_dim, heads in the order q, k, v. q is rewritten in place.
    pub qkv: Tensor,
    /// Query heads.
    pub q_heads: u32,
    /// Normalises each q head before rotation.
    pub q_norm: Option<Norm>,
    /// Normalises each k head before rotation.
    pub k_norm: Option<Norm>,
    /// max_position × head_dim, f32: cosines of the head_dim/2 frequencies, then their sines.
    pub rope: Tensor,
    /// What is rotated with what.
    #[serde(default, skip_serializing_if = "Pairs::is_halves")]
    pub pairs: Pairs,
    /// Per-token tables and pages.
    pub state: StepState,
    /// Where k and v go.
    pub kv: KvLayer,
}

/// One layer's pages: `[page][k, v][kv_head][token in page][head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct KvLayer {
    /// The layer's part of the KV region.
    pub span: Span,
    /// F32, F16 or BF16.
    pub dtype: DType,
    /// Pages, the scratch page included.
    pub pages: u32,
    /// Tokens per page.
    pub page_size: u32,
    /// KV heads.
    pub heads: u32,
    /// Elements per head.
    pub head_dim: u32,
}

impl KvLayer {
    /// Elements of one page: both k and v, all heads.
    pub const fn page_elems(&self) -> u64 {
        let heads = 2 * self.heads as u64;
        heads.saturating_mul(self.head_dim as u64).saturating_mul(self.page_size as u64)
    }

    /// Bytes of one page of this layer.
    pub const fn page_bytes(&self) -> u64 {
        self.page_elems().saturating_mul(self.dtype.block_bytes() as u64)
    }
}

/// See `ops/attention.rs`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    /// tokens × (q_heads + 2·kv_heads)·head_dim; only the q part is read, unless `rope` is set.
    pub qkv: Tensor,
    /// Query heads.
    pub q_heads: u32,
    /// Pages, this step's tokens included (or written by the fused `rope`).
    pub kv: KvLayer,
    /// Rows, lengths and page tables.
    pub state: StepState,
    /// tokens × q_heads·head_dim.
    pub out: Tensor,
    /// Multiplies q·k; usually head_dim^-0.5.
    pub scale: f32,
    /// A token sees at most this many tokens back, itself included.
    pub window: Option<u32>,
    /// Rows of the bucket.
    pub rows: u32,
    /// Every row has exactly one token (decode); lets kernels use a fixed grid of rows.
    pub single: bool,
    /// Only the last token of each row is worth computing; a device may leave the others' rows of `out` as they are.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub last_only: bool,
    /// The fused form: do this to qkv first. Only with `single`.
    pub rope: Option<Box<RopeKv>>,
    /// Partial results of splits; devices say how much they need.
    pub scratch: Option<Span>,
    /// Which kernel.
    #[serde(default, skip_serializing_if = "Pick::is_best")]
    pub pick: Pick<AttentionVariant>,
}

/// See `ops/gather.rs`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gather {
    /// u32 indices, one per row of `y`.
    pub index: Tensor,
    /// Source rows.
    pub x: Tensor,
    /// `y[i] = x[index[i]]`.
    pub y: Tensor,
}

/// See `ops/sample.rs`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// rows × vocab, f32 or bf16; may be overwritten.
    pub logits: Tensor,
    /// Parameters, flags, and what is advanced.
    pub state: StepState,
    /// Scratch for partial results; devices say how much they need.
    pub scratch: Option<Span>,
    /// Rows of the bucket.
    pub rows: u32,
}

/// Copies `from` to `to`; equal lengths, no overlap.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Copy {
    /// Source.
    pub from: Span,
    /// Destination.
    pub to: Span,
}

/// Fills a span with a repeated 32-bit word.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fill {
    /// Destination; a multiple of 4 bytes.
    pub to: Span,
    /// The word.
    pub word: u32,
}

/// See `ops/noise.rs`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Noise {
    /// Destination.
    pub to: Tensor,
    /// Same seed, same numbers, on every device.
    pub seed: u64,
    /// Centre of the range.
    pub mean: f32,
    /// Half the width of the range.
    pub scale: f32,
}

/// See `ops/layers.rs`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Layers {
    /// What it does, in order: products and attention.
    pub members: Vec<Op>,
    /// Where blocks of a GPU hand each other activations: in [`crate::Region::State`], zero at the start
    /// and used by ops of this kind alone; see [`crate::cuda::lower::exchange_bytes`].
    pub exchange: Option<Span>,
}
