//! A model that drafts inside the step. Here it is the model that verifies, with caches of its own: what it drafts greedily is
//! always right, unless a token is missing in its caches or a table is wrong.

use crate::world;
use fixtures::Sample;
use graph::backend::BackendKind;
use graph::explain::explain;
use graph::mail::{JoinInput, PageInput, SeatParams, StepInput};
use graph::runner::{Debug, RunnerConfig, Runners};
use graph::{Phase, ShapeKey};
use world::{Place, World};

use device::StepLimits;

const SEATS: u32 = 3;
const PAGES: u32 = 24;

fn world(place: &Place, tokens_per_row: u32, most_rows: u32) -> World {
    let program = Sample::tiny().build_drafting("tiny", most_rows);
    let limits = StepLimits { tokens_per_row, pages_per_seat: PAGES, ..world::limits(&program) };
    place.world_of(&program, limits, SEATS * PAGES + 1)
}

fn runners(place: &Place, world: &World, q_lens: &[u32], steps: u32, debug: Debug) -> Runners {
    world.runners_with(&place.target, ("4", "40"), &|buckets| {
        let decode = buckets.phase == Phase::Decode;
        let (q_lens, steps) = if decode { (q_lens.to_vec(), steps) } else { (Vec::new(), 1) };
        let config = RunnerConfig::new(BackendKind::Full, buckets);
        RunnerConfig { q_lens, steps, debug, ..config }
    })
}

/// Different lengths, so that rows reach the ends of pages at different steps.
fn prompt(seat: u32) -> Vec<u32> {
    (0..5 + 3 * seat).map(|at| (seat * 17 + at * 29 + 3) % 64).collect()
}

/// Feeds tokens `from..to` of every prompt, as far as it has them, and samples after the last ones.
fn chunk(from: usize, to: usize) -> StepInput {
    let mut input = StepInput::default();
    for seat in 0..SEATS {
        let all = prompt(seat);
        let (start, end) = (from.min(all.len()), to.min(all.len()));
        if start < end {
            input.add(seat, &all[start..end], end == all.len());
        }
        if from == 0 {
            let (len, last_token, seen, history) = (0, 0, Vec::new(), Vec::new());
            let params = SeatParams::greedy();
            input.joins.push(JoinInput { seat, len, last_token, params, seen, history });
            let page = |index| PageInput { seat, index, page: 1 + seat * PAGES + index };
            input.pages.extend((0..PAGES).map(page));
        }
    }
    input
}

fn verify(q_len: u32) -> StepInput {
    let mut input = StepInput { q_len, ..StepInput::default() };
    (0..SEATS).for_each(|seat| input.add_verified(seat, q_len - 1));
    input
}

/// Tokens that each seat returned; adds what a launch does, and returns how many tokens each row of it returned.
fn run(runners: &mut Runners, input: &StepInput, answers: &mut [Vec<u32>]) -> Vec<Vec<usize>> {
    let seats: Vec<u32> = input.rows.iter().map(|row| row.seat).collect();
    runners.launch(input).unwrap();
    let mut counts = Vec::new();
    loop {
        let output = runners.wait().unwrap().expect("a result");
        let mut step = Vec::new();
        for (seat, row) in seats.iter().zip(output.rows()) {
            answers[*seat as usize].extend(row.iter().map(|token| token.token));
            step.push(row.len());
        }
        counts.push(step);
        if !output.more_follow {
            return counts;
        }
    }
}

/// What single steps of the model alone return.
fn one_by_one(place: &Place, tokens: usize) -> Vec<Vec<u32>> {
    let program = Sample::tiny().build("tiny");
    let limits = StepLimits { pages_per_seat: PAGES, ..world::limits(&program) };
    let world = place.world_of(&program, limits, SEATS * PAGES + 1);
    let mut runners = runners(place, &world, &[], 1, Debug::Off);
    let mut answers = vec![Vec::new(); SEATS as usize];
    run(&mut runners, &chunk(0, 99), &mut answers);
    while answers[0].len() < tokens {
        run(&mut runners, &StepInput::decode(0..SEATS), &mut answers);
    }
    answers
}

fn agree(wanted: &[Vec<u32>], found: &[Vec<u32>], what: &str) {
    for (seat, (wanted, found)) in wanted.iter().zip(found).enumerate() {
        let many = wanted.len().min(found.len());
        assert!(many > 8, "{what}");
        assert_eq!(wanted[..many], found[..many], "{what}: seat {seat}");
    }
}

/// Every draft of every step is accepted: from whole prompts and pieces of them, after steps without drafts, by one step a
/// launch and by several.
#[test]
fn what_a_model_drafts_for_itself_is_accepted() {
    for place in Place::all() {
        let wanted = one_by_one(&place, 60);
        for (q_len, steps, pieces) in [(2, 1, 99), (4, 1, 4), (9, 1, 99), (3, 4, 2)] {
            let what = format!("{q_len} tokens a row, {steps} steps a launch, pieces of {pieces}");
            let world = world(&place, q_len, 8);
            let mut runners = runners(&place, &world, &[q_len], steps, Debug::Off);
            let mut found = vec![Vec::new(); SEATS as usize];
            for from in (0..12).step_by(pieces) {
                let input = chunk(from, from + pieces);
                if !input.rows.is_empty() {
                    run(&mut runners, &input, &mut found);
                }
            }
            for turn in 0..7 {
                // Steps without drafts feed the drafter, too.
                if turn % 3 == 2 {
                    run(&mut runners, &StepInput::decode(0..SEATS), &mut found);
                    run(&mut runners, &StepInput::decode(0..SEATS), &mut found);
                }
                let input = StepInput { steps, ..verify(q_len) };
                let counts = run(&mut runners, &input, &mut found);
                if found[0].len() < 60 && !place.is_gpu() {
                    let all = vec![vec![q_len as usize; SEATS as usize]; counts.len()];
                    assert_eq!(counts, all, "{what}, turn {turn}");
                }
            }
            agree(&wanted, &found, &what);
            assert!(runners.counters(Phase::Decode).eager.is_empty(), "{what}");
        }
    }
}

/// Replays of such steps leave what op-by-op runs leave, pad rows included.
#[test]
fn steps_with_a_drafter_replay_as_they_run() {
    for place in Place::all() {
        let world = world(&place, 4, 8);
        let mut runners = runners(&place, &world, &[2, 4], 1, Debug::Verify);
        let mut found = vec![Vec::new(); SEATS as usize];
        run(&mut runners, &chunk(0, 99), &mut found);
        for q_len in [4, 2, 4, 4] {
            run(&mut runners, &verify(q_len), &mut found);
            run(&mut runners, &StepInput::decode(0..SEATS), &mut found);
        }
        agree(&one_by_one(&place, 30), &found, "verified");
    }
}

#[test]
fn plans_show_the_passes_of_a_drafter() {
    let place = Place::cpu();
    let world = world(&place, 4, 2);
    let plan = |key: &ShapeKey| {
        graph::compile(&world.program, &place.target, key, &world.bindings).unwrap()
    };
    let verify = plan(&ShapeKey::verify(4, 4));
    assert_eq!(verify.passes.len(), 3);
    let names: Vec<String> = (0..verify.nodes.len()).map(|node| verify.node_name(node)).collect();
    assert_eq!(names[..3], ["prologue", "draft1.rows", "draft1.embed"]);
    let table = explain(&verify, &place.target).table();
    for line in ["draft 3 for each of 4 rows, 2 tokens of each at first", "propose draft 3 of 3"] {
        assert!(table.contains(line), "{table}");
    }
    assert!(table.contains("draft3.1.down"), "{table}");
    // The first pass sees two tokens of each row, and makes logits of one.
    assert_eq!(verify.key_of(1), ShapeKey::prefill(8, 4));
    let fed = plan(&ShapeKey::decode(2));
    assert!(fed.nodes[1].name == "feed.rows" && fed.passes.len() == 1);
    let last = fed.passes[0].nodes.end - 1;
    assert_eq!(fed.nodes[last].op.name(), "rope_kv", "nothing after the last keys");
    // Where there are never drafts there is nothing to feed.
    assert_eq!(plan(&ShapeKey::decode(4)).passes, []);
    assert!(plan(&ShapeKey::decode(2)).diff(&plan(&ShapeKey::decode(4))).len() > 1);
}

#[test]
fn a_drafter_of_another_program_is_refused() {
    let other = Sample {
        shape: graph::program::ModelShape { layers: 1, ..Sample::tiny().shape },
        ..Sample::tiny()
    };
    let drafter = *Sample::tiny().build_drafting("tiny", 8).drafter.unwrap();
    let mut program = other.build("other");
    program.drafter = Some(Box::new(drafter));
    assert!(program.check().unwrap_err().to_string().contains("cannot draft"));
}
