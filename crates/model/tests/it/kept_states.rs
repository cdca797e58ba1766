//! Evicted pages of models with recurrent layers come back with the states behind them, and change no answer.

use crate::kept::answered;
use crate::models;
use engine::exec::Executor;
use engine::request::{Event, Request, RequestId, Sampling, Token};
use engine::{Engine, EngineConfig};
use model::{
    GraphExecutor, KeepOptions, LoadError, LoadOptions, LoadedExecutor, ModelSource, Precision,
    load_executor,
};
use std::path::Path;

const CASES: [&str; 3] = ["qwen3-next", "nemotron-h", "granite-hybrid"];
const CONVERSATIONS: u32 = 12;
/// Tokens of a first turn, and of the next one behind its answer.
const FIRST: u32 = 101;
const NEXT: u32 = 20;
const ANSWERED: u32 = 6;
/// Whole pages before the last token of a first turn: its state is saved there.
const SAVED: u32 = 96;

fn load(case: &str, options: &LoadOptions) -> Result<LoadedExecutor, LoadError> {
    let source = ModelSource::Checkpoint(models::folder().join(case));
    load_executor(&source, &models::cpu(), options, &|_| {})
}

/// Pages for three sequences, states for two.
fn options(case: &str, keep: KeepOptions) -> LoadOptions {
    let mut options = LoadOptions {
        max_batch: 3,
        max_context: 192,
        prefill_tokens: Some(64),
        pages: Some(32),
        precision: Some(Precision::EXACT),
        ..LoadOptions::default()
    };
    options.state_bytes = Some(2 * load(case, &options).unwrap().program.carry_bytes());
    options.keep = keep;
    options
}

fn engine(options: &LoadOptions, case: &str, cache: bool) -> Engine<GraphExecutor> {
    let config = EngineConfig { prefix_cache: cache, ..EngineConfig::default() };
    Engine::new(load(case, options).unwrap().executor, config)
}

/// What all conversations got, and the tokens that each turn found.
#[derive(Default)]
struct Played {
    answers: Vec<Vec<Token>>,
    found: Vec<Vec<u32>>,
}

/// Every conversation takes a turn before the first takes its next one; `beside` at a time.
fn play(engine: &mut Engine<GraphExecutor>, turns: u32, beside: usize) -> Played {
    let mut played = Played::default();
    let mut texts: Vec<Vec<Token>> = vec![Vec::new(); CONVERSATIONS as usize];
    for turn in 0..turns {
        let mut found = Vec::new();
        for first in (0..texts.len()).step_by(beside) {
            let several = first..(first + beside).min(texts.len());
            let ask = |conversation: usize| {
                let (text, c) = (&mut texts[conversation], conversation as u32);
                let count = if turn == 0 { FIRST } else { NEXT };
                text.extend(
                    (0..count).map(|at| 3 + (at * at * 7 + at * c * 13 + c * 29 + turn * 5) % 120),
                );
                let sampling =
                    Sampling { max_tokens: ANSWERED, ignore_eos: true, ..Sampling::default() };
                let request = Request::new(RequestId(c.into()), text.clone(), sampling);
                Event::Submit(Box::new(request))
            };
            let (mut answers, begun) = answered(engine, several.clone().map(ask).collect());
            found.extend(begun);
            for conversation in several {
                let answer = answers.remove(&(conversation as u64)).unwrap();
                texts[conversation].extend(&answer);
                played.answers.push(answer);
            }
        }
        played.found.push(found);
    }
    // Everything is saved before the memory of pages is given away.
    engine.vacate();
    engine.audit().unwrap();
    played
}

fn disk(folder: &Path, bytes: u64) -> KeepOptions {
    KeepOptions { disk: Some((folder.into(), bytes)), ..KeepOptions::default() }
}

fn sum(found: &[u32]) -> u32 {
    found.iter().sum()
}

#[test]
fn states_come_back_with_their_pages() {
    for case in CASES {
        let folder = tempfile::tempdir().unwrap();
        let plain = play(&mut engine(&options(case, KeepOptions::default()), case, false), 2, 1);
        let cached = play(&mut engine(&options(case, KeepOptions::default()), case, true), 2, 1);
        assert_eq!(cached.answers, plain.answers, "{case}");
        assert_eq!(sum(&cached.found[1]), 0, "{case}: the cache is too large for this test");

        let keep = disk(folder.path(), 8 << 20);
        let kept = play(&mut engine(&options(case, keep.clone()), case, true), 2, 1);
        assert_eq!(kept.answers, plain.answers, "{case}");
        assert_eq!(kept.found[1], vec![SAVED; CONVERSATIONS as usize], "{case}");

        // The next process finds what this one left, beside others, too.
        let mut next = engine(&options(case, keep), case, true);
        let again = play(&mut next, 2, 3);
        assert_eq!(again.answers, plain.answers, "{case}");
        assert_eq!(again.found[0], vec![SAVED; CONVERSATIONS as usize], "{case}");
        let used = next.executor().store_uses()[0];
        assert!(used.loaded > 0 && used.failed == 0, "{case}: {used:?}");
        assert!(next.stats().states_restored >= u64::from(CONVERSATIONS), "{case}");

        let host = KeepOptions { host_bytes: Some(4 << 20), ..KeepOptions::default() };
        let kept = play(&mut engine(&options(case, host), case, true), 2, 1);
        assert_eq!(kept.answers, plain.answers, "{case} in host memory");
        assert_eq!(kept.found[1], vec![SAVED; CONVERSATIONS as usize], "{case} in host memory");
    }
}

/// Drafts change what seats carry: such states are not read by a process without them, nor the other way round.
#[test]
fn states_of_other_shapes_are_not_found() {
    let case = "qwen3-next";
    let folder = tempfile::tempdir().unwrap();
    let keep = disk(folder.path(), 8 << 20);
    let plain = play(&mut engine(&options(case, keep.clone()), case, true), 1, 1);
    let spec = Some("ngram:3".parse().unwrap());
    let drafts = LoadOptions { spec, ..options(case, keep) };
    for turn in ["without", "with"] {
        let mut other = engine(&drafts, case, true);
        let found = play(&mut other, 1, 1);
        assert_eq!(found.answers, plain.answers, "after a process {turn} drafts");
        let expected = if turn == "with" { SAVED * CONVERSATIONS } else { 0 };
        assert_eq!(sum(&found.found[0]), expected, "after a process {turn} drafts");
    }
}

/// Files that were changed, and files too small for all, cost time and no answer.
#[test]
fn damaged_and_small_files_change_no_answer() {
    for case in CASES {
        let folder = tempfile::tempdir().unwrap();
        let keep = disk(folder.path(), 8 << 20);
        let plain = play(&mut engine(&options(case, keep.clone()), case, true), 1, 1);
        for entry in std::fs::read_dir(folder.path()).unwrap() {
            let path = entry.unwrap().path();
            let mut bytes = std::fs::read(&path).unwrap();
            // Every hundredth byte after the first block: every page and every state has some.
            bytes.iter_mut().skip(8192).step_by(100).for_each(|byte| *byte ^= 1);
            std::fs::write(&path, bytes).unwrap();
        }
        let damaged = play(&mut engine(&options(case, keep), case, true), 1, 1);
        assert_eq!(damaged.answers, plain.answers, "{case}");

        let folder = tempfile::tempdir().unwrap();
        let small = 300 << 10;
        let mut kept = engine(&options(case, disk(folder.path(), small)), case, true);
        assert_eq!(play(&mut kept, 1, 1).answers, plain.answers, "{case} in a small file");
        let files = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap());
        let sizes: Vec<u64> = files.map(|file| file.metadata().unwrap().len()).collect();
        assert_eq!(sizes.len(), 2, "{case}: pages and states");
        assert!(sizes.iter().sum::<u64>() <= small, "{case}: {sizes:?}");
    }
}

/// Pages without room for states would never be found.
#[test]
fn a_store_without_room_for_states_is_refused() {
    let keep = KeepOptions { host_bytes: Some(1 << 20), ..KeepOptions::default() };
    let options = LoadOptions { state_bytes: Some(0), ..options("nemotron-h", keep) };
    let error = load("nemotron-h", &options).err().expect("refused").to_string();
    assert!(error.contains("--kv-states"), "{error}");
}
