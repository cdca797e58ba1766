//! Thoughts before answers: their budget, and grammars that begin after them.

use crate::echo::{Echo, VOCAB, request};
use crate::grammar::compiled;
use engine::exec::Step;
use engine::request::{Event, Finish, Output, Reject, Request, Thinking, Token};
use engine::{Engine, EngineConfig};
use grammar::Grammar;

/// The answers of one request, and the steps that ran.
fn answers(request: Request, most: u32) -> (Vec<(Vec<Token>, Finish)>, Vec<Step>) {
    let config = EngineConfig { eos: vec![0], ..EngineConfig::default() };
    let mut engine = Engine::new(Echo::new(4, 300).several(most), config);
    let mut answers = vec![(Vec::new(), None); request.choices as usize];
    let mut outputs = engine.step(0, vec![Event::Submit(Box::new(request))]);
    while !engine.is_idle() {
        outputs.extend(engine.step(0, Vec::new()));
    }
    engine.audit().unwrap();
    for output in outputs {
        match output {
            Output::Token { choice, token, .. } => answers[choice as usize].0.push(token),
            Output::Finished { choice, finish, .. } => answers[choice as usize].1 = Some(finish),
            Output::Rejected { reason, .. } => panic!("{reason}"),
            _ => {}
        }
    }
    let answers = answers.into_iter().map(|(said, finish)| (said, finish.unwrap())).collect();
    (answers, engine.executor().steps.clone())
}

fn thinks(open: &[Token], close: &[Token], budget: u32) -> Request {
    let mut request = request(1, &[1, 2, 3], 60);
    request.sampling.thinking = Some(Thinking { open: open.into(), close: close.into(), budget });
    request
}

/// The answer without a budget.
fn free() -> Vec<Token> {
    answers(request(1, &[1, 2, 3], 60), 1).0.remove(0).0
}

/// Two tokens that the free answer does not have.
fn unsaid() -> [Token; 2] {
    let free = free();
    let mut unsaid = (1..VOCAB).filter(|token| !free.contains(token));
    [unsaid.next().unwrap(), unsaid.next().unwrap()]
}

#[test]
fn the_closing_tag_is_forced_when_the_budget_is_used_up() {
    let (free, close) = (free(), unsaid());
    for budget in [0, 1, 7, 30] {
        for most in [1, 3] {
            let (mut found, steps) = answers(thinks(&[], &close, budget), most);
            let (said, finish) = found.remove(0);
            let end = budget as usize;
            assert_eq!(said[..end], free[..end], "the thought itself is the model's");
            assert_eq!(said[end..end + 2], close);
            // The answer goes on as the model would after this tag.
            assert_eq!((said.len(), finish), (60, Finish::Length));
            assert_ne!(said[end + 2..], free[end + 2..]);
            let masks = steps.iter().map(|step| step.masks.len()).sum::<usize>();
            // A row may return no token, and is then repeated with its mask.
            assert!(masks == 2 || most > 1, "only the tokens of the tag have masks");
            // Otherwise rows are launched ahead of results, as without a budget.
            assert!(steps.iter().any(|step| most == 1 || step.rows.iter().any(|r| r.most > 1)));
        }
    }
}

#[test]
fn a_tag_that_the_model_began_is_completed() {
    let (free, [other, _]) = (free(), unsaid());
    let (found, _) = answers(thinks(&[], &[free[6], other], 7), 1);
    assert_eq!(found[0].0[..7], free[..7]);
    assert_eq!(found[0].0[7], other);
}

#[test]
fn a_thought_that_ends_by_itself_is_left_alone() {
    let (free, [other, _]) = (free(), unsaid());
    for most in [1, 3] {
        for (open, close, budget) in [
            (&[][..], &free[4..6], 6),
            (&[], &free[4..6], 40),
            (&free[..2], &free[9..10], 20),
            // The model does not think: another token comes where the tag would.
            (&[other], &[other], 3),
        ] {
            let (found, _) = answers(thinks(open, close, budget), most);
            assert_eq!(found[0].0, free, "{open:?} {close:?} {budget}");
        }
    }
}

#[test]
fn the_budget_begins_after_the_tag_that_the_model_writes() {
    let (free, close) = (free(), unsaid());
    for (open, from) in [(&free[..1], 1), (&free[..2], 2), (&free[2..4], 4)] {
        for budget in [0, 1, 9] {
            let (found, _) = answers(thinks(open, &close, budget), 1);
            let end = from + budget as usize;
            assert_eq!(found[0].0[..end], free[..end]);
            assert_eq!(found[0].0[end..end + 2], close, "{open:?} {budget}");
        }
    }
}

#[test]
fn every_choice_has_its_own_budget() {
    let close = unsaid();
    let mut several = thinks(&[], &close, 9);
    several.choices = 3;
    let (found, _) = answers(several, 1);
    for (said, _) in &found {
        assert_eq!(said[9..11], close, "{said:?}");
    }
    assert!(found[0].0[..9] != found[1].0[..9] && found[1].0[..9] != found[2].0[..9]);
}

#[test]
fn a_grammar_begins_after_the_thought() {
    let [first, second] = unsaid();
    let guided = |open: &[Token], close: &[Token], budget: u32| {
        let mut guided = thinks(open, close, budget);
        guided.sampling.ignore_eos = false;
        // Stop tokens would cut the thought, and the answer with it.
        guided.sampling.stop_tokens = (40..50).collect();
        guided.sampling.grammar = Some(compiled(&Grammar::Regex("[a-c]{4}".into()), VOCAB));
        answers(guided, 1).0.remove(0)
    };
    for open in [&[][..], &[first]] {
        let (endless, finish) = guided(open, &[second, second], u32::MAX);
        assert_eq!((endless.len(), finish), (60, Finish::Length));
        let own = endless[open.len() + 5];
        for (close, budget) in [(second, 0), (second, 5), (own, u32::MAX)] {
            let (said, finish) = guided(open, &[close], budget);
            assert!(said.starts_with(open));
            let end = said.iter().position(|token| *token == close).unwrap();
            let expected = if close == own { &endless[..end] } else { &said[..end] };
            assert_eq!(&said[..end], expected);
            assert!(end - open.len() <= 5 && (close == own || end - open.len() == budget as usize));
            let answer: String = said[end + 1..].iter().map(|t| *t as u8 as char).collect();
            assert!(answer.len() == 4 && answer.bytes().all(|b| b"abc".contains(&b)), "{answer}");
            assert!(matches!(finish, Finish::Stop(_)));
        }
    }
}

#[test]
fn the_answer_may_end_inside_the_thought() {
    let close = unsaid();
    let mut short = thinks(&[], &close, 9);
    short.sampling.max_tokens = 5;
    assert_eq!(answers(short.clone(), 1).0[0].0.len(), 5);
    short.sampling.max_tokens = 10;
    let (found, _) = answers(short, 1);
    assert_eq!((found[0].0.len(), &found[0].1), (10, &Finish::Length));
    assert_eq!(found[0].0[9], close[0], "the tag is cut as well");
}

#[test]
fn tags_are_checked() {
    let reject = |request: Request| {
        let mut engine = Engine::new(Echo::new(1, 50), EngineConfig::default());
        let outputs = engine.step(0, vec![Event::Submit(Box::new(request))]);
        let [Output::Rejected { reason, .. }] = &outputs[..] else { panic!("{outputs:?}") };
        reason.clone()
    };
    assert!(matches!(reject(thinks(&[1], &[], 3)), Reject::BadParameter { field: "thinking", .. }));
    assert_eq!(reject(thinks(&[VOCAB], &[1], 3)), Reject::UnknownToken(VOCAB));
    let mut stop = thinks(&[], &[7], 3);
    (stop.sampling.stop_tokens, stop.sampling.min_tokens) = (vec![7], 4);
    assert!(matches!(reject(stop), Reject::BadParameter { field: "min_tokens", .. }));
}
