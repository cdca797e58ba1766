//! Logits of every family and option against `transformers` (CPU, float32); the checkpoints and the
//! expected numbers under `goldens/` come from `tools/make_model_goldens.py`.

use crate::models;
use device::{DType, Device, DeviceChoice, DeviceKind};
use engine::Engine;
use engine::exec::{Executor, Geometry, Join, Page, Row, Seat, SeatParams, Step};
use engine::request::{Embed, Pooling, Request, RequestId, Sampling};
use formats::checkpoint::Checkpoint;
use model::{
    LoadOptions, LoadedExecutor, ModelSource, Precision, ReadError, Reading, load_executor,
};
use std::collections::BTreeSet;
use std::path::Path;

struct Golden {
    tokens: Vec<u32>,
    logits: Vec<Vec<f32>>,
    /// States after the last norm; not stored where the head makes logits of them and nothing follows.
    hidden: Option<Vec<Vec<f32>>>,
}

fn golden(case: &str) -> Golden {
    let file = Checkpoint::open(&models::folder().join(case).join("golden.safetensors")).unwrap();
    let info = file.get("logits").unwrap();
    let (rows, vocab) = (info.shape[0], info.shape[1]);
    let flat = file.read_f32("logits").unwrap();
    let logits = flat.chunks(vocab).map(<[f32]>::to_vec).collect();
    let mut bytes = vec![0; rows * 4];
    file.read_into("tokens", &mut bytes).unwrap();
    let tokens = bytes.chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect();
    let hidden = file.get("hidden").map(|info| {
        let flat = file.read_f32("hidden").unwrap();
        flat.chunks(info.shape[1]).map(<[f32]>::to_vec).collect()
    });
    Golden { tokens, logits, hidden }
}

/// The float32 error after two layers, for any order of summation.
const EXACT: f32 = 1e-4;
/// The same in parts of bf16, which leave out 2^-16 of a product.
const IN_PARTS: f32 = 1e-3;
/// The same where a logarithm follows.
const EXACT_LOG: f32 = 2e-4;
/// bf16 weights, activations and pages: eight bits of mantissa through two layers.
const ROUNDED: f32 = 0.15;

/// The same for a case: where transformers in bf16 is further from itself in f32, we may be as far.
fn rounded(case: &str) -> f32 {
    let file = Checkpoint::open(&models::folder().join(case).join("golden.safetensors")).unwrap();
    let error = file.get("bf16_error").map(|_| file.read_f32("bf16_error").unwrap()[0]);
    error.map_or(ROUNDED, |error| error.max(ROUNDED))
}

fn has_experts(case: &str) -> bool {
    let file = Checkpoint::open(&models::folder().join(case).join("golden.safetensors")).unwrap();
    file.get("choices").is_some()
}

/// The case's model, in the numbers of the reference or in the GPU's own.
fn load(case: &str, device: &Device, max_batch: u32, tolerance: f32) -> LoadedExecutor {
    load_from(&models::folder().join(case), device, max_batch, tolerance)
}

fn load_from(path: &Path, device: &Device, max_batch: u32, tolerance: f32) -> LoadedExecutor {
    let options = LoadOptions {
        max_batch,
        max_context: 128,
        prefill_tokens: Some(64),
        pages: Some(40),
        precision: (tolerance < ROUNDED).then_some(Precision::EXACT),
        ..LoadOptions::default()
    };
    let source = ModelSource::Checkpoint(path.to_owned());
    load_executor(&source, device, &options, &|_| {}).unwrap()
}

/// Feeds the golden tokens in chunks and compares the logits after each chunk's last token.
fn check(case: &str, device: &Device, chunks: &[usize], tolerance: f32) {
    check_loaded(case, load(case, device, 4, tolerance), chunks, tolerance);
}

fn check_loaded(case: &str, loaded: LoadedExecutor, chunks: &[usize], tolerance: f32) {
    worst_logit(case, loaded, chunks, tolerance);
}

/// The same; returns the largest difference.
fn worst_logit(case: &str, mut loaded: LoadedExecutor, chunks: &[usize], tolerance: f32) -> f32 {
    let golden = golden(case);
    let mut most = 0.0f32;
    let executor = &mut loaded.executor;
    let Geometry { page_size, kept, .. } = executor.geometry();
    let seat = Seat(1);
    let mut start = 0;
    for (number, &chunk) in chunks.iter().enumerate() {
        let end = (start + chunk).min(golden.tokens.len());
        let first = number == 0;
        let joins = if first {
            vec![Join {
                seat,
                len: 0,
                last_token: 0,
                params: SeatParams::greedy(),
                history: vec![],
            }]
        } else {
            vec![]
        };
        // Pages in reverse, so that nothing depends on their order.
        let pages = (0..4).filter(|_| first);
        let pages = pages.flat_map(|i| kept.entries(seat, i, Page(1 + (3 - i) * kept.width())));
        assert!(golden.tokens.len() <= 4 * page_size as usize);
        let tokens = golden.tokens[start..end].to_vec();
        let rows = vec![Row::feed(seat, start as u32, tokens)];
        let step = Step {
            number: number as u64 + 1,
            rows,
            joins,
            pages: pages.collect(),
            ..Step::default()
        };
        executor.launch(&step).unwrap();
        executor.poll(true).unwrap().expect("a result");
        let ours = executor.read_logits(0).unwrap();
        let theirs = &golden.logits[end - 1];
        let worst = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= tolerance, "{case}: token {}: logits differ by {worst}", end - 1);
        most = most.max(worst);
        start = end;
        if start == golden.tokens.len() {
            break;
        }
    }
    most
}

fn log_softmax(logits: &[f32]) -> Vec<f32> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f32 = logits.iter().map(|l| (l - max).exp()).sum();
    logits.iter().map(|l| l - max - total.ln()).collect()
}

/// The head's weights, rows of the vocabulary.
fn head(case: &str) -> Vec<Vec<f32>> {
    let file = Checkpoint::open(&models::folder().join(case).join("model.safetensors")).unwrap();
    let tied = "model.embed_tokens.weight";
    let name = if file.get("lm_head.weight").is_some() { "lm_head.weight" } else { tied };
    let width = file.get(name).unwrap().shape[1];
    file.read_f32(name).unwrap().chunks(width).map(<[f32]>::to_vec).collect()
}

/// Prompt log-probabilities and hidden states through a whole engine, in chunks of `chunk` tokens,
/// beside another request. Hidden states are compared through the head, which is linear: what it makes
/// of the mean is the mean of what transformers made of each token.
fn check_prompt(case: &str, device: &Device, chunk: u32, tolerance: f32) {
    let golden = golden(case);
    let loaded = load(case, device, 3, tolerance);
    let mut engine = Engine::builder(loaded.executor).step_tokens(chunk).build();
    let request = |prompt_logprobs, embed: Option<Embed>| Request {
        prompt_logprobs,
        embed,
        ..Request::new(
            RequestId(0),
            golden.tokens.clone(),
            Sampling { max_tokens: 1, ..Sampling::default() },
        )
    };
    let mean = Embed { pooling: Pooling::Mean, unit: false };
    let last = Embed { pooling: Pooling::Last, unit: false };
    let unit = Embed { pooling: Pooling::Mean, unit: true };
    // The first fills the prefix tree: what needs every token must not be cut short by it.
    let asked = [(None, None), (Some(3), None), (None, Some(mean)), (None, Some(last))];
    let asked = asked.into_iter().chain([(None, Some(unit))]).map(|(p, e)| request(p, e));
    let answers: Vec<_> = engine.answer(asked).into_iter().map(Result::unwrap).collect();
    let close = |ours: f32, theirs: f32, what: &str| {
        assert!((ours - theirs).abs() <= tolerance, "{case}: {what}: {ours}, not {theirs}");
    };

    let scores = &answers[1].prompt_logprobs;
    assert_eq!(scores.len(), golden.tokens.len() - 1);
    for (at, score) in scores.iter().enumerate() {
        let expected = log_softmax(&golden.logits[at]);
        assert_eq!(score.token, golden.tokens[at + 1]);
        close(score.logprob, expected[score.token as usize], "a prompt token");
        let mut best = expected.clone();
        best.sort_by(|a, b| b.total_cmp(a));
        assert_eq!(score.top.len(), 3);
        for (&(token, logprob), &best) in score.top.iter().zip(&best) {
            close(logprob, best, "an alternative");
            close(logprob, expected[token as usize], "an alternative's token");
        }
    }

    let vectors = [&answers[2].embedding[..], &answers[3].embedding];
    let count = golden.logits.len();
    let mean_of = |rows: &[Vec<f32>], i: usize| rows.iter().map(|row| row[i]).sum::<f32>();
    let both = |i: usize, rows: &[Vec<f32>], ours: [f32; 2]| {
        close(ours[0], mean_of(rows, i) / count as f32, "the mean");
        close(ours[1], rows[count - 1][i], "the last");
    };
    match &golden.hidden {
        Some(hidden) => {
            (0..hidden[0].len()).for_each(|i| both(i, hidden, vectors.map(|vector| vector[i])));
        }
        None => {
            for (token, weights) in head(case).iter().enumerate() {
                let through =
                    |vector: &[f32]| vector.iter().zip(weights).map(|(x, w)| x * w).sum::<f32>();
                both(token, &golden.logits, vectors.map(through));
            }
        }
    }
    let length = |vector: &[f32]| vector.iter().map(|x| x * x).sum::<f32>().sqrt();
    assert!((length(&answers[4].embedding) - 1.0).abs() < 1e-5);
    let by = length(&answers[2].embedding);
    for (unit, mean) in answers[4].embedding.iter().zip(&answers[2].embedding) {
        close(*unit, mean / by, "the unit vector");
    }
    assert!(answers[2].choices[0].tokens.is_empty(), "a vector comes without an answer");
    assert_eq!(engine.engine().pages().held, 0);

    // Steps of nothing but vectors are replayed, and give the same.
    for (which, embed, answer) in [(0, mean, &answers[2]), (1, last, &answers[3])] {
        let alone = engine.answer([request(None, Some(embed)), request(None, Some(embed))]);
        for alone in alone.into_iter().map(Result::unwrap) {
            for (ours, beside) in alone.embedding.iter().zip(&answer.embedding) {
                close(*ours, *beside, "a vector of its own program");
            }
            assert_eq!(alone.embedding.len(), answer.embedding.len());
        }
        let counters = engine.engine().executor().runners().counters_of_other(which);
        let counters = counters.expect("a step was launched");
        assert!(counters.steps > 0 && counters.eager.is_empty(), "{case}: {counters:?}");
    }
}

#[test]
fn prompts_are_judged_as_by_transformers_on_the_cpu() {
    let device = models::cpu();
    for case in &models::cases() {
        for chunk in [64, 7] {
            check_prompt(case, &device, chunk, EXACT_LOG);
        }
    }
}

#[test]
fn prompts_are_judged_nearly_as_by_transformers_on_the_gpu() {
    let Ok((device, _)) = Device::open(DeviceChoice::Cuda(0)) else {
        eprintln!("skipped: no GPU");
        return;
    };
    for case in &models::cases() {
        check_prompt(case, &device, 17, EXACT_LOG);
        // As below: in bf16 a router may choose otherwise.
        if !has_experts(case) {
            check_prompt(case, &device, 17, rounded(case));
        }
    }
}

/// A text read in steps of `chunk` tokens: logits after every token, and again behind the first few tokens.
#[test]
fn a_text_is_read_with_the_logits_of_every_token() {
    let device = models::cpu();
    for case in &models::cases() {
        let golden = golden(case);
        let mut loaded = load(case, &device, 4, EXACT);
        let mut reading = Reading::new(&mut loaded.executor);
        for (from, chunk) in [(0, 17), (20, 9), (0, 40)] {
            reading.rewind(from);
            let mut at = from as usize;
            for tokens in golden.tokens[at..].chunks(chunk) {
                reading.feed(tokens).unwrap();
                let logits = reading.logits().unwrap();
                // Not from the first token on, and more than the plan has rows for.
                let skip = 2.min(tokens.len() - 1);
                let rows = logits.read(skip as u32, (tokens.len() - skip) as u32).unwrap();
                let theirs = &golden.logits[at + skip..at + tokens.len()];
                assert_eq!(rows.len(), theirs.iter().map(Vec::len).sum::<usize>());
                for (ours, theirs) in rows.iter().zip(theirs.iter().flatten()) {
                    assert!((ours - theirs).abs() <= EXACT, "{case}: {ours}, not {theirs}");
                }
                at += tokens.len();
            }
        }
        let room = reading.room() as usize;
        let error = reading.feed_all(&vec![1; room]).unwrap_err();
        assert!(matches!(error, ReadError::TooLong { .. }), "{error}");
        reading.rewind(0);
        assert!(matches!(reading.logits().unwrap_err(), ReadError::NoLogits));
    }
}

#[test]
fn logits_equal_transformers_on_the_cpu() {
    let device = models::cpu();
    assert_eq!(device.kind(), DeviceKind::Cpu);
    for case in &models::cases() {
        check(case, &device, &[40], EXACT);
        check(case, &device, &[1; 40], EXACT);
        check(case, &device, &[17, 1, 1, 14, 7], EXACT);
    }
    // By default many rows of floats are multiplied as two parts of bf16.
    let device = models::rounding(device::cpu::Numerics::Fast);
    for case in &models::cases() {
        check(case, &device, &[40], IN_PARTS);
    }
}

/// Families without a GGUF file under `goldens/`: their converters only rename tensors and order rows, as Granite's
/// does.
const PLAIN: [&str; 6] = ["llama", "mistral", "mixtral", "qwen2", "qwen3", "granitemoeshared"];

/// Keys and values in e4m3 have three bits of mantissa: every one is off by up to a sixteenth, and what attention makes
/// of many of them by less. Both devices, decode and chunks of a prompt, with the scales of a checkpoint and without.
#[test]
fn pages_in_e4m3_change_little() {
    let mut devices = vec![models::cpu()];
    devices.extend(Device::open(DeviceChoice::Cuda(0)).map(|(device, _)| device));
    for device in &devices {
        for case in ["llama", "qwen3", "mistral-window", "glm4", "qwen3-fp8"] {
            let kv = DType::E4M3;
            let precision = match device.kind() {
                DeviceKind::Cpu => Precision { kv, ..Precision::EXACT },
                DeviceKind::Cuda => Precision { kv, ..model::precision(&*device.target()) },
            };
            let exact = device.kind() == DeviceKind::Cpu;
            let [loose, tight] =
                [(precision, f32::INFINITY), (Precision::EXACT, EXACT)].map(|(precision, most)| {
                    let options = LoadOptions {
                        max_batch: 4,
                        max_context: 128,
                        prefill_tokens: Some(64),
                        pages: Some(40),
                        precision: Some(precision),
                        ..LoadOptions::default()
                    };
                    let source = ModelSource::Checkpoint(models::folder().join(case));
                    let loaded = load_executor(&source, device, &options, &|_| {}).unwrap();
                    worst_logit(case, loaded, &[7, 1, 20, 1, 1, 30], most)
                });
            assert!(!exact || loose > 10.0 * tight, "{case}: {loose} and {tight}: are pages e4m3?");
            let logits = golden(case).logits;
            let size = logits.iter().flatten().fold(0.0f32, |most, logit| most.max(logit.abs()));
            let (kind, share) = (device.kind(), loose / size);
            eprintln!("{case} on {kind:?}: {loose} of {size}");
            assert!(share < 0.15, "{case} on {kind:?}: logits differ by {loose} of {size}");
        }
    }
}

/// The same weights from a GGUF file: other names, other orders of rows, other norms.
#[test]
fn gguf_files_give_the_same_logits() {
    let device = models::cpu();
    let mut families: BTreeSet<&str> = PLAIN.into();
    for case in &models::cases() {
        // As the converter writes them now, and as it wrote them before.
        for name in ["model.gguf", "model-old.gguf"] {
            let path = models::folder().join(case).join(name);
            if path.is_file() {
                let loaded = load_from(&path, &device, 4, EXACT);
                families.insert(loaded.config.family);
                check_loaded(case, loaded, &[17, 1, 1, 14, 7], EXACT);
            }
        }
    }
    let encoders: BTreeSet<_> = model::families::encoders().collect();
    let decoders = model::families::names().filter(|name| !encoders.contains(name));
    assert_eq!(families, decoders.collect(), "every family with tensors of its own");
}

#[test]
fn logits_are_close_to_transformers_on_the_gpu() {
    let Ok((device, _)) = Device::open(DeviceChoice::Cuda(0)) else {
        eprintln!("skipped: no GPU");
        return;
    };
    for case in &models::cases() {
        // In bf16 a router may choose otherwise: `routing.rs` compares choices and logits separately.
        let precisions = [EXACT, rounded(case)];
        for &tolerance in &precisions[..if has_experts(case) { 1 } else { 2 }] {
            check(case, &device, &[40], tolerance);
            check(case, &device, &[17, 1, 1, 14, 7], tolerance);
        }
    }
}
