//! Attention over pages of latents. Token j of row r has position p = kv_len[r] − q_len[r] + j and attends to positions
//! `0 ..= p` of its row's pages: `out[h] = softmax(scale · q[h]·rowᵀ) · row[..latent]`, where a row of a page is key and
//! value of all heads at once. Scores and sums in f32, one rounding when storing.
//!
//! Rows, lengths, pad rows, `single`, `even` and `last_only` are as in [`Attention`](super::attention::Attention). With
//! [`Pick::Fixed`] the order of every sum follows from the token's position alone, whatever step it is part of.

mod cuda;
mod fast;

use super::{
    Access, Bindable, Contract, Division, Keep, Named, SpanVisitor, StepSize, Traffic, require,
    require_division, require_latents, require_matrices, require_scratch,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::tables::Tables;
use crate::cpu::view::Matrix;
use crate::cuda::launch::Target;
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::variant::{AttentionVariant, Pick, Variant};
use crate::{Result, Span, StepState};
use serde::{Deserialize, Serialize};

/// Attention over pages of latents.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct LatentAttention<O: Operands = Bound> {
    /// tokens × heads·head_dim.
    pub q: O::Value,
    /// Query heads.
    pub heads: u32,
    /// Pages of latents, this step's tokens included.
    pub kv: O::Cache,
    /// Rows, lengths and page tables.
    #[serde(skip_serializing_if = "unset")]
    pub state: O::Late<StepState>,
    /// tokens × heads·latent.
    pub out: O::Value,
    /// Multiplies scores.
    pub scale: f32,
    /// Rows of the bucket.
    #[serde(skip_serializing_if = "unset")]
    pub rows: O::Late<u32>,
    /// Every row has exactly one token (decode); lets kernels use a fixed grid of rows.
    #[serde(skip_serializing_if = "unset")]
    pub single: O::Late<bool>,
    /// Every row has exactly so many tokens, more than one, and row r's first is r times as many: drafts are verified.
    #[serde(skip_serializing_if = "unset")]
    pub even: O::Late<Option<u32>>,
    /// Only the last token of each row is needed; a device may leave the others' rows of `out` unchanged.
    #[serde(skip_serializing_if = "unset")]
    pub last_only: O::Late<bool>,
    /// Partial results of splits; devices say how much they need.
    #[serde(skip_serializing_if = "unset")]
    pub scratch: O::Late<Option<Span>>,
    /// Which kernel.
    #[serde(skip_serializing_if = "unset")]
    pub pick: O::Late<Pick<AttentionVariant>>,
}

impl<O: Operands> Bindable for LatentAttention<O> {
    type O = O;
    type Bound = LatentAttention;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.q, Access::Read));
        visit(Operand::Cache(&mut self.kv));
        visit(Operand::Value(&mut self.out, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<LatentAttention, B::Error> {
        let size = to.size();
        Ok(LatentAttention {
            q: to.value(self.q)?,
            heads: self.heads,
            kv: to.cache(self.kv)?,
            state: to.state_of(self.kv),
            out: to.value(self.out)?,
            scale: self.scale,
            rows: size.rows,
            single: size.single,
            even: (size.q_len > 1).then_some(size.q_len),
            last_only: to.last_only(self.out),
            scratch: None,
            pick: Pick::Best,
        })
    }

    /// With `last_only`, other tokens are left out; they are computed later if a request needs them.
    fn keeps(&self) -> Keep<O::Value> {
        Keep::IfOnlyGathered(self.out)
    }
}

impl Contract for LatentAttention {
    fn check(&self) -> Result<()> {
        self.state.check()?;
        require_matrices(&[(&self.q, "q"), (&self.out, "out")], Self::NAME)?;
        let (limits, heads) = (&self.state.limits, u64::from(self.heads));
        require_latents(&self.kv, limits.page_size, Self::NAME)?;
        let (read, made) = (heads * u64::from(self.kv.head_dim), heads * u64::from(self.latent()));
        let fits = u64::from(self.q.cols) == read && u64::from(self.out.cols) == made;
        require(fits && heads > 0 && self.out.rows == self.q.rows, Self::NAME, || {
            format!("q is {}, out is {}, not {read} and {made} columns", self.q, self.out)
        })?;
        require_scratch(self.scratch, Self::NAME)?;
        let (rows, tokens) = (self.rows, self.out.rows);
        let division = Division { rows, tokens, single: self.single, even: self.even };
        require_division(&division, limits, Self::NAME)
    }

    fn describe(&self) -> String {
        let kind = if self.single { "decode" } else { "varlen" };
        let LatentAttention { heads, kv, rows, .. } = self;
        let (latent, rest) = (self.latent(), kv.head_dim - self.latent());
        let suffix = self.pick.suffix();
        format!("latent_attention {kind} {rows} rows, {heads} heads {latent}+{rest}{suffix}")
    }

    fn traffic(&self) -> Traffic {
        Traffic { weights: 0, values: self.q.bytes() + self.out.bytes() }
    }

    fn step_size(&self) -> StepSize {
        StepSize::rows(self.rows)
    }

    fn scratch_slot(&mut self) -> Option<&mut Option<Span>> {
        Some(&mut self.scratch)
    }

    fn scratch_bytes(&self, target: &Target) -> u64 {
        self.part_room(target)
    }

    fn pick(&self) -> Option<Pick<Variant>> {
        Some(self.pick.map(Variant::Attention))
    }

    fn set_pick(&mut self, pick: Pick<Variant>) -> bool {
        pick.narrow(Variant::attention).map(|pick| self.pick = pick).is_some()
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.q.span, Access::Read);
        visit(self.kv.span, Access::Read);
        super::visit_step_tables(&self.state, visit);
        visit(self.state.token_row.span, Access::Read);
        if let Some(scratch) = self.scratch {
            visit(scratch, Access::Write);
        }
        visit(self.out.span, Access::Write);
    }
}

impl LatentAttention {
    /// Elements of a latent.
    fn latent(&self) -> u32 {
        self.kv.latent.unwrap_or(0)
    }

    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let tables = Tables::new(memory, &self.state);
        let out = Matrix::new(memory, &self.out);
        for row in 0..self.rows as usize {
            let tokens = if self.single {
                row..row + 1
            } else {
                tables.q_start.get(row) as usize..tables.q_start.get(row + 1) as usize
            };
            for token in tokens.clone() {
                let Some(old) = tables.kept(row, tokens.len()) else {
                    (0..out.cols).for_each(|col| out.set(token, col, 0.0));
                    continue;
                };
                let position = old + (token - tokens.start);
                let seat = tables.row_seat.get(row) as usize;
                for head in 0..self.heads as usize {
                    self.reference_head(memory, &tables, seat, token, position, head);
                }
            }
        }
    }

    fn reference_head(
        &self,
        memory: &CpuMemory,
        tables: &Tables,
        seat: usize,
        token: usize,
        position: usize,
        head: usize,
    ) {
        let (q, out) = (Matrix::new(memory, &self.q), Matrix::new(memory, &self.out));
        let (width, latent) = (self.kv.head_dim as usize, self.latent() as usize);
        let size = self.kv.page_size as usize;
        let get = |p: usize, i: usize| {
            let slot = tables.page(seat, p) * size + p % size;
            f64::from(self.kv.get(memory, slot, 0, 0, i))
        };
        let score = |p: usize| {
            let dot = (0..width).map(|i| f64::from(q.get(token, head * width + i)) * get(p, i));
            f64::from(self.scale) * dot.sum::<f64>()
        };
        let scores: Vec<f64> = (0..=position).map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let total: f64 = weights.iter().sum();
        for i in 0..latent {
            let terms = weights.iter().enumerate().map(|(p, weight)| weight * get(p, i));
            out.set(token, head * latent + i, (terms.sum::<f64>() / total) as f32);
        }
    }
}
