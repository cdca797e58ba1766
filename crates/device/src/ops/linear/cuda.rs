//! Which kernel a linear gets, by rows and shape:
//!
//! - `stream`, up to eight rows: weights streamed once, in flight before the predecessor is done;
//! - `wgmma`, from there to 128 rows on Hopper: warpgroup MMA with the weights as the tall operand, and tiles as wide
//!   as there are rows. It alone adds what adapters do (`adapters.rs`). One that adds a residual also prepares its result for the norm of the next linear, so that the
//!   norm needs no launch. Up to 256 rows if its tiles fill the GPU, and for gate·mul with more rows where its rounds are
//!   fuller than those of `tiles` (`even.rs`);
//! - `tiles`, beyond that on Hopper, if its tiles fill the GPU (`tiles.rs`): gate·mul, rotation and preparation of
//!   the next norm are in the kernel, and nothing is computed past the live rows;
//! - `gemm`, the rest: cuBLASLt, with norm and gate·mul as separate launches;
//! - `blocks`, for a few rows and weights in blocks of GGUF files: `blocks.rs`;
//! - `widen`: weights become bf16 in scratch, then one of the others multiplies;
//! - `ref`: every other format and shape.
//!
//! Weights with scales: `scaled.rs`.
//!
//! [`Pick::Fixed`] takes `wgmma` without splitting K for any number of rows, else `ref`; both sum a row in the same
//! order whatever the other rows are. A kernel that was requested by name and cannot run is an error.

use super::blocks::BlocksPlace;
use crate::cuda::launch::{Arg, Gemm, Lowered, Target};
use crate::cuda::lower::{Kernel, SEMAPHORE_BYTES, aligned, code};
use crate::op::{Activate, Activation, Epilogue, GateMul, LinearChain, NormHandoff, RopeKv};
use crate::ops::require;
use crate::variant::{LinearVariant, Pick, Variant, WgmmaShape};
use crate::{DType, Result, Tensor, scaled};

/// Workspace for cuBLASLt.
const GEMM_WORKSPACE: u64 = 32 << 20;

/// A kernel and the settings it is compiled with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Plan {
    Stream {
        stages: u32,
    },
    /// `turns`: sets of warpgroups that take turns with K. `bytes`: x is e4m3, too. `even`: as in [`WgmmaShape`]; 0 for neither.
    Wgmma {
        wide: u32,
        columns: u32,
        stages: u32,
        split: u32,
        turns: u32,
        shared: u32,
        bytes: bool,
        even: u32,
    },
    Tiles,
    Gemm,
    /// Blocks of GGUF files.
    Blocks(BlocksPlace),
    Widened,
    Reference,
}

/// Weight rows of the narrow tiles of `wgmma`, for matrices whose tiles of 64 rows would leave multiprocessors idle.
pub(super) const NARROW: u32 = 48;

impl Plan {
    /// Whether it has the requested tiles.
    fn has(self, asked: &WgmmaShape) -> bool {
        let Plan::Wgmma { wide, columns, split, turns, bytes, even, .. } = self else {
            return false;
        };
        let same = |asked: Option<u32>, found: u32| asked.is_none_or(|asked| asked == found);
        same(asked.wide, wide)
            && same(asked.columns, columns)
            && same(asked.split, split)
            && same(asked.turns, turns)
            && same(asked.bytes, u32::from(bytes))
            && same(asked.even, even)
    }

    /// The kernel's name.
    const fn name(self) -> &'static str {
        match self {
            Plan::Stream { .. } => "stream",
            Plan::Wgmma { .. } => "wgmma",
            Plan::Tiles => "tiles",
            Plan::Gemm => "gemm",
            Plan::Blocks(_) => "blocks",
            Plan::Widened => "widen",
            Plan::Reference => "ref",
        }
    }
}

impl LinearChain {
    /// Bytes of scratch its kernel needs; 0 if there is no kernel.
    pub(crate) fn scratch_bytes(&self, target: &Target) -> u64 {
        self.plan(target).map_or(0, |plan| self.needs(plan, target))
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let plan = self.plan(target)?;
        let (room, needs) =
            (self.scratch.map_or(0, |scratch| scratch.len), self.needs(plan, target));
        require(room >= needs, Self::NAME, || {
            format!("the kernel `{}` needs {needs} bytes of scratch and has {room}", plan.name())
        })?;
        if let Some(rope) = &self.rope {
            require(plan == Plan::Tiles && self.rotates(rope), Self::NAME, || {
                format!("the kernel `{}` cannot rotate its result", plan.name())
            })?;
        }
        match plan {
            Plan::Stream { stages } => Ok(vec![self.stream(target, stages)?]),
            Plan::Wgmma { .. } => self.wgmma(target, plan),
            Plan::Tiles => self.tiles(target),
            Plan::Gemm => self.gemm(target),
            Plan::Blocks(place) => self.blocks(target, place),
            Plan::Widened => self.widen(target),
            Plan::Reference => Ok(vec![self.reference_launch(target)?]),
        }
    }

    fn tuned(&self, target: &Target) -> Option<Variant> {
        target.tuned.variant(&self.shape_text()?).copied()
    }

    /// The requested kernel, else the one measured to be best, else the rule's.
    pub(super) fn plan(&self, target: &Target) -> Result<Plan> {
        let plan = match self.pick {
            Pick::Best => match self.tuned(target) {
                None => self.rule(target),
                Some(Variant::Linear(variant)) => self.named(target, variant)?,
                Some(other) => {
                    return require(false, Self::NAME, || {
                        format!("the table of measured variants names `{other}`")
                    })
                    .map(|()| Plan::Reference);
                }
            },
            Pick::Rule => self.rule(target),
            Pick::Fixed => self.fixed(target),
            Pick::Named(variant) => self.named(target, variant)?,
        };
        let hands = matches!(plan, Plan::Wgmma { .. } | Plan::Tiles);
        require(hands || self.handoff.is_nothing(), Self::NAME, || {
            format!("the kernel `{}` cannot prepare the next norm", plan.name())
        })?;
        require(self.suits_adapters(target, plan), Self::NAME, || {
            format!("the kernel `{}` cannot add what these adapters do", plan.name())
        })?;
        Ok(plan)
    }

    /// Whether this op and `next`, the op after it, have kernels that produce and consume the prepared input of its
    /// norm.
    pub(crate) fn can_hand_on(&self, next: &LinearChain, target: &Target) -> bool {
        let Some(norm) = next.norm else { return false };
        let types = [self.y.dtype, norm.weight.dtype, self.w.dtype, next.w.dtype];
        let halves = types == [DType::BF16; 4];
        let dense = self.y == next.x && self.y.cols.is_multiple_of(256);
        let adds = matches!(self.epilogue, Epilogue::Residual(_));
        let giver = LinearChain { handoff: NormHandoff::Produce(norm), ..self.clone() };
        let taker = LinearChain { handoff: NormHandoff::Consume, ..next.clone() };
        let kernels = match (giver.plan(target), taker.plan(target)) {
            (Ok(Plan::Wgmma { wide, .. }), Ok(Plan::Wgmma { columns, .. })) => {
                // For larger results, storing two more bytes per element takes as long as the norm's launch would.
                let few = self.y.rows * self.y.cols <= 128 << 10;
                few && wide != NARROW && columns >= next.x.rows
            }
            // Full rounds save more than the norm's launch takes.
            (Ok(Plan::Tiles), Ok(Plan::Tiles)) => next.even(target).is_none(),
            _ => false,
        };
        let ready = self.handoff == NormHandoff::Nothing && next.handoff == NormHandoff::Nothing;
        ready && halves && dense && adds && kernels
    }

    /// Whether this linear has a kernel that also does `rope`, the op after it.
    pub(crate) fn can_rotate(&self, rope: &RopeKv, target: &Target) -> bool {
        let fused = LinearChain { rope: Some(Box::new(rope.clone())), ..self.clone() };
        let plain = self.rope.is_none() && self.epilogue == Epilogue::Store && rope.qkv == self.y;
        plain && fused.plan(target) == Ok(Plan::Tiles) && fused.rotates(rope)
    }

    /// Other kernels worth measuring.
    pub(crate) fn candidates(&self, target: &Target) -> Vec<Variant> {
        let rows = self.x.rows;
        let stream = (3..=6).map(|stages| LinearVariant::Stream { stages: Some(stages) });
        let tiles = [NARROW, 64, 128, 192].into_iter().flat_map(|w| [1, 2, 3, 4].map(|s| (w, s)));
        let columns = [64, rows.div_ceil(16) * 8, rows.next_multiple_of(16)].map(Some);
        let columns = if rows > 128 { &columns[..] } else { &[None] };
        let tiles = tiles.flat_map(|(wide, split)| {
            columns.iter().map(move |&columns| WgmmaShape {
                wide: Some(wide),
                columns,
                split: Some(split),
                ..WgmmaShape::default()
            })
        });
        let tiles = tiles.map(LinearVariant::Wgmma);
        let own = stream.filter(|_| rows <= 8).chain(tiles.filter(|_| rows > 4 && rows <= 256));
        let others = [LinearVariant::Tiles, LinearVariant::Gemm].into_iter();
        // The next op reads what this kernel prepares, so it cannot be replaced.
        let others = others.filter(|_| self.handoff.is_nothing());
        let mut seen = vec![self.rule(target), Plan::Reference];
        let worth = |variant: &LinearVariant| {
            let Ok(plan) = self.named(target, *variant) else { return false };
            let fresh = !seen.contains(&plan);
            seen.push(plan);
            fresh
        };
        if scaled::is_scaled(self.w.dtype) {
            let all = self.scaled_variants().into_iter().filter(worth);
            return all.map(Variant::Linear).collect();
        }
        own.chain(others).filter(worth).map(Variant::Linear).collect()
    }

    /// Whether tensor cores support these formats and rows.
    fn tensor_cores(&self, target: &Target) -> bool {
        let half = matches!(self.x.dtype, DType::F16 | DType::BF16);
        let same = half && self.w.dtype == self.x.dtype;
        let whole = aligned(&self.x) && aligned(&self.w) && self.y.cols.is_multiple_of(8);
        same && whole && target.capability.0 >= 8
    }

    fn hopper(&self, target: &Target) -> bool {
        target.capability == (9, 0) && self.x.cols.is_multiple_of(64)
    }

    /// Whether `wgmma` can store its result.
    pub(super) fn stores_pairs(&self) -> bool {
        self.y.dtype == DType::F32 || self.y.stride.is_multiple_of(2)
    }

    fn suits_gemm(&self) -> bool {
        let stored = self.y.dtype == self.x.dtype || self.epilogue == Epilogue::Store;
        // The library adds a bias of the result's format.
        let gated = matches!(self.epilogue, Epilogue::GateMul(_));
        let adds = self.bias.is_none_or(|bias| bias.dtype == self.y.dtype && !gated);
        adds && stored && self.x.rows > 8
    }

    /// The kernel that is best according to measurements of other shapes.
    fn rule(&self, target: &Target) -> Plan {
        if let Some(plan) = self.blocks_rule(target) {
            return plan;
        }
        if self.w.dtype != self.x.dtype {
            return self.scaled_rule(target);
        }
        if !self.tensor_cores(target) {
            return Plan::Reference;
        }
        let (rows, hopper) = (self.x.rows, self.hopper(target));
        // The head has so many tiles that `stream`'s exchanges between warps cost time, unless a tile reads much for
        // few rows.
        let many = hopper && self.rounds(target) > 32 && (rows > 4 || self.x.cols <= 1024);
        if let (Some(stages), false) = (self.stream_stages(target, None), many) {
            return Plan::Stream { stages };
        }
        if hopper && self.stores_pairs() {
            if self.lora.is_some() {
                return self.wgmma_plan(target, &WgmmaShape::default());
            }
            if let Some(shape) = self.tall(target) {
                return self.wgmma_plan(target, &shape);
            }
            if rows <= 128 {
                return self.wgmma_plan(target, &WgmmaShape::default());
            }
            if let Some(shape) = self.even(target) {
                return self.wgmma_plan(target, &shape);
            }
        }
        if hopper && self.suits_tiles(target, !self.suits_gemm()) {
            return Plan::Tiles;
        }
        if self.suits_gemm() { Plan::Gemm } else { Plan::Reference }
    }

    /// The kernel that sums a row in the same order whatever the other rows are.
    fn fixed(&self, target: &Target) -> Plan {
        if let Some(plan) = self.blocks_fixed(target) {
            return plan;
        }
        if scaled::is_scaled(self.w.dtype) {
            return self.scaled_fixed(target);
        }
        if self.tensor_cores(target) && self.hopper(target) && self.stores_pairs() {
            let alone = WgmmaShape { split: Some(1), ..WgmmaShape::default() };
            return self.wgmma_plan(target, &alone);
        }
        Plan::Reference
    }

    /// The requested kernel, or why it cannot run.
    fn named(&self, target: &Target, variant: LinearVariant) -> Result<Plan> {
        if variant == LinearVariant::Reference {
            return Ok(Plan::Reference);
        }
        let with_scales = scaled::is_scaled(self.w.dtype);
        let (cores, hopper) = match with_scales {
            true => (self.scaled_cores(target) || variant == LinearVariant::Widen, true),
            false => (self.tensor_cores(target), self.hopper(target)),
        };
        let plan = match variant {
            LinearVariant::Widen => self.widens().then_some(Plan::Widened),
            LinearVariant::Stream { stages } if with_scales => {
                self.scaled_stages(target, stages).map(|stages| Plan::Stream { stages })
            }
            LinearVariant::Wgmma(asked) if with_scales && self.stores_pairs() => {
                let bytes = asked.bytes != Some(0) && scaled::is_fp8(self.w.dtype);
                Some(self.scaled_wgmma(target, &asked, bytes)).filter(|plan| plan.has(&asked))
            }
            LinearVariant::Tiles if with_scales && !scaled::is_fp8(self.w.dtype) => None,
            LinearVariant::Stream { stages } => {
                self.stream_stages(target, stages).map(|stages| Plan::Stream { stages })
            }
            LinearVariant::Wgmma(asked) if hopper && self.stores_pairs() => {
                Some(self.wgmma_plan(target, &asked)).filter(|plan| plan.has(&asked))
            }
            LinearVariant::Tiles if hopper && self.suits_tiles(target, true) => Some(Plan::Tiles),
            LinearVariant::Gemm if self.suits_gemm() => Some(Plan::Gemm),
            _ => None,
        };
        let (rows, n, k) = (self.x.rows, self.w.rows, self.x.cols);
        let plan = plan.filter(|plan| cores && self.suits_adapters(target, *plan));
        require(plan.is_some(), Self::NAME, || {
            let types = (self.x.dtype, self.w.dtype, target.arch());
            let (x, w, arch) = (types.0, types.1, types.2);
            format!("no kernel `{variant}` for {rows}×{k}×{n} of {x:?} and {w:?} on {arch}")
        })?;
        Ok(plan.unwrap_or(Plan::Reference))
    }

    /// The tiles with which `wgmma` is faster than cuBLASLt for more than 128 rows, if there are any. First choice:
    /// all tokens and as many weight rows as there are registers for, if such tiles fill the GPU (up to 192 rows: in
    /// one round). Else two tiles with half the tokens each, if they fit in one round; beyond 224 rows only if the
    /// inner dimension is long, which is then split.
    fn tall(&self, target: &Target) -> Option<WgmmaShape> {
        let (rows, n, k) = (self.x.rows, self.w.rows, self.x.cols);
        let fills = |blocks: u32| blocks * 10 > blocks.next_multiple_of(target.sms) * 9;
        let (whole, halves) = (n.div_ceil(192), [64, 128].map(|wide| n.div_ceil(wide) * 2));
        let round = halves.into_iter().find(|blocks| *blocks <= target.sms).unwrap_or(0);
        match rows {
            _ if !self.handoff.is_nothing() => None,
            129..=256 if fills(whole) && (rows > 192 || whole <= target.sms) => {
                Some(WgmmaShape { wide: Some(192), ..WgmmaShape::default() })
            }
            // The more rows, the less the library loses.
            129..=224 if round * 10 >= target.sms * if rows > 192 { 9 } else { 7 } && k <= 4096 => {
                let (columns, split) = (Some(rows.div_ceil(2)), Some(1));
                Some(WgmmaShape { columns, split, ..WgmmaShape::default() })
            }
            225..=256 if fills(halves[0]) && halves[0] <= target.sms && k >= 8192 => {
                let (wide, columns, split) = (Some(128), Some(128), Some(2));
                Some(WgmmaShape { wide, columns, split, ..WgmmaShape::default() })
            }
            _ => None,
        }
    }

    fn stream_stages(&self, target: &Target, asked: Option<u32>) -> Option<u32> {
        if self.x.rows > 8 || !self.x.cols.is_multiple_of(64) {
            return None;
        }
        let fits = |stages: u32, bytes: u32| self.stream_shared(target, stages) <= bytes;
        let most = target.shared_per_block;
        match asked {
            Some(stages) => fits(stages, most).then_some(stages),
            // Bytes in flight decide the speed: as many stages as fit. With too few, another kernel is faster.
            None => {
                let depth = self.stream_depth(target);
                (depth.min(3)..=depth).rev().find(|stages| fits(*stages, most))
            }
        }
    }

    /// The depth of the ring. More stages than a warp has chunks to read would only delay the start of the next
    /// kernel.
    fn stream_depth(&self, target: &Target) -> u32 {
        (self.rounds(target) * (self.x.cols / 64).div_ceil(16)).clamp(3, 6)
    }

    /// Tiles of 16 columns that the busiest block has.
    pub(super) fn rounds(&self, target: &Target) -> u32 {
        self.w.rows.div_ceil(16).div_ceil(target.sms / self.stream_split())
    }

    fn stream_shared(&self, target: &Target, stages: u32) -> u32 {
        let (rows, k) = (self.x.rows, self.x.cols);
        // Up to four tiles are all kept until the end; of more, two batches of four.
        let buffers = if self.rounds(target) <= 4 { self.rounds(target).max(1) } else { 8 };
        // A warp with few chunks keeps x in registers (HELD in the kernel).
        let held = k.div_ceil(64).div_ceil(16) <= 4
            && self.norm.is_none_or(|norm| [self.x.dtype, norm.weight.dtype] == [DType::BF16; 2]);
        let x = if held { 0 } else { rows * (2 * k + 64) };
        16 * stages * 2048 + x + buffers * 16 * 16 * rows * 4
    }

    /// Bytes of scratch: the semaphores, the normalised input, then sums or results; last what adapters need.
    pub(super) fn needs(&self, plan: Plan, target: &Target) -> u64 {
        match self.adapters_bytes() {
            0 => self.needs_without_adapters(plan, target),
            bytes => self.needs_without_adapters(plan, target).max(SEMAPHORE_BYTES) + bytes,
        }
    }

    fn needs_without_adapters(&self, plan: Plan, target: &Target) -> u64 {
        let normed = self.normed_bytes();
        match plan {
            Plan::Widened => self.widened_needs(target),
            Plan::Wgmma { bytes: true, .. } => self.quantised_bytes(),
            Plan::Tiles if scaled::is_scaled(self.w.dtype) => self.quantised_bytes(),
            Plan::Stream { .. } | Plan::Blocks(_) | Plan::Reference => 0,
            Plan::Wgmma { .. } | Plan::Tiles if !self.handoff.is_nothing() => {
                let (_, prepared, squares) = self.handed_bytes();
                SEMAPHORE_BYTES + prepared + squares
            }
            Plan::Wgmma { .. } | Plan::Tiles if self.norm.is_some() => SEMAPHORE_BYTES + normed,
            Plan::Wgmma { .. } | Plan::Tiles => 0,
            Plan::Gemm => SEMAPHORE_BYTES + normed + self.pair_bytes() + GEMM_WORKSPACE,
        }
    }

    pub(super) fn normed_bytes(&self) -> u64 {
        let bytes = u64::from(self.x.rows) * u64::from(self.x.cols) * 2;
        if self.norm.is_some() { bytes.next_multiple_of(1024) } else { 0 }
    }

    fn pair_bytes(&self) -> u64 {
        let bytes = u64::from(self.x.rows) * u64::from(self.w.rows) * 2;
        let gated = matches!(self.epilogue, Epilogue::GateMul(_));
        if gated { bytes.next_multiple_of(1024) } else { 0 }
    }

    pub(super) fn epilogue_code(&self) -> (u32, Option<Tensor>) {
        match self.epilogue {
            Epilogue::Store | Epilogue::Activate(_) => (0, None),
            Epilogue::Residual(residual) => (1, Some(residual)),
            Epilogue::GateMul(act) => (act.code(), None),
        }
    }

    /// What is applied to each sum before it is stored.
    pub(super) fn after(&self) -> Option<Activation> {
        match self.epilogue {
            Epilogue::Activate(act) => Some(act),
            Epilogue::Store | Epilogue::Residual(_) | Epilogue::GateMul(_) => None,
        }
    }

    fn stream(&self, target: &Target, stages: u32) -> Result<Lowered> {
        let (epilogue, residual) = self.epilogue_code();
        let (tiles, split) = (self.w.rows.div_ceil(16), self.stream_split());
        let kernel = Kernel::new(target, "linear_stream", "linear_stream")
            .defines(&[("K", self.x.cols), ("N", self.w.rows), ("ROWS", self.x.rows)])
            .defines(&[("WARPS", 16), ("STAGES", stages), ("ROUNDS", self.rounds(target))])
            .define("TYPE", code(self.x.dtype, "linear")?)
            .define("NT", type_of(self.norm.map(|norm| norm.weight))?)
            .defines(&self.types(residual, epilogue)?)
            .define("NORM", u32::from(self.norm.is_some()))
            .grid(tiles.min(target.sms / split) * split, 1, 1)
            .cluster(split)
            .threads(512)
            .shared(match scaled::is_scaled(self.w.dtype) {
                true => self.scaled_shared(target, stages),
                false => self.stream_shared(target, stages),
            })
            .after(self.after())
            .tensors(&[&self.x, &self.w])
            .optional(self.bias.map(|bias| bias.span))
            .optional(self.norm.map(|norm| norm.weight.span))
            .optional(residual.map(|residual| residual.span))
            .tensors(&[&self.y])
            .ints(&[self.x.stride, self.w.stride])
            .ints(&[residual.map_or(0, |residual| residual.stride), self.y.stride])
            .arg(Arg::F32(self.norm.map_or(0.0, |norm| norm.eps)));
        Ok(self.add_stream_scales(kernel).lowered())
    }

    /// Macros that every kernel of linears has for bias, residual, output and epilogue.
    pub(super) fn types(
        &self,
        residual: Option<Tensor>,
        epilogue: u32,
    ) -> Result<[(&'static str, u32); 5]> {
        Ok([
            ("BT", type_of(self.bias)?),
            ("RT", type_of(residual)?),
            ("YT", code(self.y.dtype, "linear")?),
            ("BIAS", u32::from(self.bias.is_some())),
            ("EPILOGUE", epilogue),
        ])
    }

    fn gemm(&self, target: &Target) -> Result<Vec<Lowered>> {
        let scratch = self.scratch.expect("lowering checked its length");
        let (x, mut launches) = self.normed(target, scratch)?;
        let from = SEMAPHORE_BYTES + self.normed_bytes();
        let workspace = Some(scratch.part(from + self.pair_bytes(), GEMM_WORKSPACE));
        let (_, residual) = self.epilogue_code();
        let mut gemm = Gemm { x, w: self.w, bias: self.bias, residual, y: self.y, workspace };
        if let Epilogue::GateMul(act) = self.epilogue {
            let span = scratch.part(from, self.pair_bytes());
            gemm.y = Tensor::dense(span, self.x.dtype, x.rows, self.w.rows);
            launches.push(Lowered::Gemm(gemm.clone()));
            let gate = GateMul { x: gemm.y, act, y: self.y, live: self.live };
            launches.extend(gate.lower(target)?);
            return Ok(launches);
        }
        launches.push(Lowered::Gemm(gemm));
        if let Epilogue::Activate(act) = self.epilogue {
            let activate = Activate { x: self.y, act, y: self.y, live: self.live };
            launches.extend(activate.lower(target)?);
        }
        Ok(launches)
    }

    pub(super) fn reference_launch(&self, target: &Target) -> Result<Lowered> {
        let (epilogue, residual) = self.epilogue_code();
        let rows = self.x.rows.clamp(1, 8).next_power_of_two();
        let whole = aligned(&self.x) && (!self.w.dtype.is_plain() || aligned(&self.w));
        let kernel = Kernel::new(target, "linear_ref", "linear_ref")
            .define("XT", code(self.x.dtype, "linear")?)
            .define("WT", code(self.w.dtype, "linear")?)
            .define("NT", type_of(self.norm.map(|norm| norm.weight))?)
            .defines(&self.types(residual, epilogue)?)
            .defines(&[
                ("NORM", u32::from(self.norm.is_some())),
                ("LIVE", u32::from(self.live.is_some())),
                ("ALIGNED", u32::from(whole)),
                ("ROWS", rows),
            ])
            .grid(self.y.cols.div_ceil(8), self.x.rows.div_ceil(rows), 1)
            .after(self.after())
            .tensors(&[&self.x, &self.w])
            .optional(self.bias.map(|bias| bias.span))
            .optional(self.norm.map(|norm| norm.weight.span))
            .optional(residual.map(|residual| residual.span))
            .tensors(&[&self.y])
            .optional(self.live)
            .ints(&[self.x.rows, self.w.rows, self.x.cols, self.x.stride, self.w.stride])
            .ints(&[residual.map_or(0, |residual| residual.stride), self.y.stride])
            .arg(Arg::F32(self.norm.map_or(0.0, |norm| norm.eps)));
        Ok(kernel.lowered())
    }
}

/// The code of an optional tensor's format; any code if it is absent.
pub(super) fn type_of(tensor: Option<Tensor>) -> Result<u32> {
    tensor.map_or(Ok(0), |tensor| code(tensor.dtype, "linear"))
}
