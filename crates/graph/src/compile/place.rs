//! Offsets in the workspace. A value lives from the stage that makes it to the last that reads it,
//! over the whole plan: a break in between changes nothing, so what a break reads cannot be given
//! away before it ran. Values whose lives do not meet share bytes. What a gather reads, every token's
//! state of which the end of the model sees only some, lives to the end: who wants to know what the
//! model thought of a prompt takes it from there after the step. So does what attention reads whose result is only
//! gathered: it left out what nobody had asked for yet.
//!
//! Buffers are placed largest first at the lowest offset that is free for their whole life, which is
//! within a few percent of the best known packing for such plans, and stable.

use super::CompileError;
use super::stage::{Fold, Kind, Stage, only_gathered, readers};
use crate::ShapeKey;
use crate::program::{Program, ValueId};
use device::ALIGN;

/// A part of the workspace and when it is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// The values it holds, one after the other (in-place ops hand it on).
    pub values: Vec<ValueId>,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The stage that writes it first.
    pub first: usize,
    /// The last stage that touches it.
    pub last: usize,
}

/// Where everything lies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// In order of first use.
    pub buffers: Vec<Buffer>,
    /// Bytes in all.
    pub bytes: u64,
}

impl Placement {
    /// The buffer of a value, if the value still exists after fusing.
    pub fn of(&self, value: ValueId) -> Option<&Buffer> {
        self.buffers.iter().find(|buffer| buffer.values.contains(&value))
    }
}

/// See the module's words.
pub fn place(
    program: &Program,
    key: &ShapeKey,
    stages: &[Stage],
) -> Result<Placement, CompileError> {
    let mut buffers = buffers(program, key, stages)?;
    pack(&mut buffers);
    let bytes = buffers.iter().map(|b| (b.offset + b.len).next_multiple_of(ALIGN)).max();
    buffers.sort_by_key(|buffer| (buffer.first, buffer.offset));
    Ok(Placement { buffers, bytes: bytes.unwrap_or(0) })
}

/// One buffer per value, or per chain of values that are rewritten in place.
fn buffers(
    program: &Program,
    key: &ShapeKey,
    stages: &[Stage],
) -> Result<Vec<Buffer>, CompileError> {
    let mut buffers: Vec<Buffer> = Vec::new();
    for (index, stage) in stages.iter().enumerate() {
        let Some(out) = stage.out() else { continue };
        let readers = readers(stages, out);
        let kept = readers.iter().any(|&reader| match stages[reader].kind {
            Kind::Gather { .. } => true,
            Kind::Attention { out, .. } => only_gathered(stages, out),
            _ => false,
        });
        let last = match readers.into_iter().max() {
            Some(_) if kept => stages.len() - 1,
            last => last.unwrap_or(index),
        };
        let heir = in_place(program, key, stages, index)?;
        let owner = heir.and_then(|from| buffers.iter_mut().find(|b| b.values.contains(&from)));
        match owner {
            Some(buffer) => {
                buffer.values.push(out);
                buffer.last = last;
            }
            None => {
                let value = program.value(out);
                let elems = value.rows.size(key) as usize * value.cols as usize;
                let len = value.dtype.bytes(elems) as u64;
                let values = vec![out];
                buffers.push(Buffer { values, offset: 0, len, first: index, last });
            }
        }
    }
    Ok(buffers)
}

/// The input whose bytes stage `index` may or must write its output to.
fn in_place(
    program: &Program,
    key: &ShapeKey,
    stages: &[Stage],
    index: usize,
) -> Result<Option<ValueId>, CompileError> {
    let dies_here = |value| readers(stages, value).into_iter().max() == Some(index);
    let alike = |a: ValueId, b: ValueId| {
        let (a, b) = (program.value(a), program.value(b));
        (a.rows.size(key), a.cols, a.dtype) == (b.rows.size(key), b.cols, b.dtype)
    };
    Ok(match stages[index].kind {
        Kind::RopeKv(rope) => {
            let readers = readers(stages, rope.qkv).len();
            if readers != 1 {
                let value = program.value(rope.qkv).name.clone();
                return Err(CompileError::SharedInPlace { value, readers });
            }
            Some(rope.qkv)
        }
        // The product is complete before the sum is stored element by element, but only if the sum
        // is not also what the product reads.
        Kind::Linear { x, fold: Fold::Residual(residual), out, .. }
            if x != residual && dies_here(residual) && alike(residual, out) =>
        {
            Some(residual)
        }
        Kind::RmsNorm { x, out, .. } if dies_here(x) && alike(x, out) => Some(x),
        _ => None,
    })
}

/// Largest first, at the lowest free offset.
fn pack(buffers: &mut [Buffer]) {
    let mut by_size: Vec<usize> = (0..buffers.len()).collect();
    by_size.sort_by_key(|&i| (std::cmp::Reverse(buffers[i].len), buffers[i].first));
    let mut placed: Vec<usize> = Vec::new();
    for index in by_size {
        let (first, last, len) = (buffers[index].first, buffers[index].last, buffers[index].len);
        let mut taken: Vec<(u64, u64)> = placed
            .iter()
            .map(|&other| &buffers[other])
            .filter(|other| other.first <= last && first <= other.last)
            .map(|other| (other.offset, other.offset + other.len))
            .collect();
        taken.sort_unstable();
        let mut offset = 0;
        for (start, end) in taken {
            if offset + len <= start {
                break;
            }
            offset = offset.max(end.next_multiple_of(ALIGN));
        }
        buffers[index].offset = offset;
        placed.push(index);
    }
}
