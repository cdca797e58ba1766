//! Linears whose weights have scales: which kernel, and what its launch has besides that of a plain one.
//!
//! Up to eight rows `stream` widens weights in registers. Beyond that, e4m3 weights are multiplied with x in e4m3,
//! quantised by a launch before (`kernels/quantize.cu`) that takes the norm's place; 4-bit weights are widened in
//! registers. What has no such kernel is widened to bf16 in scratch first (`kernels/widen.cu`).

use super::cuda::Plan;
use crate::cuda::launch::{Arg, Lowered, Target, TensorMap};
use crate::cuda::lower::{Kernel, SEMAPHORE_BYTES, aligned, code};
use crate::op::{Epilogue, LinearChain};
use crate::variant::{LinearVariant, Pick, WgmmaShape};
use crate::{DType, Result, Span, Tensor, scaled};

/// Weight rows that stages of 16 warps hold, for e4m3 and for 4 bits.
const STREAM_WARPS: u32 = 16;
/// Tokens of a tile of `wgmma` with scales.
const MOST_COLUMNS: u32 = 128;
/// Whether kernels take their forms with fewer instructions: `LEAN` in `kernels/linear_stream.cu` and `linear_wgmma.cu`.
const LEAN: bool = true;
/// Rows from which on int4 becomes bf16 in scratch first.
const WIDENS: u32 = 1024;

/// x in e4m3, with its scales.
pub(super) struct QuantisedInput {
    pub(super) x: Tensor,
    scales: Span,
    /// Scales from one group of columns to the next.
    stride: u32,
    pub(super) launches: Vec<Lowered>,
}

/// A format with scales as kernels call it (`kernels/weights.cuh`); 0 for plain weights.
pub(super) fn weight_code(dtype: DType) -> u32 {
    match dtype {
        DType::F8Block | DType::F8Pairs => 1,
        DType::F8Row => 2,
        DType::I4 | DType::I4G64 | DType::I4G32 => 3,
        _ => 0,
    }
}

/// Bytes of 16 rows and 128 columns of 4-bit weights.
fn piece_bytes(dtype: DType) -> u32 {
    dtype.bytes(16 * 128) as u32
}

/// The scales of a matrix, which lie behind its values.
pub(in crate::ops) fn scales_of(w: &Tensor) -> Span {
    let from = w.dtype.bytes(w.rows as usize * w.cols as usize) as u64;
    // 4-bit weights have them inside.
    if from < w.span.len { w.span.part(from, w.span.len - from) } else { w.span }
}

/// A tensor map of 4-bit weights in units of eight bytes, with boxes of 128 columns and `rows` rows: of a piece, of pieces
/// beside each other, of pieces below each other.
fn tiled_pieces(w: &Tensor, rows: u32) -> Arg {
    let group = scaled::group(w.dtype).expect("4-bit weights");
    let (piece, beside) = (w.dtype.bytes(16 * group) as u64, u64::from(w.cols) / group as u64);
    Arg::TensorMap(TensorMap {
        span: w.span,
        dtype: w.dtype,
        dims: vec![piece / 8, beside, u64::from(w.rows) / 16],
        strides: vec![piece, piece * beside],
        tile: vec![piece as u32 / 8, 128 / group as u32, rows / 16],
        swizzle: 0,
    })
}

/// A tensor map with boxes of 128 bytes and `rows` rows.
pub(in crate::ops) fn tiled_bytes(tensor: &Tensor, rows: u32) -> Arg {
    Arg::TensorMap(TensorMap {
        span: tensor.span,
        dtype: DType::U8,
        dims: vec![u64::from(tensor.cols), u64::from(tensor.rows)],
        strides: vec![u64::from(tensor.cols)],
        tile: vec![128, rows],
        swizzle: 128,
    })
}

impl LinearChain {
    /// Whether tensor cores multiply with these scales.
    pub(super) fn scaled_cores(&self, target: &Target) -> bool {
        let (n, k) = (self.w.rows, self.w.cols);
        let gated = matches!(self.epilogue, Epilogue::GateMul(_));
        let shape = match self.w.dtype {
            DType::F8Block => !gated && n.is_multiple_of(128) && k.is_multiple_of(128),
            DType::F8Pairs => gated && n.is_multiple_of(256) && k.is_multiple_of(128),
            DType::F8Row => n.is_multiple_of(128) && k.is_multiple_of(128),
            DType::I4 | DType::I4G64 | DType::I4G32 => {
                n.is_multiple_of(16) && k.is_multiple_of(256)
            }
            _ => false,
        };
        let whole = aligned(&self.x) && self.y.cols.is_multiple_of(8);
        let alone = self.rope.is_none() && self.handoff.is_nothing();
        target.capability == (9, 0) && self.x.dtype == DType::BF16 && shape && whole && alone
    }

    /// The kernel that is best according to measurements of other shapes.
    pub(super) fn scaled_rule(&self, target: &Target) -> Plan {
        if self.scaled_cores(target) {
            if let Some(stages) = self.scaled_stages(target, None) {
                return Plan::Stream { stages };
            }
            let fp8 = scaled::is_fp8(self.w.dtype);
            if fp8 && self.x.rows > 256 && self.suits_tiles(target, true) {
                return Plan::Tiles;
            }
            // Widening a matrix once takes less than widening it for every tile of so many tokens.
            let many = !fp8 && self.x.rows >= WIDENS && self.widens();
            if self.stores_pairs() && !many {
                return self.scaled_wgmma(target, &WgmmaShape::default(), fp8);
            }
        }
        match self.x.rows > 8 && self.widens() {
            true => Plan::Widened,
            false => Plan::Reference,
        }
    }

    /// The kernel that sums a row in the same order whatever the other rows are.
    pub(super) fn scaled_fixed(&self, target: &Target) -> Plan {
        let alone = WgmmaShape { split: Some(1), turns: Some(1), ..WgmmaShape::default() };
        match self.scaled_cores(target) && self.stores_pairs() {
            true => self.scaled_wgmma(target, &alone, false),
            false => Plan::Reference,
        }
    }

    /// The depth of the ring of `stream`, if it can run.
    pub(super) fn scaled_stages(&self, target: &Target, asked: Option<u32>) -> Option<u32> {
        // Blocks that share K exchange sums of two batches.
        let fixed = if self.stream_split() > 1 { 2048 + 4096 } else { 2048 };
        let fits =
            |stages: &u32| self.scaled_shared(target, *stages) <= target.shared_per_block - fixed;
        // More stages than a warp has chunks would only delay the start of the next kernel.
        let chunk = if scaled::group(self.w.dtype).is_some() { 256 } else { 128 };
        let own = (self.x.cols / chunk / self.stream_split()).div_ceil(STREAM_WARPS);
        let chunks = self.rounds(target) * own;
        let most = if chunks <= 6 { 4 } else { 6 };
        let deepest = || (3..=chunks.clamp(3, most)).rev().find(fits);
        let stages = asked.map_or_else(deepest, |stages| Some(stages).filter(fits));
        stages.filter(|_| self.x.rows <= 8)
    }

    /// Shared memory of `stream`: rings, x unless a warp keeps its part, sums.
    pub(super) fn scaled_shared(&self, target: &Target, stages: u32) -> u32 {
        let (rows, k) = (self.x.rows, self.x.cols / self.stream_split());
        let (chunk, stage) = match self.w.dtype {
            DType::I4 | DType::I4G64 | DType::I4G32 => (256, 2 * piece_bytes(self.w.dtype)),
            DType::F8Row => (128, 2048),
            _ => (128, 2048 + 16),
        };
        let each = self.words_of_x(k, chunk);
        let int4 = scaled::group(self.w.dtype).is_some();
        let more = int4 && self.norm.is_none() && rows > 2;
        let most = if more { 24 } else { 16 };
        let held = each <= most && self.norm.is_none_or(|norm| norm.weight.dtype == DType::BF16);
        let x = match held {
            // Lanes of a warp exchange its part of one or two rows.
            true if rows <= 2 => {
                let own = (k / chunk).div_ceil(STREAM_WARPS) * chunk;
                STREAM_WARPS * rows * own * 2
            }
            true => 0,
            false => rows * (2 * k + 64),
        };
        let (rounds, most) = (self.rounds(target), (STREAM_WARPS * 2 / rows).min(4));
        let buffers = if rounds <= most { rounds.max(1) } else { 2 * most };
        STREAM_WARPS * stages * stage + x + buffers * STREAM_WARPS * 16 * rows * 4
    }

    /// Words of x that a lane of `stream` has in registers, if a block has `k` columns of it.
    fn words_of_x(&self, k: u32, chunk: u32) -> u32 {
        (k / chunk).div_ceil(STREAM_WARPS) * (chunk / 32) * self.x.rows.div_ceil(8)
    }

    /// Blocks of a cluster that share K in `stream`: two, where a warp's part of x does not fit its registers otherwise.
    pub(super) fn stream_split(&self) -> u32 {
        let k = self.x.cols;
        let chunk = if scaled::group(self.w.dtype).is_some() { 256 } else { 128 };
        let plain = self.norm.is_none() && !matches!(self.epilogue, Epilogue::GateMul(_));
        let halves = k.is_multiple_of(2 * chunk) && self.words_of_x(k / 2, chunk) <= 16;
        let long = self.words_of_x(k, chunk) > 16 && self.x.rows > 2;
        if LEAN && weight_code(self.w.dtype) > 0 && plain && long && halves { 2 } else { 1 }
    }

    /// The tiles of `wgmma`: those whose busiest block has the least to do.
    pub(super) fn scaled_wgmma(&self, target: &Target, asked: &WgmmaShape, bytes: bool) -> Plan {
        let (rows, n, k) = (self.x.rows, self.w.rows, self.x.cols);
        // Beyond 128 rows MMAs take longer than reading, and three warpgroups of 64 tokens waste the least.
        let (one_round, fp8) =
            (n.div_ceil(192) * rows.div_ceil(64) <= target.sms, scaled::is_fp8(self.w.dtype));
        let full = n.div_ceil(192) * rows.div_ceil(64) * 10 > target.sms * 9;
        let narrow = rows > MOST_COLUMNS
            && match fp8 {
                true => one_round || n.div_ceil(128) * rows.div_ceil(64) <= target.sms,
                false => LEAN && one_round && full,
            };
        let columns = asked.columns.unwrap_or(if narrow { 64 } else { rows });
        let columns = columns.clamp(8, MOST_COLUMNS).next_multiple_of(8);
        let int4 = scaled::group(self.w.dtype).is_some();
        let stage = |wide: u32| {
            let weights = match int4 {
                true => (wide / 16 * piece_bytes(self.w.dtype)).next_multiple_of(1024),
                false => wide * 128,
            };
            weights + if bytes { 1 } else { 2 } * columns * 128
        };
        // While one warpgroup widens, others multiply; as many as have registers for their sums.
        let turns = |wide: u32, split: u32| {
            let most = if columns <= 64 { 192 / wide } else { 128 / wide }.max(1);
            let rule = match (int4, bytes) {
                (true, _) if LEAN => most.min(k / 128 / split).max(1),
                // Where tiles of one warpgroup suit best, two of them scale and multiply in turns.
                (_, true) if LEAN && wide == 64 && columns <= 64 => 2.min(k / 128 / split),
                _ => 1,
            };
            let fits = |turns: &u32| (1..=256 / wide).contains(turns) && *turns <= k / 128 / split;
            if bytes || int4 { asked.turns.filter(fits).unwrap_or(rule) } else { 1 }
        };
        // What warpgroups that take turns add up; behind the ring, if that may hold other tiles already.
        let sums = |wide: u32, split: u32| turns(wide, split) * wide * columns * 4;
        let behind = |wide: u32, split: u32| match (turns(wide, split), split) {
            (2.., 1) => sums(wide, split),
            _ => 0,
        };
        // Besides the ring: barriers, scales of blocks for two tiles, and scales of x for each stage.
        let ring = |wide: u32, split: u32, room: u32| {
            let table = wide / 64 * 2 * (k / 128 / split) * 2 * 4;
            let each = stage(wide) + if bytes { columns * 4 } else { 0 };
            (room.saturating_sub(1024 + 5120 + table + behind(wide, split)) / each).min(20)
        };
        let deepest = |wide: u32, split: u32| {
            // Beside a ring of half a multiprocessor the next kernel can start while this one runs: faster where
            // clusters share a tile, if enough is in flight.
            let halved = ring(wide, split, target.shared_per_sm / 2);
            let suits = split > 1 && columns <= 64 && halved >= 5;
            match asked.half.map_or(suits, |half| half == 1) {
                true => halved,
                false => ring(wide, split, target.shared_per_block),
            }
        };
        let least = |wide: u32, split: u32| match split {
            1 => turns(wide, 1).max(3),
            _ => sums(wide, split).div_ceil(stage(wide)).max(turns(wide, split)).max(3),
        };
        let cost = |wide: u32, split: u32| {
            let tiles = n.div_ceil(wide) * rows.div_ceil(columns);
            let alone = split == 1 || tiles * split <= target.sms;
            let deep = deepest(wide, split) >= least(wide, split);
            let fits = k.is_multiple_of(128 * split) && alone && deep;
            let work = (tiles * split).div_ceil(target.sms) * wide * (k / split);
            // With many rows, blocks with more warpgroups hide more.
            let extra = match (wide, rows > MOST_COLUMNS) {
                (64, true) => 1.1,
                (128, true) => 1.05,
                (64, false) => 1.01,
                _ => 1.0,
            };
            let shares = if split == 1 { 0.0 } else { 6e3 };
            if fits { f64::from(work) * extra + shares } else { f64::INFINITY }
        };
        let wanted = |w: u32, s: u32| asked.wide.unwrap_or(w) == w && asked.split.unwrap_or(s) == s;
        let price = |(w, s): (u32, u32)| cost(w, s) + if wanted(w, s) { 0.0 } else { 1e12 };
        let shapes = [64, 128, 192].into_iter().flat_map(|w| [1, 2].map(|s| (w, s)));
        let (wide, split) =
            shapes.min_by(|a, b| price(*a).total_cmp(&price(*b))).unwrap_or((64, 1));
        let (most, chunks) = (deepest(wide, split), k / 128 / split);
        let stages = asked.stages.unwrap_or(2 * chunks).clamp(least(wide, split).min(most), most);
        let shared = stages * stage(wide) + 1024 + behind(wide, split);
        let turns = turns(wide, split);
        Plan::Wgmma { wide, columns, stages, split, turns, shared, bytes, even: 0 }
    }

    /// Other kernels worth measuring.
    pub(super) fn scaled_variants(&self) -> Vec<LinearVariant> {
        let rows = self.x.rows;
        let stream = (3..=6).map(|stages| LinearVariant::Stream { stages: Some(stages) });
        let bytes: &[u32] = if scaled::is_fp8(self.w.dtype) { &[1, 0] } else { &[0] };
        let columns = [64, rows.div_ceil(16) * 8, 128].map(Some);
        let columns = if rows > 128 { &columns[..] } else { &[None] };
        let mut all: Vec<LinearVariant> = stream.filter(|_| rows <= 8).collect();
        for (&bytes, &columns) in bytes.iter().flat_map(|b| columns.iter().map(move |c| (b, c))) {
            let tiles = [(64, 1), (64, 2), (64, 3), (128, 1), (192, 1)];
            for (split, (wide, turns)) in [1, 2].into_iter().flat_map(|s| tiles.map(|t| (s, t))) {
                for half in [0, 1].map(Some) {
                    all.push(LinearVariant::Wgmma(WgmmaShape {
                        wide: Some(wide),
                        columns,
                        split: Some(split),
                        turns: Some(turns),
                        half,
                        bytes: Some(bytes),
                        ..WgmmaShape::default()
                    }));
                }
            }
        }
        let wide = [LinearVariant::Tiles, LinearVariant::Widen].into_iter();
        all.into_iter()
            .filter(|variant| {
                matches!(variant, LinearVariant::Stream { .. }) || (rows > 4 && rows <= 256)
            })
            .chain(wide.filter(|_| rows > 128))
            .collect()
    }

    /// Threads of `wgmma`: warpgroups of 64 weight rows, and what copies; a warpgroup if it gives up registers.
    pub(super) const fn scaled_threads(wide: u32, turns: u32) -> u32 {
        wide * turns * 2 + if wide * turns > 64 { 128 } else { 32 }
    }

    /// Whether tiles of int4 are widened in halves while MMAs run. With three warpgroups and many sums other warpgroups hide the widening.
    const fn in_halves(wide: u32, columns: u32) -> bool {
        LEAN && !(wide == 192 && columns > 64)
    }

    /// The tensor map of e4m3 weights; any other for 4 bits, which are copied in pieces.
    pub(super) fn scaled_map(&self, x: &Tensor, rows: u32, columns: u32) -> Arg {
        match self.w.dtype {
            DType::I4 | DType::I4G64 | DType::I4G32 if Self::in_halves(rows, columns) => {
                tiled_pieces(&self.w, rows)
            }
            DType::I4 | DType::I4G64 | DType::I4G32 => super::hand::tiled(x, columns),
            _ => tiled_bytes(&self.w, rows),
        }
    }

    /// The size of groups of 4-bit weights.
    fn add_group(&self, kernel: Kernel) -> Kernel {
        match scaled::group(self.w.dtype) {
            Some(group) => kernel.define("GROUP", group),
            None => kernel,
        }
    }

    /// The last arguments of `stream`.
    pub(super) fn add_stream_scales(&self, kernel: Kernel) -> Kernel {
        match weight_code(self.w.dtype) {
            0 => kernel,
            weight => {
                let kernel = self.add_group(kernel.define("WEIGHT", weight));
                // For one or two rows of e4m3 there is little to save.
                let lean = LEAN && (weight == 3 || self.x.rows > 2);
                let kernel =
                    kernel.defines(&[("LEAN", u32::from(lean)), ("SPLIT", self.stream_split())]);
                kernel.spans(&[scales_of(&self.w)])
            }
        }
    }

    /// The last arguments of `wgmma`.
    pub(super) fn add_wgmma_scales(
        &self,
        kernel: Kernel,
        (wide, columns, turns): (u32, u32, u32),
        input: Option<&QuantisedInput>,
    ) -> Kernel {
        let weight = weight_code(self.w.dtype);
        if weight == 0 {
            return kernel;
        }
        self.add_group(kernel)
            .defines(&[("WEIGHT", weight), ("BYTES", u32::from(input.is_some()))])
            .define("TURNS", turns)
            .define("LEAN", u32::from(weight == 3 && Self::in_halves(wide, columns)))
            .spans(&[scales_of(&self.w)])
            .optional(input.map(|input| input.scales))
            .tensors(&[&self.w])
            .ints(&[input.map_or(0, |input| input.stride)])
    }

    /// The last arguments of `tiles`.
    pub(super) fn add_tiles_scales(
        &self,
        kernel: Kernel,
        input: Option<&QuantisedInput>,
    ) -> Kernel {
        let Some(input) = input else { return kernel };
        kernel
            .define("WEIGHT", weight_code(self.w.dtype))
            .spans(&[scales_of(&self.w), input.scales])
            .optional(None)
            .ints(&[input.stride])
    }

    /// Bytes of scratch for x in e4m3 and its scales.
    pub(super) fn quantised_bytes(&self) -> u64 {
        let (rows, k) = (u64::from(self.x.rows), u64::from(self.x.cols));
        SEMAPHORE_BYTES
            + (rows * k).next_multiple_of(1024)
            + k / 128 * scale_stride(self.x.rows) * 4
    }

    /// x, normalised if there is a norm, as e4m3 in scratch. `whole`: one scale for a row.
    pub(super) fn quantised_input(&self, target: &Target, whole: bool) -> Result<QuantisedInput> {
        let scratch = self.scratch.expect("lowering checked its length");
        let (rows, k) = (self.x.rows, self.x.cols);
        let bytes = (u64::from(rows) * u64::from(k)).next_multiple_of(1024);
        let x = Tensor::dense(scratch.part(SEMAPHORE_BYTES, bytes), DType::U8, rows, k);
        let stride = scale_stride(rows);
        let scales = scratch.part(SEMAPHORE_BYTES + bytes, u64::from(k / 128) * stride * 4);
        let by_row = whole || self.norm.is_some();
        let kernel = Kernel::new(target, "quantize", "quantize")
            .defines(&[("K", k), ("MODE", u32::from(self.norm.is_some()))])
            .defines(&[("WHOLE", u32::from(whole)), ("LIVE", u32::from(self.live.is_some()))])
            .define("NT", self.norm.map_or(Ok(2), |norm| code(norm.weight.dtype, Self::NAME))?);
        let kernel = match by_row {
            true => kernel.grid(rows, 1, 1),
            false => kernel.grid((k / 16).div_ceil(256), rows, 1),
        };
        let kernel = kernel
            .tensors(&[&self.x])
            .optional(self.norm.map(|norm| norm.weight.span))
            .tensors(&[&x])
            .spans(&[scales])
            .optional(self.live)
            .ints(&[rows, self.x.stride, k, stride as u32])
            .arg(Arg::F32(self.norm.map_or(0.0, |norm| norm.eps)));
        Ok(QuantisedInput { x, scales, stride: stride as u32, launches: vec![kernel.lowered()] })
    }

    /// The map of x in e4m3.
    pub(super) fn quantised_map(input: &QuantisedInput, rows: u32) -> Arg {
        tiled_bytes(&input.x, rows)
    }

    /// Whether its weights can be widened to bf16 before they are multiplied.
    pub(super) fn widens(&self) -> bool {
        let half = self.x.dtype == DType::BF16 && self.w.dtype != DType::BF16;
        half && self.w.stride == self.w.cols && self.w.cols.is_multiple_of(16)
    }

    /// Bytes of the widened weights.
    fn widened_bytes(&self) -> u64 {
        2 * u64::from(self.w.rows) * u64::from(self.w.cols)
    }

    /// The same linear with weights in bf16, in the last part of the scratch.
    fn widened(&self, target: &Target) -> LinearChain {
        let pick = if self.pick == Pick::Fixed { Pick::Fixed } else { Pick::Rule };
        let (rows, cols) = (self.w.rows, self.w.cols);
        // Any place will do for the question what the kernel needs.
        let span = Span { len: self.widened_bytes(), offset: 0, ..self.w.span };
        let w = Tensor::dense(span, DType::BF16, rows, cols);
        let inner = LinearChain { w, pick, ..self.clone() };
        let Some(scratch) = self.scratch else { return inner };
        let before = Self::before_widened(&inner, target);
        if scratch.len < before + self.widened_bytes() {
            return inner;
        }
        let w = Tensor::dense(scratch.part(before, self.widened_bytes()), DType::BF16, rows, cols);
        LinearChain { w, scratch: Some(scratch.part(0, before)), ..inner }
    }

    /// Scratch before the widened weights: what multiplies them needs, and the semaphores, which stay zero.
    fn before_widened(inner: &LinearChain, target: &Target) -> u64 {
        inner.scratch_bytes(target).max(SEMAPHORE_BYTES).next_multiple_of(1024)
    }

    /// Bytes of scratch with the widened weights.
    pub(super) fn widened_needs(&self, target: &Target) -> u64 {
        let inner = LinearChain { scratch: None, ..self.clone() }.widened(target);
        Self::before_widened(&inner, target) + self.widened_bytes()
    }

    /// Widens the weights, then multiplies.
    pub(super) fn widen(&self, target: &Target) -> Result<Vec<Lowered>> {
        let inner = self.widened(target);
        let pieces = u64::from(self.w.rows) * u64::from(self.w.cols) / 16;
        let blocks = pieces.div_ceil(256).min(u64::from(target.sms) * 16) as u32;
        let widen = Kernel::new(target, "widen", "widen")
            .define("WT", code(self.w.dtype, Self::NAME)?)
            .defines(&[("N", self.w.rows), ("K", self.w.cols)])
            .grid(blocks.max(1), 1, 1)
            .tensors(&[&self.w, &inner.w]);
        let mut launches = vec![widen.lowered()];
        for mut lowered in inner.lower(target)? {
            // A linear that waits by itself fetches weights before it does: these are not there yet.
            if let Lowered::Launch(launch) = &mut lowered {
                launch.waits = false;
            }
            launches.push(lowered);
        }
        Ok(launches)
    }
}

/// Scales of one group of columns: all tokens of whole tiles.
fn scale_stride(rows: u32) -> u64 {
    u64::from(rows.next_multiple_of(256))
}
