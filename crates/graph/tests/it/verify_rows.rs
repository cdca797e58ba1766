//! Steps that verify drafts: what they return is what as many single steps return, and nothing of a draft that was not
//! accepted remains.

use crate::world;
use device::{Op, StepLimits};
use fixtures::Sample;
use graph::backend::BackendKind;
use graph::mail::{JoinInput, MailError, PageInput, SeatParams, StepInput, TokenOutput};
use graph::runner::{RunError, RunnerConfig, Runners};
use graph::{Form, Phase, Reason, ShapeKey};
use world::{Place, World};

const SEATS: u32 = 4;
/// Tokens of each prompt, and tokens that each sequence returns.
const PROMPT: usize = 9;
const ANSWER: usize = 40;
const PAGES: u32 = 16;

fn world(place: &Place, tokens_per_row: u32) -> World {
    let program = Sample::tiny().build("tiny");
    let pages_per_seat = PAGES;
    let limits = StepLimits { tokens_per_row, pages_per_seat, ..world::limits(&program) };
    place.world_of(&program, limits, SEATS * PAGES + 1)
}

/// Decode buckets with the given tokens per row besides one.
fn runners(place: &Place, world: &World, q_lens: &[u32], steps: u32) -> Runners {
    world.runners_with(&place.target, ("4", "40"), &|buckets| {
        let decode = buckets.phase == Phase::Decode;
        let (q_lens, steps) = if decode { (q_lens.to_vec(), steps) } else { (Vec::new(), 1) };
        RunnerConfig { q_lens, steps, ..RunnerConfig::new(BackendKind::Full, buckets) }
    })
}

fn prompt(seat: u32) -> Vec<u32> {
    (0..PROMPT as u32).map(|at| (seat * 17 + at % 4 * 5 + 3) % 64).collect()
}

/// Greedy, drawn, penalised, and with everything else.
fn params(seat: u32) -> SeatParams {
    let mut params = SeatParams { seed: u64::from(seat), ..SeatParams::greedy() };
    params.temperature = if seat % 2 == 1 { 0.6 } else { 0.0 };
    if seat >= 2 {
        (params.repetition, params.frequency) = (1.15, 0.05);
    }
    if seat == 3 {
        params.biases = vec![(7, 1.5), (20, -2.0)];
        params.logprobs = Some(2);
    }
    params
}

/// Feeds every prompt; its first token is sampled.
fn prompts(stops: &[(u32, u32)]) -> StepInput {
    let mut input = StepInput::default();
    for seat in 0..SEATS {
        input.add(seat, &prompt(seat), true);
        let mut params = params(seat);
        params.stop_tokens =
            stops.iter().filter(|stop| stop.0 == seat).map(|stop| stop.1).collect();
        let seen = prompt(seat).into_iter().map(|token| (token, false)).collect();
        let (len, last_token, history) = (0, 0, Vec::new());
        input.joins.push(JoinInput { seat, len, last_token, params, seen, history });
        let page = |index| PageInput { seat, index, page: 1 + seat * PAGES + index };
        input.pages.extend((0..PAGES).map(page));
    }
    input
}

fn verify(q_len: u32, drafts: [u32; SEATS as usize]) -> StepInput {
    let mut input = StepInput { q_len, ..StepInput::default() };
    (0..SEATS).zip(drafts).for_each(|(seat, drafts)| input.add_verified(seat, drafts));
    input
}

type Answers = Vec<Vec<TokenOutput>>;

/// Runs a launch to its end and appends what each row returned; returns the most that a row did in a step.
fn run(runners: &mut Runners, input: &StepInput, answers: &mut Answers) -> usize {
    runners.launch(input).unwrap();
    answers.resize(SEATS as usize, Vec::new());
    let mut most = 0;
    loop {
        let output = runners.wait().unwrap().expect("a result");
        for (answer, row) in answers.iter_mut().zip(output.rows()) {
            answer.extend_from_slice(row);
            most = most.max(row.len());
        }
        if !output.more_follow {
            return most;
        }
    }
}

/// What single steps return.
fn one_by_one(place: &Place) -> Answers {
    let world = world(place, 1);
    let mut runners = runners(place, &world, &[], 1);
    let mut answers = Answers::new();
    run(&mut runners, &prompts(&[]), &mut answers);
    while answers[0].len() < ANSWER {
        run(&mut runners, &StepInput::decode(0..SEATS), &mut answers);
    }
    answers
}

/// The beginnings of both agree: tokens exactly, log-probabilities nearly.
fn agree(wanted: &Answers, found: &Answers, what: &str) {
    for (seat, (wanted, found)) in wanted.iter().zip(found).enumerate() {
        let many = wanted.len().min(found.len());
        assert!(many > 0, "{what}: seat {seat} returned nothing");
        for (at, (wanted, found)) in wanted.iter().zip(found).enumerate() {
            assert_eq!(wanted.token, found.token, "{what}: seat {seat}, token {at} of {many}");
            let logprob = |token: &TokenOutput| token.logprob.as_ref().map_or(0.0, |of| of.0);
            let off = (logprob(wanted) - logprob(found)).abs();
            assert!(off < 1e-3, "{what}: seat {seat}, token {at} is {off} off");
            assert_eq!(wanted.logprob.is_some(), found.logprob.is_some(), "{what}");
        }
    }
}

#[test]
fn drafted_steps_return_what_single_steps_do() {
    for place in Place::all() {
        let wanted = one_by_one(&place);
        for (q_len, steps) in [(2, 1), (4, 1), (9, 1), (3, 5)] {
            let what = format!("{q_len} tokens a row, {steps} steps a launch");
            let world = world(&place, q_len);
            let mut runners = runners(&place, &world, &[q_len], steps);
            let (mut found, mut most, mut launches) = (Answers::new(), 0, 0);
            run(&mut runners, &prompts(&[]), &mut found);
            let input = StepInput { steps, ..verify(q_len, [q_len - 1; 4]) };
            while found.iter().any(|answer| answer.len() < ANSWER) && launches < ANSWER {
                most = most.max(run(&mut runners, &input, &mut found));
                launches += 1;
            }
            agree(&wanted, &found, &what);
            assert!(most > 1, "{what}: no draft was accepted");
            assert!(found.iter().all(|answer| answer.len() >= ANSWER), "{what}");
            assert!(runners.counters(Phase::Decode).eager.is_empty(), "{what}");
        }
    }
}

/// Rows with fewer drafts, single steps and prompts in between.
#[test]
fn rows_and_steps_of_every_kind_mix() {
    for place in Place::all() {
        let wanted = one_by_one(&place);
        let world = world(&place, 4);
        let mut runners = runners(&place, &world, &[2, 4], 1);
        let mut found = Answers::new();
        run(&mut runners, &prompts(&[]), &mut found);
        for turn in 0..12 {
            let (q_len, drafts) = match turn % 4 {
                0 => (4, [3, 0, 2, 1]),
                1 => (2, [0, 1, 0, 1]),
                2 => (1, [0; 4]),
                _ => (4, [0, 3, 3, 3]),
            };
            let input = match q_len {
                1 => StepInput::decode(0..SEATS),
                _ => verify(q_len, drafts),
            };
            let mut more = Answers::new();
            run(&mut runners, &input, &mut more);
            for ((answer, more), drafts) in found.iter_mut().zip(more).zip(drafts) {
                assert!((1..=1 + drafts as usize).contains(&more.len()));
                answer.extend(more);
            }
        }
        agree(&wanted, &found, "mixed");
    }
}

/// Drafts that the mail gives are accepted as far as they are what would have been chosen, and no further.
#[test]
fn as_many_are_accepted_as_agree() {
    for place in Place::all() {
        let wanted = one_by_one(&place);
        let world = world(&place, 6);
        let mut runners = runners(&place, &world, &[6], 1);
        for good in 0..=5 {
            runners.reset().unwrap();
            let mut found = Answers::new();
            run(&mut runners, &prompts(&[]), &mut found);
            let mut input = StepInput { q_len: 6, ..StepInput::default() };
            for seat in 0..SEATS {
                let answer = &wanted[seat as usize];
                let mut tokens: Vec<u32> = answer[..6].iter().map(|token| token.token).collect();
                if good < 5 {
                    tokens[good + 1] = (tokens[good + 1] + 1) % 64;
                }
                input.add(seat, &tokens, true);
                input.rows[seat as usize].flags |= 5 << device::step::row::DRAFTS;
            }
            assert_eq!(run(&mut runners, &input, &mut found), good + 1);
            assert!(found.iter().all(|answer| answer.len() == good + 2), "{good} good drafts");
            // What was not accepted is gone: decode goes on as if it had never been there.
            for _ in 0..12 {
                run(&mut runners, &StepInput::decode(0..SEATS), &mut found);
            }
            agree(&wanted, &found, &format!("{good} good drafts"));
        }
    }
}

#[test]
fn a_stop_token_inside_a_draft_ends_the_row() {
    for place in Place::all() {
        let wanted = one_by_one(&place);
        // A token that seat 0 says later for the first time.
        let said: Vec<u32> = wanted[0].iter().map(|token| token.token).collect();
        let new = |at: &usize| !said[..*at].contains(&said[*at]);
        let Some(at) = (2..8).find(new) else { panic!("{said:?} repeats itself too soon") };
        let world = world(&place, 9);
        let mut runners = runners(&place, &world, &[9], 4);
        let mut found = Answers::new();
        run(&mut runners, &prompts(&[(0, said[at])]), &mut found);
        let mut input = StepInput { q_len: 9, ..StepInput::default() };
        for seat in 0..SEATS {
            let tokens: Vec<u32> =
                wanted[seat as usize][..9].iter().map(|token| token.token).collect();
            input.add(seat, &tokens, true);
            input.rows[seat as usize].flags |= 8 << device::step::row::DRAFTS;
        }
        run(&mut runners, &input, &mut found);
        assert_eq!(found[0].len(), at + 1, "the row ends with its stop token");
        assert!(found[0][at].stopped && found[0][..at].iter().all(|token| !token.stopped));
        assert!(found[1..].iter().all(|answer| answer.len() == 10));
    }
}

#[test]
fn the_plan_of_a_verify_step_has_a_drafter_and_logits_of_every_token() {
    let place = Place::cpu();
    let world = world(&place, 3);
    let runners = runners(&place, &world, &[3], 1);
    let key = ShapeKey::verify(4, 3);
    let plan = runners.decode.plan_of(&key).expect("a bucket");
    assert_eq!(plan.nodes[1].op.name(), "draft");
    let found = plan.nodes.iter().find_map(|node| match &node.op {
        Op::Attention(attention) => Some((attention.single, attention.rows, attention.out.rows)),
        _ => None,
    });
    assert_eq!(found, Some((false, 4, 12)));
    let Some(Op::Sample(sample)) = plan.nodes.last().map(|node| &node.op) else { panic!("no end") };
    assert_eq!((sample.logits.rows, sample.rows, sample.q_len), (12, 4, 3));
}

#[test]
fn rows_of_a_verify_step_are_equally_long() {
    let place = Place::cpu();
    let world = world(&place, 3);
    let mut runners = runners(&place, &world, &[], 1);
    let mut input = verify(3, [2; 4]);
    input.add(5, &[1, 2], true);
    let error = runners.launch(&input).unwrap_err();
    let uneven = MailError::Uneven { found: 2, q_len: 3 };
    assert!(matches!(&error, RunError::Mail(found) if *found == uneven), "{error}");
    let key = ShapeKey { tokens: 11, ..ShapeKey::verify(4, 3) };
    assert!(graph::compile(&world.program, &place.target, &key, &world.bindings).is_err());
    assert_eq!(ShapeKey::verify(4, 1), ShapeKey::decode(4).with(Form::Once));
    // A number of tokens per row that was not recorded runs by a plan of its own.
    let ran = runners.launch(&verify(3, [2; 4])).unwrap().ran;
    assert_eq!((ran.key, ran.eager), (ShapeKey::verify(4, 3), Some(Reason::NotCovered)));
}
