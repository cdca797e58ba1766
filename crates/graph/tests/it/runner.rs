//! What runners promise beyond the numbers: coverage, budgets, counters, refusals and debugging.

use crate::world;
use device::{DeviceKind, Node, Op, Region};
use fixtures::{Sample, Setup, Sweep, Traffic};
use graph::backend::{BackendKind, Context, Piece};
use graph::mail::{MailError, Mailbox, StepInput};
use graph::runner::{Capture, Debug, Fallback, RunError, RunnerConfig, Runners, StepShape};
use graph::{CompileTarget, Phase, Reason, ShapeKey};
use std::cell::RefCell;
use world::{PAGES, Place, World, buckets};

/// Runs a test on every device of this machine.
fn everywhere(test: impl Fn(World, CompileTarget)) {
    for place in Place::all() {
        test(place.world(&Sample::tiny().build("tiny")), place.target.clone());
    }
}

/// Runs a test that counts the bytes of recordings, which only the CPU makes equal for all buckets.
fn on_the_cpu(test: impl Fn(World, CompileTarget)) {
    let place = Place::cpu();
    test(place.world(&Sample::tiny().build("tiny")), place.target);
}

fn full(buckets: graph::bucket::Buckets) -> RunnerConfig {
    RunnerConfig::new(BackendKind::Full, buckets)
}

/// Runs a decode step and returns how it ran.
fn decode(
    runners: &mut Runners,
    traffic: &mut Traffic,
    rows: u32,
) -> Result<Option<Reason>, RunError> {
    let launched = runners.launch(&traffic.decode(rows))?;
    runners.wait()?.expect("a result");
    Ok(launched.ran.eager)
}

#[test]
fn a_step_says_which_bucket_or_why_not() {
    everywhere(|world, target| {
        let runners = world.runners(&target, BackendKind::Full, ("2,4", "16"));
        let decode =
            |rows: u32| StepShape { phase: Phase::Decode, rows, tokens: rows, adapters: false };
        assert_eq!(runners.decode.can_run(&decode(1)), Ok(ShapeKey::decode(2)));
        assert_eq!(runners.decode.can_run(&decode(4)), Ok(ShapeKey::decode(4)));
        assert_eq!(runners.decode.can_run(&decode(5)), Err(Reason::NotCovered));
        let mixed = StepShape { phase: Phase::Prefill, rows: 3, tokens: 9, adapters: false };
        assert_eq!(runners.decode.can_run(&mixed), Err(Reason::WrongPhase));
        assert_eq!(runners.prefill.can_run(&mixed), Ok(ShapeKey::prefill(16, 8)));
        let coverage = runners.coverage();
        assert_eq!(
            (coverage.decode_rows, coverage.prefill_tokens, coverage.prefill_rows),
            (4, 16, 8)
        );
        let none = world.runners(&target, BackendKind::Disabled, ("2,4", "16"));
        assert_eq!(none.decode.can_run(&decode(1)), Err(Reason::Disabled));
        assert_eq!(none.coverage().decode_rows, 0);
    });
}

#[test]
fn nothing_falls_back_in_silence() {
    everywhere(|world, target| {
        let mut traffic = Traffic::new(world.limits, PAGES, 1);
        let mut warns = world.runners_with(&target, ("2", "16"), &full);
        assert_eq!(decode(&mut warns, &mut traffic, 2).unwrap(), None);
        let launched = warns.launch(&traffic.decode(5)).unwrap();
        assert_eq!((launched.ran.eager, launched.ran.warn), (Some(Reason::NotCovered), true));
        assert_eq!(launched.ran.key, ShapeKey::decode(5), "a plan of its own");
        warns.wait().unwrap().unwrap();
        let launched = warns.launch(&traffic.decode(5)).unwrap();
        assert!(!launched.ran.warn, "once is enough");
        warns.wait().unwrap().unwrap();
        let counters = warns.counters(Phase::Decode);
        assert_eq!(
            (counters.steps, counters.replayed, counters.eager[&Reason::NotCovered]),
            (3, 1, 2)
        );
        assert_eq!(counters.sizes, [(2, 1), (5, 2)].into());

        let refusing = |buckets| RunnerConfig { fallback: Fallback::Error, ..full(buckets) };
        let mut refuses = world.runners_with(&target, ("2", "16"), &refusing);
        let mut traffic = Traffic::new(world.limits, PAGES, 1);
        let error = decode(&mut refuses, &mut traffic, 5).unwrap_err();
        assert_eq!(error.to_string(), "no recorded graph covers 5 rows of 5 tokens: not_covered");
        assert_eq!(
            decode(&mut refuses, &mut Traffic::new(world.limits, PAGES, 1), 1).unwrap(),
            None
        );
    });
}

#[test]
fn padding_is_counted_and_bounded() {
    everywhere(|world, target| {
        let mut traffic = Traffic::new(world.limits, PAGES, 2);
        let strict = |buckets| RunnerConfig { max_padding: Some(0.5), ..full(buckets) };
        let mut runners = world.runners_with(&target, ("8", "16"), &strict);
        assert_eq!(decode(&mut runners, &mut traffic, 4).unwrap(), None);
        assert_eq!(decode(&mut runners, &mut traffic, 7).unwrap(), None);
        assert_eq!(decode(&mut runners, &mut traffic, 3).unwrap(), Some(Reason::Padding));
        let bucket = runners.counters(Phase::Decode).buckets[&ShapeKey::decode(8)];
        assert_eq!((bucket.replayed, bucket.live, bucket.padded), (2, 11, 5));
        assert_eq!(runners.counters(Phase::Decode).padding_ratio(), 5.0 / 16.0);
    });
}

#[test]
fn a_budget_keeps_the_buckets_worth_keeping() {
    on_the_cpu(|world, target| {
        let all = world.runners_with(&target, ("1,2,4,8", "16"), &full);
        let each = all.decode.recorded()[0].1;
        assert!(each > 0, "a recording takes memory");
        let two = |buckets| RunnerConfig { budget: Some(2 * each + each / 2), ..full(buckets) };
        let mut runners = world.runners_with(&target, ("1,2,4,8", "16"), &two);
        let kept: Vec<u32> =
            runners.decode.recorded().iter().map(|(key, _)| key.bucket()).collect();
        assert_eq!(kept, [4, 8], "the largest, and what saves the most padding");
        let mut traffic = Traffic::new(world.limits, PAGES, 2);
        assert_eq!(decode(&mut runners, &mut traffic, 1).unwrap(), None, "a larger graph serves");
        assert_eq!(runners.counters(Phase::Decode).buckets[&ShapeKey::decode(4)].padded, 3);
        assert_eq!(runners.coverage().decode_rows, 8);
    });
}

#[test]
fn lazy_capture_records_what_is_wanted_and_stays_bounded() {
    on_the_cpu(|world, target| {
        let all = world.runners_with(&target, ("1,2,4,8", "16"), &full);
        let each = all.decode.recorded()[0].1;
        let lazy = |buckets| RunnerConfig {
            capture: Capture::Lazy,
            budget: Some(2 * each + each / 2),
            ..full(buckets)
        };
        let mut runners = world.runners_with(&target, ("1,2,4,8", "16"), &lazy);
        let mut traffic = Traffic::new(world.limits, PAGES, 2);
        assert_eq!(runners.decode.recorded(), vec![]);
        for _ in 0..3 {
            assert_eq!(decode(&mut runners, &mut traffic, 1).unwrap(), Some(Reason::NotRecorded));
        }
        runners.decode.settle();
        assert_eq!(decode(&mut runners, &mut traffic, 1).unwrap(), None, "earned");
        let mut recordings = 0;
        let mut before: Vec<ShapeKey> = Vec::new();
        // Traffic that alternates between four sizes must not record at every change.
        for round in 0..40 {
            decode(&mut runners, &mut traffic, [1, 2, 4, 8][round % 4]).unwrap();
            runners.decode.settle();
            let now: Vec<ShapeKey> =
                runners.decode.recorded().into_iter().map(|(key, _)| key).collect();
            recordings += now.iter().filter(|key| !before.contains(key)).count();
            assert!(now.len() <= 2, "bounded");
            before = now;
        }
        assert!(recordings <= 4, "{recordings} recordings");
        let recorded = runners.counters(Phase::Decode).recorded;
        assert!(recorded <= 4, "{recorded} recordings, those that did not fit included");
    });
}

#[test]
fn no_step_waits_for_a_graph_that_is_being_recorded() {
    on_the_cpu(|world, target| {
        let lazy = |buckets| RunnerConfig { capture: Capture::Lazy, ..full(buckets) };
        let mut runners = world.runners_with(&target, ("1,2", "16"), &lazy);
        let mut traffic = Traffic::new(world.limits, PAGES, 2);
        // Another thread records something, so that the runner's cannot begin.
        let (held, go) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let cx = world.context();
                let recording = cx.device.record(cx.arena, "held", cx.options).unwrap();
                held.wait();
                go.wait();
                drop(recording);
            });
            held.wait();
            for _ in 0..20 {
                let ran = decode(&mut runners, &mut traffic, 1).unwrap();
                assert_eq!(ran, Some(Reason::NotRecorded), "it runs op by op meanwhile");
            }
            assert_eq!(runners.decode.recorded(), vec![]);
            go.wait();
        });
        runners.decode.settle();
        assert_eq!(decode(&mut runners, &mut traffic, 1).unwrap(), None);
        assert_eq!(runners.counters(Phase::Decode).recorded, 1, "it was asked for once");
    });
}

#[test]
fn two_launches_may_be_under_way_and_not_three() {
    everywhere(|world, target| {
        let mut runners = world.runners(&target, BackendKind::Full, ("2", "16"));
        let mut traffic = Traffic::new(world.limits, PAGES, 4);
        runners.launch(&traffic.decode(2)).unwrap();
        runners.launch(&traffic.decode(2)).unwrap();
        let third = traffic.decode(2);
        let error = runners.launch(&third).unwrap_err();
        assert!(
            matches!(error, RunError::Mail(MailError::Device(device::Error::MailBusy { .. }))),
            "{error}"
        );
        assert_eq!(runners.in_flight(), 2);
        assert_eq!(runners.wait().unwrap().unwrap().launch, 1);
        assert_eq!(runners.launch(&third).unwrap().number, 3);
        assert_eq!(runners.wait().unwrap().unwrap().launch, 2);
        assert_eq!(runners.wait().unwrap().unwrap().launch, 3);
        assert_eq!(runners.wait().unwrap(), None);
    });
}

#[test]
fn a_recording_made_again_and_a_reset_world_run_the_same() {
    everywhere(|world, target| {
        let mut runners = world.runners(&target, BackendKind::Breakable, ("4", "16"));
        let play = |runners: &mut Runners| {
            let mut traffic = Traffic::new(world.limits, PAGES, 9);
            let steps = (0..12).map(|step| {
                let input = if step % 3 == 0 { traffic.prefill(9) } else { traffic.decode(3) };
                runners.launch(&input).unwrap();
                runners.wait().unwrap().unwrap()
            });
            steps.collect::<Vec<_>>()
        };
        let first = play(&mut runners);
        runners.reset().unwrap();
        runners.re_record(&mut |_, _| {}).unwrap();
        assert_eq!(play(&mut runners), first);
    });
}

#[test]
fn pages_are_copied_before_the_step() {
    everywhere(|world, target| {
        let mut runners = world.runners(&target, BackendKind::Full, ("4", "16"));
        let mut traffic = Traffic::new(world.limits, PAGES, 9);
        runners.launch(&traffic.prefill(16)).unwrap();
        runners.wait().unwrap();
        let (page, tokens) = traffic.live_pages()[0];
        assert!(tokens > 0);
        let spare =
            (1..PAGES).find(|p| traffic.live_pages().iter().all(|(live, _)| live != p)).unwrap();
        let input = StepInput { copies: vec![(page, spare)], ..traffic.decode(1) };
        let kv = &world.bindings.kv[1];
        let bytes = |page: u32| {
            world.read(kv.span.part(u64::from(page) * kv.page_bytes(), kv.page_bytes()))
        };
        let source = bytes(page);
        runners.launch(&input).unwrap();
        runners.wait().unwrap();
        assert!(bytes(spare) == source);
    });
}

#[test]
fn the_host_may_look_at_every_break() {
    everywhere(|world, target| {
        let key = ShapeKey::decode(2);
        let plan = graph::compile(&world.program, &target, &key, &world.bindings).unwrap();
        let mut runners = world.runners(&target, BackendKind::Disabled, ("2", "16"));
        let mut traffic = Traffic::new(world.limits, PAGES, 4);
        runners.launch(&traffic.prefill(3)).unwrap();
        runners.wait().unwrap();
        let mut backend = BackendKind::Breakable.create();
        backend.record(&world.context(), &plan).unwrap();
        let seen = RefCell::new(Vec::new());
        let hook = |index: usize, node: &device::Node| {
            // Reading is refused while recording and allowed here.
            let Some(Op::Attention(op)) = node.op.members().last() else {
                panic!("breaks are attention")
            };
            seen.borrow_mut().push((index, world.device.read(&world.arena, op.qkv.span)?.len()));
            Ok(())
        };
        let cx = Context { at_break: Some(&hook), ..world.context() };
        backend.replay(&cx, &plan).unwrap();
        let expected: Vec<_> = plan.breaks.iter().map(|&at| (at, 512)).collect();
        assert_eq!((expected.len(), &*seen.borrow()), (2, &expected));
    });
}

#[test]
fn debugging_runs_the_bucket_op_by_op_or_both_ways() {
    everywhere(|world, target| {
        let config = |debug: Debug| move |buckets| RunnerConfig { debug, ..full(buckets) };
        let mut plain = world.runners_with(&target, ("4", "16"), &full);
        let mut traffic = Traffic::new(world.limits, PAGES, 6);
        let inputs: Vec<StepInput> = (0..10)
            .map(|i| if i % 3 == 0 { traffic.prefill(12) } else { traffic.decode(3) })
            .collect();
        let play = |runners: &mut Runners| {
            let run = |input| {
                let launched = runners.launch(input).unwrap();
                (launched.ran.eager, runners.wait().unwrap().unwrap())
            };
            inputs.iter().map(run).unzip::<_, _, Vec<_>, Vec<_>>()
        };
        let (_, expected) = play(&mut plain);
        let (how, eager) =
            play(&mut world.runners_with(&target, ("4", "16"), &config(Debug::Eager)));
        assert_eq!(eager, expected);
        assert!(how.iter().all(|how| *how == Some(Reason::Debug)));
        let (how, verified) =
            play(&mut world.runners_with(&target, ("4", "16"), &config(Debug::Verify)));
        assert_eq!(verified, expected);
        assert!(how.iter().all(Option::is_none));
    });
}

#[test]
fn a_sweep_covers_every_bucket_of_every_backend() {
    everywhere(|world, target| {
        let decode = buckets("1,4,8", Phase::Decode, 8);
        let prefill = buckets("8,40", Phase::Prefill, 40);
        let setups = Setup::each_backend(&target, &decode, &prefill);
        let sweep = Sweep { setups, steps: 3, replays: 3, seed: 7 };
        let (device, arena) = (&world.device, &world.arena);
        let mut told = 0;
        let findings =
            sweep.run(device, arena, &world.program, &world.bindings, &mut |_| told += 1).unwrap();
        assert!(findings.passed(), "{findings:?}");
        assert_eq!((told, findings.verified.len()), (15, 15));
        assert!(findings.verified.iter().all(|line| line.steps == 3));
    });
}

#[test]
fn a_lost_row_list_is_noticed() {
    everywhere(|world, target| {
        let key = ShapeKey::decode(4);
        let plan = graph::compile(&world.program, &target, &key, &world.bindings).unwrap();
        let runners = world.runners(&target, BackendKind::Disabled, ("4", "16"));
        drop(runners);
        let mut mailbox = Mailbox::new(&world.arena, &world.bindings.state).unwrap();
        mailbox.post(&StepInput::decode([0, 1]), &key).unwrap();
        // The mail is overwritten before the launch: the device keeps its old, empty row list.
        let bank = world.bindings.state.mail[1];
        world.device.write(&world.arena, bank.part(0, 8), &[0; 8]).unwrap();
        graph::backend::run_eagerly(&world.context(), &plan).unwrap();
        mailbox.sent();
        world.device.sync().unwrap();
        assert_eq!(mailbox.take().unwrap_err(), MailError::Rows { launch: 1, sent: 2, found: 0 });
    });
}

/// The pieces of the tiny program's decode plan, and the one that has this node.
fn piece_of(plan: &graph::Plan, node: usize) -> usize {
    let holds = |piece: &Piece| match piece {
        Piece::Graph(nodes) => nodes.contains(&node),
        Piece::Alone(index) => *index == node,
    };
    BackendKind::Piecewise.pieces(plan).iter().position(holds).unwrap()
}

#[test]
fn a_piece_is_replaced_and_recorded_alone() {
    everywhere(|world, target| {
        let config = |buckets| RunnerConfig {
            debug: Debug::Verify,
            ..RunnerConfig::new(BackendKind::Piecewise, buckets)
        };
        let mut runners = world.runners_with(&target, ("4", "16"), &config);
        let key = ShapeKey::decode(4);
        let plan = runners.decode.plan_of(&key).unwrap().clone();
        let named = |name: &str| (0..plan.nodes.len()).find(|&at| plan.node_name(at) == name);
        let (one, other) = (named("0.down").unwrap(), named("1.down").unwrap());
        let tokens = |runners: &mut Runners| {
            let mut traffic = Traffic::new(world.limits, PAGES, 3);
            runners.reset().unwrap();
            let run = |_| {
                runners.launch(&traffic.decode(4)).unwrap();
                runners.wait().unwrap().unwrap()
            };
            (0..6).map(run).collect::<Vec<_>>()
        };
        let before = tokens(&mut runners);

        // The first layer's matrix is replaced by the second's, in one piece.
        let (piece, range) = (piece_of(&plan, one), BackendKind::Piecewise.pieces(&plan));
        let Piece::Graph(range) = range[piece].clone() else { panic!("a matrix is in a graph") };
        let mut nodes = plan.nodes[range.clone()].to_vec();
        let weight = |node: &Node| {
            let mut found = None;
            node.op.visit_spans(&mut |span, _| {
                found = found.or((span.region == Region::Weights).then_some(span));
            });
            found.unwrap()
        };
        let (old, new) = (weight(&plan.nodes[one]), weight(&plan.nodes[other]));
        let text = serde_json::to_string(&nodes[one - range.start]).unwrap();
        let [old, new] = [old, new].map(|span| serde_json::to_string(&span).unwrap());
        assert!(text.contains(&old));
        nodes[one - range.start] = serde_json::from_str(&text.replace(&old, &new)).unwrap();
        let recorded = runners.decode.counters().recorded;
        runners.decode.replace_piece(&key, piece, nodes.clone()).unwrap();
        assert_eq!(runners.decode.counters().recorded, recorded + 1, "one piece");
        // Every step is compared with the new plan, op by op.
        let after = tokens(&mut runners);
        assert_ne!(before, after);
        runners.decode.replace_piece(&key, piece, plan.nodes[range.clone()].to_vec()).unwrap();
        assert_eq!(tokens(&mut runners), before);

        // What does not fit is refused, and nothing changes.
        let mut refused = |piece, nodes| {
            let error = runners.decode.replace_piece(&key, piece, nodes).unwrap_err();
            assert_eq!(tokens(&mut runners), before, "{error}");
            error.to_string()
        };
        let few = refused(piece, nodes[1..].to_vec());
        assert!(few.contains("nodes, "), "{few}");
        assert!(refused(999, nodes.clone()).contains("no such piece"));
        let mut backwards = plan.nodes[range].to_vec();
        backwards.reverse();
        refused(piece, backwards);
    });
}

#[test]
fn a_cut_at_an_op_that_fusion_removed_is_refused() {
    let place = Place::cpu();
    let world = place.world(&Sample::tiny().build("tiny"));
    let make = |backend, at: &str| {
        let config = |list: &str, phase, most| RunnerConfig {
            break_at: Some([at.to_owned()].into()),
            ..RunnerConfig::new(backend, buckets(list, phase, most))
        };
        let (decode, prefill) = (config("4", Phase::Decode, 8), config("16", Phase::Prefill, 40));
        let (program, bindings) = (world.program.clone(), world.bindings.clone());
        let (device, arena, target) = (&world.device, &world.arena, place.target.clone());
        Runners::new(device, arena, program, target, bindings, decode, prefill).map(drop)
    };
    make(BackendKind::Piecewise, "attention").unwrap();
    // `full` is never cut.
    make(BackendKind::Full, "activate").unwrap();
    for backend in [BackendKind::Breakable, BackendKind::Piecewise] {
        let error = make(backend, "activate").unwrap_err().to_string();
        assert!(error.contains("no node is `activate` after fusion; there are "), "{error}");
    }
}

#[test]
fn a_prefill_step_takes_the_graph_of_as_few_rows_as_it_has() {
    everywhere(|world, target| {
        let config = |mut buckets: graph::bucket::Buckets| {
            if buckets.phase == Phase::Prefill {
                buckets.rows = vec![2, 4];
            }
            RunnerConfig { debug: Debug::Verify, ..full(buckets) }
        };
        let mut runners = world.runners_with(&target, ("8", "3,16"), &config);
        let keys: Vec<String> =
            runners.prefill.recorded().iter().map(|(key, _)| key.to_string()).collect();
        assert_eq!(
            keys,
            ["prefill/3x2", "prefill/3x3", "prefill/16x2", "prefill/16x4", "prefill/16x8"]
        );
        let shape =
            |rows, tokens| StepShape { phase: Phase::Prefill, rows, tokens, adapters: false };
        for (rows, tokens, expected) in
            [(1, 2, (3, 2)), (3, 3, (3, 3)), (2, 9, (16, 2)), (3, 9, (16, 4)), (5, 9, (16, 8))]
        {
            let key = runners.prefill.can_run(&shape(rows, tokens)).unwrap();
            assert_eq!((key.tokens, key.rows), expected, "{rows} rows of {tokens} tokens");
        }
        // Every step is compared with its plan; where rows have the same kernels, tokens are those of graphs of one size.
        let mut plain = world.runners(&target, BackendKind::Full, ("8", "3,16"));
        let play = |runners: &mut Runners| {
            let mut traffic = Traffic::new(world.limits, PAGES, 5);
            runners.reset().unwrap();
            let step = |at: u32| {
                runners.launch(&traffic.prefill(3 + at % 14)).unwrap();
                runners.wait().unwrap().unwrap()
            };
            (0..24).map(step).collect::<Vec<_>>()
        };
        let (few, all) = (play(&mut runners), play(&mut plain));
        assert!(world.device.kind() != DeviceKind::Cpu || few == all);
        assert!(runners.prefill.counters().buckets.len() >= 4);
    });
}
