//! Replaying on the CPU allocates nothing, with branches and loops, on any thread.

use allocs::{Counting, allocations};
use device::cpu::{self, pack};
use device::op::{
    Activation, Attention, AttentionChain, Embed, Epilogue, KvLayer, LinearChain, Lookup, Norm,
    Pairs, Prologue, RopeKv, Sample,
};
use device::step::{count, mail, row};
use device::{
    DType, Item, Node, Op, OpenArena, RecordOptions, Region, StepLimits, StepState, Tensor,
};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn node(op: Op) -> Item {
    Item::Node(Node { op, name: "node".into(), layer: None })
}

/// A whole decode step of one layer, packed and plain weights, inside an `If`.
#[test]
fn a_decode_step() {
    const ROWS: u32 = 3;
    const WIDTH: u32 = 64;
    const VOCAB: u32 = 320;
    let device = cpu::open(Some(2), false).expect("a CPU");
    let mut open = OpenArena::new();
    let limits = StepLimits {
        seats: ROWS,
        rows: ROWS,
        tokens: ROWS,
        pages_per_seat: 4,
        page_size: 16,
        vocab: VOCAB,
        penalties: true,
        tokens_per_row: 1,
        tables: 1,
    };
    let state = StepState::lay_out(limits, |region, name, bytes| open.alloc(region, name, bytes))
        .expect("limits of a few rows");
    let mut floats = |rows: u32, cols: u32| {
        let span = open.alloc(Region::Workspace, "floats", u64::from(rows * cols) * 4);
        Tensor::dense(span, DType::F32, rows, cols)
    };
    let (x, qkv, attended) = (floats(ROWS, WIDTH), floats(ROWS, 3 * WIDTH), floats(ROWS, WIDTH));
    let (hidden, logits) = (floats(ROWS, WIDTH), floats(ROWS, VOCAB));
    let (norm, rope, table) = (floats(1, WIDTH), floats(64, 32), floats(VOCAB, WIDTH));
    let packed = |open: &mut OpenArena, rows: u32, cols: u32| {
        let bytes = DType::P4.bytes((rows * cols) as usize) as u64;
        Tensor::dense(open.alloc(Region::Weights, "w", bytes), DType::P4, rows, cols)
    };
    let (w_qkv, w_out) = (packed(&mut open, 3 * WIDTH, WIDTH), packed(&mut open, WIDTH, WIDTH));
    let w_up = packed(&mut open, 2 * WIDTH, WIDTH);
    assert_eq!(pack::packed_dtype(DType::Q4_1, 192, 64), Some(DType::P4));
    let kv = KvLayer {
        span: state.ring,
        scales: None,
        latent: None,
        dtype: DType::F16,
        pages: 13,
        page_size: 16,
        heads: 2,
        head_dim: 32,
    };
    let kv = KvLayer { span: open.alloc(Region::Kv, "kv", 13 * kv.page_bytes()), ..kv };
    let cond = open.alloc(Region::State, "cond", 4);
    let norm = Some(Norm { weight: norm, eps: 1e-5 });
    let linear = |x: Tensor, w: Tensor, y: Tensor, epilogue: Epilogue| {
        node(Op::from(LinearChain { norm, epilogue, ..LinearChain::new(x, w, y) }))
    };
    let (q_norm, k_norm, pairs) = (None, None, Pairs::Halves);
    let rope = RopeKv { qkv, out: qkv, q_heads: 2, q_norm, k_norm, rope, pairs, state, kv };
    let attention = Attention {
        qkv,
        q_heads: 2,
        kv,
        state,
        out: attended,
        scale: 0.2,
        softcap: None,
        sinks: None,
        window: None,
        causal: true,
        rows: ROWS,
        single: true,
        even: None,
        last_only: false,
        scratch: None,
        pick: Default::default(),
    };
    let body = vec![
        node(Op::Prologue(Prologue { state, rows: ROWS, tokens: ROWS, pages: 13, given: None })),
        node(Op::Embed(Embed { by: Lookup::Token, ids: state.token, table, given: None, out: x })),
        linear(x, w_qkv, qkv, Epilogue::Store),
        node(Op::from(AttentionChain { attention, rope: Some(Box::new(rope)) })),
        linear(attended, w_out, x, Epilogue::Residual(x)),
        linear(x, w_up, hidden, Epilogue::GateMul(Activation::Silu)),
        linear(hidden, table, logits, Epilogue::Store),
        node(Op::Sample(Sample { logits, state, scratch: None, rows: ROWS, q_len: 1 })),
    ];
    let arena = device.seal(open).expect("memory");
    let mut recording = device.record(&arena, "step", RecordOptions::default()).expect("idle");
    recording.push(Item::If { cond, body }).expect("valid items");
    let graph = recording.finish().expect("a recording").remove(0);
    device.write(&arena, cond, &1u32.to_le_bytes()).expect("a write");
    // Launch 1 seats three rows; later launches continue without mail.
    let areas = limits.mail_layout();
    let mut bank = vec![0u32; areas.words as usize];
    bank[mail::LAUNCH_LO as usize] = 1;
    bank[mail::ROWS_CHANGED as usize] = 1;
    bank[mail::ROWS as usize] = ROWS;
    for r in 0..ROWS {
        let at = (areas.rows + 3 * r) as usize;
        bank[at..at + 3].copy_from_slice(&[r, 1, row::SAMPLE]);
    }
    let bytes: Vec<u8> = bank.iter().flat_map(|word| word.to_le_bytes()).collect();
    device.write(&arena, state.mail[1], &bytes).expect("a write");
    graph.replay().expect("a replay");
    // Allocations of the whole process are counted, and on a busy machine the test harness may still allocate; an
    // allocation of a replay would be in every round.
    let round = |_| {
        let before = allocations();
        (0..10).for_each(|_| graph.replay().expect("a replay"));
        allocations() - before
    };
    assert_eq!((0..5).map(round).min(), Some(0));
    let counts = device.read(&arena, state.counts.span).expect("a read");
    assert_eq!(counts[4 * count::LAUNCH_LO as usize], 51);
}
