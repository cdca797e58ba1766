//! Routers and experts of real layers, alone and as one node.
#![allow(dead_code, reason = "not every test that shares the shapes has experts")]

use super::SCRATCH;
use device::op::*;
use device::variant::Pick;
use device::{DType, Op, OpenArena, Region, Tensor};

/// The sizes of a layer of experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertLayer {
    pub(crate) name: &'static str,
    pub(crate) hidden: u32,
    pub(crate) inner: u32,
    pub(crate) experts: u32,
    pub(crate) routing: Routing,
    pub(crate) weights: DType,
    /// Biases of the router and of the experts, and limited gates.
    pub(crate) biases: bool,
    /// Columns of an MLP beside them, and whether its result is multiplied by a gate.
    pub(crate) shared: Option<(u32, bool)>,
}

pub(crate) const EXPERT_LAYERS: [ExpertLayer; 9] = [
    ExpertLayer {
        name: "qwen3-30b-a3b",
        hidden: 2048,
        inner: 768,
        experts: 128,
        routing: Routing { renormalise: true, ..Routing::softmax(8) },
        weights: DType::BF16,
        biases: false,
        shared: None,
    },
    ExpertLayer {
        name: "deepseek-v3",
        hidden: 7168,
        inner: 2048,
        experts: 256,
        routing: Routing {
            score: Score::Sigmoid,
            groups: 8,
            kept: 4,
            group_top: 2,
            renormalise: true,
            scale: 2.5,
            ..Routing::softmax(8)
        },
        weights: DType::BF16,
        biases: false,
        shared: None,
    },
    ExpertLayer {
        name: "mixtral-8x7b",
        hidden: 4096,
        inner: 14_336,
        experts: 8,
        routing: Routing { renormalise: true, ..Routing::softmax(2) },
        weights: DType::BF16,
        biases: false,
        shared: None,
    },
    ExpertLayer {
        name: "qwen1.5-moe-a2.7b",
        hidden: 2048,
        inner: 1408,
        experts: 60,
        routing: Routing::softmax(4),
        weights: DType::Q4_1,
        biases: false,
        shared: None,
    },
    ExpertLayer {
        name: "gpt-oss-20b",
        hidden: 2880,
        inner: 2880,
        experts: 32,
        routing: Routing { renormalise: true, ..Routing::softmax(4) },
        weights: DType::Mxfp4,
        biases: true,
        shared: None,
    },
    ExpertLayer {
        name: "gpt-oss-120b bf16",
        hidden: 2880,
        inner: 2880,
        experts: 128,
        routing: Routing { renormalise: true, ..Routing::softmax(4) },
        weights: DType::BF16,
        biases: true,
        shared: None,
    },
    ExpertLayer {
        name: "qwen3-30b-a3b fp8",
        hidden: 2048,
        inner: 768,
        experts: 128,
        routing: Routing { renormalise: true, ..Routing::softmax(8) },
        weights: DType::F8Block,
        biases: false,
        shared: None,
    },
    ExpertLayer {
        name: "qwen3.5-35b-a3b",
        hidden: 2048,
        inner: 512,
        experts: 256,
        routing: Routing { renormalise: true, ..Routing::softmax(8) },
        weights: DType::BF16,
        biases: false,
        shared: Some((512, true)),
    },
    ExpertLayer {
        name: "deepseek-v2-lite",
        hidden: 2048,
        inner: 1408,
        experts: 64,
        routing: Routing::softmax(6),
        weights: DType::BF16,
        biases: false,
        shared: Some((2816, false)),
    },
];

/// The router and the experts of a layer.
pub(crate) fn expert_ops(layer: &ExpertLayer, tokens: u32) -> Vec<Op> {
    let mut open = OpenArena::new();
    let mut tensor = |region, dtype: DType, rows: u32, cols: u32| {
        let bytes = dtype.matrix_bytes(rows as usize, cols as usize) as u64;
        Tensor::dense(open.alloc(region, "tensor", bytes), dtype, rows, cols)
    };
    let ExpertLayer { hidden, inner, experts, routing, weights, biases, .. } = *layer;
    let halves = matches!(weights, DType::BF16 | DType::Mxfp4 | DType::F8Block);
    let act = if halves { DType::BF16 } else { DType::F32 };
    let (x, y) = (
        tensor(Region::Workspace, act, tokens, hidden),
        tensor(Region::Workspace, act, tokens, hidden),
    );
    let choice = tensor(Region::Workspace, DType::U32, tokens, 2 * routing.top);
    let w = tensor(Region::Weights, act, experts, hidden);
    let bias = tensor(Region::Weights, DType::F32, 1, experts);
    let bias = (routing.score == Score::Sigmoid || biases).then_some(bias);
    let turned = if weights == DType::F8Block { DType::F8Turns } else { weights };
    let gate_up = tensor(Region::Weights, turned, experts * 2 * inner, hidden);
    let down = tensor(Region::Weights, weights, experts * hidden, inner);
    let scratch = Some(tensor(Region::State, DType::U8, 1, SCRATCH as u32).span);
    let live = Some(tensor(Region::State, DType::U32, 1, 1).span);
    let load = tensor(Region::State, DType::U32, 1, 2 * (experts + 2)).span;
    let (pick, act) = (Pick::Best, Activation::Silu);
    let [gate_up_bias, down_bias] = [experts * 2 * inner, experts * hidden]
        .map(|n| biases.then(|| tensor(Region::Weights, DType::BF16, 1, n)));
    let plain = Experts {
        x,
        choice,
        experts,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        act,
        clamp: biases.then_some(Clamp { alpha: 1.702, limit: 7.0 }),
        residual: None,
        y,
        live,
        scratch,
        planned: false,
        load: Some(load),
        pick,
    };
    let mut ops = vec![
        Op::Route(Route {
            x,
            w,
            bias,
            routing,
            y: choice,
            live,
            plans: None,
            load: None,
            scratch: None,
            pick: Pick::Best,
        }),
        Op::Experts(Experts { residual: Some(y), ..plain.clone() }),
        Op::Experts(plain.clone()),
    ];
    if !biases && matches!(weights, DType::F32 | DType::BF16) {
        // Experts without a gate.
        let gate_up = tensor(Region::Weights, weights, experts * inner, hidden);
        ops.push(Op::Experts(Experts { gate_up, act: Activation::ReluSquared, ..plain }));
    }
    if matches!(weights, DType::BF16 | DType::F8Block) && tokens <= 4 {
        let weight = tensor(Region::Weights, DType::BF16, 1, hidden);
        let norm = RmsNorm { x: y, norm: Norm { weight, eps: 1e-6 }, y: x };
        let mut members = vec![Op::RmsNorm(norm), ops[0].clone(), ops[1].clone()];
        if let Some((shared, gated)) = layer.shared {
            let acts = tensor(Region::Workspace, DType::BF16, tokens, shared);
            let b = tensor(Region::Workspace, DType::BF16, tokens, hidden);
            let w = tensor(Region::Weights, DType::BF16, 2 * shared, hidden);
            let epilogue = Epilogue::GateMul(Activation::Silu);
            let up = LinearChain { epilogue, live, ..LinearChain::new(x, w, acts) };
            let w = tensor(Region::Weights, DType::BF16, hidden, shared);
            let (epilogue, to) =
                if gated { (Epilogue::Store, b) } else { (Epilogue::Residual(y), y) };
            let down = LinearChain { epilogue, live, ..LinearChain::new(acts, w, to) };
            members.extend([up, down].map(Op::from));
            let w = tensor(Region::Weights, DType::BF16, 1, hidden);
            members.extend(gated.then(|| AddGated { a: y, b, x, w, y, live }.into()));
        }
        let exchange = Some(tensor(Region::State, DType::U8, 1, 8 << 20).span);
        let one = Fused { members, kernel: FusedKernel::ExpertLayer { exchange } };
        // Layers of other shapes have no such kernel.
        if matches!(hidden, 2048 | 4096) && inner <= 1408 {
            ops.push(Op::Fused(one));
        }
    }
    ops
}
