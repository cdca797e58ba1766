//! For each token: normalise its latent, rotate the key that all heads share by the token's position, and write both,
//! one behind the other, to the token's slot in pages of latents; rotate the last elements of each query head in place.
//!
//! Rotation as in [`RopeKv`](super::rope_kv::RopeKv). All in f32, rounded once when storing. A pad token's slot lies in
//! the scratch page, so it may be written like any other.

mod cuda;
mod fast;

use super::{
    Access, Bindable, Contract, Named, Reuse, SpanVisitor, StepSize, Traffic, require, require_fit,
    require_latents, require_matrices, require_norm,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::tables::Tables;
use crate::cpu::view::Matrix;
use crate::op::{Norm, Pairs};
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::step::count;
use crate::{DType, Result, StepState};
use serde::{Deserialize, Serialize};

/// How queries are rotated, and latents prepared and written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct LatentKv<O: Operands = Bound> {
    /// tokens × heads·head_dim: of each head as many elements as a latent has, then those that are rotated.
    pub q: O::Value,
    /// The same bytes as `q`.
    pub out: O::Value,
    /// Query heads.
    pub heads: u32,
    /// Latents with their keys; columns before and behind them are not read.
    pub x: O::Value,
    /// The first column of latents.
    pub from: u32,
    /// Normalises latents.
    pub norm: Norm<O>,
    /// max_position × rotated elements, f32: cosines, then sines.
    pub rope: O::Table,
    /// Which elements are rotated together.
    #[serde(default, skip_serializing_if = "Pairs::is_halves")]
    pub pairs: Pairs,
    /// Per-token tables and pages.
    #[serde(skip_serializing_if = "unset")]
    pub state: O::Late<StepState>,
    /// Where latents go.
    pub kv: O::Cache,
}

impl<O: Operands> Bindable for LatentKv<O> {
    type O = O;
    type Bound = LatentKv;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.q, Access::Update));
        visit(Operand::Value(&mut self.x, Access::Read));
        visit(Operand::Weight(&mut self.norm.weight));
        visit(Operand::Table(&mut self.rope));
        visit(Operand::Cache(&mut self.kv));
        visit(Operand::Value(&mut self.out, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<LatentKv, B::Error> {
        Ok(LatentKv {
            q: to.value(self.q)?,
            out: to.value(self.out)?,
            heads: self.heads,
            x: to.value(self.x)?,
            from: self.from,
            norm: self.norm.bind(to)?,
            rope: to.table(self.rope)?,
            pairs: self.pairs,
            state: to.state_of(self.kv),
            kv: to.cache(self.kv)?,
        })
    }

    fn reuse(&self) -> Option<Reuse<O::Value>> {
        Some(Reuse { from: self.q, to: self.out, must: true })
    }
}

impl Contract for LatentKv {
    fn check(&self) -> Result<()> {
        require_matrices(&[(&self.q, "q"), (&self.x, "x")], Self::NAME)?;
        require(self.out == self.q, Self::NAME, || "q is rotated in place".into())?;
        require_fit(&self.rope, Self::NAME, "rope")?;
        self.state.check()?;
        let limits = &self.state.limits;
        require_latents(&self.kv, limits.page_size, Self::NAME)?;
        let (width, latent) = (self.kv.head_dim, self.latent());
        let q = u64::from(self.heads) * u64::from(width);
        require(u64::from(self.q.cols) == q && self.heads > 0, Self::NAME, || {
            format!("q has {} columns for {} heads of {width}", self.q.cols, self.heads)
        })?;
        let end = u64::from(self.from) + u64::from(width);
        require(end <= u64::from(self.x.cols) && self.x.rows == self.q.rows, Self::NAME, || {
            format!("latents of {width} from column {} on, in {}", self.from, self.x)
        })?;
        require_norm(&self.norm, latent, Self::NAME)?;
        let rotated = width - latent;
        require(rotated.is_multiple_of(2), Self::NAME, || {
            format!("{rotated} elements have no pairs")
        })?;
        require(self.rope.dtype == DType::F32 && self.rope.cols == rotated, Self::NAME, || {
            format!("the rope table is not f32 with {rotated} columns")
        })?;
        require(self.q.rows <= limits.tokens, Self::NAME, || {
            format!("{} tokens; the tables have {}", self.q.rows, limits.tokens)
        })
    }

    fn describe(&self) -> String {
        format!("latent_kv {} tokens, {} heads", self.q.rows, self.heads)
    }

    fn traffic(&self) -> Traffic {
        let tokens = self.q.rows as usize;
        let rotated = (self.heads * (self.kv.head_dim - self.latent())) as usize;
        let q = self.q.dtype.bytes(tokens * rotated) as u64;
        let x = self.x.dtype.bytes(tokens * self.kv.head_dim as usize) as u64;
        Traffic { weights: self.norm.weight.bytes(), values: 2 * q + 2 * x }
    }

    fn step_size(&self) -> StepSize {
        StepSize::ANY
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.q.span, Access::Update);
        visit(self.x.span, Access::Read);
        visit(self.norm.weight.span, Access::Read);
        visit(self.rope.span, Access::Read);
        super::visit_step_tables(&self.state, visit);
        visit(self.kv.span, Access::Update);
    }
}

impl LatentKv {
    /// Elements of a latent.
    fn latent(&self) -> u32 {
        self.kv.latent.unwrap_or(0)
    }

    /// Live tokens only: the latent of a pad token is never read.
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let tables = Tables::new(memory, &self.state);
        let tokens = tables.counts.get(count::TOKENS as usize) as usize;
        let (q, x) = (Matrix::new(memory, &self.q), Matrix::new(memory, &self.x));
        let rope = Matrix::new(memory, &self.rope);
        let (width, latent) = (self.kv.head_dim as usize, self.latent() as usize);
        for token in 0..tokens.min(q.rows) {
            let position = (tables.position.get(token) as usize).min(rope.rows - 1);
            let turn = |head: &mut [f32]| {
                for i in 0..head.len() / 2 {
                    let (cos, sin) =
                        (rope.get(position, i), rope.get(position, head.len() / 2 + i));
                    let (at, other) = self.pairs.pair(i, head.len());
                    let (a, b) = (head[at], head[other]);
                    head[at] = a * cos - b * sin;
                    head[other] = b * cos + a * sin;
                }
            };
            for head in 0..self.heads as usize {
                let at = head * width + latent;
                let mut turned: Vec<f32> =
                    (0..width - latent).map(|i| q.get(token, at + i)).collect();
                turn(&mut turned);
                turned.iter().enumerate().for_each(|(i, value)| q.set(token, at + i, *value));
            }
            let mut row: Vec<f32> =
                (0..width).map(|i| x.get(token, self.from as usize + i)).collect();
            self.norm.apply(memory, &mut row[..latent]);
            turn(&mut row[latent..]);
            let slot = tables.kv_slot.get(token) as usize;
            let store = |(i, value): (usize, &f32)| self.kv.set(memory, slot, 0, 0, i, *value);
            row.iter().enumerate().for_each(store);
        }
    }
}
