//! Stage 4: texts become values.

use super::nearest::nearest;
use super::options::{Kind, MAX_STEPS, OPS, setting};
use super::{ConfigError, Decision, PhaseSettings, Resolved};
use crate::bucket::{BucketSpec, Buckets};
use crate::compile::merge::Merge;
use crate::runner::{Capture, Debug, Fallback};
use crate::{BackendKind, Phase, Prep};
use std::collections::BTreeSet;

/// Most numbers of rows: every prefill bucket is recorded for each.
const MAX_ROW_SIZES: usize = 4;

/// The typed configuration.
pub(super) fn validate(
    decisions: Vec<Decision>,
    warnings: Vec<String>,
) -> Result<Resolved, ConfigError> {
    decisions.iter().try_for_each(check)?;
    let get = |path: &str| {
        let found = decisions.iter().find(|decision| decision.path == path);
        found.expect("every option has a decision").value.as_str()
    };
    let refuses = get("fallback") == "error";
    let phase = |phase: Phase| -> Result<PhaseSettings, ConfigError> {
        let get = |name: &str| get(setting(&format!("{phase}.{name}")).expect("listed").path);
        let settings = PhaseSettings {
            backend: backend(get("backend")),
            buckets: get("buckets").parse()?,
            max: get("max").parse().unwrap_or(1),
            rows: match phase {
                Phase::Decode => Vec::new(),
                Phase::Prefill => row_sizes(get("rows")).unwrap_or_default(),
            },
            max_padding: get("max_padding_ratio").parse().ok(),
            break_at: ops(get("break_at")).map(str::to_owned).collect::<BTreeSet<_>>(),
        };
        let buckets =
            Buckets::generate(&settings.buckets, phase, settings.max, settings.max_padding)?;
        let replays = settings.backend != BackendKind::Disabled;
        if let Some(ratio) = settings.max_padding.filter(|_| replays && refuses) {
            buckets.waste_at_most(ratio)?;
        }
        Ok(settings)
    };
    Ok(Resolved {
        decode: phase(Phase::Decode)?,
        prefill: phase(Phase::Prefill)?,
        capture: if get("capture") == "lazy" { Capture::Lazy } else { Capture::Startup },
        fallback: match get("fallback") {
            "error" => Fallback::Error,
            "allow" => Fallback::Allow,
            _ => Fallback::Warn,
        },
        fixed: get("kernels") == "fixed",
        debug: match get("debug") {
            "eager" => Debug::Eager,
            "verify" => Debug::Verify,
            _ => Debug::Off,
        },
        pdl: get("pdl") == "on",
        prep: Prep::ALL
            .into_iter()
            .find(|prep| prep.name() == get("decode.prep"))
            .unwrap_or_default(),
        steps: get("decode.steps").parse().unwrap_or(1),
        merge: Merge::named(get("layers")).unwrap_or_default(),
        budget: parse_bytes(get("memory.budget")),
        decisions,
        warnings,
    })
}

fn backend(name: &str) -> BackendKind {
    BackendKind::ALL.into_iter().find(|kind| kind.name() == name).unwrap_or(BackendKind::Full)
}

/// Numbers of rows, ascending and distinct; empty for `none`.
fn row_sizes(text: &str) -> Option<Vec<u32>> {
    if text == "none" {
        return Some(Vec::new());
    }
    let size = |part: &str| part.trim().parse::<u32>().ok().filter(|&rows| rows > 0);
    let mut sizes = text.split(',').map(size).collect::<Option<Vec<u32>>>()?;
    sizes.sort_unstable();
    sizes.dedup();
    (sizes.len() <= MAX_ROW_SIZES).then_some(sizes)
}

fn ops(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|name| !name.is_empty())
}

/// Refuses a text that is not of its option's kind.
fn check(decision: &Decision) -> Result<(), ConfigError> {
    let kind = setting(decision.path).expect("decisions are about options").kind;
    let value = decision.value.trim();
    let expected = match kind {
        Kind::Word(words) if !words.contains(&value) => {
            let near = nearest(value, words.iter().copied());
            format!("one of {} is needed; did you mean `{near}`?", words.join(", "))
        }
        Kind::Buckets => match value.parse::<BucketSpec>() {
            Ok(_) => return Ok(()),
            Err(error) => error.to_string(),
        },
        Kind::Rows if row_sizes(value).is_none() => {
            "numbers of sequences such as 64 or 16,64, or none, are needed".into()
        }
        Kind::Count if !value.parse::<u32>().is_ok_and(|count| count > 0) => {
            "a whole number from 1 is needed".into()
        }
        Kind::Steps if !value.parse().is_ok_and(|steps| (1..=MAX_STEPS).contains(&steps)) => {
            format!("a whole number from 1 to {MAX_STEPS} is needed")
        }
        Kind::Ratio
            if value != "none" && !value.parse().is_ok_and(|r| (0.0..=1.0).contains(&r)) =>
        {
            "a number from 0 to 1, or none, is needed".into()
        }
        Kind::Bytes if value != "none" && parse_bytes(value).is_none() => {
            "a byte size such as 150MiB, or none, is needed".into()
        }
        Kind::Ops => match ops(value).find(|name| !OPS.contains(name)) {
            None => return Ok(()),
            Some(name) => {
                format!(
                    "there is no op `{name}`; did you mean `{}`?",
                    nearest(name, OPS.iter().copied())
                )
            }
        },
        _ => return Ok(()),
    };
    Err(ConfigError::Value {
        path: decision.path,
        given: decision.value.clone(),
        source_text: decision.source.to_string(),
        expected,
    })
}

/// `4096`, `150MiB`, `2 GiB`; `None` for anything else, `none` included.
pub(super) fn parse_bytes(text: &str) -> Option<u64> {
    let digits = text.trim().trim_end_matches(|c: char| c.is_ascii_alphabetic()).trim_end();
    let unit = text.trim()[digits.len()..].trim();
    let shift = match unit {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}
