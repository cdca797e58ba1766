//! A small helping of what the `sim` binary does at length.

use engine::plant::Plant;
use sim::campaign::{Plan, failing_call, one};
use sim::device::Fault;

#[test]
fn seeds_hold() {
    let (totals, failure) = Plan::default().seeds(0, 400, |_| {});
    assert!(failure.is_none(), "{failure:?}");
    assert!(
        totals.preemptions > 0 && totals.restarts > 0 && totals.copies > 0 && totals.cached > 0
    );
    assert!(totals.repeated > 1000, "only {} steps in launches of several", totals.repeated);
}

#[test]
fn a_seed_is_the_same_every_time() {
    for seed in 0..40 {
        let (first, again) = (one(seed, None, 0).unwrap(), one(seed, None, 0).unwrap());
        assert_eq!((first.trace, first.ticks), (again.trace, again.ticks), "seed {seed}");
    }
}

#[test]
fn answers_survive_a_cache_of_thirty_percent() {
    let plan = Plan { cache_share: Some(0.3), ..Plan::default() };
    let (totals, failure) = plan.seeds(0, 120, |_| {});
    assert!(failure.is_none(), "{failure:?}");
    assert!(totals.preemptions >= 1000, "only {} preemptions", totals.preemptions);
}

#[test]
fn every_call_may_fail() {
    let whole = failing_call(u64::MAX, Fault::StateLost).unwrap();
    assert!(whole.stats.decode_steps + whole.stats.prefill_steps >= 200);
    for call in 1..=whole.calls {
        for fault in Fault::ALL {
            if let Err(what) = failing_call(call, fault) {
                panic!("{fault:?} at call {call}: {what}");
            }
        }
    }
}

#[test]
fn every_planted_bug_is_found() {
    // Planted bugs may panic; their messages would only be noise.
    std::panic::set_hook(Box::new(|_| {}));
    let missed: Vec<&str> = Plant::ALL
        .iter()
        .filter(|&&plant| {
            let plan = Plan { plant: Some(plant), ..Plan::default() };
            plan.seeds(0, 300, |_| {}).1.is_none()
        })
        .map(|plant| plant.name())
        .collect();
    let _ = std::panic::take_hook();
    assert!(missed.is_empty(), "not found: {missed:?}");
}
