//! Work is divided by head and block of rows; a weight's row is converted once for all rows of a block.

use crate::Span;
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::simd::{Level, dot, fma, levels};
use crate::cpu::step::{Own, Scratch, Step, Team};
use crate::cpu::view::{Matrix, load_floats, store_floats};
use crate::op::HeadLinear;
use crate::ops::live_rows;

/// Most rows of a block.
const ROWS: usize = 32;

struct HeadLinearStep {
    x: Matrix,
    w: Matrix,
    y: Matrix,
    heads: usize,
    each: usize,
    k: usize,
    n: usize,
    turned: bool,
    live: Option<Span>,
    memory: CpuMemory,
    level: Level,
}

impl HeadLinear {
    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        let (k, n) = self.sizes();
        Box::new(HeadLinearStep {
            x: Matrix::new(memory, &self.x),
            w: Matrix::new(memory, &self.w),
            y: Matrix::new(memory, &self.y),
            heads: self.heads as usize,
            each: self.each as usize,
            k: k as usize,
            n: n as usize,
            turned: self.turned,
            live: self.live,
            memory: *memory,
            level: lowering.level,
        })
    }
}

impl HeadLinearStep {
    /// Floats of a worker's scratch: the block's inputs and results, and a row of weights.
    fn own_floats(&self) -> usize {
        ROWS * (self.each + self.n) + self.k.max(self.n)
    }

    fn block(&self, head: usize, rows: std::ops::Range<usize>, own: Own) {
        let HeadLinearStep { k, n, each, level, .. } = *self;
        // SAFETY: this worker's own scratch.
        let own = unsafe { own.floats(self.own_floats()) };
        let (inputs, own) = own.split_at_mut(ROWS * each);
        let (sums, line) = own.split_at_mut(ROWS * n);
        let count = rows.len();
        for (input, row) in inputs.chunks_exact_mut(each).zip(rows.clone()) {
            // SAFETY: a head of a row.
            unsafe { load_floats(self.x.dtype, self.x.at(row, head * each), input) };
        }
        let (inputs, sums) = (&inputs[..count * each], &mut sums[..count * n]);
        let (weights, cols) = if self.turned { (k, n) } else { (n, k) };
        let line = &mut line[..cols];
        sums.fill(0.0);
        for index in 0..weights {
            // SAFETY: a row of the weights; the level was detected.
            unsafe {
                load_floats(self.w.dtype, self.w.at(head * weights + index, 0), line);
                match self.turned {
                    true => add(level, inputs, each, line, index, sums),
                    false => multiply(level, inputs, each, line, index, sums),
                }
            }
        }
        let made = n + each - k;
        for ((input, sums), row) in inputs.chunks_exact(each).zip(sums.chunks_exact(n)).zip(rows) {
            // SAFETY: a head of a row, which this chunk alone writes.
            unsafe {
                store_floats(self.y.dtype, self.y.at(row, head * made), sums);
                if each > k {
                    store_floats(self.y.dtype, self.y.at(row, head * made + n), &input[k..]);
                }
            }
        }
    }
}

/// Adds input `index` of each row times `line` to the row's sums.
#[inline(always)]
fn add_body<const FMA: bool>(
    inputs: &[f32],
    each: usize,
    line: &[f32],
    index: usize,
    sums: &mut [f32],
) {
    for (input, sums) in inputs.chunks_exact(each).zip(sums.chunks_exact_mut(line.len())) {
        let input = input[index];
        for (sum, weight) in sums.iter_mut().zip(line) {
            *sum = fma::<FMA>(input, *weight, *sum);
        }
    }
}

/// Result `index` of each row.
#[inline(always)]
fn multiply_body<const FMA: bool>(
    inputs: &[f32],
    each: usize,
    line: &[f32],
    index: usize,
    sums: &mut [f32],
) {
    let n = sums.len() / (inputs.len() / each);
    for (input, sums) in inputs.chunks_exact(each).zip(sums.chunks_exact_mut(n)) {
        sums[index] = dot::<FMA>(&input[..line.len()], line);
    }
}

levels! {
    /// Adds one input's share to the sums of every row.
    fn add(inputs: &[f32], each: usize, line: &[f32], index: usize, sums: &mut [f32]) = add_body;
}

levels! {
    /// One result of every row.
    fn multiply(inputs: &[f32], each: usize, line: &[f32], index: usize, sums: &mut [f32]) = multiply_body;
}

impl Step for HeadLinearStep {
    fn scratch(&self) -> Scratch {
        Scratch { shared: 0, own: self.own_floats() * size_of::<f32>() }
    }

    fn run(&self, team: &Team<'_>) {
        let rows = live_rows(&self.memory, self.live, self.y.rows);
        let blocks = rows.div_ceil(ROWS);
        team.parallel(blocks * self.heads, &|chunk, worker| {
            let (head, first) = (chunk / blocks, chunk % blocks * ROWS);
            self.block(head, first..(first + ROWS).min(rows), team.own(worker));
        });
    }
}
