//! Finds the fastest variant for every shape among some nodes, by measuring.

use super::launch::Target;
use super::lower::scratch_bytes;
use super::tuned::{Choice, Tuned, candidates, shape};
use crate::{Arena, Device, Item, Node, Op, RecordOptions, Result};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A variant must be this much faster than the rule's own choice: less is noise.
const GAIN: f64 = 0.02;

/// Says how long nodes take together.
pub trait Timer {
    /// Gets all of these ready, so that timing one does not wait for a compiler.
    fn prepare(&mut self, nodes: &[Node]) -> Result<()>;
    /// The time of the nodes one after the other.
    fn time(&mut self, nodes: &[Node]) -> Result<Duration>;
}

/// Times by replaying a graph of the nodes.
#[derive(Debug)]
pub struct Replays<'a> {
    /// Where.
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
            // The first warms instructions and translations.
            if round > 0 {
                best = best.min(start.elapsed());
            }
        }
        Ok(best)
    }
}

/// The best variant for each shape among the nodes. Nodes of a shape are timed together, as they are in a
/// step: each reads weights of its own, so nothing is in the cache that would not be there.
pub fn tune(
    nodes: &[Node],
    target: &Target,
    timer: &mut dyn Timer,
    progress: &mut dyn FnMut(&str, &Choice),
) -> Result<Tuned> {
    let mut groups: BTreeMap<String, Vec<&Node>> = BTreeMap::new();
    for node in nodes {
        if let Some(shape) = shape(&node.op) {
            groups.entry(shape).or_default().push(node);
        }
    }
    let trials = |group: &[&Node]| -> Vec<(String, Vec<Node>)> {
        let names = candidates(&group[0].op, target).into_iter();
        let all = names.map(|name| (name.clone(), with_variant(group, &name)));
        // A variant that wants more scratch than there is would run as something else.
        all.filter(|(_, nodes)| fits(&nodes[0].op, target)).collect()
    };
    let first = |nodes: Vec<Node>| nodes.into_iter().next();
    let all = groups.values().flat_map(|group| trials(group));
    timer.prepare(&all.filter_map(|(_, nodes)| first(nodes)).collect::<Vec<_>>())?;
    let mut tuned = Tuned::default();
    for (shape, group) in &groups {
        let each = |time: Duration| time.as_nanos() as f64 / group.len() as f64;
        let rule = each(timer.time(&with_variant(group, ""))?);
        let mut best = (String::new(), rule);
        for (name, nodes) in trials(group) {
            let took = each(timer.time(&nodes)?);
            if took < best.1 && took < rule * (1.0 - GAIN) {
                best = (name, took);
            }
        }
        let (variant, took) = best;
        let choice = Choice { variant, nanos: took as u32, rule_nanos: rule as u32 };
        progress(shape, &choice);
        tuned.insert(shape.clone(), choice);
    }
    Ok(tuned)
}

/// The nodes with a variant asked for; the empty one is the rule's.
fn with_variant(nodes: &[&Node], name: &str) -> Vec<Node> {
    let mut nodes: Vec<Node> = nodes.iter().map(|node| (*node).clone()).collect();
    for node in &mut nodes {
        match &mut node.op {
            Op::Linear(op) => op.variant = Some(name.into()),
            Op::Attention(op) => op.variant = Some(name.into()),
            _ => {}
        }
    }
    nodes
}

fn fits(op: &Op, target: &Target) -> bool {
    let room = match op {
        Op::Linear(op) => op.scratch,
        Op::Attention(op) => op.scratch,
        _ => None,
    };
    scratch_bytes(op, target) <= room.map_or(0, |span| span.len)
}
