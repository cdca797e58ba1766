//! Attention with the rotation before it: a [`Fused`] op of attention's kernel, field by field.

use crate::op::{Attention, Fused, FusedKernel, KvLayer, RopeKv};
use crate::ops::{Access, Contract, Named, SpanVisitor, Traffic, require, visit_step_tables};
use crate::variant::{AttentionVariant, Pick};
use crate::{Op, Result, Span, StepState, Tensor};

/// See the top of this file.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionChain {
    /// tokens × (q_heads + 2·kv_heads)·head_dim; only the q part is read, unless `rope` is set.
    pub qkv: Tensor,
    /// Query heads.
    pub q_heads: u32,
    /// Pages, this step's tokens included (or written by `rope`).
    pub kv: KvLayer,
    /// Rows, lengths and page tables.
    pub state: StepState,
    /// tokens × q_heads·head_dim.
    pub out: Tensor,
    /// Multiplies q·k.
    pub scale: f32,
    /// A token sees at most this many tokens back, itself included.
    pub window: Option<u32>,
    /// Rows of the bucket.
    pub rows: u32,
    /// Every row has exactly one token (decode).
    pub single: bool,
    /// Only the last token of each row is computed, or more.
    pub last_only: bool,
    /// Done to qkv first. Only with `single`.
    pub rope: Option<Box<RopeKv>>,
    /// Partial results of splits.
    pub scratch: Option<Span>,
    /// Which kernel.
    pub pick: Pick<AttentionVariant>,
}

impl From<&Attention> for AttentionChain {
    fn from(attention: &Attention) -> AttentionChain {
        let Attention {
            qkv,
            q_heads,
            kv,
            state,
            out,
            scale,
            window,
            rows,
            single,
            last_only,
            scratch,
            pick,
        } = *attention;
        AttentionChain {
            qkv,
            q_heads,
            kv,
            state,
            out,
            scale,
            window,
            rows,
            single,
            last_only,
            scratch,
            pick,
            rope: None,
        }
    }
}

impl From<AttentionChain> for Op {
    fn from(chain: AttentionChain) -> Op {
        let AttentionChain {
            qkv,
            q_heads,
            kv,
            state,
            out,
            scale,
            window,
            rows,
            single,
            last_only,
            scratch,
            pick,
            rope,
        } = chain;
        let attention = Op::Attention(Attention {
            qkv,
            q_heads,
            kv,
            state,
            out,
            scale,
            window,
            rows,
            single,
            last_only,
            scratch,
            pick,
        });
        let Some(rope) = rope else { return attention };
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

    /// Members that a kernel of attention can run.
    pub(crate) fn of_members(members: &[Op]) -> Option<AttentionChain> {
        let [Op::RopeKv(rope), Op::Attention(attention)] = members else { return None };
        let rope = Some(Box::new(rope.clone()));
        Some(AttentionChain { rope, ..attention.into() })
    }

    /// What members do not check themselves.
    pub(crate) fn check(&self) -> Result<()> {
        require(self.rope.is_none() || self.single, Self::NAME, || {
            "fused rope needs single".into()
        })?;
        let Some(rope) = &self.rope else { return Ok(()) };
        let same = rope.qkv == self.qkv && rope.q_heads == self.q_heads;
        require(same && rope.kv == self.kv && rope.state == self.state, Self::NAME, || {
            "what is rotated is not what is attended to".into()
        })
    }

    /// What a token gets may depend on nothing but its own position and pages.
    pub(crate) fn fixed(&self) -> bool {
        self.pick == Pick::Fixed
    }

    pub(crate) fn describe(&self) -> String {
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

    pub(crate) fn traffic(&self) -> Traffic {
        let weights = self.rope.as_ref().map_or(0, |rope| rope.norm_bytes());
        Traffic { weights, values: self.qkv.bytes() + self.out.bytes() }
    }

    pub(crate) fn visit_spans(&self, visit: SpanVisitor<'_>) {
        match &self.rope {
            Some(rope) => rope.visit_spans(visit),
            None => {
                visit(self.qkv.span, Access::Read);
                visit_step_tables(&self.state, visit);
                visit(self.kv.span, Access::Read);
            }
        }
        if let Some(scratch) = self.scratch {
            visit(scratch, Access::Write);
        }
        visit(self.out.span, Access::Write);
    }

    /// What decides how long it takes, in words; `None` unless it is a decode step's.
    pub(crate) fn shape_text(&self) -> Option<String> {
        self.single.then(|| self.decode_shape())
    }

    fn decode_shape(&self) -> String {
        let kv = &self.kv;
        let (rows, q_heads, window) = (self.rows, self.q_heads, self.window.unwrap_or(0));
        format!(
            "attention {rows}x{q_heads}:{}x{} {:?} window {window}",
            kv.heads, kv.head_dim, kv.dtype
        )
    }
}
