//! `kernels/recurrent.cu`: one token of a few rows through a recurrent layer of the delta rule: the linear that makes the
//! gates of its heads, a convolution, a scan, and a norm of each head with a gate. A cluster has the heads that share a key.

use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, aligned, code};
use crate::op::{Conv, Epilogue, Gate, Gated, GatedNorm, LinearChain, NormHandoff, Rule, Scan};
use crate::ops::scan::LENGTH_EPS;
use crate::ops::{Access, Contract, SpanVisitor, Traffic, require};
use crate::{DType, Error, Op, Result, Span, Tensor};

/// Threads of a block; columns of a head's matrix that it has; columns of the residual stream that they take at a time.
const THREADS: u32 = 128;
const COLUMNS: u32 = 32;
const CHUNK: u32 = THREADS * 8;
/// Blocks of a cluster that every GPU takes.
const MOST_BLOCKS: u32 = 8;
/// Chunks of a row that a thread can hold.
const MOST_CHUNKS: u32 = 4;
/// Rows up to which it is expected to be faster than a kernel for each member; 0 leaves them apart.
const FASTER_ROWS: u32 = 8;

/// The name in errors.
const NAME: &str = "recurrent";

/// A convolution, a scan of its result, and a gated norm of that; before them perhaps the linear that makes the scan's gates.
#[derive(Clone, Debug)]
pub(crate) struct Recurrent<'a> {
    members: &'a [Op],
    gates: Option<LinearChain>,
    conv: &'a Conv,
    scan: &'a Scan,
    gated: &'a Gated,
}

impl<'a> Recurrent<'a> {
    /// `None` unless the members are these.
    pub(crate) fn of_members(members: &'a [Op]) -> Option<Self> {
        let (gates, rest) = match members {
            [gates, rest @ ..] if rest.len() == 3 => (Some(LinearChain::of(gates)?), rest),
            rest => (None, rest),
        };
        let [Op::Conv(conv), Op::Scan(scan), Op::Gated(gated)] = rest else { return None };
        Some(Recurrent { members, gates, conv, scan, gated })
    }

    /// Checks what the members do not check themselves.
    pub(crate) fn check(&self) -> Result<()> {
        let Recurrent { gates, conv, scan, gated, .. } = self;
        let plain = |chain: &LinearChain| {
            chain.bias.is_none()
                && chain.rope.is_none()
                && chain.lora.is_none()
                && chain.epilogue == Epilogue::Store
                && chain.handoff == NormHandoff::Nothing
        };
        let made = gates.as_ref().is_none_or(|chain| {
            plain(chain)
                && chain.y == scan.gates
                && scan.from == 0
                && chain.w.rows == scan.gates.cols
        });
        let chained = made && scan.x == conv.y && gated.x == scan.y && conv.state == scan.state;
        let chained = chained && conv.single && scan.single;
        require(chained, NAME, || {
            "the members are not one token's, or do not work on each other's results".into()
        })?;
        // Blocks of other heads still read them.
        let read = gates.as_ref().map_or(&scan.gates, |chain| &chain.x);
        let apart = |tensor: &Tensor| !tensor.span.overlaps(gated.y.span);
        require([&conv.x, &gated.z, read].into_iter().all(apart), NAME, || {
            "the result overwrites what it is made of".into()
        })
    }

    pub(crate) fn describe(&self) -> String {
        let gates = if self.gates.is_some() { "gates · " } else { "" };
        let members = [self.conv.describe(), self.scan.describe(), self.gated.describe()];
        format!("{gates}{}", members.join(" · "))
    }

    pub(crate) fn traffic(&self) -> Traffic {
        let all = self.members.iter().map(Op::traffic);
        let (weights, values) = all.fold((0, 0), |sum, t| (sum.0 + t.weights, sum.1 + t.values));
        // What members pass on is written by one and read by the next.
        let mut inside = 2 * (self.conv.y.bytes() + self.scan.y.bytes());
        inside += self.gates.as_ref().map_or(0, |chain| 2 * chain.y.bytes());
        Traffic { weights, values: values.saturating_sub(inside) }
    }

    /// The kernel writes nothing of what members pass on, whose places may be one another's.
    pub(crate) fn visit_spans(&self, visit: SpanVisitor<'_>) {
        let mut made: Vec<Span> = Vec::new();
        for member in self.members {
            member.visit_spans(&mut |span, access| match access {
                Access::Read if made.contains(&span) => {}
                Access::Write => made.push(span),
                Access::Read | Access::Update => visit(span, access),
            });
        }
        visit(self.gated.y.span, Access::Write);
    }

    /// A text of everything that decides how long it takes.
    pub(crate) fn shape_text(&self) -> Option<String> {
        None
    }

    /// Whether it is expected to be faster than a kernel for each member.
    pub(crate) fn is_faster(&self) -> bool {
        self.conv.rows <= FASTER_ROWS
    }

    /// Blocks of a cluster: those of all heads that share a key.
    fn blocks(&self) -> u32 {
        self.scan.heads / self.scan.groups * (self.scan.value / COLUMNS)
    }

    /// The norm of each head, if it is one that the kernel knows.
    fn norm(&self) -> Option<&GatedNorm> {
        let value = self.scan.value;
        let norm = self.gated.norm.as_ref()?;
        (norm.group == value && !norm.after && norm.norm.weight.cols == value).then_some(norm)
    }

    /// Why the kernel cannot run these members on `target`; `None` if it can.
    fn unfit(&self, target: &Target) -> Option<&'static str> {
        let Recurrent { gates, conv, scan, .. } = self;
        let Scan { key, value, .. } = **scan;
        let halves = |tensor: &Tensor| tensor.dtype == DType::BF16 && aligned(tensor);
        let made = gates.as_ref().is_none_or(|chain| {
            let norm = chain.norm.as_ref().map(|norm| &norm.weight);
            let known = |weight: &Tensor| {
                matches!(weight.dtype, DType::BF16 | DType::F32) && aligned(weight)
            };
            halves(&chain.x)
                && halves(&chain.w)
                && chain.w.stride == chain.w.cols
                && chain.w.cols.is_multiple_of(CHUNK)
                && chain.w.cols <= MOST_CHUNKS * CHUNK
                && norm.is_none_or(known)
        });
        let limits = [
            (target.capability.0 == 9, "the kernel is for compute capability 9"),
            (
                scan.rule == Rule::Delta && scan.skip.is_none(),
                "the scan has no delta rule, or passes values through",
            ),
            (
                key.is_multiple_of(16) && value.is_multiple_of(COLUMNS) && value > 0,
                "keys are no multiple of 16 elements, or values none of 32",
            ),
            (
                (1..=MOST_BLOCKS).contains(&self.blocks()),
                "the heads that share a key need more than eight blocks",
            ),
            (self.norm().is_some(), "heads have no norm of their own before the gate"),
            (made, "gates are not made of bf16 by whole chunks"),
            (conv.w.rows == scan.x.cols, "the convolution has other channels than the scan"),
            (!scan.turns, "groups take turns"),
            (scan.state.limits.logged() == 0, "the state has a log of drafts"),
        ];
        limits.into_iter().find(|(holds, _)| !holds).map(|(_, why)| why)
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let refused = |problem: String| Error::Contract { op: NAME.into(), problem };
        if let Some(why) = self.unfit(target) {
            return Err(refused(format!("no kernel: {why}")));
        }
        let Recurrent { conv, scan, gated, .. } = self;
        let norm = self.norm().ok_or_else(|| refused("there is no norm".into()))?;
        let (s, limits) = (&conv.state, &conv.state.limits);
        let kernel = self
            .defined(Kernel::new(target, "recurrent", "recurrent"), norm)?
            .grid(self.blocks(), scan.groups, conv.rows)
            .threads(THREADS)
            .cluster(self.blocks())
            .tensors(&[&conv.x, &conv.w])
            .optional(conv.bias.map(|bias| bias.span))
            .tensors(&[&conv.carry, &scan.gates, &scan.a, &scan.dt, &scan.carry])
            .tensors(&[&gated.z, &norm.norm.weight, &gated.y, &s.row_seat, &s.kv_len])
            .ints(&[conv.w.rows, limits.seats, limits.context()])
            .ints(&[conv.from, conv.x.stride, conv.w.stride, conv.carry.stride])
            .ints(&[scan.from, scan.gates.stride, scan.carry.stride])
            .ints(&[gated.from, gated.z.stride, gated.y.stride])
            .arg(Arg::F32(LENGTH_EPS))
            .arg(Arg::F32(norm.norm.eps));
        let gates = self.gates.as_ref();
        let before = gates.and_then(|chain| chain.norm.as_ref());
        let kernel = kernel
            .optional(gates.map(|chain| chain.x.span))
            .optional(before.map(|norm| norm.weight.span))
            .optional(gates.map(|chain| chain.w.span))
            .ints(&[gates.map_or(0, |chain| chain.x.stride)])
            .arg(Arg::F32(before.map_or(0.0, |norm| norm.eps)));
        Ok(vec![kernel.lowered()])
    }

    fn defined(&self, kernel: Kernel, norm: &GatedNorm) -> Result<Kernel> {
        let Recurrent { gates, conv, scan, gated, .. } = self;
        let at = scan.columns(0);
        let before = gates.as_ref().and_then(|chain| chain.norm.as_ref());
        let optional =
            |tensor: Option<&Tensor>| tensor.map_or(Ok(0), |tensor| code(tensor.dtype, NAME));
        Ok(kernel
            .defines(&[("KEY", scan.key), ("VALUE", scan.value), ("HEADS", scan.heads)])
            .defines(&[("SHARE", scan.heads / scan.groups), ("TAPS", conv.w.cols)])
            .defines(&[("Q_AT", at.query as u32), ("K_AT", at.key as u32)])
            .defines(&[("V_AT", at.value as u32), ("BIAS", u32::from(conv.bias.is_some()))])
            .defines(&[("SILU", u32::from(gated.gate == Gate::Silu))])
            .defines(&[("GATES", u32::from(gates.is_some()))])
            .defines(&[("NORMED", u32::from(before.is_some()))])
            .defines(&[("H", gates.as_ref().map_or(0, |chain| chain.w.cols))])
            .defines(&[
                ("XT", code(conv.x.dtype, NAME)?),
                ("WT", code(conv.w.dtype, NAME)?),
                ("BT", optional(conv.bias.as_ref())?),
                ("CT", code(conv.y.dtype, NAME)?),
                ("GT", code(scan.gates.dtype, NAME)?),
                ("AT", code(scan.a.dtype, NAME)?),
                ("DT", code(scan.dt.dtype, NAME)?),
                ("ST", code(scan.y.dtype, NAME)?),
                ("ZT", code(gated.z.dtype, NAME)?),
                ("OT", code(norm.norm.weight.dtype, NAME)?),
                ("NT", optional(before.map(|norm| &norm.weight))?),
                ("YT", code(gated.y.dtype, NAME)?),
            ]))
    }
}
