mod document;

use super::*;
use document::markdown;
use expect_test::{expect, expect_file};

const H200: Facts =
    Facts { capability: Some((9, 0)), sequences: 256, tokens: 8192, weights: 1 << 30 };
/// The same with a model whose steps are long.
const LONG: Facts = Facts { weights: 16 << 30, ..H200 };
const CPU: Facts = Facts { capability: None, ..LONG };

fn given(config: &str, flags: &[(&str, &str)]) -> Given {
    Given {
        config: (!config.is_empty()).then(|| config.to_owned()),
        flags: flags.iter().map(|(flag, value)| ((*flag).into(), (*value).into())).collect(),
    }
}

fn resolved(config: &str, flags: &[(&str, &str)], facts: &Facts) -> Resolved {
    resolve(&given(config, flags), facts).unwrap()
}

fn refused(config: &str, flags: &[(&str, &str)], facts: &Facts) -> String {
    resolve(&given(config, flags), facts).unwrap_err().to_string()
}

#[test]
fn the_table_at_start_says_why() {
    expect![[r#"
        decode.backend             full       default: a decode step has one shape per bucket
        decode.buckets             auto       default: as few as keep padding below a quarter
        decode.max                 256        default: what the scheduler may run at once
        decode.max_padding_ratio   none       default: replaying with padding beats not replaying
        decode.break_at            attention  default: the op whose work varies most
        decode.prep                device     default: all state lives there; the others are for comparison
        decode.steps               1          default: with two launches in flight the device does not wait for the host
        prefill.backend            full       default: attention reads row boundaries on the device, so any mix replays
        prefill.buckets            auto       default: as few as keep padding below a quarter
        prefill.max                8192       default: what the scheduler puts into a step
        prefill.rows               64         default: the head of 256 sequences takes a millisecond more
        prefill.max_padding_ratio  none       default: replaying with padding beats not replaying
        prefill.break_at           attention  default: the op whose work varies most
        memory.budget              none       default: graphs are small; their exact bytes are reported
        capture                    startup    default: recording needs no warm-up runs, so it is quick
        fallback                   warn       default: fallbacks are reported
        kernels                    auto       default: every bucket has the kernels that are fastest for it
        debug                      off        default
        pdl                        on         default: weights are fetched before the previous kernel ends
        layers                     auto       default: one node where the table of measured choices says so
    "#]].assert_eq(&resolved("", &[], &H200).table());
    let json = r#"{"decode": {"buckets": [1, 2, 4]}, "capture": "lazy"}"#;
    let table = resolved(json, &[("graph-backend-prefill", "breakable")], &CPU).table();
    expect![[r#"
        decode.backend             full       default: a decode step has one shape per bucket
        decode.buckets             1,2,4      --graph-config
        decode.max                 256        default: what the scheduler may run at once
        decode.max_padding_ratio   none       default: replaying with padding beats not replaying
        decode.break_at            attention  default: the op whose work varies most
        decode.prep                device     default: all state lives there; the others are for comparison
        decode.steps               1          default: with two launches in flight the device does not wait for the host
        prefill.backend            breakable  --graph-backend-prefill
        prefill.buckets            auto       default: as few as keep padding below a quarter
        prefill.max                8192       default: what the scheduler puts into a step
        prefill.rows               none       default: one graph for each size
        prefill.max_padding_ratio  none       default: replaying with padding beats not replaying
        prefill.break_at           attention  default: the op whose work varies most
        memory.budget              256MiB     rule lazy-is-bounded: graphs recorded on demand grow with traffic and need a limit
        capture                    lazy       --graph-config
        fallback                   warn       default: fallbacks are reported
        kernels                    auto       default: every bucket has the kernels that are fastest for it
        debug                      off        default
        pdl                        off        rule pdl-needs-a-gpu: a CPU runs one op after the other
        layers                     auto       default: one node where the table of measured choices says so
    "#]].assert_eq(&table);
}

#[test]
fn the_document_is_what_the_tables_say() {
    expect_file!["../../../../docs/GRAPH-CONFIG.md"].assert_eq(&markdown());
}

#[test]
fn json_beats_flags_for_every_option_and_says_so() {
    let other = |kind: Kind| match kind {
        Kind::Word(words) => (words[words.len() - 1], words[0]),
        Kind::Buckets => ("1,2", "4,8"),
        // Between what decode may not exceed and what prefill must not go below.
        Kind::Count => ("256", "300"),
        Kind::Rows => ("64", "16,128"),
        Kind::Ratio => ("0.5", "0.25"),
        Kind::Bytes => ("1MiB", "2MiB"),
        Kind::Ops => ("linear", "sample"),
        Kind::Steps => ("4", "8"),
    };
    for setting in flags() {
        let (in_json, in_flag) = other(setting.kind);
        let json = match setting.path.split_once('.') {
            Some((group, name)) => format!(r#"{{"{group}": {{"{name}": "{in_json}"}}}}"#),
            None => format!(r#"{{"{}": "{in_json}"}}"#, setting.path),
        };
        let flag = setting.flag.unwrap();
        let both = resolved(&json, &[(flag, in_flag)], &H200);
        let decision = both.decisions.iter().find(|d| d.path == setting.path).unwrap();
        assert_eq!((decision.value.as_str(), &decision.source), (in_json, &Source::Json));
        let warned = format!(
            "{}: --graph-config says `{in_json}`, --{flag} says `{in_flag}`; --graph-config counts",
            setting.path
        );
        assert_eq!(both.warnings, [warned]);
        let alone = resolved("", &[(flag, in_flag)], &H200);
        let decision = alone.decisions.iter().find(|d| d.path == setting.path).unwrap();
        assert_eq!(decision.source, Source::Flag(format!("--{flag}")));
        assert_eq!(alone.warnings, Vec::<String>::new());
        let agreed = resolved(&json, &[(flag, in_json)], &H200);
        assert_eq!(agreed.warnings, Vec::<String>::new(), "saying it twice is no conflict");
    }
}

#[test]
fn names_that_do_not_exist_get_the_nearest() {
    let cases = [
        (r#"{"decod": {}}"#, "--graph-config has no `decod`; did you mean `decode`?"),
        (
            r#"{"decode": {"backends": "full"}}"#,
            "--graph-config `decode` has no `backends`; did you mean `backend`?",
        ),
        (
            r#"{"capture": "startop"}"#,
            "capture = `startop` (--graph-config): one of startup, lazy is needed; did you mean `startup`?",
        ),
        (
            r#"{"prefill": {"backend": "brakable"}}"#,
            "prefill.backend = `brakable` (--graph-config): one of full, breakable, piecewise, disabled is needed; did you mean `breakable`?",
        ),
        (
            r#"{"prefill": {"break_at": ["atention"]}}"#,
            "prefill.break_at = `atention` (--graph-config): there is no op `atention`; did you mean `attention`?",
        ),
        (
            r#"{"decode": {"max": 0}}"#,
            "decode.max = `0` (--graph-config): a whole number from 1 is needed",
        ),
        (
            r#"{"decode": {"max_padding_ratio": 1.5}}"#,
            "decode.max_padding_ratio = `1.5` (--graph-config): a number from 0 to 1, or none, is needed",
        ),
        (
            r#"{"memory": {"budget": "12MB"}}"#,
            "memory.budget = `12MB` (--graph-config): a byte size such as 150MiB, or none, is needed",
        ),
        (
            r#"{"decode": {"buckets": "1,,2"}}"#,
            "decode.buckets = `1,,2` (--graph-config): `1,,2` is not a list of buckets: write auto, 1,2,4,8 or 16..256/16",
        ),
        (
            r#"{"decode": {"buckets": [512]}}"#,
            "bucket 512 of decode is larger than the maximum of 256 sequences",
        ),
        (r#"{"decode": 3}"#, "--graph-config: `decode` must be an object"),
        (r#"{"debug": {"x": 1}}"#, "--graph-config: `debug` must not be an object"),
        ("[]", "--graph-config: not a JSON object"),
        ("{", "--graph-config: EOF while parsing an object at line 1 column 1"),
    ];
    for (json, message) in cases {
        let refusal = refused(json, &[], &H200);
        assert!(refusal.starts_with(message), "{json}: {refusal}");
    }
    assert_eq!(
        refused("", &[("graph-backend-decod", "full")], &H200),
        "the command line has no `graph-backend-decod`; did you mean `graph-backend-decode`?"
    );
    assert!(refused("@no/such/file", &[], &H200).starts_with("--graph-config @no/such/file: "));
}

/// Every rule: a situation in which it changes a default, and one in which a person's choice meets it.
#[test]
fn every_rule_changes_a_default_and_refuses_a_choice() {
    let ampere = Facts { capability: Some((8, 0)), ..H200 };
    let narrow = Facts { tokens: 64, ..H200 };
    let lazy = r#"{"capture": "lazy"}"#;
    let cases: &[(&str, &Facts, &str, &str)] = &[
        ("pdl-needs-a-gpu", &CPU, "", r#"{"pdl": "on"}"#),
        ("pdl-needs-hopper", &ampere, "", r#"{"pdl": true}"#),
        ("prefill-carries-decode", &narrow, "", r#"{"prefill": {"max": 128}}"#),
        ("refusing-means-recorded", &H200, "", r#"{"fallback": "error", "capture": "lazy"}"#),
        ("lazy-is-bounded", &H200, lazy, r#"{"capture": "lazy", "memory": {"budget": "none"}}"#),
        (
            "decode-breaks-somewhere",
            &H200,
            "",
            r#"{"decode": {"backend": "breakable", "break_at": ""}}"#,
        ),
        (
            "prefill-breaks-somewhere",
            &H200,
            "",
            r#"{"prefill": {"backend": "piecewise", "break_at": []}}"#,
        ),
        (
            "inputs-in-one-graph",
            &H200,
            "",
            r#"{"decode": {"prep": "fused", "backend": "piecewise"}}"#,
        ),
        (
            "steps-in-one-graph",
            &LONG,
            r#"{"decode": {"backend": "disabled"}}"#,
            r#"{"decode": {"steps": 4, "backend": "breakable"}}"#,
        ),
        (
            "merged-layers-cannot-split",
            &H200,
            r#"{"decode": {"backend": "breakable"}}"#,
            r#"{"decode": {"backend": "piecewise"}, "layers": "one"}"#,
        ),
        (
            "steps-without-the-host",
            &LONG,
            r#"{"decode": {"prep": "fused"}}"#,
            r#"{"decode": {"steps": 4, "prep": "copy"}}"#,
        ),
        (
            "steps-are-recorded-at-start",
            &LONG,
            lazy,
            r#"{"decode": {"steps": 4}, "capture": "lazy"}"#,
        ),
        (
            "debug-sees-every-step",
            &LONG,
            r#"{"debug": "eager"}"#,
            r#"{"decode": {"steps": 4}, "debug": "verify"}"#,
        ),
    ];
    // Rules that no default breaks: only a value the user gave can, and it is refused.
    let choice_only = [
        "refusing-means-recorded",
        "decode-breaks-somewhere",
        "prefill-breaks-somewhere",
        "inputs-in-one-graph",
    ];
    for (name, facts, changes, refuses) in cases {
        let rule = rules::RULES.iter().find(|rule| rule.name == *name).expect(name);
        if !choice_only.contains(name) {
            let changed = resolved(changes, &[], facts);
            let decision = changed.decisions.iter().find(|d| d.path == rule.path).unwrap();
            assert_eq!(decision.source, Source::Rule(rule.name));
            assert_eq!(decision.why, rule.why);
        }
        let error = resolve(&given(refuses, &[]), facts).unwrap_err();
        assert!(matches!(&error, ConfigError::Rule { rule, .. } if rule == name), "{error}");
        assert!(
            error.to_string().starts_with(&format!("rule {name}: {} = ", rule.path)),
            "{error}"
        );
    }
    assert_eq!(cases.len(), rules::RULES.len(), "a rule without a test");
}

#[test]
fn long_steps_are_launched_together() {
    for (facts, steps) in [(H200, 1), (LONG, MAX_STEPS), (CPU, 1)] {
        assert_eq!(resolved("", &[], &facts).steps, steps, "{facts:?}");
        assert_eq!(resolved("", &[("graph-steps", "3")], &facts).steps, 3, "{facts:?}");
    }
}

#[test]
fn prefill_full_is_supported() {
    let resolved = resolved(r#"{"prefill": {"backend": "full"}}"#, &[], &H200);
    assert_eq!(resolved.prefill.backend, BackendKind::Full);
}

#[test]
fn a_runner_gets_what_was_resolved() {
    let json = r#"{"decode": {"buckets": "1,2,4", "max_padding_ratio": 0.5}, "memory": {"budget": "4KiB"},
                   "fallback": "error", "debug": "verify", "pdl": "off"}"#;
    let resolved = resolved(json, &[("graph-max-prefill", "300")], &H200);
    let limits = StepLimits {
        seats: 8,
        rows: 8,
        tokens: 256,
        pages_per_seat: 4,
        page_size: 16,
        vocab: 64,
        penalties: false,
        tokens_per_row: 1,
        tables: 1,
    };
    let decode = resolved.runner(Phase::Decode, &limits).unwrap();
    assert_eq!(decode.buckets.sizes, [1, 2, 4]);
    assert_eq!((decode.max_padding, decode.budget), (Some(0.5), Some(3072)));
    assert_eq!((decode.fallback, decode.debug), (Fallback::Error, Debug::Verify));
    assert!(!decode.options.dependent_launch);
    assert_eq!(decode.break_at, Some(["attention".to_owned()].into()));
    let prefill = resolved.runner(Phase::Prefill, &limits).unwrap();
    assert_eq!(prefill.buckets.largest(), 256, "never more than the state holds");
}

#[test]
fn byte_sizes() {
    use super::validate::parse_bytes;
    let good =
        [("0", 0), ("4096", 4096), ("150MiB", 150 << 20), ("2 GiB", 2 << 30), ("1KiB", 1024)];
    for (text, bytes) in good {
        assert_eq!(parse_bytes(text), Some(bytes), "{text}");
    }
    for text in ["", "none", "MiB", "1MB", "-1", "1.5GiB", "99999999999GiB"] {
        assert_eq!(parse_bytes(text), None, "{text}");
    }
}

#[test]
fn refusing_leaves_no_step_without_a_graph() {
    let json =
        r#"{"decode": {"buckets": "1,2,4,16", "max_padding_ratio": 0.5}, "fallback": "error"}"#;
    expect![[r#"fallback = error and decode.max_padding_ratio = 0.5: a step of 5 sequences would be refused, because bucket 16 wastes more; use a denser list"#]]
        .assert_eq(&refused(json, &[], &H200));
    resolved(&json.replace("error", "warn"), &[], &H200);
    // A prompt token alone wastes most of its bucket.
    let both = |ratio: &str| {
        let both = format!(r#"{{"max_padding_ratio": {ratio}}}"#);
        format!(r#"{{"decode": {both}, "prefill": {both}, "fallback": "error"}}"#)
    };
    resolved(&both("0.95"), &[], &H200);
    assert!(refused(&both("0.5"), &[], &H200).contains("a step of 1 tokens would be refused"));
}
