//! What the formats of four-bit weights share: sizes of groups, the order of columns, transposed scales.

use super::tensors::{self, integers};
use super::{Scheme, Settings};
use crate::Result;
use crate::checkpoint::Checkpoint;
use crate::dtype::DType;
use std::ops::Range;

/// Groups that there are kernels for; besides, one group for each row.
const GROUPS: [i64; 3] = [32, 64, 128];
pub(super) const ALLOWED_GROUPS: &str = "32, 64, 128, or -1 for one group per row";

/// Values in one word.
pub(super) const VALUES: usize = 8;

/// How many columns have a scale together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Group {
    Columns(usize),
    Row,
}

impl Group {
    /// The group of the field `group_size`, which must be there.
    pub(super) fn read(settings: &Settings<'_>) -> Result<Self> {
        match settings.int("group_size")? {
            Some(-1) => Ok(Self::Row),
            Some(columns) if GROUPS.contains(&columns) => Ok(Self::Columns(columns as usize)),
            _ => Err(settings.unsupported("group_size", ALLOWED_GROUPS)),
        }
    }

    /// Its columns in a weight of `cols` columns, which they must divide; `tensor` is named in the error.
    pub(super) fn columns(
        self,
        checkpoint: &Checkpoint,
        tensor: &str,
        cols: usize,
    ) -> Result<usize> {
        match self {
            Self::Row => Ok(cols),
            Self::Columns(columns) if cols.is_multiple_of(columns) => Ok(columns),
            Self::Columns(columns) => {
                let allowed = format!("a multiple of the group size {columns}");
                Err(checkpoint.invalid(tensor, "number of columns", cols, allowed))
            }
        }
    }
}

/// The scheme of a weight with groups of `group` columns.
pub(super) fn scheme(group: usize, order: Option<&Vec<u32>>) -> Scheme {
    Scheme::Int4 { group, ordered: order.is_some() }
}

/// The group of each of `cols` columns, from the tensor `name`; `None` when columns belong to groups in runs of
/// `group`. Every group has `group` columns. A tensor of -1 alone was never filled in; it says nothing when `unset` allows that.
pub(super) fn order(
    checkpoint: &Checkpoint,
    name: &str,
    cols: usize,
    group: usize,
    unset: bool,
) -> Result<Option<Vec<u32>>> {
    let info = tensors::tensor(checkpoint, name)?;
    if info.shape != [cols] {
        let found = format!("{:?}", info.shape);
        return Err(checkpoint.invalid(name, "shape", found, format!("[{cols}], one per column")));
    }
    let groups = integers(checkpoint, name)?;
    if unset && groups.iter().all(|&g| g == -1) {
        return Ok(None);
    }
    let count = cols / group;
    if let Some(column) = groups.iter().position(|&g| !(0..count as i64).contains(&g)) {
        let found = format!("{} at {column}", groups[column]);
        return Err(checkpoint.invalid(name, "element", found, format!("0 to {}", count - 1)));
    }
    let mut sizes = vec![0usize; count];
    groups.iter().for_each(|&g| sizes[g as usize] += 1);
    if let Some(g) = sizes.iter().position(|&size| size != group) {
        let found = format!("group {g} {} times", sizes[g]);
        return Err(checkpoint.invalid(name, "contents", found, format!("each {group} times")));
    }
    if groups.iter().enumerate().all(|(column, &g)| g as usize == column / group) {
        return Ok(None);
    }
    Ok(Some(groups.into_iter().map(|g| g as u32).collect()))
}

/// Scales of some rows, rows × groups, from a tensor that has them as groups × all rows.
pub(super) fn transposed_scales(
    checkpoint: &Checkpoint,
    name: &str,
    [groups, all_rows]: [usize; 2],
    rows: &Range<usize>,
) -> Result<Vec<f32>> {
    let dtype = tensors::typed(checkpoint, name, tensors::SCALES)?.dtype;
    let size = dtype.block_bytes();
    let mut scales = vec![0.0; rows.len() * groups];
    let mut line = vec![0.0; rows.len()];
    let needed = [rows.start * size, rows.len() * size];
    tensors::strips(checkpoint, name, [groups, all_rows * size], needed, |strip| {
        for row in 0..strip.rows {
            // The lengths agree and the type is one of floats.
            let _ = crate::quant::dequantise(dtype, strip.row(row), &mut line);
            let group = strip.first + row;
            for (scale, out) in line.iter().zip(scales[group..].iter_mut().step_by(groups)) {
                *out = *scale;
            }
        }
    })?;
    Ok(scales)
}

/// Zeros of some rows, rows × groups, from words groups × ⌈all rows / 8⌉. `of` takes one of eight out of a word.
pub(super) fn transposed_zeros(
    checkpoint: &Checkpoint,
    name: &str,
    [groups, all_rows]: [usize; 2],
    rows: &Range<usize>,
    of: impl Fn(u32, usize) -> u8,
) -> Result<Vec<u8>> {
    let mut zeros = vec![0; rows.len() * groups];
    let words = words(rows);
    let needed = [4 * words.start, 4 * words.len()];
    let shape = [groups, 4 * all_rows.div_ceil(VALUES)];
    tensors::strips(checkpoint, name, shape, needed, |strip| {
        for group in 0..strip.rows {
            for (out, row) in rows.clone().enumerate() {
                let word = strip.word(group, row / VALUES - words.start);
                zeros[out * groups + strip.first + group] = of(word, row % VALUES);
            }
        }
    })?;
    Ok(zeros)
}

/// The words that hold these rows, eight to a word.
pub(super) fn words(rows: &Range<usize>) -> Range<usize> {
    rows.start / VALUES..rows.end.div_ceil(VALUES).max(rows.start / VALUES)
}

/// Value `i` of a word, the lowest bits first.
pub(super) fn value(word: u32, i: usize) -> u8 {
    (word >> (4 * i)) as u8 & 15
}

/// The type of packed words.
pub(super) const WORDS: &[DType] = &[DType::I32];

/// Whether a module of AWQ or GPTQ is packed: it has `qweight`, and then no plain weight.
pub(super) fn is_packed(checkpoint: &Checkpoint, module: &str) -> Result<bool> {
    let plain = format!("{module}.weight");
    match (checkpoint.get(&format!("{module}.qweight")), checkpoint.get(&plain)) {
        (None, _) => Ok(false),
        (Some(_), None) => Ok(true),
        (Some(_), Some(_)) => {
            Err(checkpoint.invalid(&plain, "presence", "also a qweight", "one of them"))
        }
    }
}
