//! Grammars that once crashed or blocked the process: each is refused quickly with a clear error.

use grammar::{CompileError, Compiler, Grammar, Limits, Vocabulary};
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};

fn compiler(limits: Limits) -> Compiler {
    let mut bytes: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
    // Tokens of several bytes, so that masks walk a trie.
    for a in b'a'..=b'z' {
        for b in b'a'..=b'z' {
            bytes.push(vec![a, b]);
            bytes.push(vec![b' ', a, b, a]);
        }
    }
    bytes.push(b"<end>".to_vec());
    let end = bytes.len() as u32 - 1;
    Compiler::new(Vocabulary::new(&bytes, &[end], &[end]).expect("a vocabulary"), limits)
}

fn schema(value: Value) -> Grammar {
    Grammar::JsonSchema(value.to_string())
}

/// A chain of `links` definitions, each `link` of the next.
fn chain(links: usize, link: impl Fn(Value) -> Value) -> Grammar {
    let name = |i: usize| json!({"$ref": format!("#/$defs/d{i}")});
    let mut defs: Map<String, Value> =
        (0..links).map(|i| (format!("d{i}"), link(name(i + 1)))).collect();
    defs.insert(format!("d{links}"), json!({"type": "string"}));
    schema(json!({"$ref": "#/$defs/d0", "$defs": defs}))
}

fn properties(count: usize, required: bool) -> Grammar {
    let names: Vec<String> = (0..count).map(|i| format!("p{i}")).collect();
    let all: Map<String, Value> =
        names.iter().map(|name| (name.clone(), json!({"type": "string"}))).collect();
    let required = if required { names } else { Vec::new() };
    schema(json!({"type": "object", "properties": all, "required": required}))
}

fn patterns(count: usize) -> Value {
    let all: Map<String, Value> =
        (0..count).map(|i| (format!("^p{i}[a-z]+x$"), json!({"type": "string"}))).collect();
    json!({"type": "object", "patternProperties": all})
}

fn too_large() -> Vec<(&'static str, Grammar)> {
    let deep = |depth: usize| {
        let (open, close) = (r#"{"items":"#, "}");
        Grammar::JsonSchema(format!("{}true{}", open.repeat(depth), close.repeat(depth)))
    };
    let product = |factors: usize, options: usize| {
        let one = |i: usize| {
            let option =
                |j: usize| json!({"properties": {format!("a{i}_{j}"): {"type": "string"}}});
            json!({"anyOf": (0..options).map(option).collect::<Vec<_>>()})
        };
        schema(json!({"allOf": (0..factors).map(one).collect::<Vec<_>>()}))
    };
    // Each level has the next twice, inlined because the reference has sibling keywords.
    let doubling = chain(40, |next| {
        let mut one = next.clone();
        one["minLength"] = json!(1);
        let mut other = next;
        other["maxLength"] = json!(9);
        json!({"anyOf": [one, other]})
    });
    let one_of: Vec<Value> = (0..1500)
        .map(|i| json!({"type": "object", "required": ["k"], "properties": {"k": {"const": i}}}))
        .collect();
    vec![
        ("594 references", chain(594, |next| next)),
        ("336 allOf", chain(336, |next| json!({"allOf": [next]}))),
        ("289 anyOf", chain(289, |next| json!({"anyOf": [next, {"type": "null"}]}))),
        ("277 items", chain(277, |next| json!({"type": "array", "items": next}))),
        ("20,000 references", chain(4000, |next| next)),
        ("4,234 required", properties(4234, true)),
        ("5,000 optional", properties(5000, false)),
        ("400 patterns", schema(patterns(400))),
        ("17 patterns, merged", schema(json!({"allOf": [patterns(9), patterns(17)]}))),
        ("2^10 alternatives", product(10, 2)),
        ("128^2 alternatives", product(2, 128)),
        ("doubling", doubling),
        ("3,000 anyOf", schema(json!({"anyOf": vec![json!({"type": "string"}); 3000]}))),
        ("1,500 oneOf", schema(json!({"oneOf": one_of}))),
        ("10,000 values", schema(json!({"enum": (0..10_000).collect::<Vec<_>>()}))),
        ("a large multipleOf", schema(json!({"type": "integer", "multipleOf": 4_000_000_000u64}))),
        ("a pattern of 20 kB", schema(json!({"pattern": "ab|".repeat(7000)}))),
        ("a regex of 20 kB", Grammar::Regex("ab|".repeat(7000))),
        ("100 groups", Grammar::Regex(format!("{}a{}", "(".repeat(100), ")".repeat(100)))),
        ("a text of 300 kB", Grammar::Lark("// \n".repeat(75_000))),
        ("200 groups in Lark", {
            Grammar::Lark(format!("start: {}\"a\"{}", "(".repeat(200), ")".repeat(200)))
        }),
        ("a schema in Lark", {
            Grammar::Lark(format!("start: doc\ndoc: %json {}", patterns(400)))
        }),
        ("deep, before the text is too deep", deep(126)),
    ]
}

#[test]
fn too_large_grammars_are_refused_before_compilation() {
    let compiler = compiler(Limits { depth: 100, ..Limits::default() });
    for (name, grammar) in too_large() {
        let began = Instant::now();
        let error = compiler.compile(&grammar).expect_err(name);
        assert!(matches!(error, CompileError::TooLarge(_)), "{name}: {error:?}");
        assert!(began.elapsed() < Duration::from_secs(2), "{name}: {:?}", began.elapsed());
        let text = error.to_string();
        assert!(text.starts_with("the grammar is too large: more than "), "{name}: {text}");
    }
    assert_eq!(compiler.compilations(), 0);
}

/// Without the size limits the stack must suffice: no grammar here may crash the process.
#[test]
fn the_stack_is_large_enough_without_limits() {
    let compiler = compiler(Limits {
        depth: 1 << 20,
        schemas: 1 << 20,
        properties: 1 << 20,
        merged: 1 << 20,
        alternatives: 1 << 20,
        time: Duration::from_secs(60),
        ..Limits::default()
    });
    for (name, grammar) in [
        ("references", chain(3000, |next| next)),
        ("allOf", chain(3000, |next| json!({"allOf": [next]}))),
        ("items", chain(3000, |next| json!({"type": "array", "items": next}))),
        ("required", properties(4234, true)),
    ] {
        if let Err(error) = compiler.compile(&grammar) {
            assert!(!error.to_string().contains('\n'), "{name}: {error}");
        }
    }
}

#[test]
fn invalid_grammars_get_short_errors() {
    let compiler = compiler(Limits::default());
    let option =
        |i: usize, j: usize| json!({"properties": {format!("a{i}_{j}"): {"type": "null"}}});
    let one = |i: usize| json!({"anyOf": (0..30).map(|j| option(i, j)).collect::<Vec<_>>()});
    let objects = json!({"type": "object", "allOf": [one(0), one(1)]});
    for grammar in [
        schema(objects),
        schema(json!({"$ref": "#"})),
        schema(json!({"type": "string", "pattern": "(?=a)b"})),
        schema(json!({"type": "é".repeat(200)})),
        schema(json!({"type": "string", "not": {"pattern": "a"}})),
        schema(json!({"type": "array", "items": {"type": "string"}, "uniqueItems": true})),
        schema(json!({"type": "number", "multipleOf": 1e-300})),
        Grammar::Regex("(?<=a)b".into()),
        Grammar::Regex("[[:alpha:]".into()),
        Grammar::Lark("start: start".into()),
        Grammar::Lark("start: nothing".into()),
        Grammar::Lark("\u{0}".into()),
    ] {
        let began = Instant::now();
        let Err(error) = compiler.compile(&grammar) else {
            panic!("{grammar:?} was compiled");
        };
        assert!(matches!(error, CompileError::Invalid(_)), "{grammar:?}: {error:?}");
        let text = error.to_string();
        let shown = !text.contains('\n') && text.len() < 700 && !text.contains("panic");
        assert!(shown && !text.is_empty(), "{grammar:?}: {text}");
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    }
}

#[test]
fn a_time_limit_holds_and_leaves_the_compiler_usable() {
    // No compilation meets this limit; the threads still end and free their slots.
    let compiler =
        compiler(Limits { time: Duration::from_nanos(1), threads: 1, ..Limits::default() });
    let slow = (0..40).map(|i| compiler.compile(&Grammar::Regex(format!("[a-z]{{{}}}", i + 900))));
    let errors: Vec<CompileError> = slow.filter_map(Result::err).collect();
    assert!(errors.iter().any(|e| matches!(e, CompileError::TooSlow(_))), "{errors:?}");
    let known = |e: &CompileError| matches!(e, CompileError::TooSlow(_) | CompileError::Busy);
    assert!(errors.iter().all(known), "{errors:?}");
    // A compilation whose caller timed out is still cached, so a later call finds it.
    let one = Grammar::Regex("[a-z]{900}".into());
    let until = Instant::now() + Duration::from_secs(30);
    while compiler.compile(&one).is_err() {
        assert!(Instant::now() < until, "the grammar was never compiled");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn grammars_in_use_are_bounded_in_total() {
    let limits = Limits { live_bytes: 64 * 1024, ..Limits::default() };
    let compiler = compiler(limits);
    let grammar = |i: usize| Grammar::Regex(format!("{}{i}", "a".repeat(8000)));
    let mut held = Vec::new();
    let full = (0..20).map(grammar).find_map(|grammar| match compiler.compile(&grammar) {
        Ok(compiled) => {
            held.push(compiled);
            None
        }
        Err(error) => Some(error),
    });
    assert_eq!(full, Some(CompileError::Full));
    assert!((4..=8).contains(&held.len()), "{}", held.len());
    assert!(compiler.live_bytes() <= 64 * 1024);
    held.clear();
    assert!(compiler.compile(&grammar(99)).is_ok(), "unused grammars are evicted");
}

/// Every grammar that compiles has masks of bounded cost.
#[test]
fn masks_cost_a_bounded_number_of_steps() {
    let compiler = compiler(Limits::default());
    for regex in ["(a|b)*a(a|b){30}", "(.*a){20}", "((a{1,100}){1,100}){1,100}", "(a?){500}a{500}"]
    {
        let mut matcher = compiler.compile(&Grammar::Regex(regex.into())).expect(regex).matcher();
        for _ in 0..200 {
            let Ok(mask) = matcher.mask() else { break };
            assert!(mask.cost < 50_000, "{regex}: {}", mask.cost);
            let taken = (0..256u32).find(|t| mask.words[*t as usize / 32] >> (t % 32) & 1 == 1);
            let Some(token) = taken else { break };
            if !matches!(matcher.accept(token), Ok(false)) {
                break;
            }
        }
    }
}
