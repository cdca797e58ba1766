//! The rules for options that exclude each other. A rule may change a default, never a value the user gave.

use super::{ConfigError, Decision, Facts, Source};

/// One rule.
#[derive(Clone, Copy)]
pub(crate) struct Rule {
    /// Its name, in errors, the printed table and documents.
    pub name: &'static str,
    /// When it applies, as text.
    #[cfg_attr(not(test), expect(dead_code, reason = "for the generated document"))]
    pub when: &'static str,
    /// When it applies.
    pub applies: fn(&Draft<'_>, &Facts) -> bool,
    /// The option it sets.
    pub path: &'static str,
    /// The value it sets.
    pub to: fn(&Draft<'_>, &Facts) -> String,
    /// The effect, as text.
    #[cfg_attr(not(test), expect(dead_code, reason = "for the generated document"))]
    pub effect: &'static str,
    /// Why.
    pub why: &'static str,
}

impl std::fmt::Debug for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// The settings as rules see them.
#[derive(Debug)]
pub(crate) struct Draft<'a>(&'a [Decision]);

impl Draft<'_> {
    /// The text of an option.
    pub(crate) fn get(&self, path: &str) -> &str {
        let found = self.0.iter().find(|decision| decision.path == path);
        &found.expect("defaults are filled before rules look").value
    }

    fn number(&self, path: &str) -> Option<u64> {
        self.get(path).parse().ok()
    }
}

/// All rules, in the order they are applied.
pub(crate) const RULES: &[Rule] = &[
    Rule {
        name: "pdl-needs-a-gpu",
        when: "the device is a CPU",
        applies: |_, facts| facts.capability.is_none(),
        path: "pdl",
        to: |_, _| "off".into(),
        effect: "pdl = off",
        why: "a CPU runs one op after the other",
    },
    Rule {
        name: "pdl-needs-hopper",
        when: "the GPU's compute capability is below 9.0",
        applies: |_, facts| facts.capability.is_some_and(|capability| capability < (9, 0)),
        path: "pdl",
        to: |_, _| "off".into(),
        effect: "pdl = off",
        why: "older GPUs have no dependent launch",
    },
    Rule {
        name: "prefill-carries-decode",
        when: "prefill.max is below decode.max",
        applies: |draft, _| draft.number("prefill.max") < draft.number("decode.max"),
        path: "prefill.max",
        to: |draft, _| draft.get("decode.max").into(),
        effect: "prefill.max = decode.max",
        why: "a prefill step carries every running sequence beside the prompt",
    },
    Rule {
        name: "refusing-means-recorded",
        when: "fallback = error and capture = lazy",
        applies: |draft, _| draft.get("fallback") == "error" && draft.get("capture") == "lazy",
        path: "capture",
        to: |_, _| "startup".into(),
        effect: "capture = startup",
        why: "with lazy capture, steps would be refused until their graph is recorded",
    },
    Rule {
        name: "lazy-is-bounded",
        when: "capture = lazy and memory.budget = none",
        applies: |draft, _| draft.get("capture") == "lazy" && draft.get("memory.budget") == "none",
        path: "memory.budget",
        to: |_, _| "256MiB".into(),
        effect: "memory.budget = 256MiB",
        why: "graphs recorded on demand grow with traffic and need a limit",
    },
    Rule {
        name: "decode-breaks-somewhere",
        when: "decode.backend is breakable or piecewise and decode.break_at is empty",
        applies: |draft, _| {
            cuts(draft.get("decode.backend")) && draft.get("decode.break_at").is_empty()
        },
        path: "decode.break_at",
        to: |_, _| "attention".into(),
        effect: "decode.break_at = attention",
        why: "without a break it would be the same as `full`",
    },
    Rule {
        name: "prefill-breaks-somewhere",
        when: "prefill.backend is breakable or piecewise and prefill.break_at is empty",
        applies: |draft, _| {
            cuts(draft.get("prefill.backend")) && draft.get("prefill.break_at").is_empty()
        },
        path: "prefill.break_at",
        to: |_, _| "attention".into(),
        effect: "prefill.break_at = attention",
        why: "without a break it would be the same as `full`",
    },
    Rule {
        name: "inputs-in-one-graph",
        when: "decode.prep = fused",
        applies: |draft, _| draft.get("decode.prep") == "fused",
        path: "decode.backend",
        to: |_, _| "full".into(),
        effect: "decode.backend = full",
        why: "the input copy is the first node of the graph of a whole step",
    },
    Rule {
        name: "steps-in-one-graph",
        when: "decode.backend is not full",
        applies: |draft, _| draft.get("decode.backend") != "full",
        path: "decode.steps",
        to: |_, _| "1".into(),
        effect: "decode.steps = 1",
        why: "only a whole step can be the body of a loop on the device",
    },
    Rule {
        name: "merged-layers-cannot-split",
        when: "decode.backend is breakable or piecewise",
        applies: |draft, _| cuts(draft.get("decode.backend")),
        path: "layers",
        to: |_, _| "nodes".into(),
        effect: "layers = nodes",
        why: "layers merged into one node cannot be cut at attention",
    },
    Rule {
        name: "steps-without-the-host",
        when: "decode.prep is not device",
        applies: |draft, _| draft.get("decode.prep") != "device",
        path: "decode.steps",
        to: |_, _| "1".into(),
        effect: "decode.steps = 1",
        why: "the host cannot prepare the later steps of a launch",
    },
    Rule {
        name: "steps-are-recorded-at-start",
        when: "capture = lazy",
        applies: |draft, _| draft.get("capture") == "lazy",
        path: "decode.steps",
        to: |_, _| "1".into(),
        effect: "decode.steps = 1",
        why: "with several steps a bucket has two graphs, and lazy capture counts one",
    },
    Rule {
        name: "debug-sees-every-step",
        when: "debug is not off",
        applies: |draft, _| draft.get("debug") != "off",
        path: "decode.steps",
        to: |_, _| "1".into(),
        effect: "decode.steps = 1",
        why: "steps are compared one at a time",
    },
];

fn cuts(backend: &str) -> bool {
    matches!(backend, "breakable" | "piecewise")
}

/// Stage 3.
pub(super) fn apply(draft: &mut [Decision], facts: &Facts) -> Result<(), ConfigError> {
    for rule in RULES {
        let view = Draft(draft);
        if !(rule.applies)(&view, facts) {
            continue;
        }
        let wanted = (rule.to)(&view, facts);
        let place = draft.iter_mut().find(|decision| decision.path == rule.path);
        let decision = place.expect("a rule names an option");
        if decision.value == wanted {
            continue;
        }
        if decision.source.is_explicit() {
            return Err(ConfigError::Rule {
                rule: rule.name,
                path: rule.path,
                value: decision.value.clone(),
                source_text: decision.source.to_string(),
                wanted,
                why: rule.why,
            });
        }
        decision.value = wanted;
        decision.source = Source::Rule(rule.name);
        decision.why = rule.why.to_owned();
    }
    Ok(())
}
