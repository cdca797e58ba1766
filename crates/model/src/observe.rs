//! What the model thought of a prompt: log-probabilities of its tokens, and their hidden states.
//!
//! The end of a prefill plan, from the last layer's output projection on, sees only the last token of
//! each row: gathers take it from values of every token, which are kept to the end of the plan. Where a
//! row asks for more, the last layer's attention runs again for every token (in the plan it is for the last ones
//! only), and the plan's own nodes behind the gathers run again after the step, op by op, over
//! as many tokens at a time as they have rows for; hidden states are read and normalised here. Such a
//! step is waited for. A step that nobody asks anything of pays nothing.

use device::op::{Attention, Copy, Gather, Norm};
use device::{DType, Node, Op, Result, Tensor};
use engine::exec::{Score, Step};
use engine::request::{Pooling, Token};
use graph::Plan;
use graph::runner::Runners;
use half::{bf16, f16};
use rayon::prelude::*;

/// The log-probability of a token, and the likeliest tokens with theirs.
type Scored = (f32, Vec<(Token, f32)>);

/// What was observed of a row.
#[derive(Debug, Default)]
pub(crate) struct Observed {
    pub(crate) scores: Vec<Scored>,
    pub(crate) hidden: Option<Vec<f64>>,
}

/// What every row of a step asked for; the step was launched and ran under `plan`.
pub(crate) fn observe(runners: &Runners, plan: &Plan, step: &Step) -> Result<Vec<Observed>> {
    let Some(tail) = Tail::of(runners, plan) else { return Ok(Vec::new()) };
    if let Some(node) = &tail.attention {
        runners.device().run(runners.arena(), node)?;
    }
    let mut first = 0;
    let mut rows = Vec::with_capacity(step.rows.len());
    for row in &step.rows {
        let count = row.tokens().len().max(1) as u32;
        let scores = row.score().map(|score| tail.scores(first, score)).transpose()?;
        let hidden = row.hidden().map(|pooling| tail.hidden(first, count, pooling)).transpose()?;
        rows.push(Observed { scores: scores.unwrap_or_default(), hidden });
        first += count;
    }
    Ok(rows)
}

/// The end of a prefill plan.
struct Tail<'a> {
    runners: &'a Runners,
    /// Attention of every token, where the plan has that of the last ones only.
    attention: Option<Node>,
    /// What every token has, and where the end takes its rows from.
    gathers: Vec<Gather>,
    /// From there to the last state of each row.
    layer: Vec<Node>,
    state: Tensor,
    /// From there to the logits.
    head: Vec<Node>,
    logits: Tensor,
    norm: Option<Norm>,
    /// Rows it takes at a time.
    rows: u32,
}

impl<'a> Tail<'a> {
    fn of(runners: &'a Runners, plan: &Plan) -> Option<Tail<'a>> {
        let gather = |node: &Node| match &node.op {
            Op::Gather(gather) => Some(gather.clone()),
            _ => None,
        };
        let (Node { op: Op::Sample(sample), .. }, nodes) = plan.nodes.split_last()? else {
            return None;
        };
        let gathers: Vec<Gather> = nodes.iter().filter_map(gather).collect();
        let behind = nodes.iter().rposition(|node| gather(node).is_some())? + 1;
        let mut layer = nodes[behind..].to_vec();
        for node in &mut layer {
            // As many rows as there are here, not as the step had; and each by itself.
            node.op.detach();
        }
        let every = |node: &Node| match &node.op {
            Op::Attention(op) if op.last_only => {
                let op = Op::Attention(Attention { last_only: false, ..op.clone() });
                Some(Node { op, ..node.clone() })
            }
            _ => None,
        };
        let attention = nodes.iter().find_map(every);
        // The last norm is the head's own or a node before it.
        let ops: Vec<&Op> = layer.iter().map(|node| &node.op).collect();
        let (state, norm, nodes) = match ops[..] {
            [.., Op::RmsNorm(norm), _] => (norm.x, Some(norm.norm), 2),
            [.., head] => match head.members() {
                [Op::RmsNorm(norm), ..] => (norm.x, Some(norm.norm), 1),
                [Op::Linear(head), ..] => (head.x, None, 1),
                _ => return None,
            },
            [] => return None,
        };
        let head = layer.split_off(layer.len() - nodes);
        let rows = gathers.iter().map(|gather| gather.y.rows).min()?;
        let logits = sample.logits;
        Some(Tail { runners, attention, gathers, layer, state, head, logits, norm, rows })
    }

    /// Tokens `first..first + count`, at most as many as there are rows, take the place of rows, and `nodes` run.
    fn run(&self, first: u32, count: u32, nodes: &[&[Node]]) -> Result<()> {
        let (device, arena) = (self.runners.device(), self.runners.arena());
        let copies = self.gathers.iter().map(|gather| {
            let row = gather.x.dtype.bytes(gather.x.stride as usize) as u64;
            let from = gather.x.span.part(u64::from(first) * row, u64::from(count) * row);
            let op = Op::Copy(Copy { from, to: gather.y.span.part(0, u64::from(count) * row) });
            Node { op, name: "prompt".into(), layer: None }
        });
        for node in copies.collect::<Vec<_>>().iter().chain(nodes.iter().copied().flatten()) {
            device.run(arena, node)?;
        }
        Ok(())
    }

    /// The first `count` rows of a tensor.
    fn read(&self, tensor: Tensor, count: u32) -> Result<Vec<f32>> {
        let bytes = tensor.dtype.bytes((count * tensor.stride) as usize) as u64;
        let raw = self.runners.device().read(self.runners.arena(), tensor.span.part(0, bytes))?;
        Ok(floats(tensor.dtype, &raw))
    }

    fn scores(&self, first: u32, score: &Score) -> Result<Vec<Scored>> {
        let mut scores = Vec::with_capacity(score.targets.len());
        for (targets, at) in score.targets.chunks(self.rows as usize).zip(0..) {
            let count = targets.len() as u32;
            self.run(first + at * self.rows, count, &[&self.layer, &self.head])?;
            let logits = self.read(self.logits, count)?;
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
        let width = self.state.cols as usize;
        let weight = self.norm.map(|norm| self.read(norm.weight, 1)).transpose()?;
        let eps = f64::from(self.norm.map_or(0.0, |norm| norm.eps));
        let mut sum = vec![0.0; width];
        for at in (0..count).step_by(self.rows as usize) {
            let some = self.rows.min(count - at);
            self.run(first + at, some, &[&self.layer])?;
            for row in self.read(self.state, some)?.chunks_exact(width) {
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
pub(crate) fn floats(dtype: DType, raw: &[u8]) -> Vec<f32> {
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
