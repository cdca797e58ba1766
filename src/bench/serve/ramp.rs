//! Finds the highest rate of requests that a server serves within the goals.

use super::{ServeArgs, measure};
use crate::exit::bad_input;
use crate::output::note;
use anyhow::Result;
use load::{Arrivals, LoadSpec, Report};

/// The share of requests that must meet the goals.
const SHARE: f64 = 0.99;
/// The rate is known well enough when the next one that failed is by less than this larger.
const CLOSE: f64 = 1.08;
/// A run has at least as many requests as come in so many seconds: an overload shows only when requests pile up.
const SECONDS: f64 = 20.0;
/// No server is that fast.
const MOST: f64 = 100_000.0;
const FIRST: f64 = 1.0;

/// The report of the highest rate that was served within the goals.
pub(super) fn run(args: &ServeArgs, spec: &LoadSpec) -> Result<Report> {
    // Requests that pile up wait for their first token; the gaps between tokens need not grow.
    if args.slo_ttft.is_none() && args.slo_e2e.is_none() {
        return Err(bad_input(
            "--ramp needs a goal that an overload misses: --slo-ttft or --slo-e2e",
        ));
    }
    let most = match spec.arrivals {
        Arrivals::Fixed(n) | Arrivals::Poisson(_, n) => n.max(4096),
    };
    let mut runs = 0;
    let attempt = |rate: f64| {
        // Other prompts each time, or the server would find them in its cache.
        let seed = spec.seed.wrapping_add(runs);
        runs += 1;
        let arrivals = Arrivals::Poisson(rate, most);
        let requests = spec.requests.max((SECONDS * rate).ceil() as u64);
        let report = measure(LoadSpec { arrivals, seed, requests, ..spec.clone() })?;
        note!(
            "{rate:>9.2} requests/s: {:.1} % within the goals; first token p99 {:.0} ms, between tokens p99 {:.1} ms",
            100.0 * report.within,
            report.ttft.p99,
            report.itl.p99,
        );
        Ok((report.within, report))
    };
    let found = highest(args.rate.unwrap_or(FIRST), attempt)?;
    match found {
        Ok(report) => Ok(report),
        Err(report) => {
            note!("the lowest rate already misses the goals; give a lower one with --rate");
            Ok(report)
        }
    }
}

/// Doubles the rate until one fails, then halves the interval. The error is the report of the first rate if that fails.
fn highest<T>(
    first: f64,
    mut attempt: impl FnMut(f64) -> Result<(f64, T)>,
) -> Result<std::result::Result<T, T>> {
    let (share, report) = attempt(first)?;
    if share < SHARE {
        return Ok(Err(report));
    }
    let (mut good, mut best, mut bad) = (first, report, None);
    while bad.is_none_or(|bad| bad / good > CLOSE) && good < MOST {
        let rate = match bad {
            None => 2.0 * good,
            Some(bad) => f64::sqrt(good * bad),
        };
        let (share, report) = attempt(rate)?;
        if share >= SHARE {
            (good, best) = (rate, report);
        } else {
            bad = Some(rate);
        }
    }
    Ok(Ok(best))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_rate_is_found() {
        for limit in [1.0, 3.7, 25.0, 400.0] {
            let mut tried = Vec::new();
            let attempt = |rate: f64| {
                tried.push(rate);
                Ok((if rate <= limit { 1.0 } else { 0.5 }, rate))
            };
            let found = highest(1.0, attempt).unwrap().unwrap();
            assert!(found <= limit && found * CLOSE > limit, "{found} for {limit}");
            assert!(tried.len() < 20, "{tried:?}");
        }
        let failed = highest(2.0, |rate| Ok((0.2, rate))).unwrap();
        assert_eq!(failed, Err(2.0));
    }
}
