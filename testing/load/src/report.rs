//! The result of a load run.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Latency goals. A request is good if it meets all that are set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Slo {
    /// Time to first token, in milliseconds.
    pub ttft_ms: Option<f64>,
    /// Mean time between tokens of the request, in milliseconds.
    pub itl_ms: Option<f64>,
    /// The whole request, in milliseconds.
    pub e2e_ms: Option<f64>,
}

impl Slo {
    /// Whether a request with these times is good.
    pub fn is_met(&self, ttft_ms: f64, itl_ms: f64, e2e_ms: f64) -> bool {
        let within = |limit: Option<f64>, found: f64| limit.is_none_or(|limit| found <= limit);
        within(self.ttft_ms, ttft_ms) && within(self.itl_ms, itl_ms) && within(self.e2e_ms, e2e_ms)
    }
}

/// A latency distribution, in milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// The number of samples.
    pub count: u64,
    /// The mean.
    pub mean: f64,
    /// The median.
    pub p50: f64,
    /// The 90th percentile.
    pub p90: f64,
    /// The 95th percentile.
    pub p95: f64,
    /// The 99th percentile.
    pub p99: f64,
    /// The maximum.
    pub max: f64,
    /// The percentiles 0, ½, 1, … 100, for plots.
    pub curve: Vec<f64>,
}

impl Latency {
    /// The distribution of these times.
    pub fn of(mut times: Vec<f64>) -> Self {
        if times.is_empty() {
            return Self::default();
        }
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
        Self {
            count: times.len() as u64,
            mean: times.iter().sum::<f64>() / times.len() as f64,
            p50: at(0.5),
            p90: at(0.9),
            p95: at(0.95),
            p99: at(0.99),
            max: at(1.0),
            curve: (0..=200).map(|i| at(f64::from(i) / 200.0)).collect(),
        }
    }
}

/// Per second of the run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    /// Tokens received.
    pub tokens: Vec<u64>,
    /// Requests that succeeded.
    pub finished: Vec<u64>,
    /// Requests that failed.
    pub failed: Vec<u64>,
}

/// The result of a run: one JSON document.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// A name for tables and legends.
    pub label: String,
    /// The server under load.
    pub base_url: String,
    /// The model that answered.
    pub model: String,
    /// A description of the load.
    pub load: String,
    /// Seconds from the first measured request to the last answer.
    pub seconds: f64,
    /// Measured requests sent.
    pub requests: u64,
    /// Requests with a complete answer.
    pub succeeded: u64,
    /// Failed requests, by kind of error.
    pub errors: BTreeMap<String, u64>,
    /// Prompt tokens of answered requests, as the server counts them.
    pub prompt_tokens: u64,
    /// Prompt tokens found in the prefix tree, as the server counts them.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub output_tokens: u64,
    /// Answered requests a second.
    pub request_rate: f64,
    /// Generated tokens a second.
    pub output_rate: f64,
    /// Generated tokens a second until the last request was sent, while the load was complete; over
    /// the whole run if that took less than a second.
    #[serde(default)]
    pub steady_rate: f64,
    /// Time to first token.
    pub ttft: Latency,
    /// Time between tokens.
    pub itl: Latency,
    /// The whole request.
    pub e2e: Latency,
    /// The latency goals.
    pub slo: Slo,
    /// The share of measured requests that met the goals; failed ones did not.
    #[serde(default)]
    pub within: f64,
    /// Requests a second that met the goals.
    pub goodput: f64,
    /// Counts per second.
    pub timeline: Timeline,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} · {} · {}", self.model, self.base_url, self.load)?;
        writeln!(
            f,
            "{} of {} requests answered in {:.2} s",
            self.succeeded, self.requests, self.seconds
        )?;
        for (kind, count) in &self.errors {
            writeln!(f, "  {count} × {kind}")?;
        }
        writeln!(f, "  requests      {:>12.2} /s", self.request_rate)?;
        writeln!(
            f,
            "  output        {:>12.1} tok/s ({} tokens)",
            self.output_rate, self.output_tokens
        )?;
        writeln!(f, "  at full load  {:>12.1} tok/s", self.steady_rate)?;
        writeln!(
            f,
            "  prompts       {:>12} tokens ({} cached)",
            self.prompt_tokens, self.cached_tokens
        )?;
        if self.slo != Slo::default() {
            let share = 100.0 * self.goodput / self.request_rate.max(1e-9);
            writeln!(f, "  goodput       {:>12.2} /s ({share:.1} % of answers)", self.goodput)?;
        }
        writeln!(f)?;
        writeln!(
            f,
            "  {:<14}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}",
            "ms", "mean", "p50", "p90", "p95", "p99", "max"
        )?;
        for (name, times) in
            [("first token", &self.ttft), ("between tokens", &self.itl), ("end to end", &self.e2e)]
        {
            writeln!(
                f,
                "  {name:<14}{:>10.2}{:>10.2}{:>10.2}{:>10.2}{:>10.2}{:>10.2}",
                times.mean, times.p50, times.p90, times.p95, times.p99, times.max
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles() {
        let found = Latency::of((1..=101).map(f64::from).rev().collect());
        assert_eq!((found.p50, found.p90, found.p99, found.max), (51.0, 91.0, 100.0, 101.0));
        assert_eq!(found.curve.len(), 201);
        assert_eq!(Latency::of(vec![]), Latency::default());
    }

    #[test]
    fn a_goal_not_set_is_met() {
        assert!(Slo::default().is_met(1e9, 1e9, 1e9));
        let slo = Slo { ttft_ms: Some(100.0), ..Slo::default() };
        assert!(slo.is_met(100.0, 1e9, 1e9) && !slo.is_met(100.1, 0.0, 0.0));
    }
}
