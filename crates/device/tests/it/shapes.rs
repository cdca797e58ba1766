//! The ops of real models at real sizes, without memory behind them.

mod experts;
mod latent;
mod recurrent;

use device::cuda::launch::{Lowered, Target};
use device::cuda::lower::lower;
use device::op::*;
use device::variant::{LinearVariant, Pick};
use device::{DType, Op, OpenArena, Region, StepLimits, StepState, Tensor, scaled};
#[allow(unused_imports, reason = "not every test that shares the shapes has experts")]
pub(crate) use experts::{EXPERT_LAYERS, expert_ops};

/// The sizes that decide a decoder's ops.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Model {
    #[allow(dead_code, reason = "not every test that shares the shapes names them")]
    pub(crate) name: &'static str,
    pub(crate) hidden: u32,
    pub(crate) inner: u32,
    pub(crate) heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) vocab: u32,
    pub(crate) head_norms: bool,
    pub(crate) bias: bool,
    pub(crate) act: Activation,
    pub(crate) softcap: Option<f32>,
    pub(crate) weights: DType,
}

const QWEN3_8B: Model = Model {
    name: "qwen3-8b",
    hidden: 4096,
    inner: 12_288,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    vocab: 151_936,
    head_norms: true,
    bias: false,
    act: Activation::Silu,
    softcap: None,
    weights: DType::BF16,
};

pub(crate) const MODELS: [Model; 11] = [
    Model {
        name: "qwen3-0.6b",
        hidden: 1024,
        inner: 3072,
        heads: 16,
        kv_heads: 8,
        head_dim: 128,
        vocab: 151_936,
        head_norms: true,
        bias: false,
        act: Activation::Silu,
        softcap: None,
        weights: DType::BF16,
    },
    QWEN3_8B,
    Model {
        name: "llama-3.2-1b",
        hidden: 2048,
        inner: 8192,
        heads: 32,
        kv_heads: 8,
        head_dim: 64,
        vocab: 128_256,
        head_norms: false,
        bias: false,
        act: Activation::Silu,
        softcap: None,
        weights: DType::BF16,
    },
    Model {
        name: "smollm2-135m",
        hidden: 576,
        inner: 1536,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        vocab: 49_152,
        head_norms: false,
        bias: false,
        act: Activation::Silu,
        softcap: None,
        weights: DType::Q4_1,
    },
    Model {
        name: "qwen2.5-0.5b",
        hidden: 896,
        inner: 4864,
        heads: 14,
        kv_heads: 2,
        head_dim: 64,
        vocab: 151_936,
        head_norms: false,
        bias: true,
        act: Activation::Silu,
        softcap: None,
        weights: DType::F16,
    },
    Model {
        name: "gemma-3-1b",
        hidden: 1152,
        inner: 6912,
        heads: 4,
        kv_heads: 1,
        head_dim: 256,
        vocab: 262_144,
        head_norms: true,
        bias: false,
        act: Activation::GeluTanh,
        softcap: None,
        weights: DType::BF16,
    },
    Model {
        name: "gemma-2-2b",
        hidden: 2304,
        inner: 9216,
        heads: 8,
        kv_heads: 4,
        head_dim: 256,
        vocab: 256_000,
        head_norms: false,
        bias: false,
        act: Activation::GeluTanh,
        softcap: Some(50.0),
        weights: DType::BF16,
    },
    Model { name: "qwen3-8b fp8", weights: DType::F8Block, ..QWEN3_8B },
    Model { name: "qwen3-8b fp8 by rows", weights: DType::F8Row, bias: true, ..QWEN3_8B },
    Model { name: "qwen3-8b int4", weights: DType::I4, ..QWEN3_8B },
    Model { name: "qwen3-8b int4 by 32", weights: DType::I4G32, ..QWEN3_8B },
];

/// Scratch that every op is given; an op that needs more would be a mistake.
pub(crate) const SCRATCH: u64 = 1 << 30;

/// Rows and tokens of a bucket, and whether every row has one token.
pub(crate) const BUCKETS: [(u32, u32, bool); 19] = [
    (1, 1, true),
    (2, 2, true),
    (4, 4, true),
    (8, 8, true),
    (16, 16, true),
    (24, 24, true),
    (32, 32, true),
    (40, 40, true),
    (48, 48, true),
    (64, 64, true),
    (80, 80, true),
    (104, 104, true),
    (128, 128, true),
    (168, 168, true),
    (224, 224, true),
    (256, 256, true),
    (4, 128, false),
    (16, 512, false),
    (32, 2048, false),
];

/// Every op of one layer, the head, prologue and sampler, for a bucket.
pub(crate) fn ops(model: &Model, rows: u32, tokens: u32, single: bool) -> Vec<Op> {
    let mut open = OpenArena::new();
    let limits = StepLimits {
        seats: 256,
        rows: 256,
        tokens: 2048,
        pages_per_seat: 256,
        page_size: 16,
        vocab: model.vocab,
        penalties: true,
        tokens_per_row: 1,
        tables: 1,
    };
    let mut lay_out = |limits| {
        let alloc = |region, name, bytes| open.alloc(region, name, bytes);
        StepState::lay_out(limits, alloc).expect("limits of a few rows")
    };
    let state = lay_out(limits);
    let several = lay_out(StepLimits { tokens_per_row: 9, ..limits });
    let tables = lay_out(StepLimits { tables: 3, ..limits });
    let publishing = {
        let alloc = |region, name: &'static str, bytes| open.alloc(region, name, bytes);
        state.with_vectors(model.hidden, alloc)
    };
    let drafting = {
        let alloc = |region, name: &'static str, bytes| open.alloc(region, name, bytes);
        several.with_drafting(alloc).exchanged().expect("tables of both models")
    };
    let (token, drafted) = (3 * model.hidden, model.hidden);
    let with_scales = scaled::is_scaled(model.weights);
    let dtype = if model.weights == DType::BF16 || with_scales { DType::BF16 } else { DType::F32 };
    let shape = device::step::FeatureShape { token, drafted, dtype, ids: Some(32_000) };
    let reading = {
        let alloc = |region, name: &'static str, bytes| open.alloc(region, name, bytes);
        drafting.with_features(shape, alloc)
    };
    // Activations are bf16 beside bf16 weights and those with scales, f32 beside others.
    let with_scales = scaled::is_scaled(model.weights);
    let act = if model.weights == DType::BF16 || with_scales { DType::BF16 } else { DType::F32 };
    let mut tensor = |region, dtype: DType, rows: u32, cols: u32| {
        let bytes = dtype.matrix_bytes(rows as usize, cols as usize) as u64;
        Tensor::dense(open.alloc(region, "tensor", bytes), dtype, rows, cols)
    };
    let Model { hidden, inner, heads, kv_heads, head_dim, vocab, weights, .. } = *model;
    let (q, qkv_cols) = (heads * head_dim, (heads + 2 * kv_heads) * head_dim);
    let mut value = |rows, cols| tensor(Region::Workspace, act, rows, cols);
    let (x, y, qkv, mix, mid, gates) = (
        value(tokens, hidden),
        value(tokens, hidden),
        value(tokens, qkv_cols),
        value(tokens, q),
        value(tokens, inner),
        value(tokens, 2 * inner),
    );
    let (last, logits) = (value(rows, hidden), value(rows, vocab));
    let (joined, made) = (value(tokens, 3 * hidden), value(tokens, hidden));
    let mut weight = |dtype, rows, cols| tensor(Region::Weights, dtype, rows, cols);
    let whole = if with_scales { DType::BF16 } else { weights };
    let pairs = if weights == DType::F8Block { DType::F8Pairs } else { weights };
    let (embed, w_qkv, w_out, w_up, w_down, head) = (
        weight(whole, vocab, hidden),
        weight(weights, qkv_cols, hidden),
        weight(weights, hidden, q),
        weight(pairs, 2 * inner, hidden),
        weight(weights, hidden, inner),
        weight(whole, vocab, hidden),
    );
    let norm_dtype = if act == DType::BF16 { DType::BF16 } else { DType::F32 };
    let mut norm = |cols| Norm { weight: tensor(Region::Weights, norm_dtype, 1, cols), eps: 1e-6 };
    let (norm1, norm2, norm3) = (norm(hidden), norm(hidden), norm(hidden));
    let (q_norm, k_norm) = (norm(head_dim), norm(head_dim));
    let k_part = norm(kv_heads * head_dim);
    let bias = model.bias.then(|| tensor(Region::Weights, DType::F32, 1, qkv_cols));
    // Four adapters of rank 16.
    let mut adapters = |k, n, parts: u32| {
        let a = tensor(Region::Weights, act, 4 * parts * 16, k);
        (a, tensor(Region::Weights, act, 4 * n, 16))
    };
    let (lora_qkv, lora_up) = (adapters(hidden, qkv_cols, 3), adapters(hidden, 2 * inner, 2));
    let lora_head = adapters(hidden, vocab, 1);
    let rope = tensor(Region::Weights, DType::F32, 4096, head_dim);
    let pages = if with_scales { DType::E4M3 } else { DType::BF16 };
    let kv = KvLayer {
        span: tensor(Region::Kv, pages, 64 * 16, 2 * kv_heads * head_dim).span,
        scales: with_scales.then(|| tensor(Region::Weights, DType::F32, 2, kv_heads).span),
        dtype: pages,
        pages: 64,
        page_size: 16,
        heads: kv_heads,
        head_dim,
        latent: None,
    };
    let scratch = Some(tensor(Region::State, DType::U8, 1, SCRATCH as u32).span);
    let live = Some(state.counts.span.part(u64::from(device::step::count::TOKENS) * 4, 4));
    let product = |x, w, norm, bias, epilogue, y, handoff| {
        Op::from(LinearChain {
            bias,
            norm,
            epilogue,
            live,
            handoff,
            scratch,
            ..LinearChain::new(x, w, y)
        })
    };
    let linear = |x, w, norm, bias, epilogue, y| {
        product(x, w, norm, bias, epilogue, y, NormHandoff::Nothing)
    };
    let head_norms = |norm| model.head_norms.then_some(norm);
    let rope_kv = RopeKv {
        qkv,
        out: qkv,
        q_heads: heads,
        q_norm: head_norms(q_norm),
        k_norm: head_norms(k_norm),
        rope,
        pairs: Pairs::Halves,
        state,
        kv,
    };
    let attention = |rope, window| {
        let attention = Attention {
            qkv,
            q_heads: heads,
            kv,
            state,
            out: mix,
            scale: 0.125,
            softcap: model.softcap,
            sinks: None,
            window,
            causal: true,
            rows,
            single,
            even: None,
            last_only: false,
            scratch,
            pick: Default::default(),
        };
        Op::from(AttentionChain { attention, rope })
    };
    let ids = Tensor { cols: tokens, stride: tokens, ..state.token };
    let index = Tensor { cols: rows, stride: rows, ..state.last_index };
    let mut ops = vec![
        Op::Prologue(Prologue { state, rows, tokens, pages: 64, given: None }),
        Op::Embed(Embed { by: Lookup::Token, ids, table: embed, given: None, out: x }),
        Op::Embed(Embed { by: Lookup::Token, ids, table: embed, given: Some(y), out: x }),
        Op::RmsNorm(RmsNorm { x, norm: norm1, y }),
        Op::RmsNormColumns(RmsNormColumns { x: qkv, from: q, norm: k_part, y: qkv }),
        Op::LayerNorm(LayerNorm {
            x,
            weight: norm1.weight,
            bias: Some(norm2.weight),
            eps: 1e-5,
            y,
        }),
        Op::LayerNorm(LayerNorm { x, weight: norm1.weight, bias: None, eps: 1e-5, y: x }),
        linear(x, w_qkv, Some(norm1), bias, Epilogue::Store, qkv),
        linear(y, w_qkv, None, None, Epilogue::Store, qkv),
        Op::RopeKv(rope_kv.clone()),
        attention(None, None),
        attention(None, Some(512)),
        linear(mix, w_out, None, None, Epilogue::Residual(x), x),
        linear(x, w_up, Some(norm2), None, Epilogue::GateMul(model.act), mid),
        linear(mid, w_down, None, None, Epilogue::Residual(x), x),
        Op::Add(Add { a: x, b: y, y: x, live }),
        Op::AddGated(AddGated { a: x, b: y, x: y, w: norm1.weight, y: x, live }),
        Op::GateMul(GateMul { x: gates, act: model.act, y: mid, live }),
        Op::Scale(Scale { x, factor: 12.0, cap: None, y: x, live }),
        Op::Gather(Gather { index, x, y: last }),
        linear(last, head, Some(norm3), None, Epilogue::Store, logits),
        Op::Scale(Scale { x: logits, factor: 1.0, cap: Some(30.0), y: logits, live: None }),
        Op::Sample(Sample { logits, state, scratch, rows, q_len: 1 }),
        Op::Sample(Sample { logits, state: several, scratch, rows, q_len: 1 }),
        Op::Noise(Noise { to: x, seed: 1, mean: 0.0, scale: 0.02 }),
    ];
    let ends = vec![q, q + kv_heads * head_dim, qkv_cols];
    for (x, base, (a, b), parts, by_row) in [
        (x, qkv, lora_qkv, LoraParts::Stacked(ends), false),
        (x, gates, lora_up, LoraParts::Turns(2), false),
        (last, logits, lora_head, LoraParts::Stacked(vec![vocab]), true),
    ] {
        let live = if by_row { None } else { live };
        ops.push(Op::Lora(Lora { x, base, a, b, parts, y: base, state, by_row, live, scratch }));
    }
    // Fewer rows with drafts.
    for state in [several, tables] {
        ops.push(Op::Prologue(Prologue { state, rows, tokens, pages: 64, given: None }));
    }
    let q_len = if rows < 8 { 2 } else { 4 };
    if rows.is_multiple_of(q_len) {
        let state = several;
        ops.push(Op::Draft(Draft { state, rows: rows / q_len, q_len }));
        let proposed = |index| {
            let (state, drafts, rows) = (drafting, q_len - 1, rows / q_len);
            let logits = Tensor { rows, ..logits };
            Op::Propose(Propose { logits, behind: 0, state, rows, index, drafts })
        };
        let (drafts, each) = (q_len - 1, 2);
        let first = DraftRows { each, behind: 0, state: drafting, rows: rows / q_len, drafts };
        ops.push(Op::DraftRows(first));
        ops.extend((0..drafts).map(proposed));
        // What a head has that reads hidden states.
        let (few, behind, index) = (rows / q_len, 1, 0);
        let head = |state, rows| {
            let some = Tensor { cols: 32_000, rows, ..logits };
            [
                Op::DraftRows(DraftRows { each: 1, behind, state, rows, drafts }),
                Op::Propose(Propose { logits: some, behind, state, rows, index, drafts }),
                Op::Tap(Tap { x, to: Kept::Token(hidden), state }),
                Op::Tap(Tap { x: Tensor { rows, ..x }, to: Kept::Row, state }),
                Op::Recall(Recall { drafted: true, y: Tensor { rows, ..x }, state }),
                Op::Recall(Recall { drafted: false, y: Tensor { rows, ..x }, state }),
                Op::Follow(Follow { x: None, own: true, y: joined, state }),
                Op::Follow(Follow { x: Some(x), own: false, y: made, state }),
            ]
        };
        ops.extend(head(reading, few));
        ops.push(Op::Sample(Sample { logits, state, scratch, rows: rows / q_len, q_len }));
        for window in [None, Some(65)].into_iter().filter(|_| single) {
            let Op::Attention(op) = attention(None, window) else { unreachable!() };
            let (rows, even) = (rows / q_len, Some(q_len));
            ops.push(Op::Attention(Attention { rows, even, single: false, ..op }));
        }
    }
    // What encoders have.
    ops.push(Op::Embed(Embed { by: Lookup::Low(7), ids, table: embed, given: None, out: x }));
    ops.push(Op::Embed(Embed { by: Lookup::High(7), ids, table: embed, given: None, out: x }));
    let others = [Activation::Gelu, Activation::Tanh, Activation::Relu, Activation::ReluSquared];
    for act in others.into_iter().chain([Activation::Silu]) {
        ops.push(Op::Activate(Activate { x: mid, act, y: mid, live }));
    }
    ops.push(Op::GateMul(GateMul { x: gates, act: Activation::Gelu, y: mid, live }));
    for (pooling, unit) in [(Pooling::Mean, true), (Pooling::First, false), (Pooling::Last, true)] {
        ops.push(Op::Pool(Pool { x, pooling, unit, state, y: last }));
    }
    ops.push(Op::Publish(Publish { vectors: last, state: publishing }));
    if !single {
        for window in [None, Some(65)] {
            let Op::Attention(op) = attention(None, window) else { unreachable!() };
            ops.push(Op::Attention(Attention { causal: false, ..op }));
        }
    }
    // Learned scores beside those of keys, in each kernel of attention.
    for window in [None, Some(65)] {
        let Op::Attention(op) = attention(None, window) else { unreachable!() };
        let dtype = if single { DType::F32 } else { act };
        let sinks = Some(tensor(Region::Weights, dtype, 1, heads));
        ops.push(Op::Attention(Attention { sinks, ..op }));
    }
    ops.extend(latent::ops(act, state, (rows, tokens, single), (scratch, live), &mut tensor));
    for state in [state, several] {
        ops.extend(recurrent::ops(
            act,
            state,
            (rows, tokens, single, 1),
            (scratch, live),
            &mut tensor,
        ));
    }
    if rows.is_multiple_of(q_len) {
        let size = (rows / q_len, rows, false, q_len);
        ops.extend(recurrent::ops(act, several, size, (scratch, live), &mut tensor));
    }
    // Linears that prepare the input of the next one, and those that find it prepared.
    let (gives2, gives3) = (NormHandoff::Produce(norm2), NormHandoff::Produce(norm3));
    ops.push(product(mix, w_out, None, None, Epilogue::Residual(x), x, gives2));
    ops.push(product(
        x,
        w_up,
        Some(norm2),
        None,
        Epilogue::GateMul(model.act),
        mid,
        NormHandoff::Consume,
    ));
    ops.push(product(mid, w_down, None, None, Epilogue::Residual(x), x, gives3));
    ops.push(product(x, w_qkv, Some(norm1), bias, Epilogue::Store, qkv, NormHandoff::Consume));
    if !single {
        // And one that rotates its result.
        let last = ops.last().cloned();
        if let Some(taker) = last.as_ref().and_then(LinearChain::of) {
            let rope = Some(Box::new(rope_kv.clone()));
            ops.push(Op::from(LinearChain { rope: rope.clone(), ..taker.clone() }));
            ops.push(Op::from(LinearChain {
                rope,
                pick: Pick::Named(LinearVariant::Tiles),
                ..taker
            }));
        }
    }
    if single {
        // Prologue and sampler of a launch that repeats.
        let state = StepState { repeats: true, ..state };
        ops.push(Op::Prologue(Prologue { state, rows, tokens, pages: 64, given: None }));
        ops.push(Op::Sample(Sample { logits, state, scratch, rows, q_len: 1 }));
        let attend = attention(Some(Box::new(rope_kv)), None);
        let layer = [
            linear(x, w_qkv, Some(norm1), bias, Epilogue::Store, qkv),
            attend.clone(),
            linear(mix, w_out, None, None, Epilogue::Residual(x), x),
            linear(x, w_up, Some(norm2), None, Epilogue::GateMul(model.act), mid),
            linear(mid, w_down, None, None, Epilogue::Residual(x), x),
        ];
        let exchange = Some(tensor(Region::State, DType::U8, 1, 8 << 20).span);
        ops.push(attend);
        let members = [layer.clone(), layer].concat();
        ops.push(Op::Fused(Fused { members, kernel: FusedKernel::Layers { exchange } }));
    }
    ops
}

/// A linear with weights of `dtype`, with scratch.
pub(crate) fn linear(dtype: DType, (rows, n, k): (u32, u32, u32)) -> Op {
    let mut open = OpenArena::new();
    let mut tensor = |region, dtype: DType, rows: u32, cols: u32| {
        let bytes = dtype.matrix_bytes(rows as usize, cols as usize) as u64;
        Tensor::dense(open.alloc(region, "tensor", bytes), dtype, rows, cols)
    };
    let x = tensor(Region::Workspace, DType::BF16, rows, k);
    let y = tensor(Region::Workspace, DType::BF16, rows, n);
    let w = tensor(Region::Weights, dtype, n, k);
    let scratch = Some(tensor(Region::State, DType::U8, 1, SCRATCH as u32).span);
    Op::Linear(Linear { scratch, ..Linear::new(x, w, y) })
}

/// The linears and attention with fixed kernels; those with a norm, handoff or rotation are left out: fixed kernels
/// never have them.
#[allow(dead_code, reason = "not every test that shares the shapes wants them")]
pub(crate) fn fixed(ops: Vec<Op>) -> Vec<Op> {
    let unfused = |op: &Op| {
        let linear =
            |op: LinearChain| op.norm.is_none() && op.handoff.is_nothing() && op.rope.is_none();
        LinearChain::of(op).is_some_and(linear)
            || matches!(op, Op::Attention(_) | Op::LatentAttention(_))
    };
    let mut ops: Vec<Op> = ops.into_iter().filter(unfused).collect();
    for op in &mut ops {
        assert!(op.set_pick(Pick::Fixed), "linears and attention have kernels to pick from");
    }
    ops
}

/// What an op is lowered to; `None` if it is fused in a way that the target has no kernel for.
#[allow(dead_code, reason = "not every test that shares the shapes lowers them")]
pub(crate) fn lowered(op: &Op, target: &Target) -> Option<Vec<Lowered>> {
    let fused = LinearChain::of(op)
        .map(|op| !op.handoff.is_nothing() || op.rope.is_some())
        .unwrap_or(matches!(op.name(), "layers" | "expert_layer" | "recurrent"));
    match lower(op, target) {
        Ok(lowered) => Some(lowered),
        Err(_) if fused => None,
        Err(problem) => panic!("{}: {problem}", op.name()),
    }
}
