//! In a step that verifies drafts, what makes them stands between the prologue and everything that reads tokens: an op that
//! finds them in the sequences, or passes of a drafter. In other steps that drafter is fed the tokens of the step; one that reads
//! hidden states is fed after every step. A pass is a plan of its own, with its own shape and tables; a step's plan has its
//! nodes.

use super::{Bindings, CompileError, CompileTarget, plan};
use crate::plan::{Pass, PlacedValue};
use crate::program::{Program, Step};
use crate::{Form, Phase, Plan, ShapeKey};
use device::op::Draft;
use device::operand::Unset;
use device::{Node, Op};

/// The steps of a program, with the drafter after the prologue if the key has drafts that no model makes.
pub(crate) fn draft(mut steps: Vec<Step>, program: &Program, key: &ShapeKey) -> Vec<Step> {
    if key.q_len > 1 && program.is_step() && program.drafter.is_none() {
        let op = Draft { state: Unset, rows: Unset, q_len: Unset };
        let step = Step { op: op.into(), name: "draft".into(), layer: None, mark: None };
        steps.insert(1, step);
    }
    steps
}

/// A pass of a model that drafts.
pub(crate) struct Drafting<'a> {
    /// What it computes.
    pub(crate) program: &'a Program,
    /// Its shape.
    pub(crate) key: ShapeKey,
    /// The draft that it makes, from 0; `None` if it is only fed.
    draft: Option<u32>,
}

/// The pass after a step, if there is one.
pub(crate) fn pass_after<'a>(program: &'a Program, key: &ShapeKey) -> Option<Drafting<'a>> {
    let drafter = program.drafter.as_ref().filter(|drafter| drafter.features.is_some())?;
    Some(Drafting { program: &drafter.feed, key: key.with(Form::Once), draft: None })
}

/// The passes of a step behind its prologue, in order.
pub(crate) fn passes<'a>(program: &'a Program, key: &ShapeKey) -> Vec<Drafting<'a>> {
    let Some(drafter) = &program.drafter else { return Vec::new() };
    let (rows, each) = (key.rows, drafter.each());
    let first = match each {
        1 => ShapeKey::decode(rows),
        each => ShapeKey::prefill(rows * each, rows),
    };
    if key.q_len == 1 {
        let shape = match key.phase {
            Phase::Prefill => *key,
            Phase::Decode => first.with_fixed(key.fixed),
        };
        let feed = |program| Drafting { program, key: shape.with(Form::Once), draft: None };
        let fed = drafter.fed(key).filter(|_| drafter.features.is_none());
        return fed.map(feed).into_iter().collect();
    }
    let pass = |draft| {
        let (program, shape) = match draft {
            0 => (&drafter.first, first),
            _ => (&drafter.next, ShapeKey::decode(rows)),
        };
        Drafting { program, key: shape.with_fixed(key.fixed), draft: Some(draft) }
    };
    (0..key.q_len - 1).map(pass).collect()
}

/// Puts the passes of a step into its plan: behind the prologue, and at the end.
pub(super) fn add_passes(
    step: Plan,
    program: &Program,
    target: &CompileTarget,
    bindings: &Bindings,
) -> Result<Plan, CompileError> {
    let passes = passes(program, &step.key);
    let after = pass_after(program, &step.key);
    if passes.is_empty() && after.is_none() {
        return Ok(step);
    }
    let exchanged = bindings.state.exchanged().ok_or_else(|| CompileError::Binding {
        what: "tables for a model that drafts".into(),
        problem: "not bound".into(),
    })?;
    let drafting = Bindings { state: exchanged, ..bindings.clone() };
    let mut all = step.prefix(1);
    all.values.clear();
    let mut next: Option<Plan> = None;
    for pass in passes {
        let made = match (pass.draft, &next) {
            // Every draft but the first is made by the same plan.
            (Some(2..), Some(same)) => same.clone(),
            // Prompts are fed as the step feeds them.
            (None, _) if step.key.phase == Phase::Prefill => {
                plan(pass.program, target, &pass.key, bindings)?
            }
            (None | Some(_), _) => plan(pass.program, target, &pass.key, &drafting)?,
        };
        next = Some(made.clone());
        let made = named(made, pass.draft, step.key.q_len.max(2) - 1);
        let nodes = all.nodes.len()..all.nodes.len() + made.nodes.len();
        all.passes.push(Pass { nodes, key: pass.key });
        append(&mut all, made);
    }
    let rest = Plan {
        nodes: step.nodes[1..].to_vec(),
        breaks: step.breaks.iter().map(|node| node - 1).collect(),
        splits: step.splits.iter().map(|node| node - 1).collect(),
        values: step.values.into_iter().map(|value| moved(value, |node| node - 1)).collect(),
        ..all.prefix(0)
    };
    all.workspace = all.workspace.max(step.workspace);
    append(&mut all, rest);
    if let Some(pass) = after {
        // Results of the step are computed from its workspace afterwards.
        let (all_bytes, own) = (bindings.workspace.len, step.workspace);
        let workspace = bindings.workspace.part(own, all_bytes.saturating_sub(own));
        let made =
            plan(pass.program, target, &pass.key, &Bindings { workspace, ..drafting.clone() })?;
        let made = named(Plan { workspace: own + made.workspace, ..made }, None, 1);
        let nodes = all.nodes.len()..all.nodes.len() + made.nodes.len();
        all.passes.push(Pass { nodes, key: pass.key });
        append(&mut all, made);
    }
    Ok(all)
}

/// A pass's plan, its nodes and values named by the draft, with the number of that draft in the ops that ask for it.
fn named(mut plan: Plan, draft: Option<u32>, drafts: u32) -> Plan {
    let pass = draft.map_or("feed".to_owned(), |draft| format!("draft{}", draft + 1));
    for index in 0..plan.nodes.len() {
        let name = format!("{pass}.{}", plan.node_name(index));
        let Node { op, .. } = &mut plan.nodes[index];
        if let Op::DraftRows(rows) = op {
            rows.drafts = drafts;
        }
        if let (Op::Propose(propose), Some(draft)) = (op, draft) {
            (propose.index, propose.drafts) = (draft, drafts);
        }
        (plan.nodes[index].name, plan.nodes[index].layer) = (name, None);
    }
    plan.values.iter_mut().for_each(|value| value.name = format!("{pass}.{}", value.name));
    plan
}

fn moved(value: PlacedValue, by: impl Fn(usize) -> usize) -> PlacedValue {
    PlacedValue { first: by(value.first), last: by(value.last), ..value }
}

/// Adds the nodes of `other` at the end.
fn append(plan: &mut Plan, other: Plan) {
    let before = plan.nodes.len();
    plan.nodes.extend(other.nodes);
    plan.breaks.extend(other.breaks.iter().map(|node| node + before));
    plan.splits.extend(other.splits.iter().map(|node| node + before));
    plan.values.extend(other.values.into_iter().map(|value| moved(value, |node| node + before)));
    plan.workspace = plan.workspace.max(other.workspace);
}
