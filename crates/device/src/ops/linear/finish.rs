//! Bias and epilogue, applied to a linear's sums before they are stored.

use crate::DType;
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::simd::Level;
use crate::cpu::view::{Matrix, load_floats, store_floats};
use crate::op::{Activation, Epilogue, LinearChain};
use crate::ops::activate::{activate, activate_body};
use crate::ops::gate_mul::Gate;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// The highest number of sums finished at a time.
pub(in crate::ops) const MOST: usize = 16;

/// Bias and epilogue with their addresses resolved.
pub(in crate::ops) struct Finish {
    bias: Option<Matrix>,
    kind: Kind,
    y: Matrix,
    /// Everything is f32: sums can go from a register to memory.
    plain: bool,
}

enum Kind {
    Store,
    Residual(Matrix),
    GateMul(Gate),
    Activate(Activation, Level),
}

impl Finish {
    pub(in crate::ops) fn new(op: &LinearChain, memory: &CpuMemory, lowering: &Lowering) -> Finish {
        let kind = match &op.epilogue {
            Epilogue::Store => Kind::Store,
            Epilogue::Residual(residual) => Kind::Residual(Matrix::new(memory, residual)),
            Epilogue::GateMul(act) => Kind::GateMul(Gate::new(*act, lowering)),
            Epilogue::Activate(act) => Kind::Activate(*act, lowering.level),
        };
        let bias = op.bias.as_ref().map(|bias| Matrix::new(memory, bias));
        let y = Matrix::new(memory, &op.y);
        let f32s = match &kind {
            Kind::Residual(residual) => residual.dtype == DType::F32,
            Kind::Store | Kind::GateMul(_) | Kind::Activate(..) => true,
        };
        let f32s = f32s && bias.as_ref().is_none_or(|bias| bias.dtype == DType::F32);
        let plain = y.dtype == DType::F32 && f32s;
        Finish { bias, kind, y, plain }
    }

    /// Sums are stored as they are.
    pub(in crate::ops) fn store_to(y: Matrix) -> Finish {
        Finish { bias: None, kind: Kind::Store, y, plain: y.dtype == DType::F32 }
    }

    /// As [`Finish::row16`], from a register.
    ///
    /// # Safety
    /// The processor has AVX-512; this chunk alone writes these columns of y.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(in crate::ops) unsafe fn lanes16(&self, row: usize, n: usize, products: __m512) {
        // SAFETY: 16 (or 8) floats inside the row, as asserted; the residual has y's shape, and the bias an element
        // for each sum.
        unsafe {
            let sums = products;
            let products = match &self.bias {
                Some(bias) if self.plain => {
                    assert!(n + MOST <= bias.cols);
                    _mm512_add_ps(products, _mm512_loadu_ps(bias.at(0, n).cast()))
                }
                _ => products,
            };
            match &self.kind {
                Kind::Store if self.plain => {
                    assert!(n + MOST <= self.y.cols);
                    _mm512_storeu_ps(self.y.at(row, n).cast(), products);
                }
                Kind::Residual(residual) if self.plain => {
                    assert!(n + MOST <= self.y.cols && n + MOST <= residual.cols);
                    let other = _mm512_loadu_ps(residual.at(row, n).cast());
                    _mm512_storeu_ps(self.y.at(row, n).cast(), _mm512_add_ps(products, other));
                }
                Kind::GateMul(gate) if self.plain && gate.has_lanes16() => {
                    assert!(n / 2 + MOST / 2 <= self.y.cols);
                    _mm256_storeu_ps(self.y.at(row, n / 2).cast(), gate.lanes16(products));
                }
                Kind::Activate(act, _) if self.plain => {
                    assert!(n + MOST <= self.y.cols);
                    let mut array = [0.0f32; MOST];
                    _mm512_storeu_ps(array.as_mut_ptr(), products);
                    activate_body::<true>(&mut array, *act);
                    self.y.at(row, n).cast::<[f32; MOST]>().write_unaligned(array);
                }
                Kind::Store | Kind::Residual(_) | Kind::GateMul(_) | Kind::Activate(..) => {
                    let mut array = [0.0f32; MOST];
                    // Adds the bias itself.
                    _mm512_storeu_ps(array.as_mut_ptr(), sums);
                    self.row(row, n, &mut array);
                }
            }
        }
    }

    /// As [`Finish::lanes16`], for P vectors of M rows. An activation of one vector is a long chain of instructions;
    /// those of a block run beside each other.
    ///
    /// # Safety
    /// As [`Finish::lanes16`].
    #[cfg(target_arch = "x86_64")]
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(in crate::ops) unsafe fn block<const M: usize, const P: usize>(
        &self,
        row: usize,
        n: usize,
        sums: &mut [[__m512; P]; M],
    ) {
        if !self.plain || matches!(self.kind, Kind::GateMul(_)) {
            for (m, sums) in sums.iter().enumerate() {
                for (p, sum) in sums.iter().enumerate() {
                    // SAFETY: the caller's promise.
                    unsafe { self.lanes16(row + m, n + p * MOST, *sum) };
                }
            }
            return;
        }
        let end = n + P * MOST;
        assert!(end <= self.y.cols);
        if let Some(bias) = &self.bias {
            assert!(end <= bias.cols);
            // SAFETY: the bias has one float per sum.
            let bias: [_; P] = std::array::from_fn(|p| unsafe {
                _mm512_loadu_ps(bias.at(0, n + p * MOST).cast())
            });
            for sums in sums.iter_mut() {
                for (sum, bias) in sums.iter_mut().zip(bias) {
                    *sum = _mm512_add_ps(*sum, bias);
                }
            }
        }
        match &self.kind {
            Kind::Residual(residual) => {
                assert!(end <= residual.cols);
                for (m, sums) in sums.iter_mut().enumerate() {
                    for (p, sum) in sums.iter_mut().enumerate() {
                        let at = residual.at(row + m, n + p * MOST).cast();
                        // SAFETY: the residual has y's shape.
                        *sum = _mm512_add_ps(*sum, unsafe { _mm512_loadu_ps(at) });
                    }
                }
            }
            Kind::Activate(act, _) => {
                let len = M * P * MOST;
                // SAFETY: vectors are floats.
                let values =
                    unsafe { std::slice::from_raw_parts_mut(sums.as_mut_ptr().cast::<f32>(), len) };
                activate_body::<true>(values, *act);
            }
            Kind::Store | Kind::GateMul(_) => {}
        }
        for (m, sums) in sums.iter().enumerate() {
            for (p, sum) in sums.iter().enumerate() {
                // SAFETY: inside the row, and this chunk alone writes it.
                unsafe { _mm512_storeu_ps(self.y.at(row + m, n + p * MOST).cast(), *sum) };
            }
        }
    }

    /// Sums `n..n + 16` of a row: as [`Finish::row`], kept in registers if everything is f32.
    #[inline]
    pub(in crate::ops) fn row16(&self, row: usize, n: usize, products: &mut [f32; MOST]) {
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
            Kind::GateMul(gate) => {
                let mut out = [0.0f32; MOST / 2];
                gate.row16(products, &mut out);
                self.put(row, n / 2, &out);
            }
            Kind::Activate(..) => self.row(row, n, products),
        }
    }

    /// Stores to an f32 row.
    #[inline(always)]
    fn put<const N: usize>(&self, row: usize, col: usize, values: &[f32; N]) {
        assert!(col + N <= self.y.cols);
        // SAFETY: inside the row, and this chunk alone writes it.
        unsafe { self.y.at(row, col).cast::<[f32; N]>().write_unaligned(*values) };
    }

    /// Sums `n..n + products.len()` of a row; `n` and the length are even for `GateMul`.
    #[inline]
    pub(in crate::ops) fn row(&self, row: usize, n: usize, products: &mut [f32]) {
        assert!(products.len() <= MOST);
        let mut other = [0.0f32; MOST];
        if let Some(bias) = &self.bias {
            let bias_part = &mut other[..products.len()];
            // SAFETY: the bias has one element per sum.
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
            Kind::GateMul(gate) => {
                let half = products.len() / 2;
                gate.row(products, &mut other[..half]);
                self.store(row, n / 2, &other[..half]);
            }
            Kind::Activate(act, level) => {
                // SAFETY: the level was detected.
                unsafe { activate(*level, products, *act) };
                self.store(row, n, products);
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
