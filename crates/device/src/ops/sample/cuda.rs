//! `kernels/sample.cu`: several blocks share a row; the last one finishes it.

use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, SEMAPHORE_BYTES, aligned, code};
use crate::op::Sample;
use crate::ops::prologue::cuda::layout;
use crate::ops::{Named, require};
use crate::{Error, Result};

impl Sample {
    /// Blocks per row: enough to use the whole GPU at small batches.
    fn parts(&self, target: &Target) -> u32 {
        let useful = self.logits.cols.div_ceil(4096);
        (2 * target.sms / self.logits.rows.max(1)).clamp(1, useful.clamp(1, 64))
    }

    pub(super) fn partial_bytes(&self, target: &Target) -> u64 {
        self.best_bytes(target) + self.chosen_bytes()
    }

    /// Bytes of semaphores and of the best logits that blocks found.
    fn best_bytes(&self, target: &Target) -> u64 {
        SEMAPHORE_BYTES + u64::from(self.logits.rows) * u64::from(self.parts(target)) * 8
    }

    /// Bytes of the tokens chosen after each token, where drafts are verified.
    fn chosen_bytes(&self) -> u64 {
        if self.q_len > 1 { u64::from(self.logits.rows) * 4 } else { 0 }
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let s = &self.state;
        let Some(scratch) = self.scratch.filter(|s| s.len >= self.partial_bytes(target)) else {
            let problem = format!("needs {} bytes of scratch", self.partial_bytes(target));
            return Err(Error::Contract { op: "sample".into(), problem });
        };
        // A word for each row of logits, and one for all, counts finished blocks.
        let rows = self.logits.rows;
        let counted = (u64::from(rows) + 1) * 4 <= SEMAPHORE_BYTES;
        require(counted, Self::NAME, || format!("{rows} rows are too many to count"))?;
        let parts = self.parts(target);
        let best = self.best_bytes(target);
        let several: &[_] = if self.q_len > 1 { &[("Q_LEN", self.q_len)] } else { &[] };
        let mut kernel = Kernel::new(target, "sample", "sample")
            .defines(&layout(&s.limits))
            .defines(several)
            .define("XT", code(self.logits.dtype, "sample")?)
            .define("PARTS", parts)
            .define("REPEATS", u32::from(s.repeats))
            .define("ALIGNED", u32::from(aligned(&self.logits)))
            .grid(parts, rows, 1)
            .threads(512)
            .shared(s.limits.mail_layout().mask_words * 4)
            .tensors(&[&self.logits, &s.seat_len, &s.seat_token, &s.params, &s.biases])
            .optional(s.seen.map(|seen| seen.span))
            .tensors(&[&s.counts, &s.row_seat, &s.row_flags, &s.row_q_len])
            .spans(&s.mail)
            .spans(&[s.ring, scratch.part(0, SEMAPHORE_BYTES)])
            .arg(Arg::Address(scratch.part(SEMAPHORE_BYTES, best - SEMAPHORE_BYTES)))
            .ints(&[self.logits.stride])
            .tensors(s.history.as_ref().as_slice());
        if let Some(drafts) = s.row_drafts.as_ref().filter(|_| self.q_len > 1) {
            let chosen = scratch.part(best, self.chosen_bytes());
            kernel = kernel.tensors(&[&s.token, drafts]).spans(&[chosen]);
        }
        Ok(vec![kernel.lowered()])
    }
}
