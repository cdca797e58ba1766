//! Lists of modules: names, and regular expressions behind `re:`.
//!
//! Expressions come from the file, so they are compiled to an automaton of bounded size that reads each byte once.

use crate::{Error, Result, limits};
use regex_automata::hybrid::dfa::{Cache, DFA};
use regex_automata::nfa::thompson;
use regex_automata::util::{pool::Pool, syntax};
use regex_automata::{Anchored, Input};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

pub(super) struct Names {
    exact: HashSet<String>,
    patterns: Option<Patterns>,
}

struct Patterns {
    file: PathBuf,
    field: String,
    automaton: Box<DFA>,
    caches: Pool<Cache, Box<dyn Fn() -> Cache + Send + Sync>>,
}

impl std::fmt::Debug for Names {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Names").field("exact", &self.exact).finish_non_exhaustive()
    }
}

impl Names {
    /// The list in `field` of `file`.
    pub(super) fn new(file: &Path, field: &str, list: &[&str]) -> Result<Self> {
        let (patterns, exact): (Vec<&str>, Vec<&str>) =
            list.iter().partition(|name| name.starts_with("re:"));
        let exact = exact.into_iter().map(str::to_owned).collect();
        if patterns.is_empty() {
            return Ok(Self { exact, patterns: None });
        }
        let bytes: usize = patterns.iter().map(|pattern| pattern.len()).sum();
        if bytes > limits::MODULE_PATTERN_BYTES {
            let found = format!("{bytes} bytes of expressions");
            let allowed = format!("at most {}", limits::MODULE_PATTERN_BYTES);
            return Err(Error::invalid(file, 0, field, found, allowed));
        }
        let sources: Vec<&str> = patterns.iter().map(|pattern| &pattern[3..]).collect();
        let automaton = DFA::builder()
            .configure(
                DFA::config()
                    .cache_capacity(limits::EXPRESSION_CACHE)
                    .skip_cache_capacity_check(true)
                    // An expression that never stops making new states is an error: it would be slow.
                    .minimum_cache_clear_count(Some(4))
                    .minimum_bytes_per_state(Some(256)),
            )
            // Names of modules are ASCII, and Unicode classes are large.
            .syntax(syntax::Config::new().unicode(false).utf8(false).nest_limit(64))
            .thompson(
                thompson::Config::new().utf8(false).nfa_size_limit(Some(limits::EXPRESSION_NFA)),
            )
            .build_many(&sources)
            .map_err(|error| {
                let found = std::error::Error::source(&error)
                    .map_or_else(|| error.to_string(), ToString::to_string);
                let found = found.lines().last().unwrap_or_default().to_owned();
                Error::unsupported(file, field, found, "regular expressions without look-around")
            })?;
        let make = automaton.clone();
        let caches: Box<dyn Fn() -> Cache + Send + Sync> = Box::new(move || make.create_cache());
        let patterns = Patterns {
            file: file.to_owned(),
            field: field.to_owned(),
            automaton: Box::new(automaton),
            caches: Pool::new(caches),
        };
        Ok(Self { exact, patterns: Some(patterns) })
    }

    /// Whether the list has this very name.
    pub(super) fn has(&self, module: &str) -> bool {
        self.exact.contains(module)
    }

    /// Whether an expression matches the start of the name, which is what Python's `re.match` means.
    pub(super) fn matches(&self, module: &str) -> Result<bool> {
        let Some(patterns) = &self.patterns else { return Ok(false) };
        let mut cache = patterns.caches.get();
        let input = Input::new(module).anchored(Anchored::Yes).earliest(true);
        match patterns.automaton.try_search_fwd(&mut cache, &input) {
            Ok(found) => Ok(found.is_some()),
            Err(_) => {
                let found = "an expression that needs too many states";
                let allowed = "simpler expressions";
                Err(Error::unsupported(&patterns.file, &patterns.field, found, allowed))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_whole_and_expressions_match_from_the_start() {
        let list = ["lm_head", r"re:.*mlp\.gate$", "re:visual", r"re:^model\.layers\.\d+\.linear"];
        let names = Names::new(Path::new("t"), "ignore", &list).unwrap();
        assert!(names.has("lm_head") && !names.has("model.lm_head") && !names.has("lm_hea"));
        let expected = [
            ("model.layers.0.mlp.gate", true),
            ("model.layers.0.mlp.gate_proj", false),
            ("visual.blocks.0", true),
            ("model.visual", false),
            ("model.layers.12.linear_attn.out_proj", true),
            ("model.layers.x.linear", false),
        ];
        for (module, found) in expected {
            assert_eq!(names.matches(module).unwrap(), found, "{module}");
        }
    }

    #[test]
    fn expressions_that_are_slow_or_unknown_are_refused() {
        let refused = |pattern: &str| {
            let error = Names::new(Path::new("t"), "ignore", &[pattern]).unwrap_err().to_string();
            assert!(error.starts_with("t: ") && error.contains("ignore"), "{error}");
            error
        };
        assert!(refused("re:(?!a)b").contains("look-around"));
        refused("re:(");
        refused(&format!("re:{}", "(".repeat(500)));
        refused(&format!("re:{}", "a".repeat(limits::MODULE_PATTERN_BYTES)));
        refused("re:((((a{99}){99}){99}){99}){99}");
    }
}
