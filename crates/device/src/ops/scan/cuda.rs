//! `kernels/scan.cu`: a block has columns of one head's matrix of one row in registers and takes the row's tokens in order. Rows of
//! many tokens may run by chunks before it (`chunks.rs`).

use super::chunks::LONG;
use super::{LENGTH_EPS, Rule};
use crate::Result;
use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, code};
use crate::op::Scan;
use crate::ops::Named;

/// Columns of a warp.
const COLUMNS: u32 = 8;

impl Scan {
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        self.check_variant(target)?;
        let mut launches = Vec::new();
        if self.by_chunks(target) {
            launches.extend(self.chunk_launches(target)?);
        }
        launches.push(self.by_tokens(target)?);
        Ok(launches)
    }

    fn by_tokens(&self, target: &Target) -> Result<Lowered> {
        let (s, limits) = (&self.state, &self.state.limits);
        let Scan { heads, groups, turns, key, value, .. } = *self;
        let parts = value / COLUMNS;
        let warps = [4, 2, 1].into_iter().find(|&warps| parts.is_multiple_of(warps)).unwrap_or(1);
        // Queries and keys of a tile are in shared memory, and accepted drafts that are taken from the log.
        let tile = match (self.single, self.q_len > 1, key > 128) {
            (true, ..) => limits.drafts().max(1),
            (false, true, _) => limits.tokens_per_row,
            (false, false, false) => 32,
            (false, false, true) => 16,
        };
        let (delta, least) = match self.rule {
            Rule::Delta => (1, 0.0),
            Rule::StateSpace { least } => (0, least),
        };
        let at = self.columns(0);
        let skip = self.skip.as_ref();
        let kernel = Kernel::new(target, "scan", "scan")
            .defines(&[
                ("KEY", key),
                ("VALUE", value),
                ("HEADS", heads),
                ("SHARE", if turns { 0 } else { heads / groups }),
                ("GROUPS", groups),
                ("Q_AT", at.query as u32),
                ("K_AT", at.key as u32),
                ("V_AT", at.value as u32),
                ("DELTA", delta),
                ("SINGLE", u32::from(self.single)),
                ("VERIFY", u32::from(self.q_len > 1)),
                ("DRAFTS", limits.drafts()),
                ("LOGGED", limits.logged()),
                ("CHANGES_AT", self.log().changes as u32),
                ("DECAYS_AT", self.log().decays as u32),
                ("LOG_COLS", self.log().cols),
                ("WARPS", warps),
                ("TILE", tile),
                ("LONG", if self.by_chunks(target) { LONG } else { 0 }),
                ("SKIP", u32::from(skip.is_some())),
                ("XT", code(self.x.dtype, Self::NAME)?),
                ("GT", code(self.gates.dtype, Self::NAME)?),
                ("AT", code(self.a.dtype, Self::NAME)?),
                ("DT", code(self.dt.dtype, Self::NAME)?),
                ("ST", skip.map_or(Ok(0), |skip| code(skip.dtype, Self::NAME))?),
                ("YT", code(self.y.dtype, Self::NAME)?),
            ])
            .grid(parts / warps, heads, self.rows)
            .threads(32 * warps)
            .tensors(&[&self.x, &self.gates, &self.a, &self.dt])
            .optional(skip.map(|skip| skip.span))
            .tensors(&[&self.carry, &self.y, &s.row_seat, &s.q_start, &s.kv_len])
            .optional(s.row_replay.map(|replay| replay.span))
            .ints(&[limits.seats, limits.context(), self.from])
            .ints(&[self.x.stride, self.gates.stride, self.carry.stride, self.y.stride])
            .arg(Arg::F32(least))
            .arg(Arg::F32(LENGTH_EPS));
        Ok(kernel.lowered())
    }
}
