//! Granite 4 hybrid: Granite's multipliers, Mamba-2 in most layers, attention in the others, experts or one MLP.

use super::granite::Hybrid;
use super::{Family, granite, granitemoe};
use crate::blocks::mamba::{FieldNames, Mamba, TensorNames};
use crate::config::{Defaults, Fields, ModelConfig, Rope};
use formats::Result;

pub(super) const FAMILY: Family =
    Family { name: "granitemoehybrid", gguf: "granitehybrid", encodes: false, read };

const FIELDS: FieldNames = FieldNames {
    heads: "mamba_n_heads",
    groups: "mamba_n_groups",
    state: "mamba_d_state",
    head_dim: "mamba_d_head",
    taps: "mamba_d_conv",
    conv_bias: "mamba_conv_bias",
};

const TENSORS: TensorNames = TensorNames {
    input: "mamba.in_proj",
    conv: "mamba.conv1d",
    a: "mamba.A_log",
    dt: "mamba.dt_bias",
    skip: "mamba.D",
    norm: "mamba.norm",
    output: "mamba.out_proj",
};

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    f.not("mamba_proj_bias", "")?;
    // 0 to infinity is a list with a null, which is no list of numbers.
    if let Ok(Some(limit)) = f.numbers("time_step_limit", "") {
        return Err(f.unsupported("time_step_limit", format!("{limit:?}"), "0 to infinity"));
    }
    let defaults = Defaults { experts: true, ..Defaults::default() };
    let has_experts = f.size("num_local_experts", "expert_count")?.unwrap_or(0) > 0;
    let experts = |config: &ModelConfig, residual: f32| match has_experts {
        true => granitemoe::experts(f, config, residual).map(Some),
        false => Ok(None),
    };
    granite::read_with(f, defaults, experts, |config| {
        let expand = f.size("mamba_expand", "")?.unwrap_or(2);
        let inner = expand.saturating_mul(config.hidden);
        let mamba = Mamba::read(f, &FIELDS, TENSORS, |heads| inner / heads, 0.0)?;
        // A GGUF file has the numbers of a rotation whether there is one or not.
        let still = f.bool("", "rope.scaling.finetuned")? == Some(false);
        let rope = match f.text("position_embedding_type", "")? {
            None if f.is_gguf() && !still => Rope::read_whole(f, config.head_dim)?,
            Some("rope") => Rope::read_whole(f, config.head_dim)?,
            None | Some("nope") => Rope::still(),
            Some(other) => {
                return Err(f.unsupported("position_embedding_type", other, "rope, nope"));
            }
        };
        let mlp = match has_experts {
            true => None,
            false => Some(granitemoe::shared_sources(f, config, false)?),
        };
        Ok(Some(Hybrid { mamba, attends: attends(f, config.layers)?, rope, mlp }))
    })
}

/// Which layers attend.
fn attends(f: &Fields<'_>, layers: usize) -> Result<Vec<bool>> {
    if f.is_gguf() {
        return attends_by_heads(f, layers);
    }
    let names = match f.texts("layer_types")? {
        Some(names) => names,
        None => f.texts("layers_block_type")?.unwrap_or_default(),
    };
    if names.len() != layers {
        return Err(f.invalid("layer_types", names.len(), format!("{layers} entries")));
    }
    let attends = |(layer, name): (usize, &&str)| match *name {
        "attention" | "full_attention" => Ok(true),
        "mamba" | "linear_attention" => Ok(false),
        other => Err(f.unsupported(&format!("layer_types[{layer}]"), other, "mamba, attention")),
    };
    let attends: Vec<bool> = names.iter().enumerate().map(attends).collect::<Result<_>>()?;
    match attends.contains(&true) {
        true => Ok(attends),
        false => Err(f.unsupported("layer_types", "no attention", "some layers that attend")),
    }
}

/// In a GGUF file layers that do not attend have no heads of keys and values.
fn attends_by_heads(f: &Fields<'_>, layers: usize) -> Result<Vec<bool>> {
    let field = "attention.head_count_kv";
    let heads = f.sizes_of_layers(field)?.unwrap_or_default();
    if heads.len() != layers {
        let allowed = format!("a list of {layers}");
        return Err(f.invalid(&f.called("", field), heads.len(), allowed));
    }
    let attends: Vec<bool> = heads.into_iter().map(|heads| heads > 0).collect();
    match attends.contains(&true) {
        true => Ok(attends),
        false => {
            let allowed = "some layers that attend";
            Err(f.unsupported(&f.called("", field), "no attention", allowed))
        }
    }
}
