//! `kernels/draft_rows.cu`: one block.

use crate::cuda::launch::{Lowered, Target};
use crate::cuda::lower::Kernel;
use crate::op::DraftRows;
use crate::ops::prologue::cuda::{layout, ways};
use crate::{Error, Result};

impl DraftRows {
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let s = &self.state;
        let (Some(history), Some(drafts), Some(verified)) =
            (&s.history, &s.row_drafts, &s.drafting)
        else {
            let problem = "no tables for a model that drafts".into();
            return Err(Error::Contract { op: "draft_rows".into(), problem });
        };
        let kernel = Kernel::new(target, "draft_rows", "draft_rows")
            .defines(&layout(&s.limits))
            .define("EACH", self.each)
            .define("BEHIND", self.behind)
            .define("DRAFTS", self.drafts)
            .threads(1024)
            .tensors(&[&verified.counts, &s.seat_len, &s.row_seat, &s.row_flags, &s.page_table])
            .tensors(&[history, drafts, &s.counts, &s.q_start, &s.kv_len, &s.last_index, &s.token])
            .tensors(&[&s.position, &s.kv_slot, &s.token_row])
            .ints(&[self.rows, ways(self.rows, target)]);
        Ok(vec![kernel.lowered()])
    }
}
