//! Rows that return none to k tokens in a step: every answer is the same as with one token at a time.

use crate::echo::{Echo, VOCAB, request};
use crate::grammar::compiled;
use engine::exec::Step;
use engine::request::{Event, Finish, Output, Request, Token};
use engine::{Engine, EngineConfig};
use grammar::Grammar;
use std::collections::BTreeMap;

type Answers = BTreeMap<(u64, u32), (Vec<Token>, Option<Finish>)>;

/// The answers on a device whose rows return up to `most` tokens, and the steps that it ran.
fn answers(most: u32, requests: Vec<Request>) -> (Answers, Vec<Step>) {
    let config = EngineConfig { eos: vec![0], prefix_cache: false, ..EngineConfig::default() };
    let mut engine = Engine::new(Echo::new(6, 300).several(most), config);
    let events = requests.into_iter().map(|request| Event::Submit(Box::new(request))).collect();
    let mut outputs = engine.step(0, events);
    for _ in 0..5000 {
        outputs.extend(engine.step(0, Vec::new()));
    }
    assert!(engine.is_idle() && engine.stats().stop_disagreements == 0);
    engine.audit().unwrap();
    let mut answers = Answers::new();
    for output in outputs {
        match output {
            Output::Token { id, choice, token, .. } => {
                let answer = answers.entry((id.0, choice)).or_default();
                assert!(answer.1.is_none(), "a token after the end");
                answer.0.push(token);
            }
            Output::Finished { id, choice, finish, .. } => {
                let end = &mut answers.entry((id.0, choice)).or_default().1;
                assert!(end.replace(finish).is_none(), "two ends");
            }
            _ => {}
        }
    }
    (answers, engine.executor().steps.clone())
}

fn requests() -> Vec<Request> {
    let mut all = vec![request(1, &[1, 2, 3], 37), request(2, &[9, 4], 1), request(3, &[7; 11], 2)];
    let mut stopped = request(4, &[5, 6], 60);
    stopped.sampling.stop_tokens = (10..25).collect();
    stopped.sampling.min_tokens = 3;
    let mut several = request(5, &[8, 8, 1, 1, 2], 23);
    several.choices = 2;
    let mut guided = request(6, &[2, 2, 2], 50);
    guided.sampling.grammar = Some(compiled(&Grammar::Regex("[a-f]{2,30}x".into()), VOCAB));
    all.extend([stopped, several, guided]);
    all
}

#[test]
fn answers_do_not_depend_on_tokens_per_row() {
    let (wanted, steps) = answers(1, requests());
    assert_eq!(wanted.len(), 7);
    assert!(wanted[&(4, 0)].1.as_ref().is_some_and(|end| matches!(end, Finish::Stop(Some(_)))));
    assert!(steps.iter().flat_map(|step| &step.rows).all(|row| row.most == 1));
    for most in 2..=5 {
        let (found, steps) = answers(most, requests());
        assert_eq!(found, wanted, "up to {most} tokens a row");
        let widest = steps.iter().flat_map(|step| &step.rows).map(|row| row.most).max();
        assert_eq!(widest, Some(most), "rows are asked for that many");
    }
}

/// A request may say that its rows return one token each.
#[test]
fn a_request_without_drafts_returns_one_token_at_a_time() {
    let mut plain = requests();
    plain.iter_mut().for_each(|request| request.sampling.speculate = false);
    let (wanted, _) = answers(1, requests());
    let (found, steps) = answers(5, plain);
    assert_eq!(found, wanted);
    assert!(steps.iter().flat_map(|step| &step.rows).all(|row| row.most == 1));
}

/// A mask is for one position, and the next one's depends on the token chosen.
#[test]
fn a_row_with_a_grammar_returns_one_token_at_most() {
    let (_, steps) = answers(5, requests());
    let mut masked = 0;
    for step in &steps {
        for (row, _) in &step.masks {
            assert_eq!(step.rows[*row as usize].most, 1);
            masked += 1;
        }
    }
    assert!(masked > 2, "{masked} rows with a mask");
}

/// A row is never asked for more tokens than its answer still needs or has pages for.
#[test]
fn rows_are_asked_for_no_more_than_fits() {
    let (_, steps) = answers(5, vec![request(1, &[1, 2, 3], 9)]);
    let mut pages = 0;
    for step in &steps {
        pages += step.pages.len() as u32;
        for row in &step.rows {
            let end = row.start + row.most;
            assert!(row.prompt.is_some() || (end <= 11 && end <= 4 * pages), "{row:?}");
        }
    }
}
