//! `dacapo graph diff`.

use super::{ModelArgs, ProgramSource, Shape, parse_phase, parse_target};
use crate::exit::{bad_file, bad_input};
use crate::output::say;
use anyhow::Result;
use clap::Args;
use graph::Plan;
use graph::backend::{BackendKind, Piece};
use graph::compile::fuse::Fusion;

/// Show the differences between two graphs of a model
#[derive(Args, Debug)]
pub(super) struct DiffArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// decode/8, prefill/512 or decode/8/breakable, optionally with @cpu or @h200 and +unfused, or
    /// a file written by `explain --format plan`
    a: String,
    /// The other graph, in the same format
    b: String,
}

pub(super) fn run(args: &DiffArgs, source: &dyn ProgramSource) -> Result<()> {
    let a = Side::parse(&args.a, &args.model, source)?;
    let b = Side::parse(&args.b, &args.model, source)?;
    say!("{} ({}) → {} ({})", args.a, a.plan.short_hash(), args.b, b.plan.short_hash())?;
    let mut same = true;
    for (what, a, b) in a.cuts().into_iter().zip(b.cuts()).map(|((what, a), (_, b))| (what, a, b)) {
        if a != b {
            say!("{what}: {a} → {b}")?;
            same = false;
        }
    }
    for difference in a.plan.diff(&b.plan) {
        say!("{difference}")?;
        same = false;
    }
    if same {
        say!("the same")?;
    }
    Ok(())
}

/// One of the two: a plan, and the backend that cuts it into graphs.
struct Side {
    plan: Plan,
    backend: BackendKind,
}

impl Side {
    fn parse(text: &str, model: &ModelArgs, source: &dyn ProgramSource) -> Result<Side> {
        let mut backend = BackendKind::Full;
        if text.ends_with(".json") {
            let json = std::fs::read_to_string(text).map_err(bad_file(text.as_ref()))?;
            let plan = serde_json::from_str(&json)
                .map_err(|e| bad_input(format!("{text}: not a plan: {e}")))?;
            return Ok(Side { plan, backend });
        }
        let (text, unfused) = match text.strip_suffix("+unfused") {
            Some(rest) => (rest, true),
            None => (text, false),
        };
        let (shape, target) = text.split_once('@').unwrap_or((text, "h200"));
        let mut target = parse_target(target)?;
        target.fusion = unfused.then_some(Fusion::NONE);
        let wrong = || {
            let names = BackendKind::ALL.map(BackendKind::name).join(", ");
            bad_input(format!(
                "`{text}` is not a graph: use decode/8 or prefill/512, optionally with /BACKEND ({names})"
            ))
        };
        let mut words = shape.split('/');
        let phase = parse_phase(words.next().ok_or_else(wrong)?).map_err(bad_input)?;
        let size = words.next().and_then(|size| size.parse().ok()).filter(|&size| size > 0);
        let size = size.ok_or_else(wrong)?;
        if let Some(name) = words.next() {
            let named = BackendKind::ALL.into_iter().find(|kind| kind.name() == name);
            backend = named.ok_or_else(wrong)?;
        }
        if words.next().is_some() {
            return Err(wrong());
        }
        let plan = model.plan(source, &target, &Shape { phase, size })?;
        Ok(Side { plan, backend })
    }

    /// How the backend cuts the plan, as text that can be compared.
    fn cuts(&self) -> [(&'static str, String); 3] {
        let pieces = self.backend.pieces(&self.plan);
        let graphs = pieces.iter().filter(|piece| matches!(piece, Piece::Graph(_))).count();
        let alone: Vec<String> = pieces
            .iter()
            .filter_map(|piece| match piece {
                Piece::Alone(index) => Some(self.plan.node_name(*index)),
                Piece::Graph(_) => None,
            })
            .collect();
        let alone = match alone.as_slice() {
            [] => "none".into(),
            [one] => one.clone(),
            [first, .., last] => format!("{} ({first} … {last})", alone.len()),
        };
        [
            ("backend", self.backend.to_string()),
            ("graph launches per step", graphs.to_string()),
            ("nodes outside graphs", alone),
        ]
    }
}
