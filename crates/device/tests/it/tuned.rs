//! The table of measured choices: what the tuner chooses with a given clock, how lowering uses the table, and that a
//! damaged file is ignored. No GPU: the clock is simulated.

use crate::shapes;
use device::cuda::cache::Cache;
use device::cuda::launch::{Lowered, Target};
use device::cuda::lower::{lower, scratch_bytes};
use device::cuda::tune::{Timer, tune, tune_layers};
use device::cuda::tuned::{Choice, Tuned, candidates, file, shape};
use device::op::{Attention, AttentionChain, Fused, FusedKernel, LinearChain};
use device::variant::{AttentionVariant, LinearVariant, Pick, Variant, WgmmaShape};
use device::{Node, Op, Result};
use std::time::Duration;

/// A clock whose times are a function of the variant; it counts its calls.
struct Clock<F> {
    nanos: F,
    prepared: usize,
    timed: usize,
}

impl<F: Fn(&Op, Option<Variant>) -> u64> Timer for Clock<F> {
    fn prepare(&mut self, nodes: &[Node]) -> Result<()> {
        self.prepared += nodes.len();
        Ok(())
    }

    fn time(&mut self, nodes: &[Node]) -> Result<Duration> {
        self.timed += 1;
        let each = nodes.iter().map(|node| (self.nanos)(&node.op, variant(&node.op)));
        Ok(Duration::from_nanos(each.sum()))
    }
}

fn clock<F: Fn(&Op, Option<Variant>) -> u64>(nanos: F) -> Clock<F> {
    Clock { nanos, prepared: 0, timed: 0 }
}

fn variant(op: &Op) -> Option<Variant> {
    match op.pick().expect("the tuner looks only at ops that have variants") {
        Pick::Rule => None,
        Pick::Named(variant) => Some(variant),
        other => panic!("the tuner asks for {other}"),
    }
}

const GEMM: Variant = Variant::Linear(LinearVariant::Gemm);

/// Two layers of a decode step of Qwen3-8B's shapes.
fn nodes(rows: u32) -> Vec<Node> {
    let model = shapes::MODELS.iter().find(|model| model.name == "qwen3-8b").expect("it is there");
    let ops = shapes::ops(model, rows, rows, true);
    let layer = |layer: u32| {
        let node =
            move |op: &Op| Node { op: op.clone(), name: op.name().into(), layer: Some(layer) };
        ops.iter().map(node).collect::<Vec<_>>()
    };
    [layer(0), layer(1)].concat()
}

#[test]
fn the_fastest_variant_wins_and_noise_does_not() {
    let target = Target { tuned: Tuned::default(), ..Target::h200() };
    let nodes = nodes(16);
    let time = |op: &Op, variant: Option<Variant>| match (op, variant) {
        (op, Some(GEMM)) if op.name() == "linear" => 8_100,
        (op, _) if op.name() == "linear" => 9_000,
        // A gain of one per cent is not enough.
        (_, Some(Variant::Attention(AttentionVariant { stages: Some(2), warps: None, .. }))) => {
            8_910
        }
        _ => 9_000,
    };
    let mut clock = clock(time);
    let mut seen = 0;
    let tuned =
        tune(&nodes, &target, &mut clock, &mut |_, _| seen += 1).expect("a clock cannot fail");
    assert_eq!(seen, tuned.iter().count());
    assert!(clock.prepared > 0 && clock.timed >= 2 * clock.prepared, "prepared once, timed each");
    for (shape, choice) in tuned.iter() {
        // Only our kernels can prepare the input of the next linear.
        let library = shape.contains("linear") && !shape.contains("prepare");
        let best = if library { (Some(GEMM), 8_100) } else { (None, 9_000) };
        assert_eq!((choice.variant, choice.nanos, choice.rule_nanos), (best.0, best.1, 9_000));
    }
    let linear = nodes.iter().find(|node| node.op.name() == "linear").expect("a linear");
    let said = tuned.choice(&linear.op).expect("it was measured").to_string();
    assert_eq!(said, "gemm, tuned 8.1 µs over 9.0");
}

#[test]
fn lowering_follows_the_table_and_an_op_that_asks_follows_itself() {
    let rule = Target { tuned: Tuned::default(), ..Target::h200() };
    let library = |lowered: &[Lowered]| lowered.iter().any(|l| matches!(l, Lowered::Gemm(_)));
    let plain = |op: &Op| LinearChain::of(op).is_some_and(|op| op.handoff.is_nothing());
    for node in nodes(16).iter().filter(|node| plain(&node.op)) {
        let mut tuned = rule.clone();
        let choice = Choice { variant: Some(GEMM), nanos: 1, rule_nanos: 2 };
        tuned.tuned.insert(shape(&node.op).expect("linears have one"), choice);
        assert!(!library(&lower(&node.op, &rule).expect("a kernel")));
        assert!(library(&lower(&node.op, &tuned).expect("a kernel")), "{}", node.name);
        assert!(scratch_bytes(&node.op, &tuned) > scratch_bytes(&node.op, &rule));
        let mut asked = node.op.clone();
        let wgmma = Variant::Linear(LinearVariant::Wgmma(WgmmaShape::default()));
        assert!(asked.set_pick(Pick::Named(wgmma)));
        assert!(!library(&lower(&asked, &tuned).expect("a kernel")));
    }
}

/// Tuning compares with the rule's choice, so that must be able to run with the op's scratch, whatever the table
/// chose.
#[test]
fn there_is_room_for_the_choice_of_the_rule() {
    let rule = Target { tuned: Tuned::default(), ..Target::h200() };
    for (rows, ..) in shapes::BUCKETS.into_iter().filter(|(.., single)| *single) {
        for node in &nodes(rows) {
            let Some(shape) = shape(&node.op) else { continue };
            for variant in candidates(&node.op, &rule) {
                let mut tuned = rule.clone();
                let choice = Choice { variant: Some(variant), nanos: 1, rule_nanos: 2 };
                tuned.tuned.insert(shape.clone(), choice);
                let (has, needs) =
                    (scratch_bytes(&node.op, &tuned), scratch_bytes(&node.op, &rule));
                assert!(has >= needs, "{} of {rows} rows: {has} of {needs} bytes", node.name);
            }
        }
    }
}

#[test]
fn every_candidate_is_another_program_than_the_rule_and_than_each_other() {
    let target = Target { tuned: Tuned::default(), ..Target::h200() };
    for (rows, ..) in shapes::BUCKETS.into_iter().filter(|(.., single)| *single) {
        for node in &nodes(rows) {
            let lowered = |pick: Pick<Variant>| {
                let mut op = node.op.clone();
                op.set_pick(pick);
                shapes::lowered(&op, &target)
            };
            let Some(rule) = lowered(Pick::Rule) else { continue };
            let mut programs = vec![rule];
            for variant in candidates(&node.op, &target) {
                let program = lowered(Pick::Named(variant)).expect("a candidate can run");
                let fresh = node.op.name() != "linear" || !programs.contains(&program);
                assert!(fresh, "{variant} at {rows} rows of {}", node.name);
                programs.push(program);
            }
        }
    }
}

#[test]
fn a_table_survives_the_disk_and_a_torn_one_counts_as_none() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = file(folder.path(), "sm_90a", 132);
    let mut tuned = Tuned::default();
    let shape = WgmmaShape { wide: Some(64), split: Some(2), ..WgmmaShape::default() };
    let wgmma = Variant::Linear(LinearVariant::Wgmma(shape));
    for (index, variant) in [None, Some(GEMM), Some(wgmma)].into_iter().enumerate() {
        let choice = Choice { variant, nanos: index as u32, rule_nanos: 7 };
        tuned.insert(format!("linear {index}"), choice);
    }
    tuned.write(&path).expect("a folder that can be written");
    assert_eq!(Tuned::read(&path).as_ref(), Some(&tuned));
    assert_eq!(
        Tuned::of_machine(&Cache::new(folder.path()), "sm_80", 108),
        Tuned::default(),
        "another GPU"
    );
    let mut known = Tuned::shipped("sm_90a", 132);
    known.merge(tuned);
    assert_eq!(Tuned::of_machine(&Cache::new(folder.path()), "sm_90a", 132), known);
    let whole = std::fs::read(&path).expect("it was written");
    for cut in [0, 1, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..cut]).expect("a file that can be written");
        assert_eq!(Tuned::read(&path), None, "cut at {cut}");
    }
    let mut flipped = whole.clone();
    *flipped.last_mut().expect("not empty") ^= 1;
    std::fs::write(&path, flipped).expect("a file that can be written");
    assert_eq!(Tuned::read(&path), None);
    assert_eq!(
        Tuned::of_machine(&Cache::new(folder.path()), "sm_90a", 132),
        Tuned::shipped("sm_90a", 132)
    );
}

#[test]
fn shipped_tables_are_whole_and_sorted() {
    let text = include_str!("../../src/cuda/tuned/sm_90a-132.tsv");
    let table = Tuned::parse(text).expect("every line has its cells");
    assert_eq!(table, Tuned::shipped("sm_90a", 132));
    assert_eq!(table.to_string(), text, "sorted, as it would be written");
    for (shape, choice) in table.iter() {
        assert!(choice.nanos <= choice.rule_nanos, "{shape}: {choice}");
    }
}

/// Takes the first time for one node, the second for several.
struct Counts(u64, u64);

impl Timer for Counts {
    fn prepare(&mut self, _: &[Node]) -> Result<()> {
        Ok(())
    }

    fn time(&mut self, nodes: &[Node]) -> Result<Duration> {
        Ok(Duration::from_nanos(if nodes.len() == 1 { self.0 } else { self.1 }))
    }
}

#[test]
fn layers_are_one_node_only_where_that_is_faster() {
    let target = Target { tuned: Tuned::default(), ..Target::h200() };
    let layers = |name: &str, rows: u32| {
        let model = shapes::MODELS.iter().find(|model| model.name == name).expect("it is there");
        let ops = shapes::ops(model, rows, rows, true);
        let found = ops.into_iter().find(|op| op.name() == "layers");
        found.expect("decode steps have layers")
    };
    let small = layers("qwen3-0.6b", 1);
    let choice = |one, five| tune_layers(&small, &target, &mut Counts(one, five)).expect("it runs");
    let (name, faster) = choice(300, 400).expect("there is a kernel");
    assert_eq!(Some(name), shape(&small));
    assert_eq!(faster, Choice { variant: Some(Variant::OneNode), nanos: 300, rule_nanos: 400 });
    let (_, noise) = choice(395, 400).expect("there is a kernel");
    assert_eq!(noise, Choice { variant: None, nanos: 400, rule_nanos: 400 });
    // No kernel, or no memory for its exchange: nothing to measure.
    let kernel = FusedKernel::Layers { exchange: None };
    let roomless = Op::Fused(Fused { members: small.members().to_vec(), kernel });
    for layers in [layers("qwen3-8b", 1), roomless] {
        assert_eq!(tune_layers(&layers, &target, &mut Counts(1, 400)), Ok(None));
    }
}

#[test]
fn a_table_that_names_an_unknown_variant_counts_as_none() {
    let line = |shape: &str, variant: &str| format!("{shape}\t{variant}\t1\t2\n");
    let linear = "linear 16x4096x4096 BF16 BF16 BF16";
    assert!(Tuned::parse(&line(linear, "wgmma,wide=64")).is_some());
    for (shape, variant) in [
        (linear, "wgmma,tall=64"),
        (linear, "warps=8"),
        ("attention 1x32:8x128 BF16 window 0", "gemm"),
        ("layers 28x1x1024:3072 16:8x128 BF16", "two"),
    ] {
        assert_eq!(Tuned::parse(&line(shape, variant)), None, "{shape}: {variant}");
    }
}

/// Nothing is substituted silently: the requested kernel runs, or there is an error that says why not.
#[test]
fn a_variant_that_cannot_run_is_refused() {
    let target = Target { tuned: Tuned::default(), ..Target::h200() };
    let ampere = Target { capability: (8, 0), ..target.clone() };
    let refused = |op: &Op, target: &Target, what: &str| {
        let error = lower(op, target).expect_err(what).to_string();
        assert!(error.contains(what), "{error}");
    };
    let wide = |wide: u32| WgmmaShape { wide: Some(wide), ..WgmmaShape::default() };
    for node in &nodes(16) {
        let Some(linear) = LinearChain::of(&node.op) else { continue };
        let with = |variant: LinearVariant| {
            let pick = Pick::Named(variant);
            Op::from(LinearChain { pick, ..linear.clone() })
        };
        refused(&with(LinearVariant::Stream { stages: None }), &target, "no kernel `stream`");
        refused(&with(LinearVariant::Wgmma(wide(56))), &target, "no kernel `wgmma,wide=56`");
        refused(&with(LinearVariant::Wgmma(wide(64))), &ampere, "no kernel `wgmma,wide=64`");
        refused(&with(LinearVariant::Tiles), &ampere, "no kernel `tiles`");
        if linear.norm.is_some() {
            let bare = LinearChain { scratch: None, ..linear.clone() };
            refused(&Op::from(bare), &target, "bytes of scratch and has 0");
        }
    }
    for node in &nodes(1) {
        let Some(chain) = AttentionChain::of(&node.op) else { continue };
        let with = |variant: AttentionVariant| {
            let pick = Pick::Named(variant);
            let attention = Attention { pick, ..chain.attention.clone() };
            Op::from(AttentionChain { attention, ..chain.clone() })
        };
        let plain = AttentionVariant::default();
        let cluster = |n| AttentionVariant { cluster: Some(n), ..plain };
        refused(&with(cluster(3)), &target, "no kernel `cluster=3`");
        refused(&with(cluster(2)), &ampere, "no kernel `cluster=2`");
        refused(&with(AttentionVariant { kv: Some(64), ..plain }), &target, "no kernel `kv=64`");
        let attention = Attention { scratch: None, ..chain.attention.clone() };
        refused(
            &Op::from(AttentionChain { attention, ..chain }),
            &target,
            "bytes of scratch and has 0",
        );
    }
}
