//! Models with recurrent layers through a whole engine: a sequence's answer is its own, whatever runs beside it, in which
//! chunks its prompt is fed and whether it is sent back.

use crate::models;
use engine::exec::Executor;
use engine::request::{Request, RequestId, Sampling};
use engine::{Engine, EngineStats};
use model::{LoadError, LoadOptions, LoadedExecutor, ModelSource, Precision};

const CASES: [&str; 6] = [
    "qwen3-next",
    "qwen3-next-last",
    "qwen3-5",
    "nemotron-h",
    "granite-hybrid",
    "granite-hybrid-dense",
];

fn options(pages: u32) -> LoadOptions {
    LoadOptions {
        max_batch: 3,
        max_context: 192,
        prefill_tokens: Some(64),
        pages: Some(pages),
        precision: Some(Precision::EXACT),
        ..LoadOptions::default()
    }
}

fn load(case: &str, options: &LoadOptions) -> Result<LoadedExecutor, LoadError> {
    let source = ModelSource::Checkpoint(models::folder().join(case));
    model::load_executor(&source, &models::cpu(), options, &|_| {})
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| 3 + (i * i * 7 + i * seed * 13 + seed * 29) % 120).collect()
}

fn request(prompt: Vec<u32>, choices: u32, tokens: u32) -> Request {
    let sampling = Sampling { max_tokens: tokens, ignore_eos: true, ..Sampling::default() };
    Request { choices, ..Request::new(RequestId(0), prompt, sampling) }
}

/// The answers of all choices, how many tokens each request found, and what the engine did.
fn answers(
    case: &str,
    (pages, chunk): (u32, u32),
    requests: Vec<Request>,
) -> (Vec<Vec<u32>>, Vec<u32>, EngineStats) {
    let loaded = load(case, &options(pages)).unwrap();
    let mut engine = Engine::builder(loaded.executor).step_tokens(chunk).build();
    let done: Vec<_> = engine.answer(requests).into_iter().map(Result::unwrap).collect();
    let found = done.iter().map(|answer| answer.cached_tokens).collect();
    let tokens = |choice: engine::offline::Answer| choice.tokens;
    let all = done.into_iter().flat_map(|answer| answer.choices).map(tokens).collect();
    assert_eq!(engine.engine().pages().held, 0);
    (all, found, engine.engine().stats())
}

/// Seven sequences on three seats, each answered alone and all together, in chunks of several sizes: seats are used again,
/// and rows of a step have different lengths.
#[test]
fn answers_are_the_same_alone_and_beside_others() {
    for case in CASES {
        let prompts: Vec<_> = (1..8)
            .map(|seed| prompt(seed, [1, 40, 17, 3, 64, 90, 33][seed as usize - 1]))
            .collect();
        let alone: Vec<Vec<u32>> = prompts
            .iter()
            .flat_map(|prompt| answers(case, (60, 64), vec![request(prompt.clone(), 1, 12)]).0)
            .collect();
        assert!(alone.windows(2).any(|pair| pair[0] != pair[1]), "{case}: prompts do not matter");
        for chunk in [64, 16, 7, 1] {
            let requests = prompts.iter().map(|prompt| request(prompt.clone(), 1, 12)).collect();
            let (beside, ..) = answers(case, (60, chunk), requests);
            assert_eq!(beside, alone, "{case} in chunks of {chunk}");
        }
    }
}

/// Choices cannot share a prompt's state: each feeds it, and greedy ones agree.
#[test]
fn choices_feed_their_prompts_themselves() {
    for case in ["qwen3-next", "nemotron-h"] {
        let prompt = prompt(5, 50);
        let (one, ..) = answers(case, (60, 64), vec![request(prompt.clone(), 1, 10)]);
        let (all, ..) = answers(case, (60, 20), vec![request(prompt, 3, 10)]);
        assert_eq!(all, vec![one[0].clone(); 3], "{case}");
    }
}

/// A sequence that was sent back for pages begins again, and says the same.
#[test]
fn answers_survive_preemption() {
    for case in ["qwen3-next", "granite-hybrid"] {
        let requests = || (1..6).map(|seed| request(prompt(seed, 60), 1, 60)).collect::<Vec<_>>();
        let (calm, _, stats) = answers(case, (60, 64), requests());
        assert_eq!(stats.preemptions, 0);
        let (tight, _, stats) = answers(case, (14, 64), requests());
        assert!(stats.preemptions > 0, "{case}: {stats:?}");
        assert_eq!(tight, calm, "{case}");
    }
}

/// Prompts with an equal beginning, one after the other: the second leaves a copy of its state where it differs from the
/// first, from which the third goes on; equal prompts find all but their last tokens. Answers are as without that, also
/// where there is room for one copy only.
#[test]
fn shared_prefixes_are_found_where_a_state_was_saved() {
    for case in CASES {
        let with = |tail: u32| [prompt(9, 100), prompt(20 + tail, 30)].concat();
        let prompts = [with(1), with(2), with(3), with(1), with(4)];
        let run = |cache: bool, slots: u64, chunk: u32| {
            let mut options = options(80);
            let own = load(case, &options).unwrap().program.carry_bytes();
            options.state_bytes = Some(slots * own);
            let loaded = load(case, &options).unwrap();
            assert_eq!(u64::from(loaded.executor.state_copies()), slots);
            let engine = Engine::builder(loaded.executor).prefix_cache(cache).step_tokens(chunk);
            let mut engine = engine.build();
            let mut answers = Vec::new();
            for prompt in &prompts {
                let answer = engine.answer([request(prompt.clone(), 1, 12)]).pop().unwrap();
                answers.push(answer.unwrap());
                engine.engine().audit().unwrap();
            }
            let found: Vec<u32> = answers.iter().map(|answer| answer.cached_tokens).collect();
            let tokens = |answer: engine::offline::Completion| answer.choices[0].tokens.clone();
            (answers.into_iter().map(tokens).collect::<Vec<_>>(), found, engine.stats())
        };
        let (plain, found, _) = run(false, 8, 64);
        assert_eq!(found, [0; 5]);
        for chunk in [64, 23] {
            let (shared, found, stats) = run(true, 8, chunk);
            assert_eq!(shared, plain, "{case} in chunks of {chunk}");
            assert_eq!(found, [0, 0, 96, 128, 96], "{case}");
            assert_eq!(stats.states_restored, 3);
            let (shared, found, _) = run(true, 1, chunk);
            assert_eq!(shared, plain, "{case} with one copy in chunks of {chunk}");
            assert!(found.iter().any(|found| *found > 0), "{case}: {found:?}");
        }
        let (_, found, stats) = run(true, 0, 64);
        assert_eq!((found, stats.states_saved), (vec![0; 5], 0), "{case}: no room, no prefix");
    }
}

/// Many requests of a few templates at once, with few pages and few copies: whatever is found, sent back and replaced,
/// answers are those of a cache that finds nothing.
#[test]
fn shared_prefixes_change_no_answer_under_pressure() {
    for case in ["qwen3-next", "granite-hybrid"] {
        let requests = || {
            let of = |i: u32| [prompt(i % 3, 80), prompt(40 + i % 7, 20 + i)].concat();
            (0..14).map(|i| request(of(i), 1 + u32::from(i == 4), 16)).collect::<Vec<_>>()
        };
        let run = |cache: bool, pages: u32| {
            let mut options = options(pages);
            options.state_bytes = Some(3 * load(case, &options).unwrap().program.carry_bytes());
            let loaded = load(case, &options).unwrap();
            let mut engine = Engine::builder(loaded.executor).prefix_cache(cache).build();
            let answers = engine.answer(requests()).into_iter().map(Result::unwrap);
            let answers: Vec<_> = answers.flat_map(|answer| answer.choices).collect();
            engine.engine().audit().unwrap();
            (answers.into_iter().map(|choice| choice.tokens).collect::<Vec<_>>(), engine.stats())
        };
        let (plain, _) = run(false, 80);
        for pages in [80, 20] {
            let (shared, stats) = run(true, pages);
            assert_eq!(shared, plain, "{case} with {pages} pages");
            // With few pages the tree may lose what was saved before it is found.
            assert!(stats.states_restored > 0 || pages < 80, "{case}: {stats:?}");
        }
    }
}

/// What the state of recurrent layers does not allow is refused with a reason.
#[test]
fn drafters_that_recur_are_refused() {
    let drafter = ModelSource::Checkpoint(models::folder().join("qwen3-next"));
    let (spec, spec_model) = (Some("draft:2".parse().unwrap()), Some(drafter));
    let with_drafts = LoadOptions { spec, spec_model, ..options(40) };
    let error = load("qwen3-next", &with_drafts).err().expect("refused").to_string();
    assert!(error.contains("`draft` needs a model without recurrent layers"), "{error}");
    assert!(load("qwen3-next", &options(40)).unwrap().executor.carries_state());
    assert!(!load("qwen3-moe", &options(40)).unwrap().executor.carries_state());
}
