//! Plain weights and many rows of x on AVX-512. A worker turns rows of w into panels of 48, column after column, that stay
//! in its cache, and multiplies eight rows of x at a time by one of them: 24 vectors of sums in registers, of which each
//! takes its products in the order of the columns.
#![cfg(target_arch = "x86_64")]

use super::finish::Finish;
use super::turn::turn;
use crate::DType;
use crate::cpu::simd::Level;
use crate::cpu::view::{Matrix, load_floats};
use std::arch::x86_64::*;
use std::ops::Range;

/// Rows of w in a vector, and columns turned at a time.
const LANES: usize = 16;
/// Vectors of rows of w in a panel; the last panel may have fewer.
const WIDE: usize = 3;
/// Rows of x multiplied at a time: 24 sums leave eight registers. Twelve rows by two vectors load more for as many
/// products, and take 1.1 times as long.
const ROWS: usize = 8;
/// How many columns ahead weights are brought from the second level of the cache to the first.
const AHEAD: usize = 8;
/// Bytes of a line of the cache.
const LINE: usize = 64;
/// Bytes of panels that stay in a core's cache.
const ROOM: usize = 512 << 10;
/// The fewest rows of x that pay for turning weights.
pub(super) const LEAST: usize = 16;

/// Whether weights of this shape can be multiplied so.
pub(super) fn takes(w: &Matrix) -> bool {
    w.rows.is_multiple_of(LANES)
}

/// Columns with those of zeros that fill the last vector.
fn depth(cols: usize) -> usize {
    cols.next_multiple_of(LANES)
}

/// Floats from one row of x to the next where it is copied: an odd number of cache lines, so that the rows of a block
/// lie in different sets of the cache.
fn stride(cols: usize) -> usize {
    ((depth(cols) / LANES) | 1) * LANES
}

/// Bytes of a copy of x.
pub(super) fn shared_bytes(rows: usize, cols: usize) -> usize {
    rows * stride(cols) * size_of::<f32>()
}

/// Floats of 16 rows of w.
fn tile(cols: usize) -> usize {
    LANES * depth(cols)
}

/// The most panels that a worker turns at a time.
fn most(cols: usize) -> usize {
    (ROOM / size_of::<f32>() / (WIDE * tile(cols))).max(1)
}

/// Panels of w.
pub(super) fn count(w: &Matrix) -> usize {
    (w.rows / LANES).div_ceil(WIDE)
}

/// Bytes of scratch of a worker: 16 rows as f32, and panels; all on lines of the cache.
pub(super) fn own_bytes(w: &Matrix) -> usize {
    let tiles = 1 + WIDE * most(w.cols).min(count(w));
    tiles * tile(w.cols) * size_of::<f32>() + LINE
}

/// Where rows of x lie.
#[derive(Clone, Copy)]
pub(super) struct Inputs {
    start: *mut f32,
    stride: usize,
    cols: usize,
}

// SAFETY: chunks write different rows, and all are written before any is read.
unsafe impl Sync for Inputs {}

impl Inputs {
    /// In scratch of [`shared_bytes`].
    pub(super) fn copied(start: *mut u8, cols: usize) -> Inputs {
        Inputs { start: start.cast(), stride: stride(cols), cols }
    }

    /// The rows of x themselves, if they are floats of whole vectors and the rows of a block share few sets of the cache,
    /// which has eight lines in each of 64.
    pub(super) fn direct(x: &Matrix) -> Option<Inputs> {
        let floats = x.dtype == DType::F32 && x.cols.is_multiple_of(LANES);
        let spread = !x.stride.is_multiple_of(64 * LANES);
        (floats && spread).then(|| Inputs {
            start: x.at(0, 0).cast(),
            stride: x.stride,
            cols: x.cols,
        })
    }

    fn row(&self, row: usize) -> *mut f32 {
        self.start.wrapping_add(row * self.stride)
    }

    /// Stores a row; zeros follow.
    ///
    /// # Safety
    /// The rows are a copy that has this one, and this chunk alone writes it.
    pub(super) unsafe fn store(&self, row: usize, values: &[f32]) {
        let to = self.row(row);
        // SAFETY: the caller's promise.
        unsafe {
            std::ptr::copy_nonoverlapping(values.as_ptr(), to, values.len());
            to.add(values.len()).write_bytes(0, depth(self.cols) - values.len());
        }
    }
}

/// The second phase of a linear.
pub(super) struct Task<'a> {
    w: &'a Matrix,
    inputs: Inputs,
    rows: usize,
    finish: &'a Finish,
    /// 16 rows as f32, then panels.
    own: *mut f32,
}

impl<'a> Task<'a> {
    /// With a worker's scratch of [`own_bytes`].
    pub(super) fn new(
        w: &'a Matrix,
        inputs: Inputs,
        rows: usize,
        finish: &'a Finish,
        own: *mut u8,
    ) -> Task<'a> {
        let own = own.wrapping_add(own.align_offset(LINE)).cast();
        Task { w, inputs, rows, finish, own }
    }

    /// Panels `panels` of w for every row of x.
    ///
    /// # Safety
    /// The processor has AVX-512; this worker alone computes these panels; x is stored.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(super) unsafe fn run(&self, panels: Range<usize>) {
        let most = most(self.w.cols);
        for from in panels.clone().step_by(most) {
            // SAFETY: the caller's promise.
            unsafe { self.run_some(from..(from + most).min(panels.end)) };
        }
    }

    /// As many panels as there is scratch for.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn run_some(&self, panels: Range<usize>) {
        let tile = tile(self.w.cols);
        let panel_at = |panel: usize| {
            let at = 1 + (panel - panels.start) * WIDE;
            self.own.wrapping_add(at * tile)
        };
        let wide = |panel: usize| WIDE.min(self.w.rows / LANES - panel * WIDE);
        // SAFETY: the caller's promise.
        unsafe {
            for panel in panels.clone() {
                let wide = wide(panel);
                for at in 0..wide {
                    let to = panel_at(panel).add(at * LANES);
                    self.turn(panel * WIDE + at, to, wide * LANES);
                }
            }
            let mut row = 0;
            while row < self.rows {
                let block = match self.rows - row {
                    ROWS.. => ROWS,
                    4.. => 4,
                    _ => 1,
                };
                for panel in panels.clone() {
                    let (n, w) = (panel * WIDE * LANES, panel_at(panel));
                    match block {
                        ROWS => self.by_panel::<ROWS>(row, n, w, wide(panel)),
                        4 => self.by_panel::<4>(row, n, w, wide(panel)),
                        _ => self.by_panel::<1>(row, n, w, wide(panel)),
                    }
                }
                row += block;
            }
        }
    }

    /// Tile `tile` of w, column after column, `step` floats apart.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn turn(&self, tile: usize, to: *mut f32, step: usize) {
        let (cols, depth) = (self.w.cols, depth(self.w.cols));
        let whole = self.w.dtype == DType::F32 && depth == cols;
        // SAFETY: rows of w, and scratch for a tile.
        unsafe {
            let line = |row: usize| match whole {
                true => self.w.at(tile * LANES + row, 0).cast::<f32>(),
                false => self.own.add(row * depth).cast_const(),
            };
            for row in 0..if whole { 0 } else { LANES } {
                let values = std::slice::from_raw_parts_mut(self.own.add(row * depth), depth);
                let (values, rest) = values.split_at_mut(cols);
                rest.fill(0.0);
                let row = tile * LANES + row;
                match self.w.dtype {
                    dtype @ (DType::F32 | DType::F16 | DType::BF16) => {
                        load_floats(dtype, self.w.at(row, 0), values);
                    }
                    _ => self.w.read_blocks(Level::Avx512, row, values),
                }
            }
            for col in (0..depth).step_by(LANES) {
                let from = std::array::from_fn(|row| line(row).add(col).cast());
                turn(&from, to.add(col * step).cast(), step * size_of::<f32>());
            }
        }
    }

    /// M rows of x by a panel.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn by_panel<const M: usize>(&self, row: usize, n: usize, w: *const f32, wide: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            match wide {
                1 => self.multiply::<M, 1>(row, n, w),
                2 => self.multiply::<M, 2>(row, n, w),
                _ => self.multiply::<M, WIDE>(row, n, w),
            }
        }
    }

    /// M rows of x by a panel of P vectors, and the end of their sums: from column `n` of y.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn multiply<const M: usize, const P: usize>(&self, row: usize, n: usize, w: *const f32) {
        let (x, stride) = (self.inputs.row(row).cast_const(), self.inputs.stride);
        let mut sums = [[_mm512_setzero_ps(); P]; M];
        // SAFETY: rows of x and a panel, of `depth` columns each.
        unsafe {
            for k in 0..depth(self.w.cols) {
                let w = w.add(k * P * LANES);
                for p in 0..P {
                    // An address past the panel is no error.
                    let ahead = w.wrapping_add((AHEAD * P + p) * LANES);
                    _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                }
                let w: [_; P] = std::array::from_fn(|p| _mm512_loadu_ps(w.add(p * LANES)));
                for (m, sums) in sums.iter_mut().enumerate() {
                    let x = _mm512_set1_ps(*x.add(m * stride + k));
                    for (sum, w) in sums.iter_mut().zip(w) {
                        *sum = _mm512_fmadd_ps(x, w, *sum);
                    }
                }
            }
            // A copy: sums whose address is taken do not stay in registers.
            let mut done = sums;
            self.finish.block(row, n, &mut done);
        }
    }
}
