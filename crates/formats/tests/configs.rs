//! Configurations as published files write them.

use formats::config::{Family, ModelConfig, RopeScaling};
use formats::dtype::DType;
use std::path::Path;

fn hf(json: &str) -> ModelConfig {
    ModelConfig::from_hf(Path::new("config.json"), json.as_bytes(), None).unwrap()
}

#[test]
fn bundled_shapes_are_the_published_ones() {
    let shapes: Vec<_> = ModelConfig::bundled_names()
        .map(|name| {
            let c = ModelConfig::bundled(name).unwrap();
            assert_eq!(c.dtype, DType::BF16);
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
            ("llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, true),
            ("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, false),
        ]
    );
    let qwen = ModelConfig::bundled("qwen3-8b").unwrap();
    assert!(qwen.qk_norm && !qwen.qkv_bias && qwen.family == Family::Qwen3);
    assert_eq!((qwen.vocab, qwen.eos), (151_936, vec![151_645, 151_643]));
}

#[test]
fn families_differ_where_transformers_says_so() {
    let base = r#""hidden_size":64,"intermediate_size":128,"num_hidden_layers":4,"num_attention_heads":4,"num_key_value_heads":2,"vocab_size":100"#;
    let of = |family: &str, more: &str| hf(&format!(r#"{{"model_type":"{family}",{base}{more}}}"#));

    let qwen2 =
        of("qwen2", r#","sliding_window":32,"use_sliding_window":false,"max_window_layers":2"#);
    assert!(qwen2.qkv_bias && !qwen2.qk_norm);
    assert_eq!(qwen2.sliding_window, None);
    let qwen2 =
        of("qwen2", r#","sliding_window":32,"use_sliding_window":true,"max_window_layers":2"#);
    assert_eq!(
        (0..4).map(|n| qwen2.window(n)).collect::<Vec<_>>(),
        [None, None, Some(32), Some(32)]
    );

    assert_eq!(of("mistral", "").window(0), Some(4_096));
    assert_eq!(of("mistral", r#","sliding_window":null"#).window(0), None);
    assert_eq!(of("llama", r#","sliding_window":7"#).window(0), None);
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
    assert_eq!(old, new);
    assert_eq!((old.rope.theta, old.dtype), (5e5, DType::F16));
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
    let found = config.rope.frequencies(config.head_dim);
    let expected = LLAMA_3_1;
    assert_eq!(found.len(), 64);
    for (i, expected) in expected {
        let error = (f64::from(found[i]) - expected).abs() / expected;
        assert!(error < 1e-6, "frequency {i}: {} {expected}", found[i]);
    }
    // GGUF stores the same as divisors of the plain series.
    let mut plain = config.rope.clone();
    plain.scaling = RopeScaling::None;
    let series = plain.frequencies(128);
    plain.scaling = RopeScaling::Divisors(series.iter().zip(&found).map(|(a, b)| a / b).collect());
    for (a, b) in plain.frequencies(128).iter().zip(&found) {
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
