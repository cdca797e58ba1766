//! `kernels/attention_ref.cu` for every format.

use crate::Result;
use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, code};
use crate::op::Attention;

impl Attention {
    pub(crate) fn scratch_bytes(&self, _target: &Target) -> u64 {
        0
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let mut launches = match &self.rope {
            Some(rope) => rope.lower(target)?,
            None => Vec::new(),
        };
        launches.push(self.reference_launch(target)?);
        Ok(launches)
    }

    fn reference_launch(&self, target: &Target) -> Result<Lowered> {
        let (kv, s) = (&self.kv, &self.state);
        let kernel = Kernel::new(target, "attention_ref", "attention_ref")
            .defines(&[
                ("D", kv.head_dim),
                ("HQ", self.q_heads),
                ("HKV", kv.heads),
                ("PAGE", kv.page_size),
                ("WINDOW", self.window.unwrap_or(0)),
                ("SINGLE", u32::from(self.single)),
                ("XT", code(self.qkv.dtype, "attention")?),
                ("KT", code(kv.dtype, "attention")?),
                ("YT", code(self.out.dtype, "attention")?),
            ])
            .grid(self.out.rows, self.q_heads, 1)
            .threads(128)
            .tensors(&[&self.qkv])
            .spans(&[kv.span])
            .tensors(&[&self.out, &s.row_seat, &s.q_start, &s.kv_len, &s.page_table, &s.token_row])
            .ints(&[self.rows, s.limits.pages_per_seat, self.qkv.stride, self.out.stride])
            .arg(Arg::F32(self.scale));
        Ok(kernel.lowered())
    }
}
