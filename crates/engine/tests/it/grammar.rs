use crate::echo::{Echo, VOCAB, request};
use engine::request::{Event, Finish, Output, Reject};
use engine::{Engine, EngineConfig};
use grammar::{Compiled, Compiler, Grammar, Limits, Vocabulary};

/// Tokens are their own ASCII codes; 0 ends the text.
pub(crate) fn compiled(grammar: &Grammar, tokens: u32) -> Compiled {
    let bytes: Vec<Vec<u8>> =
        (0..tokens).map(|t| if t == 0 { vec![] } else { vec![t as u8] }).collect();
    let vocabulary = Vocabulary::new(&bytes, &[0], &[0]).unwrap();
    Compiler::new(vocabulary, Limits::default()).compile(grammar).unwrap()
}

fn answer(grammar: Grammar, prompt: &[u32]) -> (String, Finish, u64) {
    let config = EngineConfig { eos: vec![0], ..EngineConfig::default() };
    let mut engine = Engine::new(Echo::new(4, 200), config);
    let mut constrained = request(1, prompt, 200);
    constrained.sampling.grammar = Some(compiled(&grammar, VOCAB));
    // A request without a grammar beside it, which may run ahead.
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
fn a_grammar_over_a_larger_vocabulary_is_refused() {
    let mut engine = Engine::new(Echo::new(1, 50), EngineConfig::default());
    let mut other = request(1, &[1], 5);
    other.sampling.grammar = Some(compiled(&Grammar::Regex("[a-z]".into()), VOCAB + 1));
    let outputs = engine.step(0, vec![Event::Submit(Box::new(other))]);
    let [Output::Rejected { reason, .. }] = &outputs[..] else { panic!("{outputs:?}") };
    assert!(matches!(reason, Reject::BadParameter { field: "grammar", .. }), "{reason}");
}

/// Masks that cost too much for one step are spread over several; no row is left out, and a row
/// without a grammar runs in every step.
#[test]
fn masks_of_one_step_are_bounded_in_all() {
    let config = EngineConfig { eos: vec![0], mask_cost: 1, ..EngineConfig::default() };
    let mut engine = Engine::new(Echo::new(8, 400).wide(), config);
    let grammar = compiled(&Grammar::Regex("[a-z]{12}".into()), VOCAB);
    let mut events = vec![Event::Submit(Box::new(request(0, &[3, 4, 5], 60)))];
    for id in 1..=6 {
        let mut guided = request(id, &[id as u32, 2, 3], 60);
        guided.sampling.grammar = Some(grammar.clone());
        events.push(Event::Submit(Box::new(guided)));
    }
    let mut outputs = engine.step(0, events);
    while !engine.is_idle() {
        outputs.extend(engine.step(0, Vec::new()));
    }
    let said = |id: u64| {
        let of = |o: &&Output| matches!(o, Output::Token { id: of, .. } if of.0 == id);
        outputs.iter().filter(of).count()
    };
    assert!((1..=6).all(|id| said(id) == 12), "{:?}", (0..=6).map(said).collect::<Vec<_>>());
    let steps = &engine.executor().steps;
    assert!(steps.iter().all(|step| step.masks.len() <= 1), "one mask spends it all");
    // They take turns: none ends before another has begun.
    let position = |id: u64, first: bool| {
        let of = |o: &Output| matches!(o, Output::Token { id: of, .. } if of.0 == id);
        let found = if first { outputs.iter().position(of) } else { outputs.iter().rposition(of) };
        found.expect("it answered")
    };
    let (begun, ended) =
        ((1..=6).map(|id| position(id, true)), (1..=6).map(|id| position(id, false)));
    assert!(begun.max() < ended.min());
}
