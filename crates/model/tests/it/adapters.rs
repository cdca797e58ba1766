//! Adapters that `peft` saved: the logits of `transformers` with them, any mix of them in one batch, more of them than
//! there are slots, and what is refused.

use crate::answers;
use crate::models;
use answers::{
    Answers, BACKENDS, answers, checkpoint, copy_folder, engine_of, options, recorded, request,
};
use device::Device;
use engine::Engine;
use engine::exec::{Executor, Join, Page, PageEntry, Row, Seat, SeatParams, Step};
use engine::request::{Event, Output, Request};
use formats::checkpoint::Checkpoint;
use graph::Phase;
use model::{AdapterRoom, GraphExecutor, LoadOptions, Parts, Precision, load_executor};
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    models::folder().with_file_name("adapters")
}

fn cases() -> Vec<String> {
    let names = std::fs::read_dir(folder()).unwrap();
    let mut names: Vec<_> =
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn base_of(case: &str) -> String {
    let text = std::fs::read_to_string(folder().join(case).join("adapter_config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&text).unwrap();
    config["base_model_name_or_path"].as_str().unwrap().to_owned()
}

fn room(slots: u32) -> Option<AdapterRoom> {
    Some(AdapterRoom { slots, rank: 16 })
}

/// The tokens of the base golden, and the logits of the adapter's.
fn golden(case: &str) -> (Vec<u32>, Vec<Vec<f32>>) {
    let base = models::folder().join(base_of(case)).join("golden.safetensors");
    let base = Checkpoint::open(&base).unwrap();
    let mut bytes = vec![0; base.get("tokens").unwrap().shape[0] * 4];
    base.read_into("tokens", &mut bytes).unwrap();
    let tokens = bytes.chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect();
    let file = Checkpoint::open(&folder().join(case).join("golden.safetensors")).unwrap();
    let vocab = file.get("logits").unwrap().shape[1];
    let flat = file.read_f32("logits").unwrap();
    (tokens, flat.chunks(vocab).map(<[f32]>::to_vec).collect())
}

/// Feeds the golden tokens as a prompt, then one by one, and compares the logits after each.
fn check(case: &str, device: &Device, backend: &str) {
    let options = LoadOptions {
        precision: Some(Precision::EXACT),
        adapters: room(3),
        pages: Some(40),
        // The steps below fill one page table.
        keep_windows: true,
        ..options(backend)
    };
    let mut loaded = load_executor(&checkpoint(&base_of(case)), device, &options, &|_| {}).unwrap();
    let executor = &mut loaded.executor;
    let adapter = executor.read_adapter(&folder().join(case)).unwrap();
    executor.add_adapter(9, adapter);
    executor.begin_adapter(2, 9);
    let mut filled = Vec::new();
    while filled.is_empty() {
        executor.poll_adapters(&mut filled, true).unwrap();
    }
    assert_eq!(filled, [(2, 9)]);
    let (tokens, logits) = golden(case);
    let seat = Seat(1);
    let half = tokens.len() / 2;
    for (number, end) in (half..=tokens.len().min(half + 4)).enumerate() {
        let mut step = Step { number: number as u64 + 1, ..Step::default() };
        let start = if number == 0 { 0 } else { end - 1 };
        step.rows = vec![Row::feed(seat, start as u32, tokens[start..end].to_vec())];
        if number == 0 {
            let params = SeatParams { adapter: 2, ..SeatParams::greedy() };
            step.joins = vec![Join { seat, len: 0, last_token: 0, params, history: vec![] }];
            step.pages = (0..4)
                .map(|index| PageEntry { seat, table: 0, index, page: Page(20 - index) })
                .collect();
        }
        executor.launch(&step).unwrap();
        executor.poll(true).unwrap().expect("a result");
        let ours = executor.read_logits(0).unwrap();
        let theirs = &logits[end - 1];
        let worst = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= 5e-4, "{case}, {backend}: token {}: logits differ by {worst}", end - 1);
    }
}

#[test]
fn logits_equal_those_of_peft() {
    assert!(cases().len() >= 19);
    for device in models::devices() {
        for case in cases() {
            check(&case, &device, "full");
        }
    }
    for backend in BACKENDS {
        check("llama-all", &models::cpu(), backend);
    }
}

fn engine(slots: u32, names: &[&str]) -> Engine<GraphExecutor> {
    let options = LoadOptions { adapters: room(slots), ..options("full") };
    let mut engine = engine_of(&checkpoint("llama"), &models::cpu(), &options);
    for (index, name) in names.iter().enumerate() {
        let adapter = engine.executor().read_adapter(&folder().join(name)).unwrap();
        engine.executor_mut().add_adapter(index as u64 + 1, adapter);
    }
    engine
}

fn with(adapter: u64, number: u64) -> Request {
    Request { adapter, ..request(number) }
}

const NAMES: [&str; 5] = ["llama-all", "llama-mlp", "llama-q", "llama-head", "llama-patterns"];

/// Each request alone, in an engine of its own.
fn alone(requests: &[Request]) -> Answers {
    let mut all = Answers::new();
    for request in requests {
        all.extend(answers(&mut engine(2, &NAMES), vec![request.clone()]));
    }
    all
}

#[test]
fn any_mix_gives_what_each_gives_alone() {
    let requests: Vec<Request> = (0..12).map(|number| with(number % 6, number)).collect();
    let expected = alone(&requests);
    let plain = answers(&mut engine(2, &[]), vec![request(3)]);
    assert_ne!(plain[&3], expected[&3], "the adapter changes the answer");
    // With a slot for each, and with fewer slots than adapters.
    for slots in [5, 2, 1] {
        let mut engine = engine(slots, &NAMES);
        assert_eq!(answers(&mut engine, requests.clone()), expected, "{slots} slots");
        assert_eq!(answers(&mut engine, requests.clone()), expected, "{slots} slots, again");
    }
}

/// Two graphs for each bucket, whatever is loaded; requests without adapters replay those without their nodes.
#[test]
fn steps_without_adapters_replay_their_own_graphs() {
    let plain = engine_of(&checkpoint("llama"), &models::cpu(), &options("full"));
    let mut engine = engine(2, &NAMES);
    let graphs = recorded(&engine);
    assert_eq!(graphs, 2 * recorded(&plain));
    answers(&mut engine, (0..4).map(request).collect());
    let replayed = |engine: &Engine<GraphExecutor>, adapters: bool| -> u64 {
        let runners = engine.executor().runners();
        let of = |phase| runners.counters(phase).buckets.iter();
        let both = of(Phase::Decode).chain(of(Phase::Prefill));
        both.filter(|(key, _)| key.adapters == adapters).map(|(_, count)| count.replayed).sum()
    };
    assert!(replayed(&engine, false) > 0 && replayed(&engine, true) == 0);
    answers(&mut engine, vec![with(1, 1), with(5, 2), request(3)]);
    assert!(replayed(&engine, true) > 0);
    assert_eq!(recorded(&engine), graphs, "none is recorded for an adapter");
    let runners = engine.executor().runners();
    for phase in [Phase::Decode, Phase::Prefill] {
        assert!(runners.counters(phase).eager.is_empty());
    }
}

/// Pages of one adapter are found by requests with the same one only.
#[test]
fn cached_pages_belong_to_one_adapter() {
    let mut engine = engine(2, &NAMES);
    let mut found = |adapter: u64| {
        let mut events = vec![Event::Submit(Box::new(with(adapter, 3)))];
        let mut cached = None;
        while !events.is_empty() || !engine.is_idle() {
            for output in engine.step_wait(0, std::mem::take(&mut events)) {
                if let Output::Prefilled { cached_tokens, .. } = output {
                    cached = Some(cached_tokens);
                }
            }
        }
        cached.unwrap()
    };
    assert_eq!([found(0), found(1), found(2)], [0, 0, 0]);
    assert_eq!([found(0), found(1), found(2)], [16, 16, 16]);
}

/// Adapters outlive a sleep, also one that forgets the weights.
#[test]
fn adapters_outlive_a_sleep() {
    let mut engine = engine(2, &NAMES);
    let requests: Vec<Request> = (0..4).map(|number| with(number, number)).collect();
    let before = answers(&mut engine, requests.clone());
    for keep in [true, false] {
        engine.vacate();
        engine.executor_mut().sleep(Parts::ALL, keep).unwrap();
        engine.executor_mut().wake(Parts::ALL, true).unwrap();
        assert_eq!(answers(&mut engine, requests.clone()), before, "weights kept: {keep}");
    }
}

/// A copy of an adapter with another configuration.
fn changed(case: &str, edit: impl FnOnce(&mut serde_json::Value)) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    copy_folder(&folder().join(case), to.path());
    let path = to.path().join("adapter_config.json");
    let mut config = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    edit(&mut config);
    std::fs::write(&path, config.to_string()).unwrap();
    to
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let engine = engine(2, &[]);
    let refused = |path: &Path| engine.executor().read_adapter(path).unwrap_err().to_string();
    for (key, value, expected) in [
        ("use_dora", serde_json::json!(true), "DoRA"),
        ("modules_to_save", serde_json::json!(["lm_head"]), "modules_to_save"),
        ("bias", serde_json::json!("all"), "biases"),
        ("peft_type", serde_json::json!("IA3"), "IA3"),
        ("target_parameters", serde_json::json!(["mlp.experts.down_proj"]), "experts"),
        ("alpha_pattern", serde_json::json!({".*q_proj": 3.0}), "expression"),
        ("lora_alpha", serde_json::json!(0), "more than 0"),
        ("r", serde_json::json!("four"), "invalid type"),
    ] {
        let wrong = changed("llama-q", |config| config[key] = value);
        let error = refused(wrong.path());
        assert!(error.contains(expected), "{key}: {error}");
    }
    // Another model's: some shapes differ, some linears are not there.
    let error = refused(&folder().join("phi3-all"));
    assert!(error.contains("qkv_proj: no linear of this model"), "{error}");
    let error = refused(&folder().join("qwen3-all"));
    assert!(error.contains("expected [r, 64]") || error.contains(", r]"), "{error}");
    // A rank that is too large.
    let small =
        LoadOptions { adapters: Some(AdapterRoom { slots: 1, rank: 4 }), ..options("full") };
    let small = engine_of(&checkpoint("llama"), &models::cpu(), &small);
    let error = small.executor().read_adapter(&folder().join("llama-all")).unwrap_err().to_string();
    assert!(error.contains("rank 8, and at most 4 fits"), "{error}");
    // Truncated, and missing.
    let short = changed("llama-q", |_| {});
    let file = short.path().join("adapter_model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() - 100]).unwrap();
    assert!(!refused(short.path()).is_empty());
    std::fs::remove_file(&file).unwrap();
    assert!(!refused(short.path()).is_empty());
    // A model without room for adapters.
    let plain = engine_of(&checkpoint("llama"), &models::cpu(), &options("full"));
    let error = plain.executor().read_adapter(&folder().join("llama-q")).unwrap_err().to_string();
    assert!(error.contains("without room"), "{error}");
}

#[test]
fn requests_that_cannot_have_one_are_refused() {
    let mut plain = engine_of(&checkpoint("llama"), &models::cpu(), &options("full"));
    let outputs = plain.step_wait(0, vec![Event::Submit(Box::new(with(1, 1)))]);
    assert!(matches!(outputs[..], [Output::Rejected { .. }]), "{outputs:?}");
    let mut engine = engine(2, &NAMES);
    let scored = Request { prompt_logprobs: Some(1), ..with(1, 1) };
    let outputs = engine.step_wait(0, vec![Event::Submit(Box::new(scored))]);
    assert!(matches!(outputs[..], [Output::Rejected { .. }]), "{outputs:?}");
}
