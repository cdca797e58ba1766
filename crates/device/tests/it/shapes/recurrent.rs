//! The ops of recurrent layers in the shapes of Qwen3-Next, of Mamba-2 layers and of a small model.

use device::op::{Conv, Fused, FusedKernel, Gate, Gated, GatedNorm, LinearChain, Norm, Rule, Scan};
use device::variant::Pick;
use device::{DType, Op, Region, Span, StepState, Tensor};

/// Makes a tensor somewhere.
type Make<'a> = &'a mut dyn FnMut(Region, DType, u32, u32) -> Tensor;

/// The ops of a step with these tables; `live` counts its tokens.
pub(crate) fn ops(
    act: DType,
    state: StepState,
    (rows, tokens, single, q_len): (u32, u32, bool, u32),
    (scratch, live): (Option<Span>, Option<Span>),
    tensor: Make<'_>,
) -> Vec<Op> {
    let mut ops = Vec::new();
    let space = Rule::StateSpace { least: 0.0 };
    let shapes = [
        (32, 16, 128, 128, Rule::Delta),
        (128, 8, 128, 64, space),
        (48, 1, 256, 64, space),
        (4, 2, 16, 8, Rule::Delta),
    ];
    for (heads, groups, key, value, rule) in shapes {
        let (channels, taps) = (2 * groups * key + heads * value, 4);
        let delta = rule == Rule::Delta;
        let seats = state.limits.seats;
        let x = tensor(Region::Workspace, act, tokens, channels + heads * value + heads);
        let c = tensor(Region::Workspace, act, tokens, channels);
        let o = tensor(Region::Workspace, act, tokens, heads * value);
        let gates = tensor(Region::Workspace, act, tokens, 2 * heads);
        let w = tensor(Region::Weights, act, channels, taps);
        let mut vector = |dtype, cols| tensor(Region::Weights, dtype, 1, cols);
        let bias = (!delta).then(|| vector(act, channels));
        let (a, dt) = (vector(DType::F32, heads), vector(act, heads));
        let skip = (!delta).then(|| vector(act, heads));
        let group = if delta { value } else { heads * value / groups };
        let weight = vector(act, if delta { value } else { heads * value });
        let norm = GatedNorm { norm: Norm { weight, eps: 1e-6 }, group, after: !delta };
        let inputs = taps - 1 + state.limits.drafts();
        let log = state.limits.logged() * Scan::log_cols(heads, groups, key, value);
        let kept = tensor(Region::Kv, act, seats, channels * inputs);
        let carry = tensor(Region::Kv, DType::F32, seats, heads * key * value + log);
        let conv = Conv { x, from: 0, w, bias, carry: kept, y: c, state, rows, single, q_len };
        ops.push(Op::from(conv));
        ops.push(Op::from(Scan {
            x: c,
            gates,
            from: 0,
            a,
            dt,
            skip,
            rule,
            heads,
            groups,
            turns: delta && groups == 2,
            key,
            value,
            carry,
            y: o,
            state,
            rows,
            single,
            q_len,
            scratch,
            pick: Pick::Best,
        }));
        let from = channels;
        let gated = Gated { x: o, z: x, from, gate: Gate::Silu, norm: Some(norm), y: o, live };
        ops.push(Op::from(gated.clone()));
        // With drafts the nodes stay apart.
        let drafts = state.limits.drafts() > 0;
        if single && act == DType::BF16 && delta && value == 128 && !drafts {
            let mut parts = ops[ops.len() - 3..].to_vec();
            ops.push(one(parts.clone()));
            let hidden = tensor(Region::Workspace, act, tokens, 2048);
            let w = tensor(Region::Weights, act, 2 * heads, 2048);
            let weight = tensor(Region::Weights, DType::F32, 1, 2048);
            let norm = Some(Norm { weight, eps: 1e-6 });
            let made = LinearChain { norm, live, ..LinearChain::new(hidden, w, gates) };
            parts.insert(0, made.into());
            ops.push(one(parts));
        }
        ops.push(Op::from(Gated { gate: Gate::Sigmoid, norm: None, ..gated }));
    }
    ops
}

fn one(members: Vec<Op>) -> Op {
    Fused { members, kernel: FusedKernel::Recurrent }.into()
}
