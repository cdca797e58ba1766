//! Attention for processors without AVX-512, and shapes its kernels do not fit: one token at a time.

use super::fast::Heads;
use crate::cpu::simd::{LANES, dot, exp, fma, levels, soft_cap};
use crate::cpu::view::store_floats;

/// Floats of scratch for a token that sees `count` positions: queries, outputs, one row of k or v, scores.
pub(super) fn own_floats(dim: usize, group: usize, count: usize) -> usize {
    group * (2 * dim + count) + dim
}

/// One token's queries of a KV head.
pub(super) fn token(heads: &Heads<'_>, token: usize, position: usize) {
    let (dim, group, level) = (heads.dim(), heads.group(), heads.step.level);
    let first = heads.first(position);
    let count = heads.end(position) - first;
    // SAFETY: this worker's own scratch.
    let own = unsafe { heads.own.floats(own_floats(dim, group, count)) };
    let (queries, rest) = own.split_at_mut(group * dim);
    let (outs, rest) = rest.split_at_mut(group * dim);
    let (line, scores) = rest.split_at_mut(dim);
    // SAFETY: room for the group.
    unsafe { heads.load_queries(token, queries.as_mut_ptr()) };
    for p in 0..count {
        // SAFETY: a head of a live slot; the level was detected.
        unsafe {
            heads.load_line(0, first + p, line);
            score(level, queries, line, heads.scale(), &mut scores[p..], count);
        }
    }
    for (g, scores) in scores[..group * count].chunks_exact_mut(count).enumerate() {
        // SAFETY: the level was detected.
        unsafe {
            if let Some(cap) = heads.softcap() {
                soft_cap(level, scores, 1.0 / cap, cap);
            }
            softmax(level, scores, heads.sink(g));
        }
    }
    outs.fill(0.0);
    for p in 0..count {
        // SAFETY: as above.
        unsafe {
            heads.load_line(1, first + p, line);
            add(level, outs, line, &scores[p..], count);
        }
    }
    let out = &heads.step.out;
    let at = out.at(token, heads.kv_head * group * dim);
    // SAFETY: the group's heads of this token, which this chunk alone writes.
    unsafe { store_floats(out.dtype, at, outs) };
}

#[inline(always)]
fn score_body<const FMA: bool>(q: &[f32], k: &[f32], scale: f32, to: &mut [f32], step: usize) {
    for (g, q) in q.chunks_exact(k.len()).enumerate() {
        to[g * step] = scale * dot::<FMA>(q, k);
    }
}

#[inline(always)]
fn softmax_body<const FMA: bool>(scores: &mut [f32], sink: Option<f32>) {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for (i, score) in scores.iter().enumerate() {
        let lane = &mut lanes[i % LANES];
        *lane = if *score > *lane { *score } else { *lane };
    }
    let max = lanes.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sums = [0.0f32; LANES];
    for part in scores.chunks_mut(LANES) {
        for (score, sum) in part.iter_mut().zip(&mut sums) {
            *score = exp::<FMA>(*score - max);
            *sum += *score;
        }
    }
    let beside = sink.map_or(0.0, |sink| (sink - max).exp());
    let inverse = 1.0 / (sums.iter().sum::<f32>() + beside);
    scores.iter_mut().for_each(|score| *score *= inverse);
}

#[inline(always)]
fn add_body<const FMA: bool>(outs: &mut [f32], v: &[f32], weights: &[f32], step: usize) {
    for (g, out) in outs.chunks_exact_mut(v.len()).enumerate() {
        let weight = weights[g * step];
        for (out, v) in out.iter_mut().zip(v) {
            *out = fma::<FMA>(*v, weight, *out);
        }
    }
}

levels! {
    /// A group's scores for one key.
    fn score(q: &[f32], k: &[f32], scale: f32, to: &mut [f32], step: usize) = score_body;
}

levels! {
    /// Scores to weights that sum to 1, less what a sink takes.
    fn softmax(scores: &mut [f32], sink: Option<f32>) = softmax_body;
}

levels! {
    /// outs += weight · v for a group.
    fn add(outs: &mut [f32], v: &[f32], weights: &[f32], step: usize) = add_body;
}
