//! Linears whose weights are blocks of a GGUF file (`kernels/linear_blocks.cu`), which stay as the file has them. The
//! kernel takes up to eight rows at once, fewer where x takes too much shared memory; a few more rows are multiplied in
//! turns. Beyond that, weights are widened to bf16 in scratch.

use super::cuda::{Plan, type_of};
use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, aligned, code};
use crate::op::LinearChain;
use crate::{DType, Result};

const WARPS: u32 = 16;
/// Columns of a chunk.
const CHUNK: u32 = 256;
/// Reading the weights so many times takes about as long as widening them.
const MOST_TURNS: u32 = 6;
/// Rows that the kernel takes.
const MOST_ROWS: u32 = 8;
/// Bytes of a row of x of a chunk.
const X_PITCH: u32 = 512 + 64;

/// How the kernel runs: rows at once, and the depth of the ring.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct BlocksPlace {
    each: u32,
    stages: u32,
}

/// Whether the kernel reads blocks of this type.
pub(crate) const fn keeps(dtype: DType) -> bool {
    use DType::{Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    matches!(dtype, Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 | Q4K | Q5K | Q6K)
}

impl LinearChain {
    /// Whether the weights are blocks that can be read as they are.
    pub(super) fn has_blocks(&self, target: &Target) -> bool {
        let whole = self.w.stride == self.w.cols && self.w.span.offset.is_multiple_of(16);
        let columns = self.w.cols.is_multiple_of(self.w.dtype.block_elems() as u32);
        let alone = self.rope.is_none() && self.handoff.is_nothing();
        let halves = self.x.dtype == DType::BF16 && aligned(&self.x);
        keeps(self.w.dtype) && target.capability.0 >= 8 && whole && columns && alone && halves
    }

    /// The rows that are multiplied at once, and where they run, if they are few.
    pub(super) fn blocks_rule(&self, target: &Target) -> Option<Plan> {
        let rows = self.x.rows;
        let fits = |each: u32, stages: u32| {
            self.blocks_shared(target, BlocksPlace { each, stages })
                <= target.shared_per_block - 2048
        };
        let most = (1..=MOST_ROWS.min(rows)).rev().find(|each| fits(*each, 2))?;
        let turns = rows.div_ceil(most);
        if !self.has_blocks(target) || turns > MOST_TURNS {
            return None;
        }
        let each = rows.div_ceil(turns);
        // More stages than a warp has chunks would only delay the start of the next kernel; more than three gave nothing.
        let chunks = self.rounds(target) * self.chunks_of_warp();
        let stages = (2..=chunks.clamp(2, 3)).rev().find(|stages| fits(each, *stages))?;
        Some(Plan::Blocks(BlocksPlace { each, stages }))
    }

    fn chunks_of_warp(&self) -> u32 {
        self.x.cols.div_ceil(CHUNK).div_ceil(WARPS)
    }

    /// Bytes of a row of a stage: an odd number of 16 bytes.
    fn blocks_pitch(&self) -> u32 {
        let row = self.w.dtype.bytes(self.x.cols as usize) as u32;
        let chunk = match self.w.dtype.block_elems() as u32 {
            CHUNK => self.w.dtype.block_bytes() as u32,
            each => CHUNK / each * self.w.dtype.block_bytes() as u32,
        };
        let whole = row.is_multiple_of(16) && chunk.is_multiple_of(16);
        ((chunk + if whole { 0 } else { 14 }).div_ceil(16) | 1) * 16
    }

    /// Shared memory: rings, x and its sums, sums of tiles.
    fn blocks_shared(&self, target: &Target, place: BlocksPlace) -> u32 {
        let BlocksPlace { each: rows, stages } = place;
        let sums = if self.w.dtype == DType::Q6K { 128 } else { 64 };
        let x = WARPS * self.chunks_of_warp() * (rows * X_PITCH + sums * 4);
        let (rounds, most) = (self.rounds(target), (WARPS * 2 / rows).min(4));
        let buffers = if rounds <= most { rounds.max(1) } else { 2 * most };
        WARPS * stages * 16 * self.blocks_pitch() + x + buffers * WARPS * 16 * rows * 4
    }

    /// A launch for each turn.
    pub(super) fn blocks(&self, target: &Target, place: BlocksPlace) -> Result<Vec<Lowered>> {
        let turns = (0..self.x.rows).step_by(place.each as usize);
        turns.map(|from| self.blocks_of(target, from, place)).collect()
    }

    fn blocks_of(&self, target: &Target, from: u32, place: BlocksPlace) -> Result<Lowered> {
        let (epilogue, residual) = self.epilogue_code();
        let place = BlocksPlace { each: place.each.min(self.x.rows - from), ..place };
        let (x, y) = (self.x.below(from), self.y.below(from));
        let residual = residual.map(|residual| residual.below(from));
        let kernel = Kernel::new(target, "linear_blocks", "linear_blocks")
            .defines(&[("K", self.x.cols), ("N", self.w.rows), ("ROWS", place.each)])
            .defines(&[("WARPS", WARPS), ("STAGES", place.stages)])
            .defines(&[("ROUNDS", self.rounds(target)), ("WT", code(self.w.dtype, Self::NAME)?)])
            .define("NT", type_of(self.norm.map(|norm| norm.weight))?)
            .defines(&self.types(residual, epilogue)?)
            .define("NORM", u32::from(self.norm.is_some()))
            .grid(self.w.rows.div_ceil(16).min(target.sms), 1, 1)
            .threads(WARPS * 32)
            .shared(self.blocks_shared(target, place))
            .after(self.after())
            .tensors(&[&x, &self.w])
            .optional(self.bias.map(|bias| bias.span))
            .optional(self.norm.map(|norm| norm.weight.span))
            .optional(residual.map(|residual| residual.span))
            .tensors(&[&y])
            .ints(&[x.stride, residual.map_or(0, |residual| residual.stride), y.stride])
            .arg(Arg::F32(self.norm.map_or(0.0, |norm| norm.eps)));
        Ok(kernel.lowered())
    }

    /// The kernel that sums a row in the same order whatever the other rows are.
    pub(super) fn blocks_fixed(&self, target: &Target) -> Option<Plan> {
        (self.has_blocks(target) && self.widens()).then_some(Plan::Widened)
    }
}
