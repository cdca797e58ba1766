//! Nemotron-H: every layer is one of four: Mamba-2, attention that is not rotated, an MLP with squared ReLU, or experts with
//! squared ReLU and no gate, chosen as DeepSeek V3 chooses them.

use super::{Decoder, Family, deepseek_v3};
use crate::blocks::experts::{Experts, Shared, SharedWeight};
use crate::blocks::mamba::{FieldNames, Mamba, TensorNames};
use crate::blocks::{self, Attention};
use crate::builder::{Builder, tensor};
use crate::config::{Defaults, Fields, ModelConfig, Rope};
use crate::weights::Cut;
use device::op::Activation;
use formats::{Result, limits};
use graph::program::{Lookup, RopeId, ValueId};
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "nemotron_h", gguf: "nemotron_h", encodes: false, read };

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
    Experts,
}

#[derive(Debug)]
struct NemotronH {
    kinds: Vec<Kind>,
    mamba: Mamba,
    experts: Option<Experts>,
}

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    for bias in ["attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "tie_word_embeddings"] {
        f.not(bias, "")?;
    }
    f.activation("mlp_hidden_act", &["relu2"])?;
    f.activation("mamba_hidden_act", &["silu"])?;
    let norm_eps = ("layer_norm_epsilon", "attention.layer_norm_rms_epsilon");
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
    if f.is_gguf() && config.tied {
        return Err(f.unsupported("output.weight", "nothing", "a head of its own"));
    }
    let kinds = kinds[..config.layers.min(kinds.len())].to_vec();
    config.root = "backbone.".into();
    // GGUF files do not say it.
    let usual = if f.is_gguf() { 0.0 } else { 0.001 };
    let least = f.number("time_step_min", "")?.unwrap_or(usual);
    let mamba = Mamba::read(f, &FIELDS, TENSORS, |_| 64, least)?;
    let experts = match kinds.contains(&Kind::Experts) {
        true => Some(experts(f, &config)?),
        false => None,
    };
    config.decoder = Arc::new(NemotronH { kinds, mamba, experts });
    Ok(config)
}

/// Experts that are chosen by sigmoids and a bias, and one that every token goes through.
fn experts(f: &Fields<'_>, config: &ModelConfig) -> Result<Experts> {
    let f = &f.aliased(&[("num_experts", "n_routed_experts")]);
    let f = &or_one(&or_one(f, "n_group"), "topk_group");
    let within = |(json, gguf): (&str, &str), found: usize, unit: usize| {
        match (1..=limits::WIDTH as usize).contains(&found) && found.is_multiple_of(unit) {
            true => Ok(found),
            false => {
                let allowed = format!("a multiple of {unit} up to {}", limits::WIDTH);
                Err(f.invalid(&f.called(json, gguf), found, allowed))
            }
        }
    };
    let name = ("moe_intermediate_size", "expert_feed_forward_length");
    // Packed weights are in groups of 16 rows.
    let inner = within(name, f.required(name.0, name.1)?, 16)?;
    let name = ("moe_latent_size", "moe_latent_size");
    let latent = f.size(name.0, name.1)?.filter(|&size| size > 0 || !f.is_gguf());
    let latent = latent.map(|size| within(name, size, 16)).transpose()?;
    let wide = latent.unwrap_or(config.hidden);
    let up = tensor("mixer.experts.{}.up_proj", "ffn_up_exps", inner);
    let down = tensor("mixer.experts.{}.down_proj", "ffn_down_exps", wide);
    let router = |count| tensor("mixer.gate", "ffn_gate_inp", count);
    let mut experts = Experts::read(f, config.layers, router, [up, up, down])?;
    experts.act = Activation::ReluSquared;
    experts.routing = deepseek_v3::routing(f, experts.count, experts.routing)?;
    if let Some(scale) = f.number("routed_scaling_factor", "")? {
        experts.routing.scale = scale as f32;
    }
    let bias = "mixer.gate.e_score_correction_bias";
    experts.bias = Some(tensor(bias, "exp_probs_b.bias", experts.count));
    experts.latent = latent.map(|size| {
        let into = tensor("mixer.fc1_latent_proj", "ffn_latent_down", size);
        [into, tensor("mixer.fc2_latent_proj", "ffn_latent_up", config.hidden)]
    });
    let name = ("moe_shared_expert_intermediate_size", "expert_shared_feed_forward_length");
    let shared = within(name, f.required(name.0, name.1)?, 1)?;
    let up = tensor("mixer.shared_experts.up_proj", "ffn_up_shexp", shared);
    let down = tensor("mixer.shared_experts.down_proj", "ffn_down_shexp", config.hidden);
    let weight = SharedWeight::Factor(1.0);
    experts.shared = Some(Shared { sources: [up, up, down], weight });
    Ok(experts)
}

/// The same fields with a 1 where configurations leave this one out.
fn or_one<'a>(f: &Fields<'a>, name: &str) -> Fields<'a> {
    match f.mentions(name) {
        true => f.aliased(&[]),
        false => f.with(name, 1),
    }
}

/// What each layer is: a letter for each, or a list of names.
fn kinds(f: &Fields<'_>) -> Result<Vec<Kind>> {
    if f.is_gguf() {
        return kinds_by_sizes(f);
    }
    let known = "M (mamba), * (attention), - (mlp), E (moe)";
    let kind = |(layer, name): (usize, &str)| match name {
        "M" | "mamba" | "linear_attention" => Ok(Kind::Mamba),
        "*" | "attention" | "full_attention" => Ok(Kind::Attention),
        "-" | "mlp" => Ok(Kind::Mlp),
        "E" | "moe" => Ok(Kind::Experts),
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

/// In a GGUF file: by which layers have heads of keys and values, and which an MLP or experts.
fn kinds_by_sizes(f: &Fields<'_>) -> Result<Vec<Kind>> {
    let [heads, widths] = ["attention.head_count_kv", "feed_forward_length"];
    let list = |name: &str| Ok::<_, formats::Error>(f.sizes_of_layers(name)?.unwrap_or_default());
    let (of_heads, of_widths) = (list(heads)?, list(widths)?);
    let layers = f.required("", "block_count")?;
    for (name, found) in [(heads, of_heads.len()), (widths, of_widths.len())] {
        if found != layers {
            return Err(f.invalid(&f.called("", name), found, format!("a list of {layers}")));
        }
    }
    let has_experts = f.size("", "expert_count")?.unwrap_or(0) > 0;
    let kind = |(heads, width): (usize, usize)| match (heads, width) {
        (0, 0) => Kind::Mamba,
        (_, 0) => Kind::Attention,
        (_, _) if has_experts => Kind::Experts,
        (_, _) => Kind::Mlp,
    };
    let kinds: Vec<Kind> = of_heads.into_iter().zip(of_widths).map(kind).collect();
    match kinds.contains(&Kind::Attention) {
        true => Ok(kinds),
        false => {
            let allowed = "some layers that attend";
            Err(f.unsupported(&f.called("", heads), "no attention", allowed))
        }
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
            tensor("mixer.q_proj", "attn_q", q),
            tensor("mixer.k_proj", "attn_k", kv),
            tensor("mixer.v_proj", "attn_v", kv),
        ];
        let a = blocks::attend(config, b, h, &sources, &Attention::new(config, rope));
        let (a, x) = blocks::last_tokens(b, a, x);
        let source = tensor("mixer.o_proj", "attn_output", config.hidden);
        (b.linear("o", a, &[source], false, Cut::Cols), x)
    }

    fn mlp(
        config: &ModelConfig,
        b: &mut Builder<'_>,
        h: ValueId,
        x: ValueId,
    ) -> (ValueId, ValueId) {
        let (h, x) = blocks::last_tokens(b, h, x);
        let up = tensor("mixer.up_proj", "ffn_up", config.intermediate);
        let down = tensor("mixer.down_proj", "ffn_down", config.hidden);
        (blocks::plain_mlp(b, "", h, [up, down]), x)
    }
}

impl Decoder for NemotronH {
    fn ropes(&self) -> Vec<Rope> {
        vec![Rope::still()]
    }

    /// Layers that draft tokens.
    fn ignores(&self, tensor: &str) -> bool {
        tensor.starts_with("mtp.") || blocks::is_behind(tensor, self.kinds.len())
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let rope = b.rope(&Rope::still());
        let table = tensor("embeddings", "token_embd", config.vocab);
        let x = b.embed_by("embed", table, config.hidden, Lookup::Token);
        let x = blocks::layers(config, b, x, |b, layer, x| {
            let h = b.rms_norm("norm", x, tensor("norm", "attn_norm", config.hidden));
            let (o, x) = match self.kinds[layer] {
                Kind::Experts => {
                    let (h, x) = blocks::last_tokens(b, h, x);
                    let experts = self.experts.as_ref().expect("read where layers have some");
                    return experts.build(b, x, h);
                }
                Kind::Mamba => self.mamba.build(config, b, h, x),
                Kind::Attention => NemotronH::attend(config, b, (h, x), rope),
                Kind::Mlp => NemotronH::mlp(config, b, h, x),
            };
            b.ops().add("out", x, o)
        });
        let h = b.rms_norm("norm", x, tensor("norm_f", "output_norm", config.hidden));
        b.end(h, |_, logits| logits);
    }
}
