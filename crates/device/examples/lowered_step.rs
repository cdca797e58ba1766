//! Prints a decode step (or, with `prefill`, a prefill step) of a Qwen3 shape as JSON: regions, named
//! spans, and for each op what it is lowered to. `tools/gpu` runs and times exactly these launches.
//!
//! `cargo run -p device --example lowered_step -- 8b|0.6b ROWS CONTEXT LAYERS decode|persistent|prefill`

use device::cuda::launch::Target;
use device::cuda::lower::{exchange_bytes, hand_on, lower, scratch_bytes, unfit_layers};
use device::op::{
    Activation, Attention, AttentionChain, Embed, Epilogue, Fused, FusedKernel, Gather, KvLayer,
    LinearChain, Lookup, Norm, Pairs, Prologue, RopeKv, Sample,
};
use device::variant::{Pick, UnknownVariant};
use device::{DType, Node, Op, OpenArena, Region, Span, StepLimits, StepState, Tensor};
use serde_json::{Value, json};
use std::str::FromStr;

struct Shape {
    hidden: u32,
    inter: u32,
    q_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    vocab: u32,
    tied: bool,
}

const SHAPES: [(&str, Shape); 3] = [
    (
        "8b",
        Shape {
            hidden: 4096,
            inter: 12288,
            q_heads: 32,
            kv_heads: 8,
            head_dim: 128,
            vocab: 151936,
            tied: false,
        },
    ),
    (
        "0.6b",
        Shape {
            hidden: 1024,
            inter: 3072,
            q_heads: 16,
            kv_heads: 8,
            head_dim: 128,
            vocab: 151936,
            tied: true,
        },
    ),
    (
        "tiny",
        Shape {
            hidden: 576,
            inter: 1536,
            q_heads: 9,
            kv_heads: 3,
            head_dim: 64,
            vocab: 49152,
            tied: true,
        },
    ),
];

struct Step {
    live: Span,
    arena: OpenArena,
    named: Vec<(String, Tensor)>,
    nodes: Vec<Node>,
}

impl Step {
    fn tensor(&mut self, region: Region, name: &str, rows: u32, cols: u32, dtype: DType) -> Tensor {
        let bytes = dtype.bytes(rows as usize * cols as usize) as u64;
        let span = self.arena.alloc(region, name, bytes);
        let tensor = Tensor::dense(span, dtype, rows, cols);
        self.named.push((name.into(), tensor));
        tensor
    }

    fn weight(&mut self, name: &str, rows: u32, cols: u32) -> Tensor {
        self.tensor(Region::Weights, name, rows, cols, DType::BF16)
    }

    fn push(&mut self, name: &str, layer: Option<u32>, mut op: Op) {
        if let Some(mut linear) = LinearChain::of(&op) {
            linear.live = Some(self.live);
            // VARIANT_qkv=…: the variant of one kind of node.
            if let Pick::Named(asked) = pick(&format!("VARIANT_{name}")) {
                linear.pick = Pick::Named(asked);
            }
            op = linear.into();
        }
        self.nodes.push(Node { op, name: name.into(), layer });
    }
}

fn linear(x: Tensor, w: Tensor, norm: Option<Norm>, epilogue: Epilogue, y: Tensor) -> Op {
    let pick = pick("VARIANT");
    Op::from(LinearChain { norm, epilogue, pick, ..LinearChain::new(x, w, y) })
}

/// The kernel that an environment variable asks for.
fn pick<V: FromStr<Err = UnknownVariant>>(variable: &str) -> Pick<V> {
    match std::env::var(variable) {
        Err(_) => Pick::Best,
        Ok(text) if text == "fixed" => Pick::Fixed,
        Ok(text) => Pick::Named(text.parse().expect("the name of a kernel")),
    }
}

/// The values that all layers share.
struct Values {
    x: Tensor,
    qkv: Tensor,
    attended: Tensor,
    act: Tensor,
    rope: Tensor,
    state: StepState,
}

/// The nodes of one layer.
fn push_layer(
    step: &mut Step,
    shape: &Shape,
    values: &Values,
    layer: u32,
    (rows, pages): (u32, u32),
    decode: bool,
) {
    let Values { x, qkv, attended, act, rope, state } = *values;
    let (hidden, dim) = (shape.hidden, shape.head_dim);
    let (q, qkv_cols) = (shape.q_heads * dim, (shape.q_heads + 2 * shape.kv_heads) * dim);
    let at = Some(layer);
    let mut norm = |name: &str, cols| Norm {
        weight: step.weight(&format!("{layer}.{name}"), 1, cols),
        eps: 1e-6,
    };
    let (n1, n2) = (norm("norm1", hidden), norm("norm2", hidden));
    let (qn, kn) = (norm("q_norm", dim), norm("k_norm", dim));
    let mut weight = |name: &str, rows, cols| step.weight(&format!("{layer}.{name}"), rows, cols);
    let (w_qkv, w_o) = (weight("qkv", qkv_cols, hidden), weight("o", hidden, q));
    let (w_up, w_down) =
        (weight("gate_up", 2 * shape.inter, hidden), weight("down", hidden, shape.inter));
    let bytes = u64::from(pages) * 2 * u64::from(shape.kv_heads * 16 * dim) * 2;
    let span = step.arena.alloc(Region::Kv, "kv", bytes);
    let kv = KvLayer {
        span,
        scales: None,
        dtype: DType::BF16,
        pages,
        page_size: 16,
        heads: shape.kv_heads,
        head_dim: dim,
        latent: None,
    };
    step.push("qkv", at, linear(x, w_qkv, Some(n1), Epilogue::Store, qkv));
    let rotated = RopeKv {
        qkv,
        out: qkv,
        q_heads: shape.q_heads,
        q_norm: Some(qn),
        k_norm: Some(kn),
        rope,
        pairs: Pairs::Halves,
        state,
        kv,
    };
    if !decode {
        step.push("rope_kv", at, Op::RopeKv(rotated.clone()));
    }
    let attention = Attention {
        qkv,
        q_heads: shape.q_heads,
        kv,
        state,
        out: attended,
        scale: (dim as f32).powf(-0.5),
        softcap: None,
        sinks: None,
        window: None,
        causal: true,
        rows,
        single: decode,
        even: None,
        last_only: false,
        scratch: None,
        pick: pick("ATTENTION"),
    };
    let rope = decode.then(|| Box::new(rotated));
    step.push("attention", at, Op::from(AttentionChain { attention, rope }));
    step.push("o", at, linear(attended, w_o, None, Epilogue::Residual(x), x));
    step.push("gate_up", at, linear(x, w_up, Some(n2), Epilogue::GateMul(Activation::Silu), act));
    step.push("down", at, linear(act, w_down, None, Epilogue::Residual(x), x));
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize| args[i].parse::<u32>().expect("a number");
    let (_, shape) = SHAPES.iter().find(|(name, _)| *name == args[0]).expect("a known shape");
    let (tokens, context, layers) = (number(1), number(2), number(3));
    let decode = args[4] != "prefill";
    // A prefill step is `tokens / 512` prompts of 512 tokens, or as many as ROWS says.
    let asked = std::env::var("ROWS").ok().map(|rows| rows.parse().expect("a number"));
    let rows = asked.unwrap_or(if decode { tokens } else { tokens.div_ceil(512) });
    let pages_per_seat = context.div_ceil(16) + 2;
    let limits = StepLimits {
        seats: rows.max(4),
        rows: rows.max(4),
        tokens,
        pages_per_seat,
        page_size: 16,
        vocab: shape.vocab,
        penalties: false,
        tokens_per_row: 1,
        tables: 1,
    };
    let mut arena = OpenArena::new();
    let state = StepState::lay_out(limits, |region, name, bytes| arena.alloc(region, name, bytes))
        .expect("limits of a few rows");
    let live = state.counts.span.part(u64::from(device::step::count::TOKENS) * 4, 4);
    let mut step = Step { live, arena, named: Vec::new(), nodes: Vec::new() };
    let (hidden, dim) = (shape.hidden, shape.head_dim);
    let (q, qkv_cols) = (shape.q_heads * dim, (shape.q_heads + 2 * shape.kv_heads) * dim);
    let pages = rows * pages_per_seat + 1;
    let work = |step: &mut Step, name: &str, rows, cols| {
        step.tensor(Region::Workspace, name, rows, cols, DType::BF16)
    };
    let x = work(&mut step, "x", tokens, hidden);
    let qkv = work(&mut step, "qkv", tokens, qkv_cols);
    let attended = work(&mut step, "attended", tokens, q);
    let act = work(&mut step, "act", tokens, shape.inter);
    let last = work(&mut step, "last", rows, hidden);
    let logits = step.tensor(Region::Workspace, "logits", rows, shape.vocab, DType::F32);
    let table = step.weight("embed", shape.vocab, hidden);
    let head = if shape.tied { table } else { step.weight("lm_head", shape.vocab, hidden) };
    let rope = step.tensor(Region::Weights, "rope", context + 32, dim, DType::F32);
    let final_norm = Norm { weight: step.weight("final_norm", 1, hidden), eps: 1e-6 };
    step.push("prologue", None, Op::Prologue(Prologue { state, rows, tokens, pages, given: None }));
    step.push(
        "embed",
        None,
        Op::Embed(Embed { by: Lookup::Token, ids: state.token, table, given: None, out: x }),
    );
    let values = Values { x, qkv, attended, act, rope, state };
    for layer in 0..layers {
        push_layer(&mut step, shape, &values, layer, (rows, pages), decode);
    }
    let mut head_in = x;
    if !decode {
        step.push("gather", None, Op::Gather(Gather { index: state.last_index, x, y: last }));
        head_in = last;
    }
    step.push("head", None, linear(head_in, head, Some(final_norm), Epilogue::Store, logits));
    step.push("sample", None, Op::Sample(Sample { logits, state, scratch: None, rows, q_len: 1 }));
    if args[4] == "persistent" {
        merge_layers(&mut step);
    }
    print(step, &state, shape, &limits);
}

/// All layers as one node.
fn merge_layers(step: &mut Step) {
    let at = step.nodes.iter().position(|node| node.layer.is_some()).expect("a layer");
    let nodes = std::mem::take(&mut step.nodes);
    let (layers, mut rest): (Vec<Node>, Vec<Node>) =
        nodes.into_iter().partition(|node| node.layer.is_some());
    let members: Vec<Op> = layers.into_iter().map(|node| node.op).collect();
    let one = |exchange| {
        let members = members.clone();
        Op::Fused(Fused { members, kernel: FusedKernel::Layers { exchange } })
    };
    let bytes = exchange_bytes(&one(None), &Target::h200());
    assert!(bytes > 0, "{:?}", unfit_layers(&one(None), &Target::h200()));
    let exchange = step.tensor(Region::State, "exchange", 1, bytes as u32, DType::U8).span;
    rest.insert(at, Node { op: one(Some(exchange)), name: "layers".into(), layer: None });
    step.nodes = rest;
}

fn print(mut step: Step, state: &StepState, shape: &Shape, limits: &StepLimits) {
    let target = Target::h200();
    // HAND=0: every norm is a separate launch.
    if std::env::var("HAND").as_deref() != Ok("0") {
        hand_on(&mut step.nodes, &target);
    }
    let need = step.nodes.iter().map(|node| scratch_bytes(&node.op, &target)).max().unwrap_or(0);
    let scratch = step.arena.alloc(Region::State, "scratch", need);
    let nodes: Vec<Value> = step
        .nodes
        .iter_mut()
        .map(|Node { name, layer, op }| {
            op.set_scratch(Some(scratch));
            op.check().expect("a valid op");
            let lowered = lower(op, &target).expect("a lowering");
            json!({ "name": name, "layer": layer, "lowered": lowered })
        })
        .collect();
    let regions: serde_json::Map<String, Value> = Region::ALL
        .iter()
        .map(|region| (json!(region).as_str().unwrap().into(), json!(step.arena.size(*region))))
        .collect();
    let named: serde_json::Map<String, Value> =
        step.named.iter().map(|(name, tensor)| (name.clone(), json!(tensor))).collect();
    let shape = json!({
        "hidden": shape.hidden, "inter": shape.inter, "q_heads": shape.q_heads,
        "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "vocab": shape.vocab,
    });
    let layout = limits.mail_layout();
    let mail = json!({ "rows": layout.rows, "tokens": layout.tokens, "joins": layout.joins,
        "pages": layout.pages, "words": layout.words, "entry": limits.ring_entry_words(),
        "entry_row": limits.ring_row_words() });
    let out = json!({ "shape": shape, "limits": limits, "state": state, "scratch": scratch,
        "mail": mail, "regions": regions, "named": named, "nodes": nodes });
    println!("{out}");
}
