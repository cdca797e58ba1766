//! Programs that take rows from the host in place of embeddings.

use crate::world;
use device::Op;
use device::step::GIVEN_ROW;
use fixtures::Sample;
use graph::backend::BackendKind;
use graph::mail::{GivenRows, JoinInput, MailError, PageInput, SeatParams, StepInput};
use graph::program::{Input, InputId, Program, ProgramOp};
use graph::runner::{RunError, Runners};
use graph::{Phase, ShapeKey};
use world::{Place, World};

const PROMPT: [u32; 6] = [9, 41, 7, 60, 22, 13];

fn program() -> Program {
    let mut program = Sample::tiny().build("tiny");
    let (cols, dtype) = (program.shape.hidden, program.shape.act_dtype);
    program.inputs.push(Input { name: "image".into(), rows: 5, cols, dtype });
    for step in &mut program.steps {
        if let ProgramOp::Embed(embed) = &mut step.op {
            embed.given = Some(InputId(0));
        }
    }
    program.check().unwrap();
    program
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
}

fn feed(tokens: &[u32], given: Vec<GivenRows>) -> StepInput {
    let mut input = StepInput { given, ..StepInput::default() };
    input.add(0, tokens, true);
    let params = SeatParams::greedy();
    let (seat, len, last_token, seen) = (0, 0, 0, Vec::new());
    input.joins.push(JoinInput { seat, len, last_token, params, seen, history: Vec::new() });
    input.pages.extend((0..4).map(|index| PageInput { seat, index, page: 1 + index }));
    input
}

/// The logits after the first `count` tokens of a prompt.
fn logits(world: &World, runners: &mut Runners, input: &StepInput) -> Vec<f32> {
    runners.launch(input).unwrap();
    runners.wait().unwrap().unwrap();
    let key = ShapeKey::prefill(16, 8);
    let plan = runners.prefill.plan_of(&key).unwrap();
    assert_eq!(plan.key.phase, Phase::Prefill);
    let sampled = plan.nodes.iter().find_map(|node| match &node.op {
        Op::Sample(sample) => Some(sample.logits),
        _ => None,
    });
    let vocab = world.program.shape.vocab as usize;
    floats(&world.read(sampled.unwrap().span))[..vocab].to_vec()
}

/// The logits after each prefix of the prompt, where token 2 is row 3 of the input.
fn given(world: &World, runners: &mut Runners, row: &[f32]) -> Vec<Vec<f32>> {
    let mut tokens = PROMPT;
    tokens[2] = GIVEN_ROW + 3;
    let rows = || vec![GivenRows { input: 0, row: 3, values: row.to_vec() }];
    let prefix = |count| logits(world, runners, &feed(&tokens[..count], rows()));
    (1..=PROMPT.len()).map(prefix).collect()
}

#[test]
fn given_rows_take_the_place_of_embeddings() {
    for place in Place::all() {
        let world = place.world(&program());
        let mut runners = world.runners(&place.target, BackendKind::Full, ("1", "16"));
        let prefix = |count| logits(&world, &mut runners, &feed(&PROMPT[..count], Vec::new()));
        let plain: Vec<_> = (1..=PROMPT.len()).map(prefix).collect();
        let table = world.bindings.weights["embed"];
        let (cols, all) = (table.cols as usize, floats(&world.read(table.span)));
        let row = |token: u32| &all[token as usize * cols..][..cols];

        // The table's own row changes nothing.
        assert_eq!(given(&world, &mut runners, row(PROMPT[2])), plain);
        // Another row changes that token and those after it, and no other.
        let other = given(&world, &mut runners, row(50));
        for (count, (plain, other)) in plain.iter().zip(&other).enumerate() {
            assert_eq!(plain == other, count < 2, "after token {count}");
        }
        // It is what that row's token would be.
        let mut tokens = PROMPT;
        tokens[2] = 50;
        let prefix = |count| logits(&world, &mut runners, &feed(&tokens[..count], Vec::new()));
        assert_eq!(other, (1..=PROMPT.len()).map(prefix).collect::<Vec<_>>());
    }
}

#[test]
fn what_is_no_row_of_an_input_is_refused() {
    let place = Place::cpu();
    let world = place.world(&program());
    let mut runners = world.runners(&place.target, BackendKind::Full, ("1", "16"));
    let cols = world.program.shape.hidden as usize;
    for (input, row, count) in [(1, 0, cols), (0, 5, cols), (0, 4, 2 * cols), (0, 0, cols + 1)] {
        let values = vec![0.0; count];
        let given = vec![GivenRows { input, row, values }];
        let error = runners.launch(&feed(&PROMPT, given)).unwrap_err();
        let wanted = MailError::Given { input, row, values: count };
        assert!(matches!(&error, RunError::Mail(found) if *found == wanted), "{error}");
    }
    let mut missing = program();
    assert_eq!(Program::from_json(&missing.to_json()).unwrap(), missing);
    missing.inputs.clear();
    assert_eq!(missing.check().unwrap_err().to_string(), "step `embed`: there is no input 0");
}
