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
                    (4, ROWS) => tile_4x4(self.level, x, cols, &weights, &mut products),
                    (1, ROWS) => tile_1x4(self.level, x, cols, &weights, &mut products),
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

#[inline(always)]
unsafe fn tile_body<const FMA: bool, const M: usize>(
    x: *const f32,
    cols: usize,
    w: &[*const f32; ROWS],
    out: &mut [[f32; ROWS]; 4],
) {
    let mut acc = [[[0.0f32; LANES]; ROWS]; M];
    let whole = cols / LANES * LANES;
    // SAFETY: M rows of x and ROWS rows of w, `cols` floats each.
    unsafe {
        for k in (0..whole).step_by(LANES) {
            for (m, acc) in acc.iter_mut().enumerate() {
                let x = &*x.add(m * cols + k).cast::<[f32; LANES]>();
                for (n, acc) in acc.iter_mut().enumerate() {
                    let w = &*w[n].add(k).cast::<[f32; LANES]>();
                    for i in 0..LANES {
                        acc[i] = fma::<FMA>(x[i], w[i], acc[i]);
                    }
                }
            }
        }
        for (m, acc) in acc.iter().enumerate() {
            for (n, acc) in acc.iter().enumerate() {
                let mut total = sum(*acc);
                for k in whole..cols {
                    total = fma::<FMA>(*x.add(m * cols + k), *w[n].add(k), total);
                }
                out[m][n] = total;
            }
        }
    }
}

#[inline(always)]
unsafe fn tile_4x4_body<const FMA: bool>(
    x: *const f32,
    cols: usize,
    w: &[*const f32; ROWS],
    out: &mut [[f32; ROWS]; 4],
) {
    // SAFETY: the caller's promise.
    unsafe { tile_body::<FMA, 4>(x, cols, w, out) }
}

#[inline(always)]
unsafe fn tile_1x4_body<const FMA: bool>(
    x: *const f32,
    cols: usize,
    w: &[*const f32; ROWS],
    out: &mut [[f32; ROWS]; 4],
) {
    // SAFETY: the caller's promise.
    unsafe { tile_body::<FMA, 1>(x, cols, w, out) }
}

levels! {
    /// Four rows of x by four of w.
    fn tile_4x4(x: *const f32, cols: usize, w: &[*const f32; ROWS], out: &mut [[f32; ROWS]; 4]) = tile_4x4_body;
}

levels! {
    /// One row of x by four of w.
    fn tile_1x4(x: *const f32, cols: usize, w: &[*const f32; ROWS], out: &mut [[f32; ROWS]; 4]) = tile_1x4_body;
}
