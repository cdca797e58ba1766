//! `kernels/lora_groups.cu` for bf16 matrices: blocks belong to an adapter. `kernels/lora.cu` for all others: a warp per
//! column of `x · Aᵀ`, then a thread per column of `y`.

use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, SEMAPHORE_BYTES, aligned, code};
use crate::op::{Lora, LoraParts};
use crate::ops::{Named, require};
use crate::step::{PARAM_WORDS, param};
use crate::{DType, Error, Result, Span};

/// Parts that the kernels tell apart.
const MOST_PARTS: usize = 4;
/// Rows that a block looks through, and its threads.
const CHUNK: u32 = 256;
/// Columns of `x · Aᵀ` that a block makes.
const COLUMNS: u32 = 16;
/// Elements of k that a block adds up.
const SLICE: u32 = 2048;
/// Rows whose sums a block keeps at a time.
const GROUP: u32 = 8;

impl Lora {
    /// Whether blocks belong to adapters.
    fn grouped(&self, target: &Target) -> bool {
        let Lora { x, a, b, .. } = self;
        let plain = [x, a, b].iter().all(|tensor| tensor.dtype == DType::BF16 && aligned(tensor));
        let fits = x.cols.is_multiple_of(8) && b.cols == b.stride && self.inner() <= 1024;
        target.capability.0 >= 8 && plain && fits
    }

    /// Parts of k that are added up apart. Depends on k alone, so that the order of addition does.
    fn slices(&self, target: &Target) -> u32 {
        if self.grouped(target) { self.x.cols.div_ceil(SLICE) } else { 1 }
    }

    /// Bytes of the sums.
    pub(super) fn sums_bytes(&self, target: &Target) -> u64 {
        let row = u64::from(self.inner() * self.slices(target)) * 4;
        u64::from(self.x.rows) * row
    }

    /// Where each part ends, or in how many turns they come.
    pub(crate) fn ends(&self) -> Result<([u32; MOST_PARTS], u32)> {
        let mut ends = [u32::MAX; MOST_PARTS];
        let turns = match &self.parts {
            LoraParts::Stacked(all) => {
                require(all.len() <= MOST_PARTS, Self::NAME, || "too many parts".into())?;
                ends[..all.len()].copy_from_slice(all);
                0
            }
            LoraParts::Turns(count) => *count,
        };
        Ok((ends, turns))
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        require(!self.copies(), Self::NAME, || "y is not in the place of base".into())?;
        let bytes = SEMAPHORE_BYTES + self.sums_bytes(target);
        let Some(scratch) = self.scratch.filter(|scratch| scratch.len >= bytes) else {
            let problem = format!("needs {bytes} bytes of scratch");
            return Err(Error::Contract { op: Self::NAME.into(), problem });
        };
        // The semaphores of other ops stay zero.
        let sums = scratch.part(SEMAPHORE_BYTES, self.sums_bytes(target));
        match self.grouped(target) {
            true => self.lower_groups(target, sums),
            false => self.lower_rows(target, sums),
        }
    }

    fn lower_groups(&self, target: &Target, sums: Span) -> Result<Vec<Lowered>> {
        let Lora { x, a, b, y, state, .. } = self;
        let (inner, slices, slots) = (self.inner(), self.slices(target), self.slots());
        let (ends, turns) = self.ends()?;
        let tables = [&state.token_row, &state.row_seat, &state.params];
        let (limits, by_row) = ([state.limits.rows, state.limits.seats], u32::from(self.by_row));
        let chunks = x.rows.div_ceil(CHUNK);
        let kernel = |entry| {
            Kernel::new(target, "lora_groups", entry).defines(&[
                ("PARAM_WORDS", PARAM_WORDS),
                ("PARAM_ADAPTER", param::ADAPTER),
                ("RANK", b.cols),
                ("INNER", inner),
                ("WIDE", x.cols),
                ("SLICE", SLICE),
                ("SLICES", slices),
                ("GROUP", GROUP),
            ])
        };
        let groups = inner.div_ceil(COLUMNS);
        let shrink = kernel("lora_shrink")
            .define("SHRINK", 1)
            .grid(groups * slices, slots, chunks)
            .threads(CHUNK)
            .tensors(&[x, a])
            .arg(Arg::Address(sums))
            .tensors(&tables)
            .ints(&[x.rows, x.stride, a.stride])
            .ints(&limits)
            .ints(&[by_row, groups])
            .optional(self.live);
        let expand = kernel("lora_expand")
            .define("YT", code(y.dtype, Self::NAME)?)
            .grid(y.cols.div_ceil(CHUNK), slots, chunks)
            .threads(CHUNK)
            .arg(Arg::Address(sums))
            .tensors(&[b, y])
            .tensors(&tables)
            .ints(&[y.rows, y.cols, y.stride])
            .ints(&limits)
            .ints(&[by_row, turns])
            .ints(&ends)
            .optional(self.live);
        Ok(vec![shrink.lowered(), expand.lowered()])
    }

    fn lower_rows(&self, target: &Target, sums: Span) -> Result<Vec<Lowered>> {
        let Lora { x, a, b, y, state, .. } = self;
        let (inner, rank) = (self.inner(), b.cols);
        let (ends, turns) = self.ends()?;
        let tables = [&state.token_row, &state.row_seat, &state.params];
        let limits = [state.limits.rows, state.limits.seats, self.slots()];
        let by_row = u32::from(self.by_row);
        let types = [
            ("XT", code(x.dtype, Self::NAME)?),
            ("AT", code(a.dtype, Self::NAME)?),
            ("BT", code(b.dtype, Self::NAME)?),
            ("YT", code(y.dtype, Self::NAME)?),
            ("ALIGNED", u32::from(aligned(x) && aligned(a))),
            ("PARAM_WORDS", PARAM_WORDS),
            ("PARAM_ADAPTER", param::ADAPTER),
        ];
        let shrink = Kernel::new(target, "lora", "lora_shrink")
            .defines(&types)
            .grid(inner.div_ceil(8), x.rows, 1)
            .tensors(&[x, a])
            .arg(Arg::Address(sums))
            .tensors(&tables)
            .ints(&[x.cols, x.stride, a.stride, inner])
            .ints(&limits)
            .ints(&[by_row])
            .optional(self.live);
        let expand = Kernel::new(target, "lora", "lora_expand")
            .defines(&types)
            .grid(y.cols.div_ceil(256), y.rows, 1)
            .shared(inner * 4)
            .arg(Arg::Address(sums))
            .tensors(&[b, y])
            .tensors(&tables)
            .ints(&[y.cols, y.stride, b.stride, inner, rank])
            .ints(&limits)
            .ints(&[by_row, turns])
            .ints(&ends)
            .optional(self.live);
        Ok(vec![shrink.lowered(), expand.lowered()])
    }
}
