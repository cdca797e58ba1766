//! `y[i] = silu(x[2i]) · x[2i + 1]`: columns of `x` alternate gate and up. In f32, rounded once, when storing. Rows past
//! the `live` count may be left as they are.

pub(crate) mod cuda;

use super::{
    Access, Bindable, Contract, SpanVisitor, StepSize, Traffic, live_rows, require, require_fit,
    require_float, require_word,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Serial, Step};
use crate::cpu::view::Matrix;
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::{Result, Span};
use serde::{Deserialize, Serialize};

/// See the top of this file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct SiluMul<O: Operands = Bound> {
    /// rows × 2n: columns alternate gate and up.
    pub x: O::Value,
    /// rows × n.
    pub y: O::Value,
    /// Rows past this device-side count need not be computed.
    #[serde(skip_serializing_if = "unset")]
    pub live: O::Late<Option<Span>>,
}

impl<O: Operands> Bindable for SiluMul<O> {
    type O = O;
    type Bound = SiluMul;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.x, Access::Read));
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<SiluMul, B::Error> {
        let (x, y) = (to.value(self.x)?, to.value(self.y)?);
        Ok(SiluMul { x, y, live: to.live(self.y) })
    }
}

impl Contract for SiluMul {
    fn check(&self) -> Result<()> {
        for (tensor, what) in [(&self.x, "x"), (&self.y, "y")] {
            require_fit(tensor, Self::NAME, what)?;
            require_float(tensor, Self::NAME, what)?;
        }
        let pairs = u64::from(self.x.cols) == 2 * u64::from(self.y.cols);
        require(pairs && self.x.rows == self.y.rows, Self::NAME, || {
            let (x, y) = (&self.x, &self.y);
            format!("y is {}×{}, x is {}×{}: not pairs", y.rows, y.cols, x.rows, x.cols)
        })?;
        self.live.map_or(Ok(()), |live| require_word(live, Self::NAME, "the live count"))
    }

    fn describe(&self) -> String {
        format!("silu_mul {}", self.x)
    }

    fn traffic(&self) -> Traffic {
        Traffic { weights: 0, values: self.x.bytes() + self.y.bytes() }
    }

    fn step_size(&self) -> StepSize {
        StepSize::ANY
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.x.span, Access::Read);
        if let Some(live) = self.live {
            visit(live, Access::Read);
        }
        visit(self.y.span, Access::Write);
    }

    fn detach(&mut self) {
        self.live = None;
    }
}

impl SiluMul {
    pub(crate) fn prepare(&self, memory: &CpuMemory, _lowering: &Lowering) -> Box<dyn Step> {
        Serial::boxed(self.clone(), memory, SiluMul::reference)
    }

    /// Both the reference and what the CPU runs: linears activate on their own.
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let (x, y) = (Matrix::new(memory, &self.x), Matrix::new(memory, &self.y));
        for row in 0..live_rows(memory, self.live, y.rows) {
            for col in 0..y.cols {
                let (gate, up) = (x.get(row, 2 * col), x.get(row, 2 * col + 1));
                y.set(row, col, gate / (1.0 + (-gate).exp()) * up);
            }
        }
    }
}
