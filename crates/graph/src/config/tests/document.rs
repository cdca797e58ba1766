//! The document of all settings, generated from the tables.

use crate::config::options::{Kind, MAX_STEPS, SETTINGS};
use crate::config::rules::RULES;

/// What a value looks like.
fn shape(kind: Kind) -> String {
    match kind {
        Kind::Word(words) => words.join("\\|"),
        Kind::Buckets => "auto, list or range".into(),
        Kind::Count => "number".into(),
        Kind::Rows => "numbers, or none".into(),
        Kind::Ratio => "0 to 1, or none".into(),
        Kind::Bytes => "bytes, or none".into(),
        Kind::Ops => "op names".into(),
        Kind::Steps => format!("1 to {MAX_STEPS}"),
    }
}

/// `docs/GRAPH-CONFIG.md`.
pub(super) fn markdown() -> String {
    let mut text = String::from(HEAD);
    for setting in SETTINGS {
        let flag = setting.flag.map_or(String::from("—"), |flag| format!("`--{flag}`"));
        text.push_str(&format!(
            "| `{}` | {flag} | {} | {} | {} |\n",
            setting.path,
            shape(setting.kind),
            setting.default_words,
            setting.help
        ));
    }
    text.push_str(RULES_HEAD);
    for rule in RULES {
        text.push_str(&format!(
            "| `{}` | {} | `{}` | {} |\n",
            rule.name, rule.when, rule.effect, rule.why
        ));
    }
    text
}

const HEAD: &str = "\
<!-- Generated from the tables in crates/graph/src/config; `UPDATE_EXPECT=1 cargo test -p graph config` writes it. -->
# Configuring device graphs

Everything about graphs is one JSON object, given as `--graph-config '{…}'` or `--graph-config @file`. The
options most people need are flags, too. For example:

```json
{
  \"decode\": {\"backend\": \"full\", \"buckets\": \"1,2,4,8..64/8\"},
  \"prefill\": {\"backend\": \"breakable\", \"max\": 4096},
  \"memory\": {\"budget\": \"150MiB\"},
  \"fallback\": \"error\"
}
```

Settings are resolved in four stages: *parse* (JSON beats flags; a conflict is a warning that names both),
*default*, *compatibility* (the rules below; a rule may change a default, but never what you asked for: that is
an error that names the rule) and *validate*. The server prints the result at start, every value with where it
came from and why. An unknown key, phase, backend or op is an error that names the nearest one there is.

## Options

Buckets of decode count sequences, buckets of prefill count tokens.

| JSON | flag | values | default | what it does |
|---|---|---|---|---|
";

const RULES_HEAD: &str = "
## Rules

| rule | when | effect | why |
|---|---|---|---|
";
