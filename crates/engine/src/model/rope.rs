//! The rotation table: cosines and sines of every position, computed once at load.

use formats::config::ModelConfig;

/// `positions × head_dim` floats: for each position the cosines of the head_dim/2 frequencies, then
/// their sines. The angle is a product of two f32, as the reference implementations compute it.
pub fn table(config: &ModelConfig, positions: usize) -> Vec<f32> {
    let frequencies = config.rope.frequencies(config.head_dim);
    let mut table = Vec::with_capacity(positions * config.head_dim);
    for position in 0..positions {
        let angles = frequencies.iter().map(|frequency| f64::from(position as f32 * frequency));
        table.extend(angles.clone().map(|angle| angle.cos() as f32));
        table.extend(angles.map(|angle| angle.sin() as f32));
    }
    table
}
