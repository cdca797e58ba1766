//! What the model thought of a prompt: log-probabilities of its tokens, and their hidden states.
//!
//! A prefill plan keeps the residual stream of every token to its end and gathers the last ones for
//! the head. Where a row asks for more, the rest is looked at after the step: the plan's own nodes
//! behind the gather run again, op by op, over as many tokens at a time as the head has rows for; and
//! hidden states are read and normalised here. Such a step is waited for. A step that nobody asks
//! anything of pays nothing.

use crate::exec::{Score, Step};
use crate::request::{Pooling, Token};
use device::op::{Copy, Norm};
use device::{DType, Node, Op, Result, Tensor};
use graph::Plan;
use graph::runner::Runners;
use half::{bf16, f16};
use rayon::prelude::*;

/// The log-probability of a token, and the likeliest tokens with theirs.
type Scored = (f32, Vec<(Token, f32)>);

/// What was observed of a row.
#[derive(Debug, Default)]
pub(super) struct Observed {
    pub(super) scores: Vec<Scored>,
    pub(super) hidden: Option<Vec<f64>>,
}

/// What every row of a step asked for; the step was launched and ran under `plan`.
pub(super) fn observe(runners: &Runners, plan: &Plan, step: &Step) -> Result<Vec<Observed>> {
    let Some(tail) = Tail::of(runners, plan) else { return Ok(Vec::new()) };
    let mut first = 0;
    let mut rows = Vec::with_capacity(step.rows.len());
    for row in &step.rows {
        let count = row.tokens.len().max(1) as u32;
        let scores = row.score.as_ref().map(|score| tail.scores(first, score)).transpose()?;
        let hidden = row.hidden.map(|pooling| tail.hidden(first, count, pooling)).transpose()?;
        rows.push(Observed { scores: scores.unwrap_or_default(), hidden });
        first += count;
    }
    Ok(rows)
}

/// The end of a prefill plan.
struct Tail<'a> {
    runners: &'a Runners,
    /// Every token's last state.
    stream: Tensor,
    /// Where the head takes its rows from.
    gathered: Tensor,
    /// From there to the logits.
    nodes: Vec<Node>,
    logits: Tensor,
    norm: Option<Norm>,
}

impl<'a> Tail<'a> {
    fn of(runners: &'a Runners, plan: &Plan) -> Option<Tail<'a>> {
        let (at, gather) = plan.nodes.iter().enumerate().find_map(|(at, node)| match &node.op {
            Op::Gather(gather) => Some((at, gather)),
            _ => None,
        })?;
        let mut nodes = plan.nodes[at + 1..].to_vec();
        let Some(Op::Sample(sample)) = nodes.pop().map(|node| node.op) else { return None };
        let norm = nodes.iter().find_map(|node| match &node.op {
            Op::RmsNorm(op) => Some(op.norm),
            Op::Linear(op) => op.norm,
            _ => None,
        });
        for node in &mut nodes {
            // As many rows as there are here, not as the step had.
            if let Op::Linear(linear) = &mut node.op {
                linear.live = None;
            }
        }
        let (stream, gathered, logits) = (gather.x, gather.y, sample.logits);
        Some(Tail { runners, stream, gathered, nodes, logits, norm })
    }

    /// Rows `first..first + count` of a tensor.
    fn read(&self, tensor: Tensor, first: u32, count: u32) -> Result<Vec<f32>> {
        let bytes = |rows: u32| tensor.dtype.bytes((rows * tensor.stride) as usize) as u64;
        let span = tensor.span.part(bytes(first), bytes(count));
        let raw = self.runners.device().read(self.runners.arena(), span)?;
        Ok(floats(tensor.dtype, &raw))
    }

    fn scores(&self, first: u32, score: &Score) -> Result<Vec<Scored>> {
        let (device, arena) = (self.runners.device(), self.runners.arena());
        let row = self.stream.dtype.bytes(self.stream.stride as usize) as u64;
        let mut scores = Vec::with_capacity(score.targets.len());
        for (targets, at) in score.targets.chunks(self.gathered.rows as usize).zip(0..) {
            let (from, count) = (first + at * self.gathered.rows, targets.len() as u32);
            let copy = Op::Copy(Copy {
                from: self.stream.span.part(u64::from(from) * row, u64::from(count) * row),
                to: self.gathered.span.part(0, u64::from(count) * row),
            });
            device.run(arena, &Node { op: copy, name: "prompt".into(), layer: None })?;
            for node in &self.nodes {
                device.run(arena, node)?;
            }
            let logits = self.read(self.logits, 0, count)?;
            let rows = logits.par_chunks_exact(self.logits.stride as usize).zip(targets);
            scores.par_extend(rows.map(|(logits, &target)| logprob(logits, target, score.top)));
        }
        Ok(scores)
    }

    /// Hidden states after the last norm: the sum of some tokens' or the last one's.
    fn hidden(&self, first: u32, count: u32, pooling: Pooling) -> Result<Vec<f64>> {
        let (first, count) = match pooling {
            Pooling::Mean => (first, count),
            Pooling::Last => (first + count - 1, 1),
        };
        let width = self.stream.cols as usize;
        let weight = self.norm.map(|norm| self.read(norm.weight, 0, 1)).transpose()?;
        let eps = f64::from(self.norm.map_or(0.0, |norm| norm.eps));
        let mut sum = vec![0.0; width];
        for row in self.read(self.stream, first, count)?.chunks_exact(width) {
            let square = |x: &f32| f64::from(*x) * f64::from(*x);
            let mean = row.iter().map(square).sum::<f64>() / width as f64;
            let scale = 1.0 / (mean + eps).sqrt();
            for (i, (sum, x)) in sum.iter_mut().zip(row).enumerate() {
                *sum += match &weight {
                    Some(weight) => f64::from(*x) * scale * f64::from(weight[i]),
                    None => f64::from(*x),
                };
            }
        }
        Ok(sum)
    }
}

/// A token's log-probability and the likeliest ones, best first, the lowest index among equals.
fn logprob(logits: &[f32], target: Token, top: u32) -> (f32, Vec<(Token, f32)>) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
    let of = |token: Token| (f64::from(logits[token as usize] - max) - total.ln()) as f32;
    let mut best: Vec<Token> = Vec::with_capacity(top as usize + 1);
    for (token, &logit) in (0..).zip(logits) {
        let worse = |&other: &Token| logits[other as usize] < logit;
        let place = best.iter().position(worse).unwrap_or(best.len());
        if place < top as usize {
            best.insert(place, token);
            best.truncate(top as usize);
        }
    }
    (of(target), best.into_iter().map(|token| (token, of(token))).collect())
}

/// Stored numbers as f32.
pub(super) fn floats(dtype: DType, raw: &[u8]) -> Vec<f32> {
    let halves = |convert: fn([u8; 2]) -> f32| {
        raw.as_chunks::<2>().0.iter().map(|bytes| convert(*bytes)).collect()
    };
    match dtype {
        DType::BF16 => halves(|b| bf16::from_le_bytes(b).to_f32()),
        DType::F16 => halves(|b| f16::from_le_bytes(b).to_f32()),
        _ => raw.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::logprob;

    #[test]
    fn the_likeliest_come_first_and_add_up_to_one() {
        let (of, top) = logprob(&[0.0, 3.0, 1.0, 3.0], 2, 3);
        assert_eq!(top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 3, 2]);
        assert_eq!(of, top[2].1);
        let all: f32 = logprob(&[0.0, 3.0, 1.0, 3.0], 0, 4).1.iter().map(|(_, l)| l.exp()).sum();
        assert!((all - 1.0).abs() < 1e-6);
        assert!(logprob(&[0.0, -1.0], 0, 0).1.is_empty());
    }
}
