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

/// Ways to stretch frequencies. Those that depend on the request's length (dynamic) are refused when a config names
/// them.
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
    /// YaRN: low frequencies divided by `factor`, high ones kept, a ramp over the pairs between.
    Yarn {
        /// The divisor of the lowest frequencies.
        factor: f64,
        /// Pairs that turn more often than this in the original context are kept.
        fast: f64,
        /// Pairs that turn less often than this are divided.
        slow: f64,
        /// The context before stretching.
        original: usize,
        /// Whether the ends of the ramp are whole pairs.
        whole: bool,
        /// Multiplies cosines and sines.
        scale: f64,
        /// Multiplies queries and keys, rotated or not, where a family says so.
        spread: f64,
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
            Some("yarn") => yarn(f)?,
            Some(other) => {
                let known = "default, linear, llama3, yarn";
                return Err(f.unsupported("rope_type", other, known));
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
        let (low, high) = self.ramp(rotated);
        let part = |i: usize| ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        let apply = |i: usize| self.scaling.apply(i, series(i), context, part(i)) as f32;
        let turned = (0..rotated / 2).map(apply);
        turned.chain(std::iter::repeat_n(0.0, (head_dim - rotated) / 2)).collect()
    }

    /// The factor of cosines and sines.
    pub fn scale(&self) -> f32 {
        match &self.scaling {
            RopeScaling::Long { scale, .. } | RopeScaling::Yarn { scale, .. } => *scale as f32,
            _ => 1.0,
        }
    }

    /// What stretching multiplies queries and keys by in families that say so, besides cosines and sines.
    pub(crate) fn score_scale(&self) -> f32 {
        match &self.scaling {
            RopeScaling::Yarn { spread, .. } => *spread as f32,
            _ => 1.0,
        }
    }

    /// The pairs between which YaRN goes from frequencies as they are to divided ones.
    fn ramp(&self, rotated: usize) -> (f64, f64) {
        let RopeScaling::Yarn { fast, slow, original, whole, .. } = &self.scaling else {
            return (0.0, 1.0);
        };
        // The pair that turns so often in the original context.
        let pair = |turns: f64| {
            let length = *original as f64 / (turns * 2.0 * PI);
            rotated as f64 * length.ln() / (2.0 * self.theta.ln())
        };
        let (low, high) = match whole {
            true => (pair(*fast).floor(), pair(*slow).ceil()),
            false => (pair(*fast), pair(*slow)),
        };
        let (low, high) = (low.max(0.0), high.min(rotated as f64 - 1.0));
        if low == high { (low, high + 0.001) } else { (low, high) }
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
            RopeScaling::Yarn { factor, fast, slow, original, scale, spread, .. } => {
                positive("rope scaling factor", *factor)?;
                positive("beta_fast", *fast)?;
                positive("beta_slow", *slow)?;
                positive("original_max_position_embeddings", *original as f64)?;
                positive("attention factor", *scale)?;
                positive("mscale_all_dim", *spread)
            }
        }
    }
}

impl RopeScaling {
    /// The frequency of pair `i`, which is `part` of the way from the first to the last pair of YaRN's ramp.
    fn apply(&self, i: usize, frequency: f64, context: usize, part: f64) -> f64 {
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
            RopeScaling::Yarn { factor, .. } => {
                frequency * (1.0 - part) + frequency / factor * part
            }
            RopeScaling::Divisors(divisors) => frequency / f64::from(divisors[i]),
            RopeScaling::Long { short, long, original, .. } => {
                let list = if context > *original { long } else { short };
                frequency / f64::from(list[i])
            }
        }
    }
}

/// YaRN's fields.
fn yarn(f: &Fields<'_>) -> Result<RopeScaling> {
    let factor = f.number("factor", "")?;
    let factor = factor.ok_or_else(|| f.invalid("factor", "nothing", "a number"))?;
    // How much larger scores are to be in a context that is `factor` times as long.
    let spread = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
    let given = |key: &str| Ok::<_, Error>(f.number(key, "")?.filter(|&number| number != 0.0));
    let (mscale, all) = (given("mscale")?, given("mscale_all_dim")?);
    let scale = match (f.number("attention_factor", "")?, mscale, all) {
        (Some(scale), _, _) => scale,
        (None, Some(mscale), Some(all)) => spread(mscale) / spread(all),
        (None, _, _) => spread(1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        fast: given("beta_fast")?.unwrap_or(32.0),
        slow: given("beta_slow")?.unwrap_or(1.0),
        original: f.required("original_max_position_embeddings", "")?,
        whole: f.bool("truncate", "")?.unwrap_or(true),
        scale,
        spread: all.map_or(1.0, spread),
    })
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
        (Some("yarn"), Some(factor)) => gguf_yarn(f, factor),
        (Some(other), _) => Err(f.unsupported("rope.scaling.type", other, "none, linear, yarn")),
    }
}

/// YaRN's fields in GGUF metadata. The multiplier of logarithms is a tenth of `mscale_all_dim`; files have no `mscale`, which
/// is the same number in all published models, so that cosines and sines keep their size.
fn gguf_yarn(f: &Fields<'_>, factor: f64) -> Result<RopeScaling> {
    let number = |key: &str| f.number("", &format!("rope.scaling.{key}"));
    let stretched = |by: f64| if factor <= 1.0 { 1.0 } else { by * factor.ln() + 1.0 };
    let all = number("yarn_log_multiplier")?.filter(|&by| by != 0.0);
    let usual = if all.is_some() { 1.0 } else { stretched(0.1) };
    Ok(RopeScaling::Yarn {
        factor,
        fast: number("yarn_beta_fast")?.unwrap_or(32.0),
        slow: number("yarn_beta_slow")?.unwrap_or(1.0),
        original: f.required("", "rope.scaling.original_context_length")?,
        whole: true,
        scale: number("yarn_attn_factor")?.unwrap_or(usual),
        spread: all.map_or(1.0, stretched),
    })
}

/// A small tensor of a GGUF file; empty if it is larger than a head.
pub(crate) fn tensor(f: &Fields<'_>, name: &str) -> Result<Vec<f32>> {
    let small = |checkpoint: &&formats::checkpoint::Checkpoint| {
        let most = formats::limits::HEAD_DIM as usize;
        checkpoint.get(name).is_some_and(|tensor| tensor.elements() <= most)
    };
    f.checkpoint().filter(small).map_or(Ok(Vec::new()), |checkpoint| checkpoint.read_f32(name))
}
