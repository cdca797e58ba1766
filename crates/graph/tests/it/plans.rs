//! Plans as data: what the passes promise, without a device.

use device::StepLimits;
use device::cuda::launch::Target;
use device::cuda::tuned::{Choice, Tuned, shape};
use device::variant::Variant;
use expect_test::expect;
use fixtures::Sample;
use graph::compile::merge::Merge;
use graph::compile::{compile, fuse::Fusion};
use graph::layout::Layout;
use graph::program::Program;
use graph::{CompileTarget, Plan, ShapeKey};
use std::sync::Arc;

fn limits(program: &Program) -> StepLimits {
    StepLimits {
        seats: 8,
        rows: 8,
        tokens: 64,
        pages_per_seat: 8,
        page_size: 16,
        vocab: program.shape.vocab,
        penalties: false,
        tokens_per_row: 1,
        tables: 1,
    }
}

fn plan_for(program: &Program, target: &CompileTarget, limits: StepLimits, key: ShapeKey) -> Plan {
    let mut layout = Layout::new(program, target, limits, std::slice::from_ref(&key)).unwrap();
    layout.add_pages(program, 16);
    compile(program, target, &key, &layout.bindings).unwrap()
}

fn plan(key: ShapeKey, fusion: Option<Fusion>) -> Plan {
    let program = Sample::tiny().build("tiny");
    let target = CompileTarget { fusion, ..CompileTarget::cpu() };
    plan_for(&program, &target, limits(&program), key)
}

#[test]
fn a_decode_plan_has_five_nodes_per_layer() {
    for (sample, nodes) in [(Sample::qwen3_8b(), 36 * 5 + 4), (Sample::qwen3_0_6b(), 28 * 5 + 4)] {
        let program = sample.build("qwen3");
        let limits = StepLimits {
            seats: 256,
            rows: 256,
            tokens: 8192,
            pages_per_seat: 640,
            page_size: 64,
            vocab: program.shape.vocab,
            penalties: false,
            tokens_per_row: 1,
            tables: 1,
        };
        let plan = plan_for(
            &program,
            &CompileTarget::new(Arc::new(Target::h200())),
            limits,
            ShapeKey::decode(8),
        );
        assert_eq!(plan.nodes.len(), nodes);
        let layer: Vec<&str> =
            plan.nodes.iter().filter(|n| n.layer == Some(3)).map(|n| n.op.name()).collect();
        assert_eq!(layer, ["linear", "attention", "linear", "linear", "linear"]);
        assert_eq!(plan.check(), vec![]);
    }
}

#[test]
fn steps_that_verify_drafts_have_five_nodes_per_layer() {
    let program = Sample::qwen3_8b().build("qwen3");
    let target = CompileTarget::new(Arc::new(Target::h200()));
    for rows in [1, 8, 64] {
        let limits = StepLimits {
            seats: 64,
            rows: 64,
            tokens: 256,
            pages_per_seat: 64,
            page_size: 16,
            vocab: program.shape.vocab,
            penalties: false,
            tokens_per_row: 4,
            tables: 1,
        };
        let plan = plan_for(&program, &target, limits, ShapeKey::decode(rows).with_q_len(4));
        let layer = plan.nodes.iter().filter(|node| node.layer == Some(3));
        let names: Vec<&str> = layer.map(|node| node.op.name()).collect();
        assert_eq!(names, ["linear", "attention", "linear", "linear", "linear"], "{rows} rows");
        // Plans are cut at attention, as without drafts.
        let attention =
            plan.nodes.iter().enumerate().filter(|(_, node)| node.op.name() == "attention");
        assert_eq!(plan.splits, attention.map(|(at, _)| at).collect::<Vec<_>>());
        assert_eq!(plan.check(), vec![]);
    }
}

/// The plan of a step of `rows`, with layers merged or not.
fn merged(merge: Merge, gpu: &Target, sample: Sample, key: ShapeKey) -> Plan {
    let target = CompileTarget { merge, ..CompileTarget::new(Arc::new(gpu.clone())) };
    let program = sample.build("qwen3");
    let limits = StepLimits {
        seats: 16,
        rows: 16,
        tokens: 256,
        pages_per_seat: 64,
        page_size: 16,
        vocab: program.shape.vocab,
        penalties: false,
        tokens_per_row: 1,
        tables: 1,
    };
    let plan = plan_for(&program, &target, limits, key);
    assert_eq!(plan.check(), vec![]);
    plan
}

#[test]
fn small_layers_become_one_node_where_that_is_asked_for_or_measured() {
    let mut gpu = Target { tuned: Tuned::default(), ..Target::h200() };
    let names = |plan: &Plan| plan.nodes.iter().map(|node| node.op.name()).collect::<Vec<_>>();
    let one = ["prologue", "embed", "layers", "linear", "sample"];
    let asked = merged(Merge::Always, &gpu, Sample::qwen3_0_6b(), ShapeKey::decode(1));
    assert_eq!(names(&asked), one);
    let eight = merged(Merge::Always, &gpu, Sample::qwen3_0_6b(), ShapeKey::decode(8));
    assert_eq!(names(&eight), one);
    // Too many rows, layers that are not small, or one order of summation for all: nodes as before.
    let fixed = ShapeKey::decode(1).with_fixed(true);
    for (sample, key) in [
        (Sample::qwen3_0_6b(), ShapeKey::decode(16)),
        (Sample::qwen3_8b(), ShapeKey::decode(1)),
        (Sample::qwen3_0_6b(), fixed),
    ] {
        assert!(!names(&merged(Merge::Always, &gpu, sample, key)).contains(&"layers"));
    }
    // Measured: separate nodes, unless the table of measured choices has one node as faster.
    let measured = |gpu: &Target, rows: u32| {
        merged(Merge::Measured, gpu, Sample::qwen3_0_6b(), ShapeKey::decode(rows)).nodes.len()
    };
    assert_eq!((measured(&gpu, 1), measured(&gpu, 8)), (28 * 5 + 4, 28 * 5 + 4));
    let shape = |plan: &Plan| shape(&plan.nodes[2].op).expect("layers have a shape");
    let choice = |variant| Choice { variant, nanos: 1, rule_nanos: 2 };
    gpu.tuned.insert(shape(&asked), choice(Some(Variant::OneNode)));
    gpu.tuned.insert(shape(&eight), choice(None));
    assert_eq!((measured(&gpu, 1), measured(&gpu, 8)), (5, 28 * 5 + 4));
}

#[test]
fn a_printed_plan() {
    expect![[r#"
        tiny decode/4 for cpu: 14 nodes, workspace 2.0 KiB
           0  prologue       prologue 4 rows, 4 tokens
           1  embed          embed 4×32 f32 from 64×32 f32                              @1024+512
           2  0.qkv          norm + linear 4×32 f32 · 64×32 f32                         @0+1024
           3  0.attn         qk-norm + rope + attention decode 4 rows 4/2×8             @0+1024 @1536+512        break+split
           4  0.o            linear 4×32 f32 · 32×32 f32 + residual                     @1024+512
           5  0.gate_up      norm + linear 4×32 f32 · 96×32 f32, silu·mul               @0+768
           6  0.down         linear 4×48 f32 · 32×48 f32 + residual                     @1024+512
           7  1.qkv          norm + linear 4×32 f32 · 64×32 f32                         @0+1024
           8  1.attn         qk-norm + rope + attention decode 4 rows 4/2×8             @0+1024 @1536+512        break+split
           9  1.o            linear 4×32 f32 · 32×32 f32 + residual                     @1024+512
          10  1.gate_up      norm + linear 4×32 f32 · 96×32 f32, silu·mul               @0+768
          11  1.down         linear 4×48 f32 · 32×48 f32 + residual                     @1024+512
          12  head           norm + linear 4×32 f32 · 64×32 f32                         @0+1024
          13  sample         sample 4×64 f32                                            @0+1024
    "#]].assert_eq(&plan(ShapeKey::decode(4), None).to_string());
}

#[test]
fn an_unfused_prefill_plan() {
    expect![[r#"
        tiny prefill/32x8 for cpu: 22 nodes, workspace 16.0 KiB
           0  prologue       prologue 8 rows, 32 tokens
           1  embed          embed 32×32 f32 from 64×32 f32                             @8192+4096
           2  0.attn_norm    rms_norm 32×32 f32                                         @12288+4096
           3  0.qkv          linear 32×32 f32 · 64×32 f32                               @0+8192
           4  0.rope         qk-norm + rope_kv 32 tokens                                @0+8192
           5  0.attn         attention varlen 8 rows 4/2×8                              @12288+4096              break+split
           6  0.o            linear 32×32 f32 · 32×32 f32 + residual                    @8192+4096
           7  0.mlp_norm     rms_norm 32×32 f32                                         @12288+4096
           8  0.gate_up      linear 32×32 f32 · 96×32 f32, silu·mul                     @0+6144
           9  0.down         linear 32×48 f32 · 32×48 f32 + residual                    @8192+4096
          10  1.attn_norm    rms_norm 32×32 f32                                         @12288+4096
          11  1.qkv          linear 32×32 f32 · 64×32 f32                               @0+8192
          12  1.rope         qk-norm + rope_kv 32 tokens                                @0+8192
          13  1.attn         attention varlen 8 rows 4/2×8                              @12288+4096              break+split
          14  1.o            linear 32×32 f32 · 32×32 f32 + residual                    @8192+4096
          15  1.mlp_norm     rms_norm 32×32 f32                                         @12288+4096
          16  1.gate_up      linear 32×32 f32 · 96×32 f32, silu·mul                     @0+6144
          17  1.down         linear 32×48 f32 · 32×48 f32 + residual                    @8192+4096
          18  last           gather 8×32 f32 of 32×32 f32                               @2048+1024
          19  norm           rms_norm 8×32 f32                                          @2048+1024
          20  head           linear 8×32 f32 · 64×32 f32                                @0+2048
          21  sample         sample 8×64 f32                                            @0+2048
    "#]].assert_eq(&plan(ShapeKey::prefill(32, 8), Some(Fusion::NONE)).to_string());
}
