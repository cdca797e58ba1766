//! Adapters in the launch of a linear (`kernels/linear_wgmma_adapters.cuh`): which linears have them, and what the kernel gets
//! for them. All other linears are followed by a [`Lora`] with kernels of its own.
//!
//! Scratch: counters among the semaphores, and the sums of `x · Aᵀ` behind everything else that the linear has there.

use super::cuda::{NARROW, Plan};
use crate::cuda::launch::Target;
use crate::cuda::lower::{Kernel, SEMAPHORE_BYTES, aligned};
use crate::op::{LinearChain, Lora, LoraParts};
use crate::step::{PARAM_WORDS, param};
use crate::{DType, Result, Tensor};
use std::ops::RangeInclusive;

/// Rows of x for which there are such linears. `1..=0` leaves all adapters to the kernels of `lora`.
const ADAPTED_ROWS: RangeInclusive<u32> = 9..=64;
/// Most slots for which there are: with one adapter for each of 64 rows, few loads of its warps are in flight, and kernels of their own
/// are faster.
const MOST_SLOTS: u32 = 32;
/// Parts of K whose sums are kept apart, best first.
const SLICES: [u32; 9] = [16, 8, 7, 6, 5, 4, 3, 2, 1];

/// Whether linears of this many rows may have their adapters in their own launch.
pub(crate) fn adapts_rows(rows: u32) -> bool {
    ADAPTED_ROWS.contains(&rows)
}

impl LinearChain {
    /// Whether there is a kernel that does all of it, adapters included.
    pub(crate) fn adapts(&self, target: &Target) -> bool {
        self.plan(target).is_ok()
    }

    /// Whether a kernel also does the adapters of this linear, if it has some.
    pub(super) fn suits_adapters(&self, target: &Target, plan: Plan) -> bool {
        let Some(lora) = &self.lora else { return true };
        let Plan::Wgmma { wide, columns, stages, split, turns: 1, bytes: false, even: 0, shared } =
            plan
        else {
            return false;
        };
        let Lora { a, b, .. } = &**lora;
        let types = [self.x, self.w, *a, *b].iter().all(|tensor| tensor.dtype == DType::BF16);
        let stored = matches!(self.y.dtype, DType::BF16 | DType::F32);
        let dense = b.stride == b.cols && aligned(a) && aligned(b);
        let beside = 1024 + 4 * columns + Self::beside_adapters(lora, wide, columns);
        let fits = shared + beside <= target.shared_per_block;
        ADAPTED_ROWS.contains(&self.x.rows)
            && lora.slots() <= MOST_SLOTS
            && columns >= self.x.rows
            && stages <= self.x.cols.div_ceil(64 * split)
            && self.can_share_tile(wide, split)
            && types
            && stored
            && dense
            && fits
            && self.rope.is_none()
            && matches!(b.cols, 16 | 32 | 64)
    }

    /// Whether tiles of `wide` weight rows, with K split, suit the adapters, if there are some: a tile has rows of two parts
    /// at most, and the ring of its three stages is no longer than a share of K.
    pub(super) fn can_share_tile(&self, wide: u32, split: u32) -> bool {
        let Some(lora) = &self.lora else { return true };
        let cut = match &lora.parts {
            LoraParts::Stacked(ends) => match ends[..] {
                [_] => true,
                [first, _] => first.is_multiple_of(16),
                [first, second, _] => {
                    let whole = first.is_multiple_of(16) && second.is_multiple_of(16);
                    whole && second - first >= wide
                }
                _ => false,
            },
            LoraParts::Turns(count) => *count == 1 || *count == 2 && wide != NARROW,
        };
        cut && self.x.cols.div_ceil(64 * split) >= 3
    }

    /// Parts of K that are added up apart.
    fn slices(&self) -> u32 {
        let steps = self.x.cols / 32;
        SLICES.into_iter().find(|slices| steps.is_multiple_of(*slices)).unwrap_or(1)
    }

    /// Bytes of shared memory beside the ring that adapters take.
    pub(super) fn beside_adapters(lora: &Lora, wide: u32, columns: u32) -> u32 {
        let rank = if lora.b.cols == 16 { 16 } else { lora.b.cols + 4 };
        let passes = lora.parts.count().min(2);
        1664 + if wide == 192 { 2048 } else { 768 } + passes * columns * rank * 2
    }

    /// Threads beside those of the tile that copy and work on adapters, if there are some.
    pub(super) fn adapter_threads(&self, wide: u32) -> Option<u32> {
        self.lora.as_ref().map(|_| if wide == 192 { 384 } else { 128 })
    }

    /// Bytes of the sums of `x · Aᵀ`, in slices in f32 and all in bf16.
    pub(super) fn adapters_bytes(&self) -> u64 {
        let row = |lora: &Lora| u64::from(lora.inner()) * (u64::from(self.slices()) * 4 + 2);
        self.lora.as_ref().map_or(0, |lora| u64::from(self.x.rows) * row(lora))
    }

    /// Adds macros and arguments of adapters to a kernel that reads this input and needs so much scratch.
    pub(super) fn add_adapters(
        &self,
        kernel: Kernel,
        input: &Tensor,
        needs: u64,
    ) -> Result<Kernel> {
        let Some(lora) = &self.lora else { return Ok(kernel) };
        let Lora { a, b, state, by_row, .. } = &**lora;
        let scratch = self.scratch.expect("lowering checked its length");
        let bytes = self.adapters_bytes();
        let (counters, sums) =
            (scratch.part(0, SEMAPHORE_BYTES), scratch.part(needs - bytes, bytes));
        let (ends, turns) = lora.ends()?;
        let tables = [&state.token_row, &state.row_seat, &state.params];
        let limits = [state.limits.rows, state.limits.seats, u32::from(*by_row)];
        let kernel = kernel
            .defines(&[
                ("ADAPTERS", lora.slots()),
                ("RANK", b.cols),
                ("PARTS", lora.parts.count()),
                ("ALTERNATE", u32::from(turns > 1)),
                ("SLICES", self.slices()),
                ("PARAM_WORDS", PARAM_WORDS),
                ("PARAM_ADAPTER", param::ADAPTER),
            ])
            .tensors(&[input, a, b])
            .spans(&[sums, counters])
            .tensors(&tables)
            .ints(&[input.stride])
            .ints(&limits)
            .ints(&ends[..2]);
        Ok(kernel)
    }
}
