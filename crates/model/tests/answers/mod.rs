//! Answers of a model through an engine, for tests that change the model while it runs.

use crate::models;
use device::Device;
use engine::request::{Event, Output, Request, RequestId, Sampling, Token};
use engine::{Engine, EngineConfig};
use graph::Phase;
use model::{GraphExecutor, LoadOptions, ModelSource, load_executor};
use std::collections::BTreeMap;
use std::path::Path;

/// The ways to run a plan.
pub(crate) const BACKENDS: [&str; 4] = ["full", "breakable", "piecewise", "disabled"];

/// Sums that depend on nothing else in the batch, so that answers can be compared.
pub(crate) fn options(backend: &str) -> LoadOptions {
    let mut options = LoadOptions {
        max_batch: 4,
        max_context: 128,
        prefill_tokens: Some(64),
        pages: Some(65),
        ..LoadOptions::default()
    };
    for (flag, value) in [
        ("graph-kernels", "fixed"),
        ("graph-backend-decode", backend),
        ("graph-backend-prefill", backend),
    ] {
        options.graphs.flags.insert(flag.into(), value.into());
    }
    options
}

/// A model on a device, ready for requests.
pub(crate) fn engine_of(
    source: &ModelSource,
    device: &Device,
    options: &LoadOptions,
) -> Engine<GraphExecutor> {
    let loaded = load_executor(source, device, options, &|_| {}).unwrap();
    Engine::new(loaded.executor, EngineConfig::default())
}

/// A golden's checkpoint.
pub(crate) fn checkpoint(case: &str) -> ModelSource {
    ModelSource::Checkpoint(models::folder().join(case))
}

/// A prompt of its own for each number.
pub(crate) fn prompt(number: u64) -> Vec<Token> {
    (0..20).map(|at| ((number * 31 + at * 17 + 3) % 90) as Token).collect()
}

/// A request for eight tokens with their log-probabilities.
pub(crate) fn request(number: u64) -> Request {
    let logprobs = Some(1);
    let sampling = Sampling { max_tokens: 8, ignore_eos: true, logprobs, ..Sampling::default() };
    Request::new(RequestId(number), prompt(number), sampling)
}

/// Tokens, and the bits of their log-probabilities.
pub(crate) type Answers = BTreeMap<u64, Vec<(Token, u32)>>;

/// Collects the tokens of some outputs.
pub(crate) fn collect(outputs: Vec<Output>, answers: &mut Answers) {
    for output in outputs {
        match output {
            Output::Token { id, token, logprob, .. } => {
                let bits = logprob.expect("asked for").logprob.to_bits();
                answers.entry(id.0).or_default().push((token, bits));
            }
            Output::Prefilled { .. } | Output::Finished { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Steps until nothing is left to do.
pub(crate) fn finish(engine: &mut Engine<GraphExecutor>, answers: &mut Answers) {
    while !engine.is_idle() {
        let outputs = engine.step_wait(0, Vec::new());
        collect(outputs, answers);
    }
    engine.audit().unwrap();
}

/// The answers to some requests.
pub(crate) fn answers(engine: &mut Engine<GraphExecutor>, requests: Vec<Request>) -> Answers {
    let mut answers = Answers::new();
    let submit = |request| Event::Submit(Box::new(request));
    let outputs = engine.step_wait(0, requests.into_iter().map(submit).collect());
    collect(outputs, &mut answers);
    finish(engine, &mut answers);
    answers
}

/// Graphs recorded so far, of both phases.
pub(crate) fn recorded(engine: &Engine<GraphExecutor>) -> u64 {
    let runners = engine.executor().runners();
    [Phase::Decode, Phase::Prefill].map(|phase| runners.counters(phase).recorded).iter().sum()
}

/// Copies the files of a folder.
#[allow(dead_code, reason = "some test binaries change no checkpoints")]
pub(crate) fn copy_folder(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}
