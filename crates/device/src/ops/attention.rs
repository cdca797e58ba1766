//! Attention over pages. Token j of row r has position p = kv_len[r] − q_len[r] + j and
//! attends to positions `max(0, p + 1 − window) ..= p` of its row's pages; where it is not causal, up to
//! `min(kv_len[r], p + window) − 1`:
//! `out = softmax(scale · q·kᵀ) · v`, scores and sums in f32, one rounding when storing. With a soft cap a score s
//! becomes `cap · tanh(s / cap)` before the softmax.
//! Query head h reads KV head h / (q_heads / kv_heads). Where there are sinks, a head's softmax has one more term, e to the
//! power of its sink, which has no value: weights then add up to less than 1.
//!
//! Rows and lengths come from the step's tables on the device, so the launch never depends on them. With `single`
//! every live row has exactly one token and row r's token index is r. Pad rows have kv_len 0: their output is zeros
//! in the decode form; pad tokens of the varlen form are not written. A row whose kv_len is less than its tokens, or
//! more than its page table holds, attends to nothing: devices write zeros for it, or do not write its tokens. With
//! `last_only` tokens that are not the last of their row may be left out.
//! With `even` every live row has as many tokens, more than one, and rows follow each other without gaps: drafts that
//! are verified. Devices may then write zeros for pad rows.
//! With [`Pick::Fixed`] the order of every sum follows from the token's position alone, whatever step it is part of.

mod cuda;

use super::{
    Access, Bindable, Contract, Division, Keep, Named, SpanVisitor, StepSize, Traffic, require,
    require_division, require_fit, require_float, require_pages, require_scratch, require_vector,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::Step;
use crate::cpu::tables::Tables;
use crate::cpu::view::Matrix;
use crate::cuda::launch::{Lowered, Target};
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::variant::{AttentionVariant, Pick, Variant};
use crate::{Result, Span, StepState};
pub use chain::AttentionChain;
use serde::{Deserialize, Serialize};
use std::ops::Range;

mod avx512;
pub(crate) mod chain;
mod fast;
mod ggml;
mod portable;
pub(crate) mod variant;

/// Attention over KV pages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Attention<O: Operands = Bound> {
    /// tokens × (q_heads + 2·kv_heads)·head_dim; only the q part is read.
    pub qkv: O::Value,
    /// Query heads.
    pub q_heads: u32,
    /// Pages, this step's tokens included.
    pub kv: O::Cache,
    /// One element per query head: a learned score that joins the softmax, soft caps and scale aside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sinks: Option<O::Weight>,
    /// Rows, lengths and page tables.
    #[serde(skip_serializing_if = "unset")]
    pub state: O::Late<StepState>,
    /// tokens × q_heads·head_dim.
    pub out: O::Value,
    /// Multiplies q·k; usually head_dim^-0.5.
    pub scale: f32,
    /// The soft cap of scores, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub softcap: Option<f32>,
    /// A token sees at most this many tokens back, itself included; as many ahead where it is not causal.
    pub window: Option<u32>,
    /// A token does not see those after it.
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    pub causal: bool,
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

fn yes() -> bool {
    true
}

// The signature is serde's.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_true(value: &bool) -> bool {
    *value
}

impl<O: Operands> Bindable for Attention<O> {
    type O = O;
    type Bound = Attention;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.qkv, Access::Read));
        visit(Operand::Cache(&mut self.kv));
        if let Some(sinks) = &mut self.sinks {
            visit(Operand::Weight(sinks));
        }
        visit(Operand::Value(&mut self.out, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Attention, B::Error> {
        let size = to.size();
        Ok(Attention {
            qkv: to.value(self.qkv)?,
            q_heads: self.q_heads,
            kv: to.cache(self.kv)?,
            sinks: self.sinks.map(|sinks| to.weight(sinks)).transpose()?,
            state: to.state_of(self.kv),
            out: to.value(self.out)?,
            scale: self.scale,
            softcap: self.softcap,
            window: self.window,
            causal: self.causal,
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

impl Contract for Attention {
    fn check(&self) -> Result<()> {
        self.state.check()?;
        require_fit(&self.qkv, Self::NAME, "qkv")?;
        require_fit(&self.out, Self::NAME, "out")?;
        require_float(&self.qkv, Self::NAME, "qkv")?;
        require_float(&self.out, Self::NAME, "out")?;
        let limits = &self.state.limits;
        require_pages(&self.kv, limits.page_size, Self::NAME)?;
        let whole = self.q_heads.is_multiple_of(self.kv.heads) && self.q_heads > 0;
        require(whole, Self::NAME, || {
            format!("{} query heads over {} kv heads", self.q_heads, self.kv.heads)
        })?;
        let wide = u64::from(self.q_heads) * u64::from(self.kv.head_dim);
        require(u64::from(self.qkv.cols) >= wide, Self::NAME, || "qkv lacks q columns".into())?;
        require(u64::from(self.out.cols) == wide, Self::NAME, || {
            "out is not q_heads·head_dim wide".into()
        })?;
        let cap = self.softcap.unwrap_or(1.0);
        require(cap.is_finite() && cap > 0.0, Self::NAME, || format!("a soft cap of {cap}"))?;
        require(self.window != Some(0), Self::NAME, || "a window of 0 tokens".into())?;
        if let Some(sinks) = &self.sinks {
            require_vector(sinks, self.q_heads, Self::NAME, "sinks")?;
        }
        require_scratch(self.scratch, Self::NAME)?;
        require(self.out.rows == self.qkv.rows, Self::NAME, || {
            "out and qkv differ in rows".into()
        })?;
        require(self.causal || !self.single, Self::NAME, || {
            "a decode step has nothing after its tokens to attend to".into()
        })?;
        let (rows, tokens) = (self.rows, self.out.rows);
        let division = Division { rows, tokens, single: self.single, even: self.even };
        require_division(&division, limits, Self::NAME)
    }

    fn describe(&self) -> String {
        AttentionChain::from(self).describe()
    }

    fn traffic(&self) -> Traffic {
        AttentionChain::from(self).traffic()
    }

    fn step_size(&self) -> StepSize {
        StepSize::rows(self.rows)
    }

    fn scratch_slot(&mut self) -> Option<&mut Option<Span>> {
        Some(&mut self.scratch)
    }

    fn pick(&self) -> Option<Pick<Variant>> {
        Some(self.pick.map(Variant::Attention))
    }

    fn set_pick(&mut self, pick: Pick<Variant>) -> bool {
        pick.narrow(Variant::attention).map(|pick| self.pick = pick).is_some()
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        AttentionChain::from(self).visit_spans(visit);
    }

    fn scratch_bytes(&self, target: &Target) -> u64 {
        AttentionChain::from(self).scratch_bytes(target)
    }

    fn shape(&self) -> Option<String> {
        AttentionChain::from(self).shape_text()
    }

    fn candidates(&self, target: &Target) -> Vec<Variant> {
        AttentionChain::from(self).candidates(target)
    }
}

impl Attention {
    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        AttentionChain::from(self).prepare(memory, lowering)
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        AttentionChain::from(self).lower(target)
    }

    /// The positions that a token at `position` of a row of `length` tokens attends to.
    fn seen(&self, position: usize, length: usize) -> Range<usize> {
        let window = self.window.map_or(usize::MAX, |window| window as usize);
        let first = (position + 1).saturating_sub(window);
        let end =
            if self.causal { position + 1 } else { position.saturating_add(window).min(length) };
        first..end
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
                let seen = self.seen(position, tables.kv_len.get(row) as usize);
                let seat = tables.row_seat.get(row) as usize;
                (0..self.q_heads as usize).for_each(|head| {
                    self.reference_head(memory, &tables, seat, token, seen.clone(), head)
                });
            }
        }
    }

    fn reference_head(
        &self,
        memory: &CpuMemory,
        tables: &Tables,
        seat: usize,
        token: usize,
        seen: Range<usize>,
        head: usize,
    ) {
        let (qkv, out) = (Matrix::new(memory, &self.qkv), Matrix::new(memory, &self.out));
        let dim = self.kv.head_dim as usize;
        let size = self.kv.page_size as usize;
        let kv_head = head / (self.q_heads / self.kv.heads) as usize;
        let slot = |p: usize| tables.page(seat, p) * size + p % size;
        let score = |p: usize| {
            let dot: f64 = (0..dim)
                .map(|i| {
                    let k = self.kv.get(memory, slot(p), 0, kv_head, i);
                    f64::from(qkv.get(token, head * dim + i)) * f64::from(k)
                })
                .sum();
            let score = f64::from(self.scale) * dot;
            self.softcap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh())
        };
        let scores: Vec<f64> = seen.clone().map(score).collect();
        let sink = self.sinks.as_ref().map(|sinks| Matrix::new(memory, sinks).get(0, head));
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let beside = sink.map_or(0.0, |sink| (f64::from(sink) - max).exp());
        let total = weights.iter().sum::<f64>() + beside;
        for i in 0..dim {
            let sum: f64 = seen
                .clone()
                .zip(&weights)
                .map(|(p, weight)| weight * f64::from(self.kv.get(memory, slot(p), 1, kv_head, i)))
                .sum();
            out.set(token, head * dim + i, (sum / total) as f32);
        }
    }
}
