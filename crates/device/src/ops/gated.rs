//! `y = x · gate(z)` for each element, where z is as many columns of another value; with an RMS norm over groups of
//! columns before the gate or after it. The norm's weight has an element for each column, or for each column of a group.
//! In f32, rounded once, when storing. `y` may be `x`. Rows past the `live` count may be left as they are.

mod cuda;
mod fast;

use super::{
    Access, Bindable, Contract, Named, Reuse, SpanVisitor, StepSize, Traffic, live_rows, require,
    require_live, require_matrices, require_norm, require_shape_of,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::view::Matrix;
use crate::op::Norm;
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::{Result, Span, Tensor};
use serde::{Deserialize, Serialize};

/// The function of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gate {
    /// `1 / (1 + e^-z)`.
    Sigmoid,
    /// `z / (1 + e^-z)`.
    Silu,
}

/// A norm beside a gate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct GatedNorm<O: Operands = Bound> {
    /// Its weight, of a group or of all columns.
    pub norm: Norm<O>,
    /// Columns that are normalised together.
    pub group: u32,
    /// It normalises what was multiplied by the gate; else what is to be.
    pub after: bool,
}

/// Multiplies by a gate, with a norm before or after.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Gated<O: Operands = Bound> {
    /// Multiplied.
    pub x: O::Value,
    /// Holds the gates: its columns from `from` on.
    pub z: O::Value,
    /// The first of them.
    pub from: u32,
    /// The function of the gate.
    pub gate: Gate,
    /// A norm, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub norm: Option<GatedNorm<O>>,
    /// The products; may be `x`.
    pub y: O::Value,
    /// Rows past this device-side count need not be computed.
    #[serde(skip_serializing_if = "unset")]
    pub live: O::Late<Option<Span>>,
}

impl<O: Operands> Bindable for Gated<O> {
    type O = O;
    type Bound = Gated;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.x, Access::Read));
        visit(Operand::Value(&mut self.z, Access::Read));
        if let Some(norm) = &mut self.norm {
            visit(Operand::Weight(&mut norm.norm.weight));
        }
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Gated, B::Error> {
        let norm = match &self.norm {
            None => None,
            Some(GatedNorm { norm, group, after }) => {
                Some(GatedNorm { norm: norm.bind(to)?, group: *group, after: *after })
            }
        };
        let (x, z, y) = (to.value(self.x)?, to.value(self.z)?, to.value(self.y)?);
        let Gated { from, gate, .. } = *self;
        Ok(Gated { x, z, from, gate, norm, y, live: to.live(self.y) })
    }

    fn reuse(&self) -> Option<Reuse<O::Value>> {
        (self.x != self.z).then_some(Reuse { from: self.x, to: self.y, must: false })
    }
}

impl Contract for Gated {
    fn check(&self) -> Result<()> {
        let Gated { x, z, y, from, .. } = self;
        require_matrices(&[(x, "x"), (z, "z"), (y, "y")], Self::NAME)?;
        require_shape_of(y, x, Self::NAME, "x")?;
        let end = u64::from(*from) + u64::from(x.cols);
        require(end <= u64::from(z.cols) && z.rows == x.rows, Self::NAME, || {
            format!("gates of {} columns from {from} on, of {z}", x.cols)
        })?;
        if let Some(GatedNorm { norm, group, .. }) = &self.norm {
            require(*group > 0 && x.cols.is_multiple_of(*group), Self::NAME, || {
                format!("groups of {group} in {} columns", x.cols)
            })?;
            let shared = norm.weight.cols == *group;
            require_norm(norm, if shared { *group } else { x.cols }, Self::NAME)?;
        }
        require_live(self.live, Self::NAME)
    }

    fn describe(&self) -> String {
        let norm = match &self.norm {
            None => String::new(),
            Some(GatedNorm { group, after: true, .. }) => format!(", then norm of {group}"),
            Some(GatedNorm { group, after: false, .. }) => format!(", after norm of {group}"),
        };
        let gate = match self.gate {
            Gate::Sigmoid => "sigmoid",
            Gate::Silu => "silu",
        };
        format!("gated {gate} {}{norm}", self.x)
    }

    fn traffic(&self) -> Traffic {
        let weights = self.norm.as_ref().map_or(0, |norm| norm.norm.weight.bytes());
        let gates = self.z.dtype.bytes((self.x.rows * self.x.cols) as usize) as u64;
        Traffic { weights, values: self.x.bytes() + gates + self.y.bytes() }
    }

    fn step_size(&self) -> StepSize {
        StepSize::ANY
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.x.span, Access::Read);
        visit(self.z.span, Access::Read);
        let norm = self.norm.as_ref().map(|norm| norm.norm.weight.span);
        norm.into_iter().chain(self.live).for_each(|span| visit(span, Access::Read));
        visit(self.y.span, Access::Write);
    }

    fn in_place(&self) -> Option<(Tensor, Tensor)> {
        Some((self.x, self.y))
    }

    fn detach(&mut self) {
        self.live = None;
    }
}

impl Gated {
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let (x, z) = (Matrix::new(memory, &self.x), Matrix::new(memory, &self.z));
        let y = Matrix::new(memory, &self.y);
        for row in 0..live_rows(memory, self.live, y.rows) {
            let gate = |col: usize| {
                let z = f64::from(z.get(row, self.from as usize + col));
                let share = 1.0 / (1.0 + (-z).exp());
                if self.gate == Gate::Silu { z * share } else { share }
            };
            let mut values: Vec<f64> = (0..x.cols).map(|col| f64::from(x.get(row, col))).collect();
            let multiply = |values: &mut [f64]| {
                values.iter_mut().enumerate().for_each(|(col, value)| *value *= gate(col));
            };
            let Some(GatedNorm { norm, group, after }) = &self.norm else {
                multiply(&mut values);
                values.iter().enumerate().for_each(|(col, value)| y.set(row, col, *value as f32));
                continue;
            };
            if *after {
                multiply(&mut values);
            }
            let weight = Matrix::new(memory, &norm.weight);
            for values in values.chunks_exact_mut(*group as usize) {
                let mean = values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64;
                let scale = 1.0 / (mean + f64::from(norm.eps)).sqrt();
                values.iter_mut().for_each(|v| *v *= scale);
            }
            for (col, value) in values.iter_mut().enumerate() {
                *value *= f64::from(weight.get(0, col % weight.cols));
            }
            if !after {
                multiply(&mut values);
            }
            values.iter().enumerate().for_each(|(col, value)| y.set(row, col, *value as f32));
        }
    }
}
