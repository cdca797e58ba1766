//! `out[t] = table[ids[t]]`, converted to `out`'s dtype. An id past the table reads row 0: a wrong
//! token must not become a wild read.

mod cuda;

use super::{
    Access, Contract, SpanVisitor, StepSize, Traffic, require, require_fit, require_float,
    require_indices, require_weights,
};
use crate::Result;
use crate::cpu::memory::CpuMemory;
use crate::cpu::view::{Matrix, Words};
use crate::op::Embed;

mod fast;

impl Contract for Embed {
    const NAME: &'static str = "embed";

    fn check(&self) -> Result<()> {
        require_weights(&self.table, Self::NAME, "table")?;
        require_fit(&self.out, Self::NAME, "out")?;
        require_float(&self.out, Self::NAME, "out")?;
        require_indices(&self.ids, self.out.rows, Self::NAME, "ids")?;
        require(self.table.cols == self.out.cols, Self::NAME, || {
            format!("table has {} columns, out has {}", self.table.cols, self.out.cols)
        })
    }

    fn describe(&self) -> String {
        format!("embed {} from {}", self.out, self.table)
    }

    /// One row of the table for each token.
    fn traffic(&self) -> Traffic {
        let row = self.table.dtype.bytes(self.table.cols as usize) as u64;
        Traffic { weights: row * u64::from(self.out.rows), values: self.out.bytes() }
    }

    fn step_size(&self) -> StepSize {
        StepSize { rows: None, tokens: Some(self.out.rows) }
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.ids.span, Access::Read);
        visit(self.table.span, Access::Read);
        visit(self.out.span, Access::Write);
    }
}

impl Embed {
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let ids = Words::new(memory, &self.ids);
        let (table, out) = (Matrix::new(memory, &self.table), Matrix::new(memory, &self.out));
        let mut values = vec![0.0; table.cols];
        for token in 0..out.rows {
            let id = ids.get(token) as usize;
            table.read_row(if id < table.rows { id } else { 0 }, &mut values);
            for (col, value) in values.iter().enumerate() {
                out.set(token, col, *value);
            }
        }
    }
}
