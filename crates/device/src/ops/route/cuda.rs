//! The router on a GPU: `kernels/route.cu` where tokens and weights are bf16 and its clusters divide the shape,
//! `kernels/route_ref.cu` elsewhere.

use super::{Route, Routing, Score};
use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, aligned, code};
use crate::ops::Named;
use crate::ops::experts::cuda::PlanRoom;
use crate::variant::{Pick, RouteVariant};
use crate::{DType, Error, Result, Span};

impl Route {
    /// Parts of the columns, one for each warp of sixteen tokens: so that a block has about eight warps, and parts are whole.
    fn parts(&self, tokens: u32) -> Option<u32> {
        let (most, steps) = (128 / tokens, self.x.cols / 32);
        let order = [most, most + 1, most + 2].into_iter().chain((1..most).rev());
        let mut order = order.filter(|parts| steps.is_multiple_of(*parts));
        order.next().filter(|_| self.x.cols.is_multiple_of(32))
    }

    /// Whether clusters of `shares` blocks can take `tokens` tokens each: parts are whole, and a block's shared memory holds
    /// the parts of its logits.
    fn fits(&self, target: &Target, tokens: u32, shares: u32) -> bool {
        let experts = self.w.rows;
        let halves = self.x.dtype == DType::BF16 && self.w.dtype == DType::BF16;
        let dense = aligned(&self.x) && aligned(&self.w) && self.w.stride == self.w.cols;
        if target.capability.0 != 9 || !halves || !dense || !matches!(tokens, 16 | 32 | 64) {
            return false;
        }
        let Some(parts) = self.parts(tokens) else { return false };
        let each = experts / shares.max(1);
        let pad = u32::from(each < 64);
        let bytes = 4 * tokens * (parts * (each + pad) + each);
        experts.is_multiple_of(32)
            && matches!(shares, 1 | 2 | 4 | 8)
            && each.is_multiple_of(8)
            && bytes <= 48 << 10
    }

    /// The kernel. In fixed steps a token's sums have the same order for any number of tokens.
    fn variant(&self, target: &Target) -> RouteVariant {
        let clusters = |(tokens, shares)| RouteVariant::Clusters { tokens, shares };
        // Eight experts or more for a block.
        let shares = |most: u32| most.min(self.w.rows / 8);
        let (few, some, many) = ((16, shares(8)), (32, shares(8)), (64, 2));
        let order = match (self.pick, self.x.rows) {
            (Pick::Named(variant), _) => return variant,
            (Pick::Fixed, _) => [few, few, few],
            (Pick::Best | Pick::Rule, 0..=256) => [few, some, few],
            (Pick::Best | Pick::Rule, 257..=1024) => [some, few, few],
            (Pick::Best | Pick::Rule, _) => [many, some, few],
        };
        let fitting =
            order.into_iter().find(|(tokens, shares)| self.fits(target, *tokens, *shares));
        fitting.map_or(RouteVariant::Reference, clusters)
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let kernel = match self.variant(target) {
            RouteVariant::Clusters { tokens, shares } if self.fits(target, tokens, shares) => {
                self.clustered(target, tokens, shares)?
            }
            _ if self.plans.is_some() => {
                let problem = "only the kernel of clusters makes plans".into();
                return Err(Error::Contract { op: Self::NAME.into(), problem });
            }
            RouteVariant::Reference => self.reference_launch(target)?,
            RouteVariant::Clusters { .. } => {
                let problem = format!("no kernel of the variant {} fits", self.variant(target));
                return Err(Error::Contract { op: Self::NAME.into(), problem });
            }
        };
        Ok(vec![kernel.lowered()])
    }

    /// Where the plan lies that it makes, if it makes one.
    pub(super) fn plan_room(&self, scratch: Span) -> Option<PlanRoom> {
        let assignments = self.x.rows * self.routing.top;
        self.plans.map(|tile| PlanRoom::new(scratch, assignments, self.w.rows, tile))
    }

    /// Whether it can make the plan of the experts after it: one cluster has all tokens, and a block a thread for each
    /// expert and each assignment.
    pub(crate) fn can_plan(&self, target: &Target) -> bool {
        let one = matches!(self.variant(target), RouteVariant::Clusters { tokens: 16, .. });
        let needed = self.w.rows + self.x.rows * self.routing.top;
        let threads = self.parts(16).map_or(0, |parts| 32 * parts);
        one && self.x.rows <= 16 && needed <= threads
    }

    fn clustered(&self, target: &Target, tokens: u32, shares: u32) -> Result<Kernel> {
        let warps = self.parts(tokens).unwrap_or(1) * (tokens / 16);
        let kernel = Kernel::new(target, "route", "route")
            .defines(&[("H", self.x.cols), ("TOKENS", tokens), ("SHARES", shares)])
            .defines(&[("WARPS", warps), ("PLANS", u32::from(self.plans.is_some()))]);
        let kernel = self
            .choice(kernel)
            .grid(self.x.rows.div_ceil(tokens) * shares, 1, 1)
            .cluster(shares)
            .threads(warps * 32)
            .tensors(&[&self.x, &self.w])
            .optional(self.bias.map(|bias| bias.span))
            .tensors(&[&self.y])
            .optional(self.live)
            .ints(&[self.x.rows, self.x.stride])
            .arg(Arg::F32(self.routing.scale));
        let Some(needed) = self.plan_room(self.x.span) else { return Ok(kernel) };
        let scratch = self.scratch.filter(|span| span.len >= needed.bytes);
        match scratch.and_then(|scratch| self.plan_room(scratch)) {
            Some(room) if self.can_plan(target) => Ok(room.arguments(kernel, self.load)),
            _ => {
                let problem =
                    format!("{} bytes of scratch and few tokens are needed to plan", needed.bytes);
                Err(Error::Contract { op: Self::NAME.into(), problem })
            }
        }
    }

    fn reference_launch(&self, target: &Target) -> Result<Kernel> {
        let kernel = Kernel::new(target, "route_ref", "route_ref")
            .define("XT", code(self.x.dtype, Self::NAME)?)
            .define("WT", code(self.w.dtype, Self::NAME)?)
            .define(
                "ALIGNED",
                u32::from(aligned(&self.x) && (!self.w.dtype.is_plain() || aligned(&self.w))),
            )
            .define("H", self.x.cols);
        Ok(self
            .choice(kernel)
            .grid(self.x.rows, 1, 1)
            .tensors(&[&self.x, &self.w])
            .optional(self.bias.map(|bias| bias.span))
            .tensors(&[&self.y])
            .optional(self.live)
            .ints(&[self.x.rows, self.x.stride, self.w.stride])
            .arg(Arg::F32(self.routing.scale)))
    }

    /// What `kernels/route_choose.cuh` wants.
    pub(crate) fn choice(&self, kernel: Kernel) -> Kernel {
        let Routing { top, score, groups, kept, group_top, renormalise, .. } = self.routing;
        let bias = self.bias.map_or(0, |bias| code(bias.dtype, Self::NAME).unwrap_or(0));
        kernel
            .defines(&[
                ("E", self.w.rows),
                ("TOP", top),
                ("SCORE", u32::from(score == Score::Sigmoid)),
            ])
            .defines(&[("GROUPS", groups), ("KEPT", kept), ("GROUP_TOP", group_top)])
            .defines(&[
                ("RENORM", u32::from(renormalise)),
                ("BIAS", u32::from(self.bias.is_some())),
            ])
            .define("BT", bias)
    }
}
