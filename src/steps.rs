//! What a command says at its end about steps that no graph ran; `serve` logs the first of each kind and counts all.

use crate::output::note;
use graph::runner::Fallback;
use graph::{Counters, Reason};
use model::GraphExecutor;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// How the steps of a command ran.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepCounts {
    steps: u64,
    replayed: u64,
    /// Steps that ran op by op, or whose end did, by reason.
    eager: BTreeMap<Reason, u64>,
}

impl StepCounts {
    /// Of everything the executor has run so far.
    pub(crate) fn of(executor: &GraphExecutor) -> StepCounts {
        let mut counts = StepCounts::default();
        executor.runners().all_counters().for_each(|counters| counts.add(counters));
        counts
    }

    fn add(&mut self, counters: &Counters) {
        self.steps += counters.steps;
        self.replayed += counters.replayed;
        for (reason, count) in &counters.eager {
            *self.eager.entry(*reason).or_default() += count;
        }
    }

    /// The line about steps for which a graph was expected; `None` if there was none.
    fn warning(&self) -> Option<String> {
        let missed = self.eager.iter().filter(|(reason, _)| reason.is_fallback());
        let missed: Vec<String> =
            missed.map(|(reason, count)| format!("{count} ({reason})")).collect();
        let (steps, missed) = (self.steps, (!missed.is_empty()).then(|| missed.join(", "))?);
        Some(format!("warning: of {steps} steps these ran without a graph: {missed}"))
    }

    pub(crate) fn to_json(&self) -> Value {
        let eager =
            self.eager.iter().map(|(reason, count)| (reason.name().to_owned(), json!(count)));
        let eager: serde_json::Map<String, Value> = eager.collect();
        json!({ "steps": self.steps, "replayed": self.replayed, "op_by_op": eager })
    }
}

/// Warns of steps without a graph, unless `--graph-fallback allow` says that they are expected.
pub(crate) fn warn(executor: &GraphExecutor) {
    let config = executor.runners().prefill.config();
    if config.fallback == Fallback::Warn
        && let Some(warning) = StepCounts::of(executor).warning()
    {
        note!("{warning}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_steps_that_should_have_replayed_are_warned_of() {
        let mut counters = Counters::default();
        counters.eager(Reason::Scored, 8);
        counters.replayed(&graph::ShapeKey::decode(2), 1);
        let mut counts = StepCounts::default();
        counts.add(&counters);
        assert_eq!(counts.warning(), None);
        let json = json!({ "steps": 2, "replayed": 1, "op_by_op": { "scored": 1 } });
        assert_eq!(counts.to_json(), json);
        counters.eager(Reason::NotCovered, 8);
        counts.add(&counters);
        let warning = "warning: of 5 steps these ran without a graph: 1 (not_covered)";
        assert_eq!(counts.warning().as_deref(), Some(warning));
    }
}
