//! The whole loop of steady decoding, engine and executor: it allocates nothing, and its tokens depend
//! neither on who prepares a step nor on how many steps a launch has.

mod models;

use allocs::{Counting, allocations};
use device::{Device, DeviceChoice};
use engine::request::{Event, Finish, Output, Request, RequestId, Sampling, Token};
use engine::{Engine, EngineConfig};
use graph::config::Given;
use model::{GraphExecutor, LoadOptions, ModelSource, load_executor};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations are counted for the whole process: one test at a time.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn devices() -> Vec<Device> {
    let mut devices = vec![device::cpu::open(Some(1), false).unwrap()];
    match Device::open(DeviceChoice::Cuda(0)) {
        Ok((gpu, _)) => devices.push(gpu),
        Err(reason) => eprintln!("skipped: no GPU ({reason})"),
    }
    devices
}

fn executor(device: &Device, flags: &[(&str, &str)], pages: Option<u32>) -> GraphExecutor {
    let folder = models::folder().join("qwen3");
    let flags = flags.iter().map(|(flag, value)| ((*flag).into(), (*value).into())).collect();
    let options = LoadOptions {
        max_batch: 6,
        max_context: 128,
        pages,
        graphs: Given { config: None, flags },
        ..LoadOptions::default()
    };
    let source = ModelSource::Checkpoint(folder);
    load_executor(&source, device, &options, &|_| ()).unwrap().executor
}

fn request(id: u64, vocab: u32) -> Request {
    let prompt: Vec<Token> =
        (0..3 + id as u32 % 5).map(|n| (n * 31 + id as u32 * 7) % vocab).collect();
    let mut sampling = Sampling { max_tokens: 40 + id as u32 % 9, ..Sampling::default() };
    if id % 2 == 1 {
        sampling.temperature = 0.9;
        sampling.seed = id;
        sampling.presence_penalty = 0.5;
    }
    if id % 3 == 2 {
        sampling.logprobs = Some(2);
        sampling.stop_tokens = (0..vocab / 16).map(|n| n * 16 + id as u32).take(12).collect();
    }
    let choices = 1 + u32::from(id == 4);
    Request { choices, ..Request::new(RequestId(id), prompt, sampling) }
}

type Flags = &'static [(&'static str, &'static str)];

type Answers = BTreeMap<(u64, u32), (Vec<(Token, Option<f32>)>, Option<Finish>)>;

/// Ten requests, some while others run; `pages` may be too few for all of them.
fn answers(device: &Device, flags: &[(&str, &str)], pages: Option<u32>) -> (Answers, u64) {
    let mut engine = Engine::new(executor(device, flags, pages), EngineConfig::default());
    let vocab = 64;
    let mut answers = Answers::new();
    let (mut next, mut now) = (0, 0);
    while next < 10 || !engine.is_idle() {
        let arrives = next < 6 || (next < 10 && now % 7 == 0);
        let events = match arrives {
            true => vec![Event::Submit(Box::new(request(next, vocab)))],
            false => vec![],
        };
        next += u64::from(arrives);
        now += 1;
        for output in engine.step_wait(now, events) {
            match output {
                Output::Token { id, choice, token, logprob } => {
                    let entry = answers.entry((id.0, choice)).or_default();
                    entry.0.push((token, logprob.map(|scored| scored.logprob)));
                }
                Output::Finished { id, choice, finish, .. } => {
                    answers.entry((id.0, choice)).or_default().1 = Some(finish);
                }
                Output::Prefilled { .. } | Output::Embedded { .. } => {}
                Output::Rejected { id, reason } => panic!("{id:?}: {reason}"),
            }
        }
        engine.audit().unwrap();
    }
    assert_eq!(answers.len(), 11);
    (answers, engine.stats().preemptions)
}

fn tokens(answers: &Answers) -> Vec<(Vec<Token>, Option<Finish>)> {
    let only = |(said, finish): &(Vec<(Token, Option<f32>)>, Option<Finish>)| {
        (said.iter().map(|(token, _)| *token).collect(), finish.clone())
    };
    answers.values().map(only).collect()
}

#[test]
fn preparing_and_repeating_change_no_answer() {
    let _turn = turn();
    for device in devices() {
        // Requests arrive between launches, so the other rows of a step depend on how many steps a launch
        // has. With one order of summation for all, no answer may depend on it.
        let fixed = ("graph-kernels", "fixed");
        let (wanted, _) = answers(&device, &[fixed], None);
        assert!(wanted.values().any(|(_, finish)| matches!(finish, Some(Finish::Stop(_)))));
        for (flag, value) in [
            ("graph-prep", "copy"),
            ("graph-prep", "fused"),
            ("graph-prep", "async"),
            ("graph-steps", "2"),
            ("graph-steps", "8"),
        ] {
            let (found, _) = answers(&device, &[fixed, (flag, value)], None);
            assert_eq!(wanted, found, "--{flag} {value} on {}", device.describe());
        }
        // Too few pages for all: rows run out of them in the middle of a launch.
        // Preempted sequences are fed again as prompts: the same tokens, log-probabilities equal up to rounding.
        let (pressed, preempted) = answers(&device, &[fixed, ("graph-steps", "8")], Some(14));
        assert_eq!(tokens(&wanted), tokens(&pressed), "under pressure on {}", device.describe());
        assert!(preempted > 0, "there were enough pages after all");
    }
}

#[test]
fn steady_decoding_allocates_nothing() {
    let _turn = turn();
    // The CPU only: a GPU's driver may allocate in a launch.
    let device = device::cpu::open(Some(1), false).unwrap();
    // Two steps in each call, for two are in flight.
    let cases: [(Flags, usize, usize); 4] = [
        (&[], 12, 20),
        (&[("graph-prep", "copy")], 12, 20),
        (&[("graph-prep", "fused")], 12, 20),
        // Four steps in each call.
        (&[("graph-steps", "4")], 6, 10),
    ];
    for (flags, warm, timed) in cases {
        // Publishing a full page to the prefix tree allocates its entry; nothing else may.
        let config = EngineConfig { prefix_cache: false, ..EngineConfig::default() };
        let mut engine = Engine::new(executor(&device, flags, None), config);
        let submit = |id: u64| {
            let sampling = Sampling { max_tokens: 100, ignore_eos: true, ..Sampling::default() };
            Event::Submit(Box::new(Request { sampling, choices: 1, ..request(id, 64) }))
        };
        engine.step_wait(0, (0..6).map(submit).collect());
        let mut now = 0;
        let mut step = |engine: &mut Engine<GraphExecutor>| {
            now += 1;
            let outputs = engine.step_wait(now, Vec::new());
            let tokens = outputs.len();
            engine.recycle(outputs);
            tokens
        };
        for _ in 0..warm {
            step(&mut engine);
        }
        let before = allocations();
        let tokens: usize = (0..timed).map(|_| step(&mut engine)).sum();
        let counted = allocations() - before;
        assert!(tokens >= 6 * 20, "{flags:?}: only {tokens} tokens");
        assert_eq!(engine.stats().running, 6, "{flags:?}: not steady");
        assert_eq!(counted, 0, "{flags:?}: {counted} allocations for {tokens} tokens");
    }
}
