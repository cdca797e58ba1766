//! Attention with the rotation before it: a [`Fused`] op that attention's kernel runs.

use crate::op::{Attention, Fused, FusedKernel, RopeKv};
use crate::ops::{Access, Contract, Named, SpanVisitor, Traffic, require, visit_step_tables};
use crate::variant::Pick;
use crate::{Op, Result, Tensor};

/// Attention and, optionally, the rotation before it.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionChain {
    /// Attention. With `rope` all of qkv is read, and this step's k and v are not in their pages yet.
    pub attention: Attention,
    /// Applied to qkv first. Only with [`Attention::single`] or [`Attention::even`].
    pub rope: Option<Box<RopeKv>>,
}

impl From<&Attention> for AttentionChain {
    fn from(attention: &Attention) -> AttentionChain {
        AttentionChain { attention: attention.clone(), rope: None }
    }
}

impl From<AttentionChain> for Op {
    fn from(chain: AttentionChain) -> Op {
        let attention = Op::Attention(chain.attention);
        let Some(rope) = chain.rope else { return attention };
        let members = vec![Op::RopeKv(*rope), attention];
        Fused { members, kernel: FusedKernel::Attention }.into()
    }
}

impl AttentionChain {
    /// The op's name in errors.
    pub(crate) const NAME: &'static str = <Attention as Named>::NAME;

    /// Attention, alone or fused; `None` for every other op.
    pub fn of(op: &Op) -> Option<AttentionChain> {
        if let Op::Attention(attention) = op {
            return Some(attention.into());
        }
        let Op::Fused(Fused { members, kernel: FusedKernel::Attention }) = op else { return None };
        AttentionChain::of_members(members)
    }

    /// Members that attention's kernel can run.
    pub(crate) fn of_members(members: &[Op]) -> Option<AttentionChain> {
        let [Op::RopeKv(rope), Op::Attention(attention)] = members else { return None };
        let rope = Some(Box::new(rope.clone()));
        Some(AttentionChain { attention: attention.clone(), rope })
    }

    /// Checks what the members do not check themselves.
    pub(crate) fn check(&self) -> Result<()> {
        let whole_rows = self.attention.single || self.attention.even.is_some();
        require(self.rope.is_none() || whole_rows, Self::NAME, || {
            "fused rope needs rows of equally many tokens".into()
        })?;
        let Some(rope) = &self.rope else { return Ok(()) };
        let same = rope.qkv == self.attention.qkv && rope.q_heads == self.attention.q_heads;
        require(
            same && rope.kv == self.attention.kv && rope.state == self.attention.state,
            Self::NAME,
            || "rope and attention differ in qkv, pages or tables".into(),
        )
    }

    /// Whether a token's result must depend on nothing but its own position and pages.
    pub(crate) fn fixed(&self) -> bool {
        self.attention.pick == Pick::Fixed
    }

    pub(crate) fn describe(&self) -> String {
        let mut text = String::new();
        if let Some(rope) = &self.rope {
            text.push_str(if rope.q_norm.is_some() { "qk-norm + rope + " } else { "rope + " });
        }
        let form = match (self.attention.single, self.attention.even) {
            (true, _) => "decode".to_owned(),
            (false, Some(each)) => format!("of {each} tokens each in"),
            (false, None) => "varlen".to_owned(),
        };
        let (q, kv, dim) =
            (self.attention.q_heads, self.attention.kv.heads, self.attention.kv.head_dim);
        text.push_str(&format!("attention {form} {} rows {q}/{kv}×{dim}", self.attention.rows));
        if !self.attention.causal {
            text.push_str(" both ways");
        }
        if let Some(window) = self.attention.window {
            text.push_str(&format!(" window {window}"));
        }
        if let Some(cap) = self.attention.softcap {
            text.push_str(&format!(" soft cap {cap}"));
        }
        if self.attention.sinks.is_some() {
            text.push_str(" with sinks");
        }
        if self.attention.last_only {
            text.push_str(", last tokens only");
        }
        text + &self.attention.pick.suffix()
    }

    pub(crate) fn traffic(&self) -> Traffic {
        let sinks = self.attention.sinks.as_ref().map_or(0, Tensor::bytes);
        let weights = self.rope.as_ref().map_or(0, |rope| rope.norm_bytes()) + sinks;
        Traffic { weights, values: self.attention.qkv.bytes() + self.attention.out.bytes() }
    }

    pub(crate) fn visit_spans(&self, visit: SpanVisitor<'_>) {
        match &self.rope {
            Some(rope) => rope.visit_spans(visit),
            None => {
                visit(self.attention.qkv.span, Access::Read);
                visit_step_tables(&self.attention.state, visit);
                visit(self.attention.kv.span, Access::Read);
                if let Some(scales) = self.attention.kv.scales {
                    visit(scales, Access::Read);
                }
            }
        }
        if let Some(sinks) = &self.attention.sinks {
            visit(sinks.span, Access::Read);
        }
        if let Some(scratch) = self.attention.scratch {
            visit(scratch, Access::Write);
        }
        visit(self.attention.out.span, Access::Write);
    }

    /// A text of everything that decides how long it takes; `None` unless it belongs to a decode step.
    pub(crate) fn shape_text(&self) -> Option<String> {
        self.attention.single.then(|| self.decode_shape())
    }

    fn decode_shape(&self) -> String {
        let kv = &self.attention.kv;
        let (rows, q_heads, window) =
            (self.attention.rows, self.attention.q_heads, self.attention.window.unwrap_or(0));
        let cap = self.attention.softcap.map_or(String::new(), |cap| format!(" cap {cap}"));
        format!(
            "attention {rows}x{q_heads}:{}x{} {:?} window {window}{cap}",
            kv.heads, kv.head_dim, kv.dtype
        )
    }
}
