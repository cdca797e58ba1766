use crate::echo::{Echo, VOCAB, request};
use engine::grammar::{GrammarError, Vocabulary};
use engine::request::{Event, Finish, Grammar, Output, Reject};
use engine::{Engine, EngineConfig};
use std::sync::Arc;

/// Tokens are their own ASCII codes; 0 ends the text.
fn vocabulary() -> Arc<Vocabulary> {
    let bytes: Vec<Vec<u8>> =
        (0..VOCAB).map(|t| if t == 0 { vec![] } else { vec![t as u8] }).collect();
    Arc::new(Vocabulary::new(&bytes, &[0], &[0]).unwrap())
}

fn answer(grammar: Grammar, prompt: &[u32]) -> (String, Finish, u64) {
    let config =
        EngineConfig { eos: vec![0], vocabulary: Some(vocabulary()), ..EngineConfig::default() };
    let mut engine = Engine::new(Echo::new(4, 200), config);
    let mut constrained = request(1, prompt, 200);
    constrained.sampling.grammar = Some(grammar);
    // Somebody without a grammar beside it, who may run ahead.
    let events = vec![
        Event::Submit(Box::new(constrained)),
        Event::Submit(Box::new(request(2, &[3, 4, 5], 40))),
    ];
    let mut outputs = engine.step(0, events);
    while !engine.is_idle() {
        outputs.extend(engine.step(0, Vec::new()));
    }
    let (mut text, mut finish) = (String::new(), None);
    for output in outputs {
        match output {
            Output::Token { id, token, .. } if id.0 == 1 => text.push(token as u8 as char),
            Output::Finished { id, finish: how, .. } if id.0 == 1 => finish = Some(how),
            _ => {}
        }
    }
    for step in &engine.executor().steps {
        assert!(step.masks.len() <= 1, "only one row has a grammar");
        assert!(step.masks.iter().all(|(_, mask)| mask.len() == VOCAB.div_ceil(32) as usize));
    }
    (text, finish.unwrap(), engine.stats().held_back_rows)
}

#[test]
fn a_regex_holds_for_the_whole_answer() {
    for prompt in [[1, 2, 3], [9, 8, 7], [5, 5, 5]] {
        let (text, finish, held_back) =
            answer(Grammar::Regex("[a-c]{3}-[0-9]{2,4}".into()), &prompt);
        let (letters, digits) = text.split_once('-').unwrap();
        assert!(
            letters.len() == 3 && letters.bytes().all(|b| (b'a'..=b'c').contains(&b)),
            "{text}"
        );
        assert!(
            (2..=4).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit()),
            "{text}"
        );
        assert!(matches!(finish, Finish::Stop(_)), "{finish:?}");
        assert!(held_back > 0, "a row with a grammar cannot run ahead");
    }
}

#[test]
fn a_schema_gives_json_that_satisfies_it() {
    let schema = r#"{"type":"object","properties":{"n":{"type":"integer","minimum":1,"maximum":99},
        "ok":{"type":"boolean"}},"required":["n","ok"],"additionalProperties":false}"#;
    let (text, finish, _) = answer(Grammar::JsonSchema(schema.into()), &[2, 3]);
    assert!(matches!(finish, Finish::Stop(_)), "{finish:?} {text}");
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!((1..=99).contains(&value["n"].as_i64().unwrap()) && value["ok"].is_boolean());
}

#[test]
fn a_grammar_in_lark() {
    let (text, ..) = answer(Grammar::Lark("start: \"yes\" | \"no\"".into()), &[6]);
    assert!(text == "yes" || text == "no", "{text}");
}

#[test]
fn what_cannot_be_built_is_refused() {
    let config = EngineConfig { vocabulary: Some(vocabulary()), ..EngineConfig::default() };
    let mut engine = Engine::new(Echo::new(1, 50), config);
    let mut bad = request(1, &[1], 5);
    bad.sampling.grammar = Some(Grammar::Regex("[a".into()));
    let mut schema = request(2, &[1], 5);
    schema.sampling.grammar = Some(Grammar::JsonSchema("{".into()));
    let events = vec![Event::Submit(Box::new(bad)), Event::Submit(Box::new(schema))];
    for output in engine.step(0, events) {
        let Output::Rejected { reason, .. } = output else { panic!("{output:?}") };
        assert!(matches!(reason, Reject::BadParameter { field: "grammar", .. }), "{reason}");
    }
    assert_eq!(Vocabulary::new(&[vec![1]], &[], &[]).unwrap_err(), GrammarError::NoEos);
    assert_eq!(Vocabulary::new(&[vec![1]], &[], &[7]).unwrap_err(), GrammarError::OutOfRange(7));
}
