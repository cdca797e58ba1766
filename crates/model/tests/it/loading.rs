//! All problems of a checkpoint's tensors are reported at once.

use crate::models;
use model::{LoadError, LoadOptions, ModelSource, load_executor};
use serde_json::Value;

/// A small checkpoint with its header changed; the data stays.
fn with_header(change: impl FnOnce(&mut serde_json::Map<String, Value>)) -> tempfile::TempDir {
    let golden = models::folder().join("llama");
    let file = std::fs::read(golden.join("model.safetensors")).unwrap();
    let (len, rest) = file.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let mut header: Value = serde_json::from_slice(header).unwrap();
    change(header.as_object_mut().unwrap());
    let header = header.to_string();
    let folder = tempfile::tempdir().unwrap();
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat();
    std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
    std::fs::copy(golden.join("config.json"), folder.path().join("config.json")).unwrap();
    folder
}

#[test]
fn missing_extra_and_wrong_tensors_are_listed_at_once() {
    let folder = with_header(|tensors| {
        // A renamed tensor is both missing and extra; another has its dimensions swapped.
        let norm = tensors.remove("model.norm.weight").unwrap();
        tensors.insert("model.surprise.weight".into(), norm);
        let up = tensors.get_mut("model.layers.1.mlp.up_proj.weight").unwrap();
        up["shape"].as_array_mut().unwrap().reverse();
    });
    let device = device::cpu::open(Some(1), false).unwrap();
    let source = ModelSource::Checkpoint(folder.path().to_owned());
    let options = LoadOptions { pages: Some(8), ..LoadOptions::default() };
    let outcome = load_executor(&source, &device, &options, &|_| {});
    let Err(LoadError::Tensors { problems, .. }) = outcome.map(|_| ()) else {
        panic!("the checkpoint was taken");
    };
    let listed = problems.join("\n");
    assert_eq!(problems.len(), 3, "{listed}");
    assert!(listed.contains("model.norm.weight: missing"), "{listed}");
    assert!(listed.contains("model.surprise.weight: not part of this model"), "{listed}");
    assert!(listed.contains("up_proj.weight: shape [64, 96], expected [96, 64]"), "{listed}");
}
