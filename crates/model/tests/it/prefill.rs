//! However a prompt reaches the device, its logits are the same: whole, in chunks of any size, among other
//! rows, on top of pages that another sequence filled, by every backend. On the CPU, and the same on a GPU
//! when there is one.

use crate::models;
use device::{Device, DeviceChoice, DeviceKind};
use engine::exec::{Executor, Join, Page, PageEntry, Row, Seat, SeatParams, Step};
use model::ModelConfig;
use model::Precision;
use model::{GraphExecutor, LoadOptions, ModelSource, load_executor};

fn devices() -> Vec<Device> {
    let mut devices = vec![device::cpu::open(None, false).unwrap()];
    match Device::open(DeviceChoice::Cuda(0)) {
        Ok((gpu, _)) => devices.push(gpu),
        Err(reason) => eprintln!("skipped: no GPU ({reason})"),
    }
    devices
}

/// A small model of dummy weights, and a page table that never gives a page twice.
struct Bench {
    executor: GraphExecutor,
    number: u64,
    next_page: u32,
    exact: bool,
}

impl Bench {
    fn new(device: &Device, head_dim: usize, tokens: u32, backend: &str) -> Bench {
        let mut config = ModelConfig::from_folder(&models::folder().join("qwen3")).unwrap();
        config.head_dim = head_dim;
        config.max_position = 9000;
        let exact = device.kind() == DeviceKind::Cpu;
        let mut options = LoadOptions {
            max_batch: 256,
            max_context: 8400,
            prefill_tokens: Some(tokens),
            pages: Some(1400),
            precision: exact.then_some(Precision::EXACT),
            ..LoadOptions::default()
        };
        options.graphs.flags.insert("graph-backend-prefill".into(), backend.into());
        let source = ModelSource::Dummy { config: Box::new(config), seed: 3 };
        let executor = load_executor(&source, device, &options, &|_| {}).unwrap().executor;
        Bench { executor, number: 0, next_page: 1, exact }
    }

    /// A step that lets these sequences in, `len` tokens being in the `shared` pages already.
    fn join(
        &mut self,
        step: &mut Step,
        seat: u32,
        len: u32,
        room: u32,
        shared: &[Page],
    ) -> Vec<Page> {
        let size = self.executor.geometry().page_size;
        let mut pages = shared.to_vec();
        while (pages.len() as u32) * size < room {
            pages.push(Page(self.next_page));
            self.next_page += 1;
        }
        step.joins.push(Join {
            seat: Seat(seat),
            len,
            last_token: 0,
            params: SeatParams::greedy(),
            history: Vec::new(),
        });
        let entries = pages.iter().zip(0..);
        step.pages.extend(entries.map(|(&page, index)| PageEntry {
            seat: Seat(seat),
            table: 0,
            index,
            page,
        }));
        pages
    }

    fn row(seat: u32, start: u32, tokens: Vec<u32>) -> Row {
        Row::feed(Seat(seat), start, tokens)
    }

    /// Runs a step; the logits of each of its rows.
    fn run(&mut self, step: Step) -> Vec<Vec<f32>> {
        self.number += 1;
        let rows = step.rows.len() as u32;
        self.executor.launch(&Step { number: self.number, ..step }).unwrap();
        self.executor.poll(true).unwrap().expect("a result");
        (0..rows).map(|row| self.executor.read_logits(row).unwrap()).collect()
    }

    /// Feeds a prompt in chunks; the logits after the last.
    fn feed(
        &mut self,
        seat: u32,
        prompt: &[u32],
        chunks: &mut dyn Iterator<Item = usize>,
    ) -> Vec<f32> {
        let mut step = Step::default();
        self.join(&mut step, seat, 0, prompt.len() as u32, &[]);
        let (mut start, mut last) = (0, Vec::new());
        while start < prompt.len() {
            let end = (start + chunks.next().unwrap()).min(prompt.len());
            step.rows = vec![Self::row(seat, start as u32, prompt[start..end].to_vec())];
            last = self.run(std::mem::take(&mut step)).remove(0);
            start = end;
        }
        last
    }

    #[track_caller]
    fn same(&self, what: &str, want: &[f32], got: &[f32]) {
        let scale = want.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let worst = want.iter().zip(got).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // Sums in another order; on a GPU in 16 bits through two layers.
        let most = if self.exact { 1e-4 } else { 3e-2 } * scale;
        assert!(scale > 0.0 && worst <= most, "{what}: logits up to {scale} differ by {worst}");
    }
}

fn prompt(len: usize, seed: u32) -> Vec<u32> {
    let mix = |i: u32| i.wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(40_503);
    (0..len as u32).map(|i| (mix(i) >> 7) % 131).collect()
}

#[test]
fn chunks_of_any_size_give_the_same_logits() {
    for device in devices() {
        for head_dim in [64, 128] {
            let mut bench = Bench::new(&device, head_dim, 700, "full");
            let prompt = prompt(650, 1);
            let whole = bench.feed(0, &prompt, &mut std::iter::repeat(650));
            for (seat, chunk) in (1..).zip([16, 17, 100, 128, 333, 649]) {
                let chunked = bench.feed(seat, &prompt, &mut std::iter::repeat(chunk));
                bench.same(&format!("heads of {head_dim}, chunks of {chunk}"), &whole, &chunked);
            }
            // Single tokens across two pages, then everything else.
            let mut singles = std::iter::repeat_n(1, 35).chain(std::iter::repeat(400));
            let chunked = bench.feed(100, &prompt, &mut singles);
            bench.same(&format!("heads of {head_dim}, single tokens first"), &whole, &chunked);
        }
    }
}

#[test]
fn a_prompt_of_8192_tokens_in_one_step_and_in_several() {
    for device in devices() {
        let head_dim = if device.kind() == DeviceKind::Cpu { 16 } else { 128 };
        let mut bench = Bench::new(&device, head_dim, 8192, "full");
        let prompt = prompt(8192, 2);
        let whole = bench.feed(0, &prompt, &mut std::iter::repeat(8192));
        let chunked = bench.feed(1, &prompt, &mut [4096, 1, 2095, 2000].into_iter());
        bench.same("chunks of a long prompt", &whole, &chunked);
    }
}

/// Ragged prompts, 256 rows of one token each, and both beside a long chunk: each row as if alone.
#[test]
fn rows_do_not_see_each_other() {
    for device in devices() {
        let mut bench = Bench::new(&device, 64, 2048, "full");
        let length = |seat: u32| 1 + (seat as usize * 7) % 13;
        let prompts: Vec<Vec<u32>> = (0..256).map(|seat| prompt(length(seat) + 1, seat)).collect();
        let mut step = Step::default();
        for (seat, prompt) in (0..).zip(&prompts) {
            bench.join(&mut step, seat, 0, prompt.len() as u32 + 1, &[]);
            step.rows.push(Bench::row(seat, 0, prompt[..prompt.len() - 1].to_vec()));
        }
        bench.run(step);
        let row = |seat: u32| {
            let prompt = &prompts[seat as usize];
            Bench::row(seat, prompt.len() as u32 - 1, vec![prompt[prompt.len() - 1]])
        };
        let all = bench.run(Step { rows: (0..256).map(row).collect(), ..Step::default() });
        for seat in [0u32, 1, 7, 100, 255] {
            let prompt = &prompts[seat as usize];
            let mut alone = Bench::new(&device, 64, 64, "full");
            let want = alone.feed(9, prompt, &mut std::iter::repeat(prompt.len()));
            alone.same(&format!("row {seat} of 256"), &want, &all[seat as usize]);
        }
        // One token more of each, beside 1,500 prompt tokens of a new sequence.
        let long = prompt(1500, 77);
        let mut step = Step::default();
        bench.join(&mut step, 255, 0, 1500, &[]);
        step.rows = (0..255)
            .map(|seat| Bench::row(seat, prompts[seat as usize].len() as u32, vec![seat % 131]))
            .collect();
        step.rows.push(Bench::row(255, 0, long.clone()));
        let mixed = bench.run(step);
        for seat in [0u32, 50, 254] {
            let mut prompt = prompts[seat as usize].clone();
            prompt.push(seat % 131);
            let mut alone = Bench::new(&device, 64, 64, "full");
            let want = alone.feed(4, &prompt, &mut std::iter::repeat(prompt.len()));
            alone.same(&format!("row {seat} beside a prompt"), &want, &mixed[seat as usize]);
        }
        let mut alone = Bench::new(&device, 64, 1500, "full");
        let want = alone.feed(3, &long, &mut std::iter::repeat(1500));
        alone.same("the prompt beside 255 rows", &want, &mixed[255]);
    }
}

#[test]
fn a_prefix_that_another_sequence_filled_counts_as_fed() {
    for device in devices() {
        let mut bench = Bench::new(&device, 64, 512, "full");
        let size = bench.executor.geometry().page_size;
        let prompt = prompt(300, 5);
        let mut step = Step::default();
        let pages = bench.join(&mut step, 0, 0, 300, &[]);
        step.rows = vec![Bench::row(0, 0, prompt.clone())];
        let whole = bench.run(step).remove(0);
        for shared in [1u32, 8, 18] {
            let mut step = Step::default();
            let len = shared * size;
            bench.join(&mut step, shared, len, 300, &pages[..shared as usize]);
            step.rows = vec![Bench::row(shared, len, prompt[len as usize..].to_vec())];
            let got = bench.run(step).remove(0);
            bench.same(&format!("{shared} shared pages"), &whole, &got);
        }
    }
}

#[test]
fn backends_agree_to_the_bit() {
    for device in devices() {
        let prompt = prompt(200, 9);
        let mut logits = Vec::new();
        for backend in ["full", "breakable", "piecewise", "disabled"] {
            let mut bench = Bench::new(&device, 64, 160, backend);
            logits.push((backend, bench.feed(2, &prompt, &mut [130, 3, 1, 66].into_iter())));
        }
        for (backend, got) in &logits[1..] {
            assert!(*got == logits[0].1, "{backend} differs from full");
        }
    }
}
