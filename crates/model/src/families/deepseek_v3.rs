//! DeepSeek V3: as V2, with experts chosen by sigmoids and a bias that counts in the choice alone.

use super::Family;
use super::deepseek_v2::{groups, read_with};
use crate::config::{Fields, ModelConfig};
use device::op::{Routing, Score};
use formats::Result;

pub(super) const FAMILY: Family = Family { name: "deepseek_v3", gguf: "", encodes: false, read };

pub(super) fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    let mut config = read_with(f, routing)?;
    config.family = FAMILY.name;
    Ok(config)
}

/// Experts chosen by sigmoids in groups that are scored by their best two.
pub(super) fn routing(f: &Fields<'_>, count: usize, routing: Routing) -> Result<Routing> {
    let (groups, kept) = groups(f, count)?;
    if count / (groups as usize) < 2 {
        let name = f.called("n_group", "expert_group_count");
        return Err(f.invalid(&name, groups, "groups of two experts or more"));
    }
    // A GGUF file says it where weights add up to 1.
    let renormalise = f.bool("norm_topk_prob", "expert_weights_norm")?.unwrap_or(!f.is_gguf());
    Ok(Routing { score: Score::Sigmoid, groups, kept, group_top: 2, renormalise, ..routing })
}
