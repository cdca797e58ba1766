//! `kernels/features.cu`: a block per token.

use crate::cuda::launch::{Lowered, Target};
use crate::cuda::lower::Kernel;
use crate::op::Follow;
use crate::ops::prologue::cuda::layout;
use crate::{Error, Result};

impl Follow {
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let s = &self.state;
        let (Some(features), Some(verified)) = (&s.features, &s.drafting) else {
            let problem = "no tables for hidden states".into();
            return Err(Error::Contract { op: "follow".into(), problem });
        };
        let kept = self.x.unwrap_or(features.token);
        let parts = [("OWN", self.own), ("MADE", self.x.is_some())];
        let parts = parts.map(|(name, part)| (name, u32::from(part)));
        let kernel = Kernel::new(target, "follow", "follow")
            .defines(&layout(&s.limits))
            .define("BYTES", self.y.dtype.block_bytes())
            .defines(&parts)
            .grid(self.y.rows, 1, 1)
            .tensors(&[&verified.counts, &verified.q_start, &verified.token])
            .tensors(&[&verified.position, &verified.token_row, &s.seat_len, &s.row_seat])
            .tensors(&[&s.page_table, &kept, &features.last, &features.last_len])
            .tensors(&[&s.counts, &s.token, &s.position, &s.kv_slot, &s.token_row, &self.y])
            .ints(&[self.y.cols, kept.stride, features.last.stride, self.y.stride]);
        Ok(vec![kernel.lowered()])
    }
}
