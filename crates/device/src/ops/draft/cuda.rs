//! `kernels/draft.cu`: a block per row.

use super::LONGEST;
use crate::cuda::launch::{Lowered, Target};
use crate::cuda::lower::Kernel;
use crate::op::Draft;
use crate::ops::prologue::cuda::layout;
use crate::{Error, Result};

impl Draft {
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let s = &self.state;
        let (Some(history), Some(drafts)) = (&s.history, &s.row_drafts) else {
            let problem = "no tables for drafts".into();
            return Err(Error::Contract { op: "draft".into(), problem });
        };
        let kernel = Kernel::new(target, "draft", "draft")
            .defines(&layout(&s.limits))
            .define("Q_LEN", self.q_len)
            .define("LONGEST", LONGEST)
            .grid(self.rows, 1, 1)
            .threads(512)
            .tensors(&[&s.counts, &s.seat_len, &s.row_seat, &s.row_flags, &s.q_start])
            .tensors(&[&s.page_table, history, &s.token, drafts]);
        Ok(vec![kernel.lowered()])
    }
}
