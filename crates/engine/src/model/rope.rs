//! The rotation table of a model: computed once, at load.

use formats::config::ModelConfig;

/// `positions × head_dim` floats, as [`graph::layout::rope_table`] lays them out.
pub fn table(config: &ModelConfig, positions: usize) -> Vec<f32> {
    graph::layout::rope_table(positions as u32, &config.rope.frequencies(config.head_dim))
}
