//! Rows of noise, divided among the threads.

use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Step, Team, part};
use crate::cpu::view::Matrix;
use crate::op::Noise;
use crate::scaled;

/// Elements per chunk: enough to hide the cost of distributing them.
const CHUNK: usize = 1 << 16;

struct NoiseStep {
    op: Noise,
    to: Matrix,
}

impl Noise {
    pub(crate) fn prepare(&self, memory: &CpuMemory, _lowering: &Lowering) -> Box<dyn Step> {
        Box::new(NoiseStep { op: self.clone(), to: Matrix::new(memory, &self.to) })
    }
}

impl Step for NoiseStep {
    fn run(&self, team: &Team<'_>) {
        let (rows, cols) = (self.to.rows, self.to.cols);
        if scaled::is_scaled(self.to.dtype) {
            let unit = scaled::unit(self.to.dtype);
            return team.parallel(rows.div_ceil(unit), &|chunk, _| {
                self.op.fill_scaled(&self.to, chunk * unit..((chunk + 1) * unit).min(rows));
            });
        }
        let elems = rows * cols;
        let chunks = elems.div_ceil(CHUNK);
        team.parallel(chunks, &|chunk, _| {
            for index in part(elems, chunks, chunk) {
                self.to.set(index / cols, index % cols, self.op.value(index as u64));
            }
        });
    }
}
