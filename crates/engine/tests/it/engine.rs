use crate::echo::{Echo, request};
use engine::exec::StepKind;
use engine::request::{Event, Finish, Output, Reject, Request, RequestId};
use engine::{Engine, EngineConfig};

fn submit(request: Request) -> Event {
    Event::Submit(Box::new(request))
}

fn drain(engine: &mut Engine<Echo>, outputs: &mut Vec<Output>) {
    for _ in 0..10_000 {
        if engine.is_idle() {
            return;
        }
        outputs.extend(engine.step(0, Vec::new()));
    }
    panic!("never idle");
}

fn finishes(outputs: &[Output], id: u64) -> Vec<Finish> {
    let of = |output: &Output| match output {
        Output::Finished { id: found, finish, .. } if found.0 == id => Some(finish.clone()),
        _ => None,
    };
    outputs.iter().filter_map(of).collect()
}

fn tokens(outputs: &[Output], id: u64) -> usize {
    let of = |output: &&Output| matches!(output, Output::Token { id: found, .. } if found.0 == id);
    outputs.iter().filter(of).count()
}

#[test]
fn steady_decode_sends_nothing_but_rows() {
    let mut engine = Engine::new(Echo::new(8, 200), EngineConfig::default());
    let events = (0..8).map(|n| submit(request(n, &[1, 2, n as u32 + 3], 30))).collect();
    let mut outputs = engine.step(0, events);
    drain(&mut engine, &mut outputs);
    let steps = &engine.executor().steps;
    let steady = steps.windows(2).filter(|pair| pair[0].rows.len() == 8 && pair[1].rows.len() == 8);
    let mut quiet = 0;
    for pair in steady {
        let [before, step] = pair else { continue };
        assert!(step.copies.is_empty() && step.masks.is_empty());
        let seats =
            |step: &engine::exec::Step| step.rows.iter().map(|r| r.seat).collect::<Vec<_>>();
        assert_eq!(seats(before), seats(step), "rows keep their places");
        assert_eq!(step.kind(), StepKind::Decode);
        quiet += u32::from(step.pages.is_empty() && step.joins.is_empty());
    }
    // A page holds four tokens: three steps of four need nothing at all.
    assert!(quiet >= 18, "{quiet} quiet steps");
}

#[test]
fn prompts_are_chunked_beside_decode_rows() {
    let config = EngineConfig { step_tokens: 16, ..EngineConfig::default() };
    let mut engine = Engine::new(Echo::new(4, 200), config);
    let mut outputs = engine.step(0, vec![submit(request(1, &[1, 2, 3], 40))]);
    outputs.extend(engine.step(0, Vec::new()));
    let long: Vec<u32> = (0..100).map(|n| n % 90 + 1).collect();
    outputs.extend(engine.step(0, vec![submit(request(2, &long, 5))]));
    drain(&mut engine, &mut outputs);
    let mixed = engine.executor().steps.iter().filter(|step| {
        step.rows.len() == 2
            && step.rows[0].tokens().is_empty()
            && step.rows[1].tokens().len() == 15
    });
    assert!(mixed.count() >= 6, "the long prompt goes in chunks of 15 beside one decode row");
    assert_eq!((tokens(&outputs, 1), tokens(&outputs, 2)), (40, 5));
}

/// Prompts that come one by one beside many rows share a step; one that comes alone, or is long, is fed at
/// once; and no prompt waits past the bound.
#[test]
fn short_prompts_wait_for_each_other() {
    let run = |gather: u32, prompt: usize, apart: usize| {
        let config = EngineConfig { gather, ..EngineConfig::default() };
        let mut engine = Engine::new(Echo::new(64, 2000).wide(), config);
        let mut id = 0;
        let mut arrive = |engine: &mut Engine<Echo>, count: usize, tokens: usize, answer: u32| {
            let events = (0..count).map(|_| {
                id += 1;
                let prompt: Vec<u32> =
                    (0..tokens).map(|n| (id as u32 * 7 + n as u32) % 99 + 1).collect();
                submit(request(id, &prompt, answer))
            });
            let events = events.collect();
            engine.step(0, events)
        };
        arrive(&mut engine, 40, 2, 200);
        for _ in 0..20 {
            engine.step(0, Vec::new());
        }
        let from = engine.executor().steps.len();
        let before = engine.stats().prefill_steps;
        for step in 0..12 {
            match step % apart {
                0 => arrive(&mut engine, 1, prompt, 60),
                _ => engine.step(0, Vec::new()),
            };
        }
        let fed = |step: &engine::exec::Step| step.kind() == StepKind::Prefill;
        let steps = &engine.executor().steps[from..];
        assert!(steps.iter().take(3).any(fed), "the first one does not wait");
        let mut outputs = Vec::new();
        let fed_in = engine.stats().prefill_steps - before;
        drain(&mut engine, &mut outputs);
        assert_eq!(engine.stats().finished, u64::from(id as u32));
        fed_in
    };
    assert_eq!(run(0, 3, 1), 12, "one each");
    assert!(run(8, 3, 1) <= 4, "together");
    assert_eq!(run(8, 60, 1), 12, "long ones at once");
    assert_eq!(run(2, 3, 4), 3, "seldom ones at once");
}

#[test]
fn a_prompt_seen_before_is_not_fed_again() {
    let prompt: Vec<u32> = (1..=17).collect();
    let mut engine = Engine::new(Echo::new(4, 200), EngineConfig::default());
    engine.executor_mut().known = vec![prompt.clone()];
    let mut outputs = engine.step(0, vec![submit(request(1, &prompt, 3))]);
    drain(&mut engine, &mut outputs);
    outputs.extend(engine.step(0, vec![submit(request(2, &prompt, 3))]));
    drain(&mut engine, &mut outputs);
    let cached = |output: &Output| match output {
        Output::Prefilled { id: RequestId(2), cached_tokens, .. } => Some(*cached_tokens),
        _ => None,
    };
    // All four full pages; the seventeenth token is fed for its logits, by a decode row.
    assert_eq!(outputs.iter().find_map(cached), Some(16));
    let fed: usize = engine
        .executor()
        .steps
        .iter()
        .map(|step| step.rows.iter().map(|row| row.tokens().len()).sum::<usize>())
        .sum();
    assert_eq!(fed, 17);
}

#[test]
fn a_prefix_that_is_being_fed_is_waited_for() {
    let mut engine = Engine::new(Echo::new(8, 200), EngineConfig::default());
    let prompt = |last: u32| (1..=12).chain([100 + last]).collect::<Vec<u32>>();
    engine.executor_mut().known = vec![prompt(0)];
    let events = (0..8).map(|n| submit(request(n, &prompt(n as u32), 4))).collect();
    let mut outputs = engine.step(0, events);
    drain(&mut engine, &mut outputs);
    let cached = outputs.iter().filter_map(|output| match output {
        Output::Prefilled { cached_tokens, .. } => Some(*cached_tokens),
        _ => None,
    });
    // The first feeds what all begin with, the others their last token.
    assert_eq!(cached.collect::<Vec<_>>(), [0, 12, 12, 12, 12, 12, 12, 12]);
    assert!((0..8).all(|id| tokens(&outputs, id) == 4));
}

#[test]
fn every_refusal_has_its_reason() {
    let config = EngineConfig { max_waiting: 1, ..EngineConfig::default() };
    let mut engine = Engine::new(Echo::new(2, 20), config);
    let reason = |engine: &mut Engine<Echo>, request: Request| {
        let refused = |output: Output| match output {
            Output::Rejected { reason, .. } => Some(reason),
            _ => None,
        };
        engine.step(0, vec![submit(request)]).into_iter().find_map(refused).expect("a refusal")
    };
    assert_eq!(reason(&mut engine, request(1, &[], 1)), Reject::EmptyPrompt);
    assert_eq!(reason(&mut engine, request(1, &[500], 1)), Reject::UnknownToken(500));
    let long = vec![1; 76];
    let too_long = Reject::TooLong { found: 76, allowed: 75 };
    assert_eq!(reason(&mut engine, request(1, &long, 1)), too_long);
    let field = |reason: Reject| match reason {
        Reject::BadParameter { field, .. } => field,
        other => panic!("{other}"),
    };
    let with = |change: fn(&mut Request)| {
        let mut request = request(1, &[1], 4);
        change(&mut request);
        request
    };
    let bad = [
        ("temperature", with(|r| r.sampling.temperature = -1.0)),
        ("temperature", with(|r| r.sampling.temperature = f32::NAN)),
        ("top_p", with(|r| r.sampling.top_p = 0.0)),
        ("top_p", with(|r| r.sampling.top_p = 1.5)),
        ("min_p", with(|r| r.sampling.min_p = 2.0)),
        ("presence_penalty", with(|r| r.sampling.presence_penalty = 3.0)),
        ("frequency_penalty", with(|r| r.sampling.frequency_penalty = -3.0)),
        ("repetition_penalty", with(|r| r.sampling.repetition_penalty = 0.0)),
        ("logit_bias", with(|r| r.sampling.logit_bias = vec![(1, 500.0)])),
        ("logprobs", with(|r| r.sampling.logprobs = Some(21))),
        ("stop_tokens", with(|r| r.sampling.stop_tokens = (0..17).collect())),
        ("min_tokens", with(|r| r.sampling.min_tokens = 5)),
        ("choices", with(|r| r.choices = 0)),
        ("choices", with(|r| r.choices = 3)),
        ("prompt_logprobs", with(|r| r.prompt_logprobs = Some(1))),
    ];
    for (name, request) in bad {
        assert_eq!(field(reason(&mut engine, request)), name);
    }
    let accepted = engine.step(0, vec![submit(request(1, &[1], 60))]);
    assert!(!accepted.iter().any(|output| matches!(output, Output::Rejected { .. })));
    assert_eq!(reason(&mut engine, request(1, &[1], 1)), Reject::DuplicateId(1));
}

#[test]
fn a_full_queue_refuses_and_a_cancel_makes_room() {
    let config = EngineConfig { max_waiting: 1, ..EngineConfig::default() };
    let mut engine = Engine::new(Echo::new(1, 20), config);
    let mut outputs = engine.step(0, vec![submit(request(1, &[1], 60))]);
    outputs.extend(engine.step(0, vec![submit(request(2, &[1], 5)), submit(request(3, &[1], 5))]));
    let refused = |output: &Output| {
        matches!(
            output,
            Output::Rejected { id: RequestId(3), reason: Reject::QueueFull { waiting: 1 } }
        )
    };
    assert!(outputs.iter().any(refused));
    outputs.extend(engine.step(0, vec![Event::Cancel(RequestId(2)), submit(request(4, &[1], 5))]));
    drain(&mut engine, &mut outputs);
    assert_eq!(finishes(&outputs, 2), [Finish::Cancelled]);
    assert_eq!(finishes(&outputs, 4), [Finish::Length]);
}

#[test]
fn deadlines_end_those_who_wait_and_those_who_run() {
    let mut engine = Engine::new(Echo::new(1, 40), EngineConfig::default());
    let late = |id, prompt: &[u32]| Request { deadline: Some(100), ..request(id, prompt, 1000) };
    let mut outputs = engine.step(100, vec![submit(late(1, &[1])), submit(late(2, &[2]))]);
    assert!(finishes(&outputs, 1).is_empty() && finishes(&outputs, 2).is_empty());
    outputs.extend(engine.step(101, Vec::new()));
    drain(&mut engine, &mut outputs);
    assert_eq!(finishes(&outputs, 1), [Finish::Deadline]);
    assert_eq!(finishes(&outputs, 2), [Finish::Deadline]);
    assert_eq!(engine.pages().held, 0);
}

#[test]
fn a_higher_priority_takes_the_seat_and_the_lower_one_comes_back() {
    let mut engine = Engine::new(
        Echo::new(1, 40),
        EngineConfig { prefix_cache: false, ..EngineConfig::default() },
    );
    let mut outputs = engine.step(0, vec![submit(request(1, &[1, 2, 3], 30))]);
    for _ in 0..5 {
        outputs.extend(engine.step(0, Vec::new()));
    }
    let urgent = Request { priority: 1, ..request(2, &[4, 5], 4) };
    outputs.extend(engine.step(0, vec![submit(urgent)]));
    drain(&mut engine, &mut outputs);
    let end = |id| {
        outputs
            .iter()
            .position(|o| matches!(o, Output::Finished { id: found, .. } if found.0 == id))
    };
    assert!(end(2) < end(1), "the urgent one ends first");
    assert_eq!((tokens(&outputs, 1), tokens(&outputs, 2)), (30, 4));
    assert!(engine.stats().preemptions > 0);
}

/// An engine that stands still has nothing in flight, and goes on without computing anything again.
#[test]
fn settled_sequences_keep_their_pages() {
    let mut engine = Engine::new(Echo::new(4, 200), EngineConfig::default());
    let events = (1..4).map(|id| submit(request(id, &[1, 2, 3, 4, 5], 20))).collect();
    let mut outputs = engine.step(0, events);
    for _ in 0..5 {
        outputs.extend(engine.step(0, Vec::new()));
    }
    let before = engine.stats();
    outputs.extend(engine.settle());
    assert_eq!(engine.settle(), [], "nothing is in flight");
    drain(&mut engine, &mut outputs);
    assert_eq!(engine.stats().prompt_tokens, before.prompt_tokens);
    assert!((1..4).all(|id| tokens(&outputs, id) == 20));
}

/// The choices of a prompt compute it once, also where they are requests of their own.
#[test]
fn many_choices_share_the_pages_of_their_prompt() {
    let mut engine = Engine::new(Echo::new(256, 2000).wide(), EngineConfig::default());
    let prompt: Vec<u32> = (0..98).map(|n| n % 90 + 1).collect();
    let call = |id: u64| Request { call: Some(RequestId(1)), ..request(id, &prompt, 3) };
    let events = (1..=256).map(|id| submit(call(id))).collect();
    let mut outputs = engine.step(0, events);
    drain(&mut engine, &mut outputs);
    let stats = engine.stats();
    assert!((1..=256).all(|id| tokens(&outputs, id) == 3));
    let computed = stats.prompt_tokens - stats.cached_tokens;
    // The first computes all of it, the others what does not fill a page.
    assert!(computed <= 98 + 255 * 4, "{computed} tokens were computed");
}
