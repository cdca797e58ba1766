use crate::echo::{Echo, request};
use engine::Engine;
use engine::batch::{Batch, BatchError, Item};
use engine::offline::Completion;
use engine::request::Request;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const INPUT: &str = "[1,2,3]\n[4]\n\n[9,9,9,9,9]\nnot json\n[5,6]\n[]\n[7,7]";

fn to_request(item: &Item) -> Result<Request, String> {
    let prompt: Vec<u32> = serde_json::from_str(&item.text).map_err(|error| error.to_string())?;
    Ok(request(0, &prompt, 4))
}

fn to_fields(_: &Item, completion: &Completion) -> Map<String, Value> {
    let mut fields = Map::new();
    fields.insert("tokens".into(), json!(completion.choices[0].tokens));
    fields
}

fn run(input: &Path, output: &Path) -> Result<Vec<(u64, u64)>, BatchError> {
    let mut engine = Engine::builder(Echo::new(2, 60)).prefix_cache(false).build();
    let mut heard = Vec::new();
    let batch = Batch::open(input, output)?;
    batch.run(
        &mut engine,
        to_request,
        |_, _| false,
        to_fields,
        |done, total| heard.push((done, total)),
    )?;
    Ok(heard)
}

fn answers(path: &Path) -> BTreeMap<u64, Value> {
    let text = fs::read_to_string(path).unwrap();
    let mut answers = BTreeMap::new();
    for line in text.lines() {
        let value: Value = serde_json::from_str(line).unwrap();
        let item = value["line"].as_u64().unwrap();
        assert!(answers.insert(item, value).is_none(), "line {item} is answered twice");
    }
    answers
}

#[test]
fn a_kill_at_any_byte_loses_and_repeats_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (input, whole) = (folder.path().join("in.jsonl"), folder.path().join("whole.jsonl"));
    fs::write(&input, INPUT).unwrap();
    assert_eq!(run(&input, &whole).unwrap().last(), Some(&(7, 7)));
    let expected = answers(&whole);
    assert_eq!(expected.keys().copied().collect::<Vec<_>>(), [1, 2, 4, 5, 6, 7, 8]);
    assert!(expected[&5]["error"].is_string() && expected[&7]["error"].is_string());
    assert_eq!(expected[&1]["tokens"].as_array().unwrap().len(), 4);

    let bytes = fs::read(&whole).unwrap();
    for kill in 0..=bytes.len() {
        let output = folder.path().join("out.jsonl");
        fs::write(&output, &bytes[..kill]).unwrap();
        let kept = bytes[..kill].iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        run(&input, &output).unwrap();
        assert_eq!(answers(&output), expected, "killed at byte {kill}");
        // What was whole is untouched.
        assert_eq!(&fs::read(&output).unwrap()[..kept], &bytes[..kept]);
    }
}

#[test]
fn an_output_of_another_input_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    fs::write(&input, INPUT).unwrap();
    run(&input, &output).unwrap();
    fs::write(&input, INPUT.replace("[4]", "[5]")).unwrap();
    assert!(matches!(run(&input, &output), Err(BatchError::OtherInput { item: 2, .. })));
    fs::write(&input, "[1,2,3]\n").unwrap();
    assert!(matches!(run(&input, &output), Err(BatchError::OtherInput { .. })));
    fs::write(&output, "{}\n").unwrap();
    assert!(matches!(run(&input, &output), Err(BatchError::NotAnAnswer { line: 1, .. })));
}
