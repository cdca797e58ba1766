//! The input of the Hopper kernels, and the norm handoff between two linears, which saves the launch of the norm
//! between them.

use crate::cuda::launch::{Arg, Lowered, Target, TensorMap};
use crate::cuda::lower::{Kernel, SEMAPHORE_BYTES};
use crate::op::{LinearChain, Norm, NormHandoff, RmsNorm};
use crate::{Result, Span, Tensor};

/// How the input of a linear is prepared, and what it prepares for the next one.
pub(super) struct PreparedInput {
    /// The input that the kernel reads.
    pub(super) x: Tensor,
    /// The launches that compute it, if it is not prepared yet.
    pub(super) launches: Vec<Lowered>,
    /// Whether the previous linear prepared x, so that this one applies its rows' scales.
    pub(super) consumes: bool,
    /// Sums of squares, produced or consumed.
    pub(super) squares: Option<Span>,
    /// The norm that this linear prepares its result for.
    pub(super) next: Option<Norm>,
    /// Where the prepared result is stored.
    pub(super) prepared: Option<Span>,
}

impl PreparedInput {
    /// Adds this to a kernel: two macros, and three arguments after the live rows.
    pub(super) fn add_to(&self, kernel: Kernel) -> Kernel {
        kernel
            .defines(&[
                ("PRODUCES", u32::from(self.next.is_some())),
                ("CONSUMES", u32::from(self.consumes)),
            ])
            .optional(self.squares)
            .optional(self.next.map(|norm| norm.weight.span))
            .optional(self.prepared)
    }
}

/// A tensor map with boxes of 64 columns and `rows` rows.
pub(in crate::ops) fn tiled(tensor: &Tensor, rows: u32) -> Arg {
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
    /// Without scratch there is neither a handoff nor a norm.
    pub(super) fn prepared_input(&self, target: &Target) -> Result<PreparedInput> {
        let plain = |(x, launches)| PreparedInput {
            x,
            launches,
            consumes: false,
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
                PreparedInput { consumes: true, squares, ..plain((prepared, Vec::new())) }
            }
            NormHandoff::Produce(norm) => {
                let (prepared, squares) = self.handed(scratch);
                let (squares, prepared) = (Some(squares), Some(prepared.span));
                let own = plain(self.normed(target, scratch)?);
                PreparedInput { squares, prepared, next: Some(norm), ..own }
            }
        })
    }

    /// The input as the kernel reads it, and the launch that computes it if there is a norm.
    pub(super) fn normed(&self, target: &Target, scratch: Span) -> Result<(Tensor, Vec<Lowered>)> {
        let Some(norm) = self.norm else { return Ok((self.x, Vec::new())) };
        let span = scratch.part(SEMAPHORE_BYTES, self.normed_bytes());
        let y = Tensor::dense(span, self.x.dtype, self.x.rows, self.x.cols);
        Ok((y, RmsNorm { x: self.x, norm, y }.lower(target)?))
    }

    /// The parts of the handoff in scratch: the producer's y, which is the consumer's x, times the norm's weights;
    /// and sums of squares of each 64 columns of a row (in `tiles` of each 256).
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
