//! Weights in f32 or bf16 and many rows of x on AMX. An f32 is the exact sum of three bf16: its mantissa has 24 bits, theirs
//! 8 each. A product of two is then the sum of six products of such parts; the three left out are below the last bit.
//! Products of bf16 are exact in f32, in which tiles add them. Weights in bf16 need three products.
#![cfg(target_arch = "x86_64")]

use super::amx::Config;
use super::finish::Finish;
use super::turn::turn;
use crate::DType;
use crate::cpu::view::Matrix;
use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

/// Rows of a tile.
const TILE: usize = 16;
/// Columns of a tile of x, and rows of weights that are used with it.
const COLS: usize = 32;
/// Bytes of a tile.
const BYTES: usize = TILE * COLS * 2;
/// Parts of an f32.
const PARTS: usize = 3;
/// Bytes of unpacked weights that stay in a core's cache.
const ROOM: usize = 768 << 10;
/// The fewest rows of x that pay for unpacking weights.
pub(super) const LEAST: usize = 16;

/// Whether weights of this type and shape can be multiplied so.
pub(super) fn takes(w: &Matrix) -> bool {
    matches!(w.dtype, DType::F32 | DType::BF16) && w.rows.is_multiple_of(TILE)
}

fn blocks(cols: usize) -> usize {
    cols.div_ceil(COLS)
}

/// The parts of a type.
fn parts(dtype: DType) -> usize {
    if dtype == DType::F32 { PARTS } else { 1 }
}

/// Bytes of x in parts.
pub(super) fn shared_bytes(rows: usize, cols: usize) -> usize {
    rows.next_multiple_of(2 * TILE) * blocks(cols) * COLS * 2 * PARTS
}

/// Tiles of 16 rows of weights that a worker unpacks at a time.
pub(super) fn group(w: &Matrix) -> usize {
    let tile = blocks(w.cols) * parts(w.dtype) * BYTES;
    (ROOM / tile / 2 * 2).max(2).min(w.rows.div_ceil(TILE).next_multiple_of(2))
}

/// Bytes of scratch of a worker: results, a tile while it is turned, unpacked weights.
pub(super) fn own_bytes(w: &Matrix) -> usize {
    4 * BYTES + PARTS * BYTES + group(w) * blocks(w.cols) * parts(w.dtype) * BYTES
}

/// All tiles are whole.
static CONFIG: Config = {
    let mut config = Config::EMPTY;
    let mut i = 0;
    while i < 8 {
        (config.row_bytes[i], config.rows[i]) = (64, TILE as u8);
        i += 1;
    }
    config
};

/// 32 columns of a row as bf16 parts, `step` bytes apart; `values` may be fewer and are followed by zeros.
///
/// # Safety
/// The processor has AVX-512; `to` has room for `count` parts.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn split(values: &[f32], count: usize, to: *mut u8, step: usize) {
    let mask = |from: usize| {
        let left = values.len().saturating_sub(from).min(16) as u32;
        ((1u32 << left) - 1) as u16
    };
    // SAFETY: masked loads stay within `values`; the caller's promise for `to`.
    unsafe {
        for half in 0..2 {
            let mut rest =
                _mm512_maskz_loadu_ps(mask(16 * half), values.as_ptr().wrapping_add(16 * half));
            for part in 0..count {
                // Cutting digits off leaves an exact remainder, and a NaN a NaN.
                let bits = _mm512_and_si512(_mm512_castps_si512(rest), _mm512_set1_epi32(-65536));
                let high = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(bits));
                _mm256_storeu_si256(to.add(part * step + 32 * half).cast(), high);
                rest = _mm512_sub_ps(rest, _mm512_castsi512_ps(bits));
            }
        }
    }
}

/// Where rows of x lie in parts: blocks of 16 rows, in each blocks of 32 columns, in each a tile of every part.
#[derive(Clone, Copy)]
pub(super) struct Inputs {
    start: *mut u8,
    cols: usize,
}

// SAFETY: chunks write different rows, and all are written before any is read.
unsafe impl Sync for Inputs {}

impl Inputs {
    /// In scratch of [`shared_bytes`].
    pub(super) fn new(start: *mut u8, cols: usize) -> Inputs {
        Inputs { start, cols }
    }

    fn block(&self, rows: usize) -> *mut u8 {
        self.start.wrapping_add(rows * blocks(self.cols) * PARTS * BYTES)
    }

    /// Stores a row.
    ///
    /// # Safety
    /// The processor has AVX-512; this chunk alone writes the row.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(super) unsafe fn store(&self, row: usize, values: &[f32]) {
        let to = self.block(row / TILE).wrapping_add(row % TILE * 64);
        for (at, values) in values.chunks(COLS).enumerate() {
            // SAFETY: inside the scratch.
            unsafe { split(values, PARTS, to.wrapping_add(at * PARTS * BYTES), BYTES) };
        }
    }

    /// Zeros in the rows that fill the last pair of blocks.
    ///
    /// # Safety
    /// As [`Inputs::store`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(super) unsafe fn fill(&self, rows: usize) {
        for row in rows..rows.next_multiple_of(2 * TILE) {
            for at in 0..blocks(self.cols) {
                let to = self.block(row / TILE).wrapping_add(row % TILE * 64 + at * PARTS * BYTES);
                // SAFETY: inside the scratch.
                unsafe { split(&[], PARTS, to, BYTES) };
            }
        }
    }
}

/// The second phase of a linear.
pub(super) struct Task<'a> {
    pub(super) w: &'a Matrix,
    pub(super) inputs: Inputs,
    pub(super) rows: usize,
    pub(super) finish: &'a Finish,
    pub(super) own: *mut u8,
}

impl Task<'_> {
    /// Tiles `tiles` of 16 rows of w for every row of x.
    ///
    /// # Safety
    /// The processor has AMX bf16 and the system permits it; `own` has [`own_bytes`]; there are at most [`group`] tiles,
    /// which this worker alone computes; x is stored and filled.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(super) unsafe fn run(&self, tiles: Range<usize>) {
        let count = parts(self.w.dtype);
        // SAFETY: the caller's promise; the tile state is released before anything else runs.
        unsafe {
            for (at, tile) in tiles.clone().enumerate() {
                self.unpack(tile, self.weights(at, count), count);
            }
            asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly));
            for row in (0..self.rows).step_by(2 * TILE) {
                for at in (0..tiles.len()).step_by(2) {
                    let both = at + 1 < tiles.len();
                    let w = [at, if both { at + 1 } else { at }].map(|at| self.weights(at, count));
                    match count {
                        1 => self.multiply::<1>(row, w),
                        _ => self.multiply::<PARTS>(row, w),
                    }
                    self.store(row, tiles.start + at, both);
                }
            }
            asm!("tilerelease", options(nostack, nomem));
        }
    }

    /// Where the weights of a tile are unpacked.
    fn weights(&self, at: usize, count: usize) -> *mut u8 {
        let first = (4 + PARTS) * BYTES;
        self.own.wrapping_add(first + at * blocks(self.w.cols) * count * BYTES)
    }

    /// 16 rows of w as the tiles expect them: a line for each pair of columns, with that pair of every row.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn unpack(&self, tile: usize, to: *mut u8, count: usize) {
        let turned = self.own.wrapping_add(4 * BYTES);
        // SAFETY: rows of w; the scratch has room for what is written.
        unsafe {
            for block in 0..blocks(self.w.cols) {
                let col = block * COLS;
                let here = COLS.min(self.w.cols - col);
                for row in 0..TILE {
                    let from = self.w.at(tile * TILE + row, col);
                    match self.w.dtype {
                        DType::F32 => {
                            let values = std::slice::from_raw_parts(from.cast::<f32>(), here);
                            split(values, PARTS, turned.add(64 * row), BYTES);
                        }
                        _ => {
                            let line = turned.add(64 * row);
                            line.write_bytes(0, 64);
                            std::ptr::copy_nonoverlapping(from, line, 2 * here);
                        }
                    }
                }
                for part in 0..count {
                    let to = to.add((block * count + part) * BYTES);
                    let lines =
                        std::array::from_fn(|row| turned.add(part * BYTES + 64 * row).cast_const());
                    turn(&lines, to, 64);
                }
            }
        }
    }

    /// 32 rows of x by two tiles of weights, into tiles 0 to 3.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn multiply<const P: usize>(&self, row: usize, w: [*mut u8; 2]) {
        let x = [row / TILE, row / TILE + 1].map(|block| self.inputs.block(block));
        // SAFETY: tiles of x and of unpacked weights.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, nomem),
            );
            for block in 0..blocks(self.w.cols) {
                let (x0, x1) = (x[0].add(block * PARTS * BYTES), x[1].add(block * PARTS * BYTES));
                let (w0, w1) = (w[0].add(block * P * BYTES), w[1].add(block * P * BYTES));
                // The smallest products first.
                if P > 1 {
                    step(x0, x1, w0.add(2 * BYTES), w1.add(2 * BYTES));
                    step(x0.add(BYTES), x1.add(BYTES), w0.add(BYTES), w1.add(BYTES));
                    step(x0, x1, w0.add(BYTES), w1.add(BYTES));
                }
                step(x0.add(2 * BYTES), x1.add(2 * BYTES), w0, w1);
                step(x0.add(BYTES), x1.add(BYTES), w0, w1);
                step(x0, x1, w0, w1);
            }
            let to = self.own;
            asm!(
                "tilestored [{to} + {line}], tmm0",
                "tilestored [{to} + {line} + 1024], tmm1",
                "tilestored [{to} + {line} + 2048], tmm2",
                "tilestored [{to} + {line} + 3072], tmm3",
                to = in(reg) to,
                line = in(reg) 64usize,
                options(nostack),
            );
        }
    }

    /// Stores the sums of 32 rows and one or two tiles of weights.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn store(&self, row: usize, tile: usize, both: bool) {
        let rows = (self.rows - row).min(2 * TILE);
        for at in 0..rows {
            for second in 0..=usize::from(both) {
                let tile_at = at / TILE * 2 + second;
                let from = self.own.wrapping_add(tile_at * BYTES + at % TILE * 64);
                // SAFETY: a line of a result; this worker alone computes these columns.
                unsafe {
                    let sums = _mm512_loadu_ps(from.cast());
                    self.finish.lanes16(row + at, (tile + second) * TILE, sums);
                }
            }
        }
    }
}

/// Tiles 0 to 3 += two tiles of x times two of weights.
#[inline(always)]
unsafe fn step(x0: *mut u8, x1: *mut u8, w0: *mut u8, w1: *mut u8) {
    // SAFETY: the caller gives four tiles; nothing else uses these registers.
    unsafe {
        asm!(
            "tileloadd tmm4, [{x0} + {line}]",
            "tileloadd tmm6, [{w0} + {line}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{w1} + {line}]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{x1} + {line}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            x0 = in(reg) x0,
            x1 = in(reg) x1,
            w0 = in(reg) w0,
            w1 = in(reg) w1,
            line = in(reg) 64usize,
            options(nostack, readonly),
        );
    }
}
