//! Weights in the layout of the CPU's instructions: 16 rows interleaved, 32 columns at a time.
//!
//! A packed matrix is `[rows / 16][cols / 32]` blocks. Rows are not padded, so their number must be a multiple of 16.
//! A block holds, for its 16 rows,
//!
//! * 16 scales `d` and 16 minima `m`, f16 (64 bytes),
//! * `P4`: 4 × 64 bytes; byte `4·r + b` of line `g` holds column `4·g + b` of row `r` in the low nibble
//!   and column `16 + 4·g + b` in the high one; w = d·q + m with q in 0..16,
//! * `P8`: 8 × 64 bytes; byte `4·r + b` of line `g` holds column `4·g + b` of row `r` as q + 128;
//!   w = d·q + m with q in −128..128.
//!
//! So a line is one vector of dot-product operands (4 columns of 16 rows) and eight lines are one tile
//! of the matrix unit. Packing loses nothing: scales and values are those of the source blocks.

use super::quant;
use crate::DType;
use half::f16;

/// Rows packed together.
pub const ROWS: usize = 16;
/// Columns per block.
pub(crate) const COLS: usize = 32;
/// Bytes of scales and minima at the front of a block.
pub(crate) const SCALES: usize = 4 * ROWS;

/// The dtype that a matrix of `src` is packed to, if it can be: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 with rows a multiple
/// of [`ROWS`] and columns a multiple of `COLS`.
pub fn packed_dtype(src: DType, rows: usize, cols: usize) -> Option<DType> {
    match src {
        _ if !whole(rows, cols) => None,
        DType::Q4_0 | DType::Q4_1 => Some(DType::P4),
        DType::Q5_0 | DType::Q5_1 | DType::Q8_0 => Some(DType::P8),
        _ => None,
    }
}

/// The same for a matrix whose rows come from parts of several types: the 8-bit packing holds all of them without
/// loss.
pub(crate) fn packed_parts(parts: &[DType], rows: usize, cols: usize) -> Option<DType> {
    let packed: Option<Vec<DType>> =
        parts.iter().map(|part| packed_dtype(*part, rows, cols)).collect();
    let packed = packed?;
    match packed.iter().all(|dtype| *dtype == DType::P4) {
        true => packed.first().copied(),
        false => Some(DType::P8),
    }
}

/// Whether a shape consists of whole blocks.
pub(crate) fn whole(rows: usize, cols: usize) -> bool {
    rows.is_multiple_of(ROWS) && cols.is_multiple_of(COLS)
}

/// Bytes of one block of a packed dtype.
pub(crate) const fn block_bytes(dtype: DType) -> usize {
    dtype.bytes(ROWS * COLS)
}

/// Packs `rows` rows of `src` blocks into `out`. Row groups are independent, so a matrix can be packed
/// in parts of a multiple of [`ROWS`] rows.
///
/// # Panics
/// If [`packed_dtype`] is `None` for this, or lengths do not match.
pub fn pack_rows(src: DType, bytes: &[u8], rows: usize, cols: usize, out: &mut [u8]) {
    let dtype = packed_dtype(src, rows, cols).expect("rows that can be packed");
    assert_eq!(bytes.len(), rows * src.bytes(cols), "source length");
    let rows: Vec<_> = bytes.chunks_exact(src.bytes(cols)).map(|row| (src, row)).collect();
    pack_parts(dtype, &rows, cols, out);
}

/// Packs rows that may be of several types into `out`, as the dtype that `packed_parts` returned.
///
/// # Panics
/// If lengths do not match.
pub fn pack_parts(dtype: DType, rows: &[(DType, &[u8])], cols: usize, out: &mut [u8]) {
    assert_eq!(out.len(), dtype.bytes(rows.len() * cols), "packed length");
    for (index, block) in out.chunks_exact_mut(block_bytes(dtype)).enumerate() {
        let (group, at) = (index / (cols / COLS), index % (cols / COLS));
        for (r, (src, row)) in rows[group * ROWS..][..ROWS].iter().enumerate() {
            let bytes = src.block_bytes();
            put(dtype, block, r, &Source::read(*src, &row[at * bytes..][..bytes]));
        }
    }
}

/// One row's 32 columns: w = d·q + m.
struct Source {
    d: f16,
    m: f16,
    q: [i8; COLS],
}

impl Source {
    fn read(src: DType, block: &[u8]) -> Source {
        let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]);
        let d = half(0);
        let zero = f16::ZERO;
        let nibbles = |at: usize| {
            std::array::from_fn(|i| match i {
                0..16 => (block[at + i] & 15) as i8,
                _ => (block[at + i - 16] >> 4) as i8,
            })
        };
        let fives = |at: usize, offset: i8| {
            let bits = u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
            let low: [i8; COLS] = nibbles(at + 4);
            std::array::from_fn(|i| (low[i] | ((bits >> i & 1) << 4) as i8) - offset)
        };
        match src {
            // m = −8·d is exact: only the exponent changes.
            DType::Q4_0 => Source { d, m: f16::from_f32(-8.0 * d.to_f32()), q: nibbles(2) },
            DType::Q4_1 => Source { d, m: half(2), q: nibbles(4) },
            DType::Q5_0 => Source { d, m: zero, q: fives(2, 16) },
            DType::Q5_1 => Source { d, m: half(2), q: fives(4, 0) },
            DType::Q8_0 => Source { d, m: zero, q: std::array::from_fn(|i| block[2 + i] as i8) },
            other => unreachable!("{other:?} is not packed"),
        }
    }
}

fn put(dtype: DType, block: &mut [u8], r: usize, source: &Source) {
    block[2 * r..2 * r + 2].copy_from_slice(&source.d.to_le_bytes());
    block[2 * ROWS + 2 * r..2 * ROWS + 2 * r + 2].copy_from_slice(&source.m.to_le_bytes());
    let lines = &mut block[SCALES..];
    for c in 0..COLS {
        let q = source.q[c];
        match (dtype, c) {
            (DType::P8, _) => lines[c / 4 * 64 + 4 * r + c % 4] = (q as u8) ^ 0x80,
            (_, 0..16) => lines[c / 4 * 64 + 4 * r + c % 4] = q as u8,
            (_, _) => lines[(c - 16) / 4 * 64 + 4 * r + c % 4] |= (q as u8) << 4,
        }
    }
}

/// The scale, minimum and value of row `r` and column `c` of a block.
pub(crate) fn element(dtype: DType, block: &[u8], r: usize, c: usize) -> (f32, f32, i32) {
    let (d, m) = scales(block, r);
    (d, m, value(dtype, block, r, c))
}

/// The scale and minimum of row `r` of a block.
fn scales(block: &[u8], r: usize) -> (f32, f32) {
    (quant::half_at(block, 2 * r), quant::half_at(block, 2 * ROWS + 2 * r))
}

fn value(dtype: DType, block: &[u8], r: usize, c: usize) -> i32 {
    let lines = &block[SCALES..];
    match (dtype, c) {
        (DType::P8, _) => i32::from((lines[c / 4 * 64 + 4 * r + c % 4] ^ 0x80) as i8),
        (_, 0..16) => i32::from(lines[c / 4 * 64 + 4 * r + c % 4] & 15),
        (_, _) => i32::from(lines[(c - 16) / 4 * 64 + 4 * r + c % 4] >> 4),
    }
}

/// The block that holds row `row`, columns `32·at..`.
pub(crate) fn block(dtype: DType, packed: &[u8], cols: usize, row: usize, at: usize) -> &[u8] {
    let bytes = block_bytes(dtype);
    let index = row / ROWS * (cols / COLS) + at;
    &packed[index * bytes..(index + 1) * bytes]
}

/// A row as f32.
pub(crate) fn read_row(dtype: DType, packed: &[u8], cols: usize, row: usize, out: &mut [f32]) {
    for (at, out) in out.chunks_exact_mut(COLS).enumerate() {
        let block = block(dtype, packed, cols, row, at);
        let (d, m) = scales(block, row % ROWS);
        for (c, out) in out.iter_mut().enumerate() {
            *out = d * value(dtype, block, row % ROWS, c) as f32 + m;
        }
    }
}

/// 32 activations, quantised for multiplication with packed weights: x ≈ d·q.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ActBlock {
    /// Scale: amax / 127, rounded to f16.
    pub(crate) d: f32,
    /// Unrounded scale times the sum of the values; it is multiplied with a weight's minimum.
    pub(crate) s: f32,
    /// Values, rounded to nearest even.
    pub(crate) q: [i8; COLS],
}

/// Quantises 32 activations.
pub(crate) fn quantise(x: &[f32]) -> ActBlock {
    let amax = x.iter().fold(0.0f32, |amax, v| amax.max(v.abs()));
    let inverse = if amax == 0.0 { 0.0 } else { 127.0 / amax };
    let q: [i8; COLS] = std::array::from_fn(|i| (x[i] * inverse).round_ties_even() as i8);
    let d = amax / 127.0;
    let sum: i32 = q.iter().map(|q| i32::from(*q)).sum();
    ActBlock { d: f16::from_f32(d).to_f32(), s: d * sum as f32, q }
}
