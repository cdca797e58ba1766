//! What happens to products before they are stored.

use crate::DType;
use crate::cpu::memory::CpuMemory;
use crate::cpu::simd::{Level, exp, levels};
use crate::cpu::view::{Matrix, load_floats, store_floats};
use crate::op::{Epilogue, Linear};

/// Products finished at a time, at most.
pub(super) const MOST: usize = 16;

/// Bias and epilogue with their addresses resolved.
pub(super) struct Finish {
    bias: Option<Matrix>,
    kind: Kind,
    y: Matrix,
    level: Level,
}

enum Kind {
    Store,
    Residual(Matrix),
    SiluMul,
}

impl Finish {
    pub(super) fn new(op: &Linear, memory: &CpuMemory, level: Level) -> Finish {
        let kind = match &op.epilogue {
            Epilogue::Store => Kind::Store,
            Epilogue::Residual(residual) => Kind::Residual(Matrix::new(memory, residual)),
            Epilogue::SiluMul => Kind::SiluMul,
        };
        let bias = op.bias.as_ref().map(|bias| Matrix::new(memory, bias));
        Finish { bias, kind, y: Matrix::new(memory, &op.y), level }
    }

    /// Products `n..n + 16` of a row: as [`Finish::row`], with everything in f32 kept in registers.
    #[inline]
    pub(super) fn row16(&self, row: usize, n: usize, products: &mut [f32; MOST]) {
        if self.bias.is_some() || self.y.dtype != DType::F32 {
            return self.row(row, n, products);
        }
        match &self.kind {
            Kind::Store => self.put(row, n, products),
            Kind::Residual(residual) if residual.dtype == DType::F32 => {
                assert!(n + MOST <= residual.cols);
                // SAFETY: 16 floats of the residual's row.
                let other = unsafe { residual.at(row, n).cast::<[f32; MOST]>().read_unaligned() };
                products.iter_mut().zip(other).for_each(|(product, other)| *product += other);
                self.put(row, n, products);
            }
            Kind::Residual(_) => self.row(row, n, products),
            Kind::SiluMul => {
                let mut out = [0.0f32; MOST / 2];
                // SAFETY: the level was detected.
                unsafe { silu_mul16(self.level, products, &mut out) };
                self.put(row, n / 2, &out);
            }
        }
    }

    /// Stores to an f32 row.
    #[inline(always)]
    fn put<const N: usize>(&self, row: usize, col: usize, values: &[f32; N]) {
        assert!(col + N <= self.y.cols);
        // SAFETY: inside the row, and this chunk alone writes it.
        unsafe { self.y.at(row, col).cast::<[f32; N]>().write_unaligned(*values) };
    }

    /// Products `n..n + products.len()` of a row; `n` and the length are even for `SiluMul`.
    #[inline]
    pub(super) fn row(&self, row: usize, n: usize, products: &mut [f32]) {
        debug_assert!(products.len() <= MOST);
        let mut other = [0.0f32; MOST];
        if let Some(bias) = &self.bias {
            let bias_part = &mut other[..products.len()];
            // SAFETY: the bias has one element per product.
            unsafe { load_floats(bias.dtype, bias.at(0, n), bias_part) };
            products.iter_mut().zip(bias_part).for_each(|(product, bias)| *product += *bias);
        }
        match &self.kind {
            Kind::Store => self.store(row, n, products),
            Kind::Residual(residual) => {
                let part = &mut other[..products.len()];
                // SAFETY: the residual has y's shape; this chunk alone writes these columns of y.
                unsafe { load_floats(residual.dtype, residual.at(row, n), part) };
                products.iter_mut().zip(part).for_each(|(product, other)| *product += *other);
                self.store(row, n, products);
            }
            Kind::SiluMul => {
                let half = products.len() / 2;
                // SAFETY: the level was detected; lengths match.
                unsafe { silu_mul(self.level, products, &mut other[..half]) };
                self.store(row, n / 2, &other[..half]);
            }
        }
    }

    fn store(&self, row: usize, col: usize, values: &[f32]) {
        let at = self.y.at(row, col);
        assert!(col + values.len() <= self.y.cols);
        match self.y.dtype {
            // SAFETY: inside the row, and this chunk alone writes it.
            DType::F32 => unsafe {
                std::ptr::copy_nonoverlapping(values.as_ptr(), at.cast(), values.len());
            },
            // SAFETY: as above.
            dtype => unsafe { store_floats(dtype, at, values) },
        }
    }
}

/// out[i] = silu(products[2i]) · products[2i + 1].
#[inline(always)]
fn silu_mul_body<const FMA: bool>(products: &[f32], out: &mut [f32]) {
    for (out, pair) in out.iter_mut().zip(products.chunks_exact(2)) {
        let (gate, up) = (pair[0], pair[1]);
        *out = gate / (1.0 + exp::<FMA>(-gate)) * up;
    }
}

#[inline(always)]
fn silu_mul16_body<const FMA: bool>(products: &[f32; MOST], out: &mut [f32; MOST / 2]) {
    silu_mul_body::<FMA>(products, out);
}

levels! {
    /// Gate and up to one value, eight at a time.
    fn silu_mul16(products: &[f32; MOST], out: &mut [f32; MOST / 2]) = silu_mul16_body;
}

levels! {
    /// Gate and up to one value.
    fn silu_mul(products: &[f32], out: &mut [f32]) = silu_mul_body;
}
