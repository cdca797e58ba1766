//! How many prompt tokens a step feeds beside rows that decode.
//!
//! Every decoding sequence waits for such a step. So prompts ride thinly: about as many tokens with each decode row as the
//! traffic has prompt tokens for each answer token, more where prompts wait, and never so many that the step takes longer
//! than the gap between tokens that is aimed at. Times of steps are measured while serving.
//!
//! Steps of some sizes multiply a token faster than others, because their tiles fill the device better. Rows decode in every
//! step, so what a step's prompts cost is its time beyond that of a step without any. Of all ways to feed so many prompt
//! tokens a step on average the fastest is to alternate between two sizes, which are neighbours on the lower convex hull of
//! the times. The larger is taken if enough tokens wait to fill it, else the largest that they fill.

use crate::exec::Share;
use crate::request::Micros;
use std::collections::BTreeMap;

/// Answer tokens after which what was counted before weighs half.
const MEMORY: f64 = 8192.0;
/// Prompts that wait are fed within about this many steps, if the gap allows it.
const DRAIN: u32 = 24;
/// Prompt tokens of the first step, whose time is not known.
const FIRST: u32 = 128;
/// What a new measurement weighs against those before.
const NEW: f64 = 0.25;
/// A size that was never measured is taken to need this part of what lies between its neighbours, so that it is tried.
const HOPE: f64 = 0.97;
/// Where the device names no buckets, times are kept for multiples of this.
const GRAIN: u32 = 64;

/// Decides it, from the traffic and from the times of earlier steps.
#[derive(Debug, Default)]
pub(super) struct Balance {
    /// The longest gap between tokens that is aimed at; `None` feeds as many tokens as a step may have.
    gap: Option<Micros>,
    /// Sizes of steps that have a graph, in tokens, ascending.
    buckets: Vec<u32>,
    times: Times,
    /// Prompt tokens and answer tokens of late, and all that were counted.
    asked: f64,
    answered: f64,
    counted: (u64, u64),
}

impl Balance {
    pub(super) fn new(gap: Option<Micros>, buckets: Vec<u32>) -> Self {
        Self { gap, buckets, ..Self::default() }
    }

    /// Counts the traffic: all prompt tokens that had to be computed, and all answer tokens, since the start.
    pub(super) fn count(&mut self, asked: u64, answered: u64) {
        let (before_asked, before_answered) =
            std::mem::replace(&mut self.counted, (asked, answered));
        self.asked += asked.saturating_sub(before_asked) as f64;
        self.answered += answered.saturating_sub(before_answered) as f64;
        if self.answered > MEMORY {
            self.asked /= 2.0;
            self.answered /= 2.0;
        }
    }

    /// A step with prompts took so long.
    pub(super) fn measured(&mut self, decoding: u32, tokens: u32, took: Micros) {
        if self.gap.is_some() && decoding > 0 {
            self.times.add(decoding, self.bucket(tokens), took);
        }
    }

    /// A step without prompts took so long.
    pub(super) fn decoded(&mut self, rows: u32, took: Micros) {
        if self.gap.is_some() && rows > 0 {
            self.times.add(rows, 0, took);
        }
    }

    /// Tokens of the next step, decode rows included: at most `most`. `waiting` are the prompt tokens that could be fed.
    pub(super) fn tokens(&self, decoding: u32, waiting: u32, most: u32) -> (u32, Share) {
        let Some(gap) = self.gap else { return (most, Share::Full) };
        if decoding == 0 {
            return (most, Share::Alone);
        }
        let traffic = match self.answered > 0.0 {
            true => (f64::from(decoding) * self.asked / self.answered) as u32,
            false => 0,
        };
        let backlog = waiting.div_ceil(DRAIN);
        let need = traffic.max(backlog).max(1);
        let due = if backlog > traffic { Share::Backlog } else { Share::Traffic };
        let wanted = self.bucket(decoding.saturating_add(need));
        let known = self.times.of(decoding);
        if known.iter().all(|&(tokens, _)| tokens == decoding) {
            let first = self.bucket(decoding + FIRST);
            let share = if wanted > first { Share::Gap } else { due };
            return (wanted.min(first).min(most), share);
        }
        let sizes: Vec<u32> = match self.buckets.is_empty() {
            true => known.iter().map(|&(tokens, _)| tokens).chain([wanted]).collect(),
            false => self.buckets.clone(),
        };
        let hull = hull(&known, decoding, &sizes, gap as f64);
        let Some(&(largest, _)) = hull.last().filter(|(tokens, _)| *tokens > decoding) else {
            return (self.bucket(decoding + 1).min(most), Share::Gap);
        };
        let share = if decoding.saturating_add(need) > largest { Share::Gap } else { due };
        let holds = |&(tokens, _): &(u32, f64)| tokens - decoding >= need;
        let above = hull.iter().find(|size| holds(size)).map_or(largest, |&(tokens, _)| tokens);
        let full = |tokens: u32| tokens > decoding && tokens - decoding <= waiting;
        let filled = hull.iter().map(|&(tokens, _)| tokens).rfind(|&t| t <= above && full(t));
        let tokens = filled.unwrap_or_else(|| self.bucket(decoding + waiting.max(1)).min(above));
        (tokens.min(most), share)
    }

    /// The smallest bucket of at least so many tokens: its graph takes the same time with fewer.
    fn bucket(&self, tokens: u32) -> u32 {
        let found = self.buckets.iter().copied().find(|&bucket| bucket >= tokens);
        found.unwrap_or_else(|| tokens.next_multiple_of(GRAIN))
    }
}

/// Sizes of steps on the lower convex hull of the times, ascending, that take at most `gap`; the first may be the step that only
/// decodes.
fn hull(known: &[(u32, f64)], decoding: u32, sizes: &[u32], gap: f64) -> Vec<(u32, f64)> {
    let alone = known.first().filter(|(tokens, _)| *tokens == decoding).copied();
    let fed = sizes.iter().filter(|&&tokens| tokens > decoding);
    let fed = fed.filter_map(|&tokens| Some((tokens, expected(known, tokens, decoding)?)));
    let mut hull: Vec<(u32, f64)> = Vec::new();
    for point in alone.into_iter().chain(fed.filter(|(_, time)| *time <= gap)) {
        let slope = |a: (u32, f64), b: (u32, f64)| (b.1 - a.1) / f64::from(b.0 - a.0);
        while let [.., a, b] = hull[..]
            && slope(a, b) >= slope(b, point)
        {
            hull.pop();
        }
        hull.push(point);
    }
    hull
}

/// What a step of so many tokens is expected to take, from the times that are known, ascending: as measured, a little less than
/// the line between two that were, or in proportion to the largest. A step more than twice as large as any is not tried.
fn expected(known: &[(u32, f64)], tokens: u32, decoding: u32) -> Option<f64> {
    let share = |(from, time): (u32, f64)| time * f64::from(tokens) / f64::from(from);
    match known.binary_search_by_key(&tokens, |&(tokens, _)| tokens) {
        Ok(at) => Some(known[at].1),
        Err(0) => None,
        Err(at) if at == known.len() => {
            let last = known[at - 1];
            (last.0 > decoding && tokens <= 2 * last.0).then(|| share(last))
        }
        Err(at) => {
            let ((a, before), (b, after)) = (known[at - 1], known[at]);
            let part = f64::from(tokens - a) / f64::from(b - a);
            Some(HOPE * (before + part * (after - before)))
        }
    }
}

/// Times of steps in microseconds, by decode rows (rounded up to a power of two) and tokens; 0 tokens are a step that feeds no
/// prompt.
#[derive(Debug, Default)]
struct Times(BTreeMap<(u32, u32), f64>);

impl Times {
    fn add(&mut self, decoding: u32, tokens: u32, took: Micros) {
        let took = took as f64;
        let known = self.0.entry((decoding.next_power_of_two(), tokens)).or_insert(took);
        *known += NEW * (took - *known);
    }

    /// Sizes with room beside so many decode rows, ascending, and their times; a step that only decodes has as many tokens as
    /// rows.
    fn of(&self, decoding: u32) -> Vec<(u32, f64)> {
        let rows = decoding.next_power_of_two();
        let known = self.0.range((rows, 0)..=(rows, u32::MAX));
        let known = known.filter(|((_, tokens), _)| *tokens == 0 || *tokens > decoding);
        known.map(|((_, tokens), time)| ((*tokens).max(decoding), *time)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn balance() -> Balance {
        Balance::new(Some(20_000), vec![64, 128, 208, 256, 512, 1024, 2048])
    }

    #[test]
    fn prompts_ride_in_the_proportion_of_the_traffic() {
        let mut balance = balance();
        balance.decoded(64, 6_000);
        balance.measured(64, 128, 7_000);
        balance.measured(64, 208, 7_700);
        balance.measured(64, 256, 8_250);
        balance.measured(64, 512, 13_100);
        balance.measured(64, 1024, 23_000);
        balance.count(2200, 1000);
        // 64 rows × 2.2 are 140 prompt tokens, which 208 hold; but 256 multiply a token faster.
        assert_eq!(balance.tokens(64, 500, 2048), (256, Share::Traffic));
        // Too few wait to fill it: all of them ride.
        assert_eq!(balance.tokens(64, 150, 2048), (256, Share::Traffic));
        // Many prompts wait: more, up to what takes 20 ms.
        assert_eq!(balance.tokens(64, 5000, 2048), (512, Share::Backlog));
        assert_eq!(balance.tokens(64, 20_000, 2048), (512, Share::Gap));
        assert_eq!(balance.tokens(64, 20_000, 100), (100, Share::Gap));
        // Nothing waits for it.
        assert_eq!(balance.tokens(0, 5000, 2048), (2048, Share::Alone));
    }

    #[test]
    fn slow_sizes_are_passed_over() {
        let mut balance = balance();
        balance.count(5000, 1000);
        for (tokens, took) in [(128, 7_000), (208, 7_700), (256, 11_000), (512, 13_000)] {
            balance.measured(64, tokens, took);
        }
        balance.decoded(64, 6_000);
        // 320 are wanted, so 512 and 208 in turns: the first where so many wait, the other where not.
        assert_eq!(balance.tokens(64, 450, 2048), (512, Share::Traffic));
        assert_eq!(balance.tokens(64, 400, 2048), (208, Share::Traffic));
        // A size that was never measured is tried.
        balance.times = Times::default();
        balance.measured(64, 208, 7_700);
        balance.measured(64, 1024, 19_000);
        assert_eq!(balance.tokens(64, 900, 2048), (512, Share::Traffic));
    }

    #[test]
    fn the_first_steps_are_small_and_grow() {
        let mut balance = balance();
        assert_eq!(balance.tokens(30, 50_000, 2048), (208, Share::Gap));
        balance.measured(30, 208, 9_000);
        assert_eq!(balance.tokens(30, 50_000, 2048), (256, Share::Gap), "at most twice as many");
        balance.measured(30, 256, 10_000);
        assert_eq!(balance.tokens(30, 50_000, 2048), (512, Share::Gap));
    }

    #[test]
    fn a_gap_that_cannot_be_met_does_not_stop_prompts() {
        let mut balance = balance();
        balance.measured(200, 256, 90_000);
        assert_eq!(balance.tokens(200, 50_000, 2048).0, 208);
        balance.measured(200, 208, 80_000);
        assert_eq!(balance.tokens(200, 50_000, 2048).0, 208);
    }

    #[test]
    fn without_a_gap_steps_are_full() {
        let balance = Balance::new(None, Vec::new());
        assert_eq!(balance.tokens(64, 10, 2048), (2048, Share::Full));
    }

    #[test]
    fn old_traffic_is_forgotten() {
        let mut balance = balance();
        balance.count(1_000_000, 1000);
        let mut answered = 1000;
        for _ in 0..1000 {
            answered += 1000;
            balance.count(1_000_000, answered);
        }
        assert_eq!(balance.tokens(64, 0, 2048), (128, Share::Traffic));
    }
}
