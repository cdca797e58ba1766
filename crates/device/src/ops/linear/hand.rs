//! What the Hopper kernels of a product read as x and hand on: a norm between two products may have no launch of its own.

use crate::cuda::launch::{Arg, Lowered, Target, TensorMap};
use crate::cuda::lower::{Kernel, SEMAPHORE_BYTES};
use crate::op::{LinearChain, Norm, NormHandoff, RmsNorm};
use crate::{Result, Span, Tensor};

/// Who prepares the input of a product, and for whom it prepares.
pub(super) struct Handing {
    /// What the product reads.
    pub(super) x: Tensor,
    /// What makes it, if it is not there yet.
    pub(super) launches: Vec<Lowered>,
    /// Whether x was prepared by the product before, and its rows' scales are for this one to apply.
    pub(super) takes: bool,
    /// Sums of squares, given or taken.
    pub(super) squares: Option<Span>,
    /// The norm that this product prepares for.
    pub(super) next: Option<Norm>,
    /// Where to.
    pub(super) prepared: Option<Span>,
}

impl Handing {
    /// Tells a kernel: two macros, and three arguments after the live rows.
    pub(super) fn tell(&self, kernel: Kernel) -> Kernel {
        kernel
            .defines(&[("GIVES", u32::from(self.next.is_some())), ("TAKES", u32::from(self.takes))])
            .optional(self.squares)
            .optional(self.next.map(|norm| norm.weight.span))
            .optional(self.prepared)
    }
}

/// A tensor that a kernel copies by blocks of 64 columns and so many rows.
pub(super) fn tiled(tensor: &Tensor, rows: u32) -> Arg {
    Arg::TensorMap(TensorMap {
        span: tensor.span,
        dtype: tensor.dtype,
        dims: vec![u64::from(tensor.cols), u64::from(tensor.rows)],
        strides: vec![u64::from(tensor.stride) * 2],
        tile: vec![64, rows],
        swizzle: 128,
    })
}

impl LinearChain {
    /// Without scratch nothing can be handed on, and nothing prepared.
    pub(super) fn handing(&self, target: &Target) -> Result<Handing> {
        let plain = |(x, launches)| Handing {
            x,
            launches,
            takes: false,
            squares: None,
            next: None,
            prepared: None,
        };
        let Some(scratch) = self.scratch else { return Ok(plain((self.x, Vec::new()))) };
        Ok(match self.handoff {
            NormHandoff::Nothing => plain(self.normed(target, scratch)?),
            NormHandoff::Consume => {
                let (prepared, squares) = self.handed(scratch);
                let squares = Some(squares);
                Handing { takes: true, squares, ..plain((prepared, Vec::new())) }
            }
            NormHandoff::Produce(norm) => {
                let (prepared, squares) = self.handed(scratch);
                let (squares, prepared) = (Some(squares), Some(prepared.span));
                let own = plain(self.normed(target, scratch)?);
                Handing { squares, prepared, next: Some(norm), ..own }
            }
        })
    }

    /// The input as the product reads it, and the launch that makes it if there is a norm.
    pub(super) fn normed(&self, target: &Target, scratch: Span) -> Result<(Tensor, Vec<Lowered>)> {
        let Some(norm) = self.norm else { return Ok((self.x, Vec::new())) };
        let span = scratch.part(SEMAPHORE_BYTES, self.normed_bytes());
        let y = Tensor::dense(span, self.x.dtype, self.x.rows, self.x.cols);
        Ok((y, RmsNorm { x: self.x, norm, y }.lower(target)?))
    }

    /// What is handed over through scratch: one side's y and the other's x, times the norm's weights, and sums of
    /// squares: of each 64 columns of a row, by `tiles` of each 256.
    fn handed(&self, scratch: Span) -> (Tensor, Span) {
        let (like, prepared, squares) = self.handed_bytes();
        let span = scratch.part(SEMAPHORE_BYTES, prepared);
        let squares = scratch.part(SEMAPHORE_BYTES + prepared, squares);
        (Tensor::dense(span, like.dtype, like.rows, like.cols), squares)
    }

    pub(super) fn handed_bytes(&self) -> (&Tensor, u64, u64) {
        let like = if self.handoff == NormHandoff::Consume { &self.x } else { &self.y };
        let elems = u64::from(like.rows) * u64::from(like.cols);
        (like, (2 * elems).next_multiple_of(1024), elems / 64 * 4)
    }
}
