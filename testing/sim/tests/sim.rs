//! A short version of what the `sim` binary runs.

use engine::plant::Plant;
use sim::campaign::{Plan, Totals, failing_call};
use sim::device::Fault;

#[test]
fn seeds_have_no_violations() {
    let (totals, failure) = Plan::default().seeds(0, 400, |_| {});
    assert!(failure.is_none(), "{failure:?}");
    assert!(
        totals.preemptions > 0 && totals.restarts > 0 && totals.copies > 0 && totals.cached > 0
    );
    assert!(totals.repeated > 1000, "only {} steps in launches of several", totals.repeated);
}

#[test]
fn rows_with_several_tokens_or_none_give_the_same_answers() {
    let several = Plan { several: true, ..Plan::default() };
    let (totals, failure) = several.seeds(0, 300, |_| {});
    assert!(failure.is_none(), "{failure:?}");
    let Totals { preemptions, repeated, extra, empty, .. } = totals;
    assert!(preemptions > 0 && repeated > 1000 && extra > 10_000 && empty > 1000, "{totals:?}");
    let small = Plan { cache_share: Some(0.3), ..several };
    let (totals, failure) = small.seeds(0, 60, |_| {});
    assert!(failure.is_none(), "{failure:?}");
    assert!(totals.preemptions > 100, "{totals:?}");
}

#[test]
fn layers_with_windows_give_pages_back() {
    let windows = Plan { windows: true, ..Plan::default() };
    let (totals, failure) = windows.seeds(0, 400, |_| {});
    assert!(failure.is_none(), "{failure:?}");
    let Totals { preemptions, restarts, copies, cached, .. } = totals;
    assert!(preemptions > 0 && restarts > 0 && copies > 0 && cached > 0, "{totals:?}");
    for several in [false, true] {
        let small = Plan { cache_share: Some(0.3), several, ..windows };
        let (totals, failure) = small.seeds(0, 80, |_| {});
        assert!(failure.is_none(), "{failure:?}");
        assert!(totals.preemptions > 100 && totals.cached > 1000, "{totals:?}");
    }
}

#[test]
fn recurrent_layers_go_on_where_a_copy_of_their_state_is() {
    let carries = Plan { carries: true, ..Plan::default() };
    let (totals, failure) = carries.seeds(0, 400, |_| {});
    assert!(failure.is_none(), "{failure:?}");
    let Totals { preemptions, restarts, cached, .. } = totals;
    assert!(preemptions > 0 && restarts > 0 && cached > 1000, "{totals:?}");
    for several in [false, true] {
        let small = Plan { cache_share: Some(0.3), several, ..carries };
        let (totals, failure) = small.seeds(0, 80, |_| {});
        assert!(failure.is_none(), "{failure:?}");
        assert!(totals.preemptions > 100 && totals.cached > 0, "{totals:?}");
    }
    let several = Plan { several: true, ..carries };
    let (totals, failure) = several.seeds(0, 200, |_| {});
    assert!(failure.is_none(), "{failure:?}");
    assert!(totals.extra > 10_000 && totals.empty > 500 && totals.cached > 500, "{totals:?}");
}

#[test]
fn a_seed_is_reproducible() {
    for seed in 0..40 {
        let plan = Plan { several: seed % 2 == 0, windows: seed % 3 == 0, ..Plan::default() };
        let run = || plan.run(seed).unwrap();
        let (first, again) = (run(), run());
        assert_eq!((first.trace, first.ticks), (again.trace, again.ticks), "seed {seed}");
    }
}

#[test]
fn answers_do_not_depend_on_the_cache_size() {
    let plan = Plan { cache_share: Some(0.3), ..Plan::default() };
    let (totals, failure) = plan.seeds(0, 120, |_| {});
    assert!(failure.is_none(), "{failure:?}");
    assert!(totals.preemptions >= 1000, "only {} preemptions", totals.preemptions);
}

#[test]
fn every_call_can_fail() {
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
    // Planted bugs may panic; their messages are suppressed.
    std::panic::set_hook(Box::new(|_| {}));
    let missed: Vec<&str> = Plant::ALL
        .iter()
        .filter(|&&plant| Plan::planted(plant).seeds(0, 500, |_| {}).1.is_none())
        .map(|plant| plant.name())
        .collect();
    let _ = std::panic::take_hook();
    assert!(missed.is_empty(), "not found: {missed:?}");
}
