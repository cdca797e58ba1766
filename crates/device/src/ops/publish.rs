//! Ends a step of a program that samples nothing. For every live row: its vector is written to the host's memory
//! ([`StepState::vectors`] of launch n mod 2) as f32, and seat_len += q_len. Then the ring entry of the launch is written:
//! rows, each without a token; its launch number after everything else, so that a host that sees n sees the vectors.

use super::sample::row::StepEnd;
use super::{
    Access, Bindable, Contract, Named, SpanVisitor, StepSize, Traffic, require, require_fit,
    require_float,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Serial, Step};
use crate::cpu::view::{Matrix, Words};
use crate::cuda::launch::{Lowered, Target};
use crate::cuda::lower::{Kernel, code};
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::ops::prologue::cuda::layout;
use crate::{Region, Result, Span, StepState};
use serde::{Deserialize, Serialize};

/// Ends a step: gives the host a vector of each row, advances the seats, publishes to the ring.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Publish<O: Operands = Bound> {
    /// rows × width.
    pub vectors: O::Value,
    /// Flags, and the state that is advanced.
    #[serde(skip_serializing_if = "unset")]
    pub state: O::Late<StepState>,
}

impl<O: Operands> Bindable for Publish<O> {
    type O = O;
    type Bound = Publish;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.vectors, Access::Read));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Publish, B::Error> {
        Ok(Publish { vectors: to.value(self.vectors)?, state: to.state() })
    }
}

impl Contract for Publish {
    fn check(&self) -> Result<()> {
        self.state.check()?;
        require_fit(&self.vectors, Self::NAME, "vectors")?;
        require_float(&self.vectors, Self::NAME, "vectors")?;
        require(self.vectors.rows <= self.state.limits.rows, Self::NAME, || {
            format!("{} rows; the tables have {}", self.vectors.rows, self.state.limits.rows)
        })?;
        let bytes = u64::from(self.vectors.rows) * u64::from(self.vectors.cols) * 4;
        let fits = self.state.vectors.is_some_and(|places| {
            let right = |span: &Span| {
                span.region == Region::HostMapped
                    && span.len >= bytes
                    && span.offset.is_multiple_of(4)
            };
            places.iter().all(right)
        });
        require(fits, Self::NAME, || format!("no place for vectors of {bytes} bytes"))
    }

    fn describe(&self) -> String {
        format!("publish {}", self.vectors)
    }

    fn traffic(&self) -> Traffic {
        Traffic { weights: 0, values: 2 * self.vectors.bytes() }
    }

    fn step_size(&self) -> StepSize {
        StepSize::rows(self.vectors.rows)
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        let s = &self.state;
        visit(self.vectors.span, Access::Read);
        visit(s.counts.span, Access::Update);
        for table in [&s.params, &s.row_seat, &s.row_flags, &s.row_q_len] {
            visit(table.span, Access::Read);
        }
        for bank in s.mail {
            visit(bank, Access::Read);
        }
        visit(s.seat_len.span, Access::Update);
        for place in s.vectors.into_iter().flatten() {
            visit(place, Access::Write);
        }
        visit(s.ring, Access::Write);
    }
}

impl Publish {
    pub(crate) fn prepare(&self, memory: &CpuMemory, _lowering: &Lowering) -> Box<dyn Step> {
        Serial::boxed(self.clone(), memory, Publish::reference)
    }

    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let end = StepEnd::new(memory, &self.state, self.vectors.rows, 1);
        let vectors = Matrix::new(memory, &self.vectors);
        let places = self.state.vectors.expect("checked with the op");
        let to = Words::of_span(memory, places[(end.launch() % 2) as usize]);
        for r in 0..end.live {
            for col in 0..vectors.cols {
                to.set(r * vectors.cols + col, vectors.get(r, col).to_bits());
            }
            end.pass(r);
        }
        end.publish();
    }

    /// `kernels/publish.cu`: a block per row for the vectors, then one block for the rest.
    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let s = &self.state;
        let places = s.vectors.expect("checked with the op");
        let vectors = Kernel::new(target, "publish", "publish_vectors")
            .defines(&layout(&s.limits))
            .define("XT", code(self.vectors.dtype, Self::NAME)?)
            .grid(self.vectors.rows, 1, 1)
            .tensors(&[&self.vectors, &s.counts])
            .spans(&places)
            .ints(&[self.vectors.cols, self.vectors.stride]);
        let rest = Kernel::new(target, "publish", "publish")
            .defines(&layout(&s.limits))
            .define("XT", code(self.vectors.dtype, Self::NAME)?)
            .grid(1, 1, 1)
            .tensors(&[&s.counts, &s.seat_len, &s.row_seat, &s.row_q_len])
            .spans(&[s.ring]);
        Ok(vec![vectors.lowered(), rest.lowered()])
    }
}
