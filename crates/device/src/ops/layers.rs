//! A run of decoder layers as one node: what its members do, one after the other.
//!
//! Members are products and attention, each with its own contract. Of the workspace, only what the last
//! member writes is defined afterwards: a device that runs them as one kernel keeps the rest to itself.
//! It may also keep the residual stream in f32 from layer to layer, and round parts of attention to the
//! members' dtype before it merges them.

mod cuda;

use super::{Access, Contract, SpanVisitor, StepSize, Traffic, require, require_scratch};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Scratch, Step, Team};
use crate::op::Layers;
use crate::{Op, Result, Span};

impl Contract for Layers {
    const NAME: &'static str = "layers";

    fn check(&self) -> Result<()> {
        require(!self.members.is_empty(), Self::NAME, || "there are no members".into())?;
        for member in &self.members {
            let allowed = matches!(member, Op::Linear(_) | Op::Attention(_));
            require(allowed, Self::NAME, || format!("{} cannot be a member", member.name()))?;
            member.check()?;
        }
        let Some(exchange) = self.exchange else { return Ok(()) };
        require_scratch(Some(exchange), Self::NAME)?;
        let mut apart = true;
        for member in &self.members {
            member.visit_spans(&mut |span, _| apart &= !span.overlaps(exchange));
        }
        require(apart, Self::NAME, || "a member touches what blocks exchange".into())
    }

    /// Members are ops of their own: what one wrote, another may read, and a third write again.
    fn is_one_op(&self) -> bool {
        false
    }

    fn describe(&self) -> String {
        format!("layers: {} ops as one", self.members.len())
    }

    fn traffic(&self) -> Traffic {
        self.members.iter().map(Op::traffic).fold(Traffic::default(), |a, b| Traffic {
            weights: a.weights + b.weights,
            values: a.values + b.values,
        })
    }

    fn step_size(&self) -> StepSize {
        let sizes = self.members.iter().map(Op::step_size);
        sizes.fold(StepSize::ANY, |a, b| StepSize {
            rows: a.rows.or(b.rows),
            tokens: a.tokens.or(b.tokens),
        })
    }

    /// What comes from outside is read; what members hand each other is only written.
    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        let mut written: Vec<Span> = Vec::new();
        for member in &self.members {
            member.visit_spans(&mut |span, access| {
                if access != Access::Write && !written.contains(&span) {
                    visit(span, Access::Read);
                }
                if access != Access::Read && !written.contains(&span) {
                    written.push(span);
                    visit(span, Access::Write);
                }
            });
        }
        if let Some(exchange) = self.exchange {
            visit(exchange, Access::Update);
        }
    }
}

impl Layers {
    /// What decides how long it takes, in words; `None` unless it is layers of a decode step.
    pub(crate) fn shape(&self) -> Option<String> {
        let [Op::Linear(qkv), Op::Attention(attention), _, Op::Linear(up), ..] = &self.members[..]
        else {
            return None;
        };
        let (kv, count) = (&attention.kv, self.members.len() / 5);
        Some(format!(
            "layers {count}x{}x{}:{} {}:{}x{} {:?}",
            qkv.x.rows,
            qkv.x.cols,
            up.y.cols,
            attention.q_heads,
            kv.heads,
            kv.head_dim,
            qkv.w.dtype
        ))
    }

    pub(crate) fn reference(&self, memory: &CpuMemory) {
        self.members.iter().for_each(|member| member.reference(memory));
    }

    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        let prepare = |member: &Op| member.prepare_cpu(memory, lowering);
        Box::new(LayersStep(self.members.iter().map(prepare).collect()))
    }
}

struct LayersStep(Vec<Box<dyn Step>>);

impl Step for LayersStep {
    fn scratch(&self) -> Scratch {
        self.0.iter().map(|step| step.scratch()).fold(Scratch::default(), Scratch::max)
    }

    fn run(&self, team: &Team<'_>) {
        self.0.iter().for_each(|step| step.run(team));
    }
}
