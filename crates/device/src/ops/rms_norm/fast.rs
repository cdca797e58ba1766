//! Rows are divided among the threads.

use crate::cpu::ggml;
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::simd;
use crate::cpu::step::{Scratch, Step, Team, chunks, part};
use crate::cpu::view::{Matrix, load_floats, store_floats};
use crate::op::{Norm, RmsNorm};

/// A norm with its address resolved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormStep {
    weight: Matrix,
    eps: f32,
    lowering: Lowering,
}

impl Norm {
    /// Resolves the norm's weight.
    pub(crate) fn resolve(&self, memory: &CpuMemory, lowering: &Lowering) -> NormStep {
        let weight = Matrix::new(memory, &self.weight);
        NormStep { weight, eps: self.eps, lowering: *lowering }
    }
}

impl NormStep {
    /// Normalises a row in place; `scratch` has one float per column.
    pub(crate) fn apply(&self, values: &mut [f32], scratch: &mut [f32]) {
        assert!(values.len() == self.weight.cols && scratch.len() == values.len());
        // SAFETY: the weight is one row of this many floats; the level was detected.
        unsafe {
            load_floats(self.weight.dtype, self.weight.start(), scratch);
            match self.lowering.ggml() {
                true => ggml::rms_norm(values, scratch, self.eps),
                false => simd::rms_norm(self.lowering.level, values, scratch, self.eps),
            }
        }
    }
}

struct RmsNormStep {
    x: Matrix,
    y: Matrix,
    norm: NormStep,
}

impl RmsNorm {
    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        let norm = self.norm.resolve(memory, lowering);
        Box::new(RmsNormStep {
            x: Matrix::new(memory, &self.x),
            y: Matrix::new(memory, &self.y),
            norm,
        })
    }
}

impl Step for RmsNormStep {
    fn scratch(&self) -> Scratch {
        Scratch { shared: 0, own: 2 * self.x.cols * size_of::<f32>() }
    }

    fn run(&self, team: &Team<'_>) {
        let rows = self.x.rows;
        let chunks = if rows < 8 { 1 } else { chunks(rows, team.threads()) };
        team.parallel(chunks, &|chunk, worker| {
            // SAFETY: this worker's own scratch.
            let own = unsafe { team.own(worker).floats(2 * self.x.cols) };
            let (values, scratch) = own.split_at_mut(self.x.cols);
            for row in part(rows, chunks, chunk) {
                // SAFETY: rows of `x` and `y`; this chunk alone touches them.
                unsafe {
                    load_floats(self.x.dtype, self.x.at(row, 0), values);
                    self.norm.apply(values, scratch);
                    store_floats(self.y.dtype, self.y.at(row, 0), values);
                }
            }
        });
    }
}
