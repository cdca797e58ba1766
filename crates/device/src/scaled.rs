//! Weights with scales, as they lie in memory. The same bytes on every device; `kernels/weights.cuh` reads them.
//!
//! `F8…`: a row's e4m3 bytes in order, but within each 16 columns byte `4j + i` holds column `2j + i/2 + 8·(i%2)`, which is
//! what a lane of an MMA needs. Behind all rows f32 scales: one per row (`F8Row`), or `[rows / 128][cols / 128]`. Where
//! rows of gate and up alternate (`F8Pairs`) or take turns of eight (`F8Turns`), rows `256·b` to `256·b + 255` have
//! scale row `2b` for gate and `2b + 1` for up.
//!
//! `I4…`: pieces of 16 rows × one group of columns, `[rows / 16][cols / group]`: four bits for each element, then 16
//! scales (f16), then 16 zeros (bytes). Each 64 columns are 32 lanes × 16 bytes; word `s` of lane `4·g + j` has
//! nibbles `i` and `i + 4` for columns `16s + 2j` and `+ 1` of row `g` (i = 0) and of row `g + 8` (1), and for the
//! columns 8 further of row `g` (2) and of row `g + 8` (3). (Groups of 32 have two words for each lane.)
//!
//! `Mxfp4`: pieces of 16 rows × 64 columns, `[rows / 16][cols / 64]`: four bits for each element, then an exponent for each
//! 32 columns of a row (`scaled/mxfp4.rs`).

pub mod e4m3;
pub mod feedback;
pub(crate) mod mxfp4;
pub mod quantise;
mod search;

use crate::DType;
use half::f16;
use quantise::Zeros;
use std::ops::Range;

/// Rows and columns of a block with one scale.
pub const BLOCK: usize = 128;
/// Rows of a piece of 4-bit values.
pub(crate) const PIECE_ROWS: usize = 16;

/// Columns that share a scale, for types with 4-bit values.
pub const fn group(dtype: DType) -> Option<usize> {
    match dtype {
        DType::I4 => Some(128),
        DType::I4G64 => Some(64),
        DType::I4G32 => Some(32),
        _ => None,
    }
}

/// Whether a type has e4m3 values.
pub const fn is_fp8(dtype: DType) -> bool {
    matches!(dtype, DType::F8Row | DType::F8Block | DType::F8Pairs | DType::F8Turns)
}

/// Whether a type has its scales in the order of this module.
pub const fn is_scaled(dtype: DType) -> bool {
    is_fp8(dtype) || group(dtype).is_some() || matches!(dtype, DType::Mxfp4)
}

/// Whether a matrix of this shape can be stored so.
pub const fn fits(dtype: DType, rows: usize, cols: usize) -> bool {
    match group(dtype) {
        None if matches!(dtype, DType::Mxfp4) => {
            rows.is_multiple_of(PIECE_ROWS) && cols.is_multiple_of(mxfp4::COLS)
        }
        Some(group) => rows.is_multiple_of(PIECE_ROWS) && cols.is_multiple_of(group),
        None => {
            let pairs = !matches!(dtype, DType::F8Pairs | DType::F8Turns) || rows.is_multiple_of(2);
            pairs && cols.is_multiple_of(16)
        }
    }
}

/// Rows that must be written together.
pub const fn unit(dtype: DType) -> usize {
    match dtype {
        DType::F8Block => BLOCK,
        DType::F8Pairs | DType::F8Turns => 2 * BLOCK,
        _ => PIECE_ROWS,
    }
}

/// The row of scales for a row of the matrix.
#[inline]
const fn scale_row(dtype: DType, row: usize) -> usize {
    match dtype {
        DType::F8Pairs => row / 256 * 2 + row % 2,
        DType::F8Turns => row / 256 * 2 + row / 8 % 2,
        DType::F8Block => row / BLOCK,
        _ => row,
    }
}

/// Scales of a row of scales.
const fn scale_cols(dtype: DType, cols: usize) -> usize {
    if matches!(dtype, DType::F8Row) { 1 } else { cols.div_ceil(BLOCK) }
}

/// f32 scales behind the elements of a matrix.
pub(crate) const fn scales(dtype: DType, rows: usize, cols: usize) -> usize {
    let rows = match dtype {
        DType::F8Row => rows,
        DType::F8Block => rows.div_ceil(BLOCK),
        DType::F8Pairs | DType::F8Turns => 2 * rows.div_ceil(2 * BLOCK),
        _ => 0,
    };
    rows * scale_cols(dtype, cols)
}

/// Bytes of scales behind the elements of a matrix.
pub(crate) const fn scale_bytes(dtype: DType, rows: usize, cols: usize) -> usize {
    4 * scales(dtype, rows, cols)
}

/// The column in byte `at` of 16.
#[inline(always)]
const fn column(at: usize) -> usize {
    2 * (at / 4) + at % 4 / 2 + 8 * (at % 2)
}

/// Where the four bits of an element of a group lie: the byte, and whether its upper half.
#[inline]
const fn nibble(group: usize, row: usize, col: usize) -> (usize, bool) {
    // Words of a lane, and bytes of all lanes.
    let words = if group < 64 { group / 16 } else { 4 };
    let (part, col) = (col / (16 * words), col % (16 * words));
    let (step, within) = (col / 16, col % 16);
    let lane = row % 8 * 4 + within % 8 / 2;
    let place = within / 8 * 2 + row / 8 + within % 2 * 4;
    ((part * 32 + lane) * words * 4 + step * 4 + place / 2, place % 2 == 1)
}

/// A row of a dense matrix as floats. `bytes` is all of the matrix.
pub(crate) fn read_row(
    dtype: DType,
    bytes: &[u8],
    (rows, cols): (usize, usize),
    row: usize,
    out: &mut [f32],
) {
    match group(dtype) {
        None if dtype == DType::Mxfp4 => {
            let (pieces, row) = mxfp4::strip(bytes, cols, row);
            mxfp4::read(pieces, row, out);
        }
        None => {
            let (all, scales) = bytes.split_at(rows * cols);
            let each = scale_cols(dtype, cols);
            let scales = &scales[scale_row(dtype, row) * each * 4..][..each * 4];
            let scale = |at: usize| {
                f32::from_le_bytes(scales[4 * at..][..4].try_into().expect("four bytes"))
            };
            let wide = if each == 1 { cols } else { BLOCK };
            let row = &all[row * cols..][..cols];
            for (at, (out, bytes)) in out.chunks_mut(wide).zip(row.chunks(wide)).enumerate() {
                let scale = scale(at);
                for (out, bytes) in out.chunks_exact_mut(16).zip(bytes.chunks_exact(16)) {
                    for (at, byte) in bytes.iter().enumerate() {
                        out[column(at)] = e4m3::decode(*byte) * scale;
                    }
                }
            }
        }
        Some(group) => {
            let piece = dtype.bytes(PIECE_ROWS * group);
            let (above, row) = (row / PIECE_ROWS, row % PIECE_ROWS);
            for (at, out) in out.chunks_exact_mut(group).enumerate() {
                let piece = &bytes[(above * (cols / group) + at) * piece..][..piece];
                let behind = &piece[PIECE_ROWS * group / 2..];
                let scale = f16::from_le_bytes([behind[2 * row], behind[2 * row + 1]]).to_f32();
                let zero = i32::from(behind[2 * PIECE_ROWS + row]);
                for (col, out) in out.iter_mut().enumerate() {
                    let (at, upper) = nibble(group, row, col);
                    let q = i32::from(if upper { piece[at] >> 4 } else { piece[at] & 15 });
                    *out = (q - zero) as f32 * scale;
                }
            }
        }
    }
}

/// Some rows of a matrix while they are put in order: whole units, or up to the last row.
#[derive(Debug)]
pub struct Chunk {
    dtype: DType,
    /// Of the whole matrix.
    shape: (usize, usize),
    rows: Range<usize>,
    data: Vec<u8>,
    scales: Vec<f32>,
}

impl Chunk {
    /// Rows `rows` of a matrix of `shape`.
    ///
    /// # Panics
    /// If these are not whole units.
    pub fn new(dtype: DType, shape: (usize, usize), rows: Range<usize>) -> Chunk {
        let whole = rows.end == shape.0 || rows.end.is_multiple_of(unit(dtype));
        assert!(
            is_scaled(dtype) && whole && rows.start.is_multiple_of(unit(dtype)),
            "{rows:?} of {dtype:?}"
        );
        let data = vec![0; dtype.bytes(rows.len() * shape.1)];
        let scales = vec![1.0; scales(dtype, rows.len(), shape.1)];
        Chunk { dtype, shape, rows, data, scales }
    }

    /// Scales of a row of e4m3.
    pub fn scales_of_row(&self) -> usize {
        scale_cols(self.dtype, self.shape.1)
    }

    /// Groups of a row of 4-bit values; `None` for another type.
    pub fn groups_of_row(&self) -> Option<usize> {
        group(self.dtype).map(|group| self.shape.1 / group)
    }

    /// Whether this is a matrix of MXFP4 that a row with these exponents can be part of.
    pub fn takes_mxfp4(&self, exponents: &[u8]) -> bool {
        self.dtype == DType::Mxfp4 && exponents.iter().all(|exponent| *exponent <= mxfp4::LARGEST)
    }

    /// A row of e4m3 bytes in plain order, with its scales: one, or one for each 128 columns.
    ///
    /// # Panics
    /// If lengths are not those of the matrix, or this is not a matrix of e4m3.
    pub fn set_fp8(&mut self, row: usize, bytes: &[u8], scales: &[f32]) {
        let (cols, at) = (self.shape.1, row - self.rows.start);
        let each = scale_cols(self.dtype, cols);
        assert!(is_fp8(self.dtype) && bytes.len() == cols && scales.len() == each);
        let to = &mut self.data[at * cols..][..cols];
        for (to, bytes) in to.chunks_exact_mut(16).zip(bytes.chunks_exact(16)) {
            for (at, to) in to.iter_mut().enumerate() {
                *to = bytes[column(at)];
            }
        }
        self.scales[scale_row(self.dtype, at) * each..][..each].copy_from_slice(scales);
    }

    /// A row of 4-bit values, with a scale and a zero for each group.
    ///
    /// # Panics
    /// If lengths are not those of the matrix, or this is not a matrix of 4-bit values.
    pub fn set_int4(&mut self, row: usize, values: &[u8], scales: &[f32], zeros: &[u8]) {
        let (cols, at) = (self.shape.1, row - self.rows.start);
        let group = group(self.dtype).expect("a type with 4-bit values");
        assert!(
            values.len() == cols && scales.len() == cols / group && zeros.len() == cols / group
        );
        let (above, row, bytes) =
            (at / PIECE_ROWS, at % PIECE_ROWS, self.dtype.bytes(PIECE_ROWS * group));
        for (at, values) in values.chunks_exact(group).enumerate() {
            let piece = &mut self.data[(above * (cols / group) + at) * bytes..][..bytes];
            for (col, value) in values.iter().enumerate() {
                let (at, upper) = nibble(group, row, col);
                piece[at] |= if upper { value << 4 } else { *value };
            }
            let behind = &mut piece[PIECE_ROWS * group / 2..];
            behind[2 * row..][..2].copy_from_slice(&f16::from_f32(scales[at]).to_le_bytes());
            behind[2 * PIECE_ROWS + row] = zeros[at];
        }
    }

    /// A row of MXFP4: two elements to a byte, and the exponents of its groups.
    ///
    /// # Panics
    /// If lengths are not those of the matrix, or it cannot have this row.
    pub fn set_mxfp4(&mut self, row: usize, bytes: &[u8], exponents: &[u8]) {
        let (cols, at) = (self.shape.1, row - self.rows.start);
        let groups = cols / mxfp4::GROUP;
        assert!(self.takes_mxfp4(exponents) && bytes.len() == cols / 2);
        assert_eq!(exponents.len(), groups);
        let each = cols / mxfp4::COLS * mxfp4::PIECE;
        let pieces = &mut self.data[at / PIECE_ROWS * each..][..each];
        mxfp4::write(pieces, at % PIECE_ROWS, bytes, exponents);
    }

    /// Quantises all rows of the chunk: MXFP4 by the largest value of each group, e4m3 by the largest value of each block or
    /// row, 4 bits by a search for the scale and zero with the least squared error in each group.
    ///
    /// # Panics
    /// If `floats` are not the chunk's rows.
    pub fn quantise(&mut self, floats: &[f32]) {
        let cols = self.shape.1;
        assert_eq!(floats.len(), self.rows.len() * cols);
        if self.dtype == DType::Mxfp4 {
            let mut bytes = vec![0; cols / 2];
            for (row, floats) in self.rows.clone().zip(floats.chunks_exact(cols)) {
                let groups = floats.chunks_exact(mxfp4::GROUP);
                let groups = groups.zip(bytes.chunks_exact_mut(mxfp4::GROUP / 2));
                let exponents: Vec<u8> =
                    groups.map(|(floats, bytes)| mxfp4::quantise(floats, bytes)).collect();
                self.set_mxfp4(row, &bytes, &exponents);
            }
            return;
        }
        if let Some(group) = group(self.dtype) {
            for (row, floats) in self.rows.clone().zip(floats.chunks_exact(cols)) {
                let found = quantise::int4_rows(floats, group, Zeros::Searched);
                self.set_int4(row, &found.values, &found.scales, &found.zeros);
            }
            return;
        }
        let each = scale_cols(self.dtype, cols);
        let found = quantise::fp8_rows(self.dtype, floats, cols);
        for (at, bytes) in found.bytes.chunks_exact(cols).enumerate() {
            let scales = &found.scales[scale_row(self.dtype, at) * each..][..each];
            self.set_fp8(self.rows.start + at, bytes, scales);
        }
    }

    /// What to write, each with the byte of the matrix where it starts.
    pub fn parts(&self) -> Vec<(u64, Vec<u8>)> {
        let (rows, cols) = self.shape;
        let data = (self.dtype.bytes(self.rows.start * cols) as u64, self.data.clone());
        let scales: Vec<u8> = self.scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        if scales.is_empty() {
            return vec![data];
        }
        let before = scale_bytes(self.dtype, self.rows.start, cols);
        let at = (self.dtype.bytes(rows * cols) + before) as u64;
        vec![data, (at, scales)]
    }
}

#[cfg(test)]
mod tests;
