//! How many prompt tokens a step feeds beside rows that decode.
//!
//! Every decoding sequence waits for such a step. So prompts ride thinly: as many tokens with each decode row as the
//! traffic has prompt tokens for each answer token, more where prompts wait, and never so many that the step takes longer
//! than the gap between tokens that is aimed at. Times of steps are measured while serving.

use crate::exec::Share;
use crate::request::Micros;
use std::collections::BTreeMap;

/// Prompts are fed by this much faster than they come, so that they do not pile up.
const SLACK: f64 = 1.25;
/// Answer tokens after which what was counted before weighs half.
const MEMORY: f64 = 8192.0;
/// Prompts that wait are fed within about this many steps, if the gap allows it.
const DRAIN: u32 = 24;
/// Prompt tokens of the first step, whose time is not known.
const FIRST: u32 = 128;
/// What a new measurement weighs against those before.
const NEW: f64 = 0.25;
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

    /// Tokens of the next step, decode rows included: at most `most`. `waiting` are the prompt tokens that could be fed.
    pub(super) fn tokens(&self, decoding: u32, waiting: u32, most: u32) -> (u32, Share) {
        let Some(gap) = self.gap else { return (most, Share::Full) };
        if decoding == 0 {
            return (most, Share::Alone);
        }
        let traffic = match self.answered > 0.0 {
            true => (SLACK * f64::from(decoding) * self.asked / self.answered) as u32,
            false => 0,
        };
        let backlog = waiting.div_ceil(DRAIN);
        let wanted = self.bucket(decoding.saturating_add(traffic.max(backlog).max(1)));
        let allowed = match self.times.most(decoding, gap) {
            Some(allowed) => self.bucket_below(allowed, decoding),
            None => self.bucket(decoding + FIRST),
        };
        let share = match (wanted > allowed, backlog > traffic) {
            (true, _) => Share::Gap,
            (false, true) => Share::Backlog,
            (false, false) => Share::Traffic,
        };
        (wanted.min(allowed).min(most), share)
    }

    /// The smallest bucket of at least so many tokens: its graph takes the same time with fewer.
    fn bucket(&self, tokens: u32) -> u32 {
        let found = self.buckets.iter().copied().find(|&bucket| bucket >= tokens);
        found.unwrap_or_else(|| tokens.next_multiple_of(GRAIN))
    }

    /// The largest bucket of at most so many tokens, but one with room for prompts.
    fn bucket_below(&self, tokens: u32, decoding: u32) -> u32 {
        let found = self.buckets.iter().copied().rfind(|&bucket| bucket <= tokens);
        let found = found.unwrap_or(tokens / GRAIN * GRAIN);
        if found > decoding { found } else { self.bucket(decoding + 1) }
    }
}

/// Times of steps that feed prompts, in microseconds, by decode rows (rounded up to a power of two) and tokens.
#[derive(Debug, Default)]
struct Times(BTreeMap<(u32, u32), f64>);

impl Times {
    fn add(&mut self, decoding: u32, tokens: u32, took: Micros) {
        let took = took as f64;
        let known = self.0.entry((decoding.next_power_of_two(), tokens)).or_insert(took);
        *known += NEW * (took - *known);
    }

    /// Most tokens of a step that takes at most `gap`; `None` if no such step was measured. Between two sizes that were
    /// measured the time is on the line through both; a larger step than any is at most twice as large.
    fn most(&self, decoding: u32, gap: Micros) -> Option<u32> {
        let (rows, gap) = (decoding.next_power_of_two(), gap as f64);
        let known = self.0.range((rows, 0)..=(rows, u32::MAX));
        let known: Vec<(f64, f64)> = known.map(|(key, time)| (f64::from(key.1), *time)).collect();
        let within = known.iter().rposition(|(_, time)| *time <= gap);
        let tokens = match within {
            // Part of a step's time does not depend on its tokens, so this is too many by a little; the next
            // measurement tells.
            None => known.first().map(|(tokens, time)| tokens * gap / time)?,
            Some(at) => {
                let (tokens, time) = known[at];
                match known.get(at + 1) {
                    Some(next) => tokens + (gap - time) / (next.1 - time) * (next.0 - tokens),
                    None => tokens * (gap / time).min(2.0),
                }
            }
        };
        Some(tokens as u32)
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
        balance.measured(64, 512, 14_000);
        balance.measured(64, 1024, 23_000);
        balance.count(2200, 1000);
        // 64 rows × 2.2 × 1.25 are 176 prompt tokens, 240 in all: that bucket is filled.
        assert_eq!(balance.tokens(64, 500, 2048), (256, Share::Traffic));
        // Many prompts wait: more, up to what takes 20 ms: between 512 and 1024, where no bucket is.
        assert_eq!(balance.tokens(64, 5000, 2048), (512, Share::Backlog));
        assert_eq!(balance.tokens(64, 20_000, 2048), (512, Share::Gap));
        assert_eq!(balance.tokens(64, 20_000, 100), (100, Share::Gap));
        // Nothing waits for it.
        assert_eq!(balance.tokens(0, 5000, 2048), (2048, Share::Alone));
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
