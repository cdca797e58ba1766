//! `kernels/propose.cu`: a block per row; the first one also counts.

use crate::cuda::launch::{Lowered, Target};
use crate::cuda::lower::{Kernel, code};
use crate::op::Propose;
use crate::ops::prologue::cuda::{layout, ways};
use crate::{Error, Result};

impl Propose {
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let s = &self.state;
        let (Some(drafts), Some(verified)) = (&s.row_drafts, &s.drafting) else {
            let problem = "no tables for a model that drafts".into();
            return Err(Error::Contract { op: "propose".into(), problem });
        };
        let kernel = Kernel::new(target, "propose", "propose")
            .defines(&layout(&s.limits))
            .define("XT", code(self.logits.dtype, "propose")?)
            .define("INDEX", self.index)
            .define("BEHIND", self.behind)
            .grid(self.rows, 1, 1)
            .threads(1024)
            .tensors(&[&self.logits, &verified.counts, &verified.q_start, &verified.token])
            .tensors(&[&s.seat_len, &s.row_seat, &s.row_flags, &s.page_table, drafts])
            .tensors(&[&s.counts, &s.q_start, &s.kv_len, &s.last_index, &s.token])
            .tensors(&[&s.position, &s.kv_slot, &s.token_row])
            .optional(self.ids().map(|ids| ids.span))
            .ints(&[self.logits.cols, self.logits.stride, self.rows, ways(self.rows, target)]);
        Ok(vec![kernel.lowered()])
    }
}
