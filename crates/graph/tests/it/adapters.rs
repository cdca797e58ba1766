//! Adapters in the launch of their linear: where the device has that, and with the same result as beside it.

use crate::world::{PAGES, Place, World};
use device::cuda::launch::Target;
use device::{DType, Op, StepLimits};
use fixtures::{Sample, Traffic};
use graph::backend::BackendKind;
use graph::compile::fuse::Fusion;
use graph::explain::explain;
use graph::layout::Layout;
use graph::program::{ModelShape, Program};
use graph::runner::RunnerConfig;
use graph::{CompileTarget, Plan, ShapeKey, compile};
use std::sync::Arc;

fn limits(program: &Program, rows: u32) -> StepLimits {
    StepLimits {
        seats: rows,
        rows,
        tokens: 4 * rows,
        pages_per_seat: 4,
        page_size: 16,
        vocab: program.shape.vocab,
        penalties: false,
        tokens_per_row: 1,
        tables: 1,
    }
}

fn two_layers(rank: u32, weights: DType) -> Program {
    let big = Sample::qwen3_8b();
    let shape = ModelShape { layers: 2, ..big.shape };
    Sample { shape, weights, adapters: Some((8, rank)), ..big }.build("two layers")
}

fn plan(program: &Program, target: &CompileTarget, key: ShapeKey) -> Plan {
    let key = ShapeKey { adapters: true, ..key };
    let mut layout =
        Layout::new(program, target, limits(program, 256), std::slice::from_ref(&key)).unwrap();
    layout.add_pages(program, 16);
    let plan = compile(program, target, &key, &layout.bindings).unwrap();
    assert_eq!(plan.check(), vec![], "{key}");
    plan
}

fn apart(plan: &Plan) -> usize {
    plan.nodes.iter().filter(|node| matches!(node.op, Op::Lora(_))).count()
}

#[test]
fn linears_of_some_rows_take_their_adapters_in() {
    let gpu = CompileTarget::new(Arc::new(Target::h200()));
    let program = two_layers(16, DType::BF16);
    for rows in [16, 32, 64] {
        let plan = plan(&program, &gpu, ShapeKey::decode(rows));
        assert_eq!((apart(&plan), plan.nodes.len()), (0, 2 * 5 + 4), "{rows} rows");
        let explanation = explain(&plan, &gpu);
        let with =
            explanation.nodes.iter().filter(|node| node.op.contains("8 adapters of rank 16"));
        assert_eq!(with.count(), 8, "{rows} rows");
        // The norm before the first layer, and in larger steps others that cannot be handed on.
        let most = plan.nodes.len() + if rows < 64 { 1 } else { 5 };
        assert!(explanation.launches <= most, "{rows} rows: {} launches", explanation.launches);
        for node in explanation.nodes.iter().filter(|node| node.layer == Some(0)) {
            println!("{rows} rows: {} {:?}", node.op, node.kernels);
        }
    }
}

#[test]
fn adapters_stay_apart_where_no_kernel_takes_them() {
    let gpu = CompileTarget::new(Arc::new(Target::h200()));
    let program = two_layers(16, DType::BF16);
    for key in [ShapeKey::decode(8), ShapeKey::decode(65), ShapeKey::prefill(512, 16)] {
        assert_eq!(apart(&plan(&program, &gpu, key)), 8, "{key}");
    }
    let key = ShapeKey::decode(16);
    assert_eq!(apart(&plan(&program, &gpu, ShapeKey { fixed: true, ..key })), 8);
    assert_eq!(apart(&plan(&program, &CompileTarget::cpu(), key)), 8);
    assert_eq!(apart(&plan(&two_layers(24, DType::BF16), &gpu, key)), 8);
    assert_eq!(apart(&plan(&two_layers(16, DType::F16), &gpu, key)), 8);
}

/// The keys and values of the second layer depend on every linear of the first. Tokens are of 3 adapters and none.
#[test]
fn adapters_inside_linears_do_what_those_beside_them_do() {
    let shape = ModelShape {
        hidden: 256,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 64,
        act_dtype: DType::BF16,
        kv_dtype: DType::BF16,
        ..Sample::tiny().shape
    };
    let sample = Sample { shape, intermediate: 384, weights: DType::BF16, ..Sample::tiny() };
    let program = Sample { adapters: Some((3, 16)), ..sample }.build("adapted");
    for mut place in Place::all() {
        let whole = place.target.clone();
        let beside = Fusion { adapters: false, ..Fusion::ALL };
        let targets = [Some(beside), None].map(|fusion| CompileTarget { fusion, ..whole.clone() });
        let kv = targets.map(|target| {
            place.target = target;
            let world = place.world_of(&program, limits(&program, 16), PAGES);
            step(&world, &place.target);
            world.memory()[1].clone()
        });
        let floats = kv.map(|bytes| DType::BF16.decode(&bytes));
        // Of the keys or values of a token's head. Roundings of two layers add up to about 1 %; without an adapter they
        // would be off by their own size.
        let norm = |row: &[f32]| row.iter().map(|value| value * value).sum::<f32>().sqrt();
        let pairs = floats[0].chunks(64).zip(floats[1].chunks(64)).filter(|(a, _)| norm(a) > 0.0);
        let furthest = pairs.map(|(a, b)| {
            let error: Vec<f32> = a.iter().zip(b).map(|(a, b)| a - b).collect();
            norm(&error) / norm(a)
        });
        let furthest = furthest.fold(0.0, f32::max);
        println!("{}: {furthest}", place.target.name());
        let allowed = if place.is_gpu() { 0.02 } else { 0.0 };
        assert!(furthest <= allowed, "{furthest}");
        assert!(floats[0].iter().any(|value| *value != 0.0));
    }
}

/// 24 tokens of new rows.
fn step(world: &World, target: &CompileTarget) {
    let mut runners = world.runners_with(target, ("16", "64"), &|buckets| RunnerConfig {
        adapters: true,
        ..RunnerConfig::new(BackendKind::Disabled, buckets)
    });
    let mut input = Traffic::new(world.limits, PAGES, 5).prefill(24);
    for (adapter, join) in (0..).zip(&mut input.joins) {
        join.params.adapter = adapter % 4;
    }
    input.adapters = true;
    runners.launch(&input).unwrap();
    runners.wait().unwrap();
}
