//! Rows are divided among the threads.

use super::row::{Choice, SampledRow, StepEnd};
use crate::StepState;
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::simd::{LANES, Level, exp, levels};
use crate::cpu::step::{Own, Scratch, Step, Team};
use crate::cpu::view::{Matrix, load_floats};
use crate::logprob::Distribution;
use crate::op::Sample;

struct SampleStep {
    logits: Matrix,
    state: StepState,
    memory: CpuMemory,
    rows: u32,
    q_len: u32,
    level: Level,
}

impl Sample {
    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        Box::new(SampleStep {
            logits: Matrix::new(memory, &self.logits),
            state: self.state,
            memory: *memory,
            rows: self.rows,
            q_len: self.q_len,
            level: lowering.level,
        })
    }
}

/// A row's logits (if they are not f32 already) and candidate tokens.
fn own_bytes(vocab: usize) -> usize {
    vocab * (size_of::<f32>() + size_of::<u32>())
}

impl Step for SampleStep {
    fn scratch(&self) -> Scratch {
        Scratch { shared: 0, own: own_bytes(self.logits.cols) }
    }

    fn run(&self, team: &Team<'_>) {
        let end = StepEnd::new(&self.memory, &self.state, self.rows, self.q_len);
        team.parallel(end.live, &|r, worker| {
            end.sample(r, |row, index| self.sample(index, row, team.own(worker)));
        });
        end.publish();
    }
}

impl SampleStep {
    /// Chooses a token from row `index` of the logits.
    fn sample(&self, index: usize, row: &SampledRow<'_>, own: Own) -> Choice {
        let vocab = self.logits.cols;
        let at = self.logits.at(index, 0);
        let own = own.bytes(own_bytes(vocab));
        let in_place = self.logits.dtype == crate::DType::F32;
        // SAFETY: the row's own logits, which the op may overwrite, or this worker's scratch.
        let (logits, candidates) = unsafe {
            let start = if in_place { at.cast::<f32>() } else { own.cast::<f32>() };
            let candidates = own.cast::<u32>().add(vocab);
            (
                std::slice::from_raw_parts_mut(start, vocab),
                std::slice::from_raw_parts_mut(candidates, vocab),
            )
        };
        if !in_place {
            // SAFETY: a row of logits.
            unsafe { load_floats(self.logits.dtype, at, logits) };
        }
        row.adjust(logits);
        choose(self.level, row, logits, candidates)
    }
}

fn choose(level: Level, row: &SampledRow<'_>, logits: &[f32], candidates: &mut [u32]) -> Choice {
    // SAFETY: the level was detected.
    let max = unsafe { largest(level, logits) };
    let (token, kept) = if row.temperature == 0.0 {
        (logits.iter().position(|l| *l == max).unwrap_or(0) as u32, None)
    } else {
        draw(level, row, logits, max, candidates)
    };
    let mut choice = Choice { token, ..Choice::default() };
    if row.logprobs > 0 {
        let count = row.alternatives().min(logits.len());
        best(logits, &mut choice.top[..count]);
        let kept = kept.filter(|_| row.of_drawn);
        let all = match kept {
            Some(kept) => {
                let logits = kept.iter().map(|token| logits[*token as usize]);
                Distribution::at(row.temperature, logits)
            }
            None if row.of_drawn && row.temperature > 0.0 => {
                Distribution::at(row.temperature, logits.iter().copied())
            }
            None => Distribution::of(logits),
        };
        choice.logprob = all.logprob(logits[token as usize]);
        let is_kept = |token| kept.is_none_or(|kept| kept.binary_search(&token).is_ok());
        for (token, value) in &mut choice.top[..count] {
            *value = if is_kept(*token) { all.logprob(*value) } else { f32::NEG_INFINITY };
        }
    }
    choice
}

/// The best tokens and their logits, best first, ties in index order.
fn best(logits: &[f32], top: &mut [(u32, f32)]) {
    let mut found = 0;
    for (token, l) in logits.iter().enumerate() {
        if found == top.len() && top.last().is_none_or(|last| last.1.total_cmp(l).is_ge()) {
            continue;
        }
        found = (found + 1).min(top.len());
        let mut at = found - 1;
        while at > 0 && top[at - 1].1.total_cmp(l).is_lt() {
            top[at] = top[at - 1];
            at -= 1;
        }
        top[at] = (token as u32, *l);
    }
}

/// Tokens this far below the likeliest (after temperature) are considered only if necessary: each has less than
/// 2·10⁻⁹ of its probability.
const REACH: f32 = 20.0;

/// A token, and those that the filters keep, in index order; `None` if they keep all.
fn draw<'a>(
    level: Level,
    row: &SampledRow<'_>,
    logits: &[f32],
    max: f32,
    candidates: &'a mut [u32],
) -> (u32, Option<&'a [u32]>) {
    let top = max / row.temperature;
    let scaled = |token: u32| logits[token as usize] / row.temperature;
    let weight = |token: u32| f64::from(scaled(token) - top).exp();
    let keep = if row.top_k == 0 { logits.len() } else { (row.top_k as usize).min(logits.len()) };
    let filtered = keep < logits.len() || row.top_p < 1.0 || row.min_p > 0.0;
    if !filtered {
        return (walk(level, row, logits, max), None);
    }
    let mut count = gather(logits, row.temperature, top - REACH, candidates);
    let reaches_k = keep == logits.len() || count >= keep;
    // SAFETY: the level was detected.
    let total = || unsafe { sum_exp(level, logits, row.temperature, max) };
    let reaches_p = keep < logits.len() || row.top_p >= 1.0 || {
        let sum: f64 = candidates[..count].iter().map(|token| weight(*token)).sum();
        sum >= f64::from(row.top_p) * total()
    };
    let reaches_min = row.min_p > 2.1e-9 || row.min_p == 0.0;
    let narrowed = keep < logits.len() || row.top_p < 1.0 || row.min_p > 2.1e-9;
    if !(reaches_k && reaches_p && reaches_min && narrowed) {
        count = gather(logits, row.temperature, f32::NEG_INFINITY, candidates);
    }
    let mut kept = &mut candidates[..count];
    let order = |a: &u32, b: &u32| {
        let (x, y) = (logits[*a as usize], logits[*b as usize]);
        y.total_cmp(&x).then(a.cmp(b))
    };
    if keep < kept.len() {
        kept.select_nth_unstable_by(keep - 1, order);
        kept = &mut kept[..keep];
    }
    if row.top_p < 1.0 {
        kept.sort_unstable_by(order);
        let all: f64 = if keep < logits.len() {
            kept.iter().map(|token| weight(*token)).sum()
        } else {
            total()
        };
        let mut sum = 0.0;
        let reached = kept.iter().position(|token| {
            sum += weight(*token);
            sum >= f64::from(row.top_p) * all
        });
        let keep = reached.map_or(kept.len(), |last| last + 1);
        kept = &mut kept[..keep];
    }
    kept.sort_unstable();
    let mut count = 0;
    for at in 0..kept.len() {
        let token = kept[at];
        kept[count] = token;
        count += usize::from(weight(token) >= f64::from(row.min_p));
    }
    let kept = &kept[..count];
    let total: f64 = kept.iter().map(|token| weight(*token)).sum();
    let mut sum = 0.0;
    let chosen = kept.iter().find(|token| {
        sum += weight(**token);
        sum > f64::from(row.uniform) * total
    });
    (*chosen.or(kept.last()).unwrap_or(&0), Some(kept))
}

/// The tokens at or above a scaled logit, in index order; returns how many.
fn gather(logits: &[f32], temperature: f32, least: f32, candidates: &mut [u32]) -> usize {
    let mut count = 0;
    for (token, l) in logits.iter().enumerate() {
        candidates[count] = token as u32;
        count += usize::from(l / temperature >= least);
        if count == candidates.len() {
            break;
        }
    }
    count
}

/// Draws from the whole distribution: finds the block by block sums, then the token within it.
fn walk(level: Level, row: &SampledRow<'_>, logits: &[f32], max: f32) -> u32 {
    const BLOCK: usize = 1024;
    // SAFETY: the level was detected.
    let sum_of = |part: &[f32]| unsafe { sum_exp(level, part, row.temperature, max) };
    let total: f64 = logits.chunks(BLOCK).map(sum_of).sum();
    let goal = f64::from(row.uniform) * total;
    let (mut sum, mut last) = (0.0, 0);
    for (block, part) in logits.chunks(BLOCK).enumerate() {
        let here = sum_of(part);
        if sum + here <= goal {
            sum += here;
            continue;
        }
        for (i, l) in part.iter().enumerate() {
            let weight = f64::from(*l / row.temperature - max / row.temperature).exp();
            sum += weight;
            if weight > 0.0 {
                last = block * BLOCK + i;
            }
            if sum > goal {
                return last as u32;
            }
        }
    }
    last as u32
}

#[inline(always)]
fn largest_body<const FMA: bool>(logits: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 4 * LANES];
    let parts = logits.chunks_exact(4 * LANES);
    let rest = parts.remainder();
    for part in parts {
        for i in 0..4 * LANES {
            lanes[i] = if part[i] > lanes[i] { part[i] } else { lanes[i] };
        }
    }
    let largest = |max: f32, l: &f32| if *l > max { *l } else { max };
    rest.iter().fold(lanes.iter().fold(f32::NEG_INFINITY, largest), largest)
}

#[inline(always)]
fn sum_exp_body<const FMA: bool>(logits: &[f32], temperature: f32, max: f32) -> f64 {
    let top = max / temperature;
    // Below this, `exp` does not decrease further: those tokens count as 0, as they would in f64 sums.
    let weight = |l: f32| {
        let x = l / temperature - top;
        if x > -87.0 { exp::<FMA>(x) } else { 0.0 }
    };
    let mut lanes = [0.0f32; LANES];
    let parts = logits.chunks_exact(LANES);
    let rest: f32 = parts.remainder().iter().map(|l| weight(*l)).sum();
    for part in parts {
        for i in 0..LANES {
            lanes[i] += weight(part[i]);
        }
    }
    lanes.iter().map(|lane| f64::from(*lane)).sum::<f64>() + f64::from(rest)
}

levels! {
    /// The largest logit.
    fn largest(logits: &[f32]) -> f32 = largest_body;
}

levels! {
    /// Σ e^((l − max) / temperature).
    fn sum_exp(logits: &[f32], temperature: f32, max: f32) -> f64 = sum_exp_body;
}
