//! Steps whose rows have several tokens each, as used to verify drafts.

mod world;

use device::Op;
use fixtures::Sample;
use graph::backend::BackendKind;
use graph::mail::{JoinInput, MailError, PageInput, SeatParams, StepInput};
use graph::runner::{RunError, Runners};
use graph::{Form, Phase, Reason, ShapeKey};
use world::{Place, World};

/// Prompts of seven tokens for four seats.
fn prompt(seat: u32) -> Vec<u32> {
    (0..7).map(|at| (seat * 17 + at * 5 + 3) % 64).collect()
}

/// Feeds tokens `from..to` of every prompt, in one step.
fn feed(from: usize, to: usize, q_len: u32) -> StepInput {
    let mut input = StepInput { q_len, ..StepInput::default() };
    for seat in 0..4 {
        input.add(seat, &prompt(seat)[from..to], true);
        if from == 0 {
            let params = SeatParams { logprobs: Some(5), ..SeatParams::greedy() };
            let (len, last_token, seen) = (0, 0, Vec::new());
            input.joins.push(JoinInput { seat, len, last_token, params, seen });
            let page = |index| PageInput { seat, index, page: 1 + seat * 4 + index };
            input.pages.extend((0..4).map(page));
        }
    }
    input
}

/// The logits that the sampler read, row by row.
fn logits(world: &World, runners: &Runners, key: &ShapeKey) -> Vec<f32> {
    let plan = match key.phase {
        Phase::Decode => runners.decode.plan_of(key),
        Phase::Prefill => runners.prefill.plan_of(key),
    };
    let sampled = plan.unwrap().nodes.iter().find_map(|node| match &node.op {
        Op::Sample(sample) => Some(sample.logits),
        _ => None,
    });
    let bytes = world.read(sampled.unwrap().span);
    let all = bytes.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap()));
    all.take(4 * 64).collect()
}

#[test]
fn a_verify_step_computes_what_prefill_does() {
    for place in Place::all() {
        let program = Sample::tiny().build("tiny");
        let (one, two) = (place.world(&program), place.world(&program));
        let mut wanted = one.runners(&place.target, BackendKind::Full, ("4", "40"));
        let mut found = two.runners(&place.target, BackendKind::Full, ("4", "40"));
        for runners in [&mut wanted, &mut found] {
            runners.launch(&feed(0, 4, 0)).unwrap();
            runners.wait().unwrap().unwrap();
        }
        let prefill = wanted.launch(&feed(4, 7, 0)).unwrap().ran;
        let verify = found.launch(&feed(4, 7, 3)).unwrap().ran;
        assert_eq!((prefill.key.phase, verify.key), (Phase::Prefill, ShapeKey::verify(4, 3)));
        assert_eq!(verify.eager, Some(Reason::NotCovered));
        assert_eq!(wanted.wait().unwrap(), found.wait().unwrap());
        let (a, b) = (logits(&one, &wanted, &prefill.key), logits(&two, &found, &verify.key));
        let close = a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-4);
        assert!(close && a.iter().any(|x| x.abs() > 0.1), "logits differ");

        // The plan's attention has the form for rows of several tokens.
        let plan = found.decode.plan_of(&verify.key).unwrap();
        let attention = plan.nodes.iter().find_map(|node| match &node.op {
            Op::Attention(attention) => {
                Some((attention.single, attention.rows, attention.out.rows))
            }
            _ => None,
        });
        assert_eq!(attention, Some((false, 4, 12)));

        // Decode goes on from there.
        for runners in [&mut wanted, &mut found] {
            runners.launch(&StepInput::decode(0..4)).unwrap();
        }
        assert_eq!(wanted.wait().unwrap(), found.wait().unwrap());
    }
}

#[test]
fn rows_of_a_verify_step_are_equally_long() {
    let place = Place::cpu();
    let world = place.world(&Sample::tiny().build("tiny"));
    let mut runners = world.runners(&place.target, BackendKind::Full, ("4", "40"));
    let mut input = feed(0, 3, 3);
    input.add(5, &[1, 2], true);
    let error = runners.launch(&input).unwrap_err();
    let uneven = MailError::Uneven { found: 2, q_len: 3 };
    assert!(matches!(&error, RunError::Mail(found) if *found == uneven), "{error}");
    let key = ShapeKey { tokens: 11, ..ShapeKey::verify(4, 3) };
    assert!(graph::compile(&world.program, &place.target, &key, &world.bindings).is_err());
    assert_eq!(ShapeKey::verify(4, 1), ShapeKey::decode(4).with(Form::Once));
}
