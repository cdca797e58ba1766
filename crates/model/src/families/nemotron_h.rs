//! Nemotron-H: every layer is one of three: Mamba-2, attention that is not rotated, or an MLP with squared ReLU.

use super::{Decoder, Family};
use crate::blocks::mamba::{FieldNames, Mamba, TensorNames};
use crate::blocks::{self, Attention};
use crate::builder::{Builder, tensor};
use crate::config::{Defaults, Fields, ModelConfig, Rope};
use crate::weights::Cut;
use device::op::Activation;
use formats::Result;
use graph::program::{Lookup, RopeId, ValueId};
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "nemotron_h", gguf: "", encodes: false, read };

const FIELDS: FieldNames = FieldNames {
    heads: "mamba_num_heads",
    groups: "n_groups",
    state: "ssm_state_size",
    head_dim: "mamba_head_dim",
    taps: "conv_kernel",
    conv_bias: "use_conv_bias",
};

const TENSORS: TensorNames = TensorNames {
    input: "mixer.in_proj",
    conv: "mixer.conv1d",
    a: "mixer.A_log",
    dt: "mixer.dt_bias",
    skip: "mixer.D",
    norm: "mixer.norm",
    output: "mixer.out_proj",
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Mamba,
    Attention,
    Mlp,
}

#[derive(Debug)]
struct NemotronH {
    kinds: Vec<Kind>,
    mamba: Mamba,
}

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    for bias in ["attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "tie_word_embeddings"] {
        f.not(bias, "")?;
    }
    f.activation("mlp_hidden_act", &["relu2"])?;
    f.activation("mamba_hidden_act", &["silu"])?;
    let norm_eps = ("layer_norm_epsilon", "");
    let head_dim = Some(128);
    let defaults =
        Defaults { max_position: 4_096, norm_eps, head_dim, experts: true, ..Defaults::default() };
    let f = &match f.mentions("layer_norm_epsilon") {
        true => f.aliased(&[]),
        // Older files have another name.
        false => f.aliased(&[("layer_norm_epsilon", "rms_norm_eps")]),
    };
    let kinds = kinds(f)?;
    // The list says how many layers there are; newer files have no other number.
    let f = &f.with("num_hidden_layers", kinds.len());
    let mut config = ModelConfig::read(f, defaults)?;
    config.root = "backbone.".into();
    let least = f.number("time_step_min", "")?.unwrap_or(0.001);
    let mamba = Mamba::read(f, &FIELDS, TENSORS, |_| 64, least)?;
    config.decoder = Arc::new(NemotronH { kinds, mamba });
    Ok(config)
}

/// What each layer is: a letter for each, or a list of names.
fn kinds(f: &Fields<'_>) -> Result<Vec<Kind>> {
    let known = "M (mamba), * (attention), - (mlp)";
    let kind = |(layer, name): (usize, &str)| match name {
        "M" | "mamba" | "linear_attention" => Ok(Kind::Mamba),
        "*" | "attention" | "full_attention" => Ok(Kind::Attention),
        "-" | "mlp" => Ok(Kind::Mlp),
        other => Err(f.unsupported(&format!("layer {layer}"), other, known)),
    };
    let kinds: Vec<Kind> = match f.text("hybrid_override_pattern", "")? {
        Some(pattern) => {
            let letters = pattern.char_indices().map(|(at, letter)| &pattern[at..at + letter.len_utf8()]);
            letters.enumerate().map(kind).collect::<Result<_>>()?
        }
        None => {
            let names = f.texts("layers_block_type")?.unwrap_or_default();
            names.into_iter().enumerate().map(kind).collect::<Result<_>>()?
        }
    };
    match kinds.contains(&Kind::Attention) {
        true => Ok(kinds),
        false => Err(f.unsupported("layers_block_type", "no attention", "some layers that attend")),
    }
}

impl NemotronH {
    fn attend(
        config: &ModelConfig,
        b: &mut Builder<'_>,
        (h, x): (ValueId, ValueId),
        rope: RopeId,
    ) -> (ValueId, ValueId) {
        let (q, kv) = (config.q_width(), config.kv_width());
        let sources = [
            tensor("mixer.q_proj", "", q),
            tensor("mixer.k_proj", "", kv),
            tensor("mixer.v_proj", "", kv),
        ];
        let a = blocks::attend(config, b, h, &sources, &Attention::new(config, rope));
        let (a, x) = blocks::last_tokens(b, a, x);
        (b.linear("o", a, &[tensor("mixer.o_proj", "", config.hidden)], false, Cut::Cols), x)
    }

    fn mlp(
        config: &ModelConfig,
        b: &mut Builder<'_>,
        h: ValueId,
        x: ValueId,
    ) -> (ValueId, ValueId) {
        let (h, x) = blocks::last_tokens(b, h, x);
        let up = tensor("mixer.up_proj", "", config.intermediate);
        let up = b.linear("up", h, &[up], false, Cut::Rows);
        let m = b.ops().activate("act", up, Activation::ReluSquared);
        (b.linear("down", m, &[tensor("mixer.down_proj", "", config.hidden)], false, Cut::Cols), x)
    }
}

impl Decoder for NemotronH {
    fn ropes(&self) -> Vec<Rope> {
        vec![Rope::still()]
    }

    /// Layers that draft tokens.
    fn ignores(&self, tensor: &str) -> bool {
        tensor.starts_with("mtp.")
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let rope = b.rope(&Rope::still());
        let table = tensor("embeddings", "", config.vocab);
        let x = b.embed_by("embed", table, config.hidden, Lookup::Token);
        let x = blocks::layers(config, b, x, |b, layer, x| {
            let h = b.rms_norm("norm", x, tensor("norm", "", config.hidden));
            let (o, x) = match self.kinds[layer] {
                Kind::Mamba => self.mamba.build(config, b, h, x),
                Kind::Attention => NemotronH::attend(config, b, (h, x), rope),
                Kind::Mlp => NemotronH::mlp(config, b, h, x),
            };
            b.ops().add("out", x, o)
        });
        let h = b.rms_norm("norm", x, tensor("norm_f", "", config.hidden));
        b.end(h, |_, logits| logits);
    }
}
