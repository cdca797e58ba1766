//! Checked access to the tensors that a weight is made of.

use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::dtype::DType;
use crate::quant::dequantise;
use crate::{Error, Result};

/// The types that scales are stored in.
pub(super) const SCALES: &[DType] = &[DType::F32, DType::F16, DType::BF16];

/// Bytes read at once from a tensor of which some columns are needed.
const STRIP_BYTES: usize = 1 << 20;
/// A strip is read whole, unneeded columns with it, when this share or more of it is needed: fewer and longer reads.
const NEEDED_SHARE: usize = 4;

/// The tensor, which the format must have.
pub(super) fn tensor<'a>(checkpoint: &'a Checkpoint, name: &str) -> Result<&'a TensorInfo> {
    checkpoint.get(name).ok_or_else(|| Error::missing(checkpoint.path(), format!("tensor {name}")))
}

/// The tensor if it is there, of one of these types.
pub(super) fn typed<'a>(
    checkpoint: &'a Checkpoint,
    name: &str,
    dtypes: &[DType],
) -> Result<&'a TensorInfo> {
    let info = tensor(checkpoint, name)?;
    if dtypes.contains(&info.dtype) {
        return Ok(info);
    }
    let allowed: Vec<_> = dtypes.iter().map(|dtype| dtype.name()).collect();
    Err(checkpoint.invalid(name, "dtype", info.dtype, allowed.join(", ")))
}

/// Rows and columns of a tensor of one of these types, neither of them zero.
pub(super) fn matrix(
    checkpoint: &Checkpoint,
    name: &str,
    dtypes: &[DType],
) -> Result<(usize, usize)> {
    let info = typed(checkpoint, name, dtypes)?;
    match info.shape[..] {
        [rows, cols] if rows > 0 && cols > 0 => Ok((rows, cols)),
        _ => Err(checkpoint.invalid(
            name,
            "shape",
            format!("{:?}", info.shape),
            "two dimensions above 0",
        )),
    }
}

/// Checks that a tensor is of one of these types and has this shape, which follows from the tensor `from`.
pub(super) fn expect(
    checkpoint: &Checkpoint,
    name: &str,
    dtypes: &[DType],
    shape: &[usize],
    from: &str,
) -> Result<()> {
    let info = typed(checkpoint, name, dtypes)?;
    if info.shape == shape {
        return Ok(());
    }
    let allowed = format!("{shape:?}, from the shape of {from}");
    Err(checkpoint.invalid(name, "shape", format!("{:?}", info.shape), allowed))
}

/// Those of the module's tensors that exist.
pub(super) fn present(checkpoint: &Checkpoint, module: &str, ends: &[&str]) -> Vec<String> {
    let names = ends.iter().map(|end| format!("{module}.{end}"));
    names.filter(|name| checkpoint.get(name).is_some()).collect()
}

/// `count` elements of a tensor from `start` on, read as `dtype`. The caller has checked the tensor's shape.
pub(super) fn floats(
    checkpoint: &Checkpoint,
    name: &str,
    dtype: DType,
    start: usize,
    count: usize,
) -> Result<Vec<f32>> {
    let size = dtype.block_bytes();
    let mut bytes = vec![0; count * size];
    checkpoint.read_range(name, start * size, &mut bytes)?;
    let mut floats = vec![0.0; count];
    dequantise(dtype, &bytes, &mut floats)
        .map_err(|error| checkpoint.invalid(name, "dtype", error, "a floating-point type"))?;
    Ok(floats)
}

/// All elements of a small tensor of integers.
pub(super) fn integers(checkpoint: &Checkpoint, name: &str) -> Result<Vec<i64>> {
    let info = typed(checkpoint, name, &[DType::I32, DType::I64])?;
    let mut bytes = vec![0; info.bytes];
    checkpoint.read_into(name, &mut bytes)?;
    Ok(match info.dtype {
        DType::I64 => bytes.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
        _ => bytes.as_chunks().0.iter().map(|b| i64::from(i32::from_le_bytes(*b))).collect(),
    })
}

/// Some rows of a matrix in memory, cut to the columns that are needed.
pub(super) struct Strip<'a> {
    /// Which row of the matrix its first is.
    pub(super) first: usize,
    /// How many rows it has.
    pub(super) rows: usize,
    bytes: &'a [u8],
    stride: usize,
    length: usize,
}

impl<'a> Strip<'a> {
    /// The needed bytes of one of its rows.
    pub(super) fn row(&self, row: usize) -> &'a [u8] {
        &self.bytes[row * self.stride..][..self.length]
    }

    /// The word at `column` of one of its rows.
    pub(super) fn word(&self, row: usize, column: usize) -> u32 {
        let at = row * self.stride + 4 * column;
        u32::from_le_bytes([
            self.bytes[at],
            self.bytes[at + 1],
            self.bytes[at + 2],
            self.bytes[at + 3],
        ])
    }
}

/// Calls `each` with strips that together are bytes `start` to `start + length` of every row of a matrix. A matrix of
/// `rows` rows of `stride` bytes; the caller has checked that the tensor is one.
pub(super) fn strips(
    checkpoint: &Checkpoint,
    name: &str,
    [rows, stride]: [usize; 2],
    [start, length]: [usize; 2],
    mut each: impl FnMut(&Strip<'_>),
) -> Result<()> {
    if length == 0 {
        return Ok(());
    }
    let whole = length.saturating_mul(NEEDED_SHARE) >= stride;
    let step = if whole { stride } else { length };
    let most = (STRIP_BYTES / step).clamp(1, rows.max(1));
    let mut buffer = vec![0; (most - 1) * step + length];
    for first in (0..rows).step_by(most) {
        let count = most.min(rows - first);
        let bytes = &mut buffer[..(count - 1) * step + length];
        if whole {
            checkpoint.read_range(name, first * stride + start, bytes)?;
        } else {
            for (row, bytes) in bytes.chunks_mut(length).enumerate() {
                checkpoint.read_range(name, (first + row) * stride + start, bytes)?;
            }
        }
        each(&Strip { first, rows: count, bytes, stride: step, length });
    }
    Ok(())
}
