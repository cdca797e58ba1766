//! BERT, and everything with its block: MiniLM, BGE, E5 and GTE, RoBERTa and XLM-RoBERTa. Post-norm, learned positions, every
//! token sees all others.

use super::{Decoder, Family};
use crate::Builder;
use crate::builder::tensor;
use crate::config::{Defaults, Embedding, Fields, ModelConfig, Rope, Task};
use crate::weights::Cut;
use device::op::Activation;
use formats::Result;
use graph::program::{Lookup, Pooling, ValueId};
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "bert", gguf: "", encodes: true, read };

/// BERT's numbers besides those that every model has.
#[derive(Debug)]
struct Bert {
    act: Activation,
    /// Rows of the table of positions, and the row of the first token.
    positions: (usize, usize),
    head: Head,
}

/// Where the head of a classifier is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Head {
    /// The pooler of pre-training, then a matrix.
    Pooler,
    /// Two matrices of its own.
    Own,
}

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    read_as(f, "bert.", 0, Head::Pooler)
}

/// A model with BERT's block, whose tensors have names that begin with `root`, and whose first position is row `first` of
/// the table.
pub(super) fn read_as(
    f: &Fields<'_>,
    root: &str,
    first: usize,
    head: Head,
) -> Result<ModelConfig> {
    let kind = f.text("position_embedding_type", "")?.unwrap_or("absolute");
    if kind != "absolute" {
        return Err(f.unsupported("position_embedding_type", kind, "absolute"));
    }
    f.not("is_decoder", "")?;
    let act = activation(f, "hidden_act")?;
    let norm_eps = ("layer_norm_eps", "");
    let mut config =
        ModelConfig::read(f, Defaults { max_position: 512, norm_eps, ..Defaults::default() })?;
    let rows = config.max_position;
    if rows <= first {
        return Err(f.invalid("max_position_embeddings", rows, format!("more than {first}")));
    }
    config.max_position = rows - first;
    config.token_types = f.size("type_vocab_size", "")?.unwrap_or(2);
    (config.root, config.layer_names) = (root.into(), "encoder.layer");
    config.task = Task::Embed(Embedding { pooling: Pooling::Mean, unit: false });
    config.decoder = Arc::new(Bert { act, positions: (rows, first), head });
    Ok(config)
}

/// The activation of an encoder's MLP.
pub(super) fn activation(f: &Fields<'_>, field: &str) -> Result<Activation> {
    match f.text(field, "")?.unwrap_or("gelu") {
        "gelu" => Ok(Activation::Gelu),
        "gelu_new" | "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
        "relu" => Ok(Activation::Relu),
        "silu" | "swish" => Ok(Activation::Silu),
        other => Err(f.unsupported(field, other, "gelu, gelu_new, relu, silu")),
    }
}

impl Bert {
    /// Words, positions and kinds of tokens.
    fn embed(&self, config: &ModelConfig, b: &mut Builder<'_>) -> ValueId {
        let (vocab, hidden) = (config.vocab, config.hidden);
        let words = tensor("embeddings.word_embeddings", "", vocab);
        let x = b.embed_by("words", words, hidden, Lookup::Low(vocab as u32));
        let (rows, first) = self.positions;
        let places = tensor("embeddings.position_embeddings", "", rows).part(first, rows - first);
        let places = b.embed_by("positions", places, hidden, Lookup::Position);
        let kinds = tensor("embeddings.token_type_embeddings", "", config.token_types);
        let kinds = b.embed_by("kinds", kinds, hidden, Lookup::High(vocab as u32));
        let x = b.ops().add("with_positions", x, places);
        let x = b.ops().add("with_kinds", x, kinds);
        b.layer_norm_with("embed_norm", x, tensor("embeddings.LayerNorm", "", hidden), true)
    }
}

impl Bert {
    /// Scores of labels, from the first token.
    fn classify(&self, config: &ModelConfig, b: &mut Builder<'_>, x: ValueId, labels: usize) {
        let (dense, out) = match self.head {
            Head::Pooler => ("pooler.dense", "/classifier"),
            Head::Own => ("/classifier.dense", "/classifier.out_proj"),
        };
        let first = b.ops().pool("pool", x, Pooling::First, false);
        let h = b.linear("head", first, &[tensor(dense, "", config.hidden)], true, Cut::Rows);
        let h = b.ops().activate("head_act", h, Activation::Tanh);
        let scores = b.linear("classes", h, &[tensor(out, "", labels)], true, Cut::Rows);
        b.ops().publish("publish", scores);
    }
}

impl Decoder for Bert {
    fn ropes(&self) -> Vec<Rope> {
        vec![Rope::still()]
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let rope = b.rope(&Rope::still());
        let (hidden, inner) = (config.hidden, config.intermediate);
        let scale = (config.head_dim as f32).powf(-0.5);
        let mut x = self.embed(config, b);
        for layer in 0..config.layers {
            x = b.layer(layer, |b| {
                let qkv = [
                    tensor("attention.self.query", "", hidden),
                    tensor("attention.self.key", "", hidden),
                    tensor("attention.self.value", "", hidden),
                ];
                let qkv = b.linear("qkv", x, &qkv, true, Cut::Rows);
                let qkv = b.rope_kv("rope", qkv, None, None, rope);
                let a = b.ops().attention_both_ways("attn", qkv, scale, None);
                let output = tensor("attention.output.dense", "", hidden);
                let o = b.linear("o", a, &[output], true, Cut::Cols);
                let x = b.ops().add("attn_out", x, o);
                let norm = tensor("attention.output.LayerNorm", "", hidden);
                let x = b.layer_norm_with("attn_norm", x, norm, true);
                let up = tensor("intermediate.dense", "", inner);
                let m = b.linear("up", x, &[up], true, Cut::Rows);
                let m = b.ops().activate("act", m, self.act);
                let down = tensor("output.dense", "", hidden);
                let d = b.linear("down", m, &[down], true, Cut::Cols);
                let x = b.ops().add("mlp_out", x, d);
                b.layer_norm_with("mlp_norm", x, tensor("output.LayerNorm", "", hidden), true)
            });
        }
        match config.task {
            Task::Embed(embedding) => b.publish(x, embedding),
            Task::Classify(classes) => self.classify(config, b, x, classes.count),
            Task::Generate | Task::Compare { .. } => {}
        }
    }

    /// The pooler and heads of pre-training, and buffers.
    fn ignores(&self, tensor: &str) -> bool {
        tensor.ends_with("embeddings.position_ids")
            || tensor.ends_with("embeddings.token_type_ids")
            || tensor.starts_with("cls.")
            || tensor.starts_with("lm_head.")
            || tensor.starts_with("pooler.")
            || tensor.contains(".pooler.")
    }
}
