//! Random lengths and times from a distribution, reproducible by seed.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A seeded random number generator (SplitMix64).
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// A generator with this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A random number.
    pub(crate) fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.roll() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// An exponentially distributed number with this mean: the time between independent arrivals.
    pub(crate) fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    fn normal(&mut self) -> f64 {
        let (a, b) = (1.0 - self.unit(), self.unit());
        (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
    }
}

/// A distribution of lengths in tokens, written `128`, `64-512`, `normal:256,64` or
/// `lognormal:5.5,0.8`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Dist {
    /// A constant.
    Fixed(u32),
    /// Uniform from the first to the second, inclusive.
    Uniform(u32, u32),
    /// A mean and a standard deviation.
    Normal(f64, f64),
    /// The mean and the standard deviation of the logarithm, which resembles real traffic.
    LogNormal(f64, f64),
}

impl Dist {
    /// One length, at least 1.
    pub fn draw(&self, dice: &mut Dice) -> u32 {
        match *self {
            Self::Fixed(n) => n.max(1),
            Self::Uniform(a, b) => a + (dice.roll() % u64::from(b - a + 1)) as u32,
            Self::Normal(mean, sd) => (mean + sd * dice.normal()).round().clamp(1.0, 1e6) as u32,
            Self::LogNormal(mean, sd) => {
                (mean + sd * dice.normal()).exp().round().clamp(1.0, 1e6) as u32
            }
        }
    }
}

impl FromStr for Dist {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not N, A-B, normal:MEAN,SD or lognormal:MU,SIGMA");
        let pair = |text: &str| -> Option<(f64, f64)> {
            let (a, b) = text.split_once(',')?;
            Some((a.trim().parse().ok()?, b.trim().parse().ok()?))
        };
        if let Some(rest) = text.strip_prefix("normal:") {
            let (mean, sd) = pair(rest).ok_or_else(wrong)?;
            return Ok(Self::Normal(mean, sd));
        }
        if let Some(rest) = text.strip_prefix("lognormal:") {
            let (mean, sd) = pair(rest).ok_or_else(wrong)?;
            return Ok(Self::LogNormal(mean, sd));
        }
        if let Some((a, b)) = text.split_once('-') {
            let (a, b) = (a.parse().map_err(|_| wrong())?, b.parse().map_err(|_| wrong())?);
            if a == 0 || b < a {
                return Err(wrong());
            }
            return Ok(Self::Uniform(a, b));
        }
        match text.parse() {
            Ok(n) if n > 0 => Ok(Self::Fixed(n)),
            _ => Err(wrong()),
        }
    }
}

impl TryFrom<String> for Dist {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Dist> for String {
    fn from(dist: Dist) -> Self {
        dist.to_string()
    }
}

impl fmt::Display for Dist {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(n) => write!(f, "{n}"),
            Self::Uniform(a, b) => write!(f, "{a}-{b}"),
            Self::Normal(mean, sd) => write!(f, "normal:{mean},{sd}"),
            Self::LogNormal(mean, sd) => write!(f, "lognormal:{mean},{sd}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_through_text() {
        for text in ["128", "64-512", "normal:256,64", "lognormal:5.5,0.8"] {
            assert_eq!(text.parse::<Dist>().unwrap().to_string(), text);
        }
        for text in ["", "0", "9-3", "normal:1", "-", "x"] {
            assert!(text.parse::<Dist>().is_err(), "{text}");
        }
    }

    #[test]
    fn draws_have_the_expected_mean() {
        let mut dice = Dice::new(7);
        let mut mean = |dist: Dist| {
            (0..20_000).map(|_| f64::from(dist.draw(&mut dice))).sum::<f64>() / 20_000.0
        };
        assert!((mean(Dist::Uniform(10, 20)) - 15.0).abs() < 0.2);
        assert!((mean(Dist::Normal(200.0, 20.0)) - 200.0).abs() < 2.0);
        let waits = (0..20_000).map(|_| dice.exponential(3.0)).sum::<f64>() / 20_000.0;
        assert!((waits - 3.0).abs() < 0.15);
    }
}
