//! `kernels/linear_ref.cu` for every format.

use crate::Result;
use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, aligned, code};
use crate::op::{Epilogue, Linear};

impl Linear {
    pub(crate) fn scratch_bytes(&self, _target: &Target) -> u64 {
        0
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        Ok(vec![self.reference_launch(target)?])
    }

    fn reference_launch(&self, target: &Target) -> Result<Lowered> {
        let plain = |dtype| code(dtype, "linear");
        let (epilogue, residual) = match self.epilogue {
            Epilogue::Store => (0, None),
            Epilogue::Residual(residual) => (1, Some(residual)),
            Epilogue::SiluMul => (2, None),
        };
        let rows = self.x.rows.clamp(1, 8);
        let whole = aligned(&self.x) && (!self.w.dtype.is_plain() || aligned(&self.w));
        let or_float = |tensor: Option<crate::Tensor>| tensor.map_or(Ok(0), |t| plain(t.dtype));
        let kernel = Kernel::new(target, "linear_ref", "linear_ref")
            .defines(&[
                ("XT", plain(self.x.dtype)?),
                ("WT", plain(self.w.dtype)?),
                ("NT", or_float(self.norm.map(|norm| norm.weight))?),
                ("BT", or_float(self.bias)?),
                ("RT", or_float(residual)?),
                ("YT", plain(self.y.dtype)?),
                ("NORM", u32::from(self.norm.is_some())),
                ("BIAS", u32::from(self.bias.is_some())),
                ("LIVE", u32::from(self.live.is_some())),
                ("EPILOGUE", epilogue),
                ("ALIGNED", u32::from(whole)),
                ("ROWS", rows.next_power_of_two()),
            ])
            .grid(self.y.cols.div_ceil(8), self.x.rows.div_ceil(rows.next_power_of_two()), 1)
            .tensors(&[&self.x, &self.w])
            .optional(self.bias.map(|bias| bias.span))
            .optional(self.norm.map(|norm| norm.weight.span))
            .optional(residual.map(|residual| residual.span))
            .tensors(&[&self.y])
            .optional(self.live)
            .ints(&[self.x.rows, self.w.rows, self.x.cols, self.x.stride, self.w.stride])
            .ints(&[residual.map_or(0, |residual| residual.stride), self.y.stride])
            .arg(Arg::F32(self.norm.map_or(0.0, |norm| norm.eps)));
        Ok(kernel.lowered())
    }
}
