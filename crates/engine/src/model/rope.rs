//! The rotation table of a model: computed once, at load.

use device::cpu::Numerics;
use formats::config::{ModelConfig, RopeScaling};

/// `positions × head_dim` floats, as [`graph::layout::rope_table`] lays them out.
pub fn table(config: &ModelConfig, positions: usize, numerics: Numerics) -> Vec<f32> {
    match numerics {
        Numerics::Fast => {
            let frequencies = config.rope.frequencies(config.head_dim);
            graph::layout::rope_table(positions as u32, &frequencies)
        }
        Numerics::Ggml => ggml_table(config, positions),
    }
}

/// The same with angles as ggml has them: the first is the position, each next one is the last times the same
/// factor, all in f32; scaling comes after. At position 1,000 the two tables differ by 1e-4 rad.
fn ggml_table(config: &ModelConfig, positions: usize) -> Vec<f32> {
    let (rope, dim) = (&config.rope, config.head_dim);
    let factor = (rope.theta as f32).powf(-2.0 / dim as f32);
    // Llama 3's rule is written into GGUF files as divisors.
    let plain = |i: usize| rope.theta.powf(-((2 * i) as f64) / dim as f64);
    let scaled = rope.frequencies(dim);
    let divisors: Vec<f32> = match &rope.scaling {
        RopeScaling::None | RopeScaling::Linear { .. } => vec![1.0; dim / 2],
        RopeScaling::Divisors(divisors) => divisors.clone(),
        RopeScaling::Llama3 { .. } => {
            scaled.iter().enumerate().map(|(i, f)| (plain(i) / f64::from(*f)) as f32).collect()
        }
    };
    let scale = match &rope.scaling {
        RopeScaling::Linear { factor } => 1.0 / *factor as f32,
        _ => 1.0,
    };
    let mut table = Vec::with_capacity(positions * dim);
    for position in 0..positions {
        let mut angle = position as f32;
        let angles = divisors.iter().map(|divisor| {
            let this = scale * (angle / divisor);
            angle *= factor;
            this
        });
        let angles: Vec<f32> = angles.collect();
        table.extend(angles.iter().map(|angle| angle.cos()));
        table.extend(angles.iter().map(|angle| angle.sin()));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_give_nearly_the_same_angles() {
        for name in ["qwen3-0.6b", "llama-3.2-1b"] {
            let config = ModelConfig::bundled(name).unwrap();
            let of = |numerics| table(&config, 300, numerics);
            let (fast, ggml) = (of(Numerics::Fast), of(Numerics::Ggml));
            assert_eq!(fast.len(), ggml.len());
            for (i, (fast, ggml)) in fast.iter().zip(&ggml).enumerate() {
                assert!((fast - ggml).abs() < 2e-4, "{name}, {i}: {fast} and {ggml}");
            }
        }
    }
}
