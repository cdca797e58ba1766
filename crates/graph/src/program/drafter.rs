//! A drafter beside the model that verifies: a smaller model, or layers that read hidden states of that model. It is several programs
//! over the same weights: what it does in steps without drafts, for the first draft, and for each further one. Its caches have pages of the same numbers as
//! those of the model that verifies, so wherever a sequence's pages go, its go with them.

use super::{Dim, Program, ProgramError, ProgramOp, Step, Value, ValueId, WeightRef};
use crate::{Phase, ShapeKey};
use device::op::{DraftRows, Gather, Kept, Tap};
use device::operand::Unset;
use device::step::FeatureShape;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The programs of a drafter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Drafter {
    /// Writes the keys and values of the tokens that a prefill step feeds; after every step, if it reads hidden states.
    pub feed: Program,
    /// Those of the last tokens of each row, in a decode step without drafts, if it reads none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follow: Option<Program>,
    /// Makes the first draft, of the last tokens of each row.
    pub first: Program,
    /// Makes each further draft, of the one before.
    pub next: Program,
    /// Decode steps of more rows never have drafts; they feed it nothing.
    pub most_rows: u32,
    /// The hidden states that it reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub features: Option<FeatureShape>,
}

/// Tokens of each row that a model which drafts is fed first: the one that is known, and the one before it, which may have been
/// the last draft of a step that accepted all of them. Nothing was drafted after it then, so it has no keys.
const EACH: u32 = 2;

impl Drafter {
    /// The programs of a model whose `next` ends with a draft of each row, for decode steps of up to `most_rows` rows.
    pub fn new(next: Program, most_rows: u32) -> Drafter {
        let mut first = next.clone();
        begin(&mut first, EACH, 0);
        let [feed, follow] = [&next, &first].map(|program| {
            let mut part = Program { steps: written(program), ..program.clone() };
            part.drop_unused();
            part
        });
        Drafter { feed, follow: Some(follow), first, next, most_rows, features: None }
    }

    /// The programs of a drafter that reads hidden states: `feed` follows every step, `first` makes a draft of what
    /// the last step kept, `next` of the draft before.
    pub fn reading(
        mut feed: Program,
        mut first: Program,
        next: Program,
        features: FeatureShape,
    ) -> Drafter {
        feed.steps = written(&feed);
        feed.drop_unused();
        begin(&mut first, 1, 1);
        let (follow, most_rows, features) = (None, 0, Some(features));
        Drafter { feed, follow, first, next, most_rows, features }
    }

    /// Tokens of each row that the first program feeds.
    pub(crate) fn each(&self) -> u32 {
        let each = self.first.steps.iter().find_map(|step| {
            let ProgramOp::DraftRows(rows) = &step.op else { return None };
            Some(rows.each)
        });
        each.unwrap_or(1)
    }

    /// What steps of a key without drafts run of it, if anything.
    pub(crate) fn fed(&self, key: &ShapeKey) -> Option<&Program> {
        match key.phase {
            Phase::Prefill => Some(&self.feed),
            Phase::Decode => self.follow.as_ref().filter(|_| key.rows <= self.most_rows),
        }
    }

    pub(super) fn programs_mut(&mut self) -> impl Iterator<Item = &mut Program> {
        [&mut self.feed, &mut self.first, &mut self.next].into_iter().chain(&mut self.follow)
    }

    fn programs(&self) -> impl Iterator<Item = &Program> {
        [&self.feed, &self.first, &self.next].into_iter().chain(&self.follow)
    }
}

/// Puts in front what derives the rows of a first pass.
fn begin(program: &mut Program, each: u32, behind: u32) {
    let op = DraftRows { each, behind, state: Unset, rows: Unset, drafts: Unset };
    let step = Step { op: op.into(), name: "rows".into(), layer: None, mark: None };
    program.steps.insert(0, step);
}

/// The steps that caches and tables are written by, and those whose results they read.
fn written(program: &Program) -> Vec<Step> {
    let mut needed = BTreeSet::new();
    let mut steps: Vec<Step> = Vec::new();
    for step in program.steps.iter().rev() {
        let made = step.op.made().is_some_and(|value| needed.contains(&value));
        let writes = |op: &ProgramOp| {
            matches!(op, ProgramOp::RopeKv(_) | ProgramOp::LatentKv(_) | ProgramOp::DraftRows(_))
        };
        if made || writes(&step.op) {
            needed.extend(step.op.reads());
            steps.push(step.clone());
        }
    }
    steps.reverse();
    steps
}

impl Program {
    /// The same with a model that drafts. That model's programs were built on the caches and rotations of this one
    /// ([`super::ProgramBuilder::beside`]).
    pub fn with_drafter(mut self, drafter: Drafter) -> Result<Program, ProgramError> {
        self.caches = drafter.next.caches.clone();
        self.ropes = drafter.next.ropes.clone();
        self.drafter = Some(Box::new(drafter));
        self.check()?;
        Ok(self)
    }

    /// Keeps the states that enter some layers for a drafter, one after the other; returns how many columns they have.
    pub fn tap(&mut self, layers: &[u32]) -> Result<u32, ProgramError> {
        let mut column = 0;
        for &layer in layers {
            let missing = || ProgramError::Tap { layer };
            let first = self.steps.iter().position(|step| step.layer == Some(layer));
            let at = first.ok_or_else(missing)?;
            let x = self.steps[at].op.reads().first().copied().ok_or_else(missing)?;
            let op = Tap { x, to: Kept::Token(column), state: Unset };
            let name = format!("tap{layer}");
            self.steps.insert(at, Step { op: op.into(), name, layer: None, mark: None });
            column += self.value(x).cols;
        }
        Ok(column)
    }

    /// Keeps the states that the head reads for a drafter, of every token; returns how many columns they have. Where only the
    /// last token of each row went through the last layer, all of them do then.
    pub fn tap_last(&mut self) -> Result<u32, ProgramError> {
        let missing = ProgramError::Tap { layer: self.shape.layers };
        let heads = |step: &Step| self.reads_sampled(step);
        let Some(head) = self.steps.iter().position(heads) else { return Err(missing) };
        let Some(mut h) = self.steps[head].op.reads().first().copied() else { return Err(missing) };
        let gathers: Vec<(ValueId, ValueId)> = self.steps[..head]
            .iter()
            .filter_map(|step| {
                let ProgramOp::Gather(gather) = &step.op else { return None };
                Some((gather.x, gather.y))
            })
            .collect();
        let head = self.steps[head].name.clone();
        self.steps.retain(|step| !matches!(step.op, ProgramOp::Gather(_)));
        for (x, y) in gathers {
            self.steps.iter_mut().for_each(|step| step.op.redirect(y, x));
            h = if h == y { x } else { h };
        }
        let Some(at) = self.steps.iter().position(|step| step.name == head) else {
            return Err(missing);
        };
        for made in self.steps[..at].iter().filter_map(|step| step.op.made()) {
            self.values[made.0 as usize].rows = Dim::Tokens;
        }
        let Value { cols, dtype, .. } = *self.value(h);
        let last = ValueId(self.values.len() as u32);
        self.values.push(Value { name: "last_state".into(), rows: Dim::Rows, cols, dtype });
        self.steps[at].op.redirect(h, last);
        let gather = Gather { index: Unset, x: h, y: last };
        let tap = Tap { x: h, to: Kept::Token(0), state: Unset };
        for (op, name) in [(ProgramOp::from(gather), "last_state"), (tap.into(), "tap_last")] {
            self.steps.insert(at, Step { op, name: name.into(), layer: None, mark: None });
        }
        self.drop_unused();
        Ok(cols)
    }

    /// Removes values that no step makes or reads; the others move up.
    fn drop_unused(&mut self) {
        let made = self.steps.iter().filter_map(|step| step.op.made());
        let read = self.steps.iter().flat_map(|step| step.op.reads());
        let used: BTreeSet<ValueId> = made.chain(read).collect();
        let mut values = Vec::with_capacity(used.len());
        // Ascending, so that a place was left before another value takes it.
        for id in used {
            let to = ValueId(values.len() as u32);
            values.push(self.value(id).clone());
            if to != id {
                self.steps.iter_mut().for_each(|step| step.op.rename(id, to));
            }
        }
        self.values = values;
    }

    /// Whether a step is the linear that the sampled logits come from.
    fn reads_sampled(&self, step: &Step) -> bool {
        let sampled = self.steps.iter().find_map(|step| {
            let ProgramOp::Sample(sample) = &step.op else { return None };
            Some(sample.logits)
        });
        let last = self.steps.iter().rev().find(|step| matches!(step.op, ProgramOp::Linear(_)));
        sampled.is_some() && last.is_some_and(|last| last.op.made() == step.op.made())
    }

    /// The weights of this program and of its drafter, each once.
    pub(crate) fn all_weights(&self) -> impl Iterator<Item = &WeightRef> {
        // What a head makes of hidden states, it does when it is fed.
        let parts = self.drafter.iter().flat_map(|drafter| [&drafter.first, &drafter.feed]);
        let drafted = parts.flat_map(|part| &part.weights);
        let own = self.weights.iter().map(|weight| weight.name.as_str());
        let mut seen: BTreeSet<&str> = own.collect();
        let new = drafted.filter(move |weight| seen.insert(weight.name.as_str()));
        self.weights.iter().chain(new)
    }

    /// Ops of a step with `drafts` drafts.
    pub(crate) fn longest(&self, drafts: u32) -> u64 {
        let each = self.drafter.as_ref().map_or(0, |drafter| drafter.first.steps.len() as u64);
        self.steps.len() as u64 + u64::from(drafts) * each
    }

    /// Whether it is a whole step: whether it ends with a sampler, or publishes vectors.
    pub(crate) fn is_step(&self) -> bool {
        let ends = |op: &ProgramOp| matches!(op, ProgramOp::Sample(_) | ProgramOp::Publish(_));
        self.steps.iter().any(|step| ends(&step.op))
    }

    /// Whether it is the part of a step that drafts, or that a head is fed by.
    pub(super) fn drafts(&self) -> bool {
        let part = |op: &ProgramOp| {
            matches!(op, ProgramOp::Propose(_) | ProgramOp::Recall(_) | ProgramOp::Follow(_))
        };
        self.steps.iter().any(|step| part(&step.op))
    }

    /// Refuses programs that draft and do not fit this one.
    pub(super) fn check_drafter(&self) -> Result<(), ProgramError> {
        for program in self.drafter.iter().flat_map(|drafter| drafter.programs()) {
            let same = program.caches == self.caches && program.ropes == self.ropes;
            // What drafts feeds tokens that may be rejected, one by one.
            let carries = !program.carries.is_empty();
            if !same || carries || program.drafter.is_some() || program.is_step() {
                return Err(ProgramError::Drafter { program: program.name.clone() });
            }
            program.check_body()?;
        }
        Ok(())
    }
}
