//! The router on the CPU: logits of all rows by all threads, then the choice row by row.

use super::{Route, Routing};
use crate::Span;
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::simd::{Level, dot, levels};
use crate::cpu::step::{Part, Parts, Scratch, Step, Team, chunks, part};
use crate::cpu::view::{Matrix, Words, load_floats};
use crate::ops::live_rows;

struct RouteStep {
    x: Matrix,
    w: Matrix,
    bias: Option<Matrix>,
    y: Words,
    routing: Routing,
    live: Option<Span>,
    memory: CpuMemory,
    level: Level,
}

impl Route {
    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        Box::new(RouteStep {
            x: Matrix::new(memory, &self.x),
            w: Matrix::new(memory, &self.w),
            bias: self.bias.as_ref().map(|bias| Matrix::new(memory, bias)),
            y: Words::new(memory, &self.y),
            routing: self.routing,
            live: self.live,
            memory: *memory,
            level: lowering.level,
        })
    }
}

/// The shared scratch: inputs as floats, then logits.
struct Room {
    inputs: Part,
    logits: Part,
    bytes: usize,
}

/// An address that all workers write different parts of.
#[derive(Clone, Copy)]
struct Floats(*mut f32);

// SAFETY: chunks write different parts, and all are written before any is read.
unsafe impl Send for Floats {}
// SAFETY: as above.
unsafe impl Sync for Floats {}

impl Floats {
    /// `len` floats from `from` on.
    ///
    /// # Safety
    /// They lie in the scratch, and no other thread writes them now.
    unsafe fn part<'a>(self, from: usize, len: usize) -> &'a mut [f32] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(from), len) }
    }
}

impl RouteStep {
    fn room(&self) -> Room {
        let mut parts = Parts::default();
        let inputs = parts.take(self.x.rows * self.x.cols);
        let logits = parts.take(self.x.rows * self.w.rows);
        Room { inputs, logits, bytes: parts.bytes() }
    }
}

impl Step for RouteStep {
    fn scratch(&self) -> Scratch {
        let own = (self.x.cols + self.w.rows) * size_of::<f32>();
        Scratch { shared: self.room().bytes, own }
    }

    fn run(&self, team: &Team<'_>) {
        let rows = live_rows(&self.memory, self.live, self.x.rows);
        let (cols, experts) = (self.x.cols, self.w.rows);
        let room = self.room();
        let start = team.shared(room.bytes);
        let (inputs, logits) = (Floats(room.inputs.of(start)), Floats(room.logits.of(start)));
        for row in 0..rows {
            // SAFETY: a row of x, and no other thread runs yet.
            unsafe { load_floats(self.x.dtype, self.x.at(row, 0), inputs.part(row * cols, cols)) };
        }
        let cuts = chunks(experts, team.threads());
        team.parallel(cuts, &|chunk, worker| {
            // SAFETY: this worker's own scratch.
            let weights = unsafe { team.own(worker).floats(cols) };
            for expert in part(experts, cuts, chunk) {
                self.w.read_row(expert, weights);
                for row in 0..rows {
                    // SAFETY: rows written above; this chunk alone has this expert's logits; the level was detected.
                    unsafe {
                        let x = inputs.part(row * cols, cols);
                        let sum = product(self.level, x, weights);
                        logits.part(row * experts + expert, 1)[0] =
                            self.routing.logit(sum, self.bias.as_ref(), expert);
                    }
                }
            }
        });
        let cuts = chunks(rows, team.threads());
        team.parallel(cuts, &|chunk, worker| {
            // SAFETY: this worker's own scratch.
            let keys = unsafe { team.own(worker).words(experts) };
            for row in part(rows, cuts, chunk) {
                // SAFETY: logits written above, which only this chunk reads.
                let logits = unsafe { logits.part(row * experts, experts) };
                self.routing.choose(logits, self.bias.as_ref(), keys, row, &self.y);
            }
        });
    }
}

#[inline(always)]
fn product_body<const FMA: bool>(x: &[f32], y: &[f32]) -> f32 {
    dot::<FMA>(x, y)
}

levels! {
    /// x·y.
    fn product(x: &[f32], y: &[f32]) -> f32 = product_body;
}
