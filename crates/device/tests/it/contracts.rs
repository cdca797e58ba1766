//! What safe calls refuse: ops whose spans are too short, misplaced or overlapping, conditions that are not words,
//! mail outside of shared memory, limits that no table can have. And what the prologue clamps.

use crate::devices;
use crate::shapes;
use device::cuda::launch::{Lowered, Target};
use device::cuda::lower::{SEMAPHORE_BYTES, lower, scratch_bytes};
use device::mail::{MailBank, MailRow, Mapped, Words};
use device::op::{Fill, Prologue};
use device::ops::Access;
use device::step::{PARAM_WORDS, count, row};
use device::{
    Error, Item, Node, Op, OpenArena, RecordOptions, Region, Span, StepLimits, StepState, Tensor,
};
use serde_json::{Value, json};
use std::sync::atomic::Ordering;

/// The places of all spans in an op's JSON.
fn places(value: &Value, at: String, found: &mut Vec<String>) {
    let inside: Vec<(String, &Value)> = match value {
        Value::Object(map) if map.contains_key("region") => {
            found.push(at.clone());
            return;
        }
        Value::Object(map) => map.iter().map(|(key, value)| (key.clone(), value)).collect(),
        Value::Array(list) => list.iter().enumerate().map(|(i, v)| (i.to_string(), v)).collect(),
        _ => return,
    };
    for (key, value) in inside {
        places(value, format!("{at}/{key}"), found);
    }
}

/// The op with the span at `place` changed.
fn tampered(op: &Value, place: &str, change: impl FnOnce(&mut Span)) -> Op {
    let mut value = op.clone();
    let there = value.pointer_mut(place).expect("a place that was found");
    let mut span: Span = serde_json::from_value(there.clone()).expect("a span");
    change(&mut span);
    *there = json!(span);
    serde_json::from_value(value).expect("an op")
}

fn small_ops() -> Vec<Op> {
    let mut ops = shapes::ops(&shapes::MODELS[0], 4, 4, true);
    ops.extend(shapes::ops(&shapes::MODELS[0], 4, 128, false));
    // One of them with a soft cap.
    let capped = shapes::ops(&shapes::MODELS[6], 4, 4, true).into_iter();
    ops.extend(capped.filter(|op| op.name() == "attention").take(1));
    ops.extend(shapes::expert_ops(&shapes::EXPERT_LAYERS[1], 4));
    // Members of layers are already in this list as separate ops.
    ops.retain(|op| op.name() != "layers");
    ops
}

#[test]
fn what_kernels_are_made_for_is_allowed() {
    for model in shapes::MODELS {
        for (rows, tokens, single) in shapes::BUCKETS {
            for op in shapes::ops(&model, rows, tokens, single) {
                op.check().unwrap_or_else(|problem| panic!("{problem}: {op:?}"));
            }
        }
    }
}

/// Every span of every op: no shorter than what the op accesses of it, and aligned for kernels.
#[test]
fn spans_that_are_short_or_misaligned_are_refused() {
    let mut tried = 0;
    for op in small_ops() {
        let value = json!(op);
        let mut found = Vec::new();
        places(&value, String::new(), &mut found);
        for place in found {
            // Scratch that is too short is not used.
            if !place.ends_with("/scratch") {
                let short = tampered(&value, &place, |span| span.len = 2);
                assert!(short.check().is_err(), "{} with {place} of 2 bytes", op.name());
            }
            let shifted = tampered(&value, &place, |span| {
                span.offset += 1;
                span.len += 1024;
            });
            assert!(shifted.check().is_err(), "{} with {place} at an odd byte", op.name());
            tried += 1;
        }
    }
    assert!(tried > 300, "{tried} spans");
}

/// No output of an op may overlap anything else that it touches.
#[test]
fn overlaps_are_refused() {
    let mut tried = 0;
    for op in small_ops() {
        let value = json!(op);
        let (mut touched, mut written) = (Vec::new(), Vec::new());
        op.visit_spans(&mut |span, access| {
            touched.push(span);
            if access != Access::Read {
                written.push(span);
            }
        });
        let mut found = Vec::new();
        places(&value, String::new(), &mut found);
        for place in found {
            let own: Span = serde_json::from_value(value.pointer(&place).unwrap().clone()).unwrap();
            // Not every op uses every table of the state.
            let others = written.iter().filter(|target| !target.overlaps(own));
            for &target in others.filter(|_| touched.contains(&own)) {
                let over = tampered(&value, &place, |span| {
                    span.region = target.region;
                    // In the middle of the output, aligned for kernels.
                    span.offset = target.offset + target.len / 512 * 256;
                });
                assert!(over.check().is_err(), "{} with {place} inside {target:?}", op.name());
                tried += 1;
            }
        }
    }
    assert!(tried > 1000, "{tried} pairs");
}

#[test]
fn shapes_that_would_divide_by_nothing_or_overflow_are_refused() {
    let changes: [(&str, Value); 12] = [
        ("/kv/heads", json!(0)),
        ("/kv/head_dim", json!(0)),
        ("/kv/page_size", json!(0)),
        ("/kv/page_size", json!(32)),
        ("/kv/pages", json!(u32::MAX)),
        ("/kv/dtype", json!("u8")),
        ("/qkv/rows", json!(0)),
        ("/q_heads", json!(u32::MAX)),
        ("/cap", json!(0.0)),
        ("/cap", json!(-30.0)),
        ("/softcap", json!(0.0)),
        ("/state/limits/pages_per_seat", json!(u32::MAX)),
    ];
    for op in small_ops() {
        let value = json!(op);
        for (place, to) in &changes {
            let mut changed = value.clone();
            let Some(there) = changed.pointer_mut(place) else { continue };
            *there = to.clone();
            let changed: Op = serde_json::from_value(changed).expect("an op");
            assert!(changed.check().is_err(), "{} with {place} {to}", op.name());
        }
    }
}

#[test]
fn a_condition_is_a_word() {
    for device in devices::all() {
        let mut open = OpenArena::new();
        let words = open.alloc(Region::State, "words", 64);
        let arena = device.seal(open).expect("a few bytes");
        for (offset, len, allowed) in [(0, 4, true), (8, 4, true), (0, 2, false), (2, 4, false)] {
            let cond = words.part(offset, len);
            let op = Op::Fill(Fill { to: words.part(0, 4), word: 0 });
            let body = vec![Item::Node(Node { op, name: "end".into(), layer: None })];
            for item in [Item::If { cond, body: body.clone() }, Item::While { cond, body }] {
                let mut recording =
                    device.record(&arena, "test", RecordOptions::default()).expect("idle");
                assert_eq!(recording.push(item).is_ok(), allowed, "{len} bytes at {offset}");
            }
        }
    }
}

#[test]
fn only_shared_memory_is_mapped() {
    for device in devices::all() {
        let mut open = OpenArena::new();
        let spans = Region::ALL.map(|region| open.alloc(region, "words", 64));
        let arena = device.seal(open).expect("a few bytes");
        for span in spans {
            let mapped = Mapped::new(&arena, span).is_ok();
            assert_eq!(mapped, span.region == Region::HostMapped, "{}", span.region.name());
        }
        let shared = spans[Region::HostMapped as usize];
        assert!(matches!(Mapped::new(&arena, shared.part(2, 8)), Err(Error::Contract { .. })));
        // No matrix may lie where the host may write at any time.
        let to = Tensor::dense(shared, device::DType::F32, 1, 16);
        let noise = device::op::Noise { to, seed: 1, mean: 0.0, scale: 1.0 };
        assert!(matches!(Op::Noise(noise).check(), Err(Error::Contract { .. })));
    }
}

/// Two writers of one span, a reader and a device that copies it: words are never torn.
#[test]
fn writers_of_the_same_words_do_not_tear_them() {
    let device = device::cpu::open(Some(1), false).expect("a CPU");
    let mut open = OpenArena::new();
    let shared = open.alloc(Region::HostMapped, "words", 1024);
    let copy = open.alloc(Region::State, "copy", 1024);
    let arena = device.seal(open).expect("a few bytes");
    let whole = |word: u32| word == 0 || word == 0x1111_1111 || word == 0x2222_2222;
    std::thread::scope(|scope| {
        for word in [0x1111_1111, 0x2222_2222] {
            let mapped = Mapped::new(&arena, shared).expect("shared memory");
            scope.spawn(move || (0..500).for_each(|_| mapped.put(0, &[word; 256])));
        }
        let mapped = Mapped::new(&arena, shared).expect("shared memory");
        for _ in 0..200 {
            assert!((0..256).all(|i| whole(mapped.get(i, Ordering::Relaxed))));
            device.copy(&arena, shared, copy).expect("idle");
            for span in [shared, copy] {
                let bytes = device.read(&arena, span).expect("idle");
                let words =
                    bytes.chunks_exact(4).map(|b| u32::from_ne_bytes(b.try_into().unwrap()));
                assert!(words.into_iter().all(whole));
            }
        }
    });
}

fn limits() -> StepLimits {
    StepLimits {
        seats: 4,
        rows: 4,
        tokens: 32,
        pages_per_seat: 4,
        page_size: 16,
        vocab: 64,
        penalties: true,
        tokens_per_row: 1,
        tables: 1,
    }
}

#[test]
fn limits_that_no_table_can_have_are_refused() {
    let huge = [
        StepLimits { rows: 1 << 16, pages_per_seat: 1 << 16, ..limits() },
        StepLimits { rows: u32::MAX, ..limits() },
        StepLimits { seats: u32::MAX, ..limits() },
        StepLimits { pages_per_seat: 1 << 28, ..limits() },
        StepLimits { page_size: 1 << 30, ..limits() },
        StepLimits { rows: 1 << 14, vocab: u32::MAX, ..limits() },
        StepLimits { tokens: u32::MAX, ..limits() },
        StepLimits { rows: u32::MAX, pages_per_seat: u32::MAX, page_size: u32::MAX, ..limits() },
        StepLimits { page_size: 0, ..limits() },
        StepLimits { vocab: 0, ..limits() },
        StepLimits { tokens_per_row: 0, ..limits() },
        StepLimits { tokens_per_row: u32::MAX, ..limits() },
    ];
    for limits in huge {
        let refused = |problem: &Error| matches!(problem, Error::Limits { .. });
        assert!(limits.check().is_err_and(|problem| refused(&problem)), "{limits:?}");
        let mut open = OpenArena::new();
        let state =
            StepState::lay_out(limits, |region, name, bytes| open.alloc(region, name, bytes));
        assert!(state.is_err_and(|problem| refused(&problem)), "{limits:?}");
    }
    // The limits of a large server: 1,024 rows, a context of a million tokens, a vocabulary of 256 thousand.
    let large = StepLimits {
        seats: 1024,
        rows: 1024,
        tokens: 16384,
        pages_per_seat: 65536,
        page_size: 16,
        vocab: 262_144,
        penalties: true,
        tokens_per_row: 1,
        tables: 1,
    };
    assert_eq!(large.check(), Ok(()));
    assert!(large.mail_layout().words > 200_000_000);
}

#[test]
fn an_arena_that_cannot_be_is_out_of_memory() {
    let device = device::cpu::open(Some(1), false).expect("a CPU");
    for sizes in [[u64::MAX, 1], [1 << 63, 1 << 63]] {
        let mut open = OpenArena::new();
        for bytes in sizes {
            open.alloc(Region::Weights, "weights", bytes);
        }
        assert!(matches!(device.seal(open), Err(Error::OutOfMemory { .. })));
    }
    let mut open = OpenArena::new();
    let words = open.alloc(Region::State, "words", 64);
    let arena = device.seal(open).expect("a few bytes");
    let claims = Span { len: u64::MAX / 2, ..words };
    assert!(matches!(device.read(&arena, claims), Err(Error::OutsideArena { .. })));
}

fn words(bytes: Vec<u8>) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_ne_bytes(b.try_into().unwrap())).collect()
}

/// Whatever lengths, pages and seats mail contains, the tables that other ops trust stay in range. Both as a decode
/// step and as one with a prompt.
#[test]
fn the_prologue_clamps_what_mail_says() {
    for device in devices::all() {
        for prompt in [false, true] {
            let limits = limits();
            let mut open = OpenArena::new();
            let state =
                StepState::lay_out(limits, |region, name, bytes| open.alloc(region, name, bytes))
                    .expect("limits of a few rows");
            let arena = device.seal(open).expect("a few bytes");
            let mut mail = MailBank::new(&arena, &state).expect("shared memory");
            let mut letter = mail.open(1, 0).expect("the first bank is free");
            let params = [0; PARAM_WORDS as usize];
            let context = limits.pages_per_seat * limits.page_size;
            let lengths = [5, context, u32::MAX, context - 1];
            for (seat, len) in lengths.into_iter().enumerate() {
                letter.join(seat as u32, len, 7, &params).expect("room");
                for index in (0..limits.pages_per_seat).filter(|_| seat < 3) {
                    let page = if index == 0 { u32::MAX } else { 1 + index };
                    letter.page(seat as u32, index, page).expect("room");
                }
            }
            // No request may join the seat of pad rows.
            letter.page(limits.seats, 0, 3).expect("room");
            let q_len = if prompt { 2 } else { 1 };
            let flags = row::SAMPLE | if prompt { row::PROMPT } else { 0 };
            let rows = [0, 1, 2, 3].map(|seat| MailRow { seat, q_len, flags });
            letter.rows(&rows).expect("room");
            letter.tokens(&[9; 8]).expect("room");
            letter.send();
            let tokens = if prompt { 32 } else { 4 };
            let op = Op::Prologue(Prologue { state, rows: 4, tokens, pages: 5, given: None });
            device.run(&arena, &Node { op, name: "p".into(), layer: None }).expect("it runs");
            let read = |table: &Tensor| words(device.read(&arena, table.span).expect("idle"));
            let what = format!("{}, prompt {prompt}", device.describe());
            let last = if prompt { 0 } else { context };
            assert_eq!(read(&state.kv_len), [5 + q_len, 0, 0, last], "{what}");
            let longest = read(&state.counts)[count::MAX_KV as usize];
            assert_eq!(longest, (5 + q_len).max(last), "{what}");
            assert_eq!(read(&state.page_table)[..4], [0, 2, 3, 4], "{what}");
            assert_eq!(read(&state.page_table)[16..], [0; 4], "{what}: pad rows");
            let slots = read(&state.kv_slot);
            assert!(slots.iter().all(|slot| *slot < 5 * 16), "{what}: {slots:?}");
        }
    }
}

fn many_heads(rows: u32, heads: u32) -> Op {
    let attention = |op: &Op| matches!(op, Op::Attention(op) if op.single);
    let op = small_ops().into_iter().find(attention).expect("decode");
    let Op::Attention(mut op) = op else { unreachable!() };
    (op.rows, op.out.rows, op.qkv.rows) = (rows, rows, rows);
    (op.kv.heads, op.q_heads, op.kv.head_dim) = (heads, heads, 64);
    (op.out.cols, op.out.stride) = (heads * 64, heads * 64);
    op.scratch = op.scratch.map(|span| Span { len: 1 << 40, ..span });
    Op::Attention(op)
}

/// Pieces of a row are counted in fixed memory: with more rows and heads, rows are not split.
#[test]
fn attention_is_not_cut_where_its_pieces_could_not_be_counted() {
    let target = Target::h200();
    let split = |op: &Op| match &lower(op, &target).expect("a kernel")[0] {
        Lowered::Launch(launch) => {
            let define = launch.kernel.defines.iter().find(|(name, _)| name == "SPLIT");
            define.map(|(_, value)| value.clone()).expect("the decode kernel")
        }
        other => panic!("{other:?}"),
    };
    for (rows, heads, cut) in [(64, 256, true), (64, 257, false), (4, 4096, true), (4, 4097, false)]
    {
        let op = many_heads(rows, heads);
        assert_eq!(split(&op) != "0", cut, "{rows} rows of {heads} heads");
        assert_eq!(scratch_bytes(&op, &target) > SEMAPHORE_BYTES, cut, "{rows} rows of {heads}");
    }
}
