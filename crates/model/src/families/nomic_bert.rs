//! Nomic's encoder: BERT's order of norms with rotation instead of positions, no biases in linears, and a gated MLP.

use super::{Decoder, Family, bert};
use crate::Builder;
use crate::builder::tensor;
use crate::config::{Defaults, Embedding, Fields, ModelConfig, Rope, Task};
use crate::weights::Cut;
use device::op::Activation;
use formats::Result;
use graph::program::{Lookup, Pooling};
use std::sync::Arc;

pub(super) const FAMILY: Family =
    Family { name: "nomic_bert", gguf: "", encodes: true, read };

#[derive(Debug)]
struct NomicBert {
    rope: Rope,
    act: Activation,
}

/// The names of fields in `config.json`, and those of published files.
const NAMES: &[(&str, &str)] = &[
    ("hidden_size", "n_embd"),
    ("intermediate_size", "n_inner"),
    ("num_hidden_layers", "n_layer"),
    ("num_attention_heads", "n_head"),
    ("max_position_embeddings", "n_positions"),
    ("layer_norm_eps", "layer_norm_epsilon"),
    ("rope_theta", "rotary_emb_base"),
    ("hidden_act", "activation_function"),
];

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    for field in ["qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm", "use_rms_norm"] {
        f.not(field, "")?;
    }
    f.not("rotary_emb_interleaved", "")?;
    if let Some(part) = f.number("rotary_emb_fraction", "")?.filter(|&part| part != 1.0) {
        return Err(f.unsupported("rotary_emb_fraction", part, "1"));
    }
    let f = &f.aliased(NAMES);
    let norm_eps = ("layer_norm_eps", "");
    let defaults = Defaults { max_position: 2_048, norm_eps, ..Defaults::default() };
    let mut config = ModelConfig::read(f, defaults)?;
    // Beyond these the published code stretches the rotation by the length of each text.
    if let Some(trained) = f.size("max_trained_positions", "")?.filter(|&trained| trained > 0) {
        config.max_position = config.max_position.min(trained);
    }
    config.token_types = f.size("type_vocab_size", "")?.unwrap_or(2);
    (config.root, config.layer_names) = (String::new(), "encoder.layers");
    config.task = Task::Embed(Embedding { pooling: Pooling::Mean, unit: false });
    let act = match f.text("hidden_act", "")? {
        None | Some("swiglu") => Activation::Silu,
        Some("geglu") => Activation::Gelu,
        Some(_) => bert::activation(f, "hidden_act")?,
    };
    config.decoder = Arc::new(NomicBert { rope: Rope::read(f)?, act });
    Ok(config)
}

impl Decoder for NomicBert {
    fn ropes(&self) -> Vec<Rope> {
        vec![self.rope.clone()]
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let rope = b.rope(&self.rope);
        let (vocab, hidden, inner) = (config.vocab, config.hidden, config.intermediate);
        let dim = config.head_dim;
        let scale = (dim as f32).powf(-0.5);
        let words = tensor("embeddings.word_embeddings", "", vocab);
        let x = b.embed_by("words", words, hidden, Lookup::Low(vocab as u32));
        let kinds = tensor("embeddings.token_type_embeddings", "", config.token_types);
        let kinds = b.embed_by("kinds", kinds, hidden, Lookup::High(vocab as u32));
        let x = b.ops().add("with_kinds", x, kinds);
        let mut x = b.layer_norm_with("embed_norm", x, tensor("emb_ln", "", hidden), true);
        for layer in 0..config.layers {
            x = b.layer(layer, |b| {
                let all = tensor("attn.Wqkv", "", 3 * hidden);
                let qkv = [
                    all.part(0, hidden).rotated(dim),
                    all.part(hidden, hidden).rotated(dim),
                    all.part(2 * hidden, hidden),
                ];
                let qkv = b.linear("qkv", x, &qkv, false, Cut::Rows);
                let qkv = b.rope_kv("rope", qkv, None, None, rope);
                let a = b.ops().attention_both_ways("attn", qkv, scale, None);
                let o = b.linear("o", a, &[tensor("attn.out_proj", "", hidden)], false, Cut::Cols);
                let x = b.ops().add("attn_out", x, o);
                let x = b.layer_norm_with("attn_norm", x, tensor("norm1", "", hidden), true);
                let (gate, up) = (tensor("mlp.fc12", "", inner), tensor("mlp.fc11", "", inner));
                let g = b.gate_up("gate_up", x, [gate, up]);
                let m = b.ops().gate_mul("act", g, self.act);
                let d = b.linear("down", m, &[tensor("mlp.fc2", "", hidden)], false, Cut::Cols);
                let x = b.ops().add("mlp_out", x, d);
                b.layer_norm_with("mlp_norm", x, tensor("norm2", "", hidden), true)
            });
        }
        if let Task::Embed(embedding) = config.task {
            b.publish(x, embedding);
        }
    }
}
