//! Published chat templates render what `transformers` renders.

use crate::fetch;
use formats::chat::ChatTemplate;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

fn frozen() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_721_997_296) // 2024-07-26 12:34:56
}

fn data(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/templates").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn render(template: &ChatTemplate, inputs: &Map<String, Value>) -> formats::Result<String> {
    let mut extra = inputs.clone();
    let messages = extra.remove("messages").unwrap();
    let tools = extra.remove("tools");
    let prompt = extra.remove("add_generation_prompt") == Some(Value::Bool(true));
    template.render(&messages, tools.as_ref(), prompt, &extra)
}

fn specials() -> BTreeMap<String, String> {
    [("bos_token", "<s>"), ("eos_token", "</s>")].map(|(k, v)| (k.into(), v.into())).into()
}

/// Renders every scenario, and returns where `file` expects something else of `source`.
fn differences(file: &str, least: usize, source: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let scenarios: BTreeMap<String, Map<String, Value>> =
        serde_json::from_str(&data("scenarios.json")).unwrap();
    let expected: BTreeMap<String, BTreeMap<String, Option<String>>> =
        serde_json::from_str(&data(file)).unwrap();
    assert!(expected.len() >= least && expected.values().all(|texts| !texts.is_empty()));
    let mut wrong = Vec::new();
    for (name, texts) in &expected {
        let Some(source) = source(name) else { continue };
        let template = ChatTemplate::with_clock(&source, specials(), frozen)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        for (scenario, expected) in texts {
            let found = render(&template, &scenarios[scenario]);
            match (&found, expected) {
                (Ok(found), Some(expected)) if found == expected => {}
                (Err(_), None) => {}
                _ => wrong.push(format!("{name}, {scenario}:\n{found:?}\n{expected:?}")),
            }
        }
    }
    wrong
}

#[test]
fn published_templates_agree_with_transformers() {
    let wrong = differences("expected.json", 20, |name| Some(data(&format!("{name}.jinja"))));
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n\n"));
}

#[test]
fn fetched_templates_agree_with_transformers() {
    let wrong = differences("fetched.json", 1, |name| {
        let config = fetch::tokenizer(name)?.with_file_name("tokenizer_config.json");
        let config: Value = serde_json::from_slice(&std::fs::read(config).unwrap()).unwrap();
        Some(config["chat_template"].as_str().unwrap().to_owned())
    });
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n\n"));
}

#[test]
fn snippets_agree_with_jinja2() {
    let snippets: Vec<(String, Option<String>)> =
        serde_json::from_str(&data("snippets.json")).unwrap();
    assert!(snippets.len() > 100);
    let messages = serde_json::json!([
        {"role": "user", "content": "b"}, {"role": "assistant", "content": "a"},
    ]);
    let mut wrong = Vec::new();
    for (source, expected) in &snippets {
        let found = ChatTemplate::with_clock(source, BTreeMap::new(), frozen)
            .and_then(|template| template.render(&messages, None, false, &Map::new()));
        if found.as_ref().ok() != expected.as_ref() {
            wrong.push(format!("{source}\n  ours:   {found:?}\n  jinja2: {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}
