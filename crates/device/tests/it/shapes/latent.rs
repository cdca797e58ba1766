//! The ops of latent attention in the shapes of DeepSeek-V2-Lite and of a small model.

use device::op::{HeadLinear, KvLayer, LatentAttention, LatentKv, Norm, Pairs};
use device::{DType, Op, Region, Span, StepState, Tensor};

/// Makes a tensor somewhere.
type Make<'a> = &'a mut dyn FnMut(Region, DType, u32, u32) -> Tensor;

/// The ops of a step with these tables; `live` counts its tokens.
pub(crate) fn ops(
    act: DType,
    state: StepState,
    (rows, tokens, single): (u32, u32, bool),
    (scratch, live): (Option<Span>, Option<Span>),
    tensor: Make<'_>,
) -> Vec<Op> {
    let mut ops = Vec::new();
    for (heads, latent, rotated, still, value) in [(16, 512, 64, 128, 128), (4, 24, 8, 16, 8)] {
        let (width, each) = (latent + rotated, still + rotated);
        let kv = KvLayer {
            span: tensor(Region::Kv, act, 64 * 16, width).span,
            scales: None,
            dtype: act,
            pages: 64,
            page_size: 16,
            heads: 1,
            head_dim: width,
            latent: Some(latent),
        };
        let x = tensor(Region::Workspace, act, tokens, heads * each + width);
        let q = tensor(Region::Workspace, act, tokens, heads * width);
        let out = tensor(Region::Workspace, act, tokens, heads * latent);
        let y = tensor(Region::Workspace, act, tokens, heads * value);
        let absorb = tensor(Region::Weights, act, heads * still, latent);
        let values = tensor(Region::Weights, act, heads * value, latent);
        let norm = Norm { weight: tensor(Region::Weights, act, 1, latent), eps: 1e-6 };
        let rope = tensor(Region::Weights, DType::F32, 4096, rotated);
        let turned = HeadLinear { x, w: absorb, heads, each, turned: true, y: q, live };
        ops.push(Op::HeadLinear(turned));
        let (from, pairs) = (heads * each, Pairs::Neighbours);
        ops.push(Op::LatentKv(LatentKv {
            q,
            out: q,
            heads,
            x,
            from,
            norm,
            rope,
            pairs,
            state,
            kv,
        }));
        let attention = LatentAttention {
            q,
            heads,
            kv,
            state,
            out,
            scale: 0.1,
            rows,
            single,
            even: None,
            last_only: false,
            scratch,
            pick: Default::default(),
        };
        ops.push(Op::LatentAttention(attention.clone()));
        if single && rows.is_multiple_of(2) {
            let (rows, even) = (rows / 2, Some(2));
            let drafts = LatentAttention { rows, even, single: false, ..attention };
            ops.push(Op::LatentAttention(drafts));
        }
        let each = latent;
        let made = HeadLinear { x: out, w: values, heads, each, turned: false, y, live };
        ops.push(Op::HeadLinear(made));
    }
    ops
}
