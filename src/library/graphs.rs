//! The graphs of a loaded model: the plans that it runs, explained, compared and verified.

use super::Problem;
use super::options::Options;
use crate::exit::bad_input;
use crate::graph_cli::{self, Differences, ModelArgs, Shape, Side, Spec, VerifyArgs};
use crate::loading::Loaded;
use crate::programs::Programs;
use anyhow::Result;
use clap::Parser;
use graph::compile::merge::Merge;
use graph::program::Program;
use graph::{Bindings, CompileTarget, Form, Phase, Plan, ShapeKey};
use serde_json::{Value, json};

/// What plans are made from.
pub(super) struct LiveGraphs {
    program: Program,
    bindings: Bindings,
    /// Of decode and of prefill.
    targets: [CompileTarget; 2],
    /// The graphs that are recorded.
    keys: Vec<ShapeKey>,
}

impl LiveGraphs {
    pub(super) fn of(loaded: &Loaded) -> Self {
        let runners = loaded.executor.runners();
        let plans = runners.decode.plans().chain(runners.prefill.plans());
        // A graph of several steps has the same nodes as the graph of one step.
        let keys = plans.map(|plan| plan.key).filter(|key| key.form != Form::Repeated);
        Self {
            program: loaded.program.clone(),
            bindings: runners.bindings().clone(),
            targets: [runners.decode.target().clone(), runners.prefill.target().clone()],
            keys: keys.collect(),
        }
    }

    /// A graph, its target, and how it is run.
    fn side(&self, graph: &str, options: &Options) -> Result<(Side, CompileTarget)> {
        let spec = Spec::parse(graph)?;
        let (plan, target) = match &spec.target {
            Some(name) => {
                let target = spec.target(name)?;
                let model = ModelFlags::of(options, &[])?.model;
                let programs = Programs { global: &options.global };
                model.plan(&programs, &target, &spec.shape, spec.given(&model))?
            }
            None => {
                let mut target = spec.fused(self.targets[spec.shape.phase as usize].clone());
                if spec.backend.cuts() {
                    // As the rule of the configuration: what is one node cannot be cut.
                    target.merge = Merge::Never;
                }
                (self.plan(&spec, &target)?, target)
            }
        };
        Ok((Side { plan, backend: spec.backend }, target))
    }

    /// The plan of a recorded graph, or of one that could be.
    fn plan(&self, spec: &Spec, target: &CompileTarget) -> Result<Plan> {
        let limits = &self.bindings.state.limits;
        let Shape { phase, size, q_len } = spec.shape;
        let same =
            |key: &&ShapeKey| key.phase == phase && key.bucket() == size && key.q_len == q_len;
        let fixed = self.keys.iter().any(|key| key.fixed);
        let other = || match phase {
            Phase::Decode => ShapeKey::verify(size, q_len),
            Phase::Prefill => ShapeKey::prefill(size, size.min(limits.rows)),
        };
        let recorded = self.keys.iter().find(same).copied();
        let key = recorded.unwrap_or_else(|| other().with_fixed(fixed));
        if key.rows > limits.rows || key.tokens > limits.tokens {
            return Err(bad_input(format!(
                "{key}: this model runs at most {} sequences and {} tokens in a step",
                limits.rows, limits.tokens
            )));
        }
        Ok(graph::compile(&self.program, target, &key, &self.bindings)?)
    }

    pub(super) fn explain(&self, graph: &str, options: &Options) -> Result<Value, Problem> {
        let (side, target) = self.side(graph, options)?;
        let explained = graph::explain::explain(&side.plan, &target);
        Ok(json!({ "text": explained.table(), "svg": side.plan.svg(), "data": explained }))
    }

    pub(super) fn diff(&self, a: &str, b: &str, options: &Options) -> Result<Value, Problem> {
        let (one, _) = self.side(a, options)?;
        let (other, _) = self.side(b, options)?;
        let differences = Differences::between((a, &one), (b, &other));
        Ok(json!({ "text": differences.to_string(), "data": differences }))
    }
}

/// The flags of `dacapo graph diff`.
#[derive(Parser)]
#[command(name = "diff", disable_help_flag = true)]
struct ModelFlags {
    #[command(flatten)]
    model: ModelArgs,
}

impl ModelFlags {
    fn of(options: &Options, flags: &[String]) -> Result<Self> {
        let line = options.graph_line().into_iter().chain(flags.iter().cloned());
        Self::try_parse_from(line).map_err(|error| bad_input(super::usage(&error).text))
    }
}

/// The flags of `dacapo graph verify`.
#[derive(Parser)]
#[command(name = "verify", disable_help_flag = true)]
struct VerifyFlags {
    #[command(flatten)]
    verify: VerifyArgs,
}

/// Verifies every bucket and backend of a model with these flags.
pub(super) fn verify(
    options: &Options,
    flags: &[String],
    programs: &Programs<'_>,
) -> Result<Value, Problem> {
    let line = options.graph_line().into_iter().chain(flags.iter().cloned());
    let parsed = VerifyFlags::try_parse_from(line).map_err(|error| super::usage(&error))?;
    let mut lines = Vec::new();
    let passed = graph_cli::verify(&parsed.verify, programs, &mut |line| lines.push(line))?;
    let text = lines.join("\n") + "\n";
    Ok(json!({ "text": text, "data": { "passed": passed, "lines": lines } }))
}
