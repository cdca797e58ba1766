//! Attention as ggml computes it without its flash kernel: two matrix multiplications with a softmax between them.
//!
//! * Queries are rounded to f16; so are the weights that come out of the softmax.
//! * A token that is alone in its step gets dot products of four times sixteen lanes; several tokens (a prompt) get
//!   sixteen lanes. In both, lane i sums every sixteenth element, or position, from i on, by fused multiply-adds; with
//!   four times sixteen lanes, four registers take turns. At the end they are added by halves.
//!
//! Positions count from the start of the sequence, as ggml's cells do for a sequence that is alone in its cache.

use super::fast::Heads;
use crate::DType;
use crate::cpu::ggml::{exp, soft_cap};
use crate::cpu::simd::{self, LANES, Level, levels};
use crate::cpu::view::{round_to, store_floats};

/// Registers that take turns in the dot product of a token that is alone.
const TURNS: usize = 4;

/// Floats of scratch for a token that sees `count` positions, wherever the first one lies.
pub(super) fn own_floats(dim: usize, group: usize, count: usize) -> usize {
    floats(dim, group, (count + LANES - 1).next_multiple_of(LANES))
}

/// Floats of scratch for `scores` scores, whole vectors of them: queries, scores, one row of k or v, lanes of
/// an output.
fn floats(dim: usize, group: usize, scores: usize) -> usize {
    group * (dim + scores) + dim + TURNS * LANES * dim
}

/// One token's queries of a KV head; `alone` in its step or not.
pub(super) fn token(heads: &Heads<'_>, token: usize, position: usize, alone: bool) {
    let (dim, group, level) = (heads.dim(), heads.group(), heads.step.level);
    let first = heads.first(position);
    // Scores start at the vector that holds the first position.
    let start = first / LANES * LANES;
    let count = (position + 1 - start).next_multiple_of(LANES);
    // SAFETY: this worker's own scratch.
    let own = unsafe { heads.own.floats(floats(dim, group, count)) };
    let (queries, rest) = own.split_at_mut(group * dim);
    let (scores, rest) = rest.split_at_mut(group * count);
    let (line, lanes) = rest.split_at_mut(dim);
    // SAFETY: room for the group.
    unsafe { heads.load_queries(token, queries.as_mut_ptr()) };
    queries.iter_mut().for_each(|q| *q = round_to(DType::F16, *q));
    scores.fill(f32::NEG_INFINITY);
    // Sixteen lanes need whole vectors.
    let turns = if alone || !dim.is_multiple_of(LANES) { TURNS } else { 1 };
    for p in first..=position {
        let at = p - start;
        // SAFETY: a head of a live slot; the level was detected.
        unsafe {
            heads.load_line(0, p, line);
            score(level, queries, line, heads.scale(), turns, &mut scores[at..], count);
        }
    }
    let turns = if alone { TURNS } else { 1 };
    for (g, scores) in scores.chunks_exact_mut(count).enumerate() {
        if let Some(cap) = heads.softcap() {
            soft_cap(&mut scores[first - start..=position - start], cap);
        }
        // SAFETY: the level was detected.
        unsafe { softmax(level, scores, heads.sink(g)) };
        scores.iter_mut().for_each(|score| *score = round_to(DType::F16, *score));
        let lanes = &mut lanes[..turns * LANES * dim];
        lanes.fill(0.0);
        for p in first..=position {
            let at = p % (turns * LANES) * dim;
            // SAFETY: a head of a live slot; the level was detected.
            unsafe {
                heads.load_line(1, p, line);
                add(level, &mut lanes[at..at + dim], line, scores[p - start]);
            }
        }
        store(heads, token, g, lanes, level);
    }
}

/// Adds the lanes and stores the head.
fn store(heads: &Heads<'_>, token: usize, g: usize, lanes: &mut [f32], level: Level) {
    let (dim, out) = (heads.dim(), &heads.step.out);
    // SAFETY: the level was detected.
    unsafe { add_halves(level, lanes, dim) };
    let at = out.at(token, (heads.kv_head * heads.group() + g) * dim);
    // SAFETY: a head of this token, which this chunk alone writes.
    unsafe { store_floats(out.dtype, at, &lanes[..dim]) };
}

#[inline(always)]
fn score_body<const FMA: bool>(
    q: &[f32],
    k: &[f32],
    scale: f32,
    turns: usize,
    to: &mut [f32],
    step: usize,
) {
    for (g, q) in q.chunks_exact(k.len()).enumerate() {
        let dot = if turns == 1 { dot(q, k) } else { dot_in_turns(q, k) };
        to[g * step] = dot * scale;
    }
}

#[inline(always)]
fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for (x, y) in x.chunks_exact(LANES).zip(y.chunks_exact(LANES)) {
        for i in 0..LANES {
            lanes[i] = x[i].mul_add(y[i], lanes[i]);
        }
    }
    simd::sum(lanes)
}

#[inline(always)]
fn dot_in_turns(x: &[f32], y: &[f32]) -> f32 {
    let mut lanes = [[0.0f32; LANES]; TURNS];
    let (xs, ys) = (x.chunks_exact(TURNS * LANES), y.chunks_exact(TURNS * LANES));
    let rest = xs.remainder().iter().zip(ys.remainder());
    for (x, y) in xs.zip(ys) {
        for (turn, lanes) in lanes.iter_mut().enumerate() {
            for i in 0..LANES {
                lanes[i] = x[turn * LANES + i].mul_add(y[turn * LANES + i], lanes[i]);
            }
        }
    }
    let [a, b, c, d] = lanes;
    let sum = simd::sum(std::array::from_fn(|i| (a[i] + c[i]) + (b[i] + d[i])));
    rest.fold(f64::from(sum), |sum, (x, y)| sum + f64::from(x * y)) as f32
}

#[inline(always)]
fn softmax_body<const FMA: bool>(scores: &mut [f32], sink: Option<f32>) {
    let most = sink.unwrap_or(f32::NEG_INFINITY);
    let max = scores.iter().fold(most, |max, x| if *x > max { *x } else { max });
    let mut total = 0.0f64;
    for part in scores.chunks_exact_mut(LANES) {
        let mut lanes = [0.0f32; LANES];
        for (lane, score) in lanes.iter_mut().zip(&*part) {
            *lane = exp(*score - max);
        }
        part.copy_from_slice(&lanes);
        total += f64::from(simd::sum(lanes));
    }
    total += sink.map_or(0.0, |sink| f64::from((sink - max).exp()));
    let inverse = (1.0 / total) as f32;
    scores.iter_mut().for_each(|score| *score *= inverse);
}

#[inline(always)]
fn add_body<const FMA: bool>(lane: &mut [f32], v: &[f32], weight: f32) {
    for (sum, v) in lane.iter_mut().zip(v) {
        *sum = v.mul_add(weight, *sum);
    }
}

/// Adds the turns (first and third first), then the lanes; the sum is then in the first `dim` floats.
#[inline(always)]
fn add_halves_body<const FMA: bool>(lanes: &mut [f32], dim: usize) {
    let mut half = lanes.len() / 2;
    while half >= dim {
        let (low, high) = lanes.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(&high[..half]) {
            *low += *high;
        }
        half /= 2;
    }
}

levels! {
    /// A group's scores for one key.
    fn score(q: &[f32], k: &[f32], scale: f32, turns: usize, to: &mut [f32], step: usize) = score_body;
}

levels! {
    /// Scores to weights that sum to 1, less what a sink takes.
    fn softmax(scores: &mut [f32], sink: Option<f32>) = softmax_body;
}

levels! {
    /// lane += weight · v.
    fn add(lane: &mut [f32], v: &[f32], weight: f32) = add_body;
}

levels! {
    /// The sum of all lanes of `dim` floats, by halves.
    fn add_halves(lanes: &mut [f32], dim: usize) = add_halves_body;
}
