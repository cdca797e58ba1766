//! Rotary embedding: a base frequency and the ways to stretch it over longer contexts.

use crate::{Error, Result};
use std::f64::consts::PI;
use std::path::Path;

/// How a model rotates queries and keys.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// What is done to the series.
    pub scaling: RopeScaling,
}

/// Ways to stretch frequencies. Those that depend on the request's length (dynamic, longrope) and
/// YaRN are refused when a config names them.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Frequencies as they are.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, a ramp between.
    Llama3 {
        /// The divisor of the lowest frequencies.
        factor: f64,
        /// Wavelengths above `original / low` are divided.
        low: f64,
        /// Wavelengths below `original / high` are kept.
        high: f64,
        /// The context before stretching.
        original: usize,
    },
    /// One divisor per frequency, as GGUF stores Llama 3.1's (`rope_freqs.weight`).
    Divisors(Vec<f32>),
}

impl Rope {
    /// Radians per position for each of the `head_dim / 2` pairs.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f32> {
        let series = |i: usize| self.theta.powf(-((2 * i) as f64) / head_dim as f64);
        (0..head_dim / 2).map(|i| self.scaling.apply(i, series(i)) as f32).collect()
    }

    pub(super) fn check(&self, file: &Path, head_dim: usize) -> Result<()> {
        let positive = |field: &str, found: f64| {
            if found.is_finite() && found > 0.0 {
                return Ok(());
            }
            Err(Error::invalid(file, 0, field, found, "a finite number above 0"))
        };
        positive("rope theta", self.theta)?;
        match &self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => positive("rope scaling factor", *factor),
            RopeScaling::Llama3 { factor, low, high, original } => {
                positive("rope scaling factor", *factor)?;
                positive("low_freq_factor", *low)?;
                positive("high_freq_factor", *high)?;
                positive("original_max_position_embeddings", *original as f64)?;
                if high <= low {
                    let allowed = format!("above low_freq_factor ({low})");
                    return Err(Error::invalid(file, 0, "high_freq_factor", high, allowed));
                }
                Ok(())
            }
            RopeScaling::Divisors(divisors) => {
                if divisors.len() != head_dim / 2 {
                    let allowed = format!("{}, half the head size", head_dim / 2);
                    return Err(Error::invalid(file, 0, "rope_freqs", divisors.len(), allowed));
                }
                divisors.iter().try_for_each(|&d| positive("rope_freqs", f64::from(d)))
            }
        }
    }
}

impl RopeScaling {
    fn apply(&self, i: usize, frequency: f64) -> f64 {
        match self {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 { factor, low, high, original } => {
                let turns = *original as f64 * frequency / (2.0 * PI);
                if turns < *low {
                    frequency / factor
                } else if turns > *high {
                    frequency
                } else {
                    let smooth = (turns - low) / (high - low);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
            RopeScaling::Divisors(divisors) => frequency / f64::from(divisors[i]),
        }
    }
}
