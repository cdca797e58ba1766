//! Which kernel a product gets, by rows and shape:
//!
//! - `stream`, up to eight rows: weights streamed once, in flight before the predecessor is done;
//! - `wgmma`, from there to 128 rows on Hopper: warpgroup products with the weights as the tall operand. One that
//!   adds a residual also prepares its result for the norm of the next one, so that the norm has no launch. To 256
//!   rows where its tiles fill the GPU;
//! - `tiles`, beyond on Hopper, where its tiles fill the GPU (`tiles.rs`): SiLU·mul, rotation and what the next norm
//!   needs in the product, nothing computed past the live rows;
//! - `gemm`, the rest: the library, with norm and SiLU·mul as launches around it;
//! - `ref`: every other format and shape.
//!
//! - `fixed`, asked for by name: `wgmma` without sharing K for any number of rows, else `ref`; both sum a
//!   row in the same order whatever is beside it.
//!
//! `variant` overrides: a name, then `key=value` pairs (`wgmma,wide=64,stages=4`).

use crate::cuda::launch::{Arg, Gemm, Lowered, Target, TensorMap};
use crate::cuda::lower::{Kernel, SEMAPHORE_BYTES, aligned, code};
use crate::cuda::tuned;
use crate::op::{Epilogue, Hand, Linear, Norm, RmsNorm, RopeKv};
use crate::{DType, Result, Span, Tensor};

/// Room the library may use.
const GEMM_WORKSPACE: u64 = 32 << 20;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Plan {
    Stream { stages: u32 },
    Wgmma { wide: u32, columns: u32, stages: u32, split: u32, shared: u32 },
    Tiles,
    Gemm,
    Reference,
}

/// Weight rows of the narrow tiles of `wgmma`: a matrix that 64 at a time would leave multiprocessors without any.
const NARROW: u32 = 48;

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
        let columns = if rows > 128 { &[64, 128, 256][..] } else { &[] };
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
            return self.plan_for(target, tall);
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

    /// The variant of `wgmma` that beats the library for 256 rows, if one does: all tokens and as many weight rows as
    /// there are registers for, where such tiles fill the GPU; for a long inner dimension, shares of it. With 192
    /// rows and fewer too much of a tile is empty.
    fn tall(&self, target: &Target) -> Option<&'static str> {
        let fills = |blocks: u32| blocks * 10 > blocks.next_multiple_of(target.sms) * 9;
        let shared = self.w.rows.div_ceil(128) * 4;
        match self.x.rows {
            _ if !self.hand.is_nothing() => None,
            225..=256 if fills(self.w.rows.div_ceil(192)) => Some("wgmma,wide=192"),
            225..=256 if fills(shared) && shared <= target.sms && self.x.cols >= 8192 => {
                Some("wgmma,wide=128,columns=128,split=2")
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

    fn wgmma_plan(&self, target: &Target, option: impl Fn(&str) -> Option<u32>) -> Plan {
        let (rows, n, k) = (self.x.rows, self.w.rows, self.x.cols);
        let columns = [8, 16, 32, 64, 128].into_iter().find(|c| *c >= rows).unwrap_or(256);
        let columns = option("columns").filter(|c| [64, 128, 256].contains(c)).unwrap_or(columns);
        let gives = matches!(self.hand, Hand::Gives(_));
        // Microseconds that the busiest block reads, and what sharing K takes.
        let cost = |wide: u32, split: u32| {
            let tiles = n.div_ceil(wide) * rows.div_ceil(columns);
            // Clusters of more than two do not fill the GPU in one wave, but few tiles need them.
            let alone = split == 1 || (tiles * split <= target.sms && (split == 2 || tiles <= 16));
            let room = wide + columns <= if option("wide") == Some(wide) { 448 } else { 320 };
            let fits = k.is_multiple_of(64 * split) && alone && room;
            // A narrow tile's product reads 16 rows past it, and has no whole 64 columns to give.
            let fits = fits && (wide != NARROW || (columns >= 16 && split == 1 && !gives));
            let rounds = (tiles * split).div_ceil(target.sms);
            let reads = f64::from(rounds * wide) * f64::from(k / split) * 2.0 / 34e3;
            let extra = match wide {
                NARROW => 1.05,
                64 => 1.01,
                _ => 1.0,
            };
            let shares = match split {
                1 => 0.0,
                2 => 0.15,
                4 => 0.4,
                _ => 2.5,
            };
            if fits { reads * extra + shares } else { f64::INFINITY }
        };
        let asked = (option("wide"), option("split"));
        let shapes = [NARROW, 64, 128, 192].into_iter().flat_map(|w| [1, 2, 4, 8].map(|s| (w, s)));
        let wanted = |w: u32, s: u32| asked.0.unwrap_or(w) == w && asked.1.unwrap_or(s) == s;
        // What was asked for if it can be, else the cheapest that can.
        let price = |(w, s): (u32, u32)| cost(w, s) + if wanted(w, s) { 0.0 } else { 1e6 };
        let (wide, split) =
            shapes.min_by(|a, b| price(*a).total_cmp(&price(*b))).unwrap_or((64, 1));
        let stage = (wide + columns) * 128;
        let chunks = k / 64 / split * if split > 1 { 1 } else { 2 };
        // Deep enough that two blocks of a kernel never share a multiprocessor.
        let beside = 2048 + 4 * columns + if gives { wide / 4 * columns } else { 0 };
        let most = ((target.shared_per_block - beside) / stage).min(20);
        // The sums of a shared tile take the place of the ring.
        let least = (wide * columns * 4).div_ceil(stage).max(3);
        // Half a multiprocessor's memory and a little: attention's blocks fit beside it, so that each may start
        // while the other runs, and still no two of one product.
        let half = target.shared_per_sm / 2 - 1024;
        let halved = option("half").map_or(wide <= 64 && columns <= 64, |asked| asked == 1);
        let deep = if halved { (half + 3072).saturating_sub(beside) / stage } else { most };
        let stages = option("stages").unwrap_or(deep.min(chunks)).clamp(least.min(most), most);
        let shared = stages * stage + 1024;
        // A ring that holds all there is to read does no harm twice.
        let shared = if halved && stages < chunks { shared.max(half) } else { shared };
        Plan::Wgmma { wide, columns, stages, split, shared }
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

    fn normed_bytes(&self) -> u64 {
        let bytes = u64::from(self.x.rows) * u64::from(self.x.cols) * 2;
        if self.norm.is_some() { bytes.next_multiple_of(1024) } else { 0 }
    }

    fn pair_bytes(&self) -> u64 {
        let bytes = u64::from(self.x.rows) * u64::from(self.w.rows) * 2;
        if self.epilogue == Epilogue::SiluMul { bytes.next_multiple_of(1024) } else { 0 }
    }

    /// The input as the product reads it, and the launch that makes it if there is a norm.
    pub(super) fn normed(&self, target: &Target, scratch: Span) -> Result<(Tensor, Vec<Lowered>)> {
        let Some(norm) = self.norm else { return Ok((self.x, Vec::new())) };
        let span = scratch.part(SEMAPHORE_BYTES, self.normed_bytes());
        let y = Tensor::dense(span, self.x.dtype, self.x.rows, self.x.cols);
        Ok((y, RmsNorm { x: self.x, norm, y }.lower(target)?))
    }

    /// What is handed over through scratch: one side's y and the other's x, times the norm's weights, and sums of
    /// squares: of each 64 columns of a row, by `tiles` of each 256.
    pub(super) fn handed(&self, scratch: Span) -> (Tensor, Span) {
        let (like, prepared, squares) = self.handed_bytes();
        let span = scratch.part(SEMAPHORE_BYTES, prepared);
        let squares = scratch.part(SEMAPHORE_BYTES + prepared, squares);
        (Tensor::dense(span, like.dtype, like.rows, like.cols), squares)
    }

    fn handed_bytes(&self) -> (&Tensor, u64, u64) {
        let like = if self.hand == Hand::Takes { &self.x } else { &self.y };
        let elems = u64::from(like.rows) * u64::from(like.cols);
        (like, (2 * elems).next_multiple_of(1024), elems / 64 * 4)
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
    fn types(&self, residual: Option<Tensor>, epilogue: u32) -> Result<[(&'static str, u32); 5]> {
        Ok([
            ("BT", type_of(self.bias)?),
            ("RT", type_of(residual)?),
            ("YT", code(self.y.dtype, "linear")?),
            ("BIAS", u32::from(self.bias.is_some())),
            ("EPILOGUE", epilogue),
        ])
    }

    fn wgmma(&self, target: &Target, plan: Plan) -> Result<Vec<Lowered>> {
        let Plan::Wgmma { wide, columns, stages, split, shared } = plan else {
            return Ok(vec![self.reference_launch(target)?]);
        };
        let handed = match (self.scratch, &self.hand) {
            (Some(scratch), Hand::Gives(_) | Hand::Takes) => Some(self.handed(scratch)),
            _ => None,
        };
        let (x, mut launches) = match (self.scratch, handed) {
            (_, Some((prepared, _))) if self.hand == Hand::Takes => (prepared, Vec::new()),
            (Some(scratch), _) => self.normed(target, scratch)?,
            (None, _) => (self.x, Vec::new()),
        };
        let next: Option<Norm> = match self.hand {
            Hand::Gives(norm) if handed.is_some() => Some(norm),
            _ => None,
        };
        let (epilogue, residual) = self.epilogue_code();
        let pairs = residual.is_some_and(|residual| {
            let whole = residual.stride.is_multiple_of(2) && residual.span.offset.is_multiple_of(4);
            whole && matches!(residual.dtype, DType::F16 | DType::BF16)
        });
        let takes = handed.is_some() && self.hand == Hand::Takes;
        let map = |tensor: &Tensor, rows: u32| {
            Arg::TensorMap(TensorMap {
                span: tensor.span,
                dtype: tensor.dtype,
                dims: vec![u64::from(tensor.cols), u64::from(tensor.rows)],
                strides: vec![u64::from(tensor.stride) * 2],
                tile: vec![64, rows],
                swizzle: 128,
            })
        };
        let tiles = self.w.rows.div_ceil(wide) * x.rows.div_ceil(columns);
        // Warpgroups of 64 weight rows, and a warp that copies: a whole warpgroup where registers move from it.
        let copiers = if wide == 192 && columns == 256 { 128 } else { 32 };
        let kernel = Kernel::new(target, "linear_wgmma", "linear_wgmma")
            .defines(&[("K", x.cols), ("N", self.w.rows), ("ROWS", x.rows), ("WIDE", wide)])
            .defines(&[("COLUMNS", columns), ("STAGES", stages), ("SPLIT", split)])
            .define("TYPE", code(x.dtype, "linear")?)
            .defines(&self.types(residual, epilogue)?)
            .defines(&[
                ("LIVE", u32::from(self.live.is_some())),
                ("PAIRS", u32::from(pairs)),
                ("GIVES", u32::from(next.is_some())),
                ("TAKES", u32::from(takes)),
            ])
            .grid((tiles * split).min(target.sms / split * split), 1, 1)
            .cluster(split)
            .threads(wide.next_multiple_of(64) * 2 + copiers)
            .shared(shared)
            .arg(map(&x, columns))
            .arg(map(&self.w, wide))
            .optional(self.bias.map(|bias| bias.span))
            .optional(residual.map(|residual| residual.span))
            .tensors(&[&self.y])
            .optional(self.live)
            .optional(handed.map(|(_, squares)| squares))
            .optional(next.map(|norm| norm.weight.span))
            .optional(next.and(handed).map(|(prepared, _)| prepared.span))
            .ints(&[residual.map_or(0, |residual| residual.stride), self.y.stride])
            .arg(Arg::F32(self.norm.map_or(0.0, |norm| norm.eps)));
        launches.push(kernel.lowered());
        Ok(launches)
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

    fn reference_launch(&self, target: &Target) -> Result<Lowered> {
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
