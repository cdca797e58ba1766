//! What a linear's outputs are added to, and what that has lost where linears before are quantised.

use super::QuantiseError;
use device::op::{Linear, Norm};
use device::{Node, Op, Tensor};

/// Weights of a norm that are smaller than this share of the largest one are not divided by.
const LEAST: f32 = 1e-3;

/// The sum that a linear's outputs go into, next or through a norm. Of two tensors, the second is that of the model as it was.
#[derive(Clone, Debug)]
pub(super) struct Residual {
    /// What they are added to.
    other: [Tensor; 2],
    /// The outputs.
    y: [Tensor; 2],
    /// What they pass before.
    pub(super) norm: Option<Norm>,
}

impl Residual {
    /// Of linears that are the first of these nodes.
    pub(super) fn of(nodes: [&[Node]; 2], linears: [&Linear; 2]) -> Option<Residual> {
        let (now, norm) = sum(nodes[0], linears[0])?;
        let (before, _) = sum(nodes[1], linears[1])?;
        Some(Residual { other: [now, before], y: linears.map(|linear| linear.y), norm })
    }

    /// What outputs have to be larger by, so that the sums are what they were before. `read` gets rows of both models. With
    /// a norm, all that a column has to be divided by besides is the norm's weight.
    pub(super) fn missing(
        &self,
        read: impl Fn([Tensor; 2]) -> Result<[Vec<f32>; 2], QuantiseError>,
    ) -> Result<Vec<f32>, QuantiseError> {
        let [now, mut missing] = read(self.other)?;
        missing.iter_mut().zip(&now).for_each(|(before, now)| *before -= now);
        if let Some(norm) = &self.norm {
            let [_, y] = read(self.y)?;
            let cols = self.y[1].cols as usize;
            for (missing, y) in missing.chunks_exact_mut(cols).zip(y.chunks_exact(cols)) {
                let squares: f32 = y.iter().map(|x| x * x).sum();
                let size = (squares / cols as f32 + norm.eps).sqrt();
                missing.iter_mut().for_each(|x| *x *= size);
            }
        }
        Ok(missing)
    }
}

/// What the outputs of the linear that is the first of these nodes are added to, and the norm that they pass before.
fn sum(nodes: &[Node], linear: &Linear) -> Option<(Tensor, Option<Norm>)> {
    let next = &nodes.get(1)?.op;
    let (added, norm, sum) = match next {
        Op::RmsNorm(node) if node.x.span == linear.y.span => {
            (node.y, Some(node.norm.clone()), &nodes.get(2)?.op)
        }
        _ => (linear.y, None, next),
    };
    let Op::Add(add) = sum else { return None };
    let other = if add.a.span == added.span {
        add.b
    } else if add.b.span == added.span {
        add.a
    } else {
        return None;
    };
    (other.span != added.span).then_some((other, norm))
}

/// What to multiply by instead of dividing by the weights of a norm.
pub(super) fn inverses(weights: &[f32]) -> Vec<f32> {
    let most = weights.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let inverse = |x: &f32| if x.abs() > LEAST * most { 1.0 / x } else { 0.0 };
    weights.iter().map(inverse).collect()
}
