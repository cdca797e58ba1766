//! Heads that draft from the model's hidden states, against PyTorch (CPU, float32): the drafts of every step and the logits
//! that they are chosen from. The heads and the expected numbers under `heads/` come from `tools/make_head_goldens.py`.

use crate::models;
use device::{Device, DeviceChoice, Op};
use engine::exec::{Executor, Join, Page, PageEntry, Row, Seat, SeatParams, Step};
use engine::request::{Request, RequestId, Sampling};
use engine::{Engine, EngineConfig};
use formats::checkpoint::Checkpoint;
use graph::ShapeKey;
use model::{
    GraphExecutor, LoadError, LoadOptions, LoadedExecutor, ModelSource, Precision, Speculation,
    load_executor,
};
use std::path::PathBuf;
use tempfile::TempDir;

const DRAFTS: u32 = 3;
/// The float32 error through the model's layers and the head's.
const EXACT: f32 = 2e-4;

fn folder(head: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/heads").join(head)
}

fn load_with(
    device: &Device,
    source: &ModelSource,
    method: &str,
    head: Option<PathBuf>,
) -> Result<LoadedExecutor, LoadError> {
    let options = LoadOptions {
        max_batch: 4,
        max_context: 128,
        prefill_tokens: Some(64),
        pages: Some(60),
        precision: Some(Precision::EXACT),
        spec: Some(format!("{method}:{DRAFTS}").parse().unwrap()),
        spec_model: head.map(ModelSource::Checkpoint),
        ..LoadOptions::default()
    };
    load_executor(source, device, &options, &|_| {})
}

/// A head of `heads` beside a model of the goldens.
fn load(device: &Device, target: &str, head: &str) -> Result<LoadedExecutor, LoadError> {
    let source = ModelSource::Checkpoint(models::folder().join(target));
    load_with(device, &source, "eagle3", Some(folder(head)))
}

/// Heads and what they draft for: a model that attends in every layer, and one with recurrent layers.
const HEADS: [(&str, &str); 2] = [("eagle3", "smollm3"), ("eagle3-next", "qwen3-next")];
/// Layers of models' own.
const LAYERS: [(&str, &str); 3] =
    [("mtp", "smollm2"), ("mtp-next", "qwen3-next"), ("mtp-3-5", "qwen3-5")];

struct Golden {
    tokens: Vec<u32>,
    /// Drafts of each step.
    drafts: Vec<Vec<u32>>,
    /// What they were chosen from.
    logits: Vec<Vec<f32>>,
}

fn golden(head: &str) -> Golden {
    let file = Checkpoint::open(&folder(head).join("golden.safetensors")).unwrap();
    let words = |name: &str| -> Vec<u32> {
        let count: usize = file.get(name).unwrap().shape.iter().product();
        let mut bytes = vec![0; count * 4];
        file.read_into(name, &mut bytes).unwrap();
        bytes.chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let vocab = file.get("logits").unwrap().shape[2];
    Golden {
        tokens: words("tokens"),
        drafts: words("drafts").chunks(DRAFTS as usize).map(<[u32]>::to_vec).collect(),
        logits: file.read_f32("logits").unwrap().chunks(vocab).map(<[f32]>::to_vec).collect(),
    }
}

/// Feeds the prompt in pieces; its last piece samples a token.
fn feed(executor: &mut GraphExecutor, prompt: &[u32], piece: usize, number: &mut u64) -> u32 {
    let seat = Seat(1);
    let mut sampled = None;
    for start in (0..prompt.len()).step_by(piece) {
        let end = (start + piece).min(prompt.len());
        let row = Row::feed(seat, start as u32, prompt[start..end].to_vec());
        let first = start == 0;
        let params = SeatParams::greedy();
        let join = Join { seat, len: 0, last_token: 0, params, history: vec![] };
        let page = |index| PageEntry { seat, table: 0, index, page: Page(30 - index * 3) };
        *number += 1;
        let step = Step {
            number: *number,
            rows: vec![Row { sample: end == prompt.len(), ..row }],
            joins: if first { vec![join] } else { vec![] },
            pages: (0..4).filter(|_| first).map(page).collect(),
            ..Step::default()
        };
        executor.launch(&step).unwrap();
        let result = executor.poll(true).unwrap().expect("a result");
        sampled = result.rows[0].tokens.first().map(|token| token.token);
    }
    sampled.expect("a token")
}

/// What the last step verified: the known token and its drafts.
fn verified(executor: &GraphExecutor) -> Vec<u32> {
    let runners = executor.runners();
    let span = runners.bindings().state.token.span.part(0, u64::from(DRAFTS + 1) * 4);
    let bytes = executor.device().read(runners.arena(), span).unwrap();
    bytes.chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn check(load: &dyn Fn() -> GraphExecutor, golden: &Golden, prompt: usize) {
    for piece in [prompt, 5, 1] {
        let mut executor = load();
        executor.force_drafts(DRAFTS, 0);
        let mut number = 0;
        let token = feed(&mut executor, &golden.tokens[..prompt], piece, &mut number);
        assert_eq!(token, golden.tokens[prompt], "pieces of {piece}");
        let mut step = 0;
        loop {
            number += 1;
            let row = Row { most: DRAFTS + 1, ..Row::decode(Seat(1), (prompt + step) as u32) };
            let launched = Step { number, rows: vec![row], ..Step::default() };
            executor.launch(&launched).unwrap();
            let result = executor.poll(true).unwrap().expect("a result");
            let wanted =
                [&golden.tokens[prompt + step..=prompt + step], &golden.drafts[step]].concat();
            assert_eq!(verified(&executor), wanted, "pieces of {piece}, step {step}");
            let tokens = result.rows[0].tokens.iter().map(|token| token.token);
            let returned: Vec<u32> = tokens.collect();
            let at = prompt + step + 1;
            let known = (golden.tokens.len() - at).min(returned.len());
            assert_eq!(returned[..known], golden.tokens[at..at + known], "step {step}");
            step += returned.len();
            if step >= golden.drafts.len() {
                break;
            }
            if step + 1 == golden.drafts.len() {
                // This runs the last step.
                logits(&executor, golden, step);
                break;
            }
        }
    }
}

/// Runs the drafts of the next step by its plan, op by op, and compares each pass's logits.
fn logits(executor: &GraphExecutor, golden: &Golden, step: usize) {
    let runners = executor.runners();
    let plan =
        runners.decode.plan_of(&ShapeKey::verify(1, DRAFTS + 1)).expect("a bucket of one row");
    let mut draft = 0;
    for node in &plan.nodes {
        executor.device().run(runners.arena(), node).unwrap();
        let Op::Propose(propose) = &node.op else { continue };
        let bytes = executor.device().read(runners.arena(), propose.logits.span).unwrap();
        let ours = propose.logits.dtype.decode(&bytes);
        let theirs = &golden.logits[step * DRAFTS as usize + draft];
        let worst = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < EXACT, "draft {draft} of step {step} is {worst} off");
        draft += 1;
    }
    assert_eq!(draft, DRAFTS as usize);
}

#[test]
fn an_eagle3_head_drafts_what_pytorch_does() {
    let device = models::cpu();
    for (head, target) in HEADS {
        check(&|| load(&device, target, head).unwrap().executor, &golden(head), 21);
    }
}

#[test]
fn an_eagle3_head_drafts_what_pytorch_does_on_the_gpu() {
    match Device::open(DeviceChoice::Cuda(0)) {
        Ok((device, _)) => {
            for (head, target) in HEADS {
                check(&|| load(&device, target, head).unwrap().executor, &golden(head), 21);
            }
        }
        Err(reason) => eprintln!("skipped: no GPU ({reason})"),
    }
}

/// Whole answers with a head or a layer are those without: from cached prefixes, preempted, in pieces, in loops.
#[test]
fn answers_with_a_head_are_those_without() {
    same_answers(
        ModelSource::Checkpoint(models::folder().join("smollm3")),
        "eagle3:4",
        "eagle3",
        None,
    );
}

/// The same where recurrent layers must forget what was rejected, in float32 like `--numerics exact`, too.
#[test]
fn answers_of_recurrent_layers_with_a_head_are_those_without() {
    let (head, target) = HEADS[1];
    let source = || ModelSource::Checkpoint(models::folder().join(target));
    for precision in [None, Some(Precision::EXACT)] {
        same_answers(source(), "eagle3:3", head, precision);
        for (layer, target) in &LAYERS[1..] {
            let folder = with_layer(target, layer);
            let source = ModelSource::Checkpoint(folder.path().into());
            same_answers(source, "mtp:2", "", precision);
        }
    }
}

/// `head` is empty where a layer of the model's own drafts.
fn same_answers(source: ModelSource, how: &str, head: &str, precision: Option<Precision>) {
    let device = match precision {
        Some(_) => models::cpu(),
        None => device::cpu::open(Some(2), false).unwrap(),
    };
    let run = |spec: bool, pages: u32, steps: &str| {
        let mut options = LoadOptions {
            max_batch: 4,
            max_context: 128,
            prefill_tokens: Some(32),
            pages: Some(pages),
            precision,
            ..LoadOptions::default()
        };
        let spec: Option<Speculation> = spec.then(|| how.parse().unwrap());
        options.spec = spec;
        if spec.is_some() && !head.is_empty() {
            options.spec_model = Some(ModelSource::Checkpoint(folder(head)));
        }
        options.graphs.flags.insert("graph-kernels".into(), "fixed".into());
        options.graphs.flags.insert("graph-steps".into(), steps.into());
        let mut executor = load_executor(&source, &device, &options, &|_| {}).unwrap().executor;
        if let Some(spec) = spec {
            executor.force_drafts(spec.drafts, 0);
        }
        let config = EngineConfig { step_tokens: 9, ..EngineConfig::default() };
        let mut engine = Engine::builder(executor).config(config).build();
        let mut answers = Vec::new();
        for _ in 0..2 {
            let ask = |n: u32| {
                let prompt: Vec<u32> =
                    (0..12 + 5 * n).map(|at| (at * 7 + n * 13) % 120 + 3).collect();
                let temperature = if n % 2 == 1 { 0.8 } else { 0.0 };
                let sampling =
                    Sampling { max_tokens: 50, temperature, seed: 5, ..Sampling::default() };
                Request::new(RequestId(0), prompt, sampling)
            };
            let given = engine.answer((0..6).map(ask));
            answers.extend(given.into_iter().map(|answer| answer.unwrap().choices));
        }
        if spec.is_some() {
            let used = engine.engine().executor().spec_use().unwrap();
            assert!(used.drafted > 0, "{how}: {used:?}");
        }
        (answers, engine.stats().preemptions)
    };
    let (wanted, _) = run(false, 100, "1");
    for (pages, steps) in [(100, "1"), (17, "1"), (100, "5")] {
        let (found, preempted) = run(true, pages, steps);
        assert_eq!(found, wanted, "{how}: {pages} pages, {steps} steps a launch");
        assert!(preempted > 0 || pages == 100);
    }
}

#[test]
fn heads_of_other_models_are_refused() {
    let device = device::cpu::open(Some(1), false).unwrap();
    let error = load(&device, "llama", "eagle3").err().unwrap().to_string();
    assert!(error.contains("no layer 2"), "{error}");
    let plain = LoadOptions {
        spec: Some("eagle3".parse().unwrap()),
        spec_model: Some(ModelSource::Checkpoint(models::folder().join("llama"))),
        ..LoadOptions::default()
    };
    let source = ModelSource::Checkpoint(models::folder().join("smollm3"));
    let error = load_executor(&source, &device, &plain, &|_| {}).err().unwrap().to_string();
    assert!(error.contains("no draft_vocab_size"), "{error}");
}

/// A model with a layer of its own that drafts: the model's file and the layer's as two shards.
fn with_layer(target: &str, layer: &str) -> TempDir {
    let (model, layer) = (models::folder().join(target), folder(layer));
    let all = tempfile::tempdir().unwrap();
    let mut shards = Vec::new();
    for (from, name) in [(&model, "model.safetensors"), (&layer, "mtp.safetensors")] {
        std::fs::copy(from.join(name), all.path().join(name)).unwrap();
        let file = Checkpoint::open(&from.join(name)).unwrap();
        shards.extend(file.tensors().map(|info| format!("\"{}\": \"{name}\"", info.name)));
    }
    std::fs::copy(model.join("config.json"), all.path().join("config.json")).unwrap();
    let index = format!("{{\"weight_map\": {{{}}}}}", shards.join(", "));
    std::fs::write(all.path().join("model.safetensors.index.json"), index).unwrap();
    all
}

#[test]
fn a_layer_of_the_model_drafts_what_pytorch_does() {
    let device = models::cpu();
    for (layer, target) in LAYERS {
        let folder = with_layer(target, layer);
        let source = ModelSource::Checkpoint(folder.path().into());
        let load = || load_with(&device, &source, "mtp", None).unwrap().executor;
        check(&load, &golden(layer), 21);
    }
}

#[test]
fn a_model_without_such_a_layer_is_refused() {
    let device = device::cpu::open(Some(1), false).unwrap();
    let source = ModelSource::Checkpoint(models::folder().join("smollm2"));
    let error = load_with(&device, &source, "mtp", None).err().unwrap().to_string();
    assert!(error.contains("no tensor mtp.fc.weight"), "{error}");
}
