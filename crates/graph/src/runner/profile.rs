//! Device times of the nodes of some steps (`--profile-steps`). Such a step runs op by op, with a mark after every node; the
//! others replay as always.

use crate::backend::Context;
use crate::{Plan, ShapeKey};
use device::Result;
use std::ops::RangeInclusive;
use std::time::Instant;

/// What was measured of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfiledStep {
    /// The launch.
    pub number: u64,
    /// What it ran under.
    pub key: ShapeKey,
    /// When it was launched, in microseconds since the profile began.
    pub at: f64,
    /// Its nodes, in order.
    pub nodes: Vec<ProfiledNode>,
}

/// What was measured of a node.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfiledNode {
    /// Its layer and name.
    pub name: String,
    /// The op in one line.
    pub op: String,
    /// Microseconds on the device's clock, from the end of the node before.
    pub micros: f64,
}

/// What is done with the steps of a profile.
type Report = Box<dyn FnOnce(&[ProfiledStep]) + Send>;

/// A profile under way. It is reported after its last step, or when it is dropped before that.
pub struct Profile {
    steps: RangeInclusive<u64>,
    began: Instant,
    measured: Vec<ProfiledStep>,
    report: Option<Report>,
}

impl std::fmt::Debug for Profile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Profile").field("steps", &self.steps).finish_non_exhaustive()
    }
}

impl Profile {
    /// Of the launches of these numbers, which begin with 1.
    pub fn new(
        steps: RangeInclusive<u64>,
        report: impl FnOnce(&[ProfiledStep]) + Send + 'static,
    ) -> Profile {
        let report: Option<Report> = Some(Box::new(report));
        Profile { steps, began: Instant::now(), measured: Vec::new(), report }
    }

    /// Whether a launch is part of it.
    pub(super) fn wants(&self, number: u64) -> bool {
        self.steps.contains(&number)
    }

    /// Whether all of it has been launched.
    pub(super) fn is_over(&self, number: u64) -> bool {
        number >= *self.steps.end()
    }

    /// Runs a step and measures its nodes; waits for it.
    pub(super) fn run(&mut self, cx: &Context<'_>, plan: &Plan, number: u64) -> Result<()> {
        let mut watch = cx.device.stopwatch(plan.nodes.len() + 1)?;
        cx.device.sync()?;
        let at = self.began.elapsed().as_secs_f64() * 1e6;
        watch.mark(0)?;
        for (index, node) in plan.nodes.iter().enumerate() {
            cx.device.run(cx.arena, node)?;
            watch.mark(index + 1)?;
        }
        let node = |index: usize| {
            let (name, op) = (plan.node_name(index), plan.nodes[index].op.describe());
            Ok(ProfiledNode { name, op, micros: watch.micros(index, index + 1)? })
        };
        let nodes = (0..plan.nodes.len()).map(node).collect::<Result<_>>()?;
        self.measured.push(ProfiledStep { number, key: plan.key, at, nodes });
        Ok(())
    }
}

impl Drop for Profile {
    fn drop(&mut self) {
        if let Some(report) = self.report.take() {
            report(&self.measured);
        }
    }
}
