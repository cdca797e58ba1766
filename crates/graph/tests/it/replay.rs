//! Replay equals eager execution bit for bit: every backend, every bucket, grown, shrunk, padded and alternated.

use crate::world;
use fixtures::Sample;
use fixtures::{Rng, Traffic};
use graph::Phase;
use graph::backend::BackendKind;
use graph::mail::StepInput;
use graph::program::Program;
use graph::runner::{Launched, Runners};
use world::{PAGES, Place, World, random};

const LISTS: (&str, &str) = ("1,2,4,8", "8,16,24,40");

/// One step on both; tokens, log-probabilities and every byte that outlives the step must agree.
fn step_both(a: (&World, &mut Runners), b: (&World, &mut Runners), input: &StepInput) -> Launched {
    let launched = a.1.launch(input).unwrap();
    b.1.launch(input).unwrap();
    let (one, other) = (a.1.wait().unwrap().unwrap(), b.1.wait().unwrap().unwrap());
    assert_eq!(one, other, "{}", launched.ran.key);
    assert!(a.0.memory() == b.0.memory(), "state or pages differ after {}", launched.ran.key);
    launched
}

/// `steps` random batches replayed by `backend` beside the same ones run op by op.
fn replay_beside_eager(
    place: &Place,
    program: &Program,
    backend: BackendKind,
    steps: u32,
    seed: u64,
) {
    let (here, there) = (place.world(program), place.world(program));
    let mut replayed = here.runners(&place.target, backend, LISTS);
    let mut eager = there.runners(&place.target, BackendKind::Disabled, LISTS);
    let mut traffic = Traffic::new(here.limits, PAGES, seed);
    let mut rng = Rng::new(seed);
    for _ in 0..steps {
        let input = match rng.below(3) {
            0 => traffic.prefill(1 + rng.below(40)),
            _ => traffic.decode(1 + rng.below(8)),
        };
        let launched = step_both((&here, &mut replayed), (&there, &mut eager), &input);
        assert_eq!(launched.ran.eager, None, "{}", launched.ran.key);
    }
    for phase in Phase::ALL {
        let counters = replayed.counters(phase);
        assert_eq!(counters.steps, counters.replayed);
        assert_eq!(counters.buckets.len(), 4, "every bucket was used");
        assert_eq!(eager.counters(phase).replayed, 0);
    }
}

const RECORDING: [BackendKind; 3] =
    [BackendKind::Full, BackendKind::Breakable, BackendKind::Piecewise];

#[test]
fn every_backend_gives_the_same_bits_as_running_op_by_op() {
    let program = Sample::tiny().build("tiny");
    for place in Place::all() {
        for backend in RECORDING {
            replay_beside_eager(&place, &program, backend, 1000, 11);
        }
    }
}

#[test]
fn programs_nobody_would_write_replay_the_same_bits_too() {
    for place in Place::all() {
        // A GPU compiles kernels for every new shape, which is what takes the time there.
        let programs = if place.is_gpu() { 3 } else { 8 };
        for backend in RECORDING {
            for seed in 0..programs {
                replay_beside_eager(&place, &random::program(seed), backend, 1000, seed);
            }
        }
    }
}

#[test]
fn every_pair_of_buckets_alternates() {
    let program = Sample::tiny().build("tiny");
    for place in Place::all() {
        let (here, there) = (place.world(&program), place.world(&program));
        let mut replayed = here.runners(&place.target, BackendKind::Full, LISTS);
        let mut eager = there.runners(&place.target, BackendKind::Disabled, LISTS);
        let mut traffic = Traffic::new(here.limits, PAGES, 3);
        // Decode of 1, 2, 3, 5 and 8 (padded and not), prefill of 5, 16, 17 and 40.
        let sizes = [(true, 1), (true, 2), (true, 3), (true, 5), (true, 8)];
        let sizes: Vec<(bool, u32)> =
            sizes.into_iter().chain([(false, 5), (false, 16), (false, 17), (false, 40)]).collect();
        for &first in &sizes {
            for &second in &sizes {
                for (decode, size) in [first, second, first, second] {
                    let input = if decode { traffic.decode(size) } else { traffic.prefill(size) };
                    step_both((&here, &mut replayed), (&there, &mut eager), &input);
                }
            }
        }
    }
}
