//! What happens to products before they are stored.

use crate::DType;
use crate::cpu::ggml;
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::simd::{Level, exp, levels};
use crate::cpu::view::{Matrix, load_floats, store_floats};
use crate::op::{Epilogue, LinearChain};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Products finished at a time, at most.
pub(super) const MOST: usize = 16;

/// Bias and epilogue with their addresses resolved.
pub(super) struct Finish {
    bias: Option<Matrix>,
    kind: Kind,
    y: Matrix,
    level: Level,
    /// Everything is f32 and there is no bias: sums can go from a register to memory.
    plain: bool,
}

enum Kind {
    Store,
    Residual(Matrix),
    SiluMul,
    /// With ggml's e^x.
    GgmlSiluMul,
}

impl Finish {
    pub(super) fn new(op: &LinearChain, memory: &CpuMemory, lowering: &Lowering) -> Finish {
        let kind = match &op.epilogue {
            Epilogue::Store => Kind::Store,
            Epilogue::Residual(residual) => Kind::Residual(Matrix::new(memory, residual)),
            Epilogue::SiluMul if lowering.ggml() => Kind::GgmlSiluMul,
            Epilogue::SiluMul => Kind::SiluMul,
        };
        let bias = op.bias.as_ref().map(|bias| Matrix::new(memory, bias));
        let y = Matrix::new(memory, &op.y);
        let f32s = match &kind {
            Kind::Residual(residual) => residual.dtype == DType::F32,
            _ => true,
        };
        let plain = bias.is_none() && y.dtype == DType::F32 && f32s;
        Finish { bias, kind, y, level: lowering.level, plain }
    }

    /// As [`Finish::row16`], from a register.
    ///
    /// # Safety
    /// The processor has AVX-512; this chunk alone writes these columns of y.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(super) unsafe fn lanes16(&self, row: usize, n: usize, products: __m512) {
        // SAFETY: 16 (or 8) floats inside the row, as asserted; the residual has y's shape.
        unsafe {
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
                Kind::SiluMul if self.plain => {
                    assert!(n / 2 + MOST / 2 <= self.y.cols);
                    _mm256_storeu_ps(self.y.at(row, n / 2).cast(), silu_mul_avx512(products));
                }
                _ => {
                    let mut array = [0.0f32; MOST];
                    _mm512_storeu_ps(array.as_mut_ptr(), products);
                    self.row(row, n, &mut array);
                }
            }
        }
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
            Kind::Residual(_) | Kind::GgmlSiluMul => self.row(row, n, products),
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
            Kind::SiluMul | Kind::GgmlSiluMul => {
                let half = products.len() / 2;
                // SAFETY: the level was detected; lengths match.
                unsafe {
                    match self.kind {
                        Kind::GgmlSiluMul => {
                            ggml::silu_mul(self.level, products, &mut other[..half])
                        }
                        _ => silu_mul(self.level, products, &mut other[..half]),
                    }
                };
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

/// As [`silu_mul`], to the same bits: gates are the even lanes; what the odd ones compute is dropped.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn silu_mul_avx512(gate: __m512) -> __m256 {
    let set = |x: f32| _mm512_set1_ps(x);
    let up = _mm512_movehdup_ps(gate);
    // The steps of `simd::exp`, of −gate.
    let x = _mm512_sub_ps(_mm512_setzero_ps(), gate);
    let x = _mm512_min_ps(_mm512_max_ps(x, set(-87.0)), set(88.0));
    let magic = set(12_582_912.0);
    let n = _mm512_add_ps(_mm512_mul_ps(x, set(std::f32::consts::LOG2_E)), magic);
    let power = _mm512_slli_epi32::<23>(_mm512_castps_si512(n));
    let n = _mm512_sub_ps(n, magic);
    let r = _mm512_fmadd_ps(n, set(-0.693_359_4), x);
    let r = _mm512_fmadd_ps(n, set(2.121_944_4e-4), r);
    let p = _mm512_fmadd_ps(r, set(1.987_569_1e-4), set(1.398_2e-3));
    let p = _mm512_fmadd_ps(p, r, set(8.333_452e-3));
    let p = _mm512_fmadd_ps(p, r, set(4.166_579_6e-2));
    let p = _mm512_fmadd_ps(p, r, set(1.666_666_5e-1));
    let p = _mm512_fmadd_ps(p, r, set(0.5));
    let p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), set(1.0));
    let exp = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), power));
    let silu = _mm512_div_ps(gate, _mm512_add_ps(set(1.0), exp));
    let even = _mm512_maskz_compress_ps(0x5555, _mm512_mul_ps(silu, up));
    _mm512_castps512_ps256(even)
}

levels! {
    /// Gate and up to one value, eight at a time.
    fn silu_mul16(products: &[f32; MOST], out: &mut [f32; MOST / 2]) = silu_mul16_body;
}

levels! {
    /// Gate and up to one value.
    fn silu_mul(products: &[f32], out: &mut [f32]) = silu_mul_body;
}
