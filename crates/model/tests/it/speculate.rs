//! Answers with drafts are those without, to the bit where kernels are fixed: greedy and drawn, with penalties, biases,
//! stop tokens, log-probabilities and several choices, from cached prefixes, in pieces, preempted, and several steps to a
//! launch. So are those of models whose recurrent layers must forget what was rejected.

use crate::models;
use device::{Device, DeviceChoice};
use engine::exec::Executor;
use engine::offline::{Completion, Offline};
use engine::request::{Request, RequestId, Sampling};
use engine::{Engine, EngineConfig};
use model::{GraphExecutor, LoadOptions, ModelConfig, ModelSource, Speculation, load_executor};

const VOCAB: u32 = 96;

fn model() -> ModelSource {
    sized(2, 3)
}

/// Models with the same vocabulary.
fn sized(layers: usize, seed: u64) -> ModelSource {
    let mut config = ModelConfig::bundled("qwen3-0.6b").unwrap();
    config.layers = layers;
    (config.hidden, config.intermediate, config.vocab) = (128, 256, VOCAB as usize);
    (config.q_heads, config.kv_heads, config.head_dim) = (4, 2, 64);
    ModelSource::Dummy { config: Box::new(config), seed }
}

/// A model whose drafts are verified, or that drafts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// A random one with this many layers, and its seed.
    Dummy(usize, u64),
    /// One of the goldens.
    Golden(&'static str),
}

impl Kind {
    fn source(self) -> ModelSource {
        match self {
            Kind::Dummy(layers, seed) => sized(layers, seed),
            Kind::Golden(name) => ModelSource::Checkpoint(models::folder().join(name)),
        }
    }
}

#[derive(Clone, Copy)]
struct Setting {
    model: Kind,
    spec: Option<&'static str>,
    steps: &'static str,
    pages: u32,
    step_tokens: u32,
    context: u32,
    /// Every step has as many drafts as there can be, not as many as pay.
    all: bool,
    /// The model that drafts.
    drafter: Option<Kind>,
}

const PLAIN: Setting = Setting {
    model: Kind::Dummy(2, 3),
    spec: None,
    steps: "1",
    pages: 200,
    step_tokens: 64,
    context: 192,
    all: true,
    drafter: None,
};

/// The model drafts for itself.
const SELF: Setting = Setting { drafter: Some(PLAIN.model), ..PLAIN };

fn engine(device: &Device, setting: Setting) -> Offline<GraphExecutor> {
    let spec: Option<Speculation> = setting.spec.map(|spec| spec.parse().unwrap());
    let mut options = LoadOptions {
        max_batch: 6,
        max_context: setting.context,
        prefill_tokens: Some(64),
        pages: Some(setting.pages),
        spec,
        spec_model: setting.drafter.map(Kind::source),
        ..LoadOptions::default()
    };
    let flags = &mut options.graphs.flags;
    flags.insert("graph-kernels".into(), "fixed".into());
    flags.insert("graph-steps".into(), setting.steps.into());
    flags.insert("graph-fallback".into(), "error".into());
    let mut loaded = load_executor(&setting.model.source(), device, &options, &|_| {}).unwrap();
    if let Some(spec) = spec.filter(|_| setting.all) {
        loaded.executor.force_drafts(spec.drafts, 0);
    }
    let config = EngineConfig { step_tokens: setting.step_tokens, ..EngineConfig::default() };
    Engine::builder(loaded.executor).config(config).build()
}

/// A prompt that says some things more than once.
fn prompt(n: u32, len: u32) -> Vec<u32> {
    (0..len).map(|at| (at % (7 + n) * 13 + n * 29) % VOCAB).collect()
}

/// Requests whose prompts have `more` tokens than the shortest that are of use.
fn requests(more: u32) -> Vec<Request> {
    let base = || Sampling { max_tokens: 70, logprobs: Some(3), ..Sampling::default() };
    let drawn = |temperature| Sampling { temperature, seed: 11, ..base() };
    let samplings = [
        base(),
        drawn(0.7),
        Sampling { top_k: 4, ..drawn(1.0) },
        Sampling { top_p: 0.5, min_p: 0.05, ..drawn(1.2) },
        Sampling {
            repetition_penalty: 1.2,
            frequency_penalty: 0.1,
            presence_penalty: 0.3,
            ..base()
        },
        Sampling { repetition_penalty: 1.1, ..drawn(0.5) },
        Sampling { logit_bias: vec![(5, 3.0), (17, -4.0), (40, 2.5)], ..drawn(0.4) },
        Sampling { stop_tokens: (0..VOCAB).step_by(9).collect(), min_tokens: 12, ..base() },
        Sampling { stop_tokens: (1..VOCAB).step_by(30).collect(), ..drawn(0.6) },
        Sampling { max_tokens: 1, ..base() },
        Sampling { max_tokens: 200, logprobs: None, ..base() },
    ];
    let mut requests = Vec::new();
    for (sampling, n) in samplings.into_iter().zip(0..) {
        let mut request =
            Request::new(RequestId(0), prompt(n % 4, 20 + more + n % 4 * 11), sampling);
        request.choices = if n % 5 == 1 { 2 } else { 1 };
        requests.push(request);
    }
    requests
}

/// All answers, and the decode steps that they took.
fn answers(engine: &mut Offline<GraphExecutor>) -> (Vec<Completion>, u64) {
    let before = engine.stats().decode_steps;
    // States are saved behind prefixes of four pages and more.
    let more = if engine.engine().executor().carries_state() { 48 } else { 0 };
    let answers = engine.answer(requests(more));
    let steps = engine.stats().decode_steps - before;
    (answers.into_iter().map(|answer| answer.unwrap()).collect(), steps)
}

fn check(device: &Device) {
    let ways = [
        ("three drafts", Setting { spec: Some("ngram"), ..PLAIN }),
        ("one draft", Setting { spec: Some("ngram:1"), ..PLAIN }),
        ("eight drafts", Setting { spec: Some("ngram:8"), ..PLAIN }),
        ("several steps a launch", Setting { spec: Some("ngram:3"), steps: "6", ..PLAIN }),
        ("few pages", Setting { spec: Some("ngram:4"), pages: 34, ..PLAIN }),
        ("pieces of 5", Setting { spec: Some("ngram:2"), step_tokens: 5, ..PLAIN }),
        ("as many as pay", Setting { spec: Some("ngram:8"), all: false, ..PLAIN }),
        ("a drafter", Setting { spec: Some("draft:3"), ..SELF }),
        (
            "a poor drafter",
            Setting { spec: Some("draft:2"), drafter: Some(Kind::Dummy(1, 9)), ..PLAIN },
        ),
        ("a drafter in loops", Setting { spec: Some("draft:4"), steps: "6", ..SELF }),
        ("a drafter, few pages", Setting { spec: Some("draft:8"), pages: 34, ..SELF }),
        ("a drafter, pieces of 5", Setting { spec: Some("draft:1"), step_tokens: 5, ..SELF }),
        ("a drafter that pays", Setting { spec: Some("draft:5"), all: false, ..SELF }),
    ];
    same_answers(device, PLAIN, &ways);
}

/// Compares the answers of all ways with those of `plain`.
fn same_answers(device: &Device, plain: Setting, ways: &[(&str, Setting)]) {
    let (wanted, plain_steps) = answers(&mut engine(device, plain));
    let choices = |answers: &[Completion]| -> Vec<_> {
        answers.iter().map(|answer| answer.choices.clone()).collect()
    };
    let wanted = choices(&wanted);
    assert!(wanted.iter().flatten().any(|answer| answer.tokens.len() > 100));
    for &(name, setting) in ways {
        let name = format!("{:?}, {name}", setting.model);
        let mut engine = engine(device, setting);
        for turn in ["at first", "from cached prefixes"] {
            let (found, steps) = answers(&mut engine);
            assert_eq!(choices(&found), wanted, "{name}, {turn}");
            let usual = (setting.pages, setting.step_tokens) == (PLAIN.pages, PLAIN.step_tokens);
            // The text of small hybrids does not repeat itself enough to save steps.
            let repeats = matches!(setting.model, Kind::Dummy(..)) && usual && setting.all;
            if repeats && setting.drafter.is_none_or(|of| of == setting.model) {
                assert!(steps < plain_steps, "{name}: {steps} steps, {plain_steps} without drafts");
            }
        }
        let used = engine.engine().executor().spec_use().unwrap().clone();
        if setting.all && setting.drafter.is_none() {
            assert!(0 < used.accepted && used.accepted < used.drafted, "{name}: {used:?}");
        }
        let stats = engine.stats();
        assert_eq!(stats.stop_disagreements, 0, "{name}");
        assert!(stats.preemptions > 0 || setting.pages == PLAIN.pages, "{name}");
        assert!(stats.cached_tokens > 0, "{name}");
    }
}

#[test]
fn drafts_change_nothing_on_the_cpu() {
    check(&device::cpu::open(Some(2), false).unwrap());
}

#[test]
fn drafts_change_nothing_on_the_gpu() {
    match Device::open(DeviceChoice::Cuda(0)) {
        Ok((device, _)) => check(&device),
        Err(reason) => eprintln!("skipped: no GPU ({reason})"),
    }
}

/// Models with recurrent layers of every kind, with drafts from the text and of a model that is mostly wrong.
fn check_recurrent(device: &Device, models: &[&'static str]) {
    for model in models {
        let plain = Setting { model: Kind::Golden(model), ..PLAIN };
        let poor = Setting { drafter: Some(Kind::Golden("qwen3")), ..plain };
        let ways = [
            ("three drafts", Setting { spec: Some("ngram"), ..plain }),
            ("one draft", Setting { spec: Some("ngram:1"), ..plain }),
            ("eight drafts", Setting { spec: Some("ngram:8"), ..plain }),
            ("several steps a launch", Setting { spec: Some("ngram:3"), steps: "6", ..plain }),
            ("few pages", Setting { spec: Some("ngram:4"), pages: 34, ..plain }),
            ("pieces of 5", Setting { spec: Some("ngram:2"), step_tokens: 5, ..plain }),
            ("as many as pay", Setting { spec: Some("ngram:8"), all: false, ..plain }),
            ("a drafter", Setting { spec: Some("draft:3"), ..poor }),
            ("a drafter, few pages", Setting { spec: Some("draft:2"), pages: 34, ..poor }),
            ("a drafter in loops", Setting { spec: Some("draft:2"), steps: "6", ..poor }),
        ];
        same_answers(device, plain, &ways);
    }
}

#[test]
fn recurrent_layers_forget_rejected_drafts_on_the_cpu() {
    let models = ["qwen3-next", "qwen3-5", "nemotron-h", "granite-hybrid"];
    check_recurrent(&device::cpu::open(Some(2), false).unwrap(), &models);
}

#[test]
fn recurrent_layers_forget_rejected_drafts_on_the_gpu() {
    match Device::open(DeviceChoice::Cuda(0)) {
        Ok((device, _)) => check_recurrent(&device, &["qwen3-next", "nemotron-h"]),
        Err(reason) => eprintln!("skipped: no GPU ({reason})"),
    }
}

/// Greedy drafts of the model itself are all accepted, but where an answer ends; and by the same pages when prefixes are cached.
#[test]
fn a_model_that_drafts_for_itself_is_right() {
    let device = device::cpu::open(Some(2), false).unwrap();
    let mut engine = engine(&device, Setting { spec: Some("draft:3"), ..SELF });
    for turn in ["at first", "from cached prefixes"] {
        let before = engine.engine().executor().spec_use().unwrap().clone();
        let ask = |n| {
            let sampling = Sampling { max_tokens: 81, ..Sampling::default() };
            Request::new(RequestId(0), prompt(n, 20 + n * 11), sampling)
        };
        let answers = engine.answer((0..3).map(ask));
        assert!(answers.iter().all(|answer| answer.is_ok()));
        let used = engine.engine().executor().spec_use().unwrap();
        let drafted = used.drafted - before.drafted;
        let accepted = used.accepted - before.accepted;
        assert!(drafted > 100 && accepted + 9 >= drafted, "{turn}: {accepted} of {drafted}");
    }
    assert!(engine.stats().cached_tokens > 0);
}

#[test]
fn a_drafter_that_cannot_is_refused() {
    let device = device::cpu::open(Some(1), false).unwrap();
    let ask = |spec: &str, spec_model| {
        let options =
            LoadOptions { spec: Some(spec.parse().unwrap()), spec_model, ..LoadOptions::default() };
        load_executor(&model(), &device, &options, &|_| {}).err().unwrap().to_string()
    };
    assert_eq!(ask("draft", None), "drafting by `draft` needs a smaller model: add --spec-model");
    assert_eq!(ask("ngram", Some(model())), "drafting by `ngram` needs no model");
    let other = ModelConfig::bundled("qwen3-0.6b").unwrap();
    let other = ModelSource::Dummy { config: Box::new(other), seed: 1 };
    let error = ask("draft", Some(other));
    assert!(error.contains("vocabulary of 151936 tokens, the one it drafts for of 96"), "{error}");
}

/// Answers that end with the context: drafts past its end have no pages, and nothing is written over.
#[test]
fn answers_reach_the_end_of_the_context() {
    let device = device::cpu::open(Some(1), false).unwrap();
    for context in [48, 61] {
        let ask = || Sampling { max_tokens: 500, ..Sampling::default() };
        let ask = || Request::new(RequestId(0), prompt(1, 20), ask());
        let setting = Setting { context, ..PLAIN };
        let wanted = engine(&device, setting).answer(vec![ask(), ask()]);
        assert!(wanted[0].as_ref().unwrap().choices[0].tokens.len() >= 28);
        for (spec, drafter) in [
            ("ngram:2", None),
            ("ngram:8", None),
            ("draft:3", SELF.drafter),
            ("draft:8", SELF.drafter),
        ] {
            let mut engine = engine(&device, Setting { spec: Some(spec), drafter, ..setting });
            assert_eq!(engine.answer(vec![ask(), ask()]), wanted, "{spec} in {context}");
        }
    }
}

/// What drafts exclude is refused when the model is loaded.
#[test]
fn inputs_prepared_by_the_host_are_refused() {
    let device = device::cpu::open(Some(1), false).unwrap();
    let mut options =
        LoadOptions { spec: Some("ngram".parse().unwrap()), ..LoadOptions::default() };
    options.graphs.flags.insert("graph-prep".into(), "copy".into());
    let error = load_executor(&model(), &device, &options, &|_| {}).err().unwrap().to_string();
    assert!(error.contains("return up to 4 tokens"), "{error}");
}
