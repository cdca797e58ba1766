//! For each token: normalise its q and k heads (if norms are given), rotate them by its position,
//! store q in place, and write k and v to the page slot of the token.
//!
//! Rotation maps the two elements of each of `pairs`:
//! `(a, b) → (a·cos − b·sin, b·cos + a·sin)` with the cosines and sines of the token's position.
//! All in f32, rounded once when storing. A pad token's slot lies in the scratch page (page 0), so it
//! may be written like any other; it never touches a live page.

mod cuda;

use super::{
    Access, Bindable, Contract, Named, Reuse, SpanVisitor, StepSize, Traffic, norm_bytes, require,
    require_fit, require_float, require_norm, require_pages,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::tables::Tables;
use crate::cpu::view::{Matrix, Words, load, store};
use crate::op::KvLayer;
use crate::op::Norm;
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::step::count;
use crate::{DType, Result, StepState};
use serde::{Deserialize, Serialize};

mod fast;

pub(crate) use fast::{RopeKvStep, turn};

/// Which elements of a head are rotated together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pairs {
    /// Element i and i + head_dim/2.
    #[default]
    Halves,
    /// Elements 2i and 2i + 1, as GGUF files of the `llama` architecture have them. For keys and values on the CPU only.
    Neighbours,
}

impl Pairs {
    /// Whether every device supports it.
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
#[serde(bound = "")]
pub struct RopeKv<O: Operands = Bound> {
    /// tokens × (q_heads + 2·kv_heads)·head_dim, heads in the order q, k, v. q is rewritten in place.
    pub qkv: O::Value,
    /// The same matrix with q rotated: the same bytes as `qkv`.
    pub out: O::Value,
    /// Query heads.
    pub q_heads: u32,
    /// Normalises each q head before rotation.
    pub q_norm: Option<Norm<O>>,
    /// Normalises each k head before rotation.
    pub k_norm: Option<Norm<O>>,
    /// max_position × head_dim, f32: cosines of the head_dim/2 frequencies, then their sines.
    pub rope: O::Table,
    /// Which elements are rotated together.
    #[serde(default, skip_serializing_if = "Pairs::is_halves")]
    pub pairs: Pairs,
    /// Per-token tables and pages.
    #[serde(skip_serializing_if = "unset")]
    pub state: O::Late<StepState>,
    /// Where k and v go.
    pub kv: O::Cache,
}

impl<O: Operands> Bindable for RopeKv<O> {
    type O = O;
    type Bound = RopeKv;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.qkv, Access::Update));
        for norm in [&mut self.q_norm, &mut self.k_norm].into_iter().flatten() {
            visit(Operand::Weight(&mut norm.weight));
        }
        visit(Operand::Table(&mut self.rope));
        visit(Operand::Cache(&mut self.kv));
        visit(Operand::Value(&mut self.out, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<RopeKv, B::Error> {
        Ok(RopeKv {
            qkv: to.value(self.qkv)?,
            out: to.value(self.out)?,
            q_heads: self.q_heads,
            q_norm: self.q_norm.map(|norm| norm.bind(to)).transpose()?,
            k_norm: self.k_norm.map(|norm| norm.bind(to)).transpose()?,
            rope: to.table(self.rope)?,
            pairs: self.pairs,
            state: to.state_of(self.kv),
            kv: to.cache(self.kv)?,
        })
    }

    fn reuse(&self) -> Option<Reuse<O::Value>> {
        Some(Reuse { from: self.qkv, to: self.out, must: true })
    }
}

impl Contract for RopeKv {
    fn check(&self) -> Result<()> {
        require_fit(&self.qkv, Self::NAME, "qkv")?;
        require(self.out == self.qkv, Self::NAME, || "q is rotated in place".into())?;
        require_fit(&self.rope, Self::NAME, "rope")?;
        require_float(&self.qkv, Self::NAME, "qkv")?;
        self.state.check()?;
        let (dim, limits) = (self.kv.head_dim, &self.state.limits);
        require_pages(&self.kv, limits.page_size, Self::NAME)?;
        let heads = u64::from(self.q_heads) + 2 * u64::from(self.kv.heads);
        require(
            u128::from(self.qkv.cols) == u128::from(heads) * u128::from(dim),
            Self::NAME,
            || {
                format!(
                    "qkv has {} columns for {} + 2×{} heads of {dim}",
                    self.qkv.cols, self.q_heads, self.kv.heads
                )
            },
        )?;
        require(self.rope.dtype == DType::F32 && self.rope.cols == dim, Self::NAME, || {
            "rope table is not f32 with head_dim columns".into()
        })?;
        for norm in [&self.q_norm, &self.k_norm].into_iter().flatten() {
            require_norm(norm, dim, Self::NAME)?;
        }
        require(dim.is_multiple_of(2), Self::NAME, || format!("heads of {dim} have no pairs"))?;
        require(self.qkv.rows <= limits.tokens, Self::NAME, || {
            format!("{} tokens; the tables have {}", self.qkv.rows, limits.tokens)
        })
    }

    fn describe(&self) -> String {
        let norms = if self.q_norm.is_some() { "qk-norm + " } else { "" };
        format!("{norms}rope_kv {} tokens", self.qkv.rows)
    }

    fn traffic(&self) -> Traffic {
        Traffic { weights: self.norm_bytes(), values: 2 * self.qkv.bytes() }
    }

    fn step_size(&self) -> StepSize {
        StepSize::ANY
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.qkv.span, Access::Update);
        for norm in [&self.q_norm, &self.k_norm].into_iter().flatten() {
            visit(norm.weight.span, Access::Read);
        }
        visit(self.rope.span, Access::Read);
        super::visit_step_tables(&self.state, visit);
        visit(self.kv.span, Access::Update);
        if let Some(scales) = self.kv.scales {
            visit(scales, Access::Read);
        }
    }
}

impl RopeKv {
    /// Bytes of the weights of its norms.
    pub(crate) fn norm_bytes(&self) -> u64 {
        norm_bytes(&self.q_norm) + norm_bytes(&self.k_norm)
    }

    /// Live tokens only: the k and v of a pad token are never read.
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let tables = Tables::new(memory, &self.state);
        let tokens = tables.counts.get(count::TOKENS as usize) as usize;
        (0..tokens.min(self.qkv.rows as usize))
            .for_each(|t| self.reference_token(memory, &tables, t));
    }

    fn reference_token(&self, memory: &CpuMemory, tables: &Tables, token: usize) {
        let (qkv, rope) = (Matrix::new(memory, &self.qkv), Matrix::new(memory, &self.rope));
        let dim = self.kv.head_dim as usize;
        let (q_heads, kv_heads) = (self.q_heads as usize, self.kv.heads as usize);
        let position = (tables.position.get(token) as usize).min(rope.rows - 1);
        let slot = tables.kv_slot.get(token) as usize;
        let mut head = vec![0.0; dim];
        for index in 0..q_heads + 2 * kv_heads {
            for (i, value) in head.iter_mut().enumerate() {
                *value = qkv.get(token, index * dim + i);
            }
            let norm = if index < q_heads { &self.q_norm } else { &self.k_norm };
            if index < q_heads + kv_heads {
                if let Some(norm) = norm {
                    norm.apply(memory, &mut head);
                }
                for i in 0..dim / 2 {
                    let (cos, sin) = (rope.get(position, i), rope.get(position, dim / 2 + i));
                    let (at, other) = self.pairs.pair(i, dim);
                    let (a, b) = (head[at], head[other]);
                    head[at] = a * cos - b * sin;
                    head[other] = b * cos + a * sin;
                }
            }
            for (i, value) in head.iter().enumerate() {
                if index < q_heads {
                    qkv.set(token, index * dim + i, *value);
                } else {
                    let (part, kv_head) =
                        ((index - q_heads) / kv_heads, (index - q_heads) % kv_heads);
                    self.kv.set(memory, slot, part, kv_head, i, *value);
                }
            }
        }
    }
}

impl KvLayer {
    /// The first element's index of a slot's head; `part` 0 is k, 1 is v.
    #[track_caller]
    pub(crate) fn index(&self, slot: usize, part: usize, head: usize) -> usize {
        let (size, dim) = (self.page_size as usize, self.head_dim as usize);
        let (page, offset) = (slot / size, slot % size);
        let (parts, heads) = (self.parts() as usize, self.heads as usize);
        let there = page < self.pages as usize && part < parts && head < heads;
        assert!(there, "slot {slot} of {self:?}");
        (((page * parts + part) * heads + head) * size + offset) * dim
    }

    pub(crate) fn set(
        &self,
        memory: &CpuMemory,
        slot: usize,
        part: usize,
        head: usize,
        i: usize,
        value: f32,
    ) {
        let at = (self.index(slot, part, head) + i) * self.dtype.block_bytes();
        let value = value * (1.0 / self.scale(memory, part, head));
        // SAFETY: `index` checked the slot against the pages, which fit the span.
        unsafe { store(self.dtype, memory.address(self.span).add(at), value) }
    }

    /// An element of a slot's k (`part` 0) or v (1).
    pub(crate) fn get(
        &self,
        memory: &CpuMemory,
        slot: usize,
        part: usize,
        head: usize,
        i: usize,
    ) -> f32 {
        let at = (self.index(slot, part, head) + i) * self.dtype.block_bytes();
        // SAFETY: as for `set`.
        let stored = unsafe { load(self.dtype, memory.address(self.span).add(at)) };
        stored * self.scale(memory, part, head)
    }

    /// The factor of a head's keys (`part` 0) or values (1): 1 without scales.
    pub(crate) fn scale(&self, memory: &CpuMemory, part: usize, head: usize) -> f32 {
        let scales = self.scales.map(|scales| Words::of_span(memory, scales));
        scales.map_or(1.0, |scales| scales.float(part * self.heads as usize + head))
    }
}
