//! Offsets in the workspace. A value lives from the step that makes it to the last step that reads it, over the whole
//! plan, breaks included. Values that are never alive at the same time share bytes.
//!
//! Two kinds of values live to the end of the plan, because log-probabilities and hidden states of a prompt are computed
//! from them after the step: the input of a gather, and the input of an attention op that computes only the last tokens.
//!
//! Buffers are placed largest first at the lowest offset that is free for their whole life, which is
//! within a few percent of the best known packing for such plans, and stable. Where that leaves large gaps, other orders
//! are tried.

use super::CompileError;
use super::uses::{only_gathered, readers};
use crate::ShapeKey;
use crate::program::{Program, ProgramOp, Step, ValueId};
use device::ALIGN;
use device::ops::{Keep, Reuse};
use std::cmp::Reverse;

/// A part of the workspace and when it is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// The values it holds, one after the other (in-place ops reuse it).
    pub values: Vec<ValueId>,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The step that writes it first.
    pub first: usize,
    /// The last step that touches it.
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

/// Where everything lies in a step of a key.
pub fn place(program: &Program, key: &ShapeKey, steps: &[Step]) -> Result<Placement, CompileError> {
    let mut buffers = buffers(program, key, steps)?;
    pack(&mut buffers);
    let bytes = buffers.iter().map(|b| (b.offset + b.len).next_multiple_of(ALIGN)).max();
    buffers.sort_by_key(|buffer| (buffer.first, buffer.offset));
    Ok(Placement { buffers, bytes: bytes.unwrap_or(0) })
}

/// One buffer per value, or per chain of values that are rewritten in place.
fn buffers(program: &Program, key: &ShapeKey, steps: &[Step]) -> Result<Vec<Buffer>, CompileError> {
    let mut buffers: Vec<Buffer> = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let Some(out) = step.op.made() else { continue };
        let readers = readers(steps, out);
        let keeps = |op: &ProgramOp| match op.keeps() {
            Keep::No => false,
            Keep::Always => true,
            Keep::IfOnlyGathered(result) => only_gathered(steps, result),
        };
        let kept = readers.iter().any(|&reader| steps[reader].op.members().iter().any(keeps));
        let last = match readers.into_iter().max() {
            Some(_) if kept => steps.len() - 1,
            last => last.unwrap_or(index),
        };
        let heir = in_place(program, key, steps, index)?;
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

/// The input whose bytes step `index` may or must write its output to.
fn in_place(
    program: &Program,
    key: &ShapeKey,
    steps: &[Step],
    index: usize,
) -> Result<Option<ValueId>, CompileError> {
    let Some(Reuse { from, to, must }) = steps[index].op.reuse() else { return Ok(None) };
    let readers = readers(steps, from);
    if must && readers.len() != 1 {
        let value = program.value(from).name.clone();
        return Err(CompileError::SharedInPlace { value, readers: readers.len() });
    }
    let dies_here = readers.into_iter().max() == Some(index);
    let (a, b) = (program.value(from), program.value(to));
    let alike = (a.rows.size(key), a.cols, a.dtype) == (b.rows.size(key), b.cols, b.dtype);
    Ok((must || dies_here && alike).then_some(from))
}

/// An order in which buffers are placed: smaller keys first.
type Order = fn(&Buffer) -> (Reverse<u64>, usize);

/// Largest first; those that take most bytes for most steps; those that are used first.
const ORDERS: [Order; 3] = [
    |buffer| (Reverse(buffer.len), buffer.first),
    |buffer| (Reverse(buffer.len * (buffer.last - buffer.first + 1) as u64), buffer.first),
    |buffer| (Reverse(0), buffer.first),
];

/// By the first order, unless it takes a quarter more than what lives at once: then by the best.
fn pack(buffers: &mut [Buffer]) {
    pack_by(buffers, ORDERS[0]);
    let end = |buffers: &[Buffer]| buffers.iter().map(|b| b.offset + b.len).max().unwrap_or(0);
    if end(buffers) * 4 <= alive_at_once(buffers) * 5 {
        return;
    }
    for order in &ORDERS[1..] {
        let mut other = buffers.to_vec();
        pack_by(&mut other, *order);
        if end(&other) < end(buffers) {
            buffers.clone_from_slice(&other);
        }
    }
}

/// Bytes that live at the same time, at most.
fn alive_at_once(buffers: &[Buffer]) -> u64 {
    let alive = |at: usize| buffers.iter().filter(move |b| b.first <= at && at <= b.last);
    let at_once = buffers.iter().map(|buffer| alive(buffer.first).map(|b| b.len).sum());
    at_once.max().unwrap_or(0)
}

/// In this order, at the lowest free offset.
fn pack_by(buffers: &mut [Buffer], order: Order) {
    let mut sorted: Vec<usize> = (0..buffers.len()).collect();
    sorted.sort_by_key(|&i| order(&buffers[i]));
    let mut placed: Vec<usize> = Vec::new();
    for index in sorted {
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
