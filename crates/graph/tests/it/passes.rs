//! Properties of the compile passes, on random programs: a fused plan computes what the unfused one does,
//! spans that live at the same time never overlap, and every refusal has its own error.

use crate::world;
use device::op::{Epilogue, LinearChain};
use device::{DType, Op};
use fixtures::Sample;
use fixtures::{Rng, Traffic};
use graph::backend::BackendKind;
use graph::compile::fuse::Fusion;
use graph::compile::{compile, schedule};
use graph::layout::Layout;
use graph::plan::Problem;
use graph::program::{Pairs, Program, ProgramBuilder, ProgramError, WeightRef};
use graph::{CompileError, CompileTarget, Phase, Plan, ShapeKey};
use world::{PAGES, World, limits, random};

fn plan(program: &Program, target: &CompileTarget, key: &ShapeKey) -> Plan {
    let mut layout =
        Layout::new(program, target, limits(program), std::slice::from_ref(key)).unwrap();
    layout.add_pages(program, PAGES);
    compile(program, target, key, &layout.bindings).unwrap()
}

fn fused(norm: bool, rope: bool) -> CompileTarget {
    CompileTarget { fusion: Some(Fusion { norm, rope, adapters: true }), ..CompileTarget::cpu() }
}

const KEYS: [ShapeKey; 4] =
    [ShapeKey::decode(1), ShapeKey::decode(8), ShapeKey::prefill(16, 8), ShapeKey::prefill(40, 8)];

#[test]
fn no_random_plan_breaks_a_promise() {
    for seed in 0..300 {
        let program = random::program(seed);
        for key in &KEYS {
            let mut nodes = Vec::new();
            for (norm, rope) in [(false, false), (true, false), (false, true), (true, true)] {
                let rope = rope && key.phase == Phase::Decode;
                let plan = plan(&program, &fused(norm, rope), key);
                assert_eq!(plan.check(), vec![], "{} {key}", program.name);
                nodes.push(plan.nodes.len());
            }
            assert!(nodes[3] <= nodes[0], "fusing adds no nodes");
        }
    }
}

#[test]
fn the_workspace_is_close_to_what_must_live_at_once() {
    let (mut used, mut least) = (0, 0);
    for seed in 0..300 {
        let program = random::program(seed);
        for key in &KEYS {
            let schedule = schedule(&program, &fused(true, false), &limits(&program), key).unwrap();
            let buffers = &schedule.placement.buffers;
            let alive = |at: usize| {
                let here = buffers.iter().filter(move |b| b.first <= at && at <= b.last);
                here.map(|b| b.len.next_multiple_of(256)).sum::<u64>()
            };
            let bound = (0..schedule.steps.len()).map(alive).max().unwrap();
            assert!(schedule.placement.bytes >= bound);
            assert!(schedule.placement.bytes <= bound * 3 / 2, "{} {key}", program.name);
            used += schedule.placement.bytes;
            least += bound;
        }
    }
    assert!(used * 100 <= least * 106, "{used} bytes where {least} must be");
}

/// Replayed by each backend in turn, against the unfused plan run op by op. The norm rounds to its
/// input's dtype either way and rope stores q either way, so on the reference
/// device the two are equal bit for bit, not only within rounding.
#[test]
fn a_fused_plan_computes_what_the_unfused_one_does() {
    for seed in 0..40 {
        let program = random::program(seed);
        let (plain, fused) = (fused(false, false), CompileTarget::cpu());
        let (here, there) = (World::new(&program, &plain), World::new(&program, &fused));
        let mut a = here.runners(&plain, BackendKind::Disabled, ("1,8", "16,40"));
        let backend = BackendKind::ALL[seed as usize % 3];
        let mut b = there.runners(&fused, backend, ("1,8", "16,40"));
        let mut traffic = Traffic::new(here.limits, PAGES, seed);
        let mut rng = Rng::new(seed);
        for step in 0..10 {
            let input = match step % 2 {
                0 => traffic.prefill(1 + rng.below(40)),
                _ => traffic.decode(1 + rng.below(8)),
            };
            a.launch(&input).unwrap();
            b.launch(&input).unwrap();
            let (one, other) = (a.wait().unwrap(), b.wait().unwrap());
            assert_eq!(one, other, "{} step {step}", program.name);
            assert!(here.memory() == there.memory(), "{} step {step}", program.name);
        }
    }
}

#[test]
fn programs_and_plans_survive_json_and_hash_alike_everywhere() {
    let program = Sample::tiny().build("tiny");
    assert_eq!(Program::from_json(&program.to_json()).unwrap(), program);
    let key = ShapeKey::decode(4);
    let (one, two) =
        (plan(&program, &fused(true, true), &key), plan(&program, &fused(true, true), &key));
    assert_ne!(one.values[0].span.arena, two.values[0].span.arena, "two arenas");
    assert_eq!(one.hash(), two.hash());
    let back: Plan = serde_json::from_str(&serde_json::to_string(&one).unwrap()).unwrap();
    assert_eq!(back, one);
    let other = plan(&program, &fused(false, true), &key);
    assert_ne!(other.hash(), one.hash());
    assert!(one.diff(&two).is_empty());
    let changes: Vec<String> = one.diff(&other).iter().map(ToString::to_string).collect();
    assert!(changes.contains(&"nodes: 14 → 19".to_owned()), "{changes:#?}");
    assert!(changes.contains(&"+ 0.attn_norm".to_owned()), "{changes:#?}");
}

#[test]
fn shuffled_steps_are_put_in_order() {
    let mut program = Sample::tiny().build("tiny");
    let expected = plan(&program, &fused(true, true), &ShapeKey::decode(2));
    // Add and gate·mul fold into linears that stand before them; everything else may come in any order.
    let keep: Vec<_> = program.steps.drain(..).collect();
    let (mut early, mut late): (Vec<_>, Vec<_>) = (Vec::new(), Vec::new());
    for step in keep {
        if matches!(step.op.name(), "embed" | "gather" | "rms_norm") {
            late.push(step);
        } else {
            early.push(step);
        }
    }
    program.steps = early.into_iter().chain(late.into_iter().rev()).collect();
    let found = plan(&program, &fused(true, true), &ShapeKey::decode(2));
    let names = |plan: &Plan| (0..plan.nodes.len()).map(|i| plan.node_name(i)).collect::<Vec<_>>();
    assert_eq!(names(&found), names(&expected));
}

#[test]
fn explicit_marks_and_op_names_cut() {
    let mut program = Sample::tiny().build("tiny");
    let down = program.steps.iter().position(|step| step.name == "down").unwrap();
    program.steps[down].mark = Some(graph::program::Mark::Break);
    let mut target = CompileTarget::cpu();
    target.breaks.clear();
    target.splits = ["sample".to_owned()].into();
    let plan = plan(&program, &target, &ShapeKey::decode(2));
    let names = |marks: &[usize]| marks.iter().map(|&i| plan.node_name(i)).collect::<Vec<_>>();
    assert_eq!(
        (names(&plan.breaks), names(&plan.splits)),
        (vec!["0.down".into()], vec!["sample".into()])
    );
}

#[test]
fn every_refusal_has_a_name() {
    let good = Sample::tiny().build("tiny");
    let target = CompileTarget::cpu();
    let key = ShapeKey::decode(2);
    let try_it = |program: &Program, key: &ShapeKey| {
        schedule(program, &target, &limits(&good), key).unwrap_err()
    };

    let mut decode_only = good.clone();
    decode_only.phases = vec![Phase::Decode];
    assert!(matches!(try_it(&decode_only, &ShapeKey::prefill(8, 8)), CompileError::Phase { .. }));
    assert!(matches!(try_it(&good, &ShapeKey::decode(9)), CompileError::Limits { .. }));

    let mut rows = good.clone();
    for weight in &mut rows.weights {
        weight.layout = graph::program::WeightLayout::Rows;
    }
    let error = try_it(&rows, &key).to_string();
    assert_eq!(error, "step `0.act`: gate and up rows do not alternate");

    let mut layout =
        Layout::new(&good, &target, limits(&good), std::slice::from_ref(&key)).unwrap();
    layout.add_pages(&good, 2);
    let refuse = |bindings: &graph::Bindings| {
        compile(&good, &target, &key, bindings).unwrap_err().to_string()
    };
    let mut small = layout.bindings.clone();
    small.workspace = small.workspace.part(0, 256);
    assert!(refuse(&small).starts_with("decode/2 needs "), "{}", refuse(&small));
    let mut missing = layout.bindings.clone();
    missing.weights.remove("1.qkv");
    assert_eq!(refuse(&missing), "weight `1.qkv`: not bound");
    let mut odd = layout.bindings.clone();
    let bound = odd.weights["1.qkv"];
    odd.weights.insert("1.qkv".into(), bound.top(bound.rows - 1));
    assert_eq!(refuse(&odd), "weight `1.qkv`: bound as 63×32, needed as 64×32");
    let mut no_pages = layout.bindings.clone();
    no_pages.kv.truncate(1);
    assert_eq!(refuse(&no_pages), "cache 1: not bound");
}

#[test]
fn a_builder_remembers_its_first_mistake() {
    let shape = Sample::tiny().shape;
    let w = |name: &str, rows, cols| WeightRef::matrix(name, DType::F32, rows, cols);
    let build = |wrong: &dyn Fn(&mut ProgramBuilder)| {
        let mut b = ProgramBuilder::new("wrong", shape);
        wrong(&mut b);
        b.finish().unwrap_err()
    };
    let twice = build(&|b| {
        let x = b.embed("embed", w("e", 64, 32));
        b.linear("a", x, w("e", 32, 32), None);
    });
    assert_eq!(twice, ProgramError::WeightTwice { name: "e".into() });
    let outside = build(&|b| {
        let x = b.embed("embed", w("e", 64, 32));
        let qkv = b.linear("qkv", x, w("qkv", 64, 32), None);
        let rope = b.rope_table();
        b.rope_kv("rope", qkv, None, None, rope, Pairs::Halves);
    });
    assert_eq!(outside, ProgramError::OutsideLayer { step: "rope".into() });
    let shape = build(&|b| {
        let x = b.embed("embed", w("e", 64, 32));
        b.linear("a", x, w("a", 32, 31), None);
    });
    assert_eq!(shape.to_string(), "step `a`: x has 32 columns, w has 31");
    let ends = build(&|b| {
        b.embed("embed", w("e", 64, 32));
    });
    assert_eq!(ends, ProgramError::Ends { embeds: 1, ends: 0 });
}

#[test]
fn the_checker_sees_what_a_bad_plan_does() {
    let program = Sample::tiny().build("tiny");
    let good = plan(&program, &CompileTarget::cpu(), &ShapeKey::prefill(16, 8));
    assert_eq!(good.check(), vec![]);
    let mut shared = good.clone();
    let embed = shared.values[0].span;
    let qkv = shared.values.iter_mut().find(|value| value.name == "0.qkv").unwrap();
    qkv.span.offset = embed.offset;
    assert!(shared.check().iter().any(|p| matches!(p, Problem::Overlap { .. })));
    let mut clobbered = good.clone();
    let mut linear = LinearChain::of(&clobbered.nodes[2].op).unwrap();
    assert!(matches!(linear.epilogue, Epilogue::Store));
    linear.y.span.offset = embed.offset;
    clobbered.nodes[2].op = linear.into();
    assert!(clobbered.check().iter().any(|p| matches!(p, Problem::Clobber { node: 2, .. })));
    let mut early = good.clone();
    early.nodes.swap(1, 2);
    assert!(early.check().iter().any(|p| matches!(p, Problem::Unwritten { node: 1, .. })));
    let mut long = good;
    if let Op::Prologue(op) = &mut long.nodes[0].op {
        op.rows += 1;
    }
    assert!(long.check().iter().any(|p| matches!(p, Problem::Length { node: 0, .. })));
}
