//! Quantises rows so that the outputs of their linear change least for the inputs that were seen, instead of each weight.
//!
//! With `H = XᵀX` of those inputs, an error `e` of a row adds `e·H·eᵀ` to the squared error of its output. Columns are
//! quantised one after the other, those with the largest inputs first, and each takes over what those before it left: with
//! `H = V·D·Vᵀ`, V upper triangular with ones in its diagonal, column `j` becomes the nearest value to `w_j + Σ e_i·V_ij`, with which its
//! term of the error is least. Scales are found before, because columns of a group are not quantised one after
//! the other. Then every value is moved to where the error is least with all others as they are, a few times over.
//!
//! The inputs `X` are those behind linears that are quantised already; before, they were `X₀`. So that errors do not add up
//! from linear to linear, rows `w` are replaced first by those whose outputs for `X` are nearest to `w·X₀ᵀ`:
//! `w + w·(X₀ - X)ᵀX·H⁻¹`. Where outputs are added to other values, what these have lost is added to `w·X₀ᵀ`, too.
//!
//! Rows are handled sixteen at a time, one to a lane, and never depend on each other.

use super::quantise::{Fp8Rows, Int4Rows, Zeros};
use super::{e4m3, scale_cols, scale_row, search};
use crate::DType;
use crate::cpu::features::Features;
use crate::cpu::simd::{self, Level, levels};
use std::sync::OnceLock;

/// Rows that are quantised together.
const ROWS: usize = 16;
/// Columns of a tile of sums of products.
const TILE: usize = 64;
/// Times that every value is moved.
const SWEEPS: usize = 3;

/// One row for each lane.
type Lanes = [f32; ROWS];

fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| Level::of(&Features::detect()))
}

/// Adds the products of inputs, rows of `cols` values, to rows `from..` of XᵀX, as many as `sums` has. Only columns from
/// `from` on are computed: the matrix is symmetric.
///
/// # Panics
/// If `inputs` or `sums` are not whole rows.
pub fn add_products(inputs: &[f32], cols: usize, from: usize, sums: &mut [f32]) {
    assert!(inputs.len().is_multiple_of(cols) && sums.len().is_multiple_of(cols));
    assert!(from + sums.len() / cols <= cols, "rows of the matrix");
    // SAFETY: the processor has the level; the body has no other needs.
    unsafe { products(level(), [inputs, inputs], [cols; 2], [from, from], sums) };
}

/// Adds the products of other values, rows of `width`, and inputs to rows `from..` of `OthersᵀX`, as many as `sums` has.
///
/// # Panics
/// If `sums` are not whole rows, or the two do not have equally many rows.
pub fn add_mixed_products(
    (others, width): (&[f32], usize),
    (inputs, cols): (&[f32], usize),
    from: usize,
    sums: &mut [f32],
) {
    assert!(inputs.len().is_multiple_of(cols) && sums.len().is_multiple_of(cols));
    assert!(others.len() == inputs.len() / cols * width, "as many rows");
    assert!(from + sums.len() / cols <= width, "rows of the matrix");
    // SAFETY: the processor has the level; the body has no other needs.
    unsafe { products(level(), [others, inputs], [width, cols], [from, 0], sums) };
}

/// Columns from `begin` on of rows `from..`.
#[inline(always)]
fn products_body<const FMA: bool>(
    [others, inputs]: [&[f32]; 2],
    [width, cols]: [usize; 2],
    [from, begin]: [usize; 2],
    sums: &mut [f32],
) {
    let mut tile = [[0.0f32; TILE]; TILE];
    for (others, inputs) in others.chunks(TILE * width).zip(inputs.chunks(TILE * cols)) {
        let count = inputs.len() / cols;
        for first in (begin / TILE * TILE..cols).step_by(TILE) {
            let wide = TILE.min(cols - first);
            for (to, row) in tile.iter_mut().zip(inputs.chunks_exact(cols)) {
                to[..wide].copy_from_slice(&row[first..first + wide]);
            }
            for (at, sums) in sums.chunks_exact_mut(cols).enumerate() {
                let mut total = [0.0f32; TILE];
                total[..wide].copy_from_slice(&sums[first..first + wide]);
                for (row, x) in tile[..count].iter().zip(others[from + at..].iter().step_by(width))
                {
                    for i in 0..TILE {
                        total[i] = simd::fma::<FMA>(*x, row[i], total[i]);
                    }
                }
                sums[first..first + wide].copy_from_slice(&total[..wide]);
            }
        }
    }
}

levels! {
    fn products(inputs: [&[f32]; 2], widths: [usize; 2], from: [usize; 2], sums: &mut [f32]) = products_body;
}

/// Subtracts from the elements of a row what columns before them, those of `row` up to `before`, have in common with each row of
/// `panel`: a step of Cholesky's factorisation.
///
/// # Panics
/// If `row` is too short for the panel.
pub fn subtract_products(row: &mut [f32], before: usize, panel: &[f32]) {
    if before == 0 {
        return;
    }
    // SAFETY: the processor has the level; the body has no other needs.
    unsafe { subtract(level(), row, before, panel) };
}

#[inline(always)]
fn subtract_body<const FMA: bool>(row: &mut [f32], before: usize, panel: &[f32]) {
    let (done, row) = row.split_at_mut(before);
    for (value, other) in row.iter_mut().zip(panel.chunks_exact(before)) {
        *value -= simd::dot::<FMA>(done, other);
    }
}

levels! {
    fn subtract(row: &mut [f32], before: usize, panel: &[f32]) = subtract_body;
}

/// What quantising must know of a linear's inputs.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// `H`, columns × columns, damped.
    pub products: &'a [f32],
    /// The columns, in the order in which they are quantised.
    pub order: &'a [u32],
    /// In row `j`, what column `order[j]` takes over of the error of each column before it: `V_ij`.
    pub shares: &'a [f32],
    /// The same as `shares` of `H` with a diagonal that is much larger, by which `drift` and `missing` are divided: what
    /// these have in common with a few inputs is largely chance.
    pub aim_shares: &'a [f32],
    /// Its `D`, in that order.
    pub aim_sizes: &'a [f32],
    /// `(X₀ - X)ᵀX`, columns × columns, with `X₀` what the inputs are before anything is quantised.
    pub drift: &'a [f32],
    /// `MᵀX` for each of the rows that are quantised, with `M` what their outputs are to make up for besides; empty if that
    /// is nothing.
    pub missing: &'a [f32],
}

impl Inputs<'_> {
    fn cols(&self) -> usize {
        self.order.len()
    }

    fn weight(&self, col: usize) -> f32 {
        self.products[col * self.cols() + col]
    }
}

/// The values that the elements of some rows may have.
trait Grid {
    /// The value nearest to `x` in a column, for each row.
    fn nearest(&self, col: usize, x: &Lanes) -> Lanes;
}

/// Four bits: a scale and a zero for each group of columns.
struct Steps {
    group: usize,
    /// For each group.
    scales: Vec<Lanes>,
    zeros: Vec<Lanes>,
}

impl Grid for Steps {
    #[inline(always)]
    fn nearest(&self, col: usize, x: &Lanes) -> Lanes {
        let (scale, zero) = (&self.scales[col / self.group], &self.zeros[col / self.group]);
        let mut found = [0.0; ROWS];
        for i in 0..ROWS {
            found[i] = (search::quantised(x[i], 1.0 / scale[i], zero[i]) - zero[i]) * scale[i];
        }
        found
    }
}

/// e4m3: a scale for some columns.
struct Floats {
    wide: usize,
    scales: Vec<Lanes>,
}

impl Grid for Floats {
    #[inline(always)]
    fn nearest(&self, col: usize, x: &Lanes) -> Lanes {
        let scale = &self.scales[col / self.wide];
        let mut found = [0.0; ROWS];
        for i in 0..ROWS {
            found[i] = e4m3::decode(e4m3::encode(x[i] * (1.0 / scale[i]))) * scale[i];
        }
        found
    }
}

/// The rows whose outputs for the inputs are nearest to those of `w` for what the inputs were before anything was quantised.
/// `slopes` are what is missing besides.
#[inline(always)]
fn aim_body<const FMA: bool>(
    w: &[Lanes],
    mut slopes: Vec<Lanes>,
    inputs: &Inputs<'_>,
) -> Vec<Lanes> {
    let cols = inputs.cols();
    for (w, drift) in w.iter().zip(inputs.drift.chunks_exact(cols)) {
        add_times::<FMA>(&mut slopes, drift, w);
    }
    // Solves `more·V·D·Vᵀ = slopes`, in the order of columns.
    let mut more: Vec<Lanes> = inputs.order.iter().map(|col| slopes[*col as usize]).collect();
    for j in (0..cols).rev() {
        let by = more[j].map(|x| -x);
        add_times::<FMA>(&mut more[..j], &inputs.aim_shares[j * cols..][..j], &by);
    }
    for j in 0..cols {
        let taken = shared::<FMA>(&more[..j], &inputs.aim_shares[j * cols..][..j]);
        for i in 0..ROWS {
            more[j][i] = more[j][i] / inputs.aim_sizes[j] - taken[i];
        }
    }
    let mut aims = w.to_vec();
    for (col, more) in inputs.order.iter().zip(&more) {
        let aim = &mut aims[*col as usize];
        for i in 0..ROWS {
            aim[i] += more[i];
        }
    }
    aims
}

levels! {
    fn aim(w: &[Lanes], slopes: Vec<Lanes>, inputs: &Inputs<'_>) -> Vec<Lanes> = aim_body;
}

/// The rows that quantising is to come near to.
fn aims(floats: &[f32], inputs: &Inputs<'_>) -> Vec<f32> {
    let cols = inputs.cols();
    let mut all = Vec::with_capacity(floats.len());
    let mut missing = inputs.missing.chunks(ROWS * cols);
    for rows in floats.chunks(ROWS * cols) {
        let slopes = lanes(missing.next().unwrap_or(&[]), cols);
        // SAFETY: the processor has the level; the body has no other needs.
        let found = unsafe { aim(level(), &lanes(rows, cols), slopes, inputs) };
        for lane in 0..rows.len() / cols {
            all.extend(found.iter().map(|aims| aims[lane]));
        }
    }
    all
}

/// Up to sixteen rows, column by column.
fn lanes(floats: &[f32], cols: usize) -> Vec<Lanes> {
    let mut all = vec![[0.0; ROWS]; cols];
    for (lane, row) in floats.chunks_exact(cols).enumerate() {
        row.iter().zip(&mut all).for_each(|(x, to)| to[lane] = *x);
    }
    all
}

/// The sum of these, each multiplied by its share.
#[inline(always)]
fn shared<const FMA: bool>(all: &[Lanes], shares: &[f32]) -> Lanes {
    // Two sums at a time: one would wait for itself.
    let mut sums = [[0.0f32; ROWS]; 2];
    for (all, shares) in all.chunks(2).zip(shares.chunks(2)) {
        for ((sum, one), share) in sums.iter_mut().zip(all).zip(shares) {
            for i in 0..ROWS {
                sum[i] = simd::fma::<FMA>(*share, one[i], sum[i]);
            }
        }
    }
    let [mut sum, more] = sums;
    for i in 0..ROWS {
        sum[i] += more[i];
    }
    sum
}

/// Quantises in order, each column with what those before it left; returns the values.
#[inline(always)]
fn feed_back<const FMA: bool, G: Grid>(w: &[Lanes], inputs: &Inputs<'_>, grid: &G) -> Vec<Lanes> {
    let cols = inputs.cols();
    let mut values = vec![[0.0f32; ROWS]; cols];
    // In the order of columns.
    let mut errors = vec![[0.0f32; ROWS]; cols];
    for (j, col) in inputs.order.iter().enumerate() {
        let col = *col as usize;
        let taken = shared::<FMA>(&errors[..j], &inputs.shares[j * cols..][..j]);
        let mut x = w[col];
        for i in 0..ROWS {
            x[i] += taken[i];
        }
        values[col] = grid.nearest(col, &x);
        for i in 0..ROWS {
            errors[j][i] = w[col][i] - values[col][i];
        }
    }
    values
}

/// Adds to each column's sums `by`, multiplied by its factor.
#[inline(always)]
fn add_times<const FMA: bool>(sums: &mut [Lanes], factors: &[f32], by: &Lanes) {
    for (sum, factor) in sums.iter_mut().zip(factors) {
        for i in 0..ROWS {
            sum[i] = simd::fma::<FMA>(*factor, by[i], sum[i]);
        }
    }
}

/// Moves each value to where the error is least with the others as they are.
#[inline(always)]
fn settle<const FMA: bool, G: Grid>(
    w: &[Lanes],
    inputs: &Inputs<'_>,
    grid: &G,
    values: &mut [Lanes],
) {
    let cols = inputs.cols();
    // Errors times H.
    let mut slopes = vec![[0.0f32; ROWS]; cols];
    for col in 0..cols {
        let mut error = values[col];
        for i in 0..ROWS {
            error[i] -= w[col][i];
        }
        add_times::<FMA>(&mut slopes, &inputs.products[col * cols..][..cols], &error);
    }
    for _ in 0..SWEEPS {
        let mut moved = false;
        for col in inputs.order {
            let col = *col as usize;
            let inverse = 1.0 / inputs.weight(col);
            let mut x = values[col];
            for i in 0..ROWS {
                x[i] -= slopes[col][i] * inverse;
            }
            let new = grid.nearest(col, &x);
            let mut by = new;
            for i in 0..ROWS {
                by[i] -= values[col][i];
            }
            if by != [0.0; ROWS] {
                moved = true;
                values[col] = new;
                add_times::<FMA>(&mut slopes, &inputs.products[col * cols..][..cols], &by);
            }
        }
        if !moved {
            break;
        }
    }
}

#[inline(always)]
fn steps_body<const FMA: bool>(w: &[Lanes], inputs: &Inputs<'_>, grid: &Steps) -> Vec<Lanes> {
    let mut values = feed_back::<FMA, Steps>(w, inputs, grid);
    settle::<FMA, Steps>(w, inputs, grid, &mut values);
    values
}

#[inline(always)]
fn floats_body<const FMA: bool>(w: &[Lanes], inputs: &Inputs<'_>, grid: &Floats) -> Vec<Lanes> {
    let mut values = feed_back::<FMA, Floats>(w, inputs, grid);
    settle::<FMA, Floats>(w, inputs, grid, &mut values);
    values
}

levels! {
    fn to_steps(w: &[Lanes], inputs: &Inputs<'_>, grid: &Steps) -> Vec<Lanes> = steps_body;
}

levels! {
    fn to_floats(w: &[Lanes], inputs: &Inputs<'_>, grid: &Floats) -> Vec<Lanes> = floats_body;
}

/// As [`super::quantise::int4_rows`], for these inputs.
///
/// # Panics
/// If `floats` are not whole rows of whole groups.
pub fn int4_rows(floats: &[f32], group: usize, zeros: Zeros, inputs: &Inputs<'_>) -> Int4Rows {
    let cols = inputs.cols();
    assert!(floats.len().is_multiple_of(cols) && cols.is_multiple_of(group));
    let floats = &aims(floats, inputs);
    let weights: Vec<f32> = (0..cols).map(|col| inputs.weight(col)).collect();
    let groups = cols / group;
    let mut all = Int4Rows { values: Vec::new(), scales: Vec::new(), zeros: Vec::new() };
    for rows in floats.chunks(ROWS * cols) {
        let mut grid =
            Steps { group, scales: vec![[1.0; ROWS]; groups], zeros: vec![[8.0; ROWS]; groups] };
        for (lane, row) in rows.chunks_exact(cols).enumerate() {
            for (at, floats) in row.chunks_exact(group).enumerate() {
                let found = search::int4_weighted(floats, &weights[at * group..][..group], zeros);
                (grid.scales[at][lane], grid.zeros[at][lane]) = (found.scale, found.zero.into());
                all.scales.push(found.scale);
                all.zeros.push(found.zero);
            }
        }
        // SAFETY: the processor has the level; the body has no other needs.
        let values = unsafe { to_steps(level(), &lanes(rows, cols), inputs, &grid) };
        for lane in 0..rows.len() / cols {
            let number = |(col, value): (usize, &Lanes)| {
                let (scale, zero) = (grid.scales[col / group][lane], grid.zeros[col / group][lane]);
                (value[lane] / scale).round_ties_even() + zero
            };
            all.values.extend(values.iter().enumerate().map(number).map(|value| value as u8));
        }
    }
    all
}

/// As [`super::quantise::fp8_rows`], for these inputs.
///
/// # Panics
/// If `dtype` has no e4m3 values, or `floats` are not whole rows.
pub fn fp8_rows(dtype: DType, floats: &[f32], inputs: &Inputs<'_>) -> Fp8Rows {
    let cols = inputs.cols();
    let floats = &aims(floats, inputs);
    let mut found = super::quantise::fp8_rows(dtype, floats, cols);
    let each = scale_cols(dtype, cols);
    let wide = if each == 1 { cols } else { super::BLOCK };
    found.bytes.clear();
    for (first, rows) in (0..).step_by(ROWS).zip(floats.chunks(ROWS * cols)) {
        let mut grid = Floats { wide, scales: vec![[1.0; ROWS]; each] };
        for lane in 0..rows.len() / cols {
            let scales = &found.scales[scale_row(dtype, first + lane) * each..][..each];
            grid.scales.iter_mut().zip(scales).for_each(|(to, scale)| to[lane] = *scale);
        }
        // SAFETY: the processor has the level; the body has no other needs.
        let values = unsafe { to_floats(level(), &lanes(rows, cols), inputs, &grid) };
        for lane in 0..rows.len() / cols {
            let byte = |(col, value): (usize, &Lanes)| {
                e4m3::encode(value[lane] * (1.0 / grid.scales[col / wide][lane]))
            };
            found.bytes.extend(values.iter().enumerate().map(byte));
        }
    }
    found
}
