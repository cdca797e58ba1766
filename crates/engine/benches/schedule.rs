//! What a step costs the host: 256 running requests over a device that computes nothing.

use criterion::{Criterion, criterion_group, criterion_main};
use engine::exec::{
    Coverage, ExecError, Executor, Geometry, Kept, RowResult, Step, StepResult, Tokens,
};
use engine::request::{Event, Output, Request, RequestId, Sampling};
use engine::{Engine, EngineConfig};
use std::collections::VecDeque;
use std::hint::black_box;

const RUNNING: u32 = 256;

/// Answers every row with token 7, one step per round of polling, as a device in steady decode does.
#[derive(Default)]
struct Null {
    results: VecDeque<StepResult>,
    pause: bool,
}

impl Executor for Null {
    fn geometry(&self) -> Geometry {
        let pages_per_seat = 256;
        let pages = 1 + RUNNING * pages_per_seat;
        Geometry {
            seats: RUNNING,
            pages,
            page_size: 16,
            pages_per_seat,
            vocab: 1000,
            kept: Kept::ALL,
        }
    }

    fn coverage(&self) -> Coverage {
        Coverage { decode_rows: RUNNING, prefill_tokens: 8192, prefill_rows: RUNNING }
    }

    fn launch(&mut self, step: &Step) -> Result<(), ExecError> {
        let row = |sample: bool| {
            let tokens = if sample { Tokens::one(7) } else { Tokens::default() };
            RowResult { tokens, ..RowResult::default() }
        };
        let rows = step.rows.iter().map(|asked| row(asked.sample)).collect();
        self.results.push_back(StepResult {
            number: step.number,
            more_follow: false,
            rows,
            took: None,
        });
        Ok(())
    }

    fn poll(&mut self, _: bool) -> Result<Option<StepResult>, ExecError> {
        self.pause = !self.pause;
        Ok(if self.pause { self.results.pop_front() } else { None })
    }
}

fn request(id: u64) -> Event {
    // Different prompts of different lengths, so that pages fill up at different steps.
    let prompt: Vec<u32> = (0..32 + id % 61).map(|n| ((id * 31 + n) % 900) as u32).collect();
    let sampling = Sampling { max_tokens: 2000, ..Sampling::default() };
    Event::Submit(Box::new(Request::new(RequestId(id), prompt, sampling)))
}

fn schedule(c: &mut Criterion) {
    for (name, prefix_cache) in [("step_256_rows", true), ("step_256_rows_no_prefix_tree", false)] {
        let config = EngineConfig { prefix_cache, ..EngineConfig::default() };
        let mut engine = Engine::new(Null::default(), config);
        let mut next = u64::from(RUNNING);
        let mut events: Vec<Event> = (0..next).map(request).collect();
        for _ in 0..100 {
            engine.step(0, std::mem::take(&mut events));
        }
        assert_eq!(engine.stats().running, RUNNING);
        c.bench_function(name, |b| {
            b.iter(|| {
                let outputs = engine.step(0, std::mem::take(&mut events));
                for output in &outputs {
                    if matches!(output, Output::Finished { .. }) {
                        events.push(request(next));
                        next += 1;
                    }
                }
                black_box(outputs.len())
            });
        });
    }
    // The share of the above that is the device and the vector of outputs, not the engine.
    let mut device = Null::default();
    let row = |seat| engine::exec::Row::decode(engine::exec::Seat(seat), 9);
    let step = Step { number: 1, rows: (0..RUNNING).map(row).collect(), ..Step::default() };
    c.bench_function("null_device_alone", |b| {
        b.iter(|| {
            device.launch(&step).unwrap();
            black_box((device.poll(false).unwrap(), device.poll(false).unwrap()))
        });
    });
}

criterion_group!(benches, schedule);
criterion_main!(benches);
