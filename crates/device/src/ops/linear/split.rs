//! Weights in f32 or bf16 and many rows of x on AMX. An f32 is close to the sum of two bf16, each rounded to nearest: what
//! is left is below 2^-17 of it. A product of two is then the sum of three products of such parts; the fourth is below
//! 2^-16 of it. Products of bf16 are exact in f32, in which tiles add them. Weights in bf16 need two products. Loading
//! tiles takes most of the time, so a third part, which would make products exact, doubles it.
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
const PARTS: usize = 2;
/// Bytes of unpacked weights that stay in a core's cache.
const ROOM: usize = 768 << 10;
/// Blocks of columns multiplied before the next tiles of weights: x in parts stays in the first cache so long.
const PANEL: usize = 6;
/// Bytes of the sums of 32 rows of x and two tiles of weights.
const SUMS: usize = 4 * BYTES;
/// Rows whose sums are finished together.
const TOGETHER: usize = 8;
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

/// Tiles that a worker takes at a time: several times each, so that none waits long for the last.
pub(super) fn share(tiles: usize, threads: usize) -> usize {
    tiles.div_ceil(4 * threads).next_multiple_of(2).max(4)
}

/// Bytes of scratch of a worker: a tile while it is turned, sums, unpacked weights.
pub(super) fn own_bytes(w: &Matrix) -> usize {
    weights_at(w) + group(w) * blocks(w.cols) * parts(w.dtype) * BYTES
}

/// Where unpacked weights begin in a worker's scratch. Sums of a single panel need no place of their own.
fn weights_at(w: &Matrix) -> usize {
    let sums = if blocks(w.cols) > PANEL { group(w) / 2 } else { 1 };
    PARTS * BYTES + sums * SUMS
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
                // The remainder is exact, and that of a NaN is a NaN.
                let up = _mm512_add_epi32(_mm512_castps_si512(rest), _mm512_set1_epi32(0x8000));
                let bits = _mm512_and_si512(up, _mm512_set1_epi32(-65536));
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
            let blocks = blocks(self.w.cols);
            for row in (0..self.rows).step_by(2 * TILE) {
                for panel in (0..blocks).step_by(PANEL) {
                    let panel = panel..(panel + PANEL).min(blocks);
                    for at in (0..tiles.len()).step_by(2) {
                        let both = at + 1 < tiles.len();
                        let w =
                            [at, if both { at + 1 } else { at }].map(|at| self.weights(at, count));
                        let sums = self.sums(at);
                        match count {
                            1 => self.multiply::<1>(row, w, panel.clone(), sums),
                            _ => self.multiply::<PARTS>(row, w, panel.clone(), sums),
                        }
                        if panel.end == blocks {
                            self.store(row, tiles.start + at, both, sums);
                        }
                    }
                }
            }
            asm!("tilerelease", options(nostack, nomem));
        }
    }

    /// Where the weights of a tile are unpacked.
    fn weights(&self, at: usize, count: usize) -> *mut u8 {
        let first = weights_at(self.w);
        self.own.wrapping_add(first + at * blocks(self.w.cols) * count * BYTES)
    }

    /// The sums of a tile of weights and the next.
    fn sums(&self, at: usize) -> *mut u8 {
        let pair = if blocks(self.w.cols) > PANEL { at / 2 } else { 0 };
        self.own.wrapping_add(PARTS * BYTES + pair * SUMS)
    }

    /// 16 rows of w as the tiles expect them: a line for each pair of columns, with that pair of every row.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn unpack(&self, tile: usize, to: *mut u8, count: usize) {
        let turned = self.own;
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

    /// 32 rows of x by two tiles of weights: a panel's products are added to the sums, or begin them.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn multiply<const P: usize>(
        &self,
        row: usize,
        w: [*mut u8; 2],
        panel: Range<usize>,
        sums: *mut u8,
    ) {
        let x = [row / TILE, row / TILE + 1].map(|block| self.inputs.block(block));
        // SAFETY: tiles of x, of unpacked weights and of sums.
        unsafe {
            begin(sums, panel.start > 0);
            for block in panel {
                let x = x.map(|x| x.add(block * PARTS * BYTES));
                let w = w.map(|w| w.add(block * P * BYTES));
                if P == 1 {
                    fetch(w, 1);
                    load_w(w, 0);
                    for part in (0..PARTS).rev() {
                        load_x(x, part);
                        add_products();
                    }
                    continue;
                }
                // Small products first. Each differs from the last in one operand, so that half of the tiles stay. The
                // processor does not see what comes next, and tiles of weights wait in the second cache.
                fetch(w, PARTS);
                load_x(x, 0);
                load_w(w, 1);
                add_products();
                load_w(w, 0);
                add_products();
                load_x(x, 1);
                add_products();
            }
            asm!(
                "tilestored [{to} + {line}], tmm0",
                "tilestored [{to} + {line} + 1024], tmm1",
                "tilestored [{to} + {line} + 2048], tmm2",
                "tilestored [{to} + {line} + 3072], tmm3",
                to = in(reg) sums,
                line = in(reg) 64usize,
                options(nostack),
            );
        }
    }

    /// Stores the sums of 32 rows and one or two tiles of weights.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn store(&self, row: usize, tile: usize, both: bool, sums: *mut u8) {
        let rows = (self.rows - row).min(2 * TILE);
        // A line of a result.
        let line = |at: usize, second: usize| {
            let tile = at / TILE * 2 + second;
            // SAFETY: a line of the sums.
            unsafe { _mm512_loadu_ps(sums.wrapping_add(tile * BYTES + at % TILE * 64).cast()) }
        };
        let whole = if both { rows / TOGETHER * TOGETHER } else { 0 };
        // SAFETY: this worker alone computes these columns.
        unsafe {
            for at in (0..whole).step_by(TOGETHER) {
                let mut sums: [[__m512; 2]; TOGETHER] =
                    std::array::from_fn(|row| [line(at + row, 0), line(at + row, 1)]);
                self.finish.block(row + at, tile * TILE, &mut sums);
            }
            for at in whole..rows {
                for second in 0..=usize::from(both) {
                    self.finish.lanes16(row + at, (tile + second) * TILE, line(at, second));
                }
            }
        }
    }
}

/// Tiles 0 to 3 = sums so far, or zeros.
#[inline(always)]
unsafe fn begin(sums: *mut u8, so_far: bool) {
    // SAFETY: the caller gives four tiles; nothing else uses these registers.
    unsafe {
        match so_far {
            true => asm!(
                "tileloadd tmm0, [{from} + {line}]",
                "tileloadd tmm1, [{from} + {line} + 1024]",
                "tileloadd tmm2, [{from} + {line} + 2048]",
                "tileloadd tmm3, [{from} + {line} + 3072]",
                from = in(reg) sums,
                line = in(reg) 64usize,
                options(nostack, readonly),
            ),
            false => asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                options(nostack, nomem),
            ),
        }
    }
}

/// Tiles 4 and 5 = a part of x.
#[inline(always)]
unsafe fn load_x(x: [*mut u8; 2], part: usize) {
    // SAFETY: the caller gives tiles; nothing else uses these registers.
    unsafe {
        asm!(
            "tileloadd tmm4, [{x0} + {line}]",
            "tileloadd tmm5, [{x1} + {line}]",
            x0 = in(reg) x[0].add(part * BYTES),
            x1 = in(reg) x[1].add(part * BYTES),
            line = in(reg) 64usize,
            options(nostack, readonly),
        );
    }
}

/// Tiles 6 and 7 = a part of weights.
#[inline(always)]
unsafe fn load_w(w: [*mut u8; 2], part: usize) {
    // SAFETY: the caller gives tiles; nothing else uses these registers.
    unsafe {
        asm!(
            "tileloadd tmm6, [{w0} + {line}]",
            "tileloadd tmm7, [{w1} + {line}]",
            w0 = in(reg) w[0].add(part * BYTES),
            w1 = in(reg) w[1].add(part * BYTES),
            line = in(reg) 64usize,
            options(nostack, readonly),
        );
    }
}

/// Tiles 0 to 3 += tiles 4 and 5 times tiles 6 and 7.
#[inline(always)]
unsafe fn add_products() {
    // SAFETY: nothing else uses these registers.
    unsafe {
        asm!(
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            options(nostack, nomem),
        );
    }
}

/// Prefetches the block of weights after this one.
#[inline(always)]
unsafe fn fetch(w: [*mut u8; 2], parts: usize) {
    for w in w {
        let next = w.wrapping_add(parts * BYTES);
        for line in 0..parts * TILE {
            // SAFETY: a prefetch never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(64 * line).cast()) };
        }
    }
}
