//! Which sizes get a graph. One generator for both phases; decode buckets count sequences, prefill
//! buckets count tokens.

use crate::{Phase, ShapeKey};
use device::StepLimits;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Most buckets a phase can have: a longer list is taken for a mistake.
pub(crate) const MAX_BUCKETS: usize = 512;

/// The padding `auto` allows when nothing else is asked for.
pub(crate) const AUTO_PADDING: f64 = 0.25;

/// How a list of buckets is asked for: `auto`, `1,2,4,8`, `16..256/16`, or a mix of the last two.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum BucketSpec {
    /// As few as keep padding below the limit.
    #[default]
    Auto,
    /// These.
    List(Vec<Part>),
}

/// A part of an explicit list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// One size.
    One(u32),
    /// `from`, `from + step`, … up to and including `to`.
    Range {
        /// First.
        from: u32,
        /// Last, if a step lands on it.
        to: u32,
        /// Distance.
        step: u32,
    },
}

/// Why a list of buckets was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BucketError {
    /// Not a list.
    #[error("`{text}` is not a list of buckets: write auto, 1,2,4,8 or 16..256/16")]
    Syntax {
        /// What was given.
        text: String,
    },
    /// A list without a size, or with a size of 0.
    #[error("a bucket list for {phase} needs at least one size, and no size may be 0")]
    Empty {
        /// The phase.
        phase: Phase,
    },
    /// A size past the maximum.
    #[error("bucket {size} of {phase} is larger than the maximum of {max} {unit}", unit = phase.unit())]
    TooLarge {
        /// The phase.
        phase: Phase,
        /// The size.
        size: u32,
        /// The maximum.
        max: u32,
    },
    /// Steps that no graph may run, where such steps are refused.
    #[error(
        "fallback = error and {phase}.max_padding_ratio = {ratio}: a step of {size} {unit} would be refused, because bucket {bucket} \
         wastes more; use a denser list", unit = phase.unit()
    )]
    Wasteful {
        /// The phase.
        phase: Phase,
        /// The ratio, as text: errors are compared.
        ratio: String,
        /// The size of the step.
        size: u32,
        /// Its bucket.
        bucket: u32,
    },
    /// Too many sizes.
    #[error("{count} buckets for {phase}; at most {MAX_BUCKETS} are possible")]
    TooMany {
        /// The phase.
        phase: Phase,
        /// How many.
        count: usize,
    },
}

impl FromStr for BucketSpec {
    type Err = BucketError;

    fn from_str(text: &str) -> Result<Self, BucketError> {
        if text.trim() == "auto" {
            return Ok(BucketSpec::Auto);
        }
        let syntax = || BucketError::Syntax { text: text.to_owned() };
        let number = |text: &str| text.trim().parse::<u32>().map_err(|_| syntax());
        let part = |item: &str| match item.split_once("..") {
            None => Ok(Part::One(number(item)?)),
            Some((from, rest)) => {
                let (to, step) = rest.split_once('/').ok_or_else(syntax)?;
                let (from, to, step) = (number(from)?, number(to)?, number(step)?);
                if step == 0 || from > to {
                    return Err(syntax());
                }
                Ok(Part::Range { from, to, step })
            }
        };
        text.split(',').map(part).collect::<Result<_, _>>().map(BucketSpec::List)
    }
}

impl TryFrom<String> for BucketSpec {
    type Error = BucketError;

    fn try_from(text: String) -> Result<Self, BucketError> {
        text.parse()
    }
}

impl From<BucketSpec> for String {
    fn from(spec: BucketSpec) -> String {
        spec.to_string()
    }
}

impl fmt::Display for BucketSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BucketSpec::List(parts) = self else { return f.write_str("auto") };
        let text = |part: &Part| match part {
            Part::One(size) => size.to_string(),
            Part::Range { from, to, step } => format!("{from}..{to}/{step}"),
        };
        f.write_str(&parts.iter().map(text).collect::<Vec<_>>().join(","))
    }
}

/// The sizes of a phase, ascending and distinct.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Buckets {
    /// The phase.
    pub phase: Phase,
    /// In its unit.
    pub sizes: Vec<u32>,
    /// Of prefill: numbers of rows for which every size is recorded besides the largest, ascending. A step takes the smallest
    /// that holds its rows: the head and the sampler are for as many.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<u32>,
    /// Whether every key is one of fixed kernels.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fixed: bool,
}

impl Buckets {
    /// The list a spec stands for. `max` is the largest step there can be and always a bucket of
    /// `auto`; `max_padding` is the largest share of a bucket `auto` may waste.
    pub fn generate(
        spec: &BucketSpec,
        phase: Phase,
        max: u32,
        max_padding: Option<f64>,
    ) -> Result<Buckets, BucketError> {
        let mut sizes = match spec {
            BucketSpec::Auto => auto(phase, max, max_padding.unwrap_or(AUTO_PADDING)),
            BucketSpec::List(parts) => expand(parts, phase)?,
        };
        sizes.sort_unstable();
        sizes.dedup();
        match (sizes.first(), sizes.last()) {
            (None | Some(0), _) => Err(BucketError::Empty { phase }),
            (_, Some(&size)) if size > max => Err(BucketError::TooLarge { phase, size, max }),
            _ if sizes.len() > MAX_BUCKETS => {
                Err(BucketError::TooMany { phase, count: sizes.len() })
            }
            _ => Ok(Buckets { phase, sizes, rows: Vec::new(), fixed: false }),
        }
    }

    /// Refuses a list in which some step would waste more of its bucket than `ratio`.
    pub(crate) fn waste_at_most(&self, ratio: f64) -> Result<(), BucketError> {
        let mut smaller = 0;
        for &bucket in &self.sizes {
            let size = smaller + 1;
            if f64::from(bucket - size) / f64::from(bucket) > ratio {
                let (phase, ratio) = (self.phase, ratio.to_string());
                return Err(BucketError::Wasteful { phase, ratio, size, bucket });
            }
            smaller = bucket;
        }
        Ok(())
    }

    /// The smallest bucket that holds `size`.
    pub fn fit(&self, size: u32) -> Option<u32> {
        let index = self.sizes.partition_point(|&bucket| bucket < size);
        self.sizes.get(index).copied()
    }

    /// The largest bucket: what is covered.
    pub fn largest(&self) -> u32 {
        self.sizes.last().copied().unwrap_or(0)
    }

    /// The key of a bucket for any number of rows.
    pub fn key(&self, bucket: u32, limits: &StepLimits) -> ShapeKey {
        self.key_for(bucket, u32::MAX, limits)
    }

    /// The key of a bucket for a step of so many rows.
    pub(crate) fn key_for(&self, bucket: u32, rows: u32, limits: &StepLimits) -> ShapeKey {
        let key = match self.phase {
            Phase::Decode => ShapeKey::decode(bucket),
            Phase::Prefill => {
                let fits = self.row_sizes(bucket, limits).rfind(|&size| size >= rows);
                ShapeKey::prefill(bucket, fits.unwrap_or(bucket.min(limits.rows)))
            }
        };
        key.with_fixed(self.fixed)
    }

    /// The numbers of rows of a prefill bucket, largest first.
    fn row_sizes(&self, bucket: u32, limits: &StepLimits) -> impl DoubleEndedIterator<Item = u32> {
        // Every row has a token, so this many rows cover any step of that many tokens.
        let widest = bucket.min(limits.rows);
        let fewer = self.rows.iter().rev().copied().filter(move |&rows| rows < widest);
        std::iter::once(widest).chain(fewer)
    }

    /// All keys, largest first: the order of recording.
    pub fn keys(&self, limits: &StepLimits) -> Vec<ShapeKey> {
        let keys = |&bucket: &u32| -> Vec<ShapeKey> {
            match self.phase {
                Phase::Decode => vec![self.key(bucket, limits)],
                Phase::Prefill => {
                    let rows = self.row_sizes(bucket, limits);
                    rows.map(|rows| self.key_for(bucket, rows, limits)).collect()
                }
            }
        };
        self.sizes.iter().rev().flat_map(keys).collect()
    }
}

fn expand(parts: &[Part], phase: Phase) -> Result<Vec<u32>, BucketError> {
    let mut sizes = Vec::new();
    for part in parts {
        match *part {
            Part::One(size) => sizes.push(size),
            Part::Range { from, to, step } => {
                let count = ((to - from) / step) as usize + 1;
                if count > MAX_BUCKETS {
                    return Err(BucketError::TooMany { phase, count });
                }
                sizes.extend((from..=to).step_by(step as usize));
            }
        }
    }
    Ok(sizes)
}

/// The sparsest list of round sizes in which no step wastes more than `padding` of its bucket (below 8
/// sequences or 16 tokens, where a pad row costs next to nothing, powers of two). Every power of two is
/// among them, because batches and chunks are usually configured as powers of two.
fn auto(phase: Phase, max: u32, padding: f64) -> Vec<u32> {
    let small: &[u32] = match phase {
        Phase::Decode => &[1, 2, 4, 8],
        Phase::Prefill => &[16],
    };
    let grain = |size: u32| match phase {
        Phase::Decode => 8,
        Phase::Prefill if size < 256 => 16,
        Phase::Prefill => 64,
    };
    let keep = (1.0 - padding).clamp(0.05, 1.0);
    let mut sizes: Vec<u32> = small.iter().copied().filter(|&size| size < max).collect();
    while let Some(&last) = sizes.last().filter(|&&last| last < max) {
        let grain = grain(last);
        let widest = (f64::from(last + 1) / keep) as u32 / grain * grain;
        let next = widest.max((last + 1).next_multiple_of(grain));
        let power = (last + 1).next_power_of_two();
        sizes.push(next.min(power).min(max));
        if sizes.len() > MAX_BUCKETS {
            break;
        }
    }
    if sizes.is_empty() {
        sizes.push(max);
    }
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn list(text: &str, phase: Phase, max: u32) -> Result<Vec<u32>, BucketError> {
        Ok(Buckets::generate(&text.parse()?, phase, max, None)?.sizes)
    }

    #[test]
    fn lists_say_what_they_mean() {
        assert_eq!(list("4,1,2,4", Phase::Decode, 8).unwrap(), [1, 2, 4]);
        assert_eq!(list("1,16..64/16", Phase::Prefill, 64).unwrap(), [1, 16, 32, 48, 64]);
        assert_eq!(list("8..30/8", Phase::Decode, 64).unwrap(), [8, 16, 24]);
        for spec in ["auto", "1,2,4", "8..64/8", "1,16..64/16"] {
            assert_eq!(spec.parse::<BucketSpec>().unwrap().to_string(), spec);
        }
    }

    #[test]
    fn the_usual_lists() {
        assert_eq!(
            list("auto", Phase::Decode, 256).unwrap(),
            [1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 104, 128, 168, 224, 256]
        );
        assert_eq!(list("auto", Phase::Decode, 1).unwrap(), [1]);
        assert_eq!(list("auto", Phase::Decode, 6).unwrap(), [1, 2, 4, 6]);
        assert_eq!(list("auto", Phase::Prefill, 8).unwrap(), [8]);
        assert_eq!(list("auto", Phase::Prefill, 8192).unwrap().len(), 25);
    }

    #[test]
    fn refusals_name_what_is_wrong() {
        for text in ["", "a", "1,,2", "4..2/1", "1..4/0", "1..4", "-1"] {
            assert!(
                matches!(list(text, Phase::Decode, 8), Err(BucketError::Syntax { .. })),
                "{text}"
            );
        }
        assert_eq!(list("0,1", Phase::Decode, 8), Err(BucketError::Empty { phase: Phase::Decode }));
        let too_large = BucketError::TooLarge { phase: Phase::Prefill, size: 9, max: 8 };
        assert_eq!(
            too_large.to_string(),
            "bucket 9 of prefill is larger than the maximum of 8 tokens"
        );
        assert_eq!(list("1,9", Phase::Prefill, 8), Err(too_large));
        assert!(matches!(
            list("1..4000000000/1", Phase::Decode, u32::MAX),
            Err(BucketError::TooMany { .. })
        ));
    }

    proptest! {
        #[test]
        fn auto_covers_everything_and_wastes_little(
            max in 1u32..5000,
            padding in 0.05f64..0.9,
            prefill: bool,
        ) {
            let phase = if prefill { Phase::Prefill } else { Phase::Decode };
            let buckets = Buckets::generate(&BucketSpec::Auto, phase, max, Some(padding)).unwrap();
            prop_assert_eq!(buckets.largest(), max);
            for size in 1..=max {
                let bucket = buckets.fit(size).unwrap();
                prop_assert!(bucket >= size);
                let wasted = f64::from(bucket - size) / f64::from(bucket);
                // Sizes are round, so the limit is kept up to one grain.
                let grain = if prefill { 64 } else { 8 };
                prop_assert!(wasted <= padding || bucket - size < grain, "{} in {}", size, bucket);
            }
        }
    }
}
