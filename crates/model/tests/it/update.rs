//! Weights that are replaced while the model stays on its device: its graphs, recorded before, give the tokens of a
//! fresh start with the new weights.

use crate::answers;
use crate::models;
use answers::{Answers, BACKENDS, checkpoint, copy_folder, engine_of, options, recorded, request};
use device::DType;
use device::shared::SharedName;
use engine::Engine;
use engine::request::Event;
use formats::checkpoint::Checkpoint;
use model::{
    GraphExecutor, KeepOptions, LoadOptions, ModelConfig, ModelSource, Parts, SharedTensor,
    UpdateError,
};
use std::collections::BTreeMap;
use std::path::Path;

fn ask(engine: &mut Engine<GraphExecutor>) -> Answers {
    answers::answers(engine, (0..4).map(request).collect())
}

/// Tensors by name: shape and values.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// Writes tensors as a safetensors file.
fn save(tensors: &Tensors, folder: &Path) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, (shape, values)) in tensors {
        let from = data.len();
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        let entry =
            serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [from, data.len()]});
        header.insert(name.clone(), entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    std::fs::write(folder.join("model.safetensors"), file).unwrap();
}

/// The tensors of a golden, those that `takes` accepts each times a factor of its own.
fn tensors(case: &str, takes: impl Fn(&str) -> bool) -> Tensors {
    let from = Checkpoint::open(&models::folder().join(case)).unwrap();
    let tensor = |(index, info): (usize, &formats::checkpoint::TensorInfo)| {
        let factor = if takes(&info.name) { 1.0 + 0.05 * (index % 7 + 1) as f32 } else { 1.0 };
        let values = from.read_f32(&info.name).unwrap();
        let values = values.iter().map(|value| value * factor).collect();
        (info.name.clone(), (info.shape.clone(), values))
    };
    from.tensors().enumerate().map(tensor).collect()
}

/// A folder with the golden's configuration and changed weights.
fn changed(case: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    copy_folder(&models::folder().join(case), folder.path());
    save(&tensors(case, |_| true), folder.path());
    folder
}

/// A folder with some tensors only, and no configuration.
fn some(case: &str, takes: impl Fn(&str) -> bool) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut all = tensors(case, &takes);
    all.retain(|name, _| takes(name));
    save(&all, folder.path());
    folder
}

fn update(engine: &mut Engine<GraphExecutor>, path: &Path) -> Result<(), UpdateError> {
    let update = engine.executor().check_update(path)?;
    engine.vacate();
    engine.executor_mut().update(update)?;
    engine.renew(7);
    Ok(())
}

#[test]
fn graphs_recorded_before_give_the_new_models_tokens() {
    let new = changed("llama");
    let source = ModelSource::Checkpoint(new.path().into());
    for device in models::devices() {
        for backend in BACKENDS {
            let expected = ask(&mut engine_of(&source, &device, &options(backend)));
            let mut engine = engine_of(&checkpoint("llama"), &device, &options(backend));
            let before = ask(&mut engine);
            let graphs = recorded(&engine);
            update(&mut engine, new.path()).unwrap();
            assert_eq!(ask(&mut engine), expected, "{backend}");
            assert_ne!(before, expected);
            // And back.
            update(&mut engine, &models::folder().join("llama")).unwrap();
            assert_eq!(ask(&mut engine), before, "{backend}");
            assert_eq!(recorded(&engine), graphs, "{backend}");
        }
    }
}

/// Tied, quantised, with experts, joined projections, norms stored less 1, biases.
#[test]
fn every_kind_of_weights_can_be_replaced() {
    for case in ["llama-tied", "qwen2", "gemma3", "phi3", "qwen3-moe", "cohere"] {
        let new = changed(case);
        let source = ModelSource::Checkpoint(new.path().into());
        let expected = ask(&mut engine_of(&source, &models::cpu(), &options("full")));
        let mut engine = engine_of(&checkpoint(case), &models::cpu(), &options("full"));
        update(&mut engine, new.path()).unwrap();
        assert_eq!(ask(&mut engine), expected, "{case}");
    }
    // Quantised weights in the files of the same kind.
    let mut engine = engine_of(&checkpoint("qwen3-fp8"), &models::cpu(), &options("full"));
    let before = ask(&mut engine);
    update(&mut engine, &models::folder().join("qwen3-fp8")).unwrap();
    assert_eq!(ask(&mut engine), before);
}

/// Some tensors of a weight that is made of several: the others keep their values, also after a sleep that forgets all.
#[test]
fn a_subset_of_tensors_changes_nothing_else() {
    let takes = |name: &str| name.contains("q_proj") || name.contains("layers.1.mlp.up_proj");
    let part = some("llama", takes);
    // The same as a whole checkpoint.
    let whole = tempfile::tempdir().unwrap();
    copy_folder(&models::folder().join("llama"), whole.path());
    save(&tensors("llama", takes), whole.path());
    let source = ModelSource::Checkpoint(whole.path().into());
    let expected = ask(&mut engine_of(&source, &models::cpu(), &options("full")));
    let mut engine = engine_of(&checkpoint("llama"), &models::cpu(), &options("full"));
    let checked = engine.executor().check_update(part.path()).unwrap();
    assert_eq!((checked.weights(), checked.is_whole()), (3, false));
    update(&mut engine, part.path()).unwrap();
    assert_eq!(ask(&mut engine), expected);
    engine.vacate();
    engine.executor_mut().sleep(Parts::ALL, false).unwrap();
    engine.executor_mut().wake(Parts::ALL, true).unwrap();
    assert_eq!(ask(&mut engine), expected, "what was updated is read again");
}

/// Requests that run go on with the new weights and the tokens they have.
#[test]
fn running_requests_go_on_with_the_new_weights() {
    let new = changed("llama");
    let mut engine = engine_of(&checkpoint("llama"), &models::cpu(), &options("full"));
    let before = ask(&mut engine);
    let mut found = Answers::new();
    let events = (0..4).map(|number| Event::Submit(Box::new(request(number)))).collect();
    let outputs = engine.step_wait(0, events);
    answers::collect(outputs, &mut found);
    let checked = engine.executor().check_update(new.path()).unwrap();
    answers::collect(engine.vacate(), &mut found);
    let kept = found.clone();
    engine.executor_mut().update(checked).unwrap();
    engine.renew(3);
    answers::finish(&mut engine, &mut found);
    for (id, tokens) in &found {
        let until = kept.get(id).map_or(0, Vec::len);
        assert_eq!((tokens.len(), &tokens[..until]), (8, &before[id][..until]));
    }
    assert_ne!(found, before);
}

/// Pages that were kept of the old weights are not found by the new ones.
#[test]
fn kept_pages_of_old_weights_are_not_found() {
    let new = changed("llama");
    let keep = KeepOptions { host_bytes: Some(4 << 20), ..KeepOptions::default() };
    let options = LoadOptions { keep, ..options("full") };
    let source = ModelSource::Checkpoint(new.path().into());
    let expected = ask(&mut engine_of(&source, &models::cpu(), &options));
    let mut engine = engine_of(&checkpoint("llama"), &models::cpu(), &options);
    ask(&mut engine);
    let cached = engine.stats().cached_tokens;
    update(&mut engine, new.path()).unwrap();
    assert_eq!(ask(&mut engine), expected);
    assert_eq!((engine.stats().cached_tokens, engine.stats().fetched_pages), (cached, 0));
}

/// Weights from a seed are replaced as a whole, and those that were forgotten can be.
#[test]
fn weights_that_were_forgotten_or_drawn_can_be_replaced() {
    let new = changed("llama");
    let source = ModelSource::Checkpoint(new.path().into());
    let expected = ask(&mut engine_of(&source, &models::cpu(), &options("full")));
    let mut engine = engine_of(&checkpoint("llama"), &models::cpu(), &options("full"));
    engine.vacate();
    engine.executor_mut().sleep(Parts::ALL, false).unwrap();
    let checked = engine.executor().check_update(new.path()).unwrap();
    let asleep = engine.executor_mut().update(checked).unwrap_err();
    assert!(matches!(asleep, UpdateError::Asleep), "{asleep}");
    engine.executor_mut().wake(Parts { weights: true, kv: false }, false).unwrap();
    let checked = engine.executor().check_update(new.path()).unwrap();
    engine.executor_mut().update(checked).unwrap();
    engine.executor_mut().wake(Parts { weights: false, kv: true }, true).unwrap();
    assert!(!engine.executor().lacks_weights());
    assert_eq!(ask(&mut engine), expected);

    let config = ModelConfig::from_folder(new.path()).unwrap();
    let drawn = ModelSource::Dummy { config: Box::new(config), seed: 3 };
    let mut engine = engine_of(&drawn, &models::cpu(), &options("full"));
    let part = some("llama", |name| name.contains("q_proj"));
    let error = engine.executor().check_update(part.path()).unwrap_err().to_string();
    assert!(error.contains("k_proj.weight: missing"), "{error}");
    update(&mut engine, new.path()).unwrap();
    // Drawn weights are bf16 on the device.
    assert_eq!(ask(&mut engine).len(), 4);
}

/// What does not fit is refused before anything is written, and a file that breaks half way leaves the old weights.
#[test]
fn an_update_that_fails_leaves_the_old_weights() {
    let mut engine = engine_of(&checkpoint("llama"), &models::cpu(), &options("full"));
    let before = ask(&mut engine);
    let wrong = |engine: &Engine<GraphExecutor>, path: &Path| {
        engine.executor().check_update(path).unwrap_err().to_string()
    };
    let error = wrong(&engine, &models::folder().join("qwen3"));
    assert!(error.contains("expected") && error.contains("not part of this model"), "{error}");
    assert!(!wrong(&engine, Path::new("/nowhere")).is_empty());
    let none = some("llama", |_| false);
    assert!(wrong(&engine, none.path()).contains("no tensor"), "an empty file");
    let new = changed("llama");
    let file = new.path().join("model.safetensors");
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&file, &whole[..whole.len() - 1000]).unwrap();
    assert!(!wrong(&engine, new.path()).is_empty(), "shorter than it says");
    std::fs::write(&file, &whole).unwrap();
    // It becomes shorter after it was checked.
    let checked = engine.executor().check_update(new.path()).unwrap();
    let cut = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
    cut.set_len(whole.len() as u64 - 40_000).unwrap();
    engine.vacate();
    let error = engine.executor_mut().update(checked).unwrap_err();
    assert!(matches!(error, UpdateError::Undone(_)), "{error}");
    assert!(error.to_string().ends_with("the old weights are in force"), "{error}");
    assert_eq!(ask(&mut engine), before);
}

/// Tensors in files that another process might hold in shared memory, some bytes after the start: one file for all.
fn shared(tensors: &Tensors, folder: &Path) -> Vec<SharedTensor> {
    let path = folder.join("memory");
    let (mut data, mut shared) = (vec![0; 24], Vec::new());
    for (name, (shape, values)) in tensors {
        let (name, shape, offset) = (name.clone(), shape.clone(), data.len() as u64);
        let memory = SharedName::File(path.clone());
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        shared.push(SharedTensor { name, dtype: DType::F32, shape, memory, offset });
    }
    std::fs::write(&path, data).unwrap();
    shared
}

fn update_shared(
    engine: &mut Engine<GraphExecutor>,
    tensors: &[SharedTensor],
) -> Result<(), UpdateError> {
    let update = engine.executor().check_shared(tensors)?;
    engine.vacate();
    engine.executor_mut().update_shared(update)?;
    engine.renew(9);
    Ok(())
}

#[test]
fn weights_come_from_the_memory_of_another_process() {
    for case in ["llama", "llama-tied", "qwen2", "gemma3", "phi3", "cohere"] {
        let (new, memory) = (changed(case), tempfile::tempdir().unwrap());
        let source = ModelSource::Checkpoint(new.path().into());
        let options = options("full");
        let expected = ask(&mut engine_of(&source, &models::cpu(), &options));
        let mut engine = engine_of(&checkpoint(case), &models::cpu(), &options);
        let graphs = recorded(&engine);
        let all = shared(&tensors(case, |_| true), memory.path());
        update_shared(&mut engine, &all).unwrap_or_else(|error| panic!("{case}: {error}"));
        assert_eq!(ask(&mut engine), expected, "{case}");
        assert_eq!(recorded(&engine), graphs);
    }
}

#[test]
fn parts_and_errors_of_shared_memory() {
    let mut engine = engine_of(&checkpoint("llama"), &models::cpu(), &options("full"));
    let before = ask(&mut engine);
    let memory = tempfile::tempdir().unwrap();
    let takes = |name: &str| name.contains("q_proj") || name.contains("layers.1.mlp.up_proj");
    let mut some = tensors("llama", takes);
    some.retain(|name, _| takes(name));
    let right = shared(&some, memory.path());
    // All problems at once, and nothing is changed.
    let mut wrong = right.clone();
    wrong[0].name = "model.other".into();
    wrong[1].shape.reverse();
    wrong[1].shape.push(3);
    wrong[2].offset = 1 << 40;
    wrong.push(SharedTensor { memory: SharedName::CudaIpc([7; 64]), ..right[0].clone() });
    let error = update_shared(&mut engine, &wrong).unwrap_err().to_string();
    for problem in ["not part of this model", "expected", "outside of", "no CUDA handles"] {
        assert!(error.contains(problem), "{problem}: {error}");
    }
    assert!(update_shared(&mut engine, &[]).is_err());
    assert_eq!(ask(&mut engine), before);
    // A part: the same as a checkpoint with these tensors.
    let whole = tempfile::tempdir().unwrap();
    copy_folder(&models::folder().join("llama"), whole.path());
    save(&tensors("llama", takes), whole.path());
    let source = ModelSource::Checkpoint(whole.path().into());
    let expected = ask(&mut engine_of(&source, &models::cpu(), &options("full")));
    update_shared(&mut engine, &right).unwrap();
    assert_eq!(ask(&mut engine), expected);
    // What came from there is in no file.
    let part = self::some("llama", takes);
    assert!(matches!(update(&mut engine, part.path()), Err(UpdateError::Partial)));
    engine.vacate();
    engine.executor_mut().sleep(Parts::ALL, false).unwrap();
    assert!(engine.executor_mut().wake(Parts::ALL, true).is_err());
    update(&mut engine, whole.path()).unwrap();
    assert_eq!(ask(&mut engine), expected);
}
