//! Calls take turns.

use crate::echo::{Echo, request};
use engine::request::{Event, Output, Request, RequestId};
use engine::{Engine, EngineConfig};

/// `prompts` requests of one call, with `choices` continuations each.
fn call(first: u64, prompts: u64, choices: u32, max_tokens: u32) -> Vec<Event> {
    let one = |id: u64| {
        let request = Request {
            choices,
            call: Some(RequestId(first)),
            ..request(id, &[1 + id as u32 % 90, 2, 3], max_tokens)
        };
        Event::Submit(Box::new(request))
    };
    (first..first + prompts).map(one).collect()
}

fn said(outputs: &[Output], id: u64) -> usize {
    let of = |output: &&Output| matches!(output, Output::Token { id: of, .. } if of.0 == id);
    outputs.iter().filter(of).count()
}

/// Steps until a request has all its tokens; the outputs on the way.
fn until_done(engine: &mut Engine<Echo>, id: u64, tokens: usize, most: u32) -> Vec<Output> {
    let mut outputs = Vec::new();
    for _ in 0..most {
        outputs.extend(engine.step(0, Vec::new()));
        if said(&outputs, id) == tokens {
            return outputs;
        }
    }
    panic!("request {id} has {} of {tokens} tokens after {most} steps", said(&outputs, id));
}

fn drain(engine: &mut Engine<Echo>) -> Vec<Output> {
    let mut outputs = Vec::new();
    while !engine.is_idle() {
        outputs.extend(engine.step(0, Vec::new()));
    }
    outputs
}

#[test]
fn a_small_request_does_not_wait_for_a_large_call() {
    for (seats, choices) in [(32, 32), (8, 8), (32, 1), (4, 2), (6, 4)] {
        let mut engine = Engine::new(Echo::new(seats, 4000), EngineConfig::default());
        let mut outputs = engine.step(0, call(1, 64, choices, 100));
        for _ in 0..20 {
            outputs.extend(engine.step(0, Vec::new()));
        }
        assert!(engine.stats().waiting > 0, "the call has more than fits");
        outputs.extend(engine.step(0, vec![Event::Submit(Box::new(request(1000, &[9, 9], 5)))]));
        // Alone it takes about ten steps; behind the call it would take thousands.
        outputs.extend(until_done(&mut engine, 1000, 5, 60));
        outputs.extend(drain(&mut engine));
        for id in 1..=64 {
            assert_eq!(said(&outputs, id), 100 * choices as usize, "{seats} {choices} {id}");
        }
    }
}

#[test]
fn the_second_prompt_of_a_call_waits_for_the_first_of_others() {
    let mut engine = Engine::new(Echo::new(16, 4000), EngineConfig::default());
    // Sixteen long prompts of one call, of which a step feeds 64 tokens; then a short one.
    let long: Vec<u32> = (0..200).map(|i| 1 + i % 90).collect();
    let events = (1..=15).map(|id| {
        let mut prompt = long.clone();
        prompt[0] = id as u32;
        let request = Request { call: Some(RequestId(1)), ..request(id, &prompt, 3) };
        Event::Submit(Box::new(request))
    });
    let mut outputs = engine.step(0, events.collect());
    outputs.extend(engine.step(0, vec![Event::Submit(Box::new(request(1000, &[9, 9], 2)))]));
    outputs.extend(until_done(&mut engine, 1000, 2, 12));
    outputs.extend(drain(&mut engine));
    assert!((1..=15).all(|id| said(&outputs, id) == 3));
}

#[test]
fn two_large_calls_share() {
    let mut engine = Engine::new(Echo::new(8, 4000), EngineConfig::default());
    let mut outputs = engine.step(0, call(1, 40, 1, 40));
    for _ in 0..10 {
        outputs.extend(engine.step(0, Vec::new()));
    }
    outputs.extend(engine.step(0, call(1000, 40, 1, 40)));
    for _ in 0..200 {
        outputs.extend(engine.step(0, Vec::new()));
    }
    let total = |first: u64| (first..first + 40).map(|id| said(&outputs, id)).sum::<usize>();
    let (one, other) = (total(1), total(1000));
    assert!(other * 3 > one && one * 3 > other, "{one} and {other} tokens");
    let preemptions = engine.stats().preemptions;
    assert!(preemptions <= 8, "the first gave up its surplus once: {preemptions}");
    drain(&mut engine);
    assert_eq!(engine.stats().finished, 80);
}

#[test]
fn single_requests_are_served_in_order_of_arrival() {
    let mut engine = Engine::new(Echo::new(2, 400), EngineConfig::default());
    let events = (1..=20).map(|id| Event::Submit(Box::new(request(id, &[id as u32, 7], 4))));
    let mut outputs = engine.step(0, events.collect());
    outputs.extend(drain(&mut engine));
    let first = |id: u64| {
        let of = |o: &Output| matches!(o, Output::Token { id: of, .. } if of.0 == id);
        outputs.iter().position(of).unwrap()
    };
    assert!((1..20).all(|id| first(id) < first(id + 1)));
    assert_eq!(engine.stats().preemptions, 0);
}

#[test]
fn a_temperature_next_to_nothing_is_greedy() {
    let mut greedy = Engine::new(Echo::new(1, 50), EngineConfig::default());
    let mut tiny = request(1, &[1, 2], 3);
    tiny.sampling.temperature = 1e-38;
    greedy.step(0, vec![Event::Submit(Box::new(tiny))]);
    drain(&mut greedy);
    let joins = greedy.executor().steps.iter().flat_map(|step| &step.joins);
    let temperatures: Vec<f32> = joins.map(|join| join.params.temperature).collect();
    assert_eq!(temperatures, [0.0]);
}

#[test]
fn prompts_beside_rows_that_decode_come_in_smaller_pieces() {
    let config = EngineConfig { mixed_tokens: 16, ..EngineConfig::default() };
    let mut engine = Engine::new(Echo::new(4, 4000), config);
    let long: Vec<u32> = (0..200).map(|i| 1 + i % 90).collect();
    engine.step(0, vec![Event::Submit(Box::new(request(1, &long, 60)))]);
    for _ in 0..10 {
        engine.step(0, Vec::new());
    }
    let other: Vec<u32> = (0..200).map(|i| 1 + i % 70).collect();
    engine.step(0, vec![Event::Submit(Box::new(request(2, &other, 3)))]);
    drain(&mut engine);
    let tokens = |step: &engine::exec::Step| {
        let decode = step.rows.iter().any(|row| row.prompt.is_none());
        (decode, step.rows.iter().map(|row| row.tokens().len().max(1)).sum::<usize>())
    };
    let sizes: Vec<(bool, usize)> = engine.executor().steps.iter().map(tokens).collect();
    assert!(sizes.contains(&(false, 64)), "alone it comes in pieces of what graphs cover");
    assert!(sizes.iter().all(|&(decode, size)| !decode || size <= 16), "{sizes:?}");
}

/// Tokens whose beginning is no other's.
fn long(first: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| if i == 0 { first } else { 1 + (i * 7 + first) % 100 }).collect()
}

#[test]
fn a_short_prompt_does_not_wait_for_a_long_one() {
    let mut engine = Engine::new(Echo::new(4, 4000), EngineConfig::default());
    // Four steps of 64 tokens each.
    let mut outputs = engine.step(0, vec![Event::Submit(Box::new(request(1, &long(1, 240), 3)))]);
    outputs.extend(engine.step(0, vec![Event::Submit(Box::new(request(2, &[9, 9], 2)))]));
    outputs.extend(drain(&mut engine));
    let of = |o: &Output, of: u64| matches!(o, Output::Token { id, .. } if id.0 == of);
    let first = |id: u64| outputs.iter().position(|o| of(o, id)).unwrap();
    assert!(first(2) < first(1));
}

#[test]
fn when_pages_run_out_the_largest_is_sent_back() {
    let config = || EngineConfig { prefix_cache: false, ..EngineConfig::default() };
    // 70 pages of 4 tokens: the two large requests need 50 each in the end, the small one 10.
    let mut engine = Engine::new(Echo::new(3, 70), config());
    let submit = |id: u64, prompt: u32, tokens: u32| {
        Event::Submit(Box::new(request(id, &long(id as u32, prompt), tokens)))
    };
    let events = vec![submit(1, 80, 120), submit(2, 80, 120), submit(3, 4, 36)];
    let mut outputs = engine.step(0, events);
    // The small one came last and is never sent back: it gets a token with every step.
    outputs.extend(until_done(&mut engine, 3, 36, 45));
    outputs.extend(drain(&mut engine));
    assert!(engine.stats().preemptions > 0, "the large ones do not fit together");
    assert_eq!((said(&outputs, 1), said(&outputs, 2)), (120, 120));
    let of = |o: &Output, of: u64| matches!(o, Output::Finished { id, .. } if id.0 == of);
    let end = |id: u64| outputs.iter().position(|o| of(o, id)).unwrap();
    assert!(end(1) < end(2), "the first in order of service is not sent back");
}

#[test]
fn a_request_without_room_lets_small_ones_pass_until_it_is_due() {
    let config = EngineConfig { prefix_cache: false, patience: 5, ..EngineConfig::default() };
    let mut engine = Engine::new(Echo::new(4, 60), config);
    let submit =
        |id: u64, prompt: u32| Event::Submit(Box::new(request(id, &long(id as u32, prompt), 40)));
    let mut outputs = engine.step(0, vec![submit(1, 120)]);
    for _ in 0..4 {
        outputs.extend(engine.step(0, Vec::new()));
    }
    // 40 pages are taken, 45 wanted.
    let events = std::iter::once(submit(2, 180)).chain((3..20).map(|id| submit(id, 2)));
    outputs.extend(engine.step(0, events.collect()));
    outputs.extend(drain(&mut engine));
    let of = |o: &Output, of: u64| matches!(o, Output::Token { id, .. } if id.0 == of);
    let first = |id: u64| outputs.iter().position(|o| of(o, id)).unwrap();
    let passed = (3..20).filter(|&id| first(id) < first(2)).count();
    assert!((2..=5).contains(&passed), "some, at most as many as its patience: {passed}");
    assert!((1..20).all(|id| said(&outputs, id) == 40));
}
