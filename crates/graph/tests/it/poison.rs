//! Poison: before every replay, everything that must not matter is filled with NaN (the workspace, and
//! with it every pad row; every page no live token is on, the scratch page too; the unused part of live
//! pages). Results and live tokens' K and V must be bit-equal to a world without poison.

use crate::world;
use device::Region;
use fixtures::Sample;
use fixtures::{Rng, Traffic};
use graph::Phase;
use graph::backend::BackendKind;
use graph::mail::{StepInput, StepOutput};
use graph::runner::RunnerConfig;
use graph::verify::{POISON, poison};
use std::collections::BTreeMap;
use world::{PAGES, Place, World};

const LISTS: (&str, &str) = ("1,2,4,8", "8,16,24,40");
const REPLAYS: u32 = 10_000;
/// Worlds of the long run, side by side: one alone leaves a GPU waiting for the host most of the time.
const LIVES: u32 = 8;

/// Steps of a long run, all lives together; `DACAPO_SOAK=1000000` for the whole of it.
fn soak_steps(otherwise: u32) -> u32 {
    let asked = std::env::var("DACAPO_SOAK").ok();
    asked.map_or(otherwise, |steps| steps.parse().expect("DACAPO_SOAK is a number of steps"))
}

/// The lives of the long run; `DACAPO_SOAK_LIVES=1` for one alone, as an engine has its process.
fn soak_lives() -> Vec<u32> {
    let life = |number: &str| number.parse().expect("DACAPO_SOAK_LIVES is a list of numbers");
    match std::env::var("DACAPO_SOAK_LIVES") {
        Ok(asked) => asked.split(',').map(life).collect(),
        Err(_) => (0..LIVES).collect(),
    }
}

#[test]
fn nothing_that_must_not_matter_matters() {
    run_clean_and_dirty(BackendKind::Full, REPLAYS, 1, 0);
}

#[test]
fn nor_in_launches_of_several_steps() {
    run_clean_and_dirty(BackendKind::Full, REPLAYS / 4, 1, 1);
}

/// The long run: pages come and go, dead memory is poisoned now and then, and replay always equals
/// running op by op.
#[test]
fn replay_does_not_drift_from_eager() {
    let lives = soak_lives();
    let steps = soak_steps(20_000).div_ceil(lives.len() as u32);
    std::thread::scope(|scope| {
        for life in lives {
            scope.spawn(move || run_clean_and_dirty(BackendKind::Disabled, steps, 97, life));
        }
    });
}

/// As long, for loops on one stream, as an engine has. Compared with single steps by graph, which are faster than
/// op by op.
#[test]
fn loops_do_not_drift_from_single_steps() {
    run_clean_and_dirty(BackendKind::Full, soak_steps(5_000), 97, 1);
}

/// Steps in a clean world by `backend`, one by one, and by one graph in a world where everything that must
/// not matter is poisoned every `period` launches. A `life` is its own sequence of requests; in every
/// other one the graph repeats decode steps by itself.
fn run_clean_and_dirty(backend: BackendKind, steps: u32, period: u32, life: u32) {
    let mut sample = Sample::tiny();
    sample.shape.layers = 1;
    let program = sample.build("tiny");
    for place in Place::all() {
        let (clean, dirty) = (place.world(&program), place.world(&program));
        let mut a = clean.runners(&place.target, backend, LISTS);
        let mut b = dirty.runners_with(&place.target, LISTS, &|buckets| {
            let steps = if buckets.phase == Phase::Decode && life % 2 == 1 { 8 } else { 1 };
            RunnerConfig { steps, ..RunnerConfig::new(BackendKind::Full, buckets) }
        });
        let most = b.decode.config().steps;
        let mut traffic = Traffic::new(clean.limits, PAGES, 21 + u64::from(life));
        let mut rng = Rng::new(8 + u64::from(life));
        let (mut step, mut launch, mut repeated) = (0, 0, 0);
        while step < steps {
            let look = launch % period == 0;
            if steps > REPLAYS && launch % REPLAYS == 0 {
                eprintln!("life {life}: {step} of {steps} steps");
            }
            launch += 1;
            if look {
                // What is live before the step may be read by it; everything else is poisoned.
                poison(&dirty.context(), dirty.region(Region::Workspace)).unwrap();
                poison_pages(&dirty, &traffic.live_pages().into_iter().collect());
            }
            let mut input = match rng.below(4) {
                0 => traffic.prefill(1 + rng.below(40)),
                _ => traffic.decode(1 + rng.below(8)),
            };
            // A mask is for one step.
            let repeats = input.shape().phase == Phase::Decode && input.masks.is_empty();
            input.steps = if repeats { 1 + rng.below(most) } else { 1 };
            a.launch(&input).unwrap();
            b.launch(&input).unwrap();
            loop {
                let one = a.wait().unwrap().expect("a result");
                let other = b.wait().unwrap().expect("a result");
                let rows =
                    |output: &StepOutput| output.rows().map(<[_]>::to_vec).collect::<Vec<_>>();
                let same = (one.launch, rows(&one)) == (other.launch, rows(&other));
                assert!(same, "life {life}, step {step}: {one:?} and {other:?}");
                let mut reported = other.rows().flatten().filter_map(|row| row.logprob.as_ref());
                assert!(reported.all(|found| found.0.is_finite()), "step {step}");
                step += 1;
                if !other.more_follow {
                    break;
                }
                repeated += 1;
                traffic.went_on(&input);
                a.launch(&StepInput::decode(input.rows.iter().map(|row| row.seat))).unwrap();
            }
            if look {
                let live: BTreeMap<u32, u32> = traffic.live_pages().into_iter().collect();
                assert!(
                    live_bytes(&clean, &live) == live_bytes(&dirty, &live),
                    "step {step}: live pages differ"
                );
            }
        }
        if steps > REPLAYS {
            eprintln!("life {life}: done");
        }
        assert_eq!(b.counters(Phase::Decode).eager.len(), 0);
        assert!(most == 1 || repeated > steps / 6, "{repeated} of {steps} steps repeated");
    }
}

/// The byte ranges of the token slots of a page in a layer's span: live ones and dead ones.
fn slots(world: &World, page: u32, tokens: u32, visit: &mut dyn FnMut(usize, usize, bool)) {
    let kv = &world.bindings.kv[0];
    let token = kv.head_dim as usize * 4;
    for part in 0..2 * kv.heads {
        for index in 0..kv.page_size {
            let at = page as usize * kv.page_bytes() as usize
                + (part * kv.page_size + index) as usize * token;
            visit(at, token, index < tokens);
        }
    }
}

fn poison_pages(world: &World, live: &BTreeMap<u32, u32>) {
    for kv in &world.bindings.kv {
        let mut bytes = world.read(kv.span);
        for page in 0..kv.pages {
            slots(world, page, live.get(&page).copied().unwrap_or(0), &mut |at, len, live| {
                if !live {
                    let word = POISON.to_le_bytes();
                    bytes[at..at + len].chunks_exact_mut(4).for_each(|c| c.copy_from_slice(&word));
                }
            });
        }
        world.device.write(&world.arena, kv.span, &bytes).unwrap();
    }
}

fn live_bytes(world: &World, live: &BTreeMap<u32, u32>) -> Vec<u8> {
    let mut all = Vec::new();
    for kv in &world.bindings.kv {
        let bytes = world.read(kv.span);
        for (&page, &tokens) in live {
            slots(world, page, tokens, &mut |at, len, live| {
                if live {
                    all.extend_from_slice(&bytes[at..at + len]);
                }
            });
        }
    }
    all
}
