//! DeepSeek V3: as V2, with experts chosen by sigmoids and a bias that counts in the choice alone.

use super::Family;
use super::deepseek_v2::{group_count, read_with};
use crate::config::{Fields, ModelConfig};
use device::op::{Routing, Score};
use formats::Result;

pub(super) const FAMILY: Family = Family { name: "deepseek_v3", gguf: "", encodes: false, read };

fn read(f: &Fields<'_>) -> Result<ModelConfig> {
    read_with(f, |f, count, routing| {
        let groups = group_count(f, count)?;
        if count / groups < 2 {
            return Err(f.invalid("n_group", groups, "groups of two experts or more"));
        }
        Ok(Routing {
            score: Score::Sigmoid,
            groups: groups as u32,
            kept: f.required("topk_group", "")? as u32,
            group_top: 2,
            renormalise: f.bool("norm_topk_prob", "")?.unwrap_or(true),
            ..routing
        })
    })
}
