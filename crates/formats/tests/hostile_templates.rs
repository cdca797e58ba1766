//! Malicious templates and messages: each is refused with one line, in little time, and all of
//! them together within a quarter of a gigabyte. Alone in its process, so that memory can be measured.

mod measure;
mod sources;

use formats::chat::ChatTemplate;
use formats::tokenizer::Escaper;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The slowest takes about a second; the machine may be busy.
const TIME: Duration = Duration::from_secs(30);
const MEGABYTES: u64 = 256;

/// Renders with every way in.
fn render(source: &str, messages: &Value, extra: &Map<String, Value>) -> formats::Result<String> {
    let template = ChatTemplate::new(source, BTreeMap::new())?;
    let escaper = Escaper::new(["<|im_end|>", "<|im_start|>"]);
    let escaped = template.render_escaped(messages, None, true, extra, &escaper);
    let plain = template.render(messages, None, true, extra)?;
    assert_eq!(escaped?.visible(), plain);
    Ok(plain)
}

#[track_caller]
fn refused(name: &str, source: &str, messages: &Value, extra: &Map<String, Value>) {
    // The memory of the messages themselves is not counted.
    let before = measure::now();
    let start = Instant::now();
    let made = render(source, messages, extra);
    let took = start.elapsed();
    let line = match made {
        Ok(text) => panic!("{name}: rendered {} bytes", text.len()),
        Err(error) => error.to_string(),
    };
    println!("{:>6.0} ms  {name}: {line}", took.as_secs_f64() * 1e3);
    assert!(line.starts_with("chat template: "), "{name}: {line}");
    assert!(!line.contains('\n') && line.len() < 1_000, "{name}: not one line: {line}");
    assert!(took < TIME, "{name}: {took:?}");
    let more = measure::peak().saturating_sub(before);
    assert!(more < MEGABYTES, "{name}: {more} MB");
}

#[test]
fn no_template_and_no_message_runs_away() {
    let (none, some) = (json!([]), json!([{"role": "user", "content": "hi"}]));
    for (name, source) in sources::templates() {
        refused(name, &source, &some, &Map::new());
    }
    println!("peak: {} MB", measure::peak());
    // Messages as hostile as templates, with a template that is not.
    let simple = "{% for m in messages %}{{ m.content | trim }}{% endfor %}";
    let long = json!([{"role": "user", "content": "x".repeat(9 << 20)}]);
    refused("a long message", simple, &long, &Map::new());
    let mut deep = json!("x");
    for _ in 0..100 {
        deep = json!([deep]);
    }
    refused("deep messages", simple, &deep, &Map::new());
    let mut extra = Map::new();
    extra.insert("messages".into(), json!([]));
    refused("messages twice", simple, &none, &extra);
    // A template that trusts its variables with numbers.
    let width = "{{ 'x'|indent(width, true) }}{{ 'x' * times }}";
    for (name, value) in [("width", json!(1e11 as u64)), ("times", json!(u64::MAX))] {
        let mut extra = Map::from_iter([("width".into(), json!(1)), ("times".into(), json!(1))]);
        extra.insert(name.into(), value);
        refused(name, width, &none, &extra);
    }
    let many: Vec<Value> = (0..400_000).map(|_| json!({"content": ""})).collect();
    refused("many messages", simple, &Value::Array(many), &Map::new());
    extra.clear();
    let lists = json!((0..2_000_000).map(|_| json!([])).collect::<Vec<_>>());
    extra.insert("x".into(), lists);
    refused("many lists", simple, &none, &extra);
}
