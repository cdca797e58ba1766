//! From an op to launches: a pure function over plain data. Each op's part is `ops/<op>/cuda.rs`.
//!
//! Scratch: the caller reserves **one span in [`crate::Region::State`]**, as long as the largest
//! [`scratch_bytes`] of all ops of all its graphs, zero at the start, and gives it to every op as
//! `scratch`. Its contents do not outlive an op, except for the input that a linear prepares for the next op
//! ([`hand_on`]). Its first [`SEMAPHORE_BYTES`] count arrivals of blocks and are zero again when an op ends, so the
//! span must not share memory with other values.

use super::launch::{Arg, KernelKey, Launch, Lowered, Target};
use crate::op::{Activation, AttentionChain, Fused, FusedKernel, LinearChain, NormHandoff};
use crate::ops::fused::layers::Layers;
use crate::variant::Pick;
use crate::{DType, Error, Node, Op, Result, Span, Tensor};

/// Bytes at the front of a scratch span that are zero between ops.
pub const SEMAPHORE_BYTES: u64 = 64 << 10;

/// What an op is lowered to on `target`, in order.
pub fn lower(op: &Op, target: &Target) -> Result<Vec<Lowered>> {
    op.lower(target)
}

/// Bytes of scratch the op needs on `target`; 0 for most. If the table of tuned variants chose the kernel, there is
/// room for the rule's choice, too, because tuning compares the two.
pub fn scratch_bytes(op: &Op, target: &Target) -> u64 {
    let mut rule = op.clone();
    if op.pick() != Some(Pick::Best) || !rule.set_pick(Pick::Rule) {
        return op.scratch_bytes(target);
    }
    op.scratch_bytes(target).max(rule.scratch_bytes(target))
}

/// Layers, if the op is a run of them.
fn layers(op: &Op) -> Option<Layers<'_>> {
    let Op::Fused(Fused { members, kernel: FusedKernel::Layers { exchange } }) = op else {
        return None;
    };
    Some(Layers { members, exchange: *exchange })
}

/// Bytes that the blocks of a run of layers, or of a layer of experts, exchange on `target`; 0 for every other op, and
/// where the members run as separate kernels.
pub fn exchange_bytes(op: &Op, target: &Target) -> u64 {
    if let Op::Fused(fused) = op { fused.exchange_bytes(target) } else { 0 }
}

/// Why the one kernel cannot run these layers on `target`; `None` if it can, or for another op.
pub fn unfit_layers(op: &Op, target: &Target) -> Option<String> {
    layers(op)?.unfit(target)
}

/// Lets linears prepare their results for the norm of the next linear, and routers plan for the experts after them, where
/// both have kernels for it. For nodes that run in this order with nothing between them and share their scratch.
pub fn hand_on(nodes: &mut [Node], target: &Target) {
    for at in 1..nodes.len() {
        let chains = [at - 1, at].map(|at| LinearChain::of(&nodes[at].op));
        if let [Some(producer), Some(consumer)] = chains
            && producer.can_hand_on(&consumer, target)
            && let Some(norm) = consumer.norm
        {
            let handoff = NormHandoff::Produce(norm);
            nodes[at - 1].op = LinearChain { handoff, ..producer }.into();
            let handoff = NormHandoff::Consume;
            nodes[at].op = LinearChain { handoff, ..consumer }.into();
        }
        let [before, after] = &mut nodes[at - 1..=at] else { continue };
        if let (Op::Route(route), Op::Experts(experts)) = (&mut before.op, &mut after.op)
            && route.y.span == experts.choice.span
            && route.can_plan(target)
            && let Some(tile) = experts.plan_tile(target)
        {
            (route.plans, route.load) = (Some(tile), experts.load);
            experts.planned = true;
        }
    }
}

/// The kernel that runs `node` and the next one, where one of them is `rope_kv`: a linear that also rotates its result and
/// writes k and v, or attention that does so first.
pub fn rotation(node: &Node, next: &Node, target: &Target) -> Option<FusedKernel> {
    if let Op::RopeKv(rope) = &next.op {
        let can = LinearChain::of(&node.op)?.can_rotate(rope, target);
        return can.then_some(FusedKernel::Linear { handoff: NormHandoff::Nothing });
    }
    let Op::RopeKv(rope) = &node.op else { return None };
    let can = AttentionChain::of(&next.op)?.can_rotate(rope, target);
    can.then_some(FusedKernel::Attention)
}

/// Whether one kernel runs this linear with the adapters that it has.
pub fn adapts(op: &Op, target: &Target) -> bool {
    LinearChain::of(op).is_some_and(|chain| chain.adapts(target))
}

/// Builds a launch: what varies is set by methods, the rest has the usual value.
pub(crate) struct Kernel(Launch);

impl Kernel {
    /// A kernel of `kernels/<source>.cu`; it waits for its predecessor if the GPU supports that.
    pub(crate) fn new(target: &Target, source: &str, entry: &str) -> Kernel {
        let kernel = KernelKey { source: source.into(), entry: entry.into(), defines: Vec::new() };
        Kernel(Launch {
            kernel,
            grid: [1, 1, 1],
            block: [256, 1, 1],
            cluster: [1, 1, 1],
            shared: 0,
            args: Vec::new(),
            waits: target.capability.0 >= 9,
        })
    }

    /// A shape constant.
    pub(crate) fn define(mut self, name: &str, value: impl std::fmt::Display) -> Kernel {
        self.0.kernel.defines.push((name.into(), value.to_string()));
        self
    }

    /// What the kernel of a linear applies to its sums.
    pub(crate) fn after(self, act: Option<Activation>) -> Kernel {
        match act {
            Some(act) => self.define("AFTER", act.code()),
            None => self,
        }
    }

    /// Several shape constants.
    pub(crate) fn defines(self, pairs: &[(&str, u32)]) -> Kernel {
        pairs.iter().fold(self, |kernel, (name, value)| kernel.define(name, value))
    }

    /// Blocks.
    pub(crate) fn grid(mut self, x: u32, y: u32, z: u32) -> Kernel {
        self.0.grid = [x, y, z];
        self
    }

    /// Blocks per cluster, along x.
    pub(crate) fn cluster(mut self, blocks: u32) -> Kernel {
        self.0.cluster = [blocks, 1, 1];
        self
    }

    /// Blocks per cluster, along y.
    pub(crate) fn cluster_along_y(mut self, blocks: u32) -> Kernel {
        self.0.cluster = [1, blocks, 1];
        self
    }

    /// Threads per block.
    pub(crate) fn threads(mut self, threads: u32) -> Kernel {
        self.0.block = [threads, 1, 1];
        self
    }

    /// Dynamic shared memory.
    pub(crate) fn shared(mut self, bytes: u32) -> Kernel {
        self.0.shared = bytes;
        self
    }

    /// The next arguments are these addresses.
    pub(crate) fn spans(mut self, spans: &[Span]) -> Kernel {
        self.0.args.extend(spans.iter().map(|span| Arg::Address(*span)));
        self
    }

    /// The next arguments are the addresses of these tensors.
    pub(crate) fn tensors(self, tensors: &[&Tensor]) -> Kernel {
        tensors.iter().fold(self, |kernel, tensor| kernel.arg(Arg::Address(tensor.span)))
    }

    /// The next argument is an address, or null.
    pub(crate) fn optional(self, span: Option<Span>) -> Kernel {
        self.arg(span.map_or(Arg::Null, Arg::Address))
    }

    /// The next arguments are these integers.
    pub(crate) fn ints(mut self, values: &[u32]) -> Kernel {
        self.0.args.extend(values.iter().map(|value| Arg::U32(*value)));
        self
    }

    /// The next argument.
    pub(crate) fn arg(mut self, arg: Arg) -> Kernel {
        self.0.args.push(arg);
        self
    }

    /// The finished launch.
    pub(crate) fn lowered(self) -> Lowered {
        Lowered::Launch(self.0)
    }
}

/// The number of a format in kernels (`prelude.cuh`).
pub(crate) fn code(dtype: DType, op: &str) -> Result<u32> {
    Ok(match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::E4M3 => 3,
        DType::Q4_0 => 10,
        DType::Q4_1 => 11,
        DType::Q5_0 => 12,
        DType::Q5_1 => 13,
        DType::Q8_0 => 14,
        DType::Q2K => 20,
        DType::Q3K => 21,
        DType::Q4K => 22,
        DType::Q5K => 23,
        DType::Q6K => 24,
        DType::F8Row => 30,
        DType::F8Block => 31,
        DType::F8Pairs => 32,
        DType::F8Turns => 33,
        DType::I4 => 34,
        DType::I4G64 => 35,
        DType::I4G32 => 36,
        DType::Mxfp4 => 37,
        DType::U32 | DType::U8 | DType::P4 | DType::P8 => {
            let problem = format!("{dtype:?} is not a format of the CUDA kernels");
            return Err(Error::Contract { op: op.into(), problem });
        }
    })
}

/// Whether every row of a tensor starts at a multiple of 16 bytes and holds whole groups of eight.
pub(crate) fn aligned(tensor: &Tensor) -> bool {
    let whole = tensor.cols.is_multiple_of(8) && tensor.stride.is_multiple_of(8);
    whole && tensor.span.offset.is_multiple_of(16)
}
