//! Linears of up to 256 rows on Hopper: the tiles of `kernels/linear_wgmma.cu`, and its launch.

use super::cuda::{NARROW, Plan};
use super::hand::tiled;
use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, code};
use crate::op::{LinearChain, NormHandoff};
use crate::variant::WgmmaShape;
use crate::{DType, Result, scaled};

/// Columns of x from which three shares that differ by some chunks of 64 are expected to be worth it.
const UNEVEN: u32 = 2560;

impl LinearChain {
    pub(super) fn wgmma_plan(&self, target: &Target, asked: &WgmmaShape) -> Plan {
        let (rows, n, k) = (self.x.rows, self.w.rows, self.x.cols);
        let whole = |columns: u32| columns.next_multiple_of(if columns > 128 { 16 } else { 8 });
        let given = asked.columns.filter(|columns| (8..=256).contains(columns));
        let columns = whole(given.unwrap_or(rows.min(256)));
        let gives = matches!(self.handoff, NormHandoff::Produce(_));
        // Microseconds for what the busiest block reads, and for splitting K.
        let cost = |wide: u32, split: u32| {
            let tiles = n.div_ceil(wide) * rows.div_ceil(columns);
            // Clusters of more than two do not fill the GPU in one wave, but few tiles need them: of three, five fit
            // each part of 16 multiprocessors.
            let most = match split {
                1 | 2 => u32::MAX,
                3 => target.sms / 16 * 5,
                _ => 16,
            };
            let alone = split == 1 || (tiles * split <= target.sms && tiles <= most);
            let room = wide + columns <= if asked.wide == Some(wide) { 448 } else { 320 };
            let uneven = split == 3 && k >= UNEVEN && k.is_multiple_of(64);
            let fits = (uneven || k.is_multiple_of(64 * split)) && alone && room;
            // The MMA of a narrow tile reads 16 rows past it, and the tile has no whole 64 columns for the norm
            // handoff.
            let fits = fits && (wide != NARROW || (columns >= 16 && split == 1 && !gives));
            let fits = fits && self.can_share_tile(wide, split);
            let rounds = (tiles * split).div_ceil(target.sms);
            let share = k.div_ceil(64 * split) * 64;
            let reads = f64::from(rounds * wide) * f64::from(share) * 2.0 / 34e3;
            let extra = match wide {
                NARROW => 1.05,
                64 => 1.01,
                _ => 1.0,
            };
            let shares = match split {
                1 => 0.0,
                2 => 0.15,
                3 | 4 => 0.4,
                _ => 2.5,
            };
            if fits { reads * extra + shares } else { f64::INFINITY }
        };
        let shapes =
            [NARROW, 64, 128, 192].into_iter().flat_map(|w| [1, 2, 3, 4, 8].map(|s| (w, s)));
        let wanted = |w: u32, s: u32| asked.wide.unwrap_or(w) == w && asked.split.unwrap_or(s) == s;
        // The requested tiles if they can run, else the cheapest that can.
        let price = |(w, s): (u32, u32)| cost(w, s) + if wanted(w, s) { 0.0 } else { 1e6 };
        let (wide, split) =
            shapes.min_by(|a, b| price(*a).total_cmp(&price(*b))).unwrap_or((64, 1));
        let stage = (wide + columns) * 128;
        let chunks = k.div_ceil(64 * split) * if split > 1 || self.lora.is_some() { 1 } else { 2 };
        // As deep as fits, so that two blocks of a kernel never share a multiprocessor.
        let beside = 2048 + 4 * columns + if gives { wide / 4 * columns } else { 0 };
        let lora = self.lora.as_ref();
        let adapters = lora.map_or(0, |lora| Self::beside_adapters(lora, wide, columns));
        let most = ((target.shared_per_block - beside - adapters) / stage).min(20);
        // With K split, the sums of a tile take the place of the ring.
        let least = (wide * columns * 4).div_ceil(stage).max(3);
        // A little more than half of a multiprocessor's memory: blocks of attention fit beside it, so that each
        // kernel may start while the other runs, but no two blocks of the same linear fit.
        let half = target.shared_per_sm / 2 - 1024;
        let halved = asked.half.map_or(wide <= 64 && columns <= 64, |half| half == 1);
        let deep = if halved { (half + 3072).saturating_sub(beside) / stage } else { most };
        let stages = asked.stages.unwrap_or(deep.min(chunks)).clamp(least.min(most), most);
        let shared = stages * stage + 1024;
        // If all of K fits the ring, two resident blocks are harmless.
        let shared = if halved && stages < chunks { shared.max(half) } else { shared };
        let many = split == 1 && rows > columns && self.handoff.is_nothing();
        let even = asked.even.filter(|even| many && *even == 1).unwrap_or(0);
        Plan::Wgmma { wide, columns, stages, split, turns: 1, shared, bytes: false, even }
    }

    pub(super) fn wgmma(&self, target: &Target, plan: Plan) -> Result<Vec<Lowered>> {
        let Plan::Wgmma { wide, columns, stages, split, turns, shared, bytes, even } = plan else {
            return Ok(vec![self.reference_launch(target)?]);
        };
        let quantised = bytes.then(|| self.quantised_input(target, false)).transpose()?;
        let input = match quantised {
            Some(_) => {
                LinearChain { norm: None, scratch: None, ..self.clone() }.prepared_input(target)?
            }
            None => self.prepared_input(target)?,
        };
        let x = input.x;
        let (epilogue, residual) = self.epilogue_code();
        let pairs = residual.is_some_and(|residual| {
            let whole = residual.stride.is_multiple_of(2) && residual.span.offset.is_multiple_of(4);
            whole && matches!(residual.dtype, DType::F16 | DType::BF16)
        });
        let tiles = self.w.rows.div_ceil(wide) * x.rows.div_ceil(columns);
        let blocks = (tiles * split).min(target.sms / split * split);
        // Warpgroups of 64 weight rows, and a warp that copies; that is a whole warpgroup if it gives up registers.
        let copiers = if wide == 192 && columns > 160 { 128 } else { 32 };
        let copiers = self.adapter_threads(wide).unwrap_or(copiers);
        let with_scales = scaled::is_scaled(self.w.dtype);
        let threads = match with_scales {
            true => Self::scaled_threads(wide, turns),
            false => wide.next_multiple_of(64) * 2 + copiers,
        };
        let x_map = match &quantised {
            Some(quantised) => Self::quantised_map(quantised, columns),
            None => tiled(&x, columns),
        };
        let w_map = match with_scales {
            true => self.scaled_map(&x, wide, columns),
            false => tiled(&self.w, wide),
        };
        let kernel = Kernel::new(target, "linear_wgmma", "linear_wgmma")
            .defines(&[("K", x.cols), ("N", self.w.rows), ("ROWS", x.rows), ("WIDE", wide)])
            .defines(&[("COLUMNS", columns), ("STAGES", stages), ("SPLIT", split)])
            .define("TYPE", code(x.dtype, "linear")?)
            .defines(&self.types(residual, epilogue)?)
            .defines(&[("LIVE", u32::from(self.live.is_some())), ("PAIRS", u32::from(pairs))])
            .grid(blocks, 1, 1)
            .after(self.after())
            .cluster(split)
            .threads(threads)
            .shared(shared)
            .arg(x_map)
            .arg(w_map)
            .optional(self.bias.map(|bias| bias.span))
            .optional(residual.map(|residual| residual.span))
            .tensors(&[&self.y])
            .optional(self.live);
        let kernel = if even > 0 { kernel.define("EVEN", even) } else { kernel };
        let kernel = input
            .add_to(kernel)
            .ints(&[residual.map_or(0, |residual| residual.stride), self.y.stride])
            .arg(Arg::F32(self.norm.map_or(0.0, |norm| norm.eps)));
        let kernel = self.add_wgmma_scales(kernel, (wide, columns, turns), quantised.as_ref());
        let kernel = self.add_adapters(kernel, &x, self.needs(plan, target))?;
        let mut launches = quantised.map_or(input.launches, |quantised| quantised.launches);
        launches.push(kernel.lowered());
        Ok(launches)
    }
}
