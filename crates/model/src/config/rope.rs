//! Rotary embedding: a base frequency and the ways to stretch it over longer contexts.

use super::Fields;
use formats::{Error, Result};
use std::f64::consts::PI;
use std::path::Path;

/// How a model rotates queries and keys.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// How the series is scaled.
    pub scaling: RopeScaling,
    /// Elements of a head that are rotated, the first ones; `None` is all of them.
    pub rotated: Option<usize>,
}

/// Ways to stretch frequencies. Those that depend on the request's length (dynamic) and YaRN are refused when a
/// config names them.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Frequencies as they are.
    None,
    /// No rotation at all: every frequency is 0.
    Still,
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
    /// Phi-3: one divisor per frequency, from one of two lists. The longest context that is served decides which, so
    /// that it does not change in the middle of a sequence.
    Long {
        /// For contexts up to `original`.
        short: Vec<f32>,
        /// For longer ones.
        long: Vec<f32>,
        /// The context before stretching.
        original: usize,
        /// Multiplies cosines and sines.
        scale: f64,
    },
}

impl Rope {
    /// All elements, with frequencies as they are.
    pub fn plain(theta: f64) -> Rope {
        Rope { theta, scaling: RopeScaling::None, rotated: None }
    }

    /// No rotation.
    pub(crate) fn still() -> Rope {
        Rope { scaling: RopeScaling::Still, ..Rope::plain(1.0) }
    }

    /// The rotation at the top level of a configuration. Families with several rotations read their own.
    pub fn read(f: &Fields<'_>) -> Result<Rope> {
        let theta = f.number("rope_theta", "rope.freq_base")?;
        if f.is_gguf() {
            return Ok(Rope {
                scaling: gguf_scaling(f)?,
                ..Rope::plain(theta.unwrap_or(10_000.0))
            });
        }
        match f.object("rope_parameters")? {
            Some(parameters) => Rope::of(&parameters, theta),
            None => match f.object("rope_scaling")? {
                Some(scaling) => Rope::of(&scaling, theta),
                None => Ok(Rope::plain(theta.unwrap_or(10_000.0))),
            },
        }
    }

    /// The same, for a family that rotates whole heads.
    pub(crate) fn read_whole(f: &Fields<'_>, head_dim: usize) -> Result<Rope> {
        if let Some(part) = f.number("partial_rotary_factor", "")?.filter(|&part| part != 1.0) {
            return Err(f.unsupported("partial_rotary_factor", part, "1"));
        }
        match f.size("", "rope.dimension_count")?.filter(|&n| n != head_dim) {
            Some(found) => {
                let allowed = format!("{head_dim}, the head size");
                Err(f.unsupported("rope.dimension_count", found, allowed))
            }
            None => Rope::read(f),
        }
    }

    /// The rotation in one object of `config.json`; `theta` is the default base.
    pub fn of(f: &Fields<'_>, theta: Option<f64>) -> Result<Rope> {
        let theta = f.number("rope_theta", "")?.or(theta).unwrap_or(10_000.0);
        let kind = match f.text("rope_type", "")? {
            Some(kind) => Some(kind),
            None => f.text("type", "")?,
        };
        let required =
            |key: &str| f.number(key, "")?.ok_or_else(|| f.invalid(key, "nothing", "a number"));
        let scaling = match kind {
            None | Some("default") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear { factor: required("factor")? },
            Some("llama3") => RopeScaling::Llama3 {
                factor: required("factor")?,
                low: required("low_freq_factor")?,
                high: required("high_freq_factor")?,
                original: f.required("original_max_position_embeddings", "")?,
            },
            Some(other) => {
                return Err(f.unsupported("rope_type", other, "default, linear, llama3"));
            }
        };
        Ok(Rope { scaling, ..Rope::plain(theta) })
    }

    /// The same for the first `rotated` elements of a head.
    pub fn first(self, rotated: usize) -> Rope {
        Rope { rotated: Some(rotated), ..self }
    }

    /// Radians per position for each of the `head_dim / 2` pairs, in a program for contexts of `context` tokens:
    /// pairs that are not rotated come last and have 0.
    pub fn frequencies(&self, head_dim: usize, context: usize) -> Vec<f32> {
        let rotated = self.rotated.unwrap_or(head_dim);
        let series = |i: usize| self.theta.powf(-((2 * i) as f64) / rotated as f64);
        let turned = (0..rotated / 2).map(|i| self.scaling.apply(i, series(i), context) as f32);
        turned.chain(std::iter::repeat_n(0.0, (head_dim - rotated) / 2)).collect()
    }

    /// The factor of cosines and sines.
    pub fn scale(&self) -> f32 {
        match &self.scaling {
            RopeScaling::Long { scale, .. } => *scale as f32,
            _ => 1.0,
        }
    }

    pub(crate) fn check(&self, file: &Path, head_dim: usize) -> Result<()> {
        let positive = |field: &str, found: f64| {
            if found.is_finite() && found > 0.0 {
                return Ok(());
            }
            Err(Error::invalid(file, 0, field, found, "a finite number above 0"))
        };
        positive("rope theta", self.theta)?;
        let rotated = self.rotated.unwrap_or(head_dim);
        if rotated == 0 || rotated > head_dim || !rotated.is_multiple_of(2) {
            let allowed = format!("an even number up to {head_dim}");
            return Err(Error::invalid(file, 0, "rotated elements of a head", rotated, allowed));
        }
        let divisors = |divisors: &[f32]| {
            if divisors.len() != rotated / 2 {
                let allowed = format!("{}, half the rotated elements of a head", rotated / 2);
                return Err(Error::invalid(file, 0, "rope divisors", divisors.len(), allowed));
            }
            divisors.iter().try_for_each(|&d| positive("rope divisor", f64::from(d)))
        };
        match &self.scaling {
            RopeScaling::None | RopeScaling::Still => Ok(()),
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
            RopeScaling::Divisors(list) => divisors(list),
            RopeScaling::Long { short, long, scale, .. } => {
                divisors(short)?;
                divisors(long)?;
                positive("attention factor", *scale)
            }
        }
    }
}

impl RopeScaling {
    fn apply(&self, i: usize, frequency: f64, context: usize) -> f64 {
        match self {
            RopeScaling::None => frequency,
            RopeScaling::Still => 0.0,
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
            RopeScaling::Long { short, long, original, .. } => {
                let list = if context > *original { long } else { short };
                frequency / f64::from(list[i])
            }
        }
    }
}

fn gguf_scaling(f: &Fields<'_>) -> Result<RopeScaling> {
    let factor = match f.number("", "rope.scaling.factor")? {
        Some(factor) => Some(factor),
        None => f.number("", "rope.scale_linear")?,
    };
    match (f.text("", "rope.scaling.type")?, factor) {
        // Llama 3.1: the converter writes the divisors it computed as a tensor.
        (None | Some("none"), _) if f.has_tensor("rope_freqs.weight") => {
            Ok(RopeScaling::Divisors(tensor(f, "rope_freqs.weight")?))
        }
        (Some("linear"), Some(factor)) | (None, Some(factor)) if factor != 1.0 => {
            Ok(RopeScaling::Linear { factor })
        }
        (None | Some("none" | "linear"), _) => Ok(RopeScaling::None),
        (Some(other), _) => Err(f.unsupported("rope.scaling.type", other, "none, linear")),
    }
}

/// A small tensor of a GGUF file; empty if it is larger than a head.
pub(crate) fn tensor(f: &Fields<'_>, name: &str) -> Result<Vec<f32>> {
    let small = |checkpoint: &&formats::checkpoint::Checkpoint| {
        let most = formats::limits::HEAD_DIM as usize;
        checkpoint.get(name).is_some_and(|tensor| tensor.elements() <= most)
    };
    f.checkpoint().filter(small).map_or(Ok(Vec::new()), |checkpoint| checkpoint.read_f32(name))
}
