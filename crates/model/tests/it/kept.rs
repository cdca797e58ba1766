//! Evicted KV pages that are kept on disk or in host memory come back to the conversations they belong to, and change
//! no answer.

use device::{Device, DeviceChoice};
use engine::exec::Executor;
use engine::request::{Event, Output, Request, RequestId, Sampling, Token};
use engine::{Engine, EngineConfig};
use model::{GraphExecutor, KeepOptions, LoadOptions, ModelConfig, ModelSource, load_executor};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

const CONVERSATIONS: usize = 200;
const TURNS: usize = 4;
/// Tokens that a turn adds: of the user, of the model.
const ASKED: usize = 123;
const ANSWERED: u32 = 8;
/// Pages of all conversations at their end.
const ALL_PAGES: u32 = (CONVERSATIONS * TURNS * (ASKED + ANSWERED as usize) / 16) as u32;
/// Pages of the device: for a tenth.
const SMALL: u32 = ALL_PAGES / 10;

fn model(seed: u64) -> ModelSource {
    let mut config = ModelConfig::bundled("qwen3-0.6b").unwrap();
    config.layers = 2;
    (config.hidden, config.intermediate, config.vocab) = (64, 128, 512);
    (config.q_heads, config.kv_heads, config.head_dim) = (2, 1, 32);
    ModelSource::Dummy { config: Box::new(config), seed }
}

fn engine(seed: u64, pages: u32, keep: KeepOptions) -> Engine<GraphExecutor> {
    let mut options = LoadOptions {
        max_batch: 8,
        max_context: 560,
        prefill_tokens: Some(256),
        pages: Some(pages),
        keep,
        ..LoadOptions::default()
    };
    // The same sums in any batch and any pieces: answers can be compared.
    options.graphs.flags.insert("graph-kernels".into(), "fixed".into());
    let (device, _) = Device::open(DeviceChoice::Cpu).unwrap();
    let loaded = load_executor(&model(seed), &device, &options, &|_| {}).unwrap();
    Engine::new(loaded.executor, EngineConfig::default())
}

/// What all conversations got, and how much of their earlier turns was found.
#[derive(Default)]
struct Played {
    answers: Vec<Vec<Token>>,
    earlier: u64,
    found: u64,
}

/// Steps until all of these requests are answered: the answers, and the cached tokens that each found.
pub(crate) fn answered(
    engine: &mut Engine<GraphExecutor>,
    mut events: Vec<Event>,
) -> (BTreeMap<u64, Vec<Token>>, Vec<u32>) {
    let (mut answers, mut found) = (BTreeMap::<u64, Vec<Token>>::new(), Vec::new());
    while !events.is_empty() || !engine.is_idle() {
        for output in engine.step_wait(0, std::mem::take(&mut events)) {
            match output {
                Output::Token { id, token, .. } => answers.entry(id.0).or_default().push(token),
                Output::Prefilled { cached_tokens, .. } => found.push(cached_tokens),
                Output::Finished { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        engine.audit().unwrap();
    }
    (answers, found)
}

/// Every conversation takes a turn before the first takes its next one; eight at a time.
fn play(engine: &mut Engine<GraphExecutor>, turns: usize) -> Played {
    let mut played = Played::default();
    let mut texts: Vec<Vec<Token>> = vec![Vec::new(); CONVERSATIONS];
    for turn in 0..turns {
        for first in (0..CONVERSATIONS).step_by(8) {
            let several = first..(first + 8).min(CONVERSATIONS);
            let events = several.clone().map(|conversation| {
                let text = &mut texts[conversation];
                played.earlier += text.len() as u64;
                let word =
                    |at: usize| ((conversation * 7919 + turn * 104_729 + at * 31) % 509) as Token;
                text.extend((0..ASKED).map(word));
                let max_tokens = ANSWERED;
                let sampling = Sampling { max_tokens, ignore_eos: true, ..Sampling::default() };
                let id = RequestId(conversation as u64);
                Event::Submit(Box::new(Request::new(id, text.clone(), sampling)))
            });
            let (mut answers, found) = answered(engine, events.collect());
            played.found += found.into_iter().map(u64::from).sum::<u64>();
            for conversation in several {
                let answer = answers.remove(&(conversation as u64)).unwrap();
                texts[conversation].extend(&answer);
                played.answers.push(answer);
            }
        }
    }
    played
}

/// All turns without memory for evicted pages.
fn plain() -> &'static Played {
    static PLAIN: OnceLock<Played> = OnceLock::new();
    PLAIN.get_or_init(|| play(&mut engine(3, SMALL, KeepOptions::default()), TURNS))
}

/// The answers of the first turns.
fn answers(turns: usize) -> &'static [Vec<Token>] {
    &plain().answers[..turns * CONVERSATIONS]
}

fn disk(folder: &Path, bytes: u64) -> KeepOptions {
    KeepOptions { disk: Some((folder.into(), bytes)), ..KeepOptions::default() }
}

fn share(played: &Played) -> f64 {
    played.found as f64 / played.earlier as f64
}

#[test]
fn conversations_find_their_earlier_turns() {
    let folder = tempfile::tempdir().unwrap();
    let mut kept = engine(3, SMALL, disk(folder.path(), 1 << 30));
    let with = play(&mut kept, TURNS);
    println!(
        "{CONVERSATIONS} conversations of {TURNS} turns, pages for a tenth: {:.1} % of earlier tokens found, \
         {:.1} % from disk too",
        100.0 * share(plain()),
        100.0 * share(&with)
    );
    let used = kept.executor().store_uses()[0];
    println!("{used:?}");
    assert!(share(&with) >= 0.95, "{}", share(&with));
    assert!(share(plain()) < 0.5, "the cache is too large for this test: {}", share(plain()));
    assert_eq!(answers(TURNS), with.answers);
    assert_eq!((used.failed, used.evicted), (0, 0));

    // The next process finds what this one left.
    drop(kept);
    let mut next = engine(3, SMALL, disk(folder.path(), 1 << 30));
    let again = play(&mut next, 1);
    assert_eq!(again.answers, answers(1));
    assert!(again.found as usize >= CONVERSATIONS * (ASKED / 16 - 1) * 16, "{}", again.found);
    // Another model does not.
    drop(next);
    let mut other = engine(4, SMALL, disk(folder.path(), 1 << 30));
    assert_eq!(play(&mut other, 1).found, 0);
}

/// With room for half of all pages in a file, old pages give way, and answers stay the same.
#[test]
fn a_small_file_gives_old_pages_up() {
    let folder = tempfile::tempdir().unwrap();
    // A page takes 16 tokens × 2 layers × keys and values × 32 × 4 bytes at most, and its head.
    let mut kept = engine(3, SMALL, disk(folder.path(), 8 << 20));
    let with = play(&mut kept, 2);
    let used = kept.executor().store_uses()[0];
    assert!(used.evicted > 0 && used.pages <= used.room, "{used:?}");
    assert_eq!(answers(2), with.answers);
    let size: u64 = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().len())
        .sum();
    assert!(size <= 8 << 20, "{size}");
}

/// Host memory first, then the file.
#[test]
fn host_memory_overflows_to_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let keep = KeepOptions { host_bytes: Some(4 << 20), ..disk(folder.path(), 1 << 30) };
    let mut kept = engine(3, SMALL, keep);
    let with = play(&mut kept, 3);
    let uses = kept.executor().store_uses();
    assert!(uses[0].evicted > 0 && uses[0].loaded + uses[1].loaded > 0, "{uses:?}");
    assert!(uses[1].saved >= uses[0].evicted && uses[1].loaded > 0, "{uses:?}");
    assert!(share(&with) >= 0.95, "{}", share(&with));
    assert_eq!(answers(3), with.answers);
}

/// Files that were changed under a running server cost time and no answer.
#[test]
fn a_file_damaged_under_the_server_changes_no_answer() {
    let folder = tempfile::tempdir().unwrap();
    drop(play(&mut engine(3, SMALL, disk(folder.path(), 1 << 30)), 1));
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        let path = entry.unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        // Every hundredth byte after the first block: every page has some.
        bytes.iter_mut().skip(8192).step_by(100).for_each(|byte| *byte ^= 1);
        std::fs::write(&path, bytes).unwrap();
    }
    let mut kept = engine(3, SMALL, disk(folder.path(), 1 << 30));
    let with = play(&mut kept, 2);
    assert_eq!(answers(2), with.answers);
}
