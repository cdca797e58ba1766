//! Weights that are not packed: rows converted to f32 when read, dot products in f32.

use super::finish::Finish;
use crate::DType;
use crate::cpu::simd::{LANES, Level, fma, levels, sum};
use crate::cpu::view::{Matrix, load_floats};

/// Rows of w processed together; even, so that gate and up stay together.
pub(in crate::ops) const ROWS: usize = 4;

/// Bytes of scratch a worker needs for weights of `cols` columns.
pub(in crate::ops) fn own_bytes(cols: usize) -> usize {
    ROWS * cols * size_of::<f32>()
}

/// The second phase of a linear.
pub(in crate::ops) struct Task<'a> {
    pub(in crate::ops) w: &'a Matrix,
    /// rows × cols floats.
    pub(in crate::ops) inputs: *const f32,
    pub(in crate::ops) rows: usize,
    pub(in crate::ops) finish: &'a Finish,
    pub(in crate::ops) level: Level,
}

impl Task<'_> {
    /// Rows `n..n + ROWS` of w (fewer at the end) for every input row.
    ///
    /// # Safety
    /// `scratch` has [`own_bytes`]; no other thread computes these rows.
    pub(in crate::ops) unsafe fn run(&self, n: usize, scratch: *mut f32) {
        let cols = self.w.cols;
        let count = ROWS.min(self.w.rows - n);
        let mut weights = [std::ptr::null::<f32>(); ROWS];
        for (i, weights) in weights[..count].iter_mut().enumerate() {
            *weights = match self.w.dtype {
                DType::F32 => self.w.at(n + i, 0).cast(),
                dtype => {
                    // SAFETY: row `i` of the scratch.
                    let row =
                        unsafe { std::slice::from_raw_parts_mut(scratch.add(i * cols), cols) };
                    match dtype {
                        // SAFETY: a row of w.
                        DType::F16 | DType::BF16 => unsafe {
                            load_floats(dtype, self.w.at(n + i, 0), row);
                        },
                        // SAFETY: the level was detected.
                        _ => unsafe { self.w.read_blocks(self.level, n + i, row) },
                    }
                    row.as_ptr()
                }
            };
        }
        let mut row = 0;
        while row < self.rows {
            let many = if self.rows - row >= 4 { 4 } else { 1 };
            let mut products = [[0.0f32; ROWS]; 4];
            // SAFETY: `many` input rows and `count` weight rows of `cols` floats.
            unsafe {
                let x = self.inputs.add(row * cols);
                match (many, count) {
                    (4, ROWS) => tile::<4>(self.level, x, cols, &weights, &mut products),
                    (1, ROWS) => tile::<1>(self.level, x, cols, &weights, &mut products),
                    _ => {
                        for (m, products) in products[..many].iter_mut().enumerate() {
                            let x = std::slice::from_raw_parts(x.add(m * cols), cols);
                            for (w, product) in weights[..count].iter().zip(products) {
                                *product = dot(self.level, x, std::slice::from_raw_parts(*w, cols));
                            }
                        }
                    }
                }
            }
            for (m, products) in products[..many].iter_mut().enumerate() {
                self.finish.row(row + m, n, &mut products[..count]);
            }
            row += many;
        }
    }
}

#[inline(always)]
fn dot_body<const FMA: bool>(x: &[f32], y: &[f32]) -> f32 {
    crate::cpu::simd::dot::<FMA>(x, y)
}

levels! {
    /// x·y.
    fn dot(x: &[f32], y: &[f32]) -> f32 = dot_body;
}

/// M rows of x by four of w: sixteen sums of LANES lanes for four rows. Written with vectors where the processor has them:
/// of that many sums in a loop the compiler makes scalar code in builds for tests.
///
/// # Safety
/// The level is one the processor has; `x` has M rows and each pointer of `w` one row of `cols` floats.
unsafe fn tile<const M: usize>(
    level: Level,
    x: *const f32,
    cols: usize,
    w: &[*const f32; ROWS],
    out: &mut [[f32; ROWS]; 4],
) {
    // SAFETY: the caller's promise.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => tile_avx512::<M>(x, cols, w, out),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => tile_avx2::<M>(x, cols, w, out),
            _ => tile_portable::<M>(x, cols, w, out),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
unsafe fn tile_avx512<const M: usize>(
    x: *const f32,
    cols: usize,
    w: &[*const f32; ROWS],
    out: &mut [[f32; ROWS]; 4],
) {
    use std::arch::x86_64::{
        _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_setzero_ps, _mm512_storeu_ps,
    };
    // SAFETY: whole vectors within the rows, then the rest of the caller's rows.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); ROWS]; M];
        for k in (0..cols / LANES * LANES).step_by(LANES) {
            let w: [_; ROWS] = std::array::from_fn(|n| _mm512_loadu_ps(w[n].add(k)));
            for (m, acc) in acc.iter_mut().enumerate() {
                let x = _mm512_loadu_ps(x.add(m * cols + k));
                for n in 0..ROWS {
                    acc[n] = _mm512_fmadd_ps(x, w[n], acc[n]);
                }
            }
        }
        for (m, acc) in acc.iter().enumerate() {
            for (n, acc) in acc.iter().enumerate() {
                let mut lanes = [0.0f32; LANES];
                _mm512_storeu_ps(lanes.as_mut_ptr(), *acc);
                out[m][n] = rest::<true>(sum(lanes), x.add(m * cols), w[n], cols);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn tile_avx2<const M: usize>(
    x: *const f32,
    cols: usize,
    w: &[*const f32; ROWS],
    out: &mut [[f32; ROWS]; 4],
) {
    use std::arch::x86_64::{
        _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_setzero_ps, _mm256_storeu_ps,
    };
    // SAFETY: whole pairs of vectors within the rows, then the rest of the caller's rows.
    unsafe {
        for (m, out) in out[..M].iter_mut().enumerate() {
            let x = x.add(m * cols);
            let mut acc = [[_mm256_setzero_ps(); 2]; ROWS];
            for k in (0..cols / LANES * LANES).step_by(LANES) {
                let low = _mm256_loadu_ps(x.add(k));
                let high = _mm256_loadu_ps(x.add(k + LANES / 2));
                for n in 0..ROWS {
                    let w = w[n].add(k);
                    acc[n][0] = _mm256_fmadd_ps(low, _mm256_loadu_ps(w), acc[n][0]);
                    let w = _mm256_loadu_ps(w.add(LANES / 2));
                    acc[n][1] = _mm256_fmadd_ps(high, w, acc[n][1]);
                }
            }
            for (n, [low, high]) in acc.into_iter().enumerate() {
                let mut lanes = [0.0f32; LANES];
                _mm256_storeu_ps(lanes.as_mut_ptr(), low);
                _mm256_storeu_ps(lanes.as_mut_ptr().add(LANES / 2), high);
                out[n] = rest::<true>(sum(lanes), x, w[n], cols);
            }
        }
    }
}

unsafe fn tile_portable<const M: usize>(
    x: *const f32,
    cols: usize,
    w: &[*const f32; ROWS],
    out: &mut [[f32; ROWS]; 4],
) {
    for (m, out) in out[..M].iter_mut().enumerate() {
        for (w, out) in w.iter().zip(out) {
            // SAFETY: one row of each.
            unsafe {
                let x = x.add(m * cols);
                let mut lanes = [0.0f32; LANES];
                for k in (0..cols / LANES * LANES).step_by(LANES) {
                    for (i, lane) in lanes.iter_mut().enumerate() {
                        *lane += *x.add(k + i) * *w.add(k + i);
                    }
                }
                *out = rest::<false>(sum(lanes), x, *w, cols);
            }
        }
    }
}

/// `total` and the products of the columns that are no whole vector.
///
/// # Safety
/// `x` and `w` have `cols` floats.
#[inline(always)]
unsafe fn rest<const FMA: bool>(total: f32, x: *const f32, w: *const f32, cols: usize) -> f32 {
    let columns = cols / LANES * LANES..cols;
    // SAFETY: the caller's promise.
    columns.fold(total, |total, k| unsafe { fma::<FMA>(*x.add(k), *w.add(k), total) })
}
