//! DeepSeek V2 (and V3 in GGUF files, which call both the same): latent attention, dense first layers, then experts with shared ones.

use super::{Family, deepseek_v3};
use crate::blocks::experts::{self, Experts, Shared, SharedWeight};
use crate::blocks::latent::Latent;
use crate::builder::tensor;
use crate::config::{Defaults, Fields, ModelConfig};
use device::op::{Routing, Score};
use formats::{Result, limits};
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "deepseek_v2", gguf: "deepseek2", encodes: false, read };

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    if f.is_gguf() {
        return read_gguf(f);
    }
    f.not("norm_topk_prob", "")?;
    read_with(f, |f, count, routing| {
        let (groups, kept) = match f.text("topk_method", "")? {
            None | Some("greedy") => (1, 1),
            Some("group_limited_greedy") => groups(f, count)?,
            Some(other) => {
                let known = "greedy, group_limited_greedy";
                return Err(f.unsupported("topk_method", other, known));
            }
        };
        Ok(Routing { groups, kept, renormalise: false, ..routing })
    })
}

/// V2 or V3, which have one name in GGUF files, by how experts are scored.
fn read_gguf(f: &Fields<'_>) -> Result<ModelConfig> {
    match f.size("", "expert_gating_func")? {
        None | Some(1) => {}
        Some(2) => return deepseek_v3::read(f),
        Some(other) => {
            let known = "1 (softmax), 2 (sigmoid)";
            return Err(f.unsupported(&f.called("", "expert_gating_func"), other, known));
        }
    }
    read_with(f, |f, count, routing| {
        let (groups, kept) = groups(f, count)?;
        let renormalise = f.bool("", "expert_weights_norm")?.unwrap_or(false);
        Ok(Routing { groups, kept, renormalise, ..routing })
    })
}

/// The same for families that choose experts in their own way.
pub(super) fn read_with(
    f: &Fields<'_>,
    routing: impl FnOnce(&Fields<'_>, usize, Routing) -> Result<Routing>,
) -> Result<ModelConfig> {
    f.silu_without_bias()?;
    let defaults =
        Defaults { max_position: 2_048, experts: true, latent: true, ..Defaults::default() };
    let mut config = ModelConfig::read(f, defaults)?;
    let f = &f.aliased(&[("num_experts", "n_routed_experts")]);
    let inner = f.required("moe_intermediate_size", "expert_feed_forward_length")?;
    let sources = experts::numbered(inner, config.hidden);
    let mut experts = Experts::read(f, config.layers, experts::router, sources)?;
    experts.routing = routing(f, experts.count, experts.routing)?;
    if experts.routing.score == Score::Sigmoid {
        let name = "mlp.gate.e_score_correction_bias";
        experts.bias = Some(tensor(name, "exp_probs_b.bias", experts.count));
    }
    if let Some(scale) = f.number("routed_scaling_factor", "")? {
        experts.routing.scale = scale as f32;
    }
    if let Some(every) = f.size("moe_layer_freq", "")?.filter(|&every| every != 1) {
        return Err(f.unsupported("moe_layer_freq", every, "1"));
    }
    let dense = f.size("first_k_dense_replace", "leading_dense_block_count")?.unwrap_or(0);
    experts.layers = (0..config.layers).map(|layer| layer >= dense).collect();
    experts.shared = shared(f, &config, inner)?;
    let decoder = Latent::read(f, &mut config, experts)?;
    config.decoder = Arc::new(decoder);
    Ok(config)
}

/// Groups of equally many experts, and how many of them are kept. GGUF files may leave out that there is one.
pub(super) fn groups(f: &Fields<'_>, experts: usize) -> Result<(u32, u32)> {
    let count = |json: &str, gguf: &str| match f.is_gguf() {
        true => Ok(f.size(json, gguf)?.unwrap_or(1)),
        false => f.required(json, gguf),
    };
    let name = "expert_group_count";
    let groups = count("n_group", name)?;
    let kept = count("topk_group", "expert_group_used_count")?;
    let even = (1..=32).contains(&groups) && experts.is_multiple_of(groups);
    match even && (1..=groups).contains(&kept) {
        true => Ok((groups as u32, kept as u32)),
        false => {
            let allowed = format!("groups of the {experts} experts, and some of them kept");
            Err(f.invalid(&f.called("n_group", name), groups, allowed))
        }
    }
}

/// Experts that every token goes through: one MLP.
fn shared(f: &Fields<'_>, config: &ModelConfig, inner: usize) -> Result<Option<Shared>> {
    let name = ("n_shared_experts", "expert_shared_count");
    let Some(count) = f.size(name.0, name.1)?.filter(|&n| n > 0) else { return Ok(None) };
    let wide = inner.saturating_mul(count);
    if wide as u64 > limits::WIDTH {
        let allowed = format!("{} in all", limits::WIDTH);
        return Err(f.invalid(&f.called(name.0, name.1), count, allowed));
    }
    let sources = [
        tensor("mlp.shared_experts.gate_proj", "ffn_gate_shexp", wide),
        tensor("mlp.shared_experts.up_proj", "ffn_up_shexp", wide),
        tensor("mlp.shared_experts.down_proj", "ffn_down_shexp", config.hidden),
    ];
    Ok(Some(Shared { sources, weight: SharedWeight::Factor(1.0) }))
}
