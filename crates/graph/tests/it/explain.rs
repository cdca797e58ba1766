//! Explaining a plan for a GPU on a machine without one, and without the 16 GB of weights.

use device::StepLimits;
use device::cuda::launch::Target;
use device::cuda::tuned::{Choice, Tuned, shape};
use device::variant::{LinearVariant, Variant};
use expect_test::expect;
use fixtures::Sample;
use graph::explain::{Explanation, explain};
use graph::layout::{Layout, pages_that_fit};
use graph::memory::Account;
use graph::{BackendKind, CompileTarget, Plan, ShapeKey};
use std::sync::Arc;

fn qwen3_8b(key: &ShapeKey) -> (Plan, Explanation) {
    qwen3_8b_on(Target::h200(), key)
}

fn qwen3_8b_on(target: Target, key: &ShapeKey) -> (Plan, Explanation) {
    let program = Sample::qwen3_8b().build("qwen3-8b");
    let target = CompileTarget::new(Arc::new(target));
    let limits = StepLimits {
        seats: 256,
        rows: 256,
        tokens: 8192,
        pages_per_seat: 512,
        page_size: 16,
        vocab: program.shape.vocab,
        penalties: false,
        tokens_per_row: 1,
        tables: 1,
    };
    let mut layout = Layout::new(&program, &target, limits, std::slice::from_ref(key)).unwrap();
    layout.add_pages(&program, 4096);
    let plan = graph::compile(&program, &target, key, &layout.bindings).unwrap();
    let explanation = explain(&plan, &target);
    (plan, explanation)
}

#[test]
fn a_gpu_has_a_kernel_for_every_node_of_qwen3_8b() {
    let keys = [1, 8, 16, 64, 256].map(ShapeKey::decode);
    let prefill = [16, 512, 8192].map(|tokens| ShapeKey::prefill(tokens, tokens.min(256)));
    for key in keys.iter().chain(&prefill) {
        let (plan, explanation) = qwen3_8b(key);
        let without: Vec<_> =
            explanation.nodes.iter().filter(|node| node.problem.is_some()).collect();
        assert!(without.is_empty(), "{key}: {without:#?}");
        assert!(explanation.nodes.iter().all(|node| !node.kernels.is_empty()), "{key}");
        assert_eq!(plan.check(), vec![], "{key}");
        println!("{key}: {} nodes, {} launches", plan.nodes.len(), explanation.launches);
    }
}

/// A norm after a linear has no launch of its own; only the first layer's, after the embedding, has one.
#[test]
fn norms_between_products_have_no_launches() {
    for rows in [16, 32] {
        let (plan, explanation) = qwen3_8b(&ShapeKey::decode(rows));
        assert_eq!(explanation.launches, plan.nodes.len() + 1, "{rows} rows");
        let said = |index: usize, what: &str| {
            assert!(explanation.nodes[index].op.contains(what), "{}", explanation.nodes[index].op);
        };
        said(4, "prepares the next norm");
        said(5, "prepared norm + ");
        assert_eq!(plan.check(), vec![]);
    }
}

#[test]
fn a_variant_is_said_with_the_reason_for_it() {
    let key = ShapeKey::decode(16);
    let mut target = Target { tuned: Tuned::default(), ..Target::h200() };
    let (plan, before) = qwen3_8b_on(target.clone(), &key);
    // Nodes of layer 0: norm + qkv, attention, output, norm + gate/up, down.
    assert_eq!(before.nodes[2].choice.as_deref(), Some("default"));
    assert_eq!(before.nodes[0].choice, None, "a prologue has no variants");
    let choice = |variant| Choice { variant, nanos: 8_100, rule_nanos: 9_000 };
    target.tuned.insert(
        shape(&plan.nodes[2].op).unwrap(),
        choice(Some(Variant::Linear(LinearVariant::Gemm))),
    );
    target.tuned.insert(shape(&plan.nodes[4].op).unwrap(), choice(None));
    let (_, after) = qwen3_8b_on(target, &key);
    assert_eq!(after.nodes[2].choice.as_deref(), Some("gemm, tuned 8.1 µs over 9.0"));
    assert!(after.nodes[2].kernels.iter().any(|kernel| kernel.name == "cublaslt"));
    let kept = after.nodes[4].choice.as_deref();
    assert_eq!(kept, Some("default, 9.0 µs is the best measured"));
    assert_eq!(after.nodes[4].kernels, before.nodes[4].kernels);
    assert!(after.table().contains("tuned 8.1 µs over 9.0"));
}

#[test]
fn the_numbers_of_a_decode_step() {
    let (plan, explanation) = qwen3_8b(&ShapeKey::decode(8));
    assert_eq!(plan.nodes.len(), 5 * 36 + 4);
    // Every weight but the embedding, of which eight rows are read.
    let program = Sample::qwen3_8b().build("qwen3-8b");
    let table = program.weights.iter().find(|weight| weight.name == "embed").unwrap().bytes();
    assert_eq!(explanation.weight_bytes, program.weight_bytes() - table + 8 * 4096 * 2);
    let parts: Vec<_> =
        explanation.backends.iter().map(|(kind, graphs, eager)| (*kind, *graphs, *eager)).collect();
    let cut = (37, 36);
    assert_eq!(
        parts,
        [
            (BackendKind::Full, 1, 0),
            (BackendKind::Breakable, cut.0, cut.1),
            (BackendKind::Piecewise, cut.0, cut.1),
            (BackendKind::Disabled, 0, 184),
        ]
    );
    let ops: Vec<&str> = explanation.nodes[..8].iter().map(|node| node.op.as_str()).collect();
    expect![[r#"
        prologue 8 rows, 8 tokens
        embed 8×4096 bf16 from 151936×4096 bf16
        norm + linear 8×4096 bf16 · 6144×4096 bf16
        qk-norm + rope + attention decode 8 rows 32/8×128
        linear 8×4096 bf16 · 4096×4096 bf16 + residual
        norm + linear 8×4096 bf16 · 24576×4096 bf16, silu·mul
        linear 8×12288 bf16 · 4096×12288 bf16 + residual
        norm + linear 8×4096 bf16 · 6144×4096 bf16
    "#]]
    .assert_eq(&(ops.join("\n") + "\n"));
}

#[test]
fn the_three_forms_agree() {
    let (plan, explanation) = qwen3_8b(&ShapeKey::decode(8));
    let table = explanation.table();
    assert_eq!(table.lines().count(), 1 + 4 + 1 + 184);
    let json: serde_json::Value = serde_json::from_str(&explanation.json()).unwrap();
    assert_eq!(json["nodes"].as_array().unwrap().len(), 184);
    assert_eq!(json["nodes"][3]["name"], "attn");
    let svg = plan.svg();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    // Layers that are alike are drawn once: two nodes before them, five of a layer, two after.
    assert!(svg.contains("layers 1–35 alike"), "{svg}");
    for node in [0, 1, 2, 3, 4, 5, 6, 182, 183] {
        assert!(svg.contains(&format!("<title>{node} {}: ", plan.node_name(node))), "{node}");
    }
    assert_eq!(svg.matches("<title>").count(), 9 + 5, "{svg}");
}

#[test]
fn pages_take_exactly_what_is_left() {
    let program = Sample::qwen3_8b().build("qwen3-8b");
    let target = CompileTarget::new(Arc::new(Target::h200()));
    let limits = StepLimits {
        seats: 64,
        rows: 64,
        tokens: 2048,
        pages_per_seat: 128,
        page_size: 16,
        vocab: program.shape.vocab,
        penalties: true,
        tokens_per_row: 1,
        tables: 1,
    };
    let keys = [ShapeKey::decode(64), ShapeKey::prefill(2048, 64)];
    let mut layout = Layout::new(&program, &target, limits, &keys).unwrap();
    let before = layout.arena.report().device_total();
    let free = 140u64 << 30;
    let pages = pages_that_fit(&program, limits.page_size, free - before);
    layout.add_pages(&program, pages);
    let report = layout.arena.report();
    let page = 2 * 8 * 128 * 16 * 2 * 36;
    assert!(report.device_total() <= free && free - report.device_total() < page + 36 * 256);
    let account = Account::new(&report, &[(ShapeKey::decode(64), 1000)]);
    assert_eq!(account.device_total(), report.device_total() + 1000);
}
