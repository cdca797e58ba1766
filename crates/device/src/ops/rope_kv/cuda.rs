//! `kernels/rope_kv.cu`: several lanes per head, a block per token (with few tokens, several blocks per token).

use crate::Result;
use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, code};
use crate::op::RopeKv;
use crate::ops::{Named, require};

impl RopeKv {
    /// That the kernels can do this rotation.
    pub(crate) fn require_halves(&self) -> Result<()> {
        require(self.pairs.is_halves(), Self::NAME, || "kernels rotate halves only".into())
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        self.require_halves()?;
        let kv = &self.kv;
        let heads = self.q_heads + 2 * kv.heads;
        let wide = [kv.head_dim / 2, self.qkv.stride, self.rope.stride];
        let wide =
            wide.iter().all(|n| n.is_multiple_of(4)) && self.qkv.span.offset.is_multiple_of(16);
        let together = if wide { 4 } else { 1 };
        let lanes = (kv.head_dim / 2 / together).next_power_of_two().clamp(8, 32);
        let blocks = if self.qkv.rows < 64 { heads.div_ceil(256 / lanes) } else { 1 };
        let norm_type = |norm: &Option<crate::op::Norm>| {
            norm.map_or(Ok(0), |norm| code(norm.weight.dtype, "rope_kv"))
        };
        let eps = |norm: &Option<crate::op::Norm>| Arg::F32(norm.map_or(0.0, |norm| norm.eps));
        let kernel = Kernel::new(target, "rope_kv", "rope_kv")
            .defines(&[
                ("D", kv.head_dim),
                ("HQ", self.q_heads),
                ("HKV", kv.heads),
                ("PAGE", kv.page_size),
                ("V", together),
                ("ROUNDS", heads.div_ceil(256 / lanes * blocks)),
                ("QN", u32::from(self.q_norm.is_some())),
                ("KN", u32::from(self.k_norm.is_some())),
                ("XT", code(self.qkv.dtype, "rope_kv")?),
                ("KT", code(kv.dtype, "rope_kv")?),
                ("QNT", norm_type(&self.q_norm)?),
                ("KNT", norm_type(&self.k_norm)?),
            ])
            .grid(self.qkv.rows, blocks, 1)
            .tensors(&[&self.qkv])
            .optional(self.q_norm.map(|norm| norm.weight.span))
            .optional(self.k_norm.map(|norm| norm.weight.span))
            .tensors(&[&self.rope, &self.state.position, &self.state.kv_slot])
            .spans(&[kv.span])
            .ints(&[self.qkv.stride, self.rope.stride, self.rope.rows])
            .arg(eps(&self.q_norm))
            .arg(eps(&self.k_norm))
            .page_scales(kv);
        Ok(vec![kernel.lowered()])
    }
}
