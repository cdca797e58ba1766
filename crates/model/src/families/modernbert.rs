//! ModernBERT: rotation, norms before attention and MLP, a gated MLP, and a window in most layers.

use super::{Decoder, Family, bert};
use crate::Builder;
use crate::builder::tensor;
use crate::config::{Classes, Defaults, Embedding, Fields, ModelConfig, Rope, Task};
use crate::weights::Cut;
use device::op::Activation;
use formats::Result;
use graph::program::{Lookup, Pooling, ValueId};
use std::sync::Arc;

pub(super) const FAMILY: Family =
    Family { name: "modernbert", gguf: "", encodes: true, read };

#[derive(Debug)]
struct ModernBert {
    act: Activation,
    /// Of layers that see everything, and of those that do not.
    ropes: [Rope; 2],
    /// How far each layer looks to either side, itself included.
    windows: Vec<Option<usize>>,
    norm_bias: bool,
    linear_bias: bool,
    head: Head,
}

/// The head of a classifier.
#[derive(Debug)]
struct Head {
    pooling: Pooling,
    act: Activation,
    bias: bool,
}

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    f.not("mlp_bias", "")?;
    let defaults =
        Defaults { max_position: 8_192, norm_eps: ("norm_eps", ""), ..Defaults::default() };
    let mut config = ModelConfig::read(f, defaults)?;
    let theta = |json: &str, usual: f64| Ok::<_, formats::Error>(f.number(json, "")?.unwrap_or(usual));
    let mut ropes = [
        Rope::plain(theta("global_rope_theta", 160_000.0)?),
        Rope::plain(theta("local_rope_theta", 10_000.0)?),
    ];
    if let Some(parameters) = f.object("rope_parameters")? {
        for (rope, kind) in ropes.iter_mut().zip(["full_attention", "sliding_attention"]) {
            if let Some(found) = parameters.object(kind)? {
                *rope = Rope::of(&found, Some(rope.theta))?;
            }
        }
    }
    let every = f.size("global_attn_every_n_layers", "")?.unwrap_or(3).max(1);
    // A token sees half of the local window to either side, and itself.
    let window = f.size("local_attention", "")?.unwrap_or(128) / 2 + 1;
    let windows = f.windows(Some(window), config.layers, |layer| !layer.is_multiple_of(every))?;
    let pooling = match f.text("classifier_pooling", "")?.unwrap_or("cls") {
        "cls" => Pooling::First,
        "mean" => Pooling::Mean,
        other => return Err(f.unsupported("classifier_pooling", other, "cls, mean")),
    };
    let head = Head {
        pooling,
        act: bert::activation(f, "classifier_activation")?,
        bias: f.bool("classifier_bias", "")?.unwrap_or(false),
    };
    config.task = Task::Embed(Embedding { pooling: Pooling::Mean, unit: false });
    config.decoder = Arc::new(ModernBert {
        act: bert::activation(f, "hidden_activation")?,
        ropes,
        windows,
        norm_bias: f.bool("norm_bias", "")?.unwrap_or(false),
        linear_bias: f.bool("attention_bias", "")?.unwrap_or(false),
        head,
    });
    Ok(config)
}

impl ModernBert {
    fn classify(&self, config: &ModelConfig, b: &mut Builder<'_>, x: ValueId, classes: Classes) {
        let Head { pooling, act, bias } = self.head;
        let h = b.ops().pool("pool", x, pooling, false);
        let h = b.linear("head", h, &[tensor("/head.dense", "", config.hidden)], bias, Cut::Rows);
        let h = b.ops().activate("head_act", h, act);
        let norm = tensor("/head.norm", "", config.hidden);
        let h = b.layer_norm_with("head_norm", h, norm, self.norm_bias);
        let scores = tensor("/classifier", "", classes.count);
        let scores = b.linear("classes", h, &[scores], true, Cut::Rows);
        b.ops().publish("publish", scores);
    }
}

impl Decoder for ModernBert {
    fn ropes(&self) -> Vec<Rope> {
        self.ropes.to_vec()
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let ropes = self.ropes.each_ref().map(|rope| b.rope(rope));
        let (hidden, inner, dim) = (config.hidden, config.intermediate, config.head_dim);
        let scale = (dim as f32).powf(-0.5);
        let norm = |b: &mut Builder<'_>, name: &str, x, source| {
            b.layer_norm_with(name, x, tensor(source, "", hidden), self.norm_bias)
        };
        let words = tensor("embeddings.tok_embeddings", "", config.vocab);
        let x = b.embed_by("words", words, hidden, Lookup::Token);
        let mut x = norm(b, "embed_norm", x, "embeddings.norm");
        for layer in 0..config.layers {
            x = b.layer(layer, |b| {
                // What the embedding made is normalised already.
                let h = if layer == 0 { x } else { norm(b, "attn_norm", x, "attn_norm") };
                let all = tensor("attn.Wqkv", "", 3 * hidden);
                let qkv = [
                    all.part(0, hidden).rotated(dim),
                    all.part(hidden, hidden).rotated(dim),
                    all.part(2 * hidden, hidden),
                ];
                let window = self.windows[layer];
                let qkv = b.linear("qkv", h, &qkv, self.linear_bias, Cut::Rows);
                let rope = ropes[usize::from(window.is_some())];
                let qkv = b.rope_kv("rope", qkv, None, None, rope);
                let window = window.map(|window| window as u32);
                let a = b.ops().attention_both_ways("attn", qkv, scale, window);
                let output = tensor("attn.Wo", "", hidden);
                let o = b.linear("o", a, &[output], self.linear_bias, Cut::Cols);
                let x = b.ops().add("attn_out", x, o);
                let h = norm(b, "mlp_norm", x, "mlp_norm");
                let both = tensor("mlp.Wi", "", 2 * inner);
                let g = b.gate_up("gate_up", h, [both.part(0, inner), both.part(inner, inner)]);
                let m = b.ops().gate_mul("act", g, self.act);
                let d = b.linear("down", m, &[tensor("mlp.Wo", "", hidden)], false, Cut::Cols);
                b.ops().add("mlp_out", x, d)
            });
        }
        let x = norm(b, "final_norm", x, "final_norm");
        match config.task {
            Task::Embed(embedding) => b.publish(x, embedding),
            Task::Classify(classes) => self.classify(config, b, x, classes),
            Task::Generate | Task::Compare { .. } => {}
        }
    }

    /// The head of pre-training.
    fn ignores(&self, tensor: &str) -> bool {
        tensor.starts_with("head.") || tensor.starts_with("decoder.")
    }
}
