//! Which checkpoint tensors make up each weight of a program, and in what order their rows stand.
//!
//! A program wants fewer, larger matrices than a checkpoint holds: q, k and v in one, gate and up
//! alternating row by row. All of that is an arrangement of rows, so quantised weights are arranged
//! without being touched: a row is whole blocks.

use device::target::WeightUse;
use formats::config::ModelConfig;
use formats::tensor_names::{Role, RopeLayout};

/// How the rows of the parts stand in the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrange {
    /// All rows of the first part, then of the second, …
    Stacked,
    /// Row 0 of the first, row 0 of the second, row 1 of the first, …
    Alternating,
}

/// One weight of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightSpec {
    /// The program's name for it.
    pub name: String,
    /// The tensors it is made of; each has `rows / parts.len()` rows when alternating.
    pub parts: Vec<Part>,
    /// How they are put together.
    pub arrange: Arrange,
    /// Columns; 0 rows do not exist. Vectors are one row.
    pub cols: usize,
    /// What it is, which decides how it is stored.
    pub kind: WeightUse,
}

/// A checkpoint tensor as a part of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Which tensor.
    pub role: Role,
    /// Its rows (its length, for a vector).
    pub rows: usize,
}

impl WeightSpec {
    /// Rows of the weight; 1 for vectors.
    pub fn rows(&self) -> usize {
        match self.kind {
            WeightUse::Vector => 1,
            _ => self.parts.iter().map(|part| part.rows).sum(),
        }
    }

    /// Where row `row` of the weight comes from: which part, and which stored row of it.
    pub fn source(&self, row: usize, layout: RopeLayout, head_dim: usize) -> (usize, usize) {
        let (part, within) = match self.arrange {
            Arrange::Alternating => (row % self.parts.len(), row / self.parts.len()),
            Arrange::Stacked => {
                let mut within = row;
                let mut part = 0;
                while within >= self.parts[part].rows {
                    within -= self.parts[part].rows;
                    part += 1;
                }
                (part, within)
            }
        };
        let stored = match self.parts[part].role.is_rotated() {
            true => layout.stored_row(within, head_dim),
            false => within,
        };
        (part, stored)
    }

    fn matrix(name: String, cols: usize, parts: &[(Role, usize)]) -> WeightSpec {
        let parts = parts.iter().map(|&(role, rows)| Part { role, rows }).collect();
        WeightSpec { name, parts, arrange: Arrange::Stacked, cols, kind: WeightUse::Matrix }
    }

    fn vector(name: String, parts: &[(Role, usize)]) -> WeightSpec {
        let cols = parts.iter().map(|(_, len)| len).sum();
        WeightSpec { kind: WeightUse::Vector, ..Self::matrix(name, cols, parts) }
    }
}

/// Names of a layer's weights in a program: `layers.7.qkv`.
pub(crate) fn in_layer(layer: usize, name: &str) -> String {
    format!("layers.{layer}.{name}")
}

/// Every weight of a dense decoder, in the order they are used.
pub fn specs(config: &ModelConfig) -> Vec<WeightSpec> {
    let (hidden, inner) = (config.hidden, config.intermediate);
    let (q, kv, dim) = (config.q_width(), config.kv_width(), config.head_dim);
    let embed = WeightSpec::matrix("embed".into(), hidden, &[(Role::Embed, config.vocab)]);
    let mut all = vec![WeightSpec { kind: WeightUse::Table, ..embed }];
    for layer in 0..config.layers {
        let n = layer as u32;
        let name = |name| in_layer(layer, name);
        all.push(WeightSpec::vector(name("attn_norm"), &[(Role::AttnNorm(n), hidden)]));
        all.push(WeightSpec::matrix(
            name("qkv"),
            hidden,
            &[(Role::Q(n), q), (Role::K(n), kv), (Role::V(n), kv)],
        ));
        if config.qkv_bias {
            let parts = [(Role::QBias(n), q), (Role::KBias(n), kv), (Role::VBias(n), kv)];
            all.push(WeightSpec::vector(name("qkv_bias"), &parts));
        }
        if config.qk_norm {
            all.push(WeightSpec::vector(name("q_norm"), &[(Role::QNorm(n), dim)]));
            all.push(WeightSpec::vector(name("k_norm"), &[(Role::KNorm(n), dim)]));
        }
        all.push(WeightSpec::matrix(name("o"), q, &[(Role::O(n), hidden)]));
        all.push(WeightSpec::vector(name("mlp_norm"), &[(Role::MlpNorm(n), hidden)]));
        let parts = [(Role::Gate(n), inner), (Role::Up(n), inner)];
        let gate_up = WeightSpec::matrix(name("gate_up"), hidden, &parts);
        all.push(WeightSpec { arrange: Arrange::Alternating, ..gate_up });
        all.push(WeightSpec::matrix(name("down"), inner, &[(Role::Down(n), hidden)]));
    }
    all.push(WeightSpec::vector("final_norm".into(), &[(Role::FinalNorm, hidden)]));
    // A tied head is the same numbers as the embedding, but may be stored in another way.
    let head = if config.tied { Role::Embed } else { Role::LmHead };
    all.push(WeightSpec::matrix("lm_head".into(), hidden, &[(head, config.vocab)]));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_from_the_parts_in_the_stated_order() {
        let config = ModelConfig::bundled("qwen3-0.6b").unwrap();
        let all = specs(&config);
        let find = |name: &str| all.iter().find(|spec| spec.name == name).unwrap();
        let qkv = find("layers.3.qkv");
        let (q, kv) = (config.q_width(), config.kv_width());
        assert_eq!(qkv.rows(), q + 2 * kv);
        let from = |row| qkv.source(row, RopeLayout::Halves, config.head_dim);
        assert_eq!((from(0), from(q), from(q + kv + 5)), ((0, 0), (1, 0), (2, 5)));
        let interleaved = |row| qkv.source(row, RopeLayout::Interleaved, config.head_dim);
        assert_eq!(interleaved(1), (0, 2), "the second element of the first half");
        assert_eq!(interleaved(q + kv + 1), (2, 1), "v is not rotated");
        let gate_up = find("layers.0.gate_up");
        let from = |row| gate_up.source(row, RopeLayout::Halves, config.head_dim);
        assert_eq!((from(0), from(1), from(2)), ((0, 0), (1, 0), (0, 1)));
    }

    #[test]
    fn every_role_of_a_layer_is_used_once() {
        for name in ModelConfig::bundled_names() {
            let config = ModelConfig::bundled(name).unwrap();
            let mut roles: Vec<Role> =
                specs(&config).iter().flat_map(|spec| spec.parts.iter().map(|p| p.role)).collect();
            roles.sort();
            let all = roles.len();
            roles.dedup();
            let shared = usize::from(config.tied);
            assert_eq!(roles.len() + shared, all, "{name}");
        }
    }
}
