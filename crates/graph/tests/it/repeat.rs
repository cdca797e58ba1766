//! Several decode steps in one launch give what as many launches give, and a launch ends where it must:
//! at a stop, before a missing page, when the host asks.

use crate::world;
use fixtures::Sample;
use graph::backend::BackendKind;
use graph::mail::{JoinInput, MailError, PageInput, SeatParams, StepInput, StepOutput};
use graph::runner::{RunError, RunnerConfig, Runners};
use graph::{Form, Phase};
use world::{Place, World};

const SEATS: u32 = 3;

fn runners(place: &Place, world: &World, steps: u32) -> Runners {
    world.runners_with(&place.target, ("4", "40"), &|buckets| {
        let steps = if buckets.phase == Phase::Decode { steps } else { 1 };
        RunnerConfig { steps, ..RunnerConfig::new(BackendKind::Full, buckets) }
    })
}

fn world(place: &Place) -> World {
    place.world(&Sample::tiny().build("tiny"))
}

/// Three sequences, two of which sample, each with `pages` pages.
fn seats(pages: u32, stop: Option<u32>) -> StepInput {
    let join = |seat: u32| {
        let mut params = SeatParams { seed: u64::from(seat), ..SeatParams::greedy() };
        params.temperature = if seat > 0 { 1.0 } else { 0.0 };
        params.logprobs = (seat == 1).then_some(2);
        params.stop_tokens = stop.into_iter().filter(|_| seat == 2).collect();
        JoinInput { seat, len: 0, last_token: 5 + seat, params, seen: vec![], history: vec![] }
    };
    let entries = (0..SEATS).flat_map(|seat| {
        (0..pages).map(move |index| PageInput { seat, index, page: 1 + seat * pages + index })
    });
    StepInput {
        joins: (0..SEATS).map(join).collect(),
        pages: entries.collect(),
        ..StepInput::decode(0..SEATS)
    }
}

fn quiet(steps: u32) -> StepInput {
    StepInput { steps, ..StepInput::decode(0..SEATS) }
}

/// All results of a launch, in order.
fn launch(runners: &mut Runners, input: &StepInput) -> Vec<StepOutput> {
    runners.launch(input).unwrap();
    let mut outputs = Vec::new();
    loop {
        outputs.push(runners.wait().unwrap().expect("a result"));
        if !outputs[outputs.len() - 1].more_follow {
            assert_eq!(runners.in_flight(), 0);
            return outputs;
        }
        assert_eq!(runners.in_flight(), 1);
    }
}

/// The rows of steps launched one at a time.
fn one_by_one(place: &Place, steps: usize, stop: Option<u32>) -> (Vec<StepOutput>, World) {
    let world = world(place);
    let mut runners = runners(place, &world, 1);
    let mut outputs = launch(&mut runners, &seats(4, stop));
    while outputs.len() < steps {
        outputs.extend(launch(&mut runners, &quiet(1)));
    }
    (outputs, world)
}

fn rows(outputs: &[StepOutput]) -> Vec<Vec<&[graph::mail::TokenOutput]>> {
    outputs.iter().map(|output| output.rows().collect()).collect()
}

#[test]
fn many_steps_are_the_same_as_one_by_one() {
    Place::all().iter().for_each(many_steps_are_the_same_as_one_by_one_at);
}

fn many_steps_are_the_same_as_one_by_one_at(place: &Place) {
    let (wanted, there) = one_by_one(place, 14, None);
    for size in [2, 3, 8] {
        let world = world(place);
        let mut runners = runners(place, &world, 8);
        let mut found = launch(&mut runners, &StepInput { steps: size, ..seats(4, None) });
        assert_eq!(found.len(), size as usize);
        while found.len() < 14 {
            let steps = size.min(14 - found.len() as u32);
            let more = launch(&mut runners, &quiet(steps));
            assert_eq!(more.len(), steps as usize);
            found.extend(more);
        }
        assert_eq!(rows(&wanted), rows(&found), "{size} steps a launch");
        let numbers: Vec<u64> = found.iter().map(|output| output.launch).collect();
        assert_eq!(numbers, (1..=14).collect::<Vec<u64>>());
        assert_eq!(runners.counters(Phase::Decode).replayed, 14);
        let kv = |world: &World| world.memory()[1].clone();
        assert!(kv(&world) == kv(&there), "pages differ");
    }
}

#[test]
fn a_stop_ends_the_launch() {
    Place::all().iter().for_each(a_stop_ends_the_launch_at);
}

fn a_stop_ends_the_launch_at(place: &Place) {
    // The token that seat 2 returns in its fourth step becomes its stop token.
    let (free, _) = one_by_one(place, 12, None);
    let said: Vec<u32> = free.iter().map(|output| output.row(2)[0].token).collect();
    let (at, stop) =
        said.iter().enumerate().skip(2).find(|(i, t)| !said[..*i].contains(t)).unwrap();
    let world = world(place);
    let mut runners = runners(place, &world, 12);
    let found = launch(&mut runners, &StepInput { steps: 12, ..seats(4, Some(*stop)) });
    assert_eq!(found.len(), at + 1, "it went on past the stop");
    assert!(found[at].row(2)[0].stopped);
    assert!(found[..at].iter().all(|output| !output.row(2)[0].stopped));
    let tokens = |outputs: &[StepOutput]| -> Vec<u32> {
        outputs.iter().flat_map(|output| output.rows().map(|row| row[0].token)).collect()
    };
    assert_eq!(tokens(&found), tokens(&free[..=at]));
    // The next launch goes on from there, to the next stop or to its end.
    assert_eq!(launch(&mut runners, &quiet(3))[0].launch, found[at].launch + 1);
}

#[test]
fn a_missing_page_ends_the_launch() {
    Place::all().iter().for_each(a_missing_page_ends_the_launch_at);
}

fn a_missing_page_ends_the_launch_at(place: &Place) {
    // Pages of four tokens: one page holds four, so a launch of up to eight ends with the fourth.
    let (wanted, _) = one_by_one(place, 9, None);
    let world = world(place);
    let mut runners = runners(place, &world, 8);
    let mut found = launch(&mut runners, &StepInput { steps: 8, ..seats(1, None) });
    assert_eq!(found.len(), 4, "the step after has nowhere to write");
    let mut more = quiet(8);
    more.pages = (0..SEATS).map(|seat| PageInput { seat, index: 1, page: 20 + seat }).collect();
    found.extend(launch(&mut runners, &more));
    assert_eq!(found.len(), 8);
    assert_eq!(rows(&wanted[..8]), rows(&found));
}

#[test]
fn the_host_can_ask_it_to_leave() {
    Place::all().iter().for_each(the_host_can_ask_it_to_leave_at);
}

fn the_host_can_ask_it_to_leave_at(place: &Place) {
    let world = world(place);
    let mut runners = runners(place, &world, 8);
    assert_eq!(launch(&mut runners, &StepInput { steps: 4, ..seats(4, None) }).len(), 4);
    runners.stop_loop();
    assert_eq!(launch(&mut runners, &quiet(4)).len(), 1, "asked before it began: one step");
    assert_eq!(launch(&mut runners, &quiet(4)).len(), 4, "the asking was for that launch alone");
}

#[test]
fn the_next_launch_follows_the_last_step() {
    Place::all().iter().for_each(the_next_launch_follows_the_last_step_at);
}

fn the_next_launch_follows_the_last_step_at(place: &Place) {
    let (wanted, _) = one_by_one(place, 13, None);
    let world = world(place);
    let mut runners = runners(place, &world, 8);
    let (mut found, mut waiting) = (Vec::new(), 0);
    for input in [StepInput { steps: 5, ..seats(4, None) }, quiet(3), quiet(1), quiet(4)] {
        runners.launch(&input).unwrap();
        waiting += input.steps;
        while waiting > 1 {
            if waiting > 2 {
                let error = runners.launch(&quiet(2)).unwrap_err();
                assert!(matches!(error, RunError::Mail(MailError::Repeating { .. })), "{error}");
            }
            found.push(runners.wait().unwrap().expect("a result"));
            waiting -= 1;
        }
        assert_eq!(runners.in_flight(), 1, "its last step");
    }
    found.push(runners.wait().unwrap().expect("the last one"));
    assert_eq!(runners.in_flight(), 0);
    assert_eq!(rows(&wanted), rows(&found));
    let numbers: Vec<u64> = found.iter().map(|output| output.launch).collect();
    assert_eq!(numbers, (1..=13).collect::<Vec<u64>>());
}

#[test]
fn steps_that_cannot_repeat_run_once() {
    Place::all().iter().for_each(steps_that_cannot_repeat_run_once_at);
}

fn steps_that_cannot_repeat_run_once_at(place: &Place) {
    let world = world(place);
    let mut once = runners(place, &world, 1);
    assert_eq!(launch(&mut once, &StepInput { steps: 8, ..seats(4, None) }).len(), 1);
    let mut many = runners(place, &world, 8);
    let launched = many.launch(&StepInput { steps: 8, ..seats(4, None) }).unwrap();
    assert_eq!(launched.ran.key.form, Form::Repeated);
    let error = many.launch(&quiet(1)).unwrap_err();
    assert!(matches!(error, RunError::Mail(MailError::Repeating { launch: 1 })), "{error}");
}

/// Twelve threads with streams of their own, eight of them with loops.
#[test]
fn graphs_come_and_go_beside_loops() {
    let live = |place: &Place, steps: u32| {
        let world = world(place);
        let mut runners = runners(place, &world, steps);
        let input = StepInput { steps, ..seats(4, None) };
        let wanted = launch(&mut runners, &input);
        for _ in 0..40 {
            assert_eq!(rows(&wanted), rows(&launch(&mut runners, &input)));
        }
    };
    std::thread::scope(|scope| {
        for thread in 0..12 {
            let steps = if thread < 8 { 8 } else { 1 };
            let lives =
                move || (0..3).flat_map(|_| Place::all()).for_each(|place| live(&place, steps));
            scope.spawn(lives);
        }
    });
}
