//! For each token: normalise its q and k heads (if norms are given), rotate them by its position,
//! store q in place, and write k and v to the page slot of the token.
//!
//! Rotation turns the two elements of each of `pairs`:
//! `(a, b) → (a·cos − b·sin, b·cos + a·sin)` with the cosines and sines of the token's position.
//! All in f32, rounded once when storing. A pad token's slot lies in the scratch page (page 0), so it
//! may be written like any other; it never touches a live page.

mod cuda;

use super::{
    Access, Contract, SpanVisitor, StepSize, Traffic, norm_bytes, require, require_fit,
    require_float, require_norm, require_pages,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::tables::Tables;
use crate::cpu::view::{Matrix, load, store};
use crate::op::{KvLayer, RopeKv};
use crate::step::count;
use crate::{DType, Result};

mod fast;

pub(crate) use fast::RopeKvStep;

impl Contract for RopeKv {
    const NAME: &'static str = "rope_kv";

    fn check(&self) -> Result<()> {
        require_fit(&self.qkv, Self::NAME, "qkv")?;
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
    }
}

impl RopeKv {
    /// Bytes of the weights of its norms.
    pub(crate) fn norm_bytes(&self) -> u64 {
        norm_bytes(&self.q_norm) + norm_bytes(&self.k_norm)
    }

    /// Live tokens only: what a pad token would write, nobody reads.
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
        let heads = self.heads as usize;
        assert!(page < self.pages as usize && part < 2 && head < heads, "slot {slot} of {self:?}");
        (((page * 2 + part) * heads + head) * size + offset) * dim
    }

    fn set(&self, memory: &CpuMemory, slot: usize, part: usize, head: usize, i: usize, value: f32) {
        let at = (self.index(slot, part, head) + i) * self.dtype.block_bytes();
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
        unsafe { load(self.dtype, memory.address(self.span).add(at)) }
    }
}
