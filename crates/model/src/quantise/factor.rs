//! From the inputs of a linear to what quantising its rows must know of them.

use device::scaled::feedback::{Inputs, add_mixed_products, add_products, subtract_products};
use rayon::prelude::*;

/// Rows of XᵀX that are one job, and columns of Cholesky's factorisation that are handled together.
const STRIP: usize = 64;
/// What the diagonal grows by, as a share of itself: what columns have in common in a few inputs is partly chance. A share of the
/// mean would leave nothing of small columns where others are thousands of times as large. If rounding made the matrix
/// indefinite, ten times as much is tried, and so on.
const DAMPING: [f32; 3] = [0.01, 0.1, 1.0];
/// The same where rows are replaced to make up for errors of linears before. Most of these errors have nothing to do with the
/// inputs; with little damping, rows would follow what they have in common by chance.
const AIM_DAMPING: f32 = 1.0;
/// Added to the diagonal, times its mean: columns that were not seen must not take over errors.
const LEAST: f32 = 1e-6;

/// XᵀX of the inputs seen so far.
#[derive(Debug)]
pub(super) struct Products {
    cols: usize,
    /// The upper half is complete, the rest only in part.
    sums: Vec<f32>,
    /// See [`Inputs::drift`].
    drift: Vec<f32>,
    /// See [`Inputs::missing`]: for all rows of the weight, or for none.
    missing: Vec<f32>,
}

impl Products {
    /// Of no inputs, with what the outputs of `rows` rows are to make up for.
    pub(super) fn new(cols: usize, rows: usize) -> Products {
        let [sums, drift] = [(); 2].map(|()| vec![0.0; cols * cols]);
        Products { cols, sums, drift, missing: vec![0.0; rows * cols] }
    }

    /// Adds inputs, row by row, and what they were before anything was quantised. The sums do not depend on the number of
    /// threads.
    pub(super) fn add(&mut self, inputs: &[f32], before: &[f32]) {
        let cols = self.cols;
        let strips = self.sums.par_chunks_mut(STRIP * cols).enumerate();
        strips.for_each(|(at, sums)| add_products(inputs, cols, at * STRIP, sums));
        let more: Vec<f32> = before.iter().zip(inputs).map(|(before, x)| before - x).collect();
        let strips = self.drift.par_chunks_mut(STRIP * cols).enumerate();
        strips.for_each(|(at, sums)| {
            add_mixed_products((&more, cols), (inputs, cols), at * STRIP, sums);
        });
    }

    /// Adds what outputs are to make up for with these inputs, an output for each row of the weight.
    pub(super) fn add_missing(&mut self, missing: &[f32], inputs: &[f32]) {
        let cols = self.cols;
        let rows = self.missing.len() / cols;
        let strips = self.missing.par_chunks_mut(STRIP * cols).enumerate();
        strips.for_each(|(at, sums)| {
            add_mixed_products((missing, rows), (inputs, cols), at * STRIP, sums);
        });
    }

    /// Multiplies what each row is to make up for.
    pub(super) fn scale_missing(&mut self, factors: &[f32]) {
        for (row, factor) in self.missing.chunks_exact_mut(self.cols).zip(factors) {
            row.iter_mut().for_each(|x| *x *= factor);
        }
    }

    /// What quantising needs; `None` if the inputs were zeros or no numbers.
    pub(super) fn factor(mut self) -> Option<Factor> {
        let cols = self.cols;
        for row in 0..cols {
            for col in 0..row {
                self.sums[row * cols + col] = self.sums[col * cols + row];
            }
        }
        let diagonal = |sums: &[f32], at: usize| sums[at * cols + at];
        let mean = (0..cols).map(|at| diagonal(&self.sums, at)).sum::<f32>() / cols as f32;
        if mean <= 0.0 || !mean.is_finite() {
            return None;
        }
        let mut order: Vec<u32> = (0..cols as u32).collect();
        let size = |col: &u32| diagonal(&self.sums, *col as usize);
        // Stable, so that equal columns keep their order.
        order.sort_by(|a, b| size(b).total_cmp(&size(a)));
        let plain: Vec<f32> = (0..cols).map(|at| diagonal(&self.sums, at)).collect();
        let mut damped = |damping: f32| {
            for (at, plain) in plain.iter().enumerate() {
                self.sums[at * cols + at] = plain * (1.0 + damping) + LEAST * mean;
            }
            triangle(&self.sums, &order)
        };
        let aims = damped(AIM_DAMPING)?;
        let feedback = DAMPING.into_iter().find_map(damped)?;
        let Products { sums: products, drift, missing, .. } = self;
        Some(Factor { products, order, feedback, aims, drift, missing })
    }
}

/// V and D of a matrix that is V·D·Vᵀ.
#[derive(Debug)]
struct Triangle {
    /// In row j, `V_ij`.
    shares: Vec<f32>,
    sizes: Vec<f32>,
}

/// The factors of a symmetric matrix with its columns in another order; `None` if it is not positive definite.
fn triangle(matrix: &[f32], order: &[u32]) -> Option<Triangle> {
    let cols = order.len();
    // Backwards: V is the lower factor of the matrix in reverse order, turned over.
    let last = cols - 1;
    let reversed = |row: usize, col: usize| {
        let (row, col) = (order[last - row] as usize, order[last - col] as usize);
        matrix[row * cols + col]
    };
    let mut lower = vec![0.0; cols * cols];
    lower.par_chunks_mut(cols).enumerate().for_each(|(row, to)| {
        to[..=row].iter_mut().enumerate().for_each(|(col, to)| *to = reversed(row, col));
    });
    if !cholesky(&mut lower, cols) {
        return None;
    }
    let mut shares = vec![0.0; cols * cols];
    shares.par_chunks_mut(cols).enumerate().for_each(|(j, to)| {
        let col = last - j;
        let inverse = 1.0 / lower[col * cols + col];
        for (i, to) in to[..j].iter_mut().enumerate() {
            *to = lower[(last - i) * cols + col] * inverse;
        }
    });
    let sizes = (0..cols).map(|j| lower[(last - j) * cols + last - j].powi(2)).collect();
    Some(Triangle { shares, sizes })
}

/// See [`Inputs`].
#[derive(Debug)]
pub(super) struct Factor {
    products: Vec<f32>,
    order: Vec<u32>,
    feedback: Triangle,
    aims: Triangle,
    drift: Vec<f32>,
    missing: Vec<f32>,
}

impl Factor {
    /// For all rows of the weight.
    pub(super) fn inputs(&self) -> Inputs<'_> {
        Inputs {
            products: &self.products,
            order: &self.order,
            shares: &self.feedback.shares,
            aim_shares: &self.aims.shares,
            aim_sizes: &self.aims.sizes,
            drift: &self.drift,
            missing: &self.missing,
        }
    }
}

/// Makes of the lower half of a matrix its factor L, with `L·Lᵀ` the matrix; false if it is not positive definite.
fn cholesky(lower: &mut [f32], cols: usize) -> bool {
    for from in (0..cols).step_by(STRIP) {
        let to = cols.min(from + STRIP);
        let wide = to - from;
        let panel: Vec<f32> =
            (from..to).flat_map(|row| lower[row * cols..][..from].iter().copied()).collect();
        lower[from * cols..]
            .par_chunks_mut(cols)
            .for_each(|row| subtract_products(&mut row[..to], from, &panel));
        // The block on the diagonal, in f64: it decides whether the matrix is positive definite.
        let mut block = vec![0.0f64; wide * wide];
        for row in 0..wide {
            for col in 0..=row {
                let dot = (0..col).map(|k| block[row * wide + k] * block[col * wide + k]);
                let left = f64::from(lower[(from + row) * cols + from + col]) - dot.sum::<f64>();
                block[row * wide + col] = if col < row {
                    left / block[col * wide + col]
                } else if left > 0.0 && left.is_finite() {
                    left.sqrt()
                } else {
                    return false;
                };
            }
        }
        let block: Vec<f32> = block.into_iter().map(|x| x as f32).collect();
        let (above, below) = lower.split_at_mut(to * cols);
        for (row, block) in block.chunks_exact(wide).enumerate() {
            above[(from + row) * cols + from..][..=row].copy_from_slice(&block[..=row]);
        }
        below.par_chunks_mut(cols).for_each(|row| {
            let row = &mut row[from..to];
            for col in 0..wide {
                let dot: f32 = (0..col).map(|k| row[k] * block[col * wide + k]).sum();
                row[col] = (row[col] - dot) / block[col * wide + col];
            }
        });
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::DType;
    use device::scaled::feedback;
    use device::scaled::quantise::{Zeros, fp8_rows, int4_rows};

    const COLS: usize = 192;
    const ROWS: usize = 40;

    /// Numbers between -1 and 1.
    struct Draws(u64);

    impl Draws {
        fn next(&mut self) -> f32 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
        }

        fn some(&mut self, count: usize) -> Vec<f32> {
            (0..count).map(|_| self.next()).collect()
        }
    }

    /// Inputs as a model has them: columns of different sizes, sums of fewer causes than columns.
    fn inputs(tokens: usize, draws: &mut Draws) -> Vec<f32> {
        let causes = COLS / 3;
        let mut fixed = Draws(99);
        let mixing = fixed.some(causes * COLS);
        let sizes: Vec<f32> = (0..COLS).map(|_| (2.0 * fixed.next()).exp()).collect();
        let token = |_| {
            let cause = draws.some(causes);
            let noise = draws.some(COLS);
            let value = |col: usize| {
                let sum: f32 = (0..causes).map(|c| cause[c] * mixing[c * COLS + col]).sum();
                sizes[col] * (sum + 0.3 * noise[col])
            };
            (0..COLS).map(value).collect::<Vec<f32>>()
        };
        (0..tokens).flat_map(token).collect()
    }

    fn factor(inputs: &[f32]) -> Factor {
        let mut products = Products::new(COLS, 0);
        inputs.chunks(100 * COLS).for_each(|some| products.add(some, some));
        products.factor().unwrap()
    }

    /// The squared error of the outputs of `found` instead of `w`.
    fn error(w: &[f32], found: &[f32], inputs: &[f32]) -> f64 {
        let mut sum = 0.0;
        for x in inputs.chunks_exact(COLS) {
            for (w, found) in w.chunks_exact(COLS).zip(found.chunks_exact(COLS)) {
                let dot: f32 = (0..COLS).map(|i| (w[i] - found[i]) * x[i]).sum();
                sum += f64::from(dot).powi(2);
            }
        }
        sum
    }

    fn of_int4(found: &device::scaled::quantise::Int4Rows, group: usize) -> Vec<f32> {
        let value = |(at, value): (usize, &u8)| {
            let zero = f32::from(found.zeros[at / group]);
            (f32::from(*value) - zero) * found.scales[at / group]
        };
        found.values.iter().enumerate().map(value).collect()
    }

    /// The error on inputs that were not seen, as a share of that of rounding each weight, in 4 bits and in e4m3; `plant` may
    /// spoil what quantising knows.
    fn shares(plant: fn(&mut Factor)) -> [f64; 2] {
        let mut draws = Draws(5);
        let w = draws.some(ROWS * COLS);
        let mut factor = factor(&inputs(1500, &mut draws));
        plant(&mut factor);
        let unseen = inputs(300, &mut draws);
        let plain = of_int4(&int4_rows(&w, 64, Zeros::Searched), 64);
        let fed = feedback::int4_rows(&w, 64, Zeros::Searched, &factor.inputs());
        let int4 = error(&w, &of_int4(&fed, 64), &unseen) / error(&w, &plain, &unseen);
        let values = |found: device::scaled::quantise::Fp8Rows| {
            let rows = found.bytes.chunks_exact(COLS).zip(&found.scales);
            let row = |(bytes, scale): (&[u8], &f32)| {
                bytes.iter().map(|b| device::scaled::e4m3::decode(*b) * scale).collect::<Vec<f32>>()
            };
            rows.flat_map(row).collect::<Vec<f32>>()
        };
        let plain = values(fp8_rows(DType::F8Row, &w, COLS));
        let fed = values(feedback::fp8_rows(DType::F8Row, &w, &factor.inputs()));
        [int4, error(&w, &fed, &unseen) / error(&w, &plain, &unseen)]
    }

    #[test]
    fn outputs_for_unseen_inputs_change_less_than_by_rounding() {
        let [int4, fp8] = shares(|_| {});
        assert!(int4 < 0.5 && fp8 < 0.5, "{int4} {fp8}");
    }

    /// Inputs are smaller than they were, and what outputs are added to has lost a part that depends on the inputs: sums for
    /// inputs that were not seen come nearer to what they were.
    #[test]
    fn rows_make_up_for_what_was_lost_before() {
        let mut draws = Draws(6);
        let (w, lost) = (draws.some(ROWS * COLS), draws.some(ROWS * COLS));
        let seen = inputs(1500, &mut draws);
        let after = |before: &[f32]| before.iter().map(|x| 0.8 * x).collect::<Vec<f32>>();
        let missing = |before: &[f32]| {
            let row =
                |row: &[f32], x: &[f32]| 0.1 * row.iter().zip(x).map(|(a, b)| a * b).sum::<f32>();
            let rows = |x| lost.chunks_exact(COLS).map(move |r| row(r, x));
            before.chunks_exact(COLS).flat_map(rows).collect::<Vec<f32>>()
        };
        // What is to be seen, in inputs after all: all of `w` and what was lost.
        let wanted: Vec<f32> = w.iter().zip(&lost).map(|(w, l)| (w + 0.1 * l) / 0.8).collect();
        let unseen = after(&inputs(300, &mut draws));
        let error_with = |drift: bool, rows: usize| {
            let mut products = Products::new(COLS, rows);
            let now = after(&seen);
            products.add(&now, if drift { &seen } else { &now });
            if rows > 0 {
                products.add_missing(&missing(&seen), &now);
                products.scale_missing(&vec![1.0; rows]);
            }
            let factor = products.factor().unwrap();
            let found = feedback::int4_rows(&w, 64, Zeros::Searched, &factor.inputs());
            error(&wanted, &of_int4(&found, 64), &unseen)
        };
        let plain = error_with(false, 0);
        let [drift, both] = [0, ROWS].map(|rows| error_with(true, rows) / plain);
        assert!(drift < 0.7 && both < 0.5 * drift, "{drift} {both}");
    }

    /// What mistakes would do: inputs of other columns; columns that seem to have nothing in common.
    #[test]
    fn mistakes_are_noticed() {
        let moved = shares(|factor| factor.products.rotate_right(7 * COLS + 7));
        assert!(moved.iter().all(|share| *share > 2.0), "{moved:?}");
        let alone = shares(|factor| {
            let between = (0..COLS * COLS).filter(|at| at % (COLS + 1) > 0);
            between.for_each(|at| factor.products[at] = 0.0);
            factor.feedback.shares.fill(0.0);
        });
        assert!(alone.iter().all(|share| *share > 0.75), "{alone:?}");
    }

    #[test]
    fn threads_do_not_matter() {
        let made = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let factor = pool.install(|| factor(&inputs(200, &mut Draws(8))));
            let bits = |all: &[f32]| all.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
            (bits(&factor.products), factor.order.clone(), bits(&factor.feedback.shares))
        };
        assert!(made(1) == made(4));
    }

    /// V·D·Vᵀ is the matrix, in the order of quantising.
    #[test]
    fn the_factors_give_the_matrix() {
        let Factor { products, order, feedback, .. } = factor(&inputs(400, &mut Draws(3)));
        let Triangle { shares, sizes } = feedback;
        let unit = |i: usize, j: usize| match i.cmp(&j) {
            std::cmp::Ordering::Less => f64::from(shares[j * COLS + i]),
            std::cmp::Ordering::Equal => 1.0,
            std::cmp::Ordering::Greater => 0.0,
        };
        let wanted =
            |i: usize, j: usize| f64::from(products[order[i] as usize * COLS + order[j] as usize]);
        // From the last column on, each has what those behind it leave.
        let mut scales = vec![0.0; COLS];
        for j in (0..COLS).rev() {
            let rest: f64 = (j + 1..COLS).map(|k| unit(j, k).powi(2) * scales[k]).sum();
            scales[j] = wanted(j, j) - rest;
            assert!((scales[j] / f64::from(sizes[j]) - 1.0).abs() < 0.01, "{j}: {}", scales[j]);
        }
        for (i, j) in [(0, 0), (0, 5), (3, 100), (70, 130), (64, 191), (190, 191)] {
            let sum: f64 = (0..COLS).map(|k| unit(i, k) * unit(j, k) * scales[k]).sum();
            let size = (wanted(i, i) * wanted(j, j)).sqrt();
            assert!((sum - wanted(i, j)).abs() < 1e-4 * size, "{i} {j}: {sum} {}", wanted(i, j));
        }
        assert!(order.windows(2).all(|o| {
            let size = |col: u32| products[col as usize * (COLS + 1)];
            size(o[0]) >= size(o[1])
        }));
    }

    #[test]
    fn without_inputs_there_is_nothing_to_go_by() {
        assert!(Products::new(COLS, 0).factor().is_none());
        let mut products = Products::new(COLS, 0);
        products.add(&vec![f32::NAN; COLS], &vec![0.0; COLS]);
        assert!(products.factor().is_none());
        // One input is enough: the rest is damped.
        let mut products = Products::new(COLS, 0);
        products.add(&vec![1.0; COLS], &vec![1.0; COLS]);
        assert!(products.factor().is_some());
    }
}
