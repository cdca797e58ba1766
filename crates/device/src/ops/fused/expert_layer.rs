//! `kernels/experts_layer.cu`: a norm, a router, its experts and an MLP that every token goes through besides as one kernel,
//! for a few tokens. Its blocks wait for each other, as those of `kernels/persistent.cu` do: one for each multiprocessor, all
//! resident at the same time.

use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, aligned, code};
use crate::op::{AddGated, Epilogue, Experts, LinearChain, NormHandoff, RmsNorm, Route};
use crate::ops::linear::scaled::scales_of;
use crate::ops::{Access, Contract, SpanVisitor, Traffic, require, require_scratch};
use crate::scaled::BLOCK;
use crate::{DType, Error, Op, Result, Span, Tensor};

/// Warps that compute; one more fetches.
const WARPS: u32 = 8;
/// Bytes of a stage: rows of gate and up, or eight rows of an expert's down. Wide experts have larger ones.
const STAGE: u32 = 16 << 10;
const LARGEST_STAGE: u32 = 24 << 10;
/// Stages that were measured to be enough, and how many of them are in flight: of bf16, of e4m3.
const MOST_STAGES: u32 = 12;
const FLYING: u32 = 4;
const FLYING_FP8: u32 = 3;
/// Of bf16 where eight rows of down are half a stage at most.
const FLYING_NARROW: u32 = 6;
/// Tokens: more than that, and a chain of kernels that reads each expert once is faster.
const MOST_ROWS: u32 = 4;
/// Tokens up to which it was measured to be faster than that chain.
const FASTER_ROWS: u32 = 2;
/// The same with a shared MLP; 0 leaves its nodes apart.
const FASTER_ROWS_SHARED: u32 = 2;
/// Replicas of what every block reads.
const COPIES: u32 = 2;
/// Columns of a row that the warps take at a time.
const CHUNK: u32 = WARPS * 32 * 8;

/// The name in errors.
const NAME: &str = "expert layer";

/// An MLP beside the experts.
#[derive(Clone, Debug)]
struct Shared<'a> {
    /// Gate and up, whose rows take turns, and the activation.
    up: LinearChain,
    down: LinearChain,
    /// Adds it times a gate; without, `down` adds it to what the experts give.
    gated: Option<&'a AddGated>,
}

/// A norm, a router over its result, and the experts that it chooses; perhaps an MLP over the same result, added to what
/// they give.
#[derive(Clone, Debug)]
pub(crate) struct ExpertLayer<'a> {
    norm: &'a RmsNorm,
    route: &'a Route,
    experts: &'a Experts,
    shared: Option<Shared<'a>>,
    /// Where blocks exchange logits and activations.
    exchange: Option<Span>,
}

impl<'a> Shared<'a> {
    /// `None` unless the members are its linears, and an addition with a gate if they do not add.
    fn of_members(members: &'a [Op]) -> Option<Self> {
        let (up, down, rest) = match members {
            [up, down, rest @ ..] => (up, down, rest),
            [] | [_] => return None,
        };
        let gated = match rest {
            [] => None,
            [Op::AddGated(gated)] => Some(gated),
            [..] => return None,
        };
        Some(Shared { up: LinearChain::of(up)?, down: LinearChain::of(down)?, gated })
    }

    /// Columns of its activations.
    fn inner(&self) -> u32 {
        self.down.w.cols
    }

    /// The result of the layer.
    fn y(&self) -> &Tensor {
        self.gated.map_or(&self.down.y, |gated| &gated.y)
    }

    /// What it reads besides the norm's result and what the experts give.
    fn weights(&self) -> impl Iterator<Item = &Tensor> {
        [&self.up.w, &self.down.w].into_iter().chain(self.gated.map(|gated| &gated.w))
    }

    /// Whether it works on the result of this norm, and adds to that of these experts.
    fn follows(&self, norm: &RmsNorm, experts: &Experts) -> bool {
        let Shared { up, down, gated } = self;
        let plain = |chain: &LinearChain| {
            chain.bias.is_none()
                && chain.norm.is_none()
                && chain.lora.is_none()
                && chain.handoff == NormHandoff::Nothing
                && chain.live == experts.live
        };
        let added = match gated {
            None => down.epilogue == Epilogue::Residual(experts.y),
            Some(gated) => {
                down.epilogue == Epilogue::Store
                    && (gated.a, gated.b, gated.x) == (experts.y, down.y, norm.y)
                    && gated.live == experts.live
            }
        };
        plain(up)
            && plain(down)
            && added
            && (up.x, down.x) == (norm.y, up.y)
            && up.epilogue == Epilogue::GateMul(experts.act)
    }
}

impl<'a> ExpertLayer<'a> {
    /// `None` unless the members are these.
    pub(crate) fn of_members(members: &'a [Op], exchange: Option<Span>) -> Option<Self> {
        let [Op::RmsNorm(norm), Op::Route(route), Op::Experts(experts), rest @ ..] = members else {
            return None;
        };
        let shared = match rest {
            [] => None,
            rest => Some(Shared::of_members(rest)?),
        };
        Some(ExpertLayer { norm, route, experts, shared, exchange })
    }

    /// The result.
    fn y(&self) -> &Tensor {
        self.shared.as_ref().map_or(&self.experts.y, Shared::y)
    }

    /// Checks what the members do not check themselves.
    pub(crate) fn check(&self) -> Result<()> {
        let ExpertLayer { norm, route, experts, shared, exchange } = self;
        let chained = route.x == norm.y && experts.x == norm.y && experts.choice == route.y;
        let chained = chained && experts.experts == route.w.rows && route.live == experts.live;
        let shared = shared.as_ref().is_none_or(|shared| shared.follows(norm, experts));
        require(chained && shared, NAME, || {
            "the members do not work on each other's results".into()
        })?;
        require(experts.residual != Some(norm.y), NAME, || {
            "what the norm gives is not kept, so it cannot be the residual".into()
        })?;
        // Blocks read the residual while others write.
        let apart =
            |residual: Tensor| residual == *self.y() || !residual.span.overlaps(self.y().span);
        require(experts.residual.is_none_or(apart), NAME, || {
            "the result overwrites a part of the residual".into()
        })?;
        require_scratch(*exchange, NAME)
    }

    pub(crate) fn describe(&self) -> String {
        let gated = |shared: &Shared<'_>| if shared.gated.is_some() { " times a gate" } else { "" };
        let shared = |shared| format!(" + {} for all{}", Shared::inner(shared), gated(shared));
        let shared = self.shared.as_ref().map(shared).unwrap_or_default();
        format!("rms_norm · {}{shared}", self.experts.describe())
    }

    pub(crate) fn traffic(&self) -> Traffic {
        let residual = self.experts.residual.as_ref().map_or(0, Tensor::bytes);
        let values = [&self.norm.x, &self.route.y, self.y()].map(Tensor::bytes);
        let norm = self.norm.norm.weight.bytes();
        let [route, experts] = [self.route.traffic(), self.experts.traffic()].map(|t| t.weights);
        let shared: u64 = self.shared.iter().flat_map(Shared::weights).map(Tensor::bytes).sum();
        Traffic {
            weights: norm + route + experts + shared,
            values: values.iter().sum::<u64>() + residual,
        }
    }

    /// What the norm gives is written, or stays inside: it is undefined afterwards. The kernel writes nothing of what else lies
    /// between members, whose places may be one another's.
    pub(crate) fn visit_spans(&self, visit: SpanVisitor<'_>) {
        let ExpertLayer { norm, route, experts, shared, exchange } = self;
        let weights = [&norm.norm.weight, &route.w, &experts.gate_up, &experts.down];
        let read = weights.into_iter().chain([&norm.x]).chain(&route.bias).chain(&experts.residual);
        let read = read.chain(shared.iter().flat_map(Shared::weights));
        read.for_each(|tensor| visit(tensor.span, Access::Read));
        if let Some(live) = route.live {
            visit(live, Access::Read);
        }
        for span in [experts.load, *exchange].into_iter().flatten() {
            visit(span, Access::Update);
        }
        visit(norm.y.span, Access::Write);
        visit(route.y.span, Access::Write);
        visit(self.y().span, Access::Write);
    }

    /// The residual and the result, which may be the same.
    pub(crate) fn in_place(&self) -> Option<(Tensor, Tensor)> {
        self.experts.residual.map(|residual| (residual, *self.y()))
    }

    /// A text of everything that decides how long it takes.
    pub(crate) fn shape_text(&self) -> Option<String> {
        None
    }

    /// Whether it was measured to be faster than a kernel for each member.
    pub(crate) fn is_faster(&self) -> bool {
        let most = if self.shared.is_some() { FASTER_ROWS_SHARED } else { FASTER_ROWS };
        self.norm.x.rows <= most
    }

    /// Bytes of the exchange: generation and arrivals, logits, activations, in words of 64 bits. 0 if the kernel cannot run
    /// the members.
    pub(crate) fn exchange_bytes(&self, target: &Target) -> u64 {
        if self.unfit(target).is_some() {
            return 0;
        }
        let acts = self.experts.top() * self.experts.down.cols + self.shared_inner();
        let token = self.route.w.rows + acts / 2;
        8 * (32 + u64::from(COPIES) * u64::from(self.norm.x.rows) * u64::from(token))
    }

    /// Whether experts are e4m3 with blocks of scales.
    fn fp8(&self) -> bool {
        let Experts { gate_up, down, .. } = self.experts;
        (gate_up.dtype, down.dtype) == (DType::F8Turns, DType::F8Block)
    }

    fn shared_inner(&self) -> u32 {
        self.shared.as_ref().map_or(0, Shared::inner)
    }

    /// Bytes of a stage: eight rows of an expert's down fit.
    fn stage(&self) -> u32 {
        let down = self.experts.down.cols.saturating_mul(16).next_multiple_of(128);
        if self.fp8() { STAGE } else { down.max(STAGE) }
    }

    fn flying(&self) -> u32 {
        let narrow = self.shared.is_some() && 16 * self.experts.down.cols <= STAGE / 2;
        match (self.fp8(), narrow) {
            (true, _) => FLYING_FP8,
            (false, true) => FLYING_NARROW,
            (false, false) => FLYING,
        }
    }

    /// Bytes of shared memory beside the ring: an upper bound of the kernel's static arrays.
    fn fixed(&self) -> u32 {
        let (rows, experts) = (self.norm.x.rows, self.route.w.rows);
        let own = experts.div_ceil(64) + u32::from(self.shared.is_some());
        let sums = 2 * WARPS * (8 * 16 + 4) * 4;
        let (top, inner) = (self.experts.top(), self.experts.down.cols);
        let each = 4 * WARPS * (1 + own) + experts * 4 + top * 8;
        let blocks = (rows * self.norm.x.cols / 8).div_ceil(64) / 16 + 2;
        let scales = if self.fp8() { 4 * blocks * top * (inner / BLOCK as u32) } else { 0 };
        sums + rows * each + (top * inner + self.shared_inner()) * 2 + scales + 1024
    }

    fn stages(&self, target: &Target) -> u32 {
        let room = target.shared_per_block.saturating_sub(self.fixed());
        (room / self.stage()).min(MOST_STAGES)
    }

    /// Why the kernel cannot run the shared MLP; `None` if it can or there is none.
    fn shared_unfit(&self) -> Option<&'static str> {
        let shared = self.shared.as_ref()?;
        let halves = |tensor: &Tensor| {
            tensor.dtype == DType::BF16 && aligned(tensor) && tensor.stride == tensor.cols
        };
        let parts = shared.inner().saturating_mul(16).div_ceil(self.stage());
        let limits = [
            (
                !self.fp8() && shared.weights().all(halves),
                "experts or the MLP beside them are not dense bf16",
            ),
            (
                shared.inner().is_multiple_of(8 * parts),
                "the MLP beside the experts has no parts of eight columns",
            ),
        ];
        limits.into_iter().find(|(holds, _)| !holds).map(|(_, why)| why)
    }

    /// Why the kernel cannot run these members on `target`; `None` if it can.
    fn unfit(&self, target: &Target) -> Option<&'static str> {
        if let Some(why) = self.shared_unfit() {
            return Some(why);
        }
        let ExpertLayer { norm, route, experts, .. } = *self;
        let (rows, wide, inner) = (norm.x.rows, norm.x.cols, experts.down.cols);
        let halves = |tensor: &Tensor| tensor.dtype == DType::BF16 && aligned(tensor);
        let dense = |tensor: &Tensor| halves(tensor) && tensor.stride == tensor.cols;
        let weight = &norm.norm.weight;
        let values = [&norm.x, self.y()].into_iter().chain(&experts.residual).all(halves);
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
                experts.clamp.is_none() && experts.biases().next().is_none() && experts.is_gated(),
                "experts have biases, limited gates or none",
            ),
            (wide == CHUNK || wide == 2 * CHUNK, "the hidden size is not 2048 or 4096"),
            (
                inner.is_multiple_of(8)
                    && inner <= LARGEST_STAGE / 16
                    && 16 * inner <= self.stage(),
                "experts are too large",
            ),
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
        let kernel = match (&self.shared, self.stage()) {
            (None, STAGE) => kernel,
            (None, stage) => kernel.define("STAGE_BYTES", stage),
            (Some(shared), stage) => kernel
                .defines(&[("STAGE_BYTES", stage), ("SHARED", shared.inner())])
                .define("GATED", u32::from(shared.gated.is_some())),
        };
        let (weight, scales) = match self.fp8() {
            true => ("FP8_BLOCK", vec![scales_of(&experts.gate_up), scales_of(&experts.down)]),
            false => ("PLAIN", Vec::new()),
        };
        let kernel = route
            .choice(kernel.define("WEIGHT", weight))
            .grid(target.sms, 1, 1)
            .threads((WARPS + 1) * 32)
            .shared(self.stage() * self.stages(target))
            .tensors(&[&norm.x, &norm.norm.weight, &route.w])
            .optional(route.bias.map(|bias| bias.span))
            .tensors(&[&experts.gate_up, &experts.down])
            .optional(experts.residual.map(|residual| residual.span))
            .tensors(&[self.y(), &route.y])
            .spans(&[exchange])
            .optional(route.live)
            .ints(&[(exchange.len / 8).min(u32::MAX.into()) as u32, norm.x.stride])
            .ints(&[experts.residual.map_or(0, |residual| residual.stride), self.y().stride])
            .arg(Arg::F32(norm.norm.eps))
            .arg(Arg::F32(route.routing.scale))
            .optional(experts.load)
            .spans(&scales);
        let kernel = match &self.shared {
            None => kernel,
            Some(shared) => kernel
                .tensors(&[&shared.up.w, &shared.down.w])
                .optional(shared.gated.map(|gated| gated.w.span)),
        };
        Ok(vec![kernel.lowered()])
    }
}
