//! The rotation table of a model: computed once, at load.

use crate::config::{Rope, RopeScaling};
use device::cpu::Numerics;

/// `positions × head_dim` floats, as [`graph::layout::rope_table`] lays them out.
pub(crate) fn table(
    rope: &Rope,
    head_dim: usize,
    positions: usize,
    numerics: Numerics,
) -> Vec<f32> {
    let frequencies = rope.frequencies(head_dim, positions);
    let mut table = match (numerics, &rope.scaling) {
        (Numerics::Fast | Numerics::Exact, _) | (_, RopeScaling::Still) => {
            graph::layout::rope_table(positions as u32, &frequencies)
        }
        (Numerics::Ggml, _) => ggml_table(rope, &frequencies, head_dim, positions),
    };
    // Of the cosines and of the sines of a position, those of rotated elements come first.
    let turned = rope.rotated.unwrap_or(head_dim) / 2;
    for half in table.chunks_exact_mut(head_dim / 2) {
        half[..turned].iter_mut().for_each(|x| *x *= rope.scale());
    }
    table
}

/// The same with angles as ggml has them: the first is the position, each next one is the last times the same
/// factor, all in f32; scaling comes after. At position 1,000 the two tables differ by 1e-4 rad.
fn ggml_table(rope: &Rope, scaled: &[f32], head_dim: usize, positions: usize) -> Vec<f32> {
    let rotated = rope.rotated.unwrap_or(head_dim);
    let factor = (rope.theta as f32).powf(-2.0 / rotated as f32);
    // Llama 3's rule and Phi-3's lists are written into GGUF files as divisors.
    let plain = |i: usize| rope.theta.powf(-((2 * i) as f64) / rotated as f64);
    let divisor = |i: usize| (plain(i) / f64::from(scaled[i])) as f32;
    let divisors: Vec<f32> = match &rope.scaling {
        RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Still => {
            vec![1.0; rotated / 2]
        }
        RopeScaling::Divisors(divisors) => divisors.clone(),
        RopeScaling::Llama3 { .. } | RopeScaling::Long { .. } | RopeScaling::Yarn { .. } => {
            (0..rotated / 2).map(divisor).collect()
        }
    };
    let scale = match &rope.scaling {
        RopeScaling::Linear { factor } => 1.0 / *factor as f32,
        _ => 1.0,
    };
    let mut table = Vec::with_capacity(positions * head_dim);
    for position in 0..positions {
        let mut angle = position as f32;
        let turned = divisors.iter().map(|divisor| {
            let this = scale * (angle / divisor);
            angle *= factor;
            this
        });
        let mut angles: Vec<f32> = turned.collect();
        angles.resize(head_dim / 2, 0.0);
        table.extend(angles.iter().map(|angle| angle.cos()));
        table.extend(angles.iter().map(|angle| angle.sin()));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ModelConfig;

    #[test]
    fn both_ways_give_nearly_the_same_angles() {
        for name in ["qwen3-0.6b", "llama-3.2-1b"] {
            let config = ModelConfig::bundled(name).unwrap();
            let rope = config.decoder.ropes()[0].clone();
            for rope in [rope.clone(), rope.first(32), Rope::still()] {
                if rope.rotated.is_some() && rope.scaling != RopeScaling::None {
                    continue;
                }
                let of = |numerics| table(&rope, config.head_dim, 300, numerics);
                let (fast, ggml) = (of(Numerics::Fast), of(Numerics::Ggml));
                assert_eq!(fast.len(), ggml.len());
                for (i, (fast, ggml)) in fast.iter().zip(&ggml).enumerate() {
                    assert!((fast - ggml).abs() < 2e-4, "{name}, {i}: {fast} and {ggml}");
                }
            }
        }
    }
}
