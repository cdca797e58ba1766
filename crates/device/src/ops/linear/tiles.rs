//! Linears of many rows on Hopper: when `kernels/linear_tiles.cu` is used, and its launch.

use super::cuda::type_of;
use super::hand::tiled;
use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, aligned, code};
use crate::op::{Epilogue, LinearChain, Norm, NormHandoff, RopeKv};
use crate::{DType, Result, Tensor, scaled};

/// Tokens and weight rows that a cluster of two blocks takes at a time.
const CLUSTER_TILE: (u32, u32) = (256, 256);

/// Chunks of 64 columns in flight.
const STAGES: u32 = 4;

impl LinearChain {
    /// Whether `tiles` can run this linear, and (unless `asked` for) faster than cuBLASLt: its waves are well filled,
    /// and it saves a pass over the result or at least loses nothing.
    pub(super) fn suits_tiles(&self, target: &Target, asked: bool) -> bool {
        let halves = self.y.dtype == self.x.dtype;
        let halves = halves && self.bias.is_none_or(|bias| bias.span.offset.is_multiple_of(8));
        let wide = self.y.stride.is_multiple_of(8) && self.y.span.offset.is_multiple_of(16);
        let columns = match self.epilogue {
            Epilogue::GateMul(_) => self.w.rows.is_multiple_of(16),
            Epilogue::Store | Epilogue::Activate(_) => true,
            Epilogue::Residual(r) => aligned(&r) && r.dtype == self.y.dtype,
        };
        let (rows, filled) = (self.x.rows, self.filled(target));
        let faster = match self.epilogue {
            Epilogue::GateMul(_) => rows > 128 && filled > 0.8,
            // A bias goes with a rotation or an activation, which would be a pass of their own.
            Epilogue::Store | Epilogue::Activate(_) if self.bias.is_some() => {
                rows > 512 && filled > 0.8
            }
            Epilogue::Store | Epilogue::Activate(_) => rows > 512 && filled > 0.9,
            // Steps that use the whole token budget are full, and powers of two. Other buckets are mostly padded:
            // there `tiles` gains by not computing the padding and by saving the norm's pass.
            Epilogue::Residual(_)
                if matches!(self.handoff, NormHandoff::Produce(_)) && !rows.is_power_of_two() =>
            {
                rows > 512 && filled > 0.9
            }
            // Loading the residual costs time if a tile's inner dimension is short, and the library is 2 to 4 % faster where
            // there is no norm to prepare and no padding.
            Epilogue::Residual(_) => {
                let saves = matches!(self.handoff, NormHandoff::Produce(_));
                let saves = saves || !rows.is_power_of_two();
                saves && rows > 512 && filled > 0.9 && self.x.cols >= 8192
            }
        };
        halves && wide && columns && (asked || faster)
    }

    /// The tiles of all rows, relative to the tiles that could run in as many rounds as the live rows take. All rows
    /// are counted because cuBLASLt multiplies the padding, too. Four fifths to all rows of a bucket are assumed to
    /// be live.
    fn filled(&self, target: &Target) -> f64 {
        let clusters = target.sms / 2;
        let tiles =
            |rows: u32| rows.div_ceil(CLUSTER_TILE.0) * self.w.rows.div_ceil(CLUSTER_TILE.1);
        let rounds = |rows: u32| f64::from(tiles(rows).div_ceil(clusters));
        let rows = self.x.rows;
        let all = match self.live {
            None => rounds(rows),
            Some(_) => [rows * 4 / 5, rows * 9 / 10, rows].map(rounds).iter().sum::<f64>() / 3.0,
        };
        f64::from(tiles(rows)) / (all * f64::from(clusters))
    }

    /// Whether the kernel can apply this rotation to its sums.
    pub(super) fn rotates(&self, rope: &RopeKv) -> bool {
        let kv = &rope.kv;
        let half = |dtype: DType| matches!(dtype, DType::F16 | DType::BF16);
        let pairs = |tensor: &Tensor| tensor.span.offset.is_multiple_of(8);
        let norms = [&rope.q_norm, &rope.k_norm];
        rope.pairs.is_halves()
            && matches!(kv.head_dim, 64 | 128)
            && half(self.y.dtype)
            && (half(kv.dtype) || kv.dtype == DType::E4M3)
            && kv.span.offset.is_multiple_of(16)
            && rope.rope.stride.is_multiple_of(2)
            && pairs(&rope.rope)
            && norms.iter().all(|norm| norm.is_none_or(|norm| pairs(&norm.weight)))
    }

    pub(super) fn tiles(&self, target: &Target) -> Result<Vec<Lowered>> {
        // One scale for a row of weights goes with one for a row of x.
        let whole = self.w.dtype == DType::F8Row;
        let with_scales = scaled::is_scaled(self.w.dtype);
        let quantised = with_scales.then(|| self.quantised_input(target, whole)).transpose()?;
        let input = match quantised {
            Some(_) => {
                LinearChain { norm: None, scratch: None, ..self.clone() }.prepared_input(target)?
            }
            None => self.prepared_input(target)?,
        };
        let x = input.x;
        let (x_map, w_map) = match &quantised {
            Some(quantised) => (Self::quantised_map(quantised, 128), self.scaled_map(&x, 128, 128)),
            None => (tiled(&x, 128), tiled(&self.w, 128)),
        };
        let (epilogue, residual) = self.epilogue_code();
        let epilogue = if self.rope.is_some() { 3 } else { epilogue };
        let tiles = x.rows.div_ceil(CLUSTER_TILE.0) * self.w.rows.div_ceil(CLUSTER_TILE.1);
        let kernel = Kernel::new(target, "linear_tiles", "linear_tiles")
            .defines(&[("K", x.cols), ("N", self.w.rows), ("STAGES", STAGES), ("BAND", 8)])
            .define("TYPE", code(x.dtype, "linear")?)
            .defines(&self.types(residual, epilogue)?)
            .define("LIVE", u32::from(self.live.is_some()))
            .after(self.after())
            .defines(&self.rotation()?)
            .grid((2 * tiles).min(target.sms / 2 * 2), 1, 1)
            .cluster(2)
            .threads(384)
            .shared(STAGES * (128 + 256) * 128 + 1024)
            .arg(x_map)
            .arg(w_map)
            .optional(self.bias.map(|bias| bias.span))
            .optional(residual.map(|residual| residual.span))
            .tensors(&[&self.y])
            .optional(self.live);
        let kernel = input
            .add_to(kernel)
            .ints(&[x.rows, residual.map_or(0, |residual| residual.stride), self.y.stride])
            .arg(Arg::F32(self.norm.map_or(0.0, |norm| norm.eps)));
        let rope = self.rope.as_deref();
        let eps = |norm: Option<Norm>| Arg::F32(norm.map_or(0.0, |norm| norm.eps));
        let (q_norm, k_norm) =
            (rope.and_then(|rope| rope.q_norm), rope.and_then(|rope| rope.k_norm));
        let kernel = kernel
            .optional(q_norm.map(|norm| norm.weight.span))
            .optional(k_norm.map(|norm| norm.weight.span))
            .optional(rope.map(|rope| rope.rope.span))
            .optional(rope.map(|rope| rope.state.position.span))
            .optional(rope.map(|rope| rope.state.kv_slot.span))
            .optional(rope.map(|rope| rope.kv.span))
            .ints(&rope.map_or([0, 0], |rope| [rope.rope.stride, rope.rope.rows]))
            .arg(eps(q_norm))
            .arg(eps(k_norm));
        let kernel = match rope {
            Some(rope) => kernel.page_scales(&rope.kv),
            None => kernel,
        };
        let kernel = self.add_tiles_scales(kernel, quantised.as_ref());
        let mut launches = quantised.map_or(input.launches, |quantised| quantised.launches);
        launches.push(kernel.lowered());
        Ok(launches)
    }

    /// The constants that the kernel needs to rotate.
    fn rotation(&self) -> Result<Vec<(&'static str, u32)>> {
        let Some(rope) = &self.rope else { return Ok(Vec::new()) };
        let kv = &rope.kv;
        Ok(vec![
            ("D", kv.head_dim),
            ("HQ", rope.q_heads),
            ("HKV", kv.heads),
            ("PAGE", kv.page_size),
            ("QN", u32::from(rope.q_norm.is_some())),
            ("KN", u32::from(rope.k_norm.is_some())),
            ("KT", code(kv.dtype, "linear")?),
            ("QNT", type_of(rope.q_norm.map(|norm| norm.weight))?),
            ("KNT", type_of(rope.k_norm.map(|norm| norm.weight))?),
        ])
    }
}
