//! `kernels/sample.cu`: several blocks share a row; the last one finishes it.

use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, SEMAPHORE_BYTES, aligned, code};
use crate::op::Sample;
use crate::ops::prologue::cuda::layout;
use crate::ops::{Named, require};
use crate::step::ring;
use crate::{Error, Result};

impl Sample {
    /// Blocks per row: enough to use the whole GPU at small batches.
    fn parts(&self, target: &Target) -> u32 {
        let useful = self.logits.cols.div_ceil(4096);
        (2 * target.sms / self.rows.max(1)).clamp(1, useful.clamp(1, 64))
    }

    pub(super) fn partial_bytes(&self, target: &Target) -> u64 {
        SEMAPHORE_BYTES + u64::from(self.rows) * u64::from(self.parts(target)) * 8
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let s = &self.state;
        let Some(scratch) = self.scratch.filter(|s| s.len >= self.partial_bytes(target)) else {
            let problem = format!("needs {} bytes of scratch", self.partial_bytes(target));
            return Err(Error::Contract { op: "sample".into(), problem });
        };
        // A word for each row, and one for all rows, counts finished blocks.
        let counted = (u64::from(self.rows) + 1) * 4 <= SEMAPHORE_BYTES;
        require(counted, Self::NAME, || format!("{} rows are too many to count", self.rows))?;
        let parts = self.parts(target);
        let places: &[_] = match s.limits.tokens_per_row {
            1 => &[],
            _ => &[("RING_PLACE_WORDS", ring::PLACE_WORDS)],
        };
        let kernel = Kernel::new(target, "sample", "sample")
            .defines(&layout(&s.limits))
            .defines(places)
            .define("XT", code(self.logits.dtype, "sample")?)
            .define("PARTS", parts)
            .define("REPEATS", u32::from(s.repeats))
            .define("ALIGNED", u32::from(aligned(&self.logits)))
            .grid(parts, self.rows, 1)
            .threads(512)
            .shared(s.limits.mail_layout().mask_words * 4)
            .tensors(&[&self.logits, &s.seat_len, &s.seat_token, &s.params, &s.biases])
            .optional(s.seen.map(|seen| seen.span))
            .tensors(&[&s.counts, &s.row_seat, &s.row_flags, &s.row_q_len])
            .spans(&s.mail)
            .spans(&[s.ring, scratch.part(0, SEMAPHORE_BYTES)])
            .arg(Arg::Address(scratch.part(SEMAPHORE_BYTES, scratch.len - SEMAPHORE_BYTES)))
            .ints(&[self.logits.stride]);
        Ok(vec![kernel.lowered()])
    }
}
