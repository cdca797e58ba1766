//! `--deterministic`: a request's tokens and log-probabilities are the same to the bit, whatever else is
//! in the batch, whatever bucket it runs in, however its prompt is cut, and whether its pages were found
//! in the prefix tree; log-probabilities also, whether it was drawn or is scored as a prompt. And the inverse: without it
//! they may differ.

use device::{Device, DeviceChoice};
use engine::Engine;
use engine::offline::{Answer, Offline};
use engine::request::{Request, RequestId, Sampling, TokenLogprob};
use model::GraphExecutor;
use model::ModelConfig;
use model::{LoadOptions, ModelSource, load_executor};

/// Small, with the proportions of a real model: three query heads to a KV head would be SmolLM2's,
/// two are Qwen3's.
fn model() -> ModelSource {
    let mut config = ModelConfig::bundled("qwen3-0.6b").unwrap();
    config.layers = 2;
    (config.hidden, config.intermediate, config.vocab) = (256, 512, 1024);
    (config.q_heads, config.kv_heads, config.head_dim) = (8, 4, 64);
    ModelSource::Dummy { config: Box::new(config), seed: 3 }
}

#[derive(Clone, Copy)]
struct Setting {
    deterministic: bool,
    max_batch: u32,
    step_tokens: u32,
    buckets: &'static str,
}

fn engine(device: &Device, setting: Setting) -> Offline<GraphExecutor> {
    let mut options = LoadOptions {
        max_batch: setting.max_batch,
        max_context: 256,
        prefill_tokens: Some(128),
        pages: Some(400),
        ..LoadOptions::default()
    };
    let flags = &mut options.graphs.flags;
    flags.insert("graph-buckets-decode".into(), setting.buckets.into());
    if setting.deterministic {
        flags.insert("graph-kernels".into(), "fixed".into());
    }
    let loaded = load_executor(&model(), device, &options, &|_| {}).unwrap();
    Engine::builder(loaded.executor).step_tokens(setting.step_tokens).build()
}

fn request(prompt: Vec<u32>, seed: u64, temperature: f32) -> Request {
    let (logprobs, max_tokens) = (Some(5), 16);
    let sampling = Sampling { temperature, seed, logprobs, max_tokens, ..Sampling::default() };
    Request::new(RequestId(0), prompt, sampling)
}

/// The request whose answer is compared, and others beside it.
fn mine(temperature: f32) -> Request {
    request((0..75).map(|n| n * 13 % 1000).collect(), 9, temperature)
}

fn company(count: u32) -> Vec<Request> {
    let prompt = |n: u32| (0..5 + n * 17 % 60).map(|i| (n * 31 + i * 7) % 1000).collect();
    (0..count).map(|n| request(prompt(n), u64::from(n), 1.0)).collect()
}

fn answer(engine: &mut Offline<GraphExecutor>, others: u32, temperature: f32) -> Answer {
    // In the middle, so that it joins a batch that runs and others join it.
    let mut requests = company(others);
    let at = requests.len() / 2;
    requests.insert(at, mine(temperature));
    let mut answers = engine.answer(requests);
    answers.remove(at).unwrap().choices.remove(0)
}

/// Every way of running the one request; the first is alone, in one piece.
fn all_ways(device: &Device, deterministic: bool, temperature: f32) -> Vec<(String, Answer)> {
    let setting = Setting { deterministic, max_batch: 16, step_tokens: 128, buckets: "auto" };
    let mut ways = Vec::new();
    let mut go = |setting: Setting, others: &[u32], name: &str| {
        let mut engine = engine(device, setting);
        for &others in others {
            let found = answer(&mut engine, others, temperature);
            ways.push((format!("{name}, {others} others"), found));
        }
    };
    // The second time its pages are in the tree.
    go(setting, &[0, 0, 1, 4, 20], "one piece");
    go(Setting { step_tokens: 7, ..setting }, &[0, 0, 9], "pieces of 7");
    go(Setting { step_tokens: 1, ..setting }, &[0], "token by token");
    go(Setting { max_batch: 2, ..setting }, &[0, 3], "batches of 2");
    go(Setting { buckets: "16", ..setting }, &[0, 5], "one bucket");
    ways
}

fn check(device: &Device) {
    for temperature in [0.0, 0.8] {
        let ways = all_ways(device, true, temperature);
        let (_, expected) = &ways[0];
        assert_eq!(expected.tokens.len(), 16);
        for (name, found) in &ways {
            assert_eq!(found, expected, "{name} at temperature {temperature}");
        }
    }
}

/// An answer that is drawn, and the same tokens as the end of a prompt: their log-probabilities, each with the
/// likeliest tokens at its place.
fn drawn_and_scored(device: &Device, others: u32) -> [Vec<TokenLogprob>; 2] {
    let setting = Setting { deterministic: true, max_batch: 16, step_tokens: 128, buckets: "auto" };
    let mut engine = engine(device, setting);
    let drawn = answer(&mut engine, others, 1.0);
    let prompt = mine(1.0).prompt;
    let mut whole = request([&prompt[..], &drawn.tokens].concat(), 0, 0.0);
    whole.prompt_logprobs = Some(5);
    let scored = engine.answer(vec![whole]).remove(0).unwrap().prompt_logprobs;
    [drawn.logprobs, scored[prompt.len() - 1..].to_vec()]
}

/// Log-probabilities of steps that decode and of prompts are equal to the bit: what a training loop computes from the
/// one holds for the other.
fn check_scores(device: &Device) {
    for others in [0, 7] {
        let [drawn, scored] = drawn_and_scored(device, others);
        assert_eq!(drawn.len(), 16);
        assert_eq!(drawn, scored, "{others} others");
    }
}

/// Whether any way differs without the flag.
fn differs(device: &Device) -> bool {
    let ways = all_ways(device, false, 0.0);
    ways.iter().any(|(_, found)| found != &ways[0].1)
}

#[test]
fn nothing_beside_a_request_changes_it_on_the_cpu() {
    let device = device::cpu::open(Some(2), false).unwrap();
    check(&device);
    check_scores(&device);
    // AVX-512 attention has a kernel for few queries and one for many; other processors have one.
    assert_eq!(differs(&device), device.describe().contains("avx512"));
}

#[test]
fn nothing_beside_a_request_changes_it_on_the_gpu() {
    let Ok((device, _)) = Device::open(DeviceChoice::Cuda(0)) else {
        eprintln!("skipped: no GPU");
        return;
    };
    check(&device);
    check_scores(&device);
    assert!(differs(&device), "by default kernels are chosen by bucket: some sum must differ");
}
