//! A matrix in a span, the operand of ops.

use crate::{DType, Span};
use serde::{Deserialize, Serialize};
use std::fmt;

/// `rows × cols` elements, row-major; consecutive rows are `stride` elements apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tensor {
    /// Where it lies.
    pub span: Span,
    /// Element type.
    pub dtype: DType,
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
    /// Elements from one row to the next; at least `cols`.
    pub stride: u32,
}

impl Tensor {
    /// A dense matrix that fills the front of `span`.
    ///
    /// # Panics
    /// If the span is too short, which is a bug in layout code.
    #[track_caller]
    pub fn dense(span: Span, dtype: DType, rows: u32, cols: u32) -> Tensor {
        let need = dtype.matrix_bytes(rows as usize, cols as usize) as u64;
        assert!(
            need <= span.len,
            "{rows}×{cols} {dtype:?} needs {need} bytes, span has {}",
            span.len
        );
        Tensor { span, dtype, rows, cols, stride: cols }
    }

    /// A vector of `len` elements.
    #[track_caller]
    pub fn vector(span: Span, dtype: DType, len: u32) -> Tensor {
        Tensor::dense(span, dtype, 1, len)
    }

    /// Columns `from..from + cols` of every row: a view with the same stride.
    #[track_caller]
    pub fn columns(self, from: u32, cols: u32) -> Tensor {
        let inside = from.checked_add(cols).is_some_and(|end| end <= self.cols);
        assert!(self.dtype.is_plain() && inside);
        let skip = self.dtype.bytes(from as usize) as u64;
        let span = self.span.part(skip, self.span.len - skip);
        Tensor { span, cols, ..self }
    }

    /// The first `rows` rows.
    #[track_caller]
    pub fn top(self, rows: u32) -> Tensor {
        assert!(rows <= self.rows);
        Tensor { rows, ..self }
    }

    /// The rows from `from` on.
    #[track_caller]
    pub fn below(&self, from: u32) -> Tensor {
        assert!(self.dtype.is_plain() && from <= self.rows);
        let skip = self.dtype.bytes(self.stride as usize * from as usize) as u64;
        let span = self.span.part(skip, self.span.len - skip);
        Tensor { span, rows: self.rows - from, ..*self }
    }

    /// Bytes that are read when every element is read once.
    pub fn bytes(&self) -> u64 {
        self.dtype.matrix_bytes(self.rows as usize, self.cols as usize) as u64
    }
}

/// Shape and element type: `8×4096 bf16`.
impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}×{} {}", self.rows, self.cols, format!("{:?}", self.dtype).to_lowercase())
    }
}
