//! Quantised checkpoints that Dacapo writes: what it reads from them is what it quantises to while loading.

use crate::models;
use device::DType;
use engine::exec::{Executor, Join, Page, Row, Seat, SeatParams, Step};
use formats::checkpoint::Checkpoint;
use formats::scaled::{Quantisation, Scheme};
use formats::write::{NewCheckpoint, NewTensor};
use model::{LoadOptions, ModelSource, Precision, Quantise, load_executor};
use model::{QuantiseError, QuantiseOptions, Quantiser};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

const TOKENS: [u32; 6] = [3, 17, 5, 28, 41, 9];

fn options(format: Quantise, group: usize) -> QuantiseOptions {
    QuantiseOptions { format, group, threads: Some(2), shard_bytes: None }
}

fn quantise(from: &Path, to: &Path, options: QuantiseOptions) -> Result<Quantiser, QuantiseError> {
    let quantiser = Quantiser::open(from, options)?;
    quantiser.write(to, None, &|_| ControlFlow::Continue(()))?;
    Ok(quantiser)
}

fn json_file(path: &Path) -> Value {
    Value::Object(formats::config::object(path, &std::fs::read(path).unwrap()).unwrap())
}

/// A random Qwen3 of one layer whose matrices are whole blocks, in bf16.
fn random_model() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut config = json_file(&models::folder().join("qwen3-fp8/config.json"));
    config.as_object_mut().unwrap().remove("quantization_config");
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let attention =
        ["q_proj", "k_proj", "v_proj", "o_proj"].map(|n| layer(&format!("self_attn.{n}")));
    let mlp = ["gate_proj", "up_proj", "down_proj"].map(|n| layer(&format!("mlp.{n}")));
    let heads = ["q_norm", "k_norm"].map(|n| layer(&format!("self_attn.{n}")));
    let norms = ["input_layernorm", "post_attention_layernorm"].map(layer);
    let rows =
        |name: &str| if name.contains("k_proj") || name.contains("v_proj") { 128 } else { 256 };
    let mut shapes: Vec<(String, Vec<usize>)> = Vec::new();
    shapes.push(("model.embed_tokens.weight".into(), vec![131, 256]));
    shapes.extend(
        attention.into_iter().chain(mlp).map(|name| (name.clone(), vec![rows(&name), 256])),
    );
    shapes.extend(heads.map(|name| (name, vec![64])));
    shapes.extend(norms.into_iter().chain(["model.norm.weight".into()]).map(|n| (n, vec![256])));
    let new = |(name, shape): (String, Vec<usize>)| {
        vec![NewTensor { name, dtype: formats::dtype::DType::BF16, shape }]
    };
    let tensors: Vec<_> = shapes.into_iter().map(new).collect();
    let made = NewCheckpoint::create(folder.path(), &tensors, u64::MAX, &BTreeMap::new()).unwrap();
    let mut state = 7u64;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    for tensor in tensors.iter().flatten() {
        let (mean, scale) = if tensor.shape.len() == 1 { (1.0, 0.3) } else { (0.01, 0.15) };
        let count = tensor.shape.iter().product();
        let floats: Vec<f32> = (0..count).map(|_| mean + scale * next()).collect();
        let mut bytes = Vec::new();
        DType::BF16.encode(&floats, &mut bytes);
        made.write(&tensor.name, 0, &bytes).unwrap();
    }
    made.finish().unwrap();
    folder
}

/// Logits after the last of [`TOKENS`].
fn logits(path: &Path, precision: Precision) -> Vec<f32> {
    let device = models::cpu();
    let options = LoadOptions {
        max_batch: 2,
        max_context: 64,
        prefill_tokens: Some(16),
        pages: Some(8),
        precision: Some(precision),
        ..LoadOptions::default()
    };
    let source = ModelSource::Checkpoint(path.to_owned());
    let mut loaded = load_executor(&source, &device, &options, &|_| {}).unwrap();
    let (executor, seat) = (&mut loaded.executor, Seat(1));
    let step = Step {
        number: 1,
        rows: vec![Row::feed(seat, 0, TOKENS.to_vec())],
        joins: vec![Join {
            seat,
            len: 0,
            last_token: 0,
            params: SeatParams::greedy(),
            history: vec![],
        }],
        pages: executor.geometry().kept.entries(seat, 0, Page(3)).collect(),
        ..Step::default()
    };
    executor.launch(&step).unwrap();
    executor.poll(true).unwrap().expect("a result");
    executor.read_logits(0).unwrap()
}

fn furthest(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Quantised to a folder and loaded from there, a model computes the same bits as quantised while it is loaded.
#[test]
fn writing_and_loading_gives_the_same_logits_as_quantising_while_loading() {
    let model = random_model();
    let kept = Precision { weights: None, ..Precision::EXACT };
    let plain = logits(model.path(), Precision::EXACT);
    for (format, error) in [(Quantise::Fp8, 0.5), (Quantise::Int4, 4.0)] {
        let folder = tempfile::tempdir().unwrap();
        quantise(model.path(), folder.path(), options(format, 128)).unwrap();
        let loading = logits(model.path(), Precision { quantise: Some(format), ..kept });
        let written = logits(folder.path(), kept);
        assert_eq!(written, loading, "{format:?}");
        let exact = logits(folder.path(), Precision::EXACT);
        assert!(furthest(&exact, &loading) < 1e-4, "{format:?}: {}", furthest(&exact, &loading));
        let far = furthest(&exact, &plain);
        assert!(far > 1e-3 && far < error, "{format:?}: {far} from the model");
    }
}

/// Several files hold the same as one, and the index names all tensors.
#[test]
fn shards_hold_the_same() {
    let model = random_model();
    let (one, several) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let whole = options(Quantise::Int4, 64);
    let quantiser = quantise(model.path(), one.path(), whole).unwrap();
    let parts = QuantiseOptions { shard_bytes: Some(60_000), ..whole };
    quantise(model.path(), several.path(), parts).unwrap();
    let [one, several] = [&one, &several].map(|folder| Checkpoint::open(folder.path()).unwrap());
    assert!(several.folder().join("model-00002-of-00006.safetensors").is_file());
    assert_eq!(several.tensors().len(), one.tensors().len());
    for info in one.tensors() {
        let [a, b] = [&one, &several].map(|checkpoint| {
            let mut bytes = vec![0; info.bytes];
            checkpoint.read_into(&info.name, &mut bytes).unwrap();
            bytes
        });
        assert!(a == b, "{}", info.name);
    }
    assert_eq!(quantiser.bytes().1, one.total_bytes());
}

/// Relative error of all quantised weights of a folder against the model they come from, and their schemes.
fn error(model: &Path, folder: &Path) -> (f64, Vec<Scheme>) {
    let (from, to) = (Checkpoint::open(model).unwrap(), Checkpoint::open(folder).unwrap());
    let quantisation = Quantisation::of(&to).unwrap().unwrap();
    let (mut error, mut size, mut schemes) = (0.0, 0.0, Vec::new());
    for info in from.tensors() {
        let expected = from.read_f32(&info.name).unwrap();
        let Some(weight) = quantisation.weight(&to, &info.name).unwrap() else {
            assert_eq!(to.read_f32(&info.name).unwrap(), expected, "{} is copied", info.name);
            continue;
        };
        let mut found = vec![0.0; expected.len()];
        weight.read(&to, 0..weight.rows()).unwrap().dequantise(weight.cols(), &mut found);
        for (found, expected) in found.iter().zip(&expected) {
            error += f64::from(found - expected).powi(2);
            size += f64::from(*expected).powi(2);
        }
        if !schemes.contains(&weight.scheme()) {
            schemes.push(weight.scheme());
        }
    }
    ((error / size).sqrt(), schemes)
}

#[test]
fn smaller_groups_are_nearer() {
    let model = random_model();
    let mut before = 0.12;
    for group in [128, 64, 32] {
        let folder = tempfile::tempdir().unwrap();
        quantise(model.path(), folder.path(), options(Quantise::Int4, group)).unwrap();
        let (error, schemes) = error(model.path(), folder.path());
        assert_eq!(schemes, [Scheme::Int4 { group, ordered: false }]);
        assert!(error > 0.02 && error < before, "groups of {group}: {error}");
        before = error;
    }
}

/// Every family is quantised, near to what it was, and is loaded again.
#[test]
fn every_family_is_quantised_and_loaded() {
    let mut done = 0;
    for case in models::cases() {
        let model = models::folder().join(&case);
        let config = json_file(&model.join("config.json"));
        if config.get("quantization_config").is_some() {
            continue;
        }
        let plain = logits(&model, Precision::EXACT);
        for (format, most) in [(Quantise::Fp8, 0.04), (Quantise::Int4, 0.15)] {
            let folder = tempfile::tempdir().unwrap();
            let quantiser = match quantise(&model, folder.path(), options(format, 128)) {
                Ok(quantiser) => quantiser,
                Err(error) => panic!("{case}: {format:?}: {error}"),
            };
            let text = |folder: &Path| std::fs::read_to_string(folder.join("config.json")).unwrap();
            let infinite = |folder: &Path| text(folder).contains("Infinity");
            assert_eq!(infinite(folder.path()), infinite(&model), "{case}");
            let mut written = json_file(&folder.path().join("config.json"));
            written.as_object_mut().unwrap().remove("quantization_config").unwrap();
            assert_eq!(written, config, "{case}");
            let (error, _) = error(&model, folder.path());
            assert!(error > 1e-3 && error < most, "{case}: {}: {error}", quantiser.describe());
            let found = logits(folder.path(), Precision::EXACT);
            assert!(found.iter().all(|logit| logit.is_finite()) && found != plain, "{case}");
            done += 1;
        }
    }
    assert!(done > 40, "{done}");
}

/// What compressed-tensors 0.20 dumps for the same settings, with the name of each module that stays as it is.
#[test]
fn the_configuration_is_that_of_compressed_tensors() {
    let folder = tempfile::tempdir().unwrap();
    quantise(random_model().path(), folder.path(), options(Quantise::Int4, 128)).unwrap();
    let ours = json_file(&folder.path().join("config.json"));
    let theirs = json_file(&models::folder().join("qwen3-int4/config.json"));
    let mut expected = theirs["quantization_config"].clone();
    expected["config_groups"]["group_0"]["format"] = json!("pack-quantized");
    // New in 0.20; older versions refuse a field that they do not know.
    expected.as_object_mut().unwrap().remove("moe_sparsity_config");
    assert_eq!(ours["quantization_config"], expected);
    for key in ["hidden_size", "rope_parameters", "architectures"] {
        assert_eq!(ours[key], theirs[key]);
    }

    let of = |case: &str| {
        let folder = tempfile::tempdir().unwrap();
        quantise(&models::folder().join(case), folder.path(), options(Quantise::Fp8, 128)).unwrap();
        json_file(&folder.path().join("config.json"))["quantization_config"].take()
    };
    let ignored = |found: &Value| {
        let names = found["ignore"].as_array().unwrap();
        names.iter().map(|name| name.as_str().unwrap().to_owned()).collect::<Vec<String>>()
    };
    // 24 columns of its experts, and 40 of the shared one, are not whole pieces of 16.
    let (qwen2, qwen3) = (of("qwen2-moe"), of("qwen3-moe"));
    let layers = |ends: &[&str]| {
        let name = |layer: usize, end: &str| format!("model.layers.{layer}.mlp.{end}");
        (0..2).flat_map(|layer| ends.iter().map(move |end| name(layer, end))).collect::<Vec<_>>()
    };
    let mut expected = vec!["lm_head".to_owned()];
    expected.extend(layers(&["gate", "shared_expert.down_proj", "shared_expert_gate"]));
    expected.push(r"re:.*\.experts\..*".into());
    assert_eq!(ignored(&qwen2), expected);
    assert_eq!(qwen2["config_groups"].as_object().unwrap().len(), 1);
    assert_eq!(ignored(&qwen3), [vec!["lm_head".to_owned()], layers(&["gate"])].concat());
    let experts = &qwen3["config_groups"]["group_1"];
    assert_eq!(experts["targets"], json!([r"re:.*\.experts\..*"]));
    assert_eq!(experts["weights"]["strategy"], "channel");
}

#[test]
fn other_models_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |path: &Path| {
        quantise(path, folder.path(), options(Quantise::Int4, 128)).unwrap_err().to_string()
    };
    let gguf = refused(&models::folder().join("gemma3/model.gguf"));
    assert!(gguf.ends_with("a GGUF file cannot be quantised; name a folder with safetensors"));
    let again = refused(&models::folder().join("qwen3-int4"));
    assert!(again.ends_with("qwen3-int4: already quantised (compressed-tensors)"), "{again}");
    let again = refused(&models::folder().join("qwen3-fp8"));
    assert!(again.ends_with("qwen3-fp8: already quantised (fp8)"), "{again}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn the_caller_can_stop() {
    let (model, folder) = (random_model(), tempfile::tempdir().unwrap());
    let quantiser = Quantiser::open(model.path(), options(Quantise::Fp8, 128)).unwrap();
    let stopped = quantiser.write(folder.path(), None, &|_| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(QuantiseError::Stopped)));
    assert!(!folder.path().join("config.json").exists(), "nothing that looks complete");
}
