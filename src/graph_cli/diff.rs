//! `dacapo graph diff`.

use super::side::{Side, Spec};
use super::{DEFAULT_TARGET, ModelArgs};
use crate::exit::{bad_file, bad_input};
use crate::output::Output;
use crate::programs::Programs;
use anyhow::Result;
use clap::Args;
use graph::backend::BackendKind;
use serde::Serialize;
use std::fmt;
use std::io::Write;

/// Show the differences between two graphs of a model
#[derive(Args, Debug)]
pub(super) struct DiffArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// decode/8, prefill/512, decode/8/breakable or decode/8/q_len=4, optionally with @cpu or @h200 and +unfused, or
    /// a file written by `explain --format plan`
    a: String,
    /// The other graph, in the same format
    b: String,
}

pub(super) fn run(args: &DiffArgs, programs: &Programs<'_>) -> Result<()> {
    let a = side(&args.a, &args.model, programs)?;
    let b = side(&args.b, &args.model, programs)?;
    let differences = Differences::between((&args.a, &a), (&args.b, &b));
    Ok(write!(Output::new(), "{differences}")?)
}

fn side(text: &str, model: &ModelArgs, programs: &Programs<'_>) -> Result<Side> {
    if text.ends_with(".json") {
        let json = std::fs::read_to_string(text).map_err(bad_file(text.as_ref()))?;
        let plan = serde_json::from_str(&json)
            .map_err(|e| bad_input(format!("{text}: not a plan: {e}")))?;
        return Ok(Side { plan, backend: BackendKind::Full });
    }
    let spec = Spec::parse(text)?;
    let target = spec.target(DEFAULT_TARGET)?;
    let (plan, _) = model.plan(programs, &target, &spec.shape, spec.given(model))?;
    Ok(Side { plan, backend: spec.backend })
}

/// The differences between two graphs.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Differences {
    a: Named,
    b: Named,
    /// How the backends cut the plans, where that differs.
    cuts: Vec<Cut>,
    /// The differences of the plans, one line each.
    plans: Vec<String>,
}

/// A graph, and the short hash of its plan.
#[derive(Clone, Debug, Serialize)]
struct Named {
    graph: String,
    plan: String,
}

#[derive(Clone, Debug, Serialize)]
struct Cut {
    what: &'static str,
    a: String,
    b: String,
}

impl Differences {
    /// Compares two graphs with their names.
    pub(crate) fn between(a: (&str, &Side), b: (&str, &Side)) -> Differences {
        let named = |(graph, side): (&str, &Side)| Named {
            graph: graph.to_owned(),
            plan: side.plan.short_hash(),
        };
        let both = a.1.cuts().into_iter().zip(b.1.cuts());
        let cuts = both.map(|((what, a), (_, b))| Cut { what, a, b });
        Differences {
            a: named(a),
            b: named(b),
            cuts: cuts.filter(|cut| cut.a != cut.b).collect(),
            plans: a.1.plan.diff(&b.1.plan).iter().map(ToString::to_string).collect(),
        }
    }
}

impl fmt::Display for Differences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Differences { a, b, cuts, plans } = self;
        writeln!(f, "{} ({}) → {} ({})", a.graph, a.plan, b.graph, b.plan)?;
        for Cut { what, a, b } in cuts {
            writeln!(f, "{what}: {a} → {b}")?;
        }
        plans.iter().try_for_each(|line| writeln!(f, "{line}"))?;
        match cuts.is_empty() && plans.is_empty() {
            true => writeln!(f, "the same"),
            false => Ok(()),
        }
    }
}
