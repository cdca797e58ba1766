//! What experts did in measured steps, and what the steps read of them.

use crate::output::say;
use anyhow::Result;
use graph::program::{LayerExperts, Program};
use graph::runner::ExpertLoad;
use model::GraphExecutor;
use serde::Serialize;

/// Experts of measured steps.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ExpertFigure {
    /// Experts of a layer.
    experts: u32,
    /// Of these, how many had tokens in a step; the mean over layers.
    pub(crate) chosen: f64,
    /// Bytes of their weights, in all layers.
    pub(crate) bytes: u64,
    /// How many experts of all layers had how many times the tokens of an even share: below each of
    /// [`ExpertFigure::EDGES`], and above the last.
    histogram: Vec<usize>,
}

impl ExpertFigure {
    const EDGES: [f64; 7] = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0];

    /// `None` for a model without experts, and where no step ran.
    pub(crate) fn between(
        program: &Program,
        before: &[ExpertLoad],
        after: &[ExpertLoad],
    ) -> Option<ExpertFigure> {
        let layers: Vec<(LayerExperts<'_>, ExpertLoad)> = program
            .experts()
            .zip(before.iter().zip(after))
            .map(|(experts, (before, after))| (experts, since(before, after)))
            .filter(|(_, load)| load.steps > 0)
            .collect();
        let per_step = |load: &ExpertLoad| load.chosen as f64 / load.steps as f64;
        let bytes =
            layers.iter().map(|(experts, load)| per_step(load) * experts.bytes_each() as f64);
        let mut histogram = vec![0; Self::EDGES.len() + 1];
        for (_, load) in &layers {
            let even = load.tokens.iter().sum::<u64>() as f64 / load.tokens.len() as f64;
            for &tokens in &load.tokens {
                let share = tokens as f64 / even;
                histogram[Self::EDGES.iter().filter(|edge| share >= **edge).count()] += 1;
            }
        }
        Some(ExpertFigure {
            experts: layers.first()?.0.count,
            chosen: layers.iter().map(|(_, load)| per_step(load)).sum::<f64>()
                / layers.len() as f64,
            bytes: bytes.sum::<f64>() as u64,
            histogram,
        })
    }

    /// In two lines.
    pub(crate) fn print(&self, step: &str) -> Result<()> {
        let (chosen, experts) = (self.chosen, self.experts);
        let megabytes = self.bytes as f64 * 1e-6;
        say!("{step}: {chosen:.1} of {experts} experts in a step and layer, {megabytes:.0} MB")?;
        let all = self.histogram.iter().sum::<usize>().max(1) as f64;
        let bars =
            self.histogram.iter().map(|&count| format!("{:.0}%", 100.0 * count as f64 / all));
        let edges = Self::EDGES.iter().map(|edge| format!("<{edge}")).chain(["more".to_owned()]);
        let bins: Vec<String> =
            edges.zip(bars).map(|(edge, bar)| format!("{edge}: {bar}")).collect();
        say!("  experts by tokens over an even share: {}", bins.join("  "))?;
        Ok(())
    }
}

/// What happened between two readings.
fn since(before: &ExpertLoad, after: &ExpertLoad) -> ExpertLoad {
    let tokens = after.tokens.iter().zip(&before.tokens).map(|(a, b)| a.saturating_sub(*b));
    ExpertLoad {
        layer: after.layer,
        tokens: tokens.collect(),
        chosen: after.chosen.saturating_sub(before.chosen),
        steps: after.steps.saturating_sub(before.steps),
    }
}

/// Bytes and number of the weights that every step reads, and the number that a token is multiplied with: all except
/// an embedding table that is only gathered from, and adapters; of experts, those of a token.
pub(crate) struct Read {
    /// Bytes of all weights except experts.
    pub(crate) bytes: u64,
    /// Weights that a token is multiplied with.
    pub(crate) parameters: u64,
    /// Bytes of the slots of adapters, all of them.
    pub(crate) adapters: u64,
}

impl Read {
    pub(crate) fn of(program: &Program) -> Read {
        use graph::program::{ProgramOp, WeightId};
        let multiplied = |id| {
            program.steps.iter().any(|step| match &step.op {
                ProgramOp::Embed(_) | ProgramOp::Lora(_) => false,
                op => op.weights().contains(&id),
            })
        };
        let ids = (0..program.weights.len() as u32).map(WeightId);
        let mut read = Read { bytes: 0, parameters: 0, adapters: 0 };
        for step in &program.steps {
            if let ProgramOp::Lora(lora) = &step.op {
                read.adapters += program.weight(lora.a).bytes() + program.weight(lora.b).bytes();
            }
        }
        for weight in ids.filter(|&id| multiplied(id)).map(|id| program.weight(id)) {
            read.bytes += weight.bytes();
            read.parameters += u64::from(weight.rows) * u64::from(weight.cols);
        }
        for experts in program.experts() {
            let sizes =
                [experts.gate_up, experts.down].map(|w| u64::from(w.rows) * u64::from(w.cols));
            let (all, count) = (sizes.iter().sum::<u64>(), u64::from(experts.count));
            read.bytes -= experts.bytes_each() * count;
            read.parameters -= all / count * (count - u64::from(experts.top));
        }
        read
    }
}

/// What experts have done so far.
pub(crate) fn loads(executor: &GraphExecutor) -> Result<Vec<ExpertLoad>> {
    Ok(executor.expert_loads()?)
}
