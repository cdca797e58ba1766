//! Log-probabilities of a prompt's tokens.
//!
//! The end of a prefill plan, from the last layer's output projection on, sees only the last token of
//! each row: gathers take it from values of every token, which are kept to the end of the plan. Where a
//! row asks for more, the last layer's attention runs again for every token (in the plan it is for the last ones
//! only), and the plan's own nodes after the gathers run again after the step, op by op, over
//! as many tokens at a time as they have rows for. The host waits for such a step. A step without such requests costs
//! nothing extra.

use device::logprob::Distribution;
use device::op::{Attention, Copy, Gather, LatentAttention};
use device::{Node, Op, Result, Tensor};
use engine::exec::{Score, Step};
use engine::request::Token;
use graph::Plan;
use graph::runner::Runners;
use rayon::prelude::*;

/// The log-probability of a token, and the likeliest tokens with theirs.
pub(crate) type Scored = (f32, Vec<(Token, f32)>);

/// The log-probabilities that every row of a step asked for; the step was launched and ran under `plan`.
pub(crate) fn observe(runners: &Runners, plan: &Plan, step: &Step) -> Result<Vec<Vec<Scored>>> {
    let Some(tail) = Tail::of(runners, plan) else { return Ok(Vec::new()) };
    if let Some(node) = &tail.attention {
        runners.device().run(runners.arena(), node)?;
    }
    let mut first = 0;
    let mut rows = Vec::with_capacity(step.rows.len());
    for row in &step.rows {
        let count = row.tokens().len().max(1) as u32;
        let scores = row.score().map(|score| tail.scores(first, score)).transpose()?;
        rows.push(scores.unwrap_or_default());
        first += count;
    }
    Ok(rows)
}

/// The logits after each token of the prompt that the last step fed. Valid until the next step is launched.
#[derive(Debug)]
pub struct PromptLogits<'a> {
    tail: Tail<'a>,
    tokens: u32,
}

impl<'a> PromptLogits<'a> {
    /// Of a step that fed one prompt of `tokens` tokens under `plan`; `None` for a plan that does not prefill.
    pub(crate) fn of(runners: &'a Runners, plan: &Plan, tokens: u32) -> Result<Option<Self>> {
        let Some(tail) = Tail::of(runners, plan) else { return Ok(None) };
        if let Some(node) = &tail.attention {
            runners.device().run(runners.arena(), node)?;
        }
        Ok(Some(PromptLogits { tail, tokens }))
    }

    /// The logits after tokens `first..first + count` of the step, a row of the vocabulary for each; waits for them. They
    /// are computed here, as many tokens at a time as the plan has rows for.
    ///
    /// # Panics
    /// If the step fed fewer tokens.
    pub fn read(&self, first: u32, count: u32) -> Result<Vec<f32>> {
        assert!(first + count <= self.tokens, "the step fed {} tokens", self.tokens);
        let (rows, logits) = (self.tail.rows, self.tail.logits);
        let mut all = Vec::with_capacity(count as usize * logits.cols as usize);
        for at in (0..count).step_by(rows as usize) {
            let some = rows.min(count - at);
            self.tail.run(first + at, some)?;
            let read = self.tail.read(logits, some)?;
            let dense = logits.stride == logits.cols;
            match dense && all.is_empty() {
                true => all = read,
                false => {
                    for row in read.chunks_exact(logits.stride as usize) {
                        all.extend_from_slice(&row[..logits.cols as usize]);
                    }
                }
            }
        }
        Ok(all)
    }
}

/// The end of a prefill plan.
#[derive(Debug)]
struct Tail<'a> {
    runners: &'a Runners,
    /// Attention of every token, where the plan has that of the last ones only.
    attention: Option<Node>,
    /// The values of every token from which the gathers take their rows.
    gathers: Vec<Gather>,
    /// From there to the logits.
    nodes: Vec<Node>,
    logits: Tensor,
    /// Rows it takes at a time.
    rows: u32,
}

impl<'a> Tail<'a> {
    fn of(runners: &'a Runners, plan: &Plan) -> Option<Tail<'a>> {
        let gather = |node: &Node| {
            let Op::Gather(gather) = &node.op else { return None };
            Some(gather.clone())
        };
        let nodes = plan.own_nodes();
        let (Node { op: Op::Sample(sample), .. }, nodes) = nodes.split_last()? else {
            return None;
        };
        let gathers: Vec<Gather> = nodes.iter().filter_map(gather).collect();
        let behind = nodes.iter().rposition(|node| gather(node).is_some())? + 1;
        let mut tail = nodes[behind..].to_vec();
        for node in &mut tail {
            // Uses the rows given here, not the step's live count, and no handoff from the node before.
            node.op.detach();
        }
        let attention = nodes.iter().find_map(seeing_all);
        let rows = gathers.iter().map(|gather| gather.y.rows).min()?;
        let logits = sample.logits;
        Some(Tail { runners, attention, gathers, nodes: tail, logits, rows })
    }

    /// Tokens `first..first + count`, at most as many as there are rows, take the place of rows.
    fn run(&self, first: u32, count: u32) -> Result<()> {
        let (device, arena) = (self.runners.device(), self.runners.arena());
        let copies = self.gathers.iter().map(|gather| gather_rows(gather, first, count));
        for node in copies.collect::<Vec<_>>().iter().chain(&self.nodes) {
            device.run(arena, node)?;
        }
        Ok(())
    }

    /// The first `count` rows of a tensor.
    fn read(&self, tensor: Tensor, count: u32) -> Result<Vec<f32>> {
        let bytes = tensor.dtype.bytes((count * tensor.stride) as usize) as u64;
        let raw = self.runners.device().read(self.runners.arena(), tensor.span.part(0, bytes))?;
        Ok(tensor.dtype.decode(&raw))
    }

    fn scores(&self, first: u32, score: &Score) -> Result<Vec<Scored>> {
        let mut scores = Vec::with_capacity(score.targets.len());
        for (targets, at) in score.targets.chunks(self.rows as usize).zip(0..) {
            let count = targets.len() as u32;
            self.run(first + at * self.rows, count)?;
            let logits = self.read(self.logits, count)?;
            let rows = logits.par_chunks_exact(self.logits.stride as usize).zip(targets);
            let cols = self.logits.cols as usize;
            scores.par_extend(
                rows.map(|(logits, &target)| logprob(&logits[..cols], target, score.top)),
            );
        }
        Ok(scores)
    }
}

/// Attention of every token, for a node that has that of the last ones only.
pub(crate) fn seeing_all(node: &Node) -> Option<Node> {
    let all = if let Op::Attention(op) = &node.op {
        op.last_only.then(|| Op::from(Attention { last_only: false, ..op.clone() }))
    } else if let Op::LatentAttention(op) = &node.op {
        op.last_only.then(|| Op::from(LatentAttention { last_only: false, ..op.clone() }))
    } else {
        None
    };
    all.map(|op| Node { op, ..node.clone() })
}

/// Tokens `first..first + count` instead of those that a gather takes.
pub(crate) fn gather_rows(gather: &Gather, first: u32, count: u32) -> Node {
    let row = gather.x.dtype.bytes(gather.x.stride as usize) as u64;
    let from = gather.x.span.part(u64::from(first) * row, u64::from(count) * row);
    let op = Op::Copy(Copy { from, to: gather.y.span.part(0, u64::from(count) * row) });
    Node { op, name: "prompt".into(), layer: None }
}

/// A token's log-probability and the likeliest ones, best first, the lowest index among equals.
fn logprob(logits: &[f32], target: Token, top: u32) -> (f32, Vec<(Token, f32)>) {
    let all = Distribution::of(logits);
    let of = |token: Token| all.logprob(logits[token as usize]);
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
