//! Bugs that other engines had, planted on purpose; each must be found by one of our checks. The list
//! of plants and what caught them is printed (`cargo test -p graph --test it hazards -- --nocapture`).

use crate::world;
use device::op::Fill;
use device::op::LinearChain;
use device::{Arena, Node, Op, OpenArena, Region, Span};
use fixtures::Sample;
use fixtures::Traffic;
use graph::backend::{Backend, BackendKind, Context, Recorded};
use graph::mail::{Mailbox, StepInput};
use graph::runner::{Capture, Fallback, RunError, RunnerConfig};
use graph::verify::{self, POISON, poison};
use graph::{CompileTarget, Phase, Plan, ShapeKey};
use std::cell::Cell;
use world::{PAGES, World};

/// A plan that was tampered with, its world, and a step to run it on.
struct Scene {
    world: World,
    plan: Plan,
    input: StepInput,
    mailbox: Mailbox,
}

impl Scene {
    /// Three rows in a bucket of four, with tokens in their pages already.
    fn new() -> Scene {
        let target = CompileTarget::cpu();
        let world = World::new(&Sample::tiny().build("tiny"), &target);
        let key = ShapeKey::decode(4);
        let plan = graph::compile(&world.program, &target, &key, &world.bindings).unwrap();
        drop(world.runners(&target, BackendKind::Disabled, ("4", "16")));
        let mut mailbox = Mailbox::new(&world.arena, &world.bindings.state).unwrap();
        let mut traffic = Traffic::new(world.limits, PAGES, 3);
        let run = |input: &StepInput, mailbox: &mut Mailbox| {
            mailbox.post(input, &key).unwrap();
            graph::backend::run_eagerly(&world.context(), &plan).unwrap();
            mailbox.sent();
            mailbox.take().unwrap().unwrap();
        };
        for _ in 0..3 {
            run(&traffic.decode(4), &mut mailbox);
        }
        let input = traffic.decode(3);
        Scene { world, plan, input, mailbox }
    }

    /// Runs the step under verification, by a backend that records `recorded` under the plan's key.
    fn verify(mut self, tamper: impl Fn(&mut Plan) + Send + Clone + 'static) -> String {
        self.mailbox.post(&self.input, &self.plan.key).unwrap();
        let mut backend = Tampering::new(Box::new(move |p| tamper(p)));
        let cx = self.world.context();
        backend.record(&cx, &self.plan).unwrap();
        let found = verify::step(&cx, &backend, &self.plan, &self.world.bindings, 1);
        found.expect_err("the planted bug was not found").to_string()
    }

    /// Runs the tampered plan itself under verification.
    fn verify_plan(mut self, tamper: impl Fn(&mut Plan, &World)) -> String {
        tamper(&mut self.plan, &self.world);
        self.mailbox.post(&self.input, &self.plan.key).unwrap();
        let cx = self.world.context();
        let mut backend = BackendKind::Full.create();
        backend.record(&cx, &self.plan).unwrap();
        let found = verify::step(&cx, &*backend, &self.plan, &self.world.bindings, 1);
        found.expect_err("the planted bug was not found").to_string()
    }

    /// Runs the tampered plan in a clean and in a poisoned workspace; returns the row that differed.
    fn poisoned(mut self, tamper: impl Fn(&mut Plan)) -> String {
        tamper(&mut self.plan);
        self.mailbox.post(&self.input, &self.plan.key).unwrap();
        let cx = self.world.context();
        let state = self.world.region(Region::State);
        let before = self.world.read(state);
        let ring = |world: &World| world.read(world.bindings.state.ring);
        let mut seen = Vec::new();
        for word in [0, POISON] {
            self.world.device.write(&self.world.arena, state, &before).unwrap();
            let to = self.world.region(Region::Workspace);
            self.run_fill(to, word);
            graph::backend::run_eagerly(&cx, &self.plan).unwrap();
            seen.push(ring(&self.world));
        }
        assert!(seen[0] != seen[1], "the planted bug was not found");
        "poison: a real row changed with what lies in pad rows".into()
    }

    fn run_fill(&self, to: device::Span, word: u32) {
        let op = Op::Fill(Fill { to, word });
        let node = Node { op, name: "fill".into(), layer: None };
        self.world.device.run(&self.world.arena, &node).unwrap();
    }
}

/// Records a changed plan instead of the given one: how tests plant bugs.
struct Tampering {
    inner: Box<dyn Backend>,
    tamper: Box<dyn Tamper>,
    /// Replays until one also writes here.
    spoils: Option<(Cell<u32>, Span)>,
}

impl Tampering {
    fn new(tamper: Box<dyn Tamper>) -> Tampering {
        Tampering { inner: BackendKind::Full.create(), tamper, spoils: None }
    }
}

trait Tamper: Fn(&mut Plan) + Send {
    fn again(&self) -> Box<dyn Tamper>;
}

impl<F: Fn(&mut Plan) + Send + Clone + 'static> Tamper for F {
    fn again(&self) -> Box<dyn Tamper> {
        Box::new(self.clone())
    }
}

impl std::fmt::Debug for Tampering {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tampering")
    }
}

impl Backend for Tampering {
    fn kind(&self) -> BackendKind {
        BackendKind::Full
    }

    fn make(&mut self, cx: &Context<'_>, plan: &Plan) -> device::Result<Recorded> {
        let mut changed = plan.clone();
        (self.tamper)(&mut changed);
        self.inner.make(cx, &changed)
    }

    fn keep(&mut self, key: &ShapeKey, recorded: Recorded) {
        self.inner.keep(key, recorded);
    }

    fn has(&self, key: &ShapeKey) -> bool {
        self.inner.has(key)
    }

    fn replay(&self, cx: &Context<'_>, plan: &Plan) -> device::Result<()> {
        self.inner.replay(cx, plan)?;
        let Some((left, span)) = &self.spoils else { return Ok(()) };
        left.set(left.get().wrapping_sub(1));
        match left.get() {
            0 => cx.device.write(cx.arena, *span, &[0x5A; 4]),
            _ => Ok(()),
        }
    }

    fn bytes(&self, key: &ShapeKey) -> u64 {
        self.inner.bytes(key)
    }

    fn fresh(&self) -> Box<dyn Backend> {
        Box::new(Tampering::new(self.tamper.again()))
    }

    fn forget(&mut self, key: &ShapeKey) -> Option<Recorded> {
        self.inner.forget(key)
    }

    fn clear(&mut self) {
        self.inner.clear();
    }
}

/// A node right after the prologue that fills the pad entry of a table of one word per row.
fn spoil_pad(plan: &mut Plan, table: device::Tensor, word: u32) {
    let to = table.span.part(3 * 4, 4);
    let op = Op::Fill(Fill { to, word });
    plan.nodes.insert(1, Node { op, name: "spoil".into(), layer: None });
}

fn problems(plan: &Plan) -> String {
    let found = plan.check();
    found.first().expect("the planted bug was not found").to_string()
}

type Plant = (&'static str, &'static str, fn() -> String);

const PLANTS: &[Plant] = &[
    ("a pad row's KV slot wraps onto the last page", "vLLM 43869", || {
        Scene::new().verify_plan(|plan, world| {
            spoil_pad(plan, world.bindings.state.kv_slot, PAGES * world.limits.page_size - 1);
        })
    }),
    ("one input is not cleared on padding", "SGLang 24743", || {
        Scene::new().verify_plan(|plan, world| spoil_pad(plan, world.bindings.state.row_flags, 1))
    }),
    ("pad rows keep the seats of an earlier, larger batch", "SGLang 33253", || {
        Scene::new().verify_plan(|plan, world| spoil_pad(plan, world.bindings.state.row_seat, 2))
    }),
    ("a real row reads what lies in a pad row", "vLLM 40047", || {
        Scene::new().poisoned(|plan| {
            // Attention reads one row too far: row 2 gets the pad row, which was never computed.
            let [Op::RopeKv(rope), Op::Attention(op)] = plan.nodes[3].op.members_mut() else {
                unreachable!()
            };
            let row = u64::from(op.qkv.cols) * 4;
            op.qkv.span.offset += row;
            rope.qkv.span.offset += row;
            rope.out.span.offset += row;
        })
    }),
    ("metadata for one number of rows, a graph for another", "xLLM 1939", || {
        let mut scene = Scene::new();
        let last = scene.plan.nodes.last_mut().unwrap();
        let Op::Sample(op) = &mut last.op else { unreachable!() };
        op.rows = 3;
        problems(&scene.plan)
    }),
    ("a host-side choice is baked into the graph and not in its key", "flashinfer 1968", || {
        Scene::new().verify(|plan| {
            for op in plan.nodes.iter_mut().flat_map(|node| node.op.members_mut()) {
                if let Op::Attention(op) = op {
                    op.window = Some(1);
                }
            }
        })
    }),
    ("a node is lost while recording", "SGLang 28569", || {
        Scene::new()
            .verify(|plan| plan.nodes.retain(|n| (n.layer, n.name.as_str()) != (Some(1), "o")))
    }),
    ("what a break reads is given to another value before it ran", "SGLang 37606", || {
        let mut scene = Scene::new();
        // The value that lives across attention (a break) is placed on what attention writes.
        let attn = scene.plan.values.iter().find(|v| v.name == "0.attn").unwrap().span;
        let carried = scene.plan.values.iter_mut().find(|v| v.name == "embed").unwrap();
        carried.span.offset = attn.offset;
        problems(&scene.plan)
    }),
    ("an op runs before what it reads is written", "SGLang 32555", || {
        let mut scene = Scene::new();
        scene.plan.nodes.swap(1, 2);
        problems(&scene.plan)
    }),
    ("a graph recorded for other weights stays in use", "re-record", || {
        let mut scene = Scene::new();
        let mut backend = BackendKind::Full.create();
        let mut old = scene.plan.clone();
        let linear = LinearChain::of(&old.nodes[2].op).unwrap();
        old.nodes[2].op = LinearChain { norm: None, ..linear }.into();
        backend.record(&scene.world.context(), &old).unwrap();
        scene.mailbox.post(&scene.input, &scene.plan.key).unwrap();
        let cx = scene.world.context();
        let found = verify::step(&cx, &*backend, &scene.plan, &scene.world.bindings, 1);
        found.expect_err("the planted bug was not found").to_string()
    }),
    ("mail is written while a launch may still read it", "SGLang 26380", || {
        let target = CompileTarget::cpu();
        let world = World::new(&Sample::tiny().build("tiny"), &target);
        let mut runners = world.runners(&target, BackendKind::Full, ("4", "16"));
        let mut traffic = Traffic::new(world.limits, PAGES, 3);
        runners.launch(&traffic.decode(4)).unwrap();
        runners.launch(&traffic.decode(4)).unwrap();
        runners.launch(&traffic.decode(4)).expect_err("the planted bug was not found").to_string()
    }),
    ("memory is allocated while recording", "cubecl tests", || {
        let target = CompileTarget::cpu();
        let world = World::new(&Sample::tiny().build("tiny"), &target);
        let options = device::RecordOptions::default();
        let _recording = world.device.record(&world.arena, "planted", options).unwrap();
        let sealed: device::Result<Arena> = world.device.seal(OpenArena::new());
        sealed.expect_err("the planted bug was not found").to_string()
    }),
    ("a step that no graph covers runs slowly and is not reported", "SGLang 33900", || {
        let target = CompileTarget::cpu();
        let world = World::new(&Sample::tiny().build("tiny"), &target);
        let config = |buckets| RunnerConfig {
            fallback: Fallback::Error,
            ..RunnerConfig::new(BackendKind::Full, buckets)
        };
        let mut runners = world.runners_with(&target, ("2", "16"), &config);
        let mut traffic = Traffic::new(world.limits, PAGES, 3);
        let error = runners.launch(&traffic.decode(4)).expect_err("the planted bug was not found");
        assert!(matches!(error, RunError::NotCovered { .. }));
        error.to_string()
    }),
    ("the scheduler admits past the largest graph", "SGLang 33483", || {
        let target = CompileTarget::cpu();
        let world = World::new(&Sample::tiny().build("tiny"), &target);
        let mut runners = world.runners(&target, BackendKind::Full, ("2", "16"));
        let mut traffic = Traffic::new(world.limits, PAGES, 3);
        // Every step within the coverage replays; a scheduler that uses the limits instead forms steps that do not.
        for (admitted, planted) in
            [(runners.coverage().decode_rows, false), (world.limits.rows, true)]
        {
            runners.launch(&traffic.decode(admitted)).unwrap();
            runners.wait().unwrap();
            let counters = runners.counters(Phase::Decode);
            let all_replayed = counters.replayed == counters.steps;
            assert_ne!(all_replayed, planted, "the planted bug was not found");
        }
        format!(
            "counters: not every step was replayed, {:?}",
            runners.counters(Phase::Decode).eager
        )
    }),
    ("lazy recording grows without end", "llama.cpp 28652", || {
        let target = CompileTarget::cpu();
        let world = World::new(&Sample::tiny().build("tiny"), &target);
        // With its budget a lazy runner keeps the graphs that fit; without it, it keeps all.
        let kept = |budget: Option<u64>| {
            let lazy = |buckets| RunnerConfig {
                capture: Capture::Lazy,
                budget,
                ..RunnerConfig::new(BackendKind::Full, buckets)
            };
            let mut runners = world.runners_with(&target, ("1,2,4,8", "16"), &lazy);
            let mut traffic = Traffic::new(world.limits, PAGES, 3);
            for round in 0..64 {
                runners.launch(&traffic.decode([1, 2, 4, 8][round % 4])).unwrap();
                runners.wait().unwrap();
                runners.decode.settle();
            }
            runners.decode.recorded().iter().map(|(_, bytes)| bytes).sum::<u64>()
        };
        let all = kept(None);
        let budget = all / 2;
        assert!(kept(Some(budget)) <= budget, "a budget is kept");
        assert!(all > budget, "the planted bug was not found");
        format!("recorded bytes: {all} where {budget} are allowed")
    }),
    ("free pages and dead spans are read", "SGLang 32555", || {
        let scene = Scene::new();
        let workspace = scene.world.region(Region::Workspace);
        poison(&scene.world.context(), workspace).unwrap();
        scene.poisoned(|plan| {
            // The first projection reads bytes that were never written instead of the embedding.
            let mut linear = LinearChain::of(&plan.nodes[2].op).unwrap();
            let used = linear.x.span.end().max(linear.y.span.end());
            linear.x.span.offset = used.next_multiple_of(device::ALIGN);
            plan.nodes[2].op = linear.into();
        })
    }),
    ("a product writes over part of what it reads", "none", || {
        let mut scene = Scene::new();
        let mut linear = LinearChain::of(&scene.plan.nodes[2].op).unwrap();
        linear.x.span.offset = linear.y.span.offset;
        scene.plan.nodes[2].op = linear.into();
        let refused = BackendKind::Full.create().record(&scene.world.context(), &scene.plan);
        refused.expect_err("the planted bug was not found").to_string()
    }),
];

#[test]
fn every_planted_bug_is_found() {
    println!("{:<64} {:<18} caught by", "planted bug", "seen in");
    for (what, seen, plant) in PLANTS {
        println!("{what:<64} {seen:<18} {}", plant());
    }
}

/// One replay of many goes wrong, in what the step writes or in another seat's seen tokens.
#[test]
fn a_replay_that_goes_wrong_once_is_found() {
    let verify = |wrong: u32, others: bool| {
        let mut scene = Scene::new();
        scene.mailbox.post(&scene.input, &scene.plan.key).unwrap();
        let state = &scene.world.bindings.state;
        let seen = state.seen.expect("penalties");
        let row = seen.span.len / u64::from(seen.rows);
        // The last seat has no row in the step.
        let last = seen.span.part(u64::from(state.limits.seats - 1) * row, 4);
        let span = if others { last } else { state.kv_len.span.part(0, 4) };
        let mut backend = Tampering::new(Box::new(|_: &mut Plan| ()));
        backend.spoils = Some((Cell::new(wrong), span));
        let cx = scene.world.context();
        backend.record(&cx, &scene.plan).unwrap();
        verify::step(&cx, &backend, &scene.plan, &scene.world.bindings, 4)
    };
    for others in [false, true] {
        for wrong in 1..=4 {
            assert!(verify(wrong, others).is_err(), "replay {wrong}, others {others}");
        }
        verify(5, others).expect("nothing went wrong in four");
    }
}
