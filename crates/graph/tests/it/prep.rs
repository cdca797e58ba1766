//! The four ways to prepare a decode step give the same tokens, log-probabilities and pages.

use crate::world;
use fixtures::Sample;
use fixtures::{Rng, Traffic};
use graph::backend::BackendKind;
use graph::mail::{StepInput, StepOutput};
use graph::runner::{Debug, RunError, RunnerConfig, Runners};
use graph::{CompileTarget, Phase, Prep};
use std::collections::VecDeque;
use world::{PAGES, Place, World};

const LISTS: (&str, &str) = ("1,2,4,8", "8,16,24,40");

fn steps(seed: u64, world: &World) -> Vec<StepInput> {
    let mut traffic = Traffic::new(world.limits, PAGES, seed);
    let mut rng = Rng::new(seed);
    let mut step = || match rng.below(4) {
        0 => traffic.prefill(1 + rng.below(40)),
        _ => traffic.decode(1 + rng.below(8)),
    };
    (0..400).map(|_| step()).collect()
}

/// Runs the steps with up to `depth` of them in flight.
fn play(runners: &mut Runners, steps: &[StepInput], depth: usize) -> Vec<StepOutput> {
    let mut outputs = Vec::new();
    let mut flying = VecDeque::new();
    for step in steps {
        flying.push_back(runners.launch(step).unwrap().number);
        while flying.len() >= depth {
            let output = runners.wait().unwrap().expect("a result");
            assert_eq!(Some(output.launch), flying.pop_front());
            outputs.push(output);
        }
    }
    while let Some(output) = runners.wait().unwrap() {
        outputs.push(output);
    }
    outputs
}

fn prepared(world: &World, target: &CompileTarget, prep: Prep, debug: Debug) -> Runners {
    world.runners_with(target, LISTS, &|buckets| {
        let decode = buckets.phase == Phase::Decode;
        let prep = if decode { prep } else { Prep::Device };
        RunnerConfig { prep, debug, ..RunnerConfig::new(BackendKind::Full, buckets) }
    })
}

#[test]
fn all_four_give_the_same_tokens() {
    let program = Sample::tiny().build("tiny");
    for place in Place::all() {
        let target = &place.target;
        for depth in [1, 2] {
            let mut wanted = None;
            for prep in [Prep::Device, Prep::Copy, Prep::Fused, Prep::Async] {
                let world = place.prepared(&program, prep);
                let mut runners = prepared(&world, target, prep, Debug::Off);
                let outputs = play(&mut runners, &steps(7, &world), depth);
                assert_eq!(outputs.len(), 400);
                let [_, pages] = world.memory();
                let counters = runners.counters(Phase::Decode);
                assert_eq!(counters.steps, counters.replayed, "{prep}");
                let (tokens, kv) = wanted.get_or_insert_with(|| (outputs.clone(), pages.clone()));
                assert_eq!(*tokens, outputs, "{prep}, {depth} in flight");
                assert!(*kv == pages, "{prep}, {depth} in flight: pages differ");
            }
        }
    }
}

#[test]
fn replay_is_eager_whoever_prepares() {
    let program = Sample::tiny().build("tiny");
    let target = CompileTarget::cpu();
    for prep in Prep::ALL {
        let device = device::cpu::open(Some(1), false).unwrap();
        let world = World::prepared(device, &program, &target, prep);
        let mut verified = prepared(&world, &target, prep, Debug::Verify);
        play(&mut verified, &steps(3, &world)[..60], 1);
    }
}

#[test]
fn a_wrong_mirror_shows() {
    // The device reads the blocks: changing one changes the tokens.
    let program = Sample::tiny().build("tiny");
    let target = CompileTarget::cpu();
    let run = |spoil: bool| {
        let device = device::cpu::open(Some(1), false).unwrap();
        let world = World::prepared(device, &program, &target, Prep::Fused);
        let mut runners = prepared(&world, &target, Prep::Fused, Debug::Off);
        let mut traffic = Traffic::new(world.limits, PAGES, 5);
        let first = runners.launch(&traffic.decode(4)).map(|_| runners.wait().unwrap());
        assert!(first.is_ok());
        let mut second = traffic.decode(4);
        if spoil {
            // A page that is not the seat's, seen only by the mirror: decode mail holds no pages.
            let seat = second.rows[0].seat;
            second.pages.push(graph::mail::PageInput { seat, index: 0, page: PAGES - 1 });
        }
        runners.launch(&second).unwrap();
        runners.wait().unwrap();
        world.read(world.region(device::Region::Kv))
    };
    assert!(run(false) != run(true));
}

#[test]
fn blocks_must_be_bound() {
    let program = Sample::tiny().build("tiny");
    let target = CompileTarget::cpu();
    let world = World::new(&program, &target);
    let config = |phase, max, prep| {
        let buckets = world::buckets("auto", phase, max);
        RunnerConfig { prep, ..RunnerConfig::new(BackendKind::Full, buckets) }
    };
    let made = Runners::new(
        &world.device,
        &world.arena,
        program,
        target,
        world.bindings.clone(),
        config(Phase::Decode, 8, Prep::Copy),
        config(Phase::Prefill, 40, Prep::Device),
    );
    assert!(matches!(made, Err(RunError::Compile(_))));
}
