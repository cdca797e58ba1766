//! A weight matrix for each head: of every row, head h of `x` times matrix h of `w`. With `turned` the matrices are
//! stored with a row for each input, so that one stored matrix can be multiplied from either side: latent attention
//! takes queries into the space of latents with the rows that make keys of latents.
//!
//! `y[h] = x[h][..k] · w[h]ᵀ` (turned: `x[h][..k] · w[h]`), sums in f32, rounded once. Elements of a head of `x` behind
//! the first k are copied behind the head's results. The order of a sum does not depend on the number of rows. Rows past
//! the `live` count may be left as they are.

mod cuda;
mod fast;

use super::{
    Access, Bindable, Contract, Named, SpanVisitor, StepSize, Traffic, live_rows, require,
    require_live, require_matrices, visit_live,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::view::Matrix;
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::{Result, Span};
use serde::{Deserialize, Serialize};

/// Multiplies each head by a matrix of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct HeadLinear<O: Operands = Bound> {
    /// rows × heads·`each`; columns behind the heads are not read.
    pub x: O::Value,
    /// (heads·n) × k, or (heads·k) × n if `turned`: floats.
    pub w: O::Weight,
    /// Heads.
    pub heads: u32,
    /// Elements of a head of `x`: k or more.
    pub each: u32,
    /// A row of `w` belongs to an element of `x`, not of `y`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub turned: bool,
    /// rows × heads·(n + each − k).
    pub y: O::Value,
    /// Rows past this device-side count need not be computed.
    #[serde(skip_serializing_if = "unset")]
    pub live: O::Late<Option<Span>>,
}

impl<O: Operands> Bindable for HeadLinear<O> {
    type O = O;
    type Bound = HeadLinear;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.x, Access::Read));
        visit(Operand::Weight(&mut self.w));
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<HeadLinear, B::Error> {
        let HeadLinear { heads, each, turned, .. } = *self;
        let (x, w, y) = (to.value(self.x)?, to.weight(self.w)?, to.value(self.y)?);
        Ok(HeadLinear { x, w, heads, each, turned, y, live: to.live(self.y) })
    }
}

impl Contract for HeadLinear {
    fn check(&self) -> Result<()> {
        require_matrices(&[(&self.x, "x"), (&self.w, "w"), (&self.y, "y")], Self::NAME)?;
        let HeadLinear { x, w, heads, each, y, .. } = self;
        require(*heads > 0 && w.rows.is_multiple_of(*heads), Self::NAME, || {
            format!("{} rows of weights for {heads} heads", w.rows)
        })?;
        let (k, n) = self.sizes();
        let read = u64::from(*heads) * u64::from(*each);
        require(*each >= k && read <= u64::from(x.cols), Self::NAME, || {
            format!("{heads} heads of {each} for matrices of {k} in {} columns", x.cols)
        })?;
        let made = u64::from(*heads) * (u64::from(n) + u64::from(each - k));
        require(made == u64::from(y.cols) && x.rows == y.rows, Self::NAME, || {
            format!("y is {y}, not {}×{made}", x.rows)
        })?;
        // Kernels load several elements of a head at once.
        let wide = [k, n, *each].iter().all(|elements| elements.is_multiple_of(8));
        require(wide, Self::NAME, || {
            format!("heads of {each} to {n} by {k} are not whole eights")
        })?;
        require_live(self.live, Self::NAME)
    }

    fn describe(&self) -> String {
        let (k, n) = self.sizes();
        let (rest, turned) = (self.each - k, if self.turned { " turned" } else { "" });
        let rest = if rest > 0 { format!(", {rest} copied") } else { String::new() };
        format!("head_linear {} rows, {} heads {k}→{n}{turned}{rest}", self.x.rows, self.heads)
    }

    fn traffic(&self) -> Traffic {
        let read = self.x.dtype.bytes((self.x.rows * self.heads * self.each) as usize) as u64;
        Traffic { weights: self.w.bytes(), values: read + self.y.bytes() }
    }

    fn step_size(&self) -> StepSize {
        StepSize::ANY
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit_live(&[&self.x, &self.w], self.live, &self.y, visit);
    }

    fn detach(&mut self) {
        self.live = None;
    }
}

impl HeadLinear {
    /// Inputs and outputs of a head's matrix.
    fn sizes(&self) -> (u32, u32) {
        let (rows, cols) = (self.w.rows / self.heads, self.w.cols);
        if self.turned { (rows, cols) } else { (cols, rows) }
    }

    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let (x, w) = (Matrix::new(memory, &self.x), Matrix::new(memory, &self.w));
        let y = Matrix::new(memory, &self.y);
        let (k, n) = self.sizes();
        let (k, n, each) = (k as usize, n as usize, self.each as usize);
        let made = n + each - k;
        for row in 0..live_rows(memory, self.live, y.rows) {
            for head in 0..self.heads as usize {
                let input = |i: usize| x.get(row, head * each + i);
                for j in 0..n {
                    let weight = |i: usize| match self.turned {
                        true => w.get(head * k + i, j),
                        false => w.get(head * n + j, i),
                    };
                    let terms = (0..k).map(|i| f64::from(input(i)) * f64::from(weight(i)));
                    y.set(row, head * made + j, terms.sum::<f64>() as f32);
                }
                (k..each).for_each(|i| y.set(row, head * made + n + i - k, input(i)));
            }
        }
    }
}
