//! Rows are divided among the threads.

use super::{Gate, Gated};
use crate::Span;
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::simd::{Level, exp, levels, rms_norm};
use crate::cpu::step::{Scratch, Step, Team, chunks, part};
use crate::cpu::view::{Matrix, load_floats, store_floats};
use crate::ops::live_rows;

struct GatedStep {
    x: Matrix,
    z: Matrix,
    from: usize,
    silu: bool,
    norm: Option<NormStep>,
    y: Matrix,
    live: Option<Span>,
    memory: CpuMemory,
    level: Level,
}

#[derive(Clone, Copy)]
struct NormStep {
    weight: Matrix,
    eps: f32,
    group: usize,
    after: bool,
}

impl Gated {
    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        let [x, z, y] = [&self.x, &self.z, &self.y].map(|tensor| Matrix::new(memory, tensor));
        let norm = self.norm.as_ref().map(|own| NormStep {
            weight: Matrix::new(memory, &own.norm.weight),
            eps: own.norm.eps,
            group: own.group as usize,
            after: own.after,
        });
        let (from, silu) = (self.from as usize, self.gate == Gate::Silu);
        let (live, level) = (self.live, lowering.level);
        Box::new(GatedStep { x, z, from, silu, norm, y, live, memory: *memory, level })
    }
}

impl GatedStep {
    /// Normalises each group.
    ///
    /// # Safety
    /// The level was detected.
    unsafe fn normalise(&self, norm: &NormStep, values: &mut [f32], weights: &[f32]) {
        for (index, values) in values.chunks_exact_mut(norm.group).enumerate() {
            let from = index * norm.group % weights.len();
            // SAFETY: the caller's promise.
            unsafe { rms_norm(self.level, values, &weights[from..from + norm.group], norm.eps) };
        }
    }
}

impl Step for GatedStep {
    fn scratch(&self) -> Scratch {
        Scratch { shared: 0, own: 3 * self.y.cols * size_of::<f32>() }
    }

    fn run(&self, team: &Team<'_>) {
        let cols = self.y.cols;
        let rows = live_rows(&self.memory, self.live, self.y.rows);
        let cuts = if rows * cols < 16 << 10 { rows.min(1) } else { chunks(rows, team.threads()) };
        team.parallel(cuts, &|chunk, worker| {
            // SAFETY: this worker's own scratch.
            let own = unsafe { team.own(worker).floats(3 * cols) };
            let (values, own) = own.split_at_mut(cols);
            let (gates, weights) = own.split_at_mut(cols);
            let weights = match &self.norm {
                Some(norm) => &mut weights[..norm.weight.cols],
                None => &mut weights[..0],
            };
            // SAFETY: rows of these widths, of which this chunk alone touches those of `y`; the level was detected.
            unsafe {
                if let Some(norm) = &self.norm {
                    load_floats(norm.weight.dtype, norm.weight.start(), weights);
                }
                for row in part(rows, cuts, chunk) {
                    load_floats(self.x.dtype, self.x.at(row, 0), values);
                    load_floats(self.z.dtype, self.z.at(row, self.from), gates);
                    if let Some(norm) = self.norm.as_ref().filter(|norm| !norm.after) {
                        self.normalise(norm, values, weights);
                    }
                    multiply(self.level, values, gates, self.silu);
                    if let Some(norm) = self.norm.as_ref().filter(|norm| norm.after) {
                        self.normalise(norm, values, weights);
                    }
                    store_floats(self.y.dtype, self.y.at(row, 0), values);
                }
            }
        });
    }
}

#[inline(always)]
fn multiply_body<const FMA: bool>(values: &mut [f32], gates: &[f32], silu: bool) {
    for (value, z) in values.iter_mut().zip(gates) {
        let share = 1.0 / (1.0 + exp::<FMA>(-*z));
        *value *= if silu { *z * share } else { share };
    }
}

levels! {
    /// Multiplies by the gates.
    fn multiply(values: &mut [f32], gates: &[f32], silu: bool) = multiply_body;
}
