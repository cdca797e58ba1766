//! Causal attention over pages. Token j of row r has position p = kv_len[r] − q_len[r] + j and
//! attends to positions `max(0, p + 1 − window) ..= p` of its row's pages:
//! `out = softmax(scale · q·kᵀ) · v`, scores and sums in f32, one rounding when storing.
//! Query head h reads KV head h / (q_heads / kv_heads).
//!
//! Rows and lengths come from the step's tables on the device, so the launch never depends on them.
//! With `single` every live row has exactly one token and row r's token index is r. Pad rows have
//! kv_len 0: their output is zeros in the decode form; pad tokens of the varlen form are not written. A row whose
//! kv_len is less than its tokens, or more than its page table holds, sees nothing either: devices write zeros for
//! it, or leave its tokens.
//! With `last_only` tokens that are not the last of their row may be left out.
//! With [`Pick::Fixed`] the order of every sum follows from the token's position alone, whatever step it is part of.

mod cuda;

use super::{
    Access, Contract, SpanVisitor, StepSize, Traffic, require, require_fit, require_float,
    require_pages, require_scratch,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::tables::Tables;
use crate::cpu::view::Matrix;
use crate::op::Attention;
use crate::variant::{Pick, Variant};
use crate::{Result, Span};

mod avx512;
mod fast;
mod ggml;
mod portable;
pub(crate) mod variant;

impl Contract for Attention {
    const NAME: &'static str = "attention";

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
        require(self.rows <= limits.rows && self.out.rows <= limits.tokens, Self::NAME, || {
            format!(
                "{} rows and {} tokens; the tables have {} and {}",
                self.rows, self.out.rows, limits.rows, limits.tokens
            )
        })?;
        require(self.window != Some(0), Self::NAME, || "a window of 0 tokens".into())?;
        require_scratch(self.scratch, Self::NAME)?;
        require(self.out.rows == self.qkv.rows, Self::NAME, || {
            "out and qkv differ in rows".into()
        })?;
        require(!self.single || self.rows == self.out.rows, Self::NAME, || {
            "a decode step has one token per row".into()
        })?;
        require(self.rope.is_none() || self.single, Self::NAME, || {
            "fused rope needs single".into()
        })?;
        let Some(rope) = &self.rope else { return Ok(()) };
        rope.check()?;
        let same = rope.qkv == self.qkv && rope.q_heads == self.q_heads;
        require(same && rope.kv == self.kv && rope.state == self.state, Self::NAME, || {
            "what is rotated is not what is attended to".into()
        })
    }

    fn describe(&self) -> String {
        let mut text = String::new();
        if let Some(rope) = &self.rope {
            text.push_str(if rope.q_norm.is_some() { "qk-norm + rope + " } else { "rope + " });
        }
        let form = if self.single { "decode" } else { "varlen" };
        let (q, kv, dim) = (self.q_heads, self.kv.heads, self.kv.head_dim);
        text.push_str(&format!("attention {form} {} rows {q}/{kv}×{dim}", self.rows));
        if let Some(window) = self.window {
            text.push_str(&format!(" window {window}"));
        }
        if self.last_only {
            text.push_str(", last tokens only");
        }
        text + &self.pick.suffix()
    }

    fn traffic(&self) -> Traffic {
        let weights = self.rope.as_ref().map_or(0, |rope| rope.norm_bytes());
        Traffic { weights, values: self.qkv.bytes() + self.out.bytes() }
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
        self.pick = match pick {
            Pick::Best => Pick::Best,
            Pick::Rule => Pick::Rule,
            Pick::Fixed => Pick::Fixed,
            Pick::Named(Variant::Attention(variant)) => Pick::Named(variant),
            Pick::Named(Variant::Linear(_) | Variant::OneNode) => return false,
        };
        true
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        match &self.rope {
            Some(rope) => rope.visit_spans(visit),
            None => {
                visit(self.qkv.span, Access::Read);
                super::visit_step_tables(&self.state, visit);
                visit(self.kv.span, Access::Read);
            }
        }
        if let Some(scratch) = self.scratch {
            visit(scratch, Access::Write);
        }
        visit(self.out.span, Access::Write);
    }
}

impl Attention {
    /// What a token gets may depend on nothing but its own position and pages.
    pub(crate) fn fixed(&self) -> bool {
        self.pick == Pick::Fixed
    }

    pub(crate) fn reference(&self, memory: &CpuMemory) {
        if let Some(rope) = &self.rope {
            rope.reference(memory);
        }
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
                (0..self.q_heads as usize).for_each(|head| {
                    self.reference_head(memory, &tables, seat, token, position, head)
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
        position: usize,
        head: usize,
    ) {
        let (qkv, out) = (Matrix::new(memory, &self.qkv), Matrix::new(memory, &self.out));
        let dim = self.kv.head_dim as usize;
        let size = self.kv.page_size as usize;
        let kv_head = head / (self.q_heads / self.kv.heads) as usize;
        let first = self.window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
        let slot = |p: usize| tables.page(seat, p) * size + p % size;
        let score = |p: usize| {
            let dot: f64 = (0..dim)
                .map(|i| {
                    let k = self.kv.get(memory, slot(p), 0, kv_head, i);
                    f64::from(qkv.get(token, head * dim + i)) * f64::from(k)
                })
                .sum();
            f64::from(self.scale) * dot
        };
        let scores: Vec<f64> = (first..=position).map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let total: f64 = weights.iter().sum();
        for i in 0..dim {
            let sum: f64 = (first..=position)
                .zip(&weights)
                .map(|(p, weight)| weight * f64::from(self.kv.get(memory, slot(p), 1, kv_head, i)))
                .sum();
            out.set(token, head * dim + i, (sum / total) as f32);
        }
    }
}
