//! Configurations as in published files, and invalid ones.

use crate::make;
use device::cpu::Numerics;
use device::op::{Pairs, Routing, Score};
use device::target::CpuTarget;
use formats::checkpoint::Checkpoint;
use formats::dtype::DType;
use graph::program::{Program, ProgramOp};
use make::GgufFile;
use model::ModelConfig;
use model::config::{Rope, RopeScaling};
use model::{ModelSource, OpenModel, precision};
use proptest::prelude::*;
use std::path::Path;

fn hf(json: &str) -> ModelConfig {
    ModelConfig::from_hf(Path::new("config.json"), json.as_bytes(), None).unwrap()
}

/// What the model computes.
fn program(config: &ModelConfig) -> Program {
    let source = ModelSource::Dummy { config: Box::new(config.clone()), seed: 0 };
    let model = OpenModel::open(&source).unwrap();
    model.write(&CpuTarget, Numerics::Fast, precision(&CpuTarget), 64).unwrap().program
}

/// How far back each layer looks.
fn windows(config: &ModelConfig) -> Vec<Option<u32>> {
    let window = |op: &ProgramOp| match op {
        ProgramOp::Attention(attention) => Some(attention.window),
        _ => None,
    };
    program(config).steps.iter().filter_map(|step| window(&step.op)).collect()
}

/// Whether qkv has a bias, and whether heads are normed.
fn bias_and_norms(config: &ModelConfig) -> (bool, bool) {
    let program = program(config);
    let any = |found: &dyn Fn(&ProgramOp) -> bool| program.steps.iter().any(|s| found(&s.op));
    let bias = any(&|op| matches!(op, ProgramOp::Linear(linear) if linear.bias.is_some()));
    let norms = any(&|op| matches!(op, ProgramOp::RopeKv(rope) if rope.q_norm.is_some()));
    (bias, norms)
}

fn rope(config: &ModelConfig) -> Rope {
    config.decoder.ropes()[0].clone()
}

#[test]
fn bundled_shapes_are_the_published_ones() {
    let shapes: Vec<_> = ModelConfig::bundled_names()
        .map(|name| {
            let c = ModelConfig::bundled(name).unwrap();
            assert_eq!(c.dtype, if name == "bert-base" { DType::F32 } else { DType::BF16 });
            (name, c.layers, c.hidden, c.intermediate, c.q_heads, c.kv_heads, c.head_dim, c.tied)
        })
        .collect();
    assert_eq!(
        shapes,
        [
            ("qwen3-0.6b", 28, 1024, 3072, 16, 8, 128, true),
            ("qwen3-1.7b", 28, 2048, 6144, 16, 8, 128, true),
            ("qwen3-4b", 36, 2560, 9728, 32, 8, 128, true),
            ("qwen3-8b", 36, 4096, 12288, 32, 8, 128, false),
            ("qwen3-32b", 64, 5120, 25600, 64, 8, 128, false),
            ("qwen3-30b-a3b", 48, 2048, 6144, 32, 4, 128, false),
            ("deepseek-v2-lite", 27, 2048, 10944, 16, 16, 192, false),
            ("qwen3-next-80b-a3b", 48, 2048, 5120, 16, 2, 256, false),
            ("qwen3.5-35b-a3b", 40, 2048, 512, 16, 2, 256, false),
            ("gpt-oss-20b", 24, 2880, 2880, 64, 8, 64, false),
            ("gpt-oss-120b", 36, 2880, 2880, 64, 8, 64, false),
            ("llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, true),
            ("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, false),
            ("bert-base", 12, 768, 3072, 12, 12, 64, false),
            ("qwen3-embedding-0.6b", 28, 1024, 3072, 16, 8, 128, true),
        ]
    );
    let qwen = ModelConfig::bundled("qwen3-8b").unwrap();
    assert_eq!((bias_and_norms(&qwen), qwen.family), ((false, true), "qwen3"));
    assert_eq!((qwen.vocab, qwen.eos), (151_936, vec![151_645, 151_643]));
    let qwen = ModelConfig::bundled("qwen3-30b-a3b").unwrap();
    assert_eq!((bias_and_norms(&qwen), qwen.family), ((false, true), "qwen3_moe"));
    let chosen = (128, Routing { renormalise: true, ..Routing::softmax(8) });
    assert_eq!(experts(&qwen), [chosen; 48]);
    let program = program(&qwen);
    let weights: u64 = program.weights.iter().map(|w| u64::from(w.rows) * u64::from(w.cols)).sum();
    assert_eq!(weights, 30_532_122_624, "the published number of parameters");
    let lite = ModelConfig::bundled("deepseek-v2-lite").unwrap();
    assert_eq!(experts(&lite), [(64, Routing::softmax(6)); 26]);
    let program = self::program(&lite);
    let weights: u64 = program.weights.iter().map(|w| u64::from(w.rows) * u64::from(w.cols)).sum();
    assert_eq!(weights, 15_706_484_224, "the published number of parameters");
    let token: u64 = program.caches.iter().map(graph::program::Cache::token_bytes).sum();
    assert_eq!(token, 27 * 576 * 2, "a latent and a rotated key in every layer");
    let next = ModelConfig::bundled("qwen3-next-80b-a3b").unwrap();
    let program = self::program(&next);
    let weights: u64 = program.weights.iter().map(|w| u64::from(w.rows) * u64::from(w.cols)).sum();
    assert_eq!(weights, 79_674_391_296, "the published number of parameters");
    // In 36 layers 32 matrices of 128 × 128 in f32, and the last three inputs of 8,192 channels as activations are.
    assert_eq!(program.carry_bytes(), 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 4));
    assert_eq!((program.caches.len(), program.carries.len()), (12, 72));
    let text = ModelConfig::bundled("qwen3.5-35b-a3b").unwrap();
    assert_eq!((text.family, text.eos.as_slice()), ("qwen3_5_moe_text", &[248_044][..]));
    let program = self::program(&text);
    let weights: u64 = program.weights.iter().map(|w| u64::from(w.rows) * u64::from(w.cols)).sum();
    assert_eq!(weights, 34_660_610_688, "what transformers counts");
    assert_eq!((program.caches.len(), program.carries.len()), (10, 60));
    for (name, count, parameters) in
        [("gpt-oss-20b", 32, 20_914_757_184u64), ("gpt-oss-120b", 128, 116_829_156_672)]
    {
        let config = ModelConfig::bundled(name).unwrap();
        let routing = Routing { renormalise: true, ..Routing::softmax(4) };
        assert_eq!(experts(&config), vec![(count, routing); config.layers]);
        let program = self::program(&config);
        let weights = program.weights.iter().map(|w| u64::from(w.rows) * u64::from(w.cols));
        assert_eq!(weights.sum::<u64>(), parameters, "{name}: the published number of parameters");
        assert_eq!(windows(&config)[..2], [Some(128), None]);
        assert_eq!(config.expert_dtype, Some(device::DType::Mxfp4), "dummy experts are stored so");
    }
}

#[test]
fn families_differ_where_transformers_says_so() {
    let base = r#""hidden_size":64,"intermediate_size":128,"num_hidden_layers":4,"num_attention_heads":4,"num_key_value_heads":2,"vocab_size":100"#;
    let of = |family: &str, more: &str| hf(&format!(r#"{{"model_type":"{family}",{base}{more}}}"#));

    let qwen2 =
        of("qwen2", r#","sliding_window":32,"use_sliding_window":false,"max_window_layers":2"#);
    assert_eq!(bias_and_norms(&qwen2), (true, false));
    assert_eq!(windows(&qwen2), [None; 4]);
    let qwen2 =
        of("qwen2", r#","sliding_window":32,"use_sliding_window":true,"max_window_layers":2"#);
    assert_eq!(windows(&qwen2), [None, None, Some(32), Some(32)]);

    assert_eq!(windows(&of("mistral", ""))[0], Some(4_096));
    assert_eq!(windows(&of("mistral", r#","sliding_window":null"#))[0], None);
    assert_eq!(windows(&of("llama", r#","sliding_window":7"#))[0], None);
    assert_eq!(of("qwen3", "").head_dim, 128);

    // Before and since transformers 5.
    let old = of(
        "llama",
        r#","rope_theta":5e5,"rope_scaling":{"type":"linear","factor":2.0},"torch_dtype":"float16""#,
    );
    let new = of(
        "llama",
        r#","rope_parameters":{"rope_theta":5e5,"rope_type":"linear","factor":2.0},"dtype":"float16""#,
    );
    assert_eq!(format!("{old:?}"), format!("{new:?}"));
    assert_eq!((rope(&old).theta, old.dtype), (5e5, DType::F16));
    assert_eq!(
        of("llama", r#","eos_token_id":[1,2,500],"bos_token_id":-1,"pad_token_id":100"#).eos,
        [1, 2]
    );
}

#[test]
fn generation_configs_win_on_stopping_and_alone_suggest_sampling() {
    let config = br#"{"model_type":"llama","hidden_size":64,"intermediate_size":128,"num_hidden_layers":4,"num_attention_heads":4,"vocab_size":100,"eos_token_id":1,"temperature":3.0}"#;
    let generation =
        br#"{"eos_token_id":[5,6],"do_sample":true,"temperature":0.6,"top_p":0.95,"top_k":20}"#;
    let (path, beside) = (Path::new("config.json"), Path::new("generation_config.json"));
    let both = ModelConfig::from_hf(path, config, Some((beside, generation))).unwrap();
    assert_eq!(both.eos, [5, 6]);
    assert_eq!(both.sampling.temperature, Some(0.6));
    assert_eq!((both.sampling.top_p, both.sampling.top_k), (Some(0.95), Some(20)));
    let alone = ModelConfig::from_hf(path, config, None).unwrap();
    assert_eq!((alone.eos, alone.sampling.temperature), (vec![1], None));
}

/// Values of the formula that transformers uses for Llama 3.1 8B, in single precision by numpy.
#[test]
fn llama3_frequencies_are_those_of_transformers() {
    let config = ModelConfig::bundled("llama-3.1-8b").unwrap();
    let found = rope(&config).frequencies(config.head_dim, 8192);
    let expected = LLAMA_3_1;
    assert_eq!(found.len(), 64);
    for (i, expected) in expected {
        let error = (f64::from(found[i]) - expected).abs() / expected;
        assert!(error < 1e-6, "frequency {i}: {} {expected}", found[i]);
    }
    // GGUF stores the same as divisors of the plain series.
    let mut plain = rope(&config);
    plain.scaling = RopeScaling::None;
    let series = plain.frequencies(128, 8192);
    plain.scaling = RopeScaling::Divisors(series.iter().zip(&found).map(|(a, b)| a / b).collect());
    for (a, b) in plain.frequencies(128, 8192).iter().zip(&found) {
        assert!((a - b).abs() / b < 1e-6);
    }
}

const LLAMA_3_1: [(usize, f64); 8] = [
    (0, 1.0),
    (1, 0.8146172165870667),
    (20, 0.016560440883040428),
    (28, 0.0032114461064338684),
    (30, 0.0013718936825171113),
    (33, 0.0003126936499029398),
    (40, 3.428102354519069e-05),
    (63, 3.068925877869333e-07),
];

fn gguf(architecture: &str) -> GgufFile {
    let key = |name: &str| format!("{architecture}.{name}");
    GgufFile::new()
        .str("general.architecture", architecture)
        .u32(&key("block_count"), 1)
        .u32(&key("context_length"), 128)
        .u32(&key("embedding_length"), 32)
        .u32(&key("feed_forward_length"), 64)
        .u32(&key("attention.head_count"), 4)
        .u32(&key("attention.head_count_kv"), 2)
        .f32(&key("attention.layer_norm_rms_epsilon"), 1e-5)
}

#[test]
fn rope_divisors_stored_as_a_tensor_reach_the_config() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let mut file = gguf("llama").tensor("token_embd.weight", &[32, 10], 30, 0).tensor(
        "rope_freqs.weight",
        &[4],
        0,
        640,
    );
    file.data = vec![0; 640];
    file.data.extend([1.0f32, 1.0, 2.0, 8.0].iter().flat_map(|x| x.to_le_bytes()));
    std::fs::write(&path, file.bytes()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let config = ModelConfig::of(&checkpoint).unwrap();
    assert_eq!((config.vocab, config.head_dim, config.tied), (10, 8, true));
    assert_eq!(config.pairs, Pairs::Neighbours);
    assert_eq!(rope(&config).scaling, RopeScaling::Divisors(vec![1.0, 1.0, 2.0, 8.0]));
    assert_eq!(config.dtype, DType::BF16);
}

/// Where they are read, and where they are refused.
#[test]
fn experts_of_gguf_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let read = |file: GgufFile| {
        let file = file.tensor("token_embd.weight", &[32, 10], 30, 0).data(640);
        std::fs::write(&path, file.bytes()).unwrap();
        ModelConfig::of(&Checkpoint::open(&path).unwrap())
    };
    let error = read(gguf("qwen3").u32("qwen3.expert_count", 8)).unwrap_err();
    assert!(error.to_string().contains("expert_count: 8"), "{error}");
    let mixtral = || gguf("llama").u32("llama.expert_count", 8);
    let error = read(mixtral()).unwrap_err();
    assert!(error.to_string().contains("expert_used_count"), "{error}");
    let config = read(mixtral().u32("llama.expert_used_count", 2)).unwrap();
    assert_eq!(experts(&config), [(8, Routing { renormalise: true, ..Routing::softmax(2) })]);
}

/// How many experts each layer with experts has, and how they are chosen.
fn experts(config: &ModelConfig) -> Vec<(u32, Routing)> {
    let program = program(config);
    let chosen = |op: &ProgramOp| match op {
        ProgramOp::Route(route) => Some((program.weight(route.w).rows, route.routing)),
        _ => None,
    };
    program.steps.iter().filter_map(|step| chosen(&step.op)).collect()
}

fn refused(result: formats::Result<ModelConfig>, word: &str) {
    let error = result.map(|_| ()).unwrap_err().to_string();
    assert!(error.contains(word) && !error.contains('\n'), "{error}");
}

#[test]
fn configs_must_make_sense() {
    let file = Path::new("config.json");
    let base = r#""model_type":"llama","hidden_size":64,"intermediate_size":128,"num_hidden_layers":2,"num_attention_heads":4,"vocab_size":100"#;
    let read =
        |more: &str| ModelConfig::from_hf(file, format!("{{{base}{more}}}").as_bytes(), None);
    assert_eq!(read("").unwrap().head_dim, 16);
    refused(read(r#","num_key_value_heads":3"#), "divisor");
    refused(read(r#","num_key_value_heads":0"#), "key-value heads");
    refused(read(r#","head_dim":15"#), "even");
    refused(read(r#","head_dim":1e3"#), "whole number");
    refused(read(r#","rms_norm_eps":0"#), "epsilon");
    refused(read(r#","rope_theta":-1"#), "rope theta");
    refused(read(r#","rope_scaling":{"rope_type":"dynamic","factor":4}"#), "dynamic is not");
    refused(read(r#","rope_scaling":{"rope_type":"yarn","factor":4}"#), "original_max_position");
    refused(read(r#","rope_scaling":{"rope_type":"llama3","factor":4}"#), "low_freq_factor");
    refused(read(r#","hidden_act":"gelu""#), "gelu");
    refused(read(r#","mlp_bias":true"#), "mlp_bias");
    refused(read(r#","max_position_embeddings":99999999999999"#), "position");
    let deep = base.replace("\"num_hidden_layers\":2", "\"num_hidden_layers\":99999999999999");
    refused(ModelConfig::from_hf(file, format!("{{{deep}}}").as_bytes(), None), "layers");
    let other = base.replace("llama", "mamba");
    refused(ModelConfig::from_hf(file, format!("{{{other}}}").as_bytes(), None), "mamba");
    let mixtral = base.replace("llama", "mixtral");
    let mixtral =
        |more: &str| ModelConfig::from_hf(file, format!("{{{mixtral}{more}}}").as_bytes(), None);
    refused(mixtral(""), "num_experts");
    refused(mixtral(r#","num_local_experts":8,"num_experts_per_tok":9"#), "1 to 8");
    refused(mixtral(r#","num_local_experts":999999999,"num_experts_per_tok":1"#), "1 to 512");
    let oss = base.replace("llama", "gpt_oss");
    let oss = |more: &str| {
        let usual = r#","num_local_experts":8,"num_experts_per_tok":2,"rope_theta":150000"#;
        let all = format!("{{{oss}{usual}{more}}}");
        ModelConfig::from_hf(file, all.as_bytes(), None)
    };
    let yarn = r#","rope_scaling":{"rope_type":"yarn","factor":32.0,"truncate":false,"original_max_position_embeddings":4096}"#;
    let with = |more: &str| oss(&format!("{yarn}{more}"));
    assert_eq!(with("").unwrap().expert_dtype, None);
    refused(oss(""), "rope_scaling");
    refused(with(r#","swiglu_limit":0"#), "swiglu_limit");
    refused(with(r#","swiglu_alpha":"wide""#), "swiglu_alpha");
    refused(with(r#","intermediate_size":132"#), "width of experts");
    refused(with(r#","layer_types":["sliding_attention","linear_attention"]"#), "layer_types[1]");
    refused(with(r#","hidden_act":"gelu""#), "hidden_act");
    let huge = base.replace("\"vocab_size\":100", "\"vocab_size\":10000000000");
    refused(ModelConfig::from_hf(file, format!("{{{huge}}}").as_bytes(), None), "vocabulary size");
    refused(ModelConfig::from_hf(file, b"{", None), "config");
    refused(ModelConfig::bundled("gpt-5"), "qwen3-0.6b");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_bytes_panic_the_reader(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = ModelConfig::from_hf(Path::new("any"), &bytes, None);
    }
}

/// The published sizes of Nemotron 3 Nano: `transformers` counts 31,577,937,344 parameters, and biases of routers, which it
/// does not count.
#[test]
fn a_hybrid_with_experts_has_the_published_number_of_parameters() {
    let pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME";
    let nano = hf(&format!(
        r#"{{"model_type":"nemotron_h","hybrid_override_pattern":"{pattern}","vocab_size":131072,"hidden_size":2688,
        "intermediate_size":1856,"num_attention_heads":32,"num_key_value_heads":2,"head_dim":128,"mamba_num_heads":64,
        "mamba_head_dim":64,"ssm_state_size":128,"n_groups":8,"conv_kernel":4,"n_routed_experts":128,
        "num_experts_per_tok":6,"moe_intermediate_size":1856,"moe_shared_expert_intermediate_size":3712,
        "n_group":1,"topk_group":1,"norm_topk_prob":true,"routed_scaling_factor":2.5}}"#
    ));
    let routing = Routing {
        score: Score::Sigmoid,
        group_top: 2,
        renormalise: true,
        scale: 2.5,
        ..Routing::softmax(6)
    };
    assert_eq!(experts(&nano), [(128, routing); 23]);
    let program = program(&nano);
    let weights = program.weights.iter().map(|w| u64::from(w.rows) * u64::from(w.cols));
    assert_eq!(weights.sum::<u64>(), 31_577_937_344 + 23 * 128);
    assert_eq!((program.caches.len(), program.carries.len()), (6, 46));
}

/// What the text part leaves out, or has as null, stands beside it.
#[test]
fn a_text_part_is_completed_by_the_whole() {
    let json = ModelConfig::bundled_json("qwen3.5-35b-a3b").unwrap();
    let mut whole: serde_json::Value = serde_json::from_str(json).unwrap();
    (whole["dtype"], whole["eos_token_id"]) = ("float16".into(), 7.into());
    whole["tie_word_embeddings"] = true.into();
    whole["text_config"]["dtype"] = serde_json::Value::Null;
    whole["text_config"].as_object_mut().unwrap().remove("eos_token_id");
    let config = hf(&whole.to_string());
    assert_eq!((config.dtype, config.eos, config.tied), (DType::F16, vec![7], true));
    whole["text_config"] = serde_json::Value::Null;
    let text = whole.to_string();
    let error = ModelConfig::from_hf(Path::new("config.json"), text.as_bytes(), None).unwrap_err();
    assert!(error.to_string().contains("model_type"), "{error}");
}
