//! A layer of experts with an MLP beside them as one node: a norm, its router, experts, both linears, and where it has one a
//! gate; twice in a row and the second time in place, as in `experts.rs`.

use crate::support::*;
use device::cuda::lower::exchange_bytes;
use device::op::*;
use device::variant::Pick;
use device::{DType, Op, Region, Span, Tensor};

/// Live rows of so many, and the sizes of a layer.
#[derive(Clone, Copy, Debug)]
struct Shape {
    rows: usize,
    live: usize,
    wide: usize,
    inner: usize,
    shared: usize,
    gated: bool,
    experts: usize,
}

const TOP: usize = 2;

/// What the layers of a case share.
struct Case {
    shape: Shape,
    live: Option<Span>,
    load: Span,
}

impl Case {
    fn half(&self, layout: &mut Layout, rng: &mut Rng, (n, k): (usize, usize), by: f32) -> Tensor {
        layout.floats(DType::BF16, n, k, 0, &rng.floats(n * k, by / (k as f32).sqrt()))
    }

    /// One layer from one value to another.
    fn layer(&self, layout: &mut Layout, rng: &mut Rng, [from, to]: [Tensor; 2]) -> Vec<Op> {
        let Shape { rows, wide, inner, shared, gated, experts, .. } = self.shape;
        let (live, pick) = (self.live, Pick::Best);
        let weight: Vec<f32> = rng.floats(wide, 0.2).iter().map(|v| 1.0 + v).collect();
        let weight = layout.floats(DType::F32, 1, wide, 0, &weight);
        let x = layout.poison(DType::BF16, rows, wide, 0);
        let norm = RmsNorm { x: from, norm: Norm { weight, eps: 1e-5 }, y: x };
        let choice = layout.poison(DType::F32, rows, 2 * TOP, 0);
        let choice = Tensor { dtype: DType::U32, ..choice };
        let routing = Routing { renormalise: gated, ..Routing::softmax(TOP as u32) };
        let w = self.half(layout, rng, (experts, wide), 8.0);
        let (y, bias, plans, load, scratch) = (choice, None, None, None, None);
        let route = Route { x, w, bias, routing, y, live, plans, load, scratch, pick };
        // With a gate the experts' result is a value of its own; without, everything is in place if it can be.
        let sum = if gated { layout.poison(DType::BF16, rows, wide, 0) } else { to };
        let run = Experts {
            x,
            choice,
            experts: experts as u32,
            gate_up: self.half(layout, rng, (experts * 2 * inner, wide), 2.0),
            down: self.half(layout, rng, (experts * wide, inner), 2.0),
            gate_up_bias: None,
            down_bias: None,
            act: Activation::Silu,
            clamp: None,
            residual: (from == to).then_some(from),
            y: sum,
            live,
            scratch: None,
            planned: false,
            load: Some(self.load),
            pick: Pick::Best,
        };
        let acts = layout.poison(DType::BF16, rows, shared, 0);
        let up = LinearChain {
            epilogue: Epilogue::GateMul(Activation::Silu),
            live,
            ..LinearChain::new(x, self.half(layout, rng, (2 * shared, wide), 2.0), acts)
        };
        let w = self.half(layout, rng, (wide, shared), 2.0);
        let mut ops = vec![Op::RmsNorm(norm), Op::Route(route), Op::Experts(run), up.into()];
        if !gated {
            let epilogue = Epilogue::Residual(sum);
            let down = LinearChain { epilogue, live, ..LinearChain::new(acts, w, to) };
            ops.push(down.into());
            return ops;
        }
        let b = layout.poison(DType::BF16, rows, wide, 0);
        ops.push(LinearChain { live, ..LinearChain::new(acts, w, b) }.into());
        let w = self.half(layout, rng, (1, wide), 4.0);
        ops.push(Op::AddGated(AddGated { a: sum, b, x, w, y: to, live }));
        ops
    }
}

fn one(members: Vec<Op>, exchange: Option<Span>) -> Op {
    Op::Fused(Fused { members, kernel: FusedKernel::ExpertLayer { exchange } })
}

#[test]
fn experts_with_a_shared_one_as_one_node() {
    let shape = |(rows, live), wide, inner, shared, gated| {
        let experts = if rows == 1 && inner == 64 { 260 } else { 5 };
        Shape { rows, live, wide, inner, shared, gated, experts }
    };
    let shapes = [
        shape((1, 1), 2048, 8, 64, true),
        shape((1, 1), 2048, 64, 64, true),
        shape((2, 2), 2048, 40, 104, false),
        shape((2, 1), 4096, 64, 64, true),
        // Down in three parts.
        shape((3, 2), 2048, 72, 2064, false),
        shape((4, 4), 2048, 64, 128, true),
        // Stages of more than 16 KiB.
        shape((2, 2), 2048, 1032, 2064, false),
    ];
    for (seed, shape) in shapes.into_iter().enumerate() {
        let Shape { rows, live, wide, experts, .. } = shape;
        let build = |layout: &mut Layout| {
            let rng = &mut Rng::new(900 + seed as u64);
            let x = layout.floats(DType::BF16, rows, wide, 0, &rng.floats(rows * wide, 3.0));
            let y = layout.poison(DType::BF16, rows, wide, 0);
            let live = Some(layout.words(&[live as u32]).span);
            let load = layout.words(&vec![0; 2 * (experts + 2)]).span;
            let case = Case { shape, live, load };
            let layers = [[x, y], [y, y]].map(|between| case.layer(layout, rng, between));
            // Enough for any GPU; it is zero at the start.
            let target = device::cuda::launch::Target::h200();
            let bytes = exchange_bytes(&one(layers[0].clone(), None), &target);
            assert!(bytes > 0, "{shape:?} has a kernel");
            let exchange = layout.bytes(Region::State, "exchange", vec![0; bytes as usize]);
            (layers.map(|members| one(members, Some(exchange))).into(), vec![y.span, load])
        };
        against_reference(&build, &|device, want, got| {
            let len = DType::BF16.bytes(live * wide);
            let (name, made) = (format!("{shape:?}, {device}"), &got[0][..len]);
            let found = row_difference(DType::BF16, 8.0, wide, &want[0][..len], made);
            assert_eq!(found, None, "{name}");
            assert_eq!(bytes_to_words(&want[1]), bytes_to_words(&got[1]), "{name}");
        });
    }
}
