//! The CPU version: `x · Aᵀ` of all rows, then the columns of `y`; each divided among the threads.

use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::simd::{Level, dot, levels};
use crate::cpu::step::{Scratch, Step, Team, chunks, part};
use crate::cpu::tables::Tables;
use crate::cpu::view::{Matrix, load_floats, store_floats};
use crate::op::Lora;
use crate::ops::live_rows;

/// Columns of `y` that are computed at a time.
const COLUMNS: usize = 256;

struct LoraStep {
    op: Lora,
    tables: Tables,
    x: Matrix,
    a: Matrix,
    b: Matrix,
    base: Matrix,
    y: Matrix,
    memory: CpuMemory,
    level: Level,
}

impl Lora {
    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        let [x, a, b, base, y] =
            [&self.x, &self.a, &self.b, &self.base, &self.y].map(|t| Matrix::new(memory, t));
        let tables = Tables::new(memory, &self.state);
        let (memory, level) = (*memory, lowering.level);
        Box::new(LoraStep { op: self.clone(), tables, x, a, b, base, y, memory, level })
    }
}

/// The address of sums that several threads write, each its own.
#[derive(Clone, Copy)]
struct Sums(*mut f32);

// SAFETY: plain memory of the step; each chunk writes its own part of it.
unsafe impl Sync for Sums {}

impl LoraStep {
    fn sums_bytes(&self) -> usize {
        self.x.rows * self.op.inner() as usize * size_of::<f32>()
    }
}

impl Step for LoraStep {
    fn scratch(&self) -> Scratch {
        let (wide, rank) = (self.x.cols, self.b.cols);
        let own = (2 * wide + COLUMNS + rank) * size_of::<f32>();
        Scratch { shared: self.sums_bytes(), own }
    }

    fn run(&self, team: &Team<'_>) {
        let rows = live_rows(&self.memory, self.op.live, self.y.rows);
        let used = (0..rows).any(|row| self.op.slot(&self.tables, row).is_some());
        if !used && !self.op.copies() {
            return;
        }
        let (wide, cols) = (self.x.cols, self.y.cols);
        let (inner, rank) = (self.op.inner() as usize, self.b.cols);
        let sums = Sums(team.shared(self.sums_bytes()).cast());
        let sums = &sums;
        let items = rows * self.op.parts.count() as usize;
        let cuts = chunks(items, team.threads());
        team.parallel(cuts, &|chunk, worker| {
            // SAFETY: this worker's own scratch.
            let own = unsafe { team.own(worker).floats(2 * wide) };
            let (x, a) = own.split_at_mut(wide);
            for item in part(items, cuts, chunk) {
                let (row, first) = (item * rank / inner, item * rank % inner);
                let Some(slot) = self.op.slot(&self.tables, row) else { continue };
                // SAFETY: rows of these widths, and sums of this item, which this chunk alone writes; the level was
                // detected.
                unsafe {
                    load_floats(self.x.dtype, self.x.at(row, 0), x);
                    for at in first..first + rank {
                        load_floats(self.a.dtype, self.a.at(slot * inner + at, 0), a);
                        *sums.0.add(row * inner + at) = product(self.level, x, a);
                    }
                }
            }
        });
        let blocks = cols.div_ceil(COLUMNS);
        let items = rows * blocks;
        let cuts = chunks(items, team.threads());
        team.parallel(cuts, &|chunk, worker| {
            // SAFETY: this worker's own scratch.
            let own = unsafe { team.own(worker).floats(COLUMNS + rank) };
            let (y, b) = own.split_at_mut(COLUMNS);
            for item in part(items, cuts, chunk) {
                let (row, col) = (item / blocks, item % blocks * COLUMNS);
                let slot = self.op.slot(&self.tables, row);
                if slot.is_none() && !self.op.copies() {
                    continue;
                }
                let y = &mut y[..COLUMNS.min(cols - col)];
                // SAFETY: a part of a row of `base` and `y`, which this chunk alone touches; the sums were written above;
                // the level was detected.
                unsafe {
                    load_floats(self.base.dtype, self.base.at(row, col), y);
                    let Some(slot) = slot else {
                        store_floats(self.y.dtype, self.y.at(row, col), y);
                        continue;
                    };
                    for (at, y) in y.iter_mut().enumerate() {
                        let part = self.op.parts.of((col + at) as u32) as usize;
                        let sums = sums.0.add(row * inner + part * rank);
                        let sums = std::slice::from_raw_parts(sums, rank);
                        load_floats(self.b.dtype, self.b.at(slot * cols + col + at, 0), b);
                        *y += product(self.level, sums, b);
                    }
                    store_floats(self.y.dtype, self.y.at(row, col), y);
                }
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
