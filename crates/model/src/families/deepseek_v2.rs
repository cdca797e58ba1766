//! DeepSeek V2: latent attention, dense first layers, then experts with shared ones.

use super::Family;
use crate::blocks::experts::{self, Experts, Shared, SharedWeight};
use crate::blocks::latent::Latent;
use crate::builder::tensor;
use crate::config::{Defaults, Fields, ModelConfig};
use device::op::{Routing, Score};
use formats::{Result, limits};
use std::sync::Arc;

pub(super) const FAMILY: Family = Family { name: "deepseek_v2", gguf: "", encodes: false, read };

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    f.not("norm_topk_prob", "")?;
    read_with(f, |f, count, routing| {
        let groups = match f.text("topk_method", "")? {
            None | Some("greedy") => 1,
            Some("group_limited_greedy") => group_count(f, count)?,
            Some(other) => {
                let known = "greedy, group_limited_greedy";
                return Err(f.unsupported("topk_method", other, known));
            }
        };
        let kept = if groups > 1 { f.required("topk_group", "")? } else { 1 };
        Ok(Routing { groups: groups as u32, kept: kept as u32, renormalise: false, ..routing })
    })
}

/// The same for families that choose experts in their own way.
pub(super) fn read_with(
    f: &Fields<'_>,
    routing: impl FnOnce(&Fields<'_>, usize, Routing) -> Result<Routing>,
) -> Result<ModelConfig> {
    f.silu_without_bias()?;
    let defaults = Defaults { max_position: 2_048, experts: true, ..Defaults::default() };
    let mut config = ModelConfig::read(f, defaults)?;
    let f = &f.aliased(&[("num_experts", "n_routed_experts")]);
    let inner = f.required("moe_intermediate_size", "")?;
    let sources = experts::numbered(inner, config.hidden);
    let mut experts = Experts::read(f, config.layers, experts::router, sources)?;
    experts.routing = routing(f, experts.count, experts.routing)?;
    if experts.routing.score == Score::Sigmoid {
        experts.bias = Some(tensor("mlp.gate.e_score_correction_bias", "", experts.count));
    }
    experts.routing.scale = f.number("routed_scaling_factor", "")?.unwrap_or(1.0) as f32;
    if let Some(every) = f.size("moe_layer_freq", "")?.filter(|&every| every != 1) {
        return Err(f.unsupported("moe_layer_freq", every, "1"));
    }
    let dense = f.size("first_k_dense_replace", "")?.unwrap_or(0);
    experts.layers = (0..config.layers).map(|layer| layer >= dense).collect();
    experts.shared = shared(f, &config, inner)?;
    let decoder = Latent::read(f, &mut config, experts)?;
    config.decoder = Arc::new(decoder);
    Ok(config)
}

/// Groups of equally many experts, of which `topk_group` are kept.
pub(super) fn group_count(f: &Fields<'_>, experts: usize) -> Result<usize> {
    let (groups, kept) = (f.required("n_group", "")?, f.required("topk_group", "")?);
    let even = (1..=32).contains(&groups) && experts.is_multiple_of(groups);
    match even && (1..=groups).contains(&kept) {
        true => Ok(groups),
        false => Err(f.invalid("n_group", groups, format!("groups of the {experts} experts"))),
    }
}

/// Experts that every token goes through: one MLP.
fn shared(f: &Fields<'_>, config: &ModelConfig, inner: usize) -> Result<Option<Shared>> {
    let Some(count) = f.size("n_shared_experts", "")?.filter(|&n| n > 0) else { return Ok(None) };
    let wide = inner.saturating_mul(count);
    if wide as u64 > limits::WIDTH {
        return Err(f.invalid("n_shared_experts", count, format!("{} in all", limits::WIDTH)));
    }
    let sources = [
        tensor("mlp.shared_experts.gate_proj", "", wide),
        tensor("mlp.shared_experts.up_proj", "", wide),
        tensor("mlp.shared_experts.down_proj", "", config.hidden),
    ];
    Ok(Some(Shared { sources, weight: SharedWeight::Factor(1.0) }))
}
