//! Weights in blocks of 256 (Q4_K, Q5_K, Q6_K) as ggml multiplies them. Activations are rounded to 8 bits per 256
//! columns; products within a block are integers, and exact. How many of them are added as integers before they
//! become floats depends on the type and on the number of rows: see [`Order`].
//!
//! A row of weights is unpacked once, to 16 bits with the scales of its parts multiplied in, and used for every row
//! of activations.

use super::finish::Finish;
use super::plain::ROWS;
use crate::DType;
use crate::cpu::quant::{half_at, scale_min};
use crate::cpu::simd::{Level, levels};
use crate::cpu::view::Matrix;

/// Columns of a block.
pub(super) const COLS: usize = 256;
/// Parts of a block that have a sum of activations, and a minimum of weights.
const PARTS: usize = 16;
/// Float lanes of a dot product by eights.
const LANES: usize = 8;

/// Whether weights of this type are multiplied here.
pub(super) fn takes(dtype: DType) -> bool {
    matches!(dtype, DType::Q4K | DType::Q5K | DType::Q6K)
}

/// How a block's products are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Lane i of eight sums columns 4·i.. of every 32, with one fused multiply-add for each block; lanes are added by
    /// halves at the end. For few rows.
    Lanes,
    /// The whole block is one integer, scaled by the weights' and then by the activations' scale. For many rows.
    Tile,
    /// The whole block is one integer, scaled by both at once; minima are summed separately. For Q4_K, and the rows
    /// that remain when rows are processed in groups of four.
    Whole,
    /// As `Whole`, by 64 columns. For Q4_K and rows in groups of four.
    Quarters,
}

impl Order {
    /// For row `row` of `rows`. ggml stores Q4_K in a special layout if the number of weight rows is a multiple of 8.
    fn of(dtype: DType, weight_rows: usize, row: usize, rows: usize) -> Order {
        match dtype {
            DType::Q4K if weight_rows.is_multiple_of(8) => {
                if row < rows / 4 * 4 {
                    Order::Quarters
                } else {
                    Order::Whole
                }
            }
            _ if rows >= 8 => Order::Tile,
            _ => Order::Lanes,
        }
    }
}

/// Rows of activations in scratch: values, one scale for each block, and sums of 16 values.
#[derive(Clone, Copy, Debug)]
pub(super) struct Acts {
    q: *mut i16,
    d: *mut f32,
    sums: *mut i32,
    cols: usize,
}

// SAFETY: chunks write different rows, and all are written before any is read.
unsafe impl Sync for Acts {}

impl Acts {
    /// Bytes for `rows` rows.
    pub(super) fn bytes(rows: usize, cols: usize) -> usize {
        rows * (2 * cols + (cols / COLS) * 4 * (1 + PARTS))
    }

    /// Lays the arrays out at `at`, which has [`Acts::bytes`].
    pub(super) fn new(at: *mut u8, rows: usize, cols: usize) -> Acts {
        let blocks = rows * (cols / COLS);
        let d = at.wrapping_add(2 * rows * cols);
        Acts { q: at.cast(), d: d.cast(), sums: d.wrapping_add(4 * blocks).cast(), cols }
    }

    /// Quantises row `row` of `rows` for `w`, with the scale that maps the value of the largest magnitude to −127. Of
    /// several such values the first is used; in groups of four rows a positive one, if there is one, as in ggml. Any
    /// values are allowed: pad rows hold arbitrary old bytes.
    ///
    /// # Safety
    /// The row lies in the scratch, and this worker alone writes it.
    pub(super) unsafe fn store(&self, w: &Matrix, row: usize, rows: usize, x: &[f32]) {
        let fours = Order::of(w.dtype, w.rows, row, rows) == Order::Quarters;
        let blocks = self.cols / COLS;
        for (at, x) in x.chunks_exact(COLS).enumerate() {
            let mut largest = 0.0f32;
            for value in x {
                let more = value.abs() > largest.abs();
                // In groups of four rows: a positive value, if there is one.
                let positive = fours && value.abs() == largest.abs() && *value > 0.0;
                largest = if more || positive { *value } else { largest };
            }
            let inverse = if largest == 0.0 { 0.0 } else { -127.0 / largest };
            let index = row * blocks + at;
            // SAFETY: the caller's promise.
            unsafe {
                *self.d.add(index) = if largest == 0.0 { 0.0 } else { 1.0 / inverse };
                for (part, x) in x.chunks_exact(COLS / PARTS).enumerate() {
                    let mut sum = 0i32;
                    for (i, value) in x.iter().enumerate() {
                        let q = (value * inverse).round_ties_even() as i8;
                        *self.q.add(index * COLS + part * (COLS / PARTS) + i) = i16::from(q);
                        sum += i32::from(q);
                    }
                    *self.sums.add(index * PARTS + part) = sum;
                }
            }
        }
    }

    /// A block of a row.
    ///
    /// # Safety
    /// The row was stored.
    #[inline(always)]
    unsafe fn block(&self, row: usize, at: usize) -> (&[i16; COLS], f32, &[i32; PARTS]) {
        let index = row * (self.cols / COLS) + at;
        // SAFETY: the caller's promise.
        unsafe {
            let q = &*self.q.add(index * COLS).cast::<[i16; COLS]>();
            (q, *self.d.add(index), &*self.sums.add(index * PARTS).cast::<[i32; PARTS]>())
        }
    }
}

/// An unpacked block of weights: its values times the scales of their parts, what is subtracted for each unit of a
/// part's sum of activations, and the two scales.
#[derive(Clone, Copy)]
#[repr(C)]
struct Unpacked {
    w: [i16; COLS],
    mins: [i16; PARTS],
    d: f32,
    dmin: f32,
}

/// Bytes of scratch a worker needs for weights of `cols` columns.
pub(super) fn own_bytes(cols: usize) -> usize {
    ROWS * (cols / COLS) * size_of::<Unpacked>()
}

#[inline(always)]
fn unpack(dtype: DType, block: &[u8], to: &mut Unpacked) {
    match dtype {
        DType::Q4K => unpack_with_minima::<false>(block, to),
        DType::Q5K => unpack_with_minima::<true>(block, to),
        _ => unpack_q6k(block, to),
    }
}

/// Bytes of a block for the values of a part.
#[inline(always)]
fn part(block: &[u8], at: usize) -> &[u8; COLS / PARTS] {
    block[at..at + COLS / PARTS].try_into().expect("as many bytes")
}

/// Q5_K if `FIVE`, else Q4_K.
#[inline(always)]
fn unpack_with_minima<const FIVE: bool>(block: &[u8], to: &mut Unpacked) {
    let (q_at, high_at) = if FIVE { (48, 16) } else { (16, 0) };
    (to.d, to.dmin) = (half_at(block, 0), half_at(block, 2));
    for (group, w) in to.w.chunks_exact_mut(COLS / PARTS).enumerate() {
        let (scale, min) = scale_min(&block[4..16], group / 2);
        to.mins[group] = i16::from(min);
        let half = group % 2 * (COLS / PARTS);
        let low = part(block, q_at + group / 4 * 32 + half);
        let high = part(block, high_at + half);
        for ((w, low), high) in w.iter_mut().zip(low).zip(high) {
            let fifth = if FIVE { high >> (group / 2) & 1 } else { 0 };
            *w = i16::from(low >> (group / 2 % 2 * 4) & 15 | fifth << 4) * i16::from(scale);
        }
    }
}

/// Values are stored plus 32, which is the same as a minimum of 32 times the scale.
#[inline(always)]
fn unpack_q6k(block: &[u8], to: &mut Unpacked) {
    (to.d, to.dmin) = (half_at(block, 208), 0.0);
    for (group, w) in to.w.chunks_exact_mut(COLS / PARTS).enumerate() {
        let scale = i16::from(block[192 + group] as i8);
        to.mins[group] = 32 * scale;
        let low = part(block, group / 8 * 64 + group % 4 * (COLS / PARTS));
        let high = part(block, 128 + group / 8 * 32 + group % 2 * (COLS / PARTS));
        for ((w, low), high) in w.iter_mut().zip(low).zip(high) {
            let q = low >> (group % 8 / 4 * 4) & 15 | (high >> (group % 8 / 2 * 2) & 3) << 4;
            *w = i16::from(q) * scale;
        }
    }
}

/// The second phase of a linear.
pub(super) struct Task<'a> {
    pub(super) w: &'a Matrix,
    pub(super) acts: &'a Acts,
    pub(super) rows: usize,
    pub(super) finish: &'a Finish,
    pub(super) level: Level,
}

impl Task<'_> {
    /// Rows `n..n + ROWS` of w (fewer at the end) for every row of activations.
    ///
    /// # Safety
    /// `scratch` has [`own_bytes`]; the activations are stored; this worker alone computes these rows.
    pub(super) unsafe fn run(&self, n: usize, scratch: *mut u8) {
        let count = ROWS.min(self.w.rows - n);
        let (dtype, blocks) = (self.w.dtype, self.w.cols / COLS);
        // SAFETY: as many bytes of this worker's scratch; any bits are such blocks.
        let unpacked =
            unsafe { std::slice::from_raw_parts_mut(scratch.cast::<Unpacked>(), count * blocks) };
        for (i, unpacked) in unpacked.chunks_exact_mut(blocks).enumerate() {
            // SAFETY: the level was detected.
            unsafe { unpack_row(self.level, dtype, self.w.blocks(n + i), unpacked) };
        }
        for row in 0..self.rows {
            let order = Order::of(dtype, self.w.rows, row, self.rows);
            let mut products = [0.0f32; ROWS];
            for (product, weights) in products.iter_mut().zip(unpacked.chunks_exact(blocks)) {
                // SAFETY: the level was detected; the row was stored.
                *product = unsafe { multiply(self.level, dtype, order, self.acts, row, weights) };
            }
            self.finish.row(row, n, &mut products[..count]);
        }
    }
}

#[inline(always)]
fn unpack_row_body<const FMA: bool>(dtype: DType, blocks: &[u8], to: &mut [Unpacked]) {
    for (block, to) in blocks.chunks_exact(dtype.block_bytes()).zip(to) {
        unpack(dtype, block, to);
    }
}

#[inline(always)]
unsafe fn multiply_body<const FMA: bool>(
    dtype: DType,
    order: Order,
    acts: &Acts,
    row: usize,
    weights: &[Unpacked],
) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        match order {
            Order::Lanes => by_lanes(dtype, acts, row, weights),
            Order::Tile => by_tile(dtype, acts, row, weights),
            Order::Whole => apart::<1>(acts, row, weights),
            Order::Quarters => apart::<4>(acts, row, weights),
        }
    }
}

levels! {
    /// Unpacks a row of blocks.
    fn unpack_row(dtype: DType, blocks: &[u8], to: &mut [Unpacked]) = unpack_row_body;
}

levels! {
    /// The dot product of a row of weights with a row of activations that was stored.
    fn multiply(dtype: DType, order: Order, acts: &Acts, row: usize, weights: &[Unpacked]) -> f32 = multiply_body;
}

#[inline(always)]
fn dot(x: &[i16], y: &[i16]) -> i32 {
    x.iter().zip(y).map(|(x, y)| i32::from(*x) * i32::from(*y)).sum()
}

/// What is subtracted for parts `from..to`, before the scale.
#[inline(always)]
fn taken_off(mins: &[i16; PARTS], sums: &[i32; PARTS], parts: std::ops::Range<usize>) -> i32 {
    parts.map(|part| i32::from(mins[part]) * sums[part]).sum()
}

#[inline(always)]
unsafe fn by_lanes(dtype: DType, acts: &Acts, row: usize, weights: &[Unpacked]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    // Q4_K sums minima by four lanes, Q5_K by one.
    let mut minima = [0.0f32; 4];
    for (at, block) in weights.iter().enumerate() {
        // SAFETY: the caller's promise.
        let (q, scale, sums) = unsafe { acts.block(row, at) };
        let d = scale * block.d;
        let mut columns = [0i32; 32];
        for (w, q) in block.w.chunks_exact(32).zip(q.chunks_exact(32)) {
            for i in 0..32 {
                columns[i] += i32::from(w[i]) * i32::from(q[i]);
            }
        }
        for (lane, sum) in lanes.iter_mut().enumerate() {
            let mut ints: i32 = columns[4 * lane..4 * lane + 4].iter().sum();
            if dtype == DType::Q6K {
                ints -= taken_off(&block.mins, sums, 2 * lane..2 * lane + 2);
            }
            *sum = d.mul_add(ints as f32, *sum);
        }
        let dmin = -scale * block.dmin;
        match dtype {
            DType::Q4K => minima.iter_mut().enumerate().for_each(|(i, sum)| {
                let off = taken_off(&block.mins, sums, 4 * i..4 * i + 4);
                *sum = dmin.mul_add(off as f32, *sum);
            }),
            DType::Q5K => {
                let off = taken_off(&block.mins, sums, 0..PARTS);
                minima[0] = dmin.mul_add(off as f32, minima[0]);
            }
            _ => {}
        }
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    let sum = ((a + e) + (c + g)) + ((b + f) + (d + h));
    match dtype {
        DType::Q6K => sum,
        _ => sum + ((minima[0] + minima[2]) + (minima[1] + minima[3])),
    }
}

#[inline(always)]
unsafe fn by_tile(dtype: DType, acts: &Acts, row: usize, weights: &[Unpacked]) -> f32 {
    let mut sum = 0.0f32;
    for (at, block) in weights.iter().enumerate() {
        // SAFETY: the caller's promise.
        let (q, scale, sums) = unsafe { acts.block(row, at) };
        let (ints, off) = (dot(&block.w, q), taken_off(&block.mins, sums, 0..PARTS));
        let scaled = match dtype {
            DType::Q6K => (ints - off) as f32 * block.d,
            _ => (-block.dmin).mul_add(off as f32, ints as f32 * block.d),
        };
        sum = scaled.mul_add(scale, sum);
    }
    sum
}

/// Sums in `N` pieces for each block, minima separately.
#[inline(always)]
unsafe fn apart<const N: usize>(acts: &Acts, row: usize, weights: &[Unpacked]) -> f32 {
    let (mut sum, mut minima) = (0.0f32, 0.0f32);
    for (at, block) in weights.iter().enumerate() {
        // SAFETY: the caller's promise.
        let (q, scale, sums) = unsafe { acts.block(row, at) };
        let (d, dmin) = (block.d * scale, block.dmin * scale);
        for piece in 0..N {
            let columns = COLS / N * piece..COLS / N * (piece + 1);
            let off = taken_off(&block.mins, sums, PARTS / N * piece..PARTS / N * (piece + 1));
            sum = (dot(&block.w[columns.clone()], &q[columns]) as f32).mul_add(d, sum);
            minima = (off as f32).mul_add(dmin, minima);
        }
    }
    sum - minima
}
