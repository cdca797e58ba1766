//! gpt-oss: Llama's block with biases in attention, a learned score of each head that joins its softmax, a window in every
//! other layer, and experts with biases and limited gates, which published checkpoints store as MXFP4.

use super::{Decoder, Family};
use crate::blocks::experts::Experts;
use crate::blocks::{self, Attention};
use crate::builder::{Builder, Source, tensor};
use crate::config::{Defaults, Fields, ModelConfig, Rope, RopeScaling};
use device::DType;
use device::op::Clamp;
use formats::{Result, limits};
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "gpt_oss", gguf: "gpt-oss", encodes: false, read };

#[derive(Debug)]
struct GptOss {
    rope: Rope,
    /// How far back each layer looks; `None` is the whole context.
    windows: Vec<Option<usize>>,
    /// Biases on queries, keys, values and the output of attention.
    biases: bool,
    experts: Experts,
}

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    f.activation("hidden_act", &["silu"])?;
    let defaults = Defaults {
        max_position: 131_072,
        head_dim: Some(64),
        experts: true,
        ..Defaults::default()
    };
    let mut config = ModelConfig::read(f, defaults)?;
    if !f.is_gguf() && !f.mentions("dtype") && !f.mentions("torch_dtype") {
        // What published configurations leave out.
        config.dtype = formats::dtype::DType::BF16;
    }
    let window = f.size("sliding_window", "attention.sliding_window")?.or(Some(128));
    let quantised = f.object("quantization_config")?;
    let method = quantised.as_ref().map_or(Ok(None), |own| own.text("quant_method", ""))?;
    config.expert_dtype = (method == Some("mxfp4")).then_some(DType::Mxfp4);
    config.decoder = Arc::new(GptOss {
        rope: rope(f, config.head_dim)?,
        windows: f.windows(window, config.layers, |layer| layer.is_multiple_of(2))?,
        biases: f.bool("attention_bias", "")?.unwrap_or(true),
        experts: experts(f, &config)?,
    });
    Ok(config)
}

/// YaRN with a ramp that does not begin and end at whole pairs, which GGUF files do not say.
fn rope(f: &Fields<'_>, head_dim: usize) -> Result<Rope> {
    if !f.is_gguf() {
        return match f.mentions("rope_parameters") || f.mentions("rope_scaling") {
            true => Rope::read_whole(f, head_dim),
            false => Err(f.invalid("rope_scaling", "nothing", "how positions are stretched")),
        };
    }
    let theta = f.number("", "rope.freq_base")?.unwrap_or(150_000.0);
    let factor = match f.text("", "rope.scaling.type")? {
        Some("yarn") => f.number("", "rope.scaling.factor")?.unwrap_or(32.0),
        None | Some("none") => return Ok(Rope::plain(theta)),
        Some(other) => return Err(f.unsupported("rope.scaling.type", other, "none, yarn")),
    };
    let scaling = RopeScaling::Yarn {
        factor,
        fast: 32.0,
        slow: 1.0,
        original: f.required("", "rope.scaling.original_context_length")?,
        whole: false,
        scale: 0.1 * factor.max(1.0).ln() + 1.0,
        spread: 1.0,
    };
    Ok(Rope { scaling, ..Rope::plain(theta) })
}

fn experts(f: &Fields<'_>, config: &ModelConfig) -> Result<Experts> {
    let inner = f.size("", "expert_feed_forward_length")?.filter(|&n| n > 0);
    let inner = inner.unwrap_or(config.intermediate);
    let number = |json: &str, usual: f64| {
        let found = f.number(json, "")?.unwrap_or(usual);
        match found.is_finite() && found > 0.0 {
            true => Ok(found as f32),
            false => Err(f.invalid(json, found, "a finite number above 0")),
        }
    };
    let (alpha, limit) = (number("swiglu_alpha", 1.702)?, number("swiglu_limit", 7.0)?);
    // The converter to GGUF takes gate and up apart.
    let [gate, up] = match config.gguf {
        true => ["ffn_gate_exps", "ffn_up_exps"].map(|name| tensor("", name, inner)),
        false => gate_and_up("mlp.experts.gate_up_proj", inner).map(Source::turned),
    };
    let [gate_bias, up_bias] = match config.gguf {
        true => [gate, up],
        false => gate_and_up("mlp.experts.gate_up_proj_bias", inner),
    };
    let down = tensor("mlp.experts.down_proj", "ffn_down_exps", config.hidden).bare();
    let down_bias = tensor("mlp.experts.down_proj_bias", "ffn_down_exps", config.hidden).bare();
    let read = Experts::read(f, config.layers, router, [gate, up, down.turned()])?;
    if !inner.is_multiple_of(ROWS_OF_TURN) || inner > limits::WIDTH as usize {
        let allowed = format!("a multiple of {ROWS_OF_TURN}");
        return Err(f.invalid("width of experts", inner, allowed));
    }
    Ok(Experts {
        bias: Some(tensor("mlp.router.bias", "ffn_gate_inp.bias", read.count)),
        biases: Some([gate_bias, up_bias, down_bias]),
        clamp: Some(Clamp { alpha, limit }),
        ..read
    })
}

/// Rows of gate and up take turns in programs, so many of each.
const ROWS_OF_TURN: usize = 8;

/// Gate and up, whose rows alternate in one tensor.
fn gate_and_up(json: &'static str, inner: usize) -> [Source; 2] {
    let both = tensor(json, "", 2 * inner).bare().woven();
    [both.part(0, inner), both.part(inner, inner)]
}

fn router(experts: usize) -> Source {
    tensor("mlp.router", "ffn_gate_inp", experts)
}

impl Decoder for GptOss {
    fn ropes(&self) -> Vec<Rope> {
        vec![self.rope.clone()]
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let rope = b.rope(&self.rope);
        let norm = |json, gguf| tensor(json, gguf, config.hidden);
        let x = b.embed();
        let x = blocks::layers(config, b, x, |b, layer, x| {
            let h = b.rms_norm("attn_norm", x, norm("input_layernorm", "attn_norm"));
            let options = Attention {
                qkv_bias: self.biases,
                window: self.windows[layer],
                sinks: Some(tensor("self_attn.sinks", "attn_sinks", config.q_heads).bare()),
                ..Attention::new(config, rope)
            };
            let a = blocks::attention(config, b, h, &options);
            let (a, x) = blocks::last_tokens(b, a, x);
            let o = blocks::output_with(config, b, a, self.biases);
            let x = b.ops().add("attn_out", x, o);
            let after = norm("post_attention_layernorm", "post_attention_norm");
            let h = b.rms_norm("mlp_norm", x, after);
            self.experts.build(b, x, h)
        });
        blocks::end(config, b, x, |_, logits| logits);
    }
}
