//! How many drafts the next decode step verifies. A step with drafts takes longer and returns more: what pays is the number
//! that makes the most tokens per second, none included. Both sides are measured: the time of a step by its bucket and
//! tokens per row, and for each seat how often a draft of it is accepted.

use super::{Choice, SpecUse, Why};
use std::collections::BTreeMap;

/// Weight of a new measurement of a step's time.
const NEW: f64 = 0.1;
/// A seat's experience fades by this factor with each of its steps.
const FADE: f64 = 0.9;
/// What the average of all seats counts for a new one, in drafts.
const PRIOR: f64 = 2.0;
/// Without drafts, one step in so many has some, to see whether they would pay now; twice as rarely each time that they do
/// not, down to the second number.
const PROBES: (u32, u32) = (16, 256);

/// Drafts of a seat, fading.
#[derive(Clone, Copy, Debug, Default)]
struct Experience {
    accepted: f64,
    /// Accepted ones, and the first of each row that was not.
    tried: f64,
}

impl Experience {
    fn add(&mut self, accepted: u32, missed: bool) {
        self.accepted = self.accepted * FADE + f64::from(accepted);
        self.tried = self.tried * FADE + f64::from(accepted) + f64::from(u32::from(missed));
    }
}

/// A row of a step that is to be formed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    /// Its seat.
    pub(crate) seat: u32,
    /// Most tokens that it may return.
    pub(crate) most: u32,
}

/// Chooses the number of tokens per row.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pace {
    /// Microseconds of a step, by bucket and tokens per row.
    times: BTreeMap<(u32, u32), f64>,
    seats: BTreeMap<u32, Experience>,
    all: Experience,
    /// Steps without drafts since the last with some, and after how many there is one again.
    plain: u32,
    probe: u32,
    used: SpecUse,
}

impl Pace {
    /// What happened so far.
    pub(crate) fn used(&self) -> &SpecUse {
        &self.used
    }

    /// A seat has another sequence: what its drafts are worth is not known.
    pub(crate) fn join(&mut self, seat: u32) {
        self.seats.remove(&seat);
    }

    /// How likely a draft of a seat is accepted.
    fn chance(&self, seat: u32) -> f64 {
        let usual = (self.all.accepted + 1.0) / (self.all.tried + 2.0);
        let own = self.seats.get(&seat).copied().unwrap_or_default();
        (own.accepted + PRIOR * usual) / (own.tried + PRIOR)
    }

    /// Tokens that rows return together, if each feeds `q_len`.
    fn tokens(&self, rows: &[Candidate], q_len: u32) -> f64 {
        let row = |row: &Candidate| {
            let chance = self.chance(row.seat);
            (0..row.most.min(q_len)).map(|draft| chance.powi(draft as i32)).sum::<f64>()
        };
        rows.iter().map(row).sum()
    }

    /// The time of a step, in that of a plain one; what was never measured is taken to be as fast, and so is tried.
    fn slowdown(&self, bucket: u32, q_len: u32) -> f64 {
        let time = |q_len| self.times.get(&(bucket, q_len)).copied();
        match (time(1), time(q_len)) {
            (Some(plain), Some(wide)) if q_len > 1 => wide / plain.max(1e-9),
            _ => 1.0,
        }
    }

    /// Tokens per row of the next decode step, of 1 and those in `q_lens` that its bucket is recorded for.
    pub(crate) fn choose(
        &mut self,
        bucket: u32,
        rows: &[Candidate],
        covers: impl Fn(u32) -> bool,
        q_lens: &[u32],
    ) -> u32 {
        let most = rows.iter().map(|row| row.most).max().unwrap_or(1);
        let (mut best, mut any) = (None, false);
        for &q_len in q_lens.iter().filter(|&&q_len| covers(q_len)) {
            any = true;
            if q_len > most {
                continue;
            }
            let gain = self.tokens(rows, q_len) / rows.len() as f64;
            let slowdown = self.slowdown(bucket, q_len);
            if best.is_none_or(|(_, of, at)| gain / slowdown > of / at) {
                best = Some((q_len, gain, slowdown));
            }
        }
        let (why, best, gain, slowdown) = match best {
            None if !any => (Why::NoGraph, 1, 1.0, 1.0),
            None => (Why::NoRow, 1, 1.0, 1.0),
            Some((best, gain, slowdown)) => {
                (self.judge(bucket, gain, slowdown), best, gain, slowdown)
            }
        };
        let q_len = if matches!(why, Why::Pays | Why::Test) { best } else { 1 };
        self.used.last = Choice { drafts: q_len - 1, why, best: best - 1, gain, slowdown };
        q_len
    }

    /// Whether drafts pay that make `gain` tokens of one for `slowdown` times the time.
    fn judge(&mut self, bucket: u32, gain: f64, slowdown: f64) -> Why {
        self.plain += 1;
        if !self.times.contains_key(&(bucket, 1)) {
            return Why::Unmeasured;
        }
        if gain > slowdown {
            (self.plain, self.probe) = (0, PROBES.0);
            return Why::Pays;
        }
        if self.plain <= self.probe.max(PROBES.0) {
            return Why::TooSlow;
        }
        (self.plain, self.probe) = (0, (self.probe.max(PROBES.0) * 2).min(PROBES.1));
        Why::Test
    }

    /// A step of a bucket took so many microseconds.
    pub(crate) fn measured(&mut self, bucket: u32, q_len: u32, micros: f64) {
        let time = self.times.entry((bucket, q_len)).or_insert(micros);
        // A single pause of the machine must not decide.
        *time += NEW * (micros.clamp(*time / 2.0, *time * 2.0) - *time);
    }

    /// A row that fed `q_len` tokens had so many drafts and returned so many tokens.
    pub(crate) fn returned(&mut self, seat: u32, limit: u32, drafted: u32, tokens: u32) {
        let accepted = tokens.saturating_sub(1);
        self.used.drafted += u64::from(drafted);
        self.used.accepted += u64::from(accepted);
        let missed = accepted < limit;
        self.seats.entry(seat).or_default().add(accepted, missed);
        self.all.add(accepted, missed);
    }

    /// A decode step ran.
    pub(crate) fn ran(&mut self, q_len: u32) {
        *self.used.steps.entry(q_len - 1).or_default() += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(count: u32, most: u32) -> Vec<Candidate> {
        (0..count).map(|seat| Candidate { seat, most }).collect()
    }

    /// Runs steps on a device where a step with drafts takes `slow` times as long and a draft of a seat is accepted as
    /// `agrees` says; returns how many of the last 1000 had drafts.
    fn play(pace: &mut Pace, bucket: u32, slow: f64, agrees: impl Fn(u32, u32) -> bool) -> u32 {
        let mut wide = 0;
        for step in 0..2000 {
            let q_len = pace.choose(bucket, &rows(bucket, 4), |_| true, &[2, 4]);
            pace.measured(bucket, q_len, if q_len > 1 { 100.0 * slow } else { 100.0 });
            pace.ran(q_len);
            if q_len > 1 {
                wide += u32::from(step >= 1000);
                for seat in 0..bucket {
                    let accepted = (1..q_len).take_while(|j| agrees(seat, step * 4 + j)).count();
                    pace.returned(seat, q_len - 1, q_len - 1, accepted as u32 + 1);
                }
            }
        }
        wide
    }

    #[test]
    fn drafts_that_pay_are_used_and_others_are_not() {
        let good = |_: u32, n: u32| !n.is_multiple_of(5);
        let bad = |_: u32, n: u32| n.is_multiple_of(20);
        assert_eq!(play(&mut Pace::default(), 1, 1.1, good), 1000);
        assert!(play(&mut Pace::default(), 1, 1.3, bad) < 20);
        assert!(play(&mut Pace::default(), 64, 4.2, good) < 20, "slower than what it returns");
    }

    #[test]
    fn it_comes_back_when_text_repeats_again() {
        let mut pace = Pace::default();
        assert!(play(&mut pace, 2, 1.5, |_, _| false) < 20);
        assert!(play(&mut pace, 2, 1.5, |_, _| true) > 900);
        let used = pace.used();
        assert!(used.accepted > 0 && used.accepted < used.drafted);
        assert!(used.steps[&0] > 1000 && used.steps[&3] > 900, "{:?}", used.steps);
        assert_eq!((used.last.why, used.last.drafts), (Why::Pays, 3));
    }

    #[test]
    fn rows_that_may_return_one_token_have_no_drafts() {
        let mut pace = Pace::default();
        assert_eq!(pace.choose(4, &rows(3, 1), |_| true, &[2, 4]), 1);
        assert_eq!(pace.choose(4, &rows(3, 4), |_| false, &[2, 4]), 1);
        pace.measured(4, 1, 50.0);
        assert_eq!(
            pace.choose(4, &rows(3, 3), |_| true, &[2, 4]),
            2,
            "as many as the rows may have"
        );
    }
}
