//! A linear with what its kernels compute around it: a norm of its input; what adapters add to its sums; an addition, an
//! activation or a rotation of these; preparation of the next op's norm. It has the content of a [`Fused`] op that a linear's kernel runs,
//! field by field.
//!
//! The norm is applied to each row of `x` in f32 and rounded to `x`'s dtype. (A device may round `x · weight` instead and
//! apply the row's scale to the f32 sum: the same relative rounding, one exchange fewer.) What follows works on the f32
//! sums and rounds once, when storing.

use crate::op::{
    Activate, Activation, Add, Fused, FusedKernel, GateMul, Linear, Lora, Norm, RmsNorm, RopeKv,
};
use crate::ops::fused::Inside;
use crate::ops::{
    Access, Contract, Named, SpanVisitor, Traffic, norm_bytes, require, require_norm,
};
use crate::variant::{LinearVariant, Pick};
use crate::{DType, Op, Region, Result, Span, Tensor};
use serde::{Deserialize, Serialize};

/// What is computed from the sums of a linear before they are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Epilogue {
    /// y = sum
    Store,
    /// y = residual + sum; the residual may be y itself.
    Residual(Tensor),
    /// Weight rows alternate gate and up: `y[i] = act(sum[2i]) · sum[2i + 1]`.
    GateMul(Activation),
    /// y = act(sum)
    Activate(Activation),
}

/// How two linears with a norm between them cooperate, where kernels can: it saves the launch of the norm. The result
/// is the same either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormHandoff {
    /// Nothing.
    #[default]
    Nothing,
    /// The next op applies this norm to `y` and finds `y` prepared in its scratch.
    Produce(Norm),
    /// The previous op has prepared `x` for `norm` in this op's scratch.
    Consume,
}

impl NormHandoff {
    /// Whether it is [`NormHandoff::Nothing`].
    pub fn is_nothing(&self) -> bool {
        *self == NormHandoff::Nothing
    }
}

/// A linear and the ops fused with it.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearChain {
    /// rows × k activations.
    pub x: Tensor,
    /// n × k weights.
    pub w: Tensor,
    /// n elements added to each row's sums.
    pub bias: Option<Tensor>,
    /// Applied to `x` first.
    pub norm: Option<Norm>,
    /// What adapters add to the sums: `x` (with the norm applied), `base` and `y` are this op's.
    pub lora: Option<Box<Lora>>,
    /// Applied last.
    pub epilogue: Epilogue,
    /// Applied to `y` afterwards; the columns of k and v of `y` then need not be stored. Only with
    /// [`Epilogue::Store`].
    pub rope: Option<Box<RopeKv>>,
    /// rows × n, or rows × n/2 for [`Epilogue::GateMul`].
    pub y: Tensor,
    /// Rows past this device-side count need not be computed.
    pub live: Option<Span>,
    /// What it prepares for the next op, or the previous op prepared for it.
    pub handoff: NormHandoff,
    /// Room for partial sums and prepared inputs.
    pub scratch: Option<Span>,
    /// Which kernel.
    pub pick: Pick<LinearVariant>,
}

impl From<&Linear> for LinearChain {
    fn from(linear: &Linear) -> LinearChain {
        let Linear { x, w, bias, y, live, scratch, pick } = *linear;
        LinearChain { bias, live, scratch, pick, ..LinearChain::new(x, w, y) }
    }
}

impl From<LinearChain> for Op {
    fn from(chain: LinearChain) -> Op {
        let LinearChain { w, bias, live, scratch, pick, y, handoff, .. } = chain;
        let mut inside = Inside::new(chain.x.span.arena);
        let mut members = Vec::new();
        let x = chain.norm.map_or(chain.x, |norm| {
            let x = chain.x;
            let y = inside.tensor(x.dtype, x.rows, x.cols);
            members.push(Op::RmsNorm(RmsNorm { x, norm, y }));
            y
        });
        let stores = chain.epilogue == Epilogue::Store;
        let sums = match stores && chain.lora.is_none() {
            true => y,
            false => inside.tensor(DType::F32, x.rows, w.rows),
        };
        members.push(Op::Linear(Linear { x, w, bias, y: sums, live, scratch, pick }));
        members.extend(chain.lora.map(|lora| {
            let (base, y) = (sums, if stores { y } else { sums });
            Op::Lora(Lora { x, base, y, live, scratch: None, ..*lora })
        }));
        match chain.epilogue {
            Epilogue::Store => {}
            Epilogue::Residual(a) => members.push(Op::Add(Add { a, b: sums, y, live })),
            Epilogue::GateMul(act) => {
                members.push(Op::GateMul(GateMul { x: sums, act, y, live }));
            }
            Epilogue::Activate(act) => {
                members.push(Op::Activate(Activate { x: sums, act, y, live }));
            }
        }
        members.extend(chain.rope.map(|rope| Op::RopeKv(*rope)));
        match <[Op; 1]>::try_from(members) {
            Ok([linear]) if handoff.is_nothing() => linear,
            Ok(linear) => {
                Fused { members: linear.into(), kernel: FusedKernel::Linear { handoff } }.into()
            }
            Err(members) => Fused { members, kernel: FusedKernel::Linear { handoff } }.into(),
        }
    }
}

impl LinearChain {
    /// The op's name in errors.
    pub(crate) const NAME: &'static str = <Linear as Named>::NAME;

    /// `y = x · wᵀ` and nothing else.
    pub fn new(x: Tensor, w: Tensor, y: Tensor) -> LinearChain {
        LinearChain {
            x,
            w,
            bias: None,
            norm: None,
            lora: None,
            epilogue: Epilogue::Store,
            rope: None,
            y,
            live: None,
            handoff: NormHandoff::Nothing,
            scratch: None,
            pick: Pick::Best,
        }
    }

    /// A linear, alone or fused; `None` for every other op.
    pub fn of(op: &Op) -> Option<LinearChain> {
        if let Op::Linear(linear) = op {
            return Some(linear.into());
        }
        let Op::Fused(Fused { members, kernel: FusedKernel::Linear { handoff } }) = op else {
            return None;
        };
        LinearChain::of_members(members, *handoff)
    }

    /// Members that a kernel of linears can run.
    pub(crate) fn of_members(members: &[Op], handoff: NormHandoff) -> Option<LinearChain> {
        let inside = |tensor: &Tensor| tensor.span.region == Region::Inside;
        let (norm, rest) = match members {
            [Op::RmsNorm(norm), rest @ ..] => (Some(norm), rest),
            rest => (None, rest),
        };
        let [Op::Linear(linear), rest @ ..] = rest else { return None };
        let mut chain = LinearChain { handoff, ..linear.into() };
        if let Some(RmsNorm { x, norm, y }) = norm {
            if *y != linear.x || !inside(y) || y.dtype != x.dtype {
                return None;
            }
            (chain.x, chain.norm) = (*x, Some(*norm));
        }
        let sums =
            |tensor: &Tensor| *tensor == linear.y && inside(tensor) && tensor.dtype == DType::F32;
        let (lora, rest) = match rest {
            [Op::Lora(lora), rest @ ..] => (Some(lora), rest),
            rest => (None, rest),
        };
        if let Some(lora) = lora {
            let stored = if rest.is_empty() { !inside(&lora.y) } else { lora.y == lora.base };
            if lora.x != linear.x || !sums(&lora.base) || lora.live != linear.live || !stored {
                return None;
            }
            (chain.lora, chain.y) = (Some(Box::new(lora.clone())), lora.y);
        }
        if rest.is_empty() {
            return Some(chain);
        }
        if let [Op::Add(add)] = rest
            && sums(&add.b)
            && add.live == linear.live
        {
            (chain.epilogue, chain.y) = (Epilogue::Residual(add.a), add.y);
            return Some(chain);
        }
        if let [Op::GateMul(gate)] = rest
            && sums(&gate.x)
            && gate.live == linear.live
        {
            (chain.epilogue, chain.y) = (Epilogue::GateMul(gate.act), gate.y);
            return Some(chain);
        }
        if let [Op::Activate(activate)] = rest
            && sums(&activate.x)
            && activate.live == linear.live
        {
            (chain.epilogue, chain.y) = (Epilogue::Activate(activate.act), activate.y);
            return Some(chain);
        }
        let ([Op::RopeKv(rope)], None) = (rest, lora) else { return None };
        chain.rope = Some(Box::new(rope.clone()));
        (rope.qkv == linear.y).then_some(chain)
    }

    /// Checks what the members do not check themselves.
    pub(crate) fn check(&self) -> Result<()> {
        if let Epilogue::GateMul(act) = self.epilogue {
            let problem = || format!("no kernel applies {} to its sums", act.name());
            require(act.is_epilogue(), Self::NAME, problem)?;
        }
        match &self.handoff {
            NormHandoff::Nothing => Ok(()),
            NormHandoff::Produce(norm) => require_norm(norm, self.y.cols, Self::NAME),
            NormHandoff::Consume => require(self.norm.is_some(), Self::NAME, || {
                "takes a prepared input without a norm".into()
            }),
        }
    }

    pub(crate) fn describe(&self) -> String {
        let mut text = format!("linear {} · {}", self.x, self.w);
        if self.norm.is_some() {
            let ready = self.handoff == NormHandoff::Consume;
            text.insert_str(0, if ready { "prepared norm + " } else { "norm + " });
        }
        if self.bias.is_some() {
            text.push_str(" + bias");
        }
        if let Some(lora) = &self.lora {
            text.push_str(&format!(" + {} adapters of rank {}", lora.slots(), lora.b.cols));
        }
        match self.epilogue {
            Epilogue::Store => {}
            Epilogue::Residual(_) => text.push_str(" + residual"),
            Epilogue::GateMul(act) => text.push_str(&format!(", {}·mul", act.name())),
            Epilogue::Activate(act) => text.push_str(&format!(", {}", act.name())),
        }
        if let Some(rope) = &self.rope {
            text.push_str(if rope.q_norm.is_some() { ", qk-norm + rope" } else { ", rope" });
        }
        if matches!(self.handoff, NormHandoff::Produce(_)) {
            text.push_str(", prepares the next norm");
        }
        text + &self.pick.suffix()
    }

    pub(crate) fn traffic(&self) -> Traffic {
        let residual = match &self.epilogue {
            Epilogue::Residual(residual) => residual.bytes(),
            Epilogue::Store | Epilogue::GateMul(_) | Epilogue::Activate(_) => 0,
        };
        let bias = self.bias.as_ref().map_or(0, Tensor::bytes);
        let rope = self.rope.as_ref().map_or(0, |rope| rope.norm_bytes());
        // Of one adapter.
        let lora = self.lora.as_ref().map_or(0, |lora| lora.adapter_bytes());
        Traffic {
            weights: self.w.bytes() + bias + norm_bytes(&self.norm) + rope + lora,
            values: self.x.bytes() + self.y.bytes() + residual,
        }
    }

    pub(crate) fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.x.span, Access::Read);
        visit(self.w.span, Access::Read);
        if let Some(norm) = &self.norm {
            visit(norm.weight.span, Access::Read);
        }
        if let Some(bias) = &self.bias {
            visit(bias.span, Access::Read);
        }
        if let Some(lora) = &self.lora {
            lora.visit_own(visit);
        }
        if let Epilogue::Residual(residual) = &self.epilogue {
            visit(residual.span, Access::Read);
        }
        if let Some(live) = self.live {
            visit(live, Access::Read);
        }
        if let NormHandoff::Produce(norm) = &self.handoff {
            visit(norm.weight.span, Access::Read);
        }
        if let Some(scratch) = self.scratch {
            let takes = self.handoff == NormHandoff::Consume;
            visit(scratch, if takes { Access::Update } else { Access::Write });
        }
        visit(self.y.span, Access::Write);
        if let Some(rope) = &self.rope {
            // Rotation rewrites only what this op has just written.
            rope.visit_spans(&mut |span, access| {
                if span != self.y.span {
                    visit(span, access);
                }
            });
        }
    }

    /// The residual, and the output that takes its place.
    pub(crate) fn in_place(&self) -> Option<(Tensor, Tensor)> {
        match &self.epilogue {
            Epilogue::Residual(residual) => Some((*residual, self.y)),
            Epilogue::Store | Epilogue::GateMul(_) | Epilogue::Activate(_) => None,
        }
    }

    /// A text of everything that decides how long it takes.
    pub(crate) fn shape_text(&self) -> Option<String> {
        let norm = if self.norm.is_some() { "norm+" } else { "" };
        let norm = if self.handoff == NormHandoff::Consume { "prepared+" } else { norm };
        let bias = if self.bias.is_some() { "+bias" } else { "" };
        let lora = self
            .lora
            .as_ref()
            .map(|lora| format!("+{}x{}x{}", lora.slots(), lora.parts.count(), lora.b.cols));
        let lora = lora.unwrap_or_default();
        let end = match self.epilogue {
            Epilogue::Store if self.rope.is_some() => "+rope",
            Epilogue::Store => "",
            Epilogue::Residual(_) if !self.handoff.is_nothing() => "+residual+prepare",
            Epilogue::Residual(_) => "+residual",
            Epilogue::GateMul(Activation::Silu) => "+silu",
            // The only other one that `check` admits is GELU by tanh.
            Epilogue::GateMul(_) => "+gelu",
            Epilogue::Activate(_) => "+act",
        };
        let (x, w, y) = (self.x.dtype, self.w.dtype, self.y.dtype);
        let (rows, k, n) = (self.x.rows, self.x.cols, self.w.rows);
        Some(format!("{norm}linear{bias}{lora}{end} {rows}x{k}x{n} {x:?} {w:?} {y:?}"))
    }
}
