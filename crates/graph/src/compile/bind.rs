//! Stages and offsets become ops and spans.

use super::place::{Buffer, Placement};
use super::stage::{Fold, Kind, Rope, Stage, only_gathered};
use super::{Bindings, CompileError};
use crate::plan::PlacedValue;
use crate::program::{Dim, NormRef, Program, ValueId, WeightId};
use crate::{Phase, ShapeKey};
use device::op::{self, Epilogue, KvLayer, Norm};
use device::step::count;
use device::variant::Pick;
use device::{Node, Op, Span, Tensor};

/// One node per stage, without scratch and variants: those are chosen next.
pub fn bind(
    program: &Program,
    key: &ShapeKey,
    bindings: &Bindings,
    stages: &[Stage],
    placement: &Placement,
) -> Result<Vec<Node>, CompileError> {
    if placement.bytes > bindings.workspace.len {
        let (needed, available) = (placement.bytes, bindings.workspace.len);
        return Err(CompileError::Workspace { key: key.to_string(), needed, available });
    }
    let binder = Binder { program, key, bindings, stages, placement };
    let node = |stage: &Stage| {
        let op = binder.op(stage)?;
        Ok(Node { op, name: stage.name.clone(), layer: stage.layer })
    };
    stages.iter().map(node).collect()
}

/// Every value with its span and life.
pub fn placed_values(
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

struct Binder<'a> {
    program: &'a Program,
    key: &'a ShapeKey,
    bindings: &'a Bindings,
    stages: &'a [Stage],
    placement: &'a Placement,
}

impl Binder<'_> {
    fn op(&self, stage: &Stage) -> Result<Op, CompileError> {
        let state = self.bindings.state;
        Ok(match &stage.kind {
            Kind::Prologue => {
                let (rows, tokens) = (self.key.rows, self.key.tokens);
                let given = self.bindings.inputs.filter(|_| self.key.phase == Phase::Decode);
                let pages = self.bindings.kv.iter().map(|kv| kv.pages).min().unwrap_or(0);
                Op::Prologue(op::Prologue { state, rows, tokens, pages, given })
            }
            Kind::Embed { table, out } => Op::Embed(op::Embed {
                ids: state.token,
                table: self.weight(*table)?,
                out: self.value(*out),
            }),
            Kind::RmsNorm { x, norm, out } => {
                let (x, y, norm) = (self.value(*x), self.value(*out), self.norm(*norm)?);
                Op::RmsNorm(op::RmsNorm { x, norm, y })
            }
            Kind::Linear { x, w, bias, norm, fold, out } => Op::Linear(op::Linear {
                x: self.value(*x),
                w: self.weight(*w)?,
                bias: bias.map(|bias| self.weight(bias)).transpose()?,
                norm: norm.map(|norm| self.norm(norm)).transpose()?,
                epilogue: match fold {
                    Fold::Store => Epilogue::Store,
                    Fold::Residual(residual) => Epilogue::Residual(self.value(*residual)),
                    Fold::SiluMul => Epilogue::SiluMul,
                },
                rope: None,
                y: self.value(*out),
                live: Some(self.live(*x)),
                hand: op::Hand::Nothing,
                scratch: None,
                pick: Pick::Best,
            }),
            Kind::RopeKv(rope) => Op::RopeKv(self.rope(rope)?),
            Kind::Attention { qkv, rope, scale, window, kv, out } => Op::Attention(op::Attention {
                qkv: self.value(*qkv),
                q_heads: self.program.shape.q_heads,
                kv: self.kv(*kv)?,
                state,
                out: self.value(*out),
                scale: *scale,
                window: *window,
                rows: self.key.rows,
                single: self.key.phase == Phase::Decode,
                last_only: self.key.phase == Phase::Prefill && only_gathered(self.stages, *out),
                rope: rope.map(|rope| self.rope(&rope).map(Box::new)).transpose()?,
                scratch: None,
                pick: Pick::Best,
            }),
            Kind::Gather { x, out } => Op::Gather(op::Gather {
                index: state.last_index,
                x: self.value(*x),
                y: self.value(*out),
            }),
            Kind::Sample { logits } => Op::Sample(op::Sample {
                logits: self.value(*logits),
                state,
                scratch: None,
                rows: self.key.rows,
            }),
        })
    }

    fn value(&self, id: ValueId) -> Tensor {
        let buffer = self.placement.of(id).expect("every value that is read has a buffer");
        let value = self.program.value(id);
        let span = span_of(self.bindings, buffer);
        Tensor::dense(span, value.dtype, value.rows.size(self.key), value.cols)
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

    fn norm(&self, norm: NormRef) -> Result<Norm, CompileError> {
        Ok(Norm { weight: self.weight(norm.weight)?, eps: norm.eps })
    }

    fn rope(&self, rope: &Rope) -> Result<op::RopeKv, CompileError> {
        Ok(op::RopeKv {
            qkv: self.value(rope.qkv),
            q_heads: self.program.shape.q_heads,
            q_norm: rope.q_norm.map(|norm| self.norm(norm)).transpose()?,
            k_norm: rope.k_norm.map(|norm| self.norm(norm)).transpose()?,
            rope: self.bindings.rope,
            pairs: self.program.pairs,
            state: self.bindings.state,
            kv: self.kv(rope.kv)?,
        })
    }

    fn kv(&self, layer: u32) -> Result<KvLayer, CompileError> {
        self.bindings.kv.get(layer as usize).copied().ok_or_else(|| CompileError::Binding {
            what: format!("KV layer {layer}"),
            problem: "not bound".into(),
        })
    }

    /// The count of live rows of `x`, on the device: rows past it need no work.
    fn live(&self, x: ValueId) -> Span {
        let word = match self.program.value(x).rows {
            Dim::Rows => count::ROWS,
            _ => count::TOKENS,
        };
        self.bindings.state.counts.span.part(u64::from(word) * 4, 4)
    }
}
