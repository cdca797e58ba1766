//! What a linear's outputs are added to, and what that has lost where linears before are quantised.

use super::QuantiseError;
use device::op::{Linear, Norm};
use device::{Node, Op, Region, Tensor};

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
    /// Of linears in the first of these nodes.
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

/// What the outputs of a linear in the first of these nodes are added to, and the norm that they pass before.
fn sum(nodes: &[Node], linear: &Linear) -> Option<(Tensor, Option<Norm>)> {
    let is_it = |op: &Op| matches!(op, Op::Linear(other) if std::ptr::eq(other, linear));
    let members = nodes.iter().take(3).flat_map(|node| node.op.members());
    let mut behind = members.skip_while(|op| !is_it(op)).skip(1);
    let (added, norm, sum) = match behind.next()? {
        // Outputs that have to be read are written by a node that does nothing more: it runs twice.
        Op::RmsNorm(node) if node.x.span == linear.y.span => {
            nodes[0].op.members().last().filter(|op| is_it(op))?;
            (node.y, Some(node.norm), behind.next()?)
        }
        op => (linear.y, None, op),
    };
    let Op::Add(add) = sum else { return None };
    let other = if add.a.span == added.span {
        add.b
    } else if add.b.span == added.span {
        add.a
    } else {
        return None;
    };
    (other.span != added.span && other.span.region != Region::Inside).then_some((other, norm))
}

/// What to multiply by instead of dividing by the weights of a norm.
pub(super) fn inverses(weights: &[f32]) -> Vec<f32> {
    let most = weights.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let inverse = |x: &f32| if x.abs() > LEAST * most { 1.0 / x } else { 0.0 };
    weights.iter().map(inverse).collect()
}
