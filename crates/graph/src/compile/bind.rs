//! Names and offsets become tensors and spans.

use super::place::{Buffer, Placement};
use super::uses::only_gathered;
use super::{Bindings, CompileError};
use crate::plan::PlacedValue;
use crate::program::{
    CacheId, CarryId, Dim, InputId, Program, ProgramOp, RopeId, Step, Symbolic, ValueId, WeightId,
};
use crate::{Phase, ShapeKey};
use device::op::KvLayer;
use device::operand::{Binder, StepShape};
use device::ops::Reuse;
use device::ops::fused::Inside;
use device::step::{HostInputs, count};
use device::{DType, Node, Op, Span, StepState, Tensor};
use std::collections::BTreeMap;

/// One node per step, without scratch and variants: those are chosen next.
pub fn bind(
    program: &Program,
    key: &ShapeKey,
    bindings: &Bindings,
    steps: &[Step],
    placement: &Placement,
) -> Result<Vec<Node>, CompileError> {
    if placement.bytes > bindings.workspace.len {
        let (needed, available) = (placement.bytes, bindings.workspace.len);
        return Err(CompileError::Workspace { key: key.to_string(), needed, available });
    }
    let places = Places { program, key, bindings, steps, placement, inside: BTreeMap::new() };
    let node = |step: &Step| {
        let op = step.op.bind(&places)?;
        Ok(Node { op, name: step.name.clone(), layer: step.layer })
    };
    steps.iter().map(node).collect()
}

/// Every value with its span and life.
pub(crate) fn placed_values(
    program: &Program,
    key: &ShapeKey,
    bindings: &Bindings,
    placement: &Placement,
) -> Vec<PlacedValue> {
    let mut values = Vec::new();
    for buffer in &placement.buffers {
        for &id in &buffer.values {
            let value = program.value(id);
            values.push(PlacedValue {
                name: value.name.clone(),
                dtype: value.dtype,
                rows: value.rows.size(key),
                cols: value.cols,
                span: span_of(bindings, buffer),
                first: buffer.first,
                last: buffer.last,
            });
        }
    }
    values
}

fn span_of(bindings: &Bindings, buffer: &Buffer) -> Span {
    bindings.workspace.part(buffer.offset, buffer.len)
}

/// Maps names to tensors.
#[derive(Clone)]
struct Places<'a> {
    program: &'a Program,
    key: &'a ShapeKey,
    bindings: &'a Bindings,
    steps: &'a [Step],
    placement: &'a Placement,
    /// Values between the members of the fused op being bound.
    inside: BTreeMap<ValueId, Tensor>,
}

impl Binder<Symbolic> for Places<'_> {
    type Error = CompileError;

    fn value(&self, id: ValueId) -> Result<Tensor, CompileError> {
        if let Some(tensor) = self.inside.get(&id) {
            return Ok(*tensor);
        }
        let value = self.program.value(id);
        let buffer = self.placement.of(id).ok_or_else(|| CompileError::Binding {
            what: format!("value `{}`", value.name),
            problem: "has no place".into(),
        })?;
        let span = span_of(self.bindings, buffer);
        Ok(Tensor::dense(span, value.dtype, value.rows.size(self.key), value.cols))
    }

    fn load(&self, id: WeightId) -> Option<Span> {
        self.bindings.loads.get(&self.program.weight(id).name).copied()
    }

    fn weight(&self, id: WeightId) -> Result<Tensor, CompileError> {
        let weight = self.program.weight(id);
        let problem = match self.bindings.weights.get(&weight.name) {
            Some(bound) if (bound.rows, bound.cols) == (weight.rows, weight.cols) => {
                return Ok(*bound);
            }
            Some(bound) => format!(
                "bound as {}×{}, needed as {}×{}",
                bound.rows, bound.cols, weight.rows, weight.cols
            ),
            None => "not bound".into(),
        };
        Err(CompileError::Binding { what: format!("weight `{}`", weight.name), problem })
    }

    fn table(&self, RopeId(id): RopeId) -> Result<Tensor, CompileError> {
        self.bindings.ropes.get(id as usize).copied().ok_or_else(|| CompileError::Binding {
            what: format!("rotation table {id}"),
            problem: "not bound".into(),
        })
    }

    fn cache(&self, id: CacheId) -> Result<KvLayer, CompileError> {
        self.bindings.kv.get(id.0 as usize).copied().ok_or_else(|| CompileError::Binding {
            what: format!("cache {}", id.0),
            problem: "not bound".into(),
        })
    }

    fn carry(&self, id: CarryId) -> Result<Tensor, CompileError> {
        self.bindings.carries.get(id.0 as usize).copied().ok_or_else(|| CompileError::Binding {
            what: format!("recurrent state {}", id.0),
            problem: "not bound".into(),
        })
    }

    fn input(&self, id: InputId) -> Result<Tensor, CompileError> {
        self.bindings.given.get(id.0 as usize).copied().ok_or_else(|| CompileError::Binding {
            what: format!("input {}", id.0),
            problem: "not bound".into(),
        })
    }

    fn bytes(&self, id: ValueId) -> Result<Span, CompileError> {
        Ok(self.value(id)?.span)
    }

    fn state(&self) -> StepState {
        self.bindings.state
    }

    fn state_of(&self, CacheId(id): CacheId) -> StepState {
        let table = self.bindings.tables.get(id as usize).copied().unwrap_or(0);
        self.bindings.state.of_table(table)
    }

    fn size(&self) -> StepShape {
        let ShapeKey { rows, tokens, q_len, .. } = *self.key;
        StepShape { rows, tokens, q_len, single: self.key.single() }
    }

    fn pages(&self) -> u32 {
        self.bindings.kv.iter().map(|kv| kv.pages).min().unwrap_or(0)
    }

    fn inputs(&self) -> Option<HostInputs> {
        self.bindings.inputs
    }

    /// The count of live rows, on the device: rows past it need no work. Values of a decode step have a row for each token.
    fn live(&self, value: ValueId) -> Option<Span> {
        let word = match self.program.value(value).rows {
            Dim::Rows if self.key.phase == Phase::Prefill => count::ROWS,
            Dim::Rows | Dim::Tokens | Dim::Const(_) => count::TOKENS,
        };
        Some(self.bindings.state.counts.span.part(u64::from(word) * 4, 4))
    }

    fn by_row(&self, value: ValueId) -> bool {
        // In a decode step rows are counted by tokens.
        self.program.value(value).rows == Dim::Rows && self.key.phase == Phase::Prefill
    }

    fn last_only(&self, value: ValueId) -> bool {
        !self.key.single() && only_gathered(self.steps, value)
    }

    /// Results of all members but the last stay inside the fused op: a linear's as f32 sums, others in their declared
    /// type. A value made in place keeps its span.
    fn members(&self, members: &[ProgramOp]) -> Result<Vec<Op>, CompileError> {
        let mut places = self.clone();
        let mut inside = Inside::new(self.bindings.workspace.arena);
        for member in members.split_last().map_or(&[][..], |(_, others)| others) {
            let Some(made) = member.made() else { continue };
            let value = self.program.value(made);
            let place = match member.reuse() {
                Some(Reuse { from, must: true, .. }) => places.value(from)?,
                Some(Reuse { must: false, .. }) | None => {
                    let sums = matches!(member, ProgramOp::Linear(_));
                    let dtype = if sums { DType::F32 } else { value.dtype };
                    inside.tensor(dtype, value.rows.size(self.key), value.cols)
                }
            };
            places.inside.insert(made, place);
        }
        members.iter().map(|member| member.bind(&places)).collect()
    }
}
