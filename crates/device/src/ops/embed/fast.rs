//! Tokens cut among the threads.

use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Scratch, Step, Team, chunks, part};
use crate::cpu::view::{Matrix, Words, store_floats};
use crate::op::Embed;

struct EmbedStep {
    ids: Words,
    table: Matrix,
    out: Matrix,
}

impl Embed {
    pub(crate) fn prepare(&self, memory: &CpuMemory, _lowering: &Lowering) -> Box<dyn Step> {
        Box::new(EmbedStep {
            ids: Words::new(memory, &self.ids),
            table: Matrix::new(memory, &self.table),
            out: Matrix::new(memory, &self.out),
        })
    }
}

impl Step for EmbedStep {
    fn scratch(&self) -> Scratch {
        Scratch { shared: 0, own: self.table.cols * size_of::<f32>() }
    }

    fn run(&self, team: &Team<'_>) {
        let tokens = self.out.rows;
        let chunks = if tokens < 8 { 1 } else { chunks(tokens, team.threads()) };
        team.parallel(chunks, &|chunk, worker| {
            // SAFETY: this worker's own scratch.
            let values = unsafe { team.own(worker).floats(self.table.cols) };
            for token in part(tokens, chunks, chunk) {
                let id = self.ids.get(token) as usize;
                self.table.read_row(if id < self.table.rows { id } else { 0 }, values);
                // SAFETY: a row of `out`, written by this chunk alone.
                unsafe { store_floats(self.out.dtype, self.out.at(token, 0), values) };
            }
        });
    }
}
