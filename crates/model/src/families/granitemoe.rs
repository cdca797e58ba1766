//! Granite 3 with experts: its multipliers, and experts in every layer, whose gate and up are one tensor.

use super::{Family, granite};
use crate::blocks::experts::{Experts, Shared, SharedWeight};
use crate::builder::{Source, tensor};
use crate::config::{Defaults, Fields, ModelConfig};
use formats::{Result, limits};

pub(super) const FAMILY: Family = Family { name: "granitemoe", gguf: "granitemoe", encodes: false, read };

/// The same for models with a shared expert, whose GGUF files have no name of their own.
pub(super) fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    let experts = |config: &ModelConfig, residual: f32| experts(f, config, residual).map(Some);
    let defaults = Defaults { experts: true, ..Defaults::default() };
    granite::read_with(f, defaults, experts, |_| Ok(None))
}

/// The experts of each layer, whose results are multiplied by `residual`.
pub(super) fn experts(f: &Fields<'_>, config: &ModelConfig, residual: f32) -> Result<Experts> {
    let [gate, up] = match config.gguf {
        // The converter takes gate and up apart.
        true => ["ffn_gate_exps", "ffn_up_exps"].map(|name| tensor("", name, config.intermediate)),
        false => halves("block_sparse_moe.input_linear", config.intermediate),
    };
    let down = tensor("block_sparse_moe.output_linear", "ffn_down_exps", config.hidden);
    let mut experts = Experts::read(f, config.layers, router, [gate, up, down])?;
    experts.routing.scale *= residual;
    experts.shared = shared(f, config, residual)?;
    Ok(experts)
}

fn router(experts: usize) -> Source {
    tensor("block_sparse_moe.router.layer", "ffn_gate_inp", experts)
}

fn shared(f: &Fields<'_>, config: &ModelConfig, residual: f32) -> Result<Option<Shared>> {
    let (json, gguf) = ("shared_intermediate_size", "expert_shared_feed_forward_length");
    let found = f.size(json, gguf)?.filter(|&n| n > 0);
    if found.is_none() {
        return Ok(None);
    }
    let sources = shared_sources(f, config, true)?;
    Ok(Some(Shared { sources, weight: SharedWeight::Factor(residual) }))
}

/// Gate, up and down of what every token goes through, `beside` experts or alone.
pub(super) fn shared_sources(
    f: &Fields<'_>,
    config: &ModelConfig,
    beside: bool,
) -> Result<[Source; 3]> {
    let (json, gguf) = ("shared_intermediate_size", "expert_shared_feed_forward_length");
    let inner = match f.size(json, gguf)? {
        None if config.gguf && !beside => config.intermediate,
        _ => f.required(json, gguf)?,
    };
    if inner == 0 || inner > limits::WIDTH as usize {
        return Err(f.invalid(json, inner, format!("1 to {}", limits::WIDTH)));
    }
    let names = match beside {
        true => ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"],
        false => ["ffn_gate", "ffn_up", "ffn_down"],
    };
    let [gate, up] = match config.gguf {
        true => [names[0], names[1]].map(|name| tensor("", name, inner)),
        false => halves("shared_mlp.input_linear", inner),
    };
    let down = tensor("shared_mlp.output_linear", names[2], config.hidden);
    Ok([gate, up, down])
}

/// Gate and up of a tensor that has both.
fn halves(name: &'static str, inner: usize) -> [Source; 2] {
    [0, inner].map(|from| tensor(name, "", 2 * inner).part(from, inner))
}
