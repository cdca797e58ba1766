//! The 4-bit values of a group of weights.

use half::f16;

/// A group's scale, as f16 holds it, and zero.
pub(super) struct Found {
    pub(super) scale: f32,
    pub(super) zero: u8,
}

/// Shares of a group's range that are tried: a smaller range is finer but cuts off the largest values.
const SHARES: [f32; 9] = [1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7, 0.65];

/// Which zeros a group may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeros {
    /// The best of 0 to 15.
    Searched,
    /// 8: positive and negative values are alike.
    Middle,
}

/// The scale and zero with the least squared error, and the values for them.
pub(super) fn int4(floats: &[f32], values: &mut [u8], zeros: Zeros) -> Found {
    let found = best(floats, zeros, &[0.0], |inverse, zero| error(floats, inverse, zero));
    let (inverse, zero) = (1.0 / found.scale, f32::from(found.zero));
    for (value, x) in values.iter_mut().zip(floats) {
        *value = quantised(*x, inverse, zero) as u8;
    }
    found
}

/// The scale and zero with the least squared error, each element's multiplied by its weight.
pub(super) fn int4_weighted(floats: &[f32], weights: &[f32], zeros: Zeros) -> Found {
    let near = [0.0, -1.0, 1.0];
    best(floats, zeros, &near, |inverse, zero| weighted_error(floats, weights, inverse, zero))
}

/// The scale and zero with the least error in units of the scale. `near` is what is added to the zero that suits the
/// range.
#[inline(always)]
fn best(floats: &[f32], zeros: Zeros, near: &[f32], error: impl Fn(f32, f32) -> f32) -> Found {
    let (low, high) =
        floats.iter().fold((0.0f32, 0.0f32), |(low, high), x| (low.min(*x), high.max(*x)));
    let (low, high) = match zeros {
        Zeros::Searched => (low, high),
        Zeros::Middle => (-high.max(-low), high.max(-low)),
    };
    let mut best = (f32::INFINITY, Found { scale: 1.0, zero: 8 });
    if high > low && (high - low).is_finite() {
        for share in SHARES {
            let scale = f16::from_f32((high - low) * share / 15.0).to_f32();
            if scale == 0.0 {
                continue;
            }
            let (suited, near) = match zeros {
                Zeros::Searched => ((-low * share / scale).round_ties_even(), near),
                Zeros::Middle => (8.0, &[0.0][..]),
            };
            for near in near {
                let zero = (suited + near).clamp(0.0, 15.0);
                let error = error(1.0 / scale, zero);
                if error * scale * scale < best.0 {
                    best = (error * scale * scale, Found { scale, zero: zero as u8 });
                }
            }
        }
    }
    best.1
}

/// The number from 0 to 15 for `x`.
#[inline(always)]
pub(super) fn quantised(x: f32, inverse: f32, zero: f32) -> f32 {
    // Adding 1.5·2²³ rounds to an integer, ties to even, without a call.
    let rounded = (x * inverse + zero + 12_582_912.0) - 12_582_912.0;
    rounded.clamp(0.0, 15.0)
}

/// The squared error in units of the scale.
fn error(floats: &[f32], inverse: f32, zero: f32) -> f32 {
    let mut sums = [0.0f32; 16];
    for floats in floats.chunks_exact(16) {
        for (sum, x) in sums.iter_mut().zip(floats) {
            let error = x * inverse - (quantised(*x, inverse, zero) - zero);
            *sum += error * error;
        }
    }
    sums.iter().sum()
}

/// As [`error`], each element's multiplied by its weight.
fn weighted_error(floats: &[f32], weights: &[f32], inverse: f32, zero: f32) -> f32 {
    let mut sums = [0.0f32; 16];
    for (floats, weights) in floats.chunks_exact(16).zip(weights.chunks_exact(16)) {
        for ((sum, x), weight) in sums.iter_mut().zip(floats).zip(weights) {
            let error = x * inverse - (quantised(*x, inverse, zero) - zero);
            *sum += error * error * weight;
        }
    }
    sums.iter().sum()
}
