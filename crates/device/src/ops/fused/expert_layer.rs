//! `kernels/experts_layer.cu`: a norm, a router and its experts as one kernel, for a few tokens. Its blocks wait for each
//! other, as those of `kernels/persistent.cu` do: one for each multiprocessor, all resident at the same time.

use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, aligned, code};
use crate::op::{Experts, RmsNorm, Route};
use crate::ops::linear::scaled::scales_of;
use crate::ops::{Access, Contract, SpanVisitor, Traffic, require, require_scratch};
use crate::scaled::BLOCK;
use crate::{DType, Error, Op, Result, Span, Tensor};

/// Warps that compute; one more fetches.
const WARPS: u32 = 8;
/// Bytes of a stage: rows of gate and up, or eight rows of an expert's down.
const STAGE: u32 = 16 << 10;
/// Stages that were measured to be enough, and how many of them are in flight: of bf16, of e4m3.
const MOST_STAGES: u32 = 12;
const FLYING: u32 = 4;
const FLYING_FP8: u32 = 3;
/// Tokens: more than that, and a chain of kernels that reads each expert once is faster.
const MOST_ROWS: u32 = 4;
/// Tokens up to which it was measured to be faster than that chain.
const FASTER_ROWS: u32 = 2;
/// Replicas of what every block reads.
const COPIES: u32 = 2;
/// Columns of a row that the warps take at a time.
const CHUNK: u32 = WARPS * 32 * 8;

/// The name in errors.
const NAME: &str = "expert layer";

/// A norm, a router over its result, and the experts that it chooses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertLayer<'a> {
    norm: &'a RmsNorm,
    route: &'a Route,
    experts: &'a Experts,
    /// Where blocks exchange logits and activations.
    exchange: Option<Span>,
}

impl<'a> ExpertLayer<'a> {
    /// `None` unless the members are these three.
    pub(crate) fn of_members(members: &'a [Op], exchange: Option<Span>) -> Option<Self> {
        let [Op::RmsNorm(norm), Op::Route(route), Op::Experts(experts)] = members else {
            return None;
        };
        Some(ExpertLayer { norm, route, experts, exchange })
    }

    /// Checks what the members do not check themselves.
    pub(crate) fn check(&self) -> Result<()> {
        let ExpertLayer { norm, route, experts, .. } = *self;
        let chained = route.x == norm.y && experts.x == norm.y && experts.choice == route.y;
        let chained = chained && experts.experts == route.w.rows && route.live == experts.live;
        require(chained, NAME, || "the members do not work on each other's results".into())?;
        require(experts.residual != Some(norm.y), NAME, || {
            "what the norm gives is not kept, so it cannot be the residual".into()
        })?;
        require_scratch(self.exchange, NAME)
    }

    pub(crate) fn describe(&self) -> String {
        format!("rms_norm · {}", self.experts.describe())
    }

    pub(crate) fn traffic(&self) -> Traffic {
        let residual = self.experts.residual.as_ref().map_or(0, Tensor::bytes);
        let values = [&self.norm.x, &self.route.y, &self.experts.y].map(Tensor::bytes);
        let norm = self.norm.norm.weight.bytes();
        let [route, experts] = [self.route.traffic(), self.experts.traffic()].map(|t| t.weights);
        Traffic { weights: norm + route + experts, values: values.iter().sum::<u64>() + residual }
    }

    /// What the norm gives is written, or stays inside: it is undefined afterwards.
    pub(crate) fn visit_spans(&self, visit: SpanVisitor<'_>) {
        let ExpertLayer { norm, route, experts, exchange } = *self;
        let weights = [&norm.norm.weight, &route.w, &experts.gate_up, &experts.down];
        let read = weights.into_iter().chain([&norm.x]).chain(&route.bias).chain(&experts.residual);
        read.for_each(|tensor| visit(tensor.span, Access::Read));
        if let Some(live) = route.live {
            visit(live, Access::Read);
        }
        for span in [experts.load, exchange].into_iter().flatten() {
            visit(span, Access::Update);
        }
        visit(norm.y.span, Access::Write);
        visit(route.y.span, Access::Write);
        visit(experts.y.span, Access::Write);
    }

    /// The residual and the result, which may be the same.
    pub(crate) fn in_place(&self) -> Option<(Tensor, Tensor)> {
        self.experts.in_place()
    }

    /// A text of everything that decides how long it takes.
    pub(crate) fn shape_text(&self) -> Option<String> {
        None
    }

    /// Whether it was measured to be faster than a kernel for each member.
    pub(crate) fn is_faster(&self) -> bool {
        self.norm.x.rows <= FASTER_ROWS
    }

    /// Bytes of the exchange: generation and arrivals, logits, activations, in words of 64 bits. 0 if the kernel cannot run
    /// the members.
    pub(crate) fn exchange_bytes(&self, target: &Target) -> u64 {
        if self.unfit(target).is_some() {
            return 0;
        }
        let token = self.route.w.rows + self.experts.top() * self.experts.down.cols / 2;
        8 * (32 + u64::from(COPIES) * u64::from(self.norm.x.rows) * u64::from(token))
    }

    /// Whether experts are e4m3 with blocks of scales.
    fn fp8(&self) -> bool {
        let Experts { gate_up, down, .. } = self.experts;
        (gate_up.dtype, down.dtype) == (DType::F8Turns, DType::F8Block)
    }

    fn flying(&self) -> u32 {
        if self.fp8() { FLYING_FP8 } else { FLYING }
    }

    /// Bytes of shared memory beside the ring: an upper bound of the kernel's static arrays.
    fn fixed(&self) -> u32 {
        let (rows, experts) = (self.norm.x.rows, self.route.w.rows);
        let own = experts.div_ceil(64);
        let sums = 2 * WARPS * (8 * 16 + 4) * 4;
        let (top, inner) = (self.experts.top(), self.experts.down.cols);
        let each = 4 * WARPS * (1 + own) + experts * 4 + top * 8;
        let blocks = (rows * self.norm.x.cols / 8).div_ceil(64) / 16 + 2;
        let scales = if self.fp8() { 4 * blocks * top * (inner / BLOCK as u32) } else { 0 };
        sums + rows * each + top * inner * 2 + scales + 1024
    }

    fn stages(&self, target: &Target) -> u32 {
        let room = target.shared_per_block.saturating_sub(self.fixed());
        (room / STAGE).min(MOST_STAGES)
    }

    /// Why the kernel cannot run these members on `target`; `None` if it can.
    fn unfit(&self, target: &Target) -> Option<&'static str> {
        let ExpertLayer { norm, route, experts, .. } = *self;
        let (rows, wide, inner) = (norm.x.rows, norm.x.cols, experts.down.cols);
        let halves = |tensor: &Tensor| tensor.dtype == DType::BF16 && aligned(tensor);
        let dense = |tensor: &Tensor| halves(tensor) && tensor.stride == tensor.cols;
        let weight = &norm.norm.weight;
        let values = [&norm.x, &experts.y].into_iter().chain(&experts.residual).all(halves);
        let limits = [
            (target.capability.0 == 9, "the kernel is for compute capability 9"),
            ((1..=MOST_ROWS).contains(&rows), "it is for one to four tokens"),
            (
                values
                    && dense(&route.w)
                    && (self.fp8() || [&experts.gate_up, &experts.down].into_iter().all(dense)),
                "weights or activations are neither dense bf16 nor blocks of e4m3",
            ),
            (
                matches!(weight.dtype, DType::BF16 | DType::F32) && aligned(weight),
                "the norm's weight is not aligned bf16 or f32",
            ),
            (
                experts.clamp.is_none() && experts.biases().next().is_none(),
                "experts have biases or limited gates",
            ),
            (wide == CHUNK || wide == 2 * CHUNK, "the hidden size is not 2048 or 4096"),
            (inner.is_multiple_of(8) && 16 * inner <= STAGE, "experts are too large"),
            (
                !self.fp8() || inner.is_multiple_of(BLOCK as u32) && experts.top() % 2 == 0,
                "e4m3 experts are no whole blocks, or an odd number of them is chosen",
            ),
            (
                self.fixed() <= 48 << 10 && self.stages(target) > self.flying(),
                "a block has too little shared memory",
            ),
        ];
        limits.into_iter().find(|(holds, _)| !holds).map(|(_, why)| why)
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let refused = |problem: String| Error::Contract { op: NAME.into(), problem };
        if let Some(why) = self.unfit(target) {
            return Err(refused(format!("no kernel: {why}")));
        }
        let needs = self.exchange_bytes(target);
        let exchange = self.exchange.filter(|exchange| exchange.len >= needs).ok_or_else(|| {
            let room = self.exchange.map_or(0, |exchange| exchange.len);
            refused(format!("the kernel needs {needs} bytes to exchange and has {room}"))
        })?;
        let ExpertLayer { norm, route, experts, .. } = *self;
        let kernel = Kernel::new(target, "experts_layer", "experts_layer")
            .defines(&[("H", norm.x.cols), ("I", experts.down.cols), ("ROWS", norm.x.rows)])
            .defines(&[("BLOCKS", target.sms), ("STAGES", self.stages(target))])
            .defines(&[("FLYING", self.flying()), ("COPIES", COPIES)])
            .define("ACT", experts.act.code())
            .define("NT", code(norm.norm.weight.dtype, NAME)?);
        let (weight, scales) = match self.fp8() {
            true => ("FP8_BLOCK", vec![scales_of(&experts.gate_up), scales_of(&experts.down)]),
            false => ("PLAIN", Vec::new()),
        };
        let kernel = route
            .choice(kernel.define("WEIGHT", weight))
            .grid(target.sms, 1, 1)
            .threads((WARPS + 1) * 32)
            .shared(STAGE * self.stages(target))
            .tensors(&[&norm.x, &norm.norm.weight, &route.w])
            .optional(route.bias.map(|bias| bias.span))
            .tensors(&[&experts.gate_up, &experts.down])
            .optional(experts.residual.map(|residual| residual.span))
            .tensors(&[&experts.y, &route.y])
            .spans(&[exchange])
            .optional(route.live)
            .ints(&[(exchange.len / 8).min(u32::MAX.into()) as u32, norm.x.stride])
            .ints(&[experts.residual.map_or(0, |residual| residual.stride), experts.y.stride])
            .arg(Arg::F32(norm.norm.eps))
            .arg(Arg::F32(route.routing.scale))
            .optional(experts.load)
            .spans(&scales);
        Ok(vec![kernel.lowered()])
    }
}
