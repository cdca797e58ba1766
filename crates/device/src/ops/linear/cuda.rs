//! Which kernel a product gets, by rows and shape:
//!
//! - `stream`, up to eight rows: weights streamed once, in flight before the predecessor is done;
//! - `wgmma`, from there to 128 rows on Hopper: warpgroup products with the weights as the tall operand, and tiles as
//!   wide as there are rows. One that adds a residual also prepares its result for the norm of the next one, so that the
//!   norm has no launch. To 256 rows where its tiles fill the GPU;
//! - `tiles`, beyond on Hopper, where its tiles fill the GPU (`tiles.rs`): SiLU·mul, rotation and what the next norm
//!   needs in the product, nothing computed past the live rows;
//! - `gemm`, the rest: the library, with norm and SiLU·mul as launches around it;
//! - `ref`: every other format and shape.
//!
//! - `fixed`, asked for by name: `wgmma` without sharing K for any number of rows, else `ref`; both sum a
//!   row in the same order whatever is beside it.
//!
//! `variant` overrides: a name, then `key=value` pairs (`wgmma,wide=64,stages=4`).

use crate::cuda::launch::{Arg, Gemm, Lowered, Target};
use crate::cuda::lower::{Kernel, SEMAPHORE_BYTES, aligned, code};
use crate::cuda::tuned;
use crate::op::{Epilogue, Hand, Linear, RopeKv};
use crate::{DType, Result, Tensor};

/// Room the library may use.
const GEMM_WORKSPACE: u64 = 32 << 20;

/// A kernel and what it is compiled for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Plan {
    Stream { stages: u32 },
    Wgmma { wide: u32, columns: u32, stages: u32, split: u32, shared: u32 },
    Tiles,
    Gemm,
    Reference,
}

/// Weight rows of the narrow tiles of `wgmma`: a matrix that 64 at a time would leave multiprocessors without any.
pub(super) const NARROW: u32 = 48;

impl Plan {
    /// Whether it is what the variant names: one that cannot be had is answered with another.
    fn is(self, variant: &str) -> bool {
        match self {
            Plan::Stream { .. } => variant.starts_with("stream"),
            Plan::Wgmma { wide, columns, split, .. } => {
                let named = |key: &str, value: u32| {
                    variant.split(',').find_map(|pair| pair.strip_prefix(key)).is_none_or(|given| {
                        given.strip_prefix('=') == Some(value.to_string().as_str())
                    })
                };
                variant.starts_with("wgmma")
                    && named("wide", wide)
                    && named("columns", columns)
                    && named("split", split)
            }
            Plan::Tiles => variant == "tiles",
            Plan::Gemm => variant == "gemm",
            Plan::Reference => variant == "ref",
        }
    }
}

impl Linear {
    pub(crate) fn scratch_bytes(&self, target: &Target) -> u64 {
        self.needs(self.plan(target))
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let plan = self.plan(target);
        let room = self.scratch.map_or(0, |scratch| scratch.len);
        if let Some(rope) = &self.rope
            && (plan != Plan::Tiles || room < self.needs(plan) || !self.rotates(rope))
        {
            let product = Linear { rope: None, ..self.clone() }.lower(target)?;
            return Ok(product.into_iter().chain(rope.lower(target)?).collect());
        }
        match plan {
            Plan::Stream { stages } => Ok(vec![self.stream(target, stages)?]),
            Plan::Wgmma { .. } if room >= self.needs(plan) => self.wgmma(target, plan),
            Plan::Tiles if room >= self.needs(plan) => self.tiles(target),
            Plan::Gemm if room >= self.needs(plan) => self.gemm(target),
            _ => Ok(vec![self.reference_launch(target)?]),
        }
    }

    /// What was asked for, else what was measured to be best, else what the rule says.
    fn plan(&self, target: &Target) -> Plan {
        let variant = match &self.variant {
            Some(variant) => variant.as_str(),
            None => target.tuned.variant(&tuned::linear(self)).unwrap_or(""),
        };
        self.plan_for(target, variant)
    }

    /// Whether this op and the one after it, `next`, have kernels that hand the input of its norm over.
    pub(crate) fn can_hand_on(&self, next: &Linear, target: &Target) -> bool {
        let Some(norm) = next.norm else { return false };
        let halves = [self.y.dtype, norm.weight.dtype, next.w.dtype] == [DType::BF16; 3];
        let dense = self.y == next.x && self.y.cols.is_multiple_of(256);
        let adds = matches!(self.epilogue, Epilogue::Residual(_));
        let giver = Linear { hand: Hand::Gives(norm), ..self.clone() };
        let taker = Linear { hand: Hand::Takes, ..next.clone() };
        let kernels = match (giver.plan(target), taker.plan(target)) {
            (Plan::Wgmma { wide, .. }, Plan::Wgmma { columns, .. }) => {
                // Beyond this, storing two more bytes per element takes what the norm's launch did.
                let few = self.y.rows * self.y.cols <= 128 << 10;
                few && wide != NARROW && columns >= next.x.rows
            }
            (Plan::Tiles, Plan::Tiles) => true,
            _ => false,
        };
        let ready = self.hand == Hand::Nothing && next.hand == Hand::Nothing;
        ready && halves && dense && adds && kernels
    }

    /// Whether this product has a kernel that also does `rope`, the op after it.
    pub(crate) fn can_rotate(&self, rope: &RopeKv, target: &Target) -> bool {
        let fused = Linear { rope: Some(Box::new(rope.clone())), ..self.clone() };
        let plain = self.rope.is_none() && self.epilogue == Epilogue::Store && rope.qkv == self.y;
        plain && fused.plan(target) == Plan::Tiles && fused.rotates(rope)
    }

    /// Other plans worth measuring, each by its variant.
    pub(crate) fn candidates(&self, target: &Target) -> Vec<String> {
        let rows = self.x.rows;
        let stream = (3..=6).map(|stages| format!("stream,stages={stages}"));
        let tiles = [NARROW, 64, 128, 192].into_iter().flat_map(|w| [1, 2, 4].map(|s| (w, s)));
        let columns = [64, rows.div_ceil(16) * 8, rows.next_multiple_of(16)];
        let columns = if rows > 128 { &columns[..] } else { &[] };
        let halves = tiles.clone().flat_map(|(w, s)| columns.iter().map(move |c| (w, s, *c)));
        let halves = halves.map(|(w, s, c)| format!("wgmma,wide={w},columns={c},split={s}"));
        let tiles = tiles.filter(|_| columns.is_empty());
        let tiles = tiles.map(|(w, s)| format!("wgmma,wide={w},split={s}")).chain(halves);
        let mut seen = vec![self.plan_for(target, ""), Plan::Reference];
        let mut worth = |variant: &String| {
            let plan = self.plan_for(target, variant);
            let same = plan.is(variant) && !seen.contains(&plan);
            seen.push(plan);
            same
        };
        let own = stream.filter(|_| rows <= 8).chain(tiles.filter(|_| rows > 4 && rows <= 256));
        let others = ["tiles", "gemm"].map(String::from).into_iter();
        // A hand given must be given by whatever runs.
        let others = others.filter(|_| self.hand.is_nothing());
        own.chain(others).filter(|variant| worth(variant)).collect()
    }

    fn plan_for(&self, target: &Target, variant: &str) -> Plan {
        let (name, options) = variant.split_once(',').unwrap_or((variant, ""));
        let option = |key: &str| {
            if name == "fixed" {
                return (key == "split").then_some(1);
            }
            let pair =
                options.split(',').find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='));
            pair.and_then(|value| value.parse::<u32>().ok())
        };
        let half = matches!(self.x.dtype, DType::F16 | DType::BF16);
        let same = half && self.w.dtype == self.x.dtype;
        let whole = aligned(&self.x) && aligned(&self.w) && self.y.cols.is_multiple_of(8);
        if !same || !whole || target.capability.0 < 8 || name == "ref" {
            return Plan::Reference;
        }
        let rows = self.x.rows;
        let hopper = target.capability == (9, 0) && self.x.cols.is_multiple_of(64);
        let stream = self.stream_stages(target, option("stages"));
        // A head has so many tiles that their exchanges show, unless each has much to read for few rows.
        let many = hopper && self.rounds(target) > 32 && (rows > 4 || self.x.cols <= 1024);
        if let (Some(stages), true) = (stream, name == "stream" || (name.is_empty() && !many)) {
            return Plan::Stream { stages };
        }
        let narrow_out = self.y.dtype == DType::F32 || self.y.stride.is_multiple_of(2);
        let wanted = matches!(name, "wgmma" | "fixed") || (name.is_empty() && rows <= 128);
        if let (true, true, Some(tall)) = (hopper && narrow_out, name.is_empty(), self.tall(target))
        {
            return self.plan_for(target, &tall);
        }
        if hopper && narrow_out && wanted {
            return self.wgmma_plan(target, option);
        }
        if name == "fixed" {
            return Plan::Reference;
        }
        if hopper
            && (name == "tiles" || name.is_empty())
            && self.suits_tiles(target, !name.is_empty())
        {
            return Plan::Tiles;
        }
        let stored = self.y.dtype == self.x.dtype || self.epilogue == Epilogue::Store;
        if self.bias.is_none() && stored && rows > 8 { Plan::Gemm } else { Plan::Reference }
    }

    /// The variant of `wgmma` that beats the library for more than 128 rows, if one does: all tokens and as many
    /// weight rows as there are registers for, where such tiles fill the GPU (to 192 rows: once); else two tiles of half
    /// the tokens each, where one round takes them all; beyond 224 rows those only for a long inner dimension, shared.
    fn tall(&self, target: &Target) -> Option<String> {
        let (rows, n, k) = (self.x.rows, self.w.rows, self.x.cols);
        let fills = |blocks: u32| blocks * 10 > blocks.next_multiple_of(target.sms) * 9;
        let (whole, halves) = (n.div_ceil(192), [64, 128].map(|wide| n.div_ceil(wide) * 2));
        let round = halves.into_iter().find(|blocks| *blocks <= target.sms).unwrap_or(0);
        match rows {
            _ if !self.hand.is_nothing() => None,
            129..=256 if fills(whole) && (rows > 192 || whole <= target.sms) => {
                Some("wgmma,wide=192".into())
            }
            129..=224 if round * 10 >= target.sms * 7 && k <= 4096 => {
                Some(format!("wgmma,columns={},split=1", rows.div_ceil(2)))
            }
            225..=256 if fills(halves[0]) && halves[0] <= target.sms && k >= 8192 => {
                Some("wgmma,wide=128,columns=128,split=2".into())
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
            // Bytes in flight decide: as deep as fits, and too shallow is worse than another kernel.
            None => {
                let depth = self.stream_depth(target);
                (depth.min(3)..=depth).rev().find(|stages| fits(*stages, most))
            }
        }
    }

    /// More stages than a warp has chunks to read would only keep the next kernel out.
    fn stream_depth(&self, target: &Target) -> u32 {
        (self.rounds(target) * (self.x.cols / 64).div_ceil(16)).clamp(3, 6)
    }

    /// Tiles of 16 columns the busiest block has.
    fn rounds(&self, target: &Target) -> u32 {
        self.w.rows.div_ceil(16).div_ceil(target.sms)
    }

    fn stream_shared(&self, target: &Target, stages: u32) -> u32 {
        let (rows, k) = (self.x.rows, self.x.cols);
        // Few tiles are all kept until the end; of many, two batches of four.
        let buffers = if self.rounds(target) <= 4 { self.rounds(target).max(1) } else { 8 };
        // A warp with few chunks keeps x in registers (HELD in the kernel).
        let held = k.div_ceil(64).div_ceil(16) <= 4
            && self.norm.is_none_or(|norm| [self.x.dtype, norm.weight.dtype] == [DType::BF16; 2]);
        let x = if held { 0 } else { rows * (2 * k + 64) };
        16 * stages * 2048 + x + buffers * 16 * 16 * rows * 4
    }

    /// Scratch after the semaphores: the normalised input, then sums or products.
    fn needs(&self, plan: Plan) -> u64 {
        let normed = self.normed_bytes();
        match plan {
            Plan::Stream { .. } | Plan::Reference => 0,
            Plan::Wgmma { .. } | Plan::Tiles if !self.hand.is_nothing() => {
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
        if self.epilogue == Epilogue::SiluMul { bytes.next_multiple_of(1024) } else { 0 }
    }

    pub(super) fn epilogue_code(&self) -> (u32, Option<Tensor>) {
        match self.epilogue {
            Epilogue::Store => (0, None),
            Epilogue::Residual(residual) => (1, Some(residual)),
            Epilogue::SiluMul => (2, None),
        }
    }

    fn stream(&self, target: &Target, stages: u32) -> Result<Lowered> {
        let (epilogue, residual) = self.epilogue_code();
        let tiles = self.w.rows.div_ceil(16);
        let kernel = Kernel::new(target, "linear_stream", "linear_stream")
            .defines(&[("K", self.x.cols), ("N", self.w.rows), ("ROWS", self.x.rows)])
            .defines(&[("WARPS", 16), ("STAGES", stages), ("ROUNDS", self.rounds(target))])
            .define("TYPE", code(self.x.dtype, "linear")?)
            .define("NT", type_of(self.norm.map(|norm| norm.weight))?)
            .defines(&self.types(residual, epilogue)?)
            .define("NORM", u32::from(self.norm.is_some()))
            .grid(tiles.min(target.sms), 1, 1)
            .threads(512)
            .shared(self.stream_shared(target, stages))
            .tensors(&[&self.x, &self.w])
            .optional(self.bias.map(|bias| bias.span))
            .optional(self.norm.map(|norm| norm.weight.span))
            .optional(residual.map(|residual| residual.span))
            .tensors(&[&self.y])
            .ints(&[self.x.stride, self.w.stride])
            .ints(&[residual.map_or(0, |residual| residual.stride), self.y.stride])
            .arg(Arg::F32(self.norm.map_or(0.0, |norm| norm.eps)));
        Ok(kernel.lowered())
    }

    /// Macros every product kernel has for bias, residual, output and epilogue.
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
        let Some(scratch) = self.scratch else { return Ok(vec![self.reference_launch(target)?]) };
        let (x, mut launches) = self.normed(target, scratch)?;
        let from = SEMAPHORE_BYTES + self.normed_bytes();
        let workspace = Some(scratch.part(from + self.pair_bytes(), GEMM_WORKSPACE));
        let (_, residual) = self.epilogue_code();
        let mut gemm = Gemm { x, w: self.w, residual, y: self.y, workspace };
        if self.epilogue == Epilogue::SiluMul {
            let span = scratch.part(from, self.pair_bytes());
            gemm.y = Tensor::dense(span, self.x.dtype, x.rows, self.w.rows);
            launches.push(Lowered::Gemm(gemm.clone()));
            let silu = crate::ops::rms_norm::cuda::silu_mul(target, &gemm.y, &self.y, self.live)?;
            launches.push(silu);
        } else {
            launches.push(Lowered::Gemm(gemm));
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
