//! The real models as checkpoints of safetensors: their GGUF files with all numbers widened, under the names of
//! `transformers`.

use formats::checkpoint::Checkpoint;
use formats::dtype::DType;
use formats::tokenizer::Tokenizer;
use formats::write::{NewCheckpoint, NewTensor};
use serde_json::{Value, json};
use std::path::Path;

/// What differs between the two families.
struct Family {
    config: Value,
    /// The norm before the MLP.
    mlp_norm: &'static str,
    /// Elements of heads whose rows llama.cpp has put into another order.
    turned: Option<usize>,
    /// Added to norms by llama.cpp.
    norm_less: f32,
}

/// Writes a model's folder.
pub(crate) fn widen(gguf: &str, folder: &Path) {
    let checkpoint = Checkpoint::open(Path::new(gguf)).unwrap();
    let family = if gguf.contains("gemma") { gemma() } else { smollm2() };
    let tensors = || checkpoint.tensors().map(|info| (info, name(&info.name, &family)));
    let new = |(info, name): (&formats::checkpoint::TensorInfo, String)| {
        // Both sides of a comparison have the same table: bf16 saves memory.
        let dtype = if name.ends_with("embed_tokens.weight") { DType::BF16 } else { DType::F32 };
        vec![NewTensor { name, dtype, shape: info.shape.clone() }]
    };
    let groups: Vec<_> = tensors().map(new).collect();
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    let written = NewCheckpoint::create(folder, &groups, u64::MAX, &metadata).unwrap();
    for (info, name) in tensors() {
        let mut values = checkpoint.read_f32(&info.name).unwrap();
        if name.ends_with("norm.weight") {
            values.iter_mut().for_each(|value| *value -= family.norm_less);
        }
        let of_heads = name.ends_with("q_proj.weight") || name.ends_with("k_proj.weight");
        if let Some(dim) = family.turned.filter(|_| of_heads) {
            values = turn_back(&values, info.shape[1], dim);
        }
        let bytes: Vec<u8> = match name.ends_with("embed_tokens.weight") {
            true => values.iter().flat_map(|x| bf16(*x).to_le_bytes()).collect(),
            false => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        written.write(&name, 0, &bytes).unwrap();
    }
    written.finish().unwrap();
    std::fs::write(folder.join("config.json"), family.config.to_string()).unwrap();
    for (name, json) in Tokenizer::files_of(checkpoint.gguf().unwrap()).unwrap() {
        std::fs::write(folder.join(name), json.to_string()).unwrap();
    }
}

/// The nearest bf16, ties to even.
fn bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// Rows whose pairs lie side by side, with the second of each pair half a head behind the first.
fn turn_back(values: &[f32], cols: usize, dim: usize) -> Vec<f32> {
    let row = |row: usize| {
        let (head, half, pair) = (row / dim, row % dim / (dim / 2), row % (dim / 2));
        let from = (head * dim + 2 * pair + half) * cols;
        &values[from..from + cols]
    };
    (0..values.len() / cols).flat_map(row).copied().collect()
}

fn name(gguf: &str, family: &Family) -> String {
    let known = |end: &str| match end {
        "attn_norm" => "input_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "post_attention_norm" => "post_attention_layernorm",
        "ffn_norm" => family.mlp_norm,
        "post_ffw_norm" => "post_feedforward_layernorm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        other => panic!("{other}"),
    };
    match gguf.strip_suffix(".weight").unwrap() {
        "token_embd" => "model.embed_tokens.weight".into(),
        "output_norm" => "model.norm.weight".into(),
        block => {
            let mut parts = block.splitn(3, '.').skip(1);
            let (layer, end) = (parts.next().unwrap(), parts.next().unwrap());
            format!("model.layers.{layer}.{}.weight", known(end))
        }
    }
}

fn smollm2() -> Family {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0, "hidden_act": "silu",
        "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
    });
    let mlp_norm = "post_attention_layernorm";
    Family { config, mlp_norm, turned: Some(64), norm_less: 0.0 }
}

fn gemma() -> Family {
    let config = json!({
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 640,
        "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "vocab_size": 262_144, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "sliding_window": 512, "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": true,
        "bos_token_id": 2, "eos_token_id": 1, "torch_dtype": "float32",
    });
    Family { config, mlp_norm: "pre_feedforward_layernorm", turned: None, norm_less: 1.0 }
}
