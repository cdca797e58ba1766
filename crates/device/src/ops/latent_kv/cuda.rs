//! `kernels/latent_kv.cu`: a block for each token.

use crate::Result;
use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, code};
use crate::op::LatentKv;
use crate::ops::Named;

impl LatentKv {
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let (kv, norm) = (&self.kv, &self.norm);
        let kernel = Kernel::new(target, "latent_kv", "latent_kv")
            .defines(&[
                ("D", kv.head_dim),
                ("LATENT", self.latent()),
                ("HQ", self.heads),
                ("PAGE", kv.page_size),
                ("HALVES", u32::from(self.pairs.is_halves())),
                ("QT", code(self.q.dtype, Self::NAME)?),
                ("XT", code(self.x.dtype, Self::NAME)?),
                ("WT", code(norm.weight.dtype, Self::NAME)?),
                ("KT", code(kv.dtype, Self::NAME)?),
            ])
            .grid(self.q.rows, 1, 1)
            .tensors(&[&self.q, &self.x, &norm.weight, &self.rope])
            .tensors(&[&self.state.position, &self.state.kv_slot])
            .spans(&[kv.span])
            .ints(&[self.q.stride, self.x.stride, self.from, self.rope.stride, self.rope.rows])
            .arg(Arg::F32(norm.eps));
        Ok(vec![kernel.lowered()])
    }
}
