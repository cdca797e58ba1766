//! Several ops as one: the result is that of the members run in order, which is what the reference does. A fused kernel
//! may keep values between members in registers: these have tensors in [`Region::Inside`], a region without memory on a
//! GPU, with the dtype that the kernel computes in.
//!
//! `kernel` says which kernel runs all members:
//! - a linear's (`linear/chain.rs`), with adapters or without,
//! - attention's (`attention/chain.rs`),
//! - that of a run of decoder layers (`fused/layers.rs`): afterwards only the output of the last member is defined in
//!   the workspace. A device may keep the residual stream in f32 from layer to layer, and round parts of attention to
//!   the members' dtype before it merges them;
//! - that of a norm, a router and its experts, perhaps with a shared one (`fused/expert_layer.rs`): what lies between them
//!   stays inside;
//! - that of a recurrent layer between its linears (`fused/recurrent.rs`): the same.

pub(crate) mod expert_layer;
pub(crate) mod layers;
pub(crate) mod recurrent;

use super::{Access, Bindable, Contract, Reuse, SpanVisitor, StepSize, Traffic, require};
use crate::cpu::memory::{CpuMemory, InsideMemory};
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Scratch, Step, Team};
use crate::cuda::launch::{Lowered, Target};
use crate::op::{AttentionChain, LinearChain, NormHandoff};
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::variant::{Pick, Variant};
use crate::{ALIGN, ArenaId, DType, Error, Op, Region, Result, Span, Tensor};
use expert_layer::ExpertLayer;
use layers::Layers;
use recurrent::Recurrent;
use serde::{Deserialize, Serialize};

/// Allocates tensors in [`Region::Inside`].
#[derive(Clone, Copy, Debug)]
pub struct Inside {
    arena: ArenaId,
    bytes: u64,
}

impl Inside {
    /// For an op of this arena.
    pub fn new(arena: ArenaId) -> Inside {
        Inside { arena, bytes: 0 }
    }

    /// A dense tensor.
    pub fn tensor(&mut self, dtype: DType, rows: u32, cols: u32) -> Tensor {
        let len = dtype.bytes(rows as usize * cols as usize) as u64;
        let span = Span { arena: self.arena, region: Region::Inside, offset: self.bytes, len };
        self.bytes += len.next_multiple_of(ALIGN);
        Tensor::dense(span, dtype, rows, cols)
    }
}

/// Several ops that one kernel runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Fused<O: Operands = Bound> {
    /// The ops, in order. Values in [`crate::Region::Inside`] exist for the members only.
    pub members: Vec<Op<O>>,
    /// Which kernel runs them.
    pub kernel: FusedKernel<O>,
}

/// The kernel that runs the members of a fused op.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", bound = "")]
pub enum FusedKernel<O: Operands = Bound> {
    /// The linear's: a norm before it, and adapters, an addition, an activation or a rotation after it.
    Linear {
        /// Whether it prepares the next op's norm, or has its own norm prepared.
        #[serde(skip_serializing_if = "unset")]
        handoff: O::Late<NormHandoff>,
    },
    /// Attention's: the rotation before it.
    Attention,
    /// A run of decoder layers.
    Layers {
        /// Where blocks of a GPU exchange activations: in [`crate::Region::State`], zero at the start and used only
        /// by ops of this kind; the target says how many bytes.
        #[serde(skip_serializing_if = "unset")]
        exchange: O::Late<Option<Span>>,
    },
    /// A norm, a router and its experts, perhaps with an MLP beside them.
    ExpertLayer {
        /// As for layers.
        #[serde(skip_serializing_if = "unset")]
        exchange: O::Late<Option<Span>>,
    },
    /// A convolution, a scan and a norm with a gate, perhaps after the linear that makes the scan's gates.
    Recurrent,
}

impl<O: Operands> Bindable for Fused<O> {
    type O = O;
    type Bound = Fused;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        self.members.iter_mut().for_each(|member| member.operands(visit));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Fused, B::Error> {
        let kernel = match self.kernel {
            FusedKernel::Linear { .. } => FusedKernel::Linear { handoff: NormHandoff::Nothing },
            FusedKernel::Attention => FusedKernel::Attention,
            FusedKernel::Layers { .. } => FusedKernel::Layers { exchange: None },
            FusedKernel::ExpertLayer { .. } => FusedKernel::ExpertLayer { exchange: None },
            FusedKernel::Recurrent => FusedKernel::Recurrent,
        };
        Ok(Fused { members: to.members(&self.members)?, kernel })
    }

    /// The last member's, unless another member reads that input, too.
    fn reuse(&self) -> Option<Reuse<O::Value>> {
        let (last, others) = self.members.split_last()?;
        let reuse = last.reuse()?;
        let mut read = false;
        for member in others {
            member.clone().operands(&mut |operand| {
                read |= matches!(operand, Operand::Value(value, _) if *value == reuse.from);
            });
        }
        (!read).then_some(reuse)
    }

    /// The name of the op that the kernel belongs to.
    fn name(&self) -> &'static str {
        self.kernel.name()
    }
}

impl<O: Operands> FusedKernel<O> {
    fn name(&self) -> &'static str {
        match self {
            FusedKernel::Linear { .. } => "linear",
            FusedKernel::Attention => "attention",
            FusedKernel::Layers { .. } => "layers",
            FusedKernel::ExpertLayer { .. } => "expert_layer",
            FusedKernel::Recurrent => "recurrent",
        }
    }
}

/// The members in the form that their kernel needs.
#[expect(clippy::large_enum_variant, reason = "it lives on the stack for one call")]
enum View<'a> {
    Linear(LinearChain),
    Attention(AttentionChain),
    Layers(Layers<'a>),
    ExpertLayer(ExpertLayer<'a>),
    Recurrent(Recurrent<'a>),
}

/// Evaluates the same expression for any view; `None` if the kernel cannot run the members.
macro_rules! with_view {
    ($fused:expr, $view:ident => $body:expr) => {
        $fused.view().map(|view| match view {
            View::Linear($view) => $body,
            View::Attention($view) => $body,
            View::Layers($view) => $body,
            View::ExpertLayer($view) => $body,
            View::Recurrent($view) => $body,
        })
    };
}

impl Fused {
    fn view(&self) -> Option<View<'_>> {
        Some(match &self.kernel {
            FusedKernel::Linear { handoff } => {
                View::Linear(LinearChain::of_members(&self.members, *handoff)?)
            }
            FusedKernel::Attention => View::Attention(AttentionChain::of_members(&self.members)?),
            FusedKernel::Layers { exchange } => {
                View::Layers(Layers { members: &self.members, exchange: *exchange })
            }
            FusedKernel::ExpertLayer { exchange } => {
                View::ExpertLayer(ExpertLayer::of_members(&self.members, *exchange)?)
            }
            FusedKernel::Recurrent => View::Recurrent(Recurrent::of_members(&self.members)?),
        })
    }

    /// The member whose kernel runs all members; `None` if it belongs to none of them.
    fn main(&mut self) -> Option<&mut Op> {
        let name = self.kernel.name();
        self.members.iter_mut().find(|member| member.name() == name)
    }

    /// Bytes of the values between members.
    fn inside_bytes(&self) -> u64 {
        let mut bytes = 0;
        for member in &self.members {
            member.visit_spans(&mut |span, _| {
                if span.region == Region::Inside {
                    bytes = bytes.max(span.end());
                }
            });
        }
        bytes
    }

    fn unfit(&self) -> Error {
        let names: Vec<_> = self.members.iter().map(Op::name).collect();
        let problem = format!("no {} kernel runs {}", self.kernel.name(), names.join(", "));
        Error::Contract { op: self.kernel.name().into(), problem }
    }

    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let inside = InsideMemory::new(self.inside_bytes());
        let memory = memory.with_inside(&inside);
        self.members.iter().for_each(|member| member.reference(&memory));
    }

    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        match self.view() {
            Some(View::Linear(chain)) if chain.lora.is_none() => chain.prepare(memory, lowering),
            Some(View::Attention(chain)) => chain.prepare(memory, lowering),
            Some(View::Linear(_) | View::Layers(_) | View::ExpertLayer(_) | View::Recurrent(_))
            | None => {
                let inside = InsideMemory::new(self.inside_bytes());
                let memory = memory.with_inside(&inside);
                let prepare = |member: &Op| member.prepare_cpu(&memory, lowering);
                let steps = self.members.iter().map(prepare).collect();
                Box::new(MembersStep { steps, _inside: inside })
            }
        }
    }

    /// Bytes that blocks of the kernel exchange; 0 if the kernel has no exchange or cannot run the members.
    pub(crate) fn exchange_bytes(&self, target: &Target) -> u64 {
        match self.view() {
            Some(View::Layers(layers)) => layers.exchange_bytes(target),
            Some(View::ExpertLayer(layer)) => layer.exchange_bytes(target),
            Some(View::Linear(_) | View::Attention(_) | View::Recurrent(_)) | None => 0,
        }
    }

    /// Whether it is known to be faster than its members without having been measured on this machine.
    pub(crate) fn is_faster(&self) -> bool {
        match self.view() {
            Some(View::ExpertLayer(layer)) => layer.is_faster(),
            Some(View::Recurrent(layer)) => layer.is_faster(),
            Some(View::Linear(_) | View::Attention(_) | View::Layers(_)) | None => false,
        }
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        with_view!(self, view => view.lower(target)).ok_or_else(|| self.unfit())?
    }
}

impl Contract for Fused {
    fn check(&self) -> Result<()> {
        let name = self.kernel.name();
        require(!self.members.is_empty(), name, || "there are no members".into())?;
        let mut written: Vec<Span> = Vec::new();
        let mut unwritten = None;
        for member in &self.members {
            member.check()?;
            member.visit_spans(&mut |span, access| {
                let inner = span.region == Region::Inside;
                if inner && access == Access::Write {
                    written.push(span);
                } else if inner && !written.contains(&span) {
                    unwritten = Some(member.name());
                }
            });
        }
        require(unwritten.is_none(), name, || {
            let reader = unwritten.unwrap_or_default();
            format!("{reader} reads a value that no earlier member has written")
        })?;
        with_view!(self, view => view.check()).ok_or_else(|| self.unfit())?
    }

    fn is_one_op(&self) -> bool {
        !matches!(self.kernel, FusedKernel::Layers { .. })
    }

    fn describe(&self) -> String {
        let text = with_view!(self, view => view.describe());
        text.unwrap_or_else(|| self.unfit().to_string())
    }

    fn traffic(&self) -> Traffic {
        with_view!(self, view => view.traffic()).unwrap_or_default()
    }

    fn step_size(&self) -> StepSize {
        let sizes = self.members.iter().map(Op::step_size);
        sizes.fold(StepSize::ANY, |a, b| StepSize {
            rows: a.rows.or(b.rows),
            tokens: a.tokens.or(b.tokens),
        })
    }

    fn scratch_slot(&mut self) -> Option<&mut Option<Span>> {
        self.main()?.scratch_slot()
    }

    fn pick(&self) -> Option<Pick<Variant>> {
        self.clone().main()?.pick()
    }

    fn set_pick(&mut self, pick: Pick<Variant>) -> bool {
        self.main().is_some_and(|main| main.set_pick(pick))
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        let visit = &mut |span: Span, access| {
            if span.region != Region::Inside {
                visit(span, access);
            }
        };
        let known = with_view!(self, view => view.visit_spans(visit));
        if known.is_none() {
            self.members.iter().for_each(|member| member.visit_spans(visit));
        }
    }

    fn in_place(&self) -> Option<(Tensor, Tensor)> {
        match self.view()? {
            View::Linear(chain) => chain.in_place(),
            View::ExpertLayer(layer) => layer.in_place(),
            View::Attention(_) | View::Layers(_) | View::Recurrent(_) => None,
        }
    }

    fn scratch_bytes(&self, target: &Target) -> u64 {
        match self.view() {
            Some(View::Linear(chain)) => chain.scratch_bytes(target),
            Some(View::Attention(chain)) => chain.scratch_bytes(target),
            Some(View::Layers(_) | View::ExpertLayer(_) | View::Recurrent(_)) | None => 0,
        }
    }

    fn shape(&self) -> Option<String> {
        with_view!(self, view => view.shape_text()).flatten()
    }

    fn candidates(&self, target: &Target) -> Vec<Variant> {
        match self.view() {
            Some(View::Linear(chain)) => chain.candidates(target),
            Some(View::Attention(chain)) => chain.candidates(target),
            Some(View::Layers(_) | View::ExpertLayer(_) | View::Recurrent(_)) | None => Vec::new(),
        }
    }

    fn detach(&mut self) {
        self.members.iter_mut().for_each(Op::detach);
        if let FusedKernel::Linear { handoff } = &mut self.kernel {
            *handoff = NormHandoff::Nothing;
        }
    }
}

impl Op {
    /// This op and the next one as one op that `kernel` runs.
    pub fn join(self, next: Op, kernel: FusedKernel) -> Op {
        let members = [self, next].into_iter().flat_map(|op| match op {
            Op::Fused(fused) => fused.members,
            op => vec![op],
        });
        Fused { members: members.collect(), kernel }.into()
    }
}

/// Runs the members in order.
struct MembersStep {
    steps: Vec<Box<dyn Step>>,
    /// Memory for the values between them.
    _inside: InsideMemory,
}

impl Step for MembersStep {
    fn scratch(&self) -> Scratch {
        self.steps.iter().map(|step| step.scratch()).fold(Scratch::default(), Scratch::max)
    }

    fn run(&self, team: &Team<'_>) {
        self.steps.iter().for_each(|step| step.run(team));
    }
}
