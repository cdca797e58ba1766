//! `y[i] = act(x[2i]) · x[2i + 1]`: columns of `x` alternate gate and up. In f32, rounded once, when storing. Rows past
//! the `live` count may be left as they are.

mod fast;

use super::{
    Access, Bindable, Contract, Named, SpanVisitor, StepSize, Traffic, live_rows, require,
    require_live, require_matrices, visit_live,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::view::Matrix;
use crate::cuda::launch::{Lowered, Target};
use crate::cuda::lower::{Kernel, aligned, code};
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::{Result, Span};
use serde::{Deserialize, Serialize};
use std::f64::consts::FRAC_2_PI;

pub(crate) use fast::Gate;

/// A function of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu,
    /// `x/2 · (1 + tanh(√(2/π) · (x + 0.044715·x³)))`.
    GeluTanh,
    /// `x · Φ(x)`, where Φ is the normal distribution's.
    Gelu,
    /// The hyperbolic tangent.
    Tanh,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)²`.
    ReluSquared,
}

impl Activation {
    /// All of them.
    pub const ALL: [Activation; 6] = [
        Activation::Silu,
        Activation::GeluTanh,
        Activation::Gelu,
        Activation::Tanh,
        Activation::Relu,
        Activation::ReluSquared,
    ];

    /// Its name in listings.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Activation::Silu => "silu",
            Activation::GeluTanh => "gelu",
            Activation::Gelu => "exact gelu",
            Activation::Tanh => "tanh",
            Activation::Relu => "relu",
            Activation::ReluSquared => "relu²",
        }
    }

    /// Its number in the macros ACT of `gate_mul.cu` and `activate.cu` and EPILOGUE of the kernels of linears.
    pub(crate) const fn code(self) -> u32 {
        match self {
            Activation::Silu => 2,
            Activation::GeluTanh => 4,
            Activation::Gelu => 5,
            Activation::Tanh => 6,
            Activation::Relu => 7,
            Activation::ReluSquared => 8,
        }
    }

    /// Whether the kernels of linears and experts can apply it to their sums.
    pub(crate) const fn is_epilogue(self) -> bool {
        matches!(self, Activation::Silu | Activation::GeluTanh)
    }

    /// The reference: in f64, rounded once.
    pub(crate) fn apply(self, gate: f32) -> f64 {
        let x = f64::from(gate);
        match self {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::GeluTanh => {
                0.5 * x * (1.0 + (FRAC_2_PI.sqrt() * (x + 0.044715 * x * x * x)).tanh())
            }
            Activation::Gelu => x * share_below(x),
            Activation::Tanh => x.tanh(),
            Activation::Relu => x.max(0.0),
            Activation::ReluSquared => x.max(0.0) * x.max(0.0),
        }
    }
}

/// The share of a normal distribution below `x`: a series near 0, a continued fraction far from it.
fn share_below(x: f64) -> f64 {
    let size = x.abs();
    let density = (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
    if size < 3.0 {
        let (mut term, mut sum) = (x, x);
        for n in 1..80 {
            term *= x * x / f64::from(2 * n + 1);
            sum += term;
        }
        return 0.5 + density * sum;
    }
    let tail = density / (1..=80).rev().fold(size, |below, n| size + f64::from(n) / below);
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// Multiplies by an activated gate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct GateMul<O: Operands = Bound> {
    /// rows × 2n: columns alternate gate and up.
    pub x: O::Value,
    /// Applied to the gate.
    pub act: Activation,
    /// rows × n.
    pub y: O::Value,
    /// Rows past this device-side count need not be computed.
    #[serde(skip_serializing_if = "unset")]
    pub live: O::Late<Option<Span>>,
}

impl<O: Operands> Bindable for GateMul<O> {
    type O = O;
    type Bound = GateMul;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.x, Access::Read));
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<GateMul, B::Error> {
        let (x, y) = (to.value(self.x)?, to.value(self.y)?);
        Ok(GateMul { x, act: self.act, y, live: to.live(self.y) })
    }

    fn epilogues(&self) -> Vec<(O::Value, GateMul<O>)> {
        self.act.is_epilogue().then(|| (self.x, self.clone())).into_iter().collect()
    }
}

impl Contract for GateMul {
    fn check(&self) -> Result<()> {
        require_matrices(&[(&self.x, "x"), (&self.y, "y")], Self::NAME)?;
        let pairs = u64::from(self.x.cols) == 2 * u64::from(self.y.cols);
        require(pairs && self.x.rows == self.y.rows, Self::NAME, || {
            let (x, y) = (&self.x, &self.y);
            format!("y is {}×{}, x is {}×{}: not pairs", y.rows, y.cols, x.rows, x.cols)
        })?;
        require_live(self.live, Self::NAME)
    }

    fn describe(&self) -> String {
        format!("{}·mul {}", self.act.name(), self.x)
    }

    fn traffic(&self) -> Traffic {
        Traffic { weights: 0, values: self.x.bytes() + self.y.bytes() }
    }

    fn step_size(&self) -> StepSize {
        StepSize::ANY
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit_live(&[&self.x], self.live, &self.y, visit);
    }

    fn detach(&mut self) {
        self.live = None;
    }
}

impl GateMul {
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let (x, y) = (Matrix::new(memory, &self.x), Matrix::new(memory, &self.y));
        for row in 0..live_rows(memory, self.live, y.rows) {
            for col in 0..y.cols {
                let (gate, up) = (x.get(row, 2 * col), x.get(row, 2 * col + 1));
                y.set(row, col, (self.act.apply(gate) * f64::from(up)) as f32);
            }
        }
    }

    /// `kernels/gate_mul.cu`: four results per thread.
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let kernel = Kernel::new(target, "gate_mul", "gate_mul")
            .define("XT", code(self.x.dtype, Self::NAME)?)
            .define("YT", code(self.y.dtype, Self::NAME)?)
            .define("ALIGNED", u32::from(aligned(&self.x)))
            .define("ACT", self.act.code())
            .grid(self.y.cols.div_ceil(1024), self.y.rows, 1)
            .tensors(&[&self.x, &self.y])
            .ints(&[self.y.cols, self.x.stride, self.y.stride])
            .optional(self.live);
        Ok(vec![kernel.lowered()])
    }
}
