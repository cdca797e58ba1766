//! Vectors and scores of every family that makes them, and of decoders used so, against `transformers` (CPU, float32); the
//! checkpoints and the expected numbers under `encoders/` come from `tools/make_encoder_goldens.py`.

use device::{Device, DeviceChoice, DeviceKind};
use engine::Engine;
use engine::request::{Embed, Event, Output, Pooling, Reject, Request, RequestId, Sampling};
use formats::checkpoint::Checkpoint;
use graph::config::Given;
use model::{GraphExecutor, LoadOptions, ModelSource, Precision, Task, load_executor};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// The float32 error after a few layers, for any order of summation.
const EXACT: f32 = 1e-4;
/// The error of bf16 after a few layers, relative to the largest number.
const BF16: f32 = 0.05;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/encoders")
}

fn cases() -> Vec<String> {
    let entries = std::fs::read_dir(folder()).unwrap();
    let mut cases: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    cases.sort();
    assert!(!cases.is_empty());
    cases
}

struct Golden {
    texts: Vec<Vec<u32>>,
    kinds: Vec<Vec<u32>>,
    vectors: Vec<Vec<f32>>,
}

fn golden(case: &str) -> Golden {
    let file = Checkpoint::open(&folder().join(case).join("golden.safetensors")).unwrap();
    let words = |name: &str| {
        let mut bytes = vec![0; file.get(name).unwrap().shape[0] * 4];
        file.read_into(name, &mut bytes).unwrap();
        let word = |b: &[u8]| u32::from_le_bytes(b.try_into().unwrap());
        bytes.chunks(4).map(word).collect::<Vec<u32>>()
    };
    let lengths = words("lengths");
    let cut = |all: Vec<u32>| {
        let mut rest = &all[..];
        let mut take = |&length: &u32| {
            let (one, more) = rest.split_at(length as usize);
            rest = more;
            one.to_vec()
        };
        lengths.iter().map(&mut take).collect::<Vec<_>>()
    };
    let width = file.get("vectors").unwrap().shape[1];
    let vectors = file.read_f32("vectors").unwrap().chunks(width).map(<[f32]>::to_vec).collect();
    Golden { texts: cut(words("tokens")), kinds: cut(words("kinds")), vectors }
}

fn cpu() -> Device {
    crate::models::cpu()
}

fn devices() -> Vec<Device> {
    let gpu =
        Device::open(DeviceChoice::Cuda(0)).inspect_err(|reason| println!("skipped: {reason}"));
    [cpu()].into_iter().chain(gpu.ok().map(|(device, _)| device)).collect()
}

fn load(
    device: &Device,
    case: &str,
    graphs: Given,
    precision: Option<Precision>,
) -> (GraphExecutor, Task, usize) {
    let options = LoadOptions {
        max_batch: 4,
        max_context: 64,
        prefill_tokens: Some(64),
        graphs,
        precision,
        ..LoadOptions::default()
    };
    let source = ModelSource::Checkpoint(folder().join(case));
    let loaded = load_executor(&source, device, &options, &|_| {}).unwrap();
    (loaded.executor, loaded.config.task, loaded.config.vocab)
}

fn request(id: usize, prompt: Vec<u32>) -> Request {
    let embed = Some(Embed { pooling: Pooling::Model, unit: false });
    Request { embed, ..Request::new(RequestId(id as u64), prompt, Sampling::default()) }
}

/// The vectors of prompts, all in one call.
fn vectors(executor: GraphExecutor, prompts: Vec<Vec<u32>>) -> Vec<Vec<f32>> {
    let mut engine = Engine::new(executor, engine::EngineConfig { depth: 1, ..Default::default() });
    let mut vectors = vec![Vec::new(); prompts.len()];
    let submit = |(id, prompt)| Event::Submit(Box::new(request(id, prompt)));
    let mut events: Vec<Event> = prompts.into_iter().enumerate().map(submit).collect();
    for now in 0..10_000 {
        for output in engine.step_wait(now, std::mem::take(&mut events)) {
            match output {
                Output::Embedded { id, vector } => vectors[id.0 as usize] = vector,
                Output::Rejected { reason, .. } => panic!("{reason}"),
                _ => {}
            }
        }
        if engine.is_idle() {
            break;
        }
    }
    vectors
}

/// Tokens with their kinds, as the program takes them.
fn prompts(golden: &Golden, vocab: usize) -> Vec<Vec<u32>> {
    let kinds = |(text, kinds): (&Vec<u32>, &Vec<u32>)| {
        text.iter().zip(kinds).map(|(token, kind)| token + kind * vocab as u32).collect()
    };
    golden.texts.iter().zip(&golden.kinds).map(kinds).collect()
}

/// Compares vectors with the expected ones; a GPU without a precision computes in bf16.
fn check(device: &Device, case: &str, graphs: Given, precision: Option<Precision>) {
    let (golden, (executor, _, vocab)) = (golden(case), load(device, case, graphs, precision));
    let exact = precision.is_some() || device.kind() == DeviceKind::Cpu;
    let made = vectors(executor, prompts(&golden, vocab));
    for (index, (ours, theirs)) in made.iter().zip(&golden.vectors).enumerate() {
        assert_eq!(ours.len(), theirs.len(), "{case}");
        let worst = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let size = theirs.iter().map(|x| x.abs()).fold(0.0, f32::max);
        let allowed = if exact { EXACT } else { BF16 * size.max(1.0) };
        assert!(worst <= allowed, "{case}: text {index}: vectors differ by {worst} of {size}");
    }
}

#[test]
fn vectors_are_those_of_transformers() {
    let mut families = BTreeSet::new();
    for case in cases() {
        for device in &devices() {
            check(device, &case, Given::default(), Some(Precision::EXACT));
            check(device, &case, Given::default(), None);
        }
        let config = model::ModelConfig::from_folder(&folder().join(&case)).unwrap();
        families.insert(config.family);
    }
    for family in model::families::encoders() {
        assert!(families.contains(family), "no golden of {family}");
    }
}

/// Every step runs op by op and by replay from the same state, and every byte is compared.
#[test]
fn replays_are_their_plans() {
    for case in cases() {
        let mut graphs = Given::default();
        graphs.flags.insert("graph-debug".into(), "verify".into());
        for device in &devices() {
            check(device, &case, graphs.clone(), None);
        }
    }
}

#[test]
fn a_text_does_not_depend_on_the_others_of_its_step() {
    let golden = golden("modernbert");
    let all = vectors(load(&cpu(), "modernbert", Given::default(), None).0, golden.texts.clone());
    for (text, together) in golden.texts.iter().zip(all) {
        let alone =
            vectors(load(&cpu(), "modernbert", Given::default(), None).0, vec![text.clone()]);
        let worst = alone[0].iter().zip(&together).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= 1e-6, "{worst}");
    }
}

#[test]
fn what_such_a_model_cannot_do_is_refused() {
    let (executor, ..) = load(&cpu(), "bert", Given::default(), None);
    let mut engine = Engine::new(executor, engine::EngineConfig::default());
    let generate = Request::new(RequestId(1), vec![5, 6], Sampling::default());
    let long = request(2, vec![5; 65]);
    let mut mean = request(3, vec![5, 6]);
    mean.embed = Some(Embed { pooling: Pooling::Mean, unit: true });
    let unknown = request(4, vec![2 * 131]);
    let events = [generate, long, mean, unknown].map(|r| Event::Submit(Box::new(r))).into();
    let refused: Vec<Reject> = engine
        .step(0, events)
        .into_iter()
        .filter_map(|output| match output {
            Output::Rejected { reason, .. } => Some(reason),
            _ => None,
        })
        .collect();
    let [Reject::BadParameter { field: "embed", .. }, long, mean, unknown] = &refused[..] else {
        panic!("{refused:?}");
    };
    assert_eq!(*long, Reject::TooLong { found: 65, allowed: 64 });
    assert!(matches!(mean, Reject::BadParameter { field: "embed", .. }));
    assert_eq!(*unknown, Reject::UnknownToken(262));
}
