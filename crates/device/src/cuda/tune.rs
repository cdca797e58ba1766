//! Finds the fastest variant for every shape among some nodes, by measuring.

use super::launch::Target;
use super::lower::{exchange_bytes, scratch_bytes};
use super::tuned::{Choice, Tuned, candidates, shape};
use crate::op::{Fused, FusedKernel};
use crate::variant::{Pick, Variant};
use crate::{Arena, Device, Item, Node, Op, RecordOptions, Result};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A variant must save this share of the time of the rule's choice, and `OF_STEP` of the step's: less is noise.
const GAIN: f64 = 0.02;
const OF_STEP: f64 = 0.002;

/// Measures how long nodes take together.
pub trait Timer {
    /// Prepares all of these, so that timing one does not include a compilation.
    fn prepare(&mut self, nodes: &[Node]) -> Result<()>;
    /// The time of the nodes, run in order.
    fn time(&mut self, nodes: &[Node]) -> Result<Duration>;
}

/// Times by replaying a graph of the nodes.
#[derive(Debug)]
pub struct Replays<'a> {
    /// The device to run on.
    pub device: &'a Device,
    /// The memory the nodes point into.
    pub arena: &'a Arena,
    /// Replays; the shortest counts.
    pub rounds: u32,
}

impl Timer for Replays<'_> {
    fn prepare(&mut self, nodes: &[Node]) -> Result<()> {
        let items: Vec<Item> = nodes.iter().cloned().map(Item::Node).collect();
        self.device.prepare(&items, RecordOptions::default())
    }

    fn time(&mut self, nodes: &[Node]) -> Result<Duration> {
        let mut recording = self.device.record(self.arena, "tune", RecordOptions::default())?;
        for node in nodes {
            recording.push(Item::Node(node.clone()))?;
        }
        let Some(graph) = recording.finish()?.pop() else { return Ok(Duration::ZERO) };
        let mut best = Duration::MAX;
        for round in 0..=self.rounds {
            self.device.sync()?;
            let start = Instant::now();
            graph.replay()?;
            self.device.sync()?;
            // The first replay warms up instruction caches and address translation.
            if round > 0 {
                best = best.min(start.elapsed());
            }
        }
        Ok(best)
    }
}

/// The best variant for each shape among the nodes of a step. A variant is timed within the whole step, because the
/// step's time counts: a variant that is faster alone may leave no room for its neighbours to start beside it. The
/// best variant stays set while the next shapes are tried.
pub fn tune(
    nodes: &[Node],
    target: &Target,
    timer: &mut dyn Timer,
    progress: &mut dyn FnMut(&str, &Choice),
) -> Result<Tuned> {
    let mut step: Vec<Node> = nodes.iter().filter(|node| has_variants(&node.op)).cloned().collect();
    let all: Vec<usize> = (0..step.len()).collect();
    set_variant(&mut step, &all, None);
    let mut groups: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (at, node) in step.iter().enumerate() {
        groups.entry(shape(&node.op).unwrap_or_default()).or_default().push(at);
    }
    let trials = |step: &[Node], group: &[usize]| -> Vec<(Variant, Vec<Node>)> {
        let variants = candidates(&step[group[0]].op, target).into_iter();
        let all = variants.map(|variant| {
            let mut trial = step.to_vec();
            set_variant(&mut trial, group, Some(variant));
            (variant, trial)
        });
        // A variant that needs more scratch than there is cannot run.
        all.filter(|(_, trial)| fits(&trial[group[0]].op, target)).collect()
    };
    let first = |group: &Vec<usize>| {
        let one = trials(&step, group).into_iter().map(|(_, trial)| trial[group[0]].clone());
        one.collect::<Vec<_>>()
    };
    timer.prepare(&groups.values().flat_map(first).collect::<Vec<_>>())?;
    let mut tuned = Tuned::default();
    for (shape, group) in &groups {
        let alone: Vec<Node> = group.iter().map(|&at| step[at].clone()).collect();
        let rule = timer.time(&alone)?.as_nanos() as f64;
        let mut best = (None, 0.0);
        for (variant, trial) in trials(&step, group) {
            // In turns, so that a drifting clock favours neither.
            let whole = timer.time(&step)?.as_nanos() as f64;
            let saved = whole - timer.time(&trial)?.as_nanos() as f64;
            if saved > best.1 && saved > rule * GAIN && saved > whole * OF_STEP {
                best = (Some(variant), saved);
            }
        }
        let (variant, saved) = best;
        set_variant(&mut step, group, variant);
        let each = |nanos: f64| (nanos / group.len() as f64) as u32;
        let choice = Choice { variant, nanos: each(rule - saved), rule_nanos: each(rule) };
        progress(shape, &choice);
        tuned.insert(shape.clone(), choice);
    }
    Ok(tuned)
}

/// Layers as one node are measured against their members by `tune_layers`.
fn has_variants(op: &Op) -> bool {
    let layers = matches!(op, Op::Fused(Fused { kernel: FusedKernel::Layers { .. }, .. }));
    shape(op).is_some() && !layers
}

/// Whether all layers of a step are faster as one node: times `layers` as one node and as its members. `None` if
/// `target` has no kernel for them.
pub fn tune_layers(
    layers: &Op,
    target: &Target,
    timer: &mut dyn Timer,
) -> Result<Option<(String, Choice)>> {
    let Op::Fused(Fused { members, kernel: FusedKernel::Layers { exchange } }) = layers else {
        return Ok(None);
    };
    let room = exchange.map_or(0, |span| span.len);
    let fits = (1..=room).contains(&exchange_bytes(layers, target));
    let Some(shape) = shape(layers).filter(|_| fits) else { return Ok(None) };
    let node = |op: &Op| Node { op: op.clone(), name: op.name().into(), layer: None };
    let (members, one): (Vec<Node>, _) = (members.iter().map(node).collect(), [node(layers)]);
    timer.prepare(&members)?;
    timer.prepare(&one)?;
    let [rule, took] = [timer.time(&members)?, timer.time(&one)?].map(|t| t.as_nanos() as f64);
    let variant = (took < rule * (1.0 - GAIN)).then_some(Variant::OneNode);
    let nanos = if variant.is_none() { rule } else { took };
    let choice = Choice { variant, nanos: nanos as u32, rule_nanos: rule as u32 };
    Ok(Some((shape, choice)))
}

/// Sets the variant of some nodes, or leaves it to the rule.
fn set_variant(nodes: &mut [Node], group: &[usize], variant: Option<Variant>) {
    for &at in group {
        let set = nodes[at].op.set_pick(variant.map_or(Pick::Rule, Pick::Named));
        assert!(set, "only ops with variants are tuned");
    }
}

fn fits(op: &Op, target: &Target) -> bool {
    scratch_bytes(op, target) <= op.scratch().map_or(0, |span| span.len)
}
