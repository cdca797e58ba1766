//! Logits of every family and option against `transformers` (CPU, float32); the checkpoints and the
//! expected numbers under `goldens/` come from `tools/make_model_goldens.py`.

use device::{DType, Device, DeviceChoice, DeviceKind};
use engine::exec::{Executor, Join, Page, PageEntry, Row, Seat, SeatParams, Step};
use engine::model::dense::Numbers;
use engine::model::{LoadOptions, ModelSource, load_executor};
use formats::checkpoint::Checkpoint;
use std::path::{Path, PathBuf};

const CASES: [&str; 11] = [
    "llama",
    "llama-tied",
    "llama-mha",
    "llama-mqa",
    "llama-llama3-rope",
    "llama-linear-rope",
    "smollm2",
    "mistral-window",
    "qwen2",
    "qwen3",
    "qwen3-tied",
];

/// Where the goldens are: beside this crate, or, for a test binary that was carried to another machine,
/// under the repository root it is run from.
fn folder(case: &str) -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(case);
    let carried = Path::new("crates/engine/tests/goldens").join(case);
    if built.is_dir() { built } else { carried }
}

struct Golden {
    tokens: Vec<u32>,
    logits: Vec<Vec<f32>>,
}

fn golden(case: &str) -> Golden {
    let file = Checkpoint::open(&folder(case).join("golden.safetensors")).unwrap();
    let info = file.get("logits").unwrap();
    let (rows, vocab) = (info.shape[0], info.shape[1]);
    let flat = file.read_f32("logits").unwrap();
    let logits = flat.chunks(vocab).map(<[f32]>::to_vec).collect();
    let mut bytes = vec![0; rows * 4];
    file.read_into("tokens", &mut bytes).unwrap();
    let tokens = bytes.chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect();
    Golden { tokens, logits }
}

/// Feeds the golden tokens in chunks and compares the logits after each chunk's last token.
fn check(case: &str, device: &Device, chunks: &[usize], tolerance: f32) {
    let golden = golden(case);
    let options = LoadOptions {
        max_batch: 4,
        max_context: 128,
        prefill_tokens: Some(64),
        pages: Some(40),
        numbers: (device.kind() == DeviceKind::Cpu)
            .then_some(Numbers { act: DType::F32, kv: DType::F32 }),
        ..LoadOptions::default()
    };
    let source = ModelSource::Checkpoint(folder(case));
    let mut loaded = load_executor(&source, device, &options, &|_| {}).unwrap();
    let executor = &mut loaded.executor;
    let page_size = executor.geometry().page_size;
    let seat = Seat(1);
    let mut start = 0;
    for (number, &chunk) in chunks.iter().enumerate() {
        let end = (start + chunk).min(golden.tokens.len());
        let first = number == 0;
        let joins = if first {
            vec![Join { seat, len: 0, last_token: 0, params: SeatParams::greedy() }]
        } else {
            vec![]
        };
        // Pages in reverse, so that nothing depends on their order.
        let pages =
            (0..4).filter(|_| first).map(|i| PageEntry { seat, index: i, page: Page(30 - i * 3) });
        assert!(golden.tokens.len() <= 4 * page_size as usize);
        let tokens = golden.tokens[start..end].to_vec();
        let rows = vec![Row { seat, tokens, start: start as u32, sample: true, score: None }];
        let step = Step {
            number: number as u64 + 1,
            rows,
            joins,
            pages: pages.collect(),
            ..Step::default()
        };
        executor.launch(&step).unwrap();
        executor.poll(true).unwrap().expect("a result");
        let ours = executor.read_logits(0).unwrap();
        let theirs = &golden.logits[end - 1];
        let worst = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= tolerance, "{case}: token {}: logits differ by {worst}", end - 1);
        start = end;
        if start == golden.tokens.len() {
            break;
        }
    }
}

#[test]
fn logits_equal_transformers_on_the_cpu() {
    let device = device::cpu::open(None, false).unwrap();
    assert_eq!(device.kind(), DeviceKind::Cpu);
    for case in CASES {
        check(case, &device, &[40], 1e-4);
        check(case, &device, &[1; 40], 1e-4);
        check(case, &device, &[17, 1, 1, 14, 7], 1e-4);
    }
}

#[test]
fn logits_are_close_to_transformers_on_the_gpu() {
    let Ok((device, _)) = Device::open(DeviceChoice::Cuda(0)) else {
        eprintln!("skipped: no GPU");
        return;
    };
    for case in CASES {
        // bf16 weights, activations and pages: eight bits of mantissa through two layers.
        check(case, &device, &[40], 0.15);
        check(case, &device, &[17, 1, 1, 14, 7], 0.15);
    }
}
