//! Layers with a window give back the pages that no later token sees: logits and answers stay the same, and memory holds
//! more sequences.

use crate::models;
use device::target::CpuTarget;
use engine::exec::{
    Coverage, ExecError, Executor, Geometry, Join, Kept, Page, PageEntry, Row, RowResult, Sampled,
    Seat, SeatParams, Step, StepResult,
};
use engine::request::{Event, Request, RequestId, Sampling};
use engine::{Engine, EngineConfig};
use formats::checkpoint::Checkpoint;
use graph::layout::{page_bytes, pages_that_fit};
use graph::program::Program;
use model::{LoadOptions, LoadedExecutor, ModelConfig, ModelSource, OpenModel, Precision};
use std::collections::VecDeque;

/// The cases whose layers have windows, with the tables of layers that keep everything and of the others.
const CASES: [(&str, u32, u32); 5] = [
    ("gemma2", 1, 2),
    ("gemma3", 1, 3),
    ("mistral-window", 0, 1),
    ("phi3", 0, 1),
    ("gpt-oss", 1, 2),
];
const PAGE: u32 = 4;

fn load(case: &str, keep_windows: bool, flags: &[(&str, &str)], pages: u32) -> LoadedExecutor {
    let mut options = LoadOptions {
        max_batch: 4,
        max_context: 128,
        prefill_tokens: Some(16),
        page_size: PAGE,
        pages: Some(pages),
        precision: Some(Precision::EXACT),
        keep_windows,
        ..LoadOptions::default()
    };
    for (flag, value) in flags {
        options.graphs.flags.insert((*flag).into(), (*value).into());
    }
    let source = ModelSource::Checkpoint(models::folder().join(case));
    model::load_executor(&source, &models::cpu(), &options, &|_| {}).unwrap()
}

/// A golden text in pages of four tokens, where every page outside the window is used again at once: logits after
/// each step equal those of `transformers` to 1e-4. All texts are at least three windows long.
#[test]
fn logits_equal_transformers_although_pages_are_used_again() {
    for (case, full, windowed) in CASES {
        let file = models::folder().join(case).join("golden.safetensors");
        let file = Checkpoint::open(&file).unwrap();
        let vocab = file.get("logits").unwrap().shape[1];
        let logits = file.read_f32("logits").unwrap();
        let mut bytes = vec![0; logits.len() / vocab * 4];
        file.read_into("tokens", &mut bytes).unwrap();
        let tokens = bytes.chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap()));
        let tokens: Vec<u32> = tokens.collect();
        for chunks in [vec![1; 40], vec![7, 1, 1, 5, 3, 9, 1, 6, 2, 5], vec![16, 16, 8]] {
            let mut executor = load(case, false, &[], 120).executor;
            let kept = executor.geometry().kept;
            assert_eq!((kept.full, kept.windowed), (full, windowed), "{case}");
            assert!(tokens.len() as u32 >= 3 * kept.window, "{case} is too short");
            let mut pages = Pages::new(kept);
            let mut start = 0;
            for (number, chunk) in (1..).zip(chunks) {
                let end = start + chunk;
                let step = Step {
                    number,
                    rows: vec![Row::feed(
                        SEAT,
                        start,
                        tokens[start as usize..end as usize].to_vec(),
                    )],
                    joins: pages.join(),
                    pages: pages.cover(start, end),
                    ..Step::default()
                };
                executor.launch(&step).unwrap();
                executor.poll(true).unwrap().expect("a result");
                let ours = executor.read_logits(0).unwrap();
                let theirs = &logits[(end as usize - 1) * vocab..end as usize * vocab];
                let worst = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst <= 1e-4, "{case}: after {end} tokens logits differ by {worst}");
                start = end;
            }
            assert!(pages.reused > 0 || kept.windowed == 0, "{case}: no page was used again");
        }
    }
}

const SEAT: Seat = Seat(1);

/// The pages of one sequence; those that leave the window are used again first.
struct Pages {
    kept: Kept,
    joined: bool,
    next: u32,
    free: VecDeque<Page>,
    /// Pages with windows, by page of tokens.
    windows: VecDeque<(u32, Vec<Page>)>,
    covered: u32,
    reused: u32,
}

impl Pages {
    fn new(kept: Kept) -> Pages {
        let (free, windows) = (VecDeque::new(), VecDeque::new());
        Pages { kept, joined: false, next: 1, free, windows, covered: 0, reused: 0 }
    }

    fn join(&mut self) -> Vec<Join> {
        let params = SeatParams::greedy();
        let join = Join { seat: SEAT, len: 0, last_token: 0, params, history: Vec::new() };
        if std::mem::replace(&mut self.joined, true) { Vec::new() } else { vec![join] }
    }

    fn take(&mut self) -> Page {
        self.reused += u32::from(!self.free.is_empty());
        self.free.pop_front().unwrap_or_else(|| {
            self.next += 1;
            Page(self.next - 1)
        })
    }

    /// Frees what a token at `start` does not see, and adds entries for tokens up to `end`.
    fn cover(&mut self, start: u32, end: u32) -> Vec<PageEntry> {
        let first = self.kept.first_page(start, PAGE);
        while let Some((_, pages)) = self.windows.pop_front_if(|(index, _)| *index < first) {
            self.free.extend(pages);
        }
        let mut entries = Vec::new();
        while self.covered * PAGE < end {
            let index = self.covered;
            let pages: Vec<Page> = (0..self.kept.width()).map(|_| self.take()).collect();
            entries.extend(pages.iter().zip(0..).map(|(&page, table)| PageEntry {
                seat: SEAT,
                table,
                index,
                page,
            }));
            self.windows.push_back((index, pages[self.kept.full as usize..].to_vec()));
            self.covered += 1;
        }
        entries
    }
}

/// Requests that share beginnings, run to an answer longer than the window; the same answers with and without giving
/// pages back, with few pages, by every backend and in launches of several steps.
#[test]
fn answers_are_those_of_a_model_that_keeps_all_pages() {
    for (case, full, _) in CASES {
        let fixed = ("graph-kernels", "fixed");
        let (wanted, _) = answers(load(case, true, &[fixed], 400));
        for backend in ["full", "breakable", "piecewise", "disabled"] {
            let flags =
                [fixed, ("graph-backend-decode", backend), ("graph-backend-prefill", backend)];
            let (found, _) = answers(load(case, false, &flags, 400));
            assert_eq!(found, wanted, "{case} by {backend}");
        }
        let (found, _) = answers(load(case, false, &[fixed, ("graph-steps", "4")], 400));
        assert_eq!(found, wanted, "{case} in launches of four steps");
        let pages = 60 * load(case, false, &[], 400).executor.geometry().kept.width() / 2;
        let (found, preemptions) = answers(load(case, false, &[fixed], pages));
        assert_eq!(found, wanted, "{case} with {pages} pages");
        assert!(preemptions > 0 || full == 0, "{case}: {pages} pages were enough");
    }
}

fn answers(loaded: LoadedExecutor) -> (Vec<Vec<u32>>, u64) {
    let mut engine = Engine::builder(loaded.executor).step_tokens(16).build();
    let request = |id: u64| {
        let shared = (0..24).map(|i| 3 + (i * 7 + id as u32 / 4) % 100);
        let own = (0..id as u32 % 5 * 6).map(|i| 3 + (i * 11 + id as u32) % 100);
        let sampling = Sampling { max_tokens: 60, ignore_eos: true, ..Sampling::default() };
        Request::new(RequestId(id), shared.chain(own).collect::<Vec<u32>>(), sampling)
    };
    let found = engine.answer((0..12).map(request));
    let found = found.into_iter().map(|answer| answer.unwrap().choices[0].tokens.clone()).collect();
    (found, engine.engine().stats().preemptions)
}

/// A device that only counts: every row samples token 1 at once.
struct Counting(Geometry, VecDeque<StepResult>);

impl Executor for Counting {
    fn geometry(&self) -> Geometry {
        self.0
    }

    fn coverage(&self) -> Coverage {
        let seats = self.0.seats;
        Coverage { decode_rows: seats, prefill_tokens: 2048, prefill_rows: seats }
    }

    fn launch(&mut self, step: &Step) -> Result<(), ExecError> {
        let row = |row: &Row| {
            let sampled = row.sample.then(|| Sampled { token: 1, ..Sampled::default() });
            RowResult { tokens: sampled.into_iter().collect(), ..RowResult::default() }
        };
        let rows = step.rows.iter().map(row).collect();
        self.1.push_back(StepResult { number: step.number, rows, ..StepResult::default() });
        Ok(())
    }

    fn poll(&mut self, _: bool) -> Result<Option<StepResult>, ExecError> {
        Ok(self.1.pop_front())
    }
}

/// Sequences of 32,768 tokens that run at once in so much memory, without one being sent back.
fn sequences(program: &Program, bytes: u64) -> u32 {
    let graph::program::Kept { full, windowed, window, .. } = program.kept();
    let pages = pages_that_fit(program, 16, bytes);
    assert!(u64::from(pages) * page_bytes(program, 16) <= bytes);
    let kept = Kept { full, windowed, window };
    let geometry =
        Geometry { seats: 64, pages, page_size: 16, pages_per_seat: 2048, vocab: 100, kept };
    let config = EngineConfig { prefix_cache: false, ..EngineConfig::default() };
    let mut engine = Engine::new(Counting(geometry, VecDeque::new()), config);
    let submit = |id: u64| {
        let sampling = Sampling { max_tokens: 768, ignore_eos: true, ..Sampling::default() };
        Event::Submit(Box::new(Request::new(RequestId(id), vec![id as u32; 32_000], sampling)))
    };
    engine.step(0, (0..64).map(submit).collect());
    let mut most = 0;
    for now in 1..4000 {
        engine.step(now, Vec::new());
        let stats = engine.stats();
        assert_eq!(stats.preemptions, 0, "a sequence was sent back");
        most = most.max(stats.running);
        if stats.finished > 0 {
            break;
        }
    }
    assert!(engine.stats().finished > 0, "none ended");
    most
}

/// The shape of Gemma 3 12B: five layers with a window of 1,024 for each that sees everything.
#[test]
fn five_windows_to_one_hold_four_times_the_sequences() {
    let json = std::fs::read_to_string(models::folder().join("gemma3/config.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let kinds = (1..=48).map(|layer| match layer % 6 {
        0 => "full_attention",
        _ => "sliding_attention",
    });
    json["num_hidden_layers"] = 48.into();
    json["layer_types"] = kinds.collect::<Vec<_>>().into();
    json["sliding_window"] = 1024.into();
    json["max_position_embeddings"] = 32_768.into();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), json.to_string()).unwrap();
    let config = ModelConfig::from_folder(folder.path()).unwrap();
    let source = ModelSource::Dummy { config: Box::new(config), seed: 0 };
    let model = OpenModel::open(&source).unwrap();
    let fast = device::cpu::Numerics::Fast;
    let precision = model::precision(&CpuTarget);
    let program = model.write(&CpuTarget, fast, precision, 32_768).unwrap().program;
    let mut whole = program.clone();
    whole.keep_all();
    assert_eq!((program.kept().full, program.kept().windowed), (1, 5));
    // Memory for five sequences of a program that keeps everything, and their spare pages.
    let bytes = page_bytes(&whole, 16) * (5 * 2048 + 8);
    let (before, now) = (sequences(&whole, bytes), sequences(&program, bytes));
    eprintln!("{before} sequences of 32,768 tokens before, {now} now");
    assert!(before == 5 && now >= 4 * before, "{before} before, {now} now");
}
