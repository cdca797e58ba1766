//! `out[t] = table[i]`, converted to `out`'s dtype, where i is the token's id, a part of it or the token's position
//! ([`Lookup`]). An i past the table reads row 0, so that a wrong token
//! never reads out of bounds. With `given`, an id of [`GIVEN_ROW`] + r reads row r of it instead.

mod cuda;

use super::{
    Access, Bindable, Contract, Named, SpanVisitor, StepSize, Traffic, require, require_fit,
    require_float, require_indices, require_weights,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::view::{Matrix, Words};
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::step::GIVEN_ROW;
use crate::{Result, Tensor};
use serde::{Deserialize, Serialize};

mod fast;

/// What selects a token's row of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lookup {
    /// Its id.
    #[default]
    Token,
    /// Its id modulo this number.
    Low(u32),
    /// Its id divided by this number.
    High(u32),
    /// Its position.
    Position,
}

impl Lookup {
    fn is_token(&self) -> bool {
        *self == Lookup::Token
    }

    /// The row of the table for an id or position.
    fn row(self, id: u32) -> u32 {
        match self {
            Lookup::Token | Lookup::Position => id,
            Lookup::Low(by) => id % by,
            Lookup::High(by) => id / by,
        }
    }
}

/// Gathers rows of an embedding table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Embed<O: Operands = Bound> {
    /// What selects rows.
    #[serde(default, skip_serializing_if = "Lookup::is_token")]
    pub by: Lookup,
    /// Token ids or positions, u32, one per row of `out`.
    #[serde(skip_serializing_if = "unset")]
    pub ids: O::Late<Tensor>,
    /// vocab × width; any dtype.
    pub table: O::Weight,
    /// Rows that the host provides instead of rows of the table; n × width.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given: Option<O::Input>,
    /// tokens × width.
    pub out: O::Value,
}

impl<O: Operands> Bindable for Embed<O> {
    type O = O;
    type Bound = Embed;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Weight(&mut self.table));
        visit(Operand::Value(&mut self.out, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Embed, B::Error> {
        let (table, out) = (to.weight(self.table)?, to.value(self.out)?);
        let given = self.given.map(|given| to.input(given)).transpose()?;
        let (by, state) = (self.by, to.state());
        let ids = if by == Lookup::Position { state.position } else { state.token };
        Ok(Embed { by, ids, table, given, out })
    }
}

impl Contract for Embed {
    fn check(&self) -> Result<()> {
        require_weights(&self.table, Self::NAME, "table")?;
        require_fit(&self.out, Self::NAME, "out")?;
        require_float(&self.out, Self::NAME, "out")?;
        require_indices(&self.ids, self.out.rows, Self::NAME, "ids")?;
        require(!matches!(self.by, Lookup::Low(0) | Lookup::High(0)), Self::NAME, || {
            "ids divided by 0".into()
        })?;
        require(self.given.is_none() || self.by.is_token(), Self::NAME, || {
            "given rows are selected by whole ids".into()
        })?;
        if let Some(given) = &self.given {
            require_fit(given, Self::NAME, "given")?;
            require(
                given.dtype == self.out.dtype && given.cols == self.out.cols,
                Self::NAME,
                || format!("given rows are {given}, out is {}", self.out),
            )?;
        }
        require(self.table.cols == self.out.cols, Self::NAME, || {
            format!("table has {} columns, out has {}", self.table.cols, self.out.cols)
        })
    }

    fn describe(&self) -> String {
        let by = match self.by {
            Lookup::Token => String::new(),
            Lookup::Low(by) => format!(" by id mod {by}"),
            Lookup::High(by) => format!(" by id / {by}"),
            Lookup::Position => " by position".into(),
        };
        format!("embed {} from {}{by}", self.out, self.table)
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
        if let Some(given) = &self.given {
            visit(given.span, Access::Read);
        }
        visit(self.out.span, Access::Write);
    }
}

impl Embed {
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let ids = Words::new(memory, &self.ids);
        let (table, out) = (Matrix::new(memory, &self.table), Matrix::new(memory, &self.out));
        let given = self.given.map(|given| Matrix::new(memory, &given));
        let mut values = vec![0.0; table.cols];
        for token in 0..out.rows {
            read_row(&table, given.as_ref(), self.by.row(ids.get(token)), &mut values);
            for (col, value) in values.iter().enumerate() {
                out.set(token, col, *value);
            }
        }
    }
}

/// The row that an id selects.
fn read_row(table: &Matrix, given: Option<&Matrix>, id: u32, values: &mut [f32]) {
    let row = id.wrapping_sub(GIVEN_ROW) as usize;
    match given {
        Some(given) if row < given.rows => given.read_row(row, values),
        _ if (id as usize) < table.rows => table.read_row(id as usize, values),
        _ => table.read_row(0, values),
    }
}
