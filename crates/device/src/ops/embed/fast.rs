//! Tokens are divided among the threads.

use super::read_row;
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::step::{Scratch, Step, Team, chunks, part};
use crate::cpu::view::{Matrix, Words, store_floats};
use crate::op::{Embed, Lookup};

struct EmbedStep {
    by: Lookup,
    ids: Words,
    table: Matrix,
    given: Option<Matrix>,
    out: Matrix,
}

impl Embed {
    pub(crate) fn prepare(&self, memory: &CpuMemory, _lowering: &Lowering) -> Box<dyn Step> {
        Box::new(EmbedStep {
            by: self.by,
            ids: Words::new(memory, &self.ids),
            table: Matrix::new(memory, &self.table),
            given: self.given.map(|given| Matrix::new(memory, &given)),
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
                let id = self.by.row(self.ids.get(token));
                read_row(&self.table, self.given.as_ref(), id, values);
                // SAFETY: a row of `out`, written by this chunk alone.
                unsafe { store_floats(self.out.dtype, self.out.at(token, 0), values) };
            }
        });
    }
}
