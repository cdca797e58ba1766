//! Graphs by name: `decode/8`, `prefill/512/breakable@cpu+unfused`.

use super::{ModelArgs, Shape, parse_phase, parse_target};
use crate::exit::bad_input;
use anyhow::Result;
use graph::backend::{BackendKind, Piece};
use graph::compile::fuse::Fusion;
use graph::config::Given;
use graph::{CompileTarget, Phase, Plan};

/// A graph by name: phase and size, backend, target, and whether ops are fused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Spec {
    pub(crate) shape: Shape,
    pub(crate) backend: BackendKind,
    /// `None` where the name has none.
    pub(crate) target: Option<String>,
    pub(crate) unfused: bool,
}

impl Spec {
    /// Reads `decode/8[/BACKEND][/q_len=N][@TARGET][+unfused]`.
    pub(crate) fn parse(text: &str) -> Result<Spec> {
        let (text, unfused) = match text.strip_suffix("+unfused") {
            Some(rest) => (rest, true),
            None => (text, false),
        };
        let (graph, target) = match text.split_once('@') {
            Some((graph, target)) => (graph, Some(target.to_owned())),
            None => (text, None),
        };
        let wrong = || {
            let names = BackendKind::ALL.map(BackendKind::name).join(", ");
            bad_input(format!(
                "`{text}` is not a graph: use decode/8 or prefill/512, optionally with /BACKEND ({names}) and /q_len=N"
            ))
        };
        let mut words = graph.split('/');
        let phase = parse_phase(words.next().ok_or_else(wrong)?).map_err(bad_input)?;
        let size = words.next().and_then(|size| size.parse().ok()).filter(|&size| size > 0);
        let size = size.ok_or_else(wrong)?;
        let (mut backend, mut q_len) = (None, 1);
        for word in words {
            match (BackendKind::named(word), word.strip_prefix("q_len=")) {
                (Some(kind), _) if backend.is_none() => backend = Some(kind),
                (None, Some(tokens)) if q_len == 1 && phase == Phase::Decode => {
                    q_len = tokens.parse().ok().filter(|&q_len| q_len > 1).ok_or_else(wrong)?;
                }
                _ => return Err(wrong()),
            }
        }
        let backend = backend.unwrap_or(BackendKind::Full);
        Ok(Spec { shape: Shape { phase, size, q_len }, backend, target, unfused })
    }

    /// The options of graphs under which its backend runs.
    pub(crate) fn given(&self, model: &ModelArgs) -> Given {
        let flag = match self.shape.phase {
            Phase::Decode => "graph-backend-decode",
            Phase::Prefill => "graph-backend-prefill",
        };
        model.given(&[(flag, self.backend.name())])
    }

    /// The named target, or `default`; with the fusion that the name asks for.
    pub(crate) fn target(&self, default: &str) -> Result<CompileTarget> {
        let target = parse_target(self.target.as_deref().unwrap_or(default))?;
        Ok(self.fused(target))
    }

    /// A target with the fusion that the name asks for.
    pub(crate) fn fused(&self, target: CompileTarget) -> CompileTarget {
        CompileTarget { fusion: self.unfused.then_some(Fusion::NONE), ..target }
    }
}

/// A plan, and the backend that cuts it into graphs.
pub(crate) struct Side {
    pub(crate) plan: Plan,
    pub(crate) backend: BackendKind,
}

impl Side {
    /// How the backend cuts the plan, as text that can be compared.
    pub(crate) fn cuts(&self) -> [(&'static str, String); 3] {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_graphs() {
        let spec = Spec::parse("decode/8/disabled@cpu+unfused").unwrap();
        assert_eq!((spec.shape.phase.name(), spec.shape.size), ("decode", 8));
        assert_eq!((spec.backend.name(), spec.target.as_deref()), ("disabled", Some("cpu")));
        assert!(spec.unfused && spec.target("h200").unwrap().fusion.is_some());
        assert_eq!(Spec::parse("decode/8/q_len=4").unwrap().shape.q_len, 4);
        assert!(spec.target("nothing").is_ok(), "a target that is named needs no default");
        for wrong in [
            "",
            "decode",
            "decode/0",
            "decode/x",
            "train/8",
            "decode/8/fast",
            "decode/8/full/1",
            "decode/8/q_len=1",
            "prefill/8/q_len=2",
            "decode/8/full/full",
        ] {
            assert!(Spec::parse(wrong).is_err(), "{wrong}");
        }
    }
}
