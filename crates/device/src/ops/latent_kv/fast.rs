//! Tokens are divided among the threads; a head or a latent of a token is in f32 scratch.

use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::simd::Level;
use crate::cpu::step::{Own, Scratch, Step, Team, chunks, part};
use crate::cpu::tables::Tables;
use crate::cpu::view::{Matrix, load_floats, store_floats};
use crate::op::{KvLayer, LatentKv, Pairs};
use crate::ops::rms_norm::NormStep;
use crate::ops::rope_kv::turn;
use crate::step::count;

struct LatentKvStep {
    q: Matrix,
    heads: usize,
    x: Matrix,
    from: usize,
    norm: NormStep,
    rope: Matrix,
    pairs: Pairs,
    tables: Tables,
    kv: KvLayer,
    latent: usize,
    pages: *mut u8,
    level: Level,
}

// SAFETY: addresses in an arena that the recording keeps; tokens are divided so that no two chunks touch the same row
// or slot.
unsafe impl Send for LatentKvStep {}
// SAFETY: as above.
unsafe impl Sync for LatentKvStep {}

impl LatentKv {
    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        Box::new(LatentKvStep {
            q: Matrix::new(memory, &self.q),
            heads: self.heads as usize,
            x: Matrix::new(memory, &self.x),
            from: self.from as usize,
            norm: self.norm.resolve(memory, lowering),
            rope: Matrix::new(memory, &self.rope),
            pairs: self.pairs,
            tables: Tables::new(memory, &self.state),
            kv: self.kv,
            latent: self.latent() as usize,
            pages: memory.address(self.kv.span),
            level: lowering.level,
        })
    }
}

impl LatentKvStep {
    fn token(&self, token: usize, own: Own) {
        let (width, latent) = (self.kv.head_dim as usize, self.latent);
        // SAFETY: this worker's own scratch.
        let (row, norm_scratch) = unsafe { own.floats(2 * width) }.split_at_mut(width);
        let position = (self.tables.position.get(token) as usize).min(self.rope.rows - 1);
        // SAFETY: a row of the table.
        let table = unsafe {
            let row = self.rope.at(position, 0).cast::<f32>().cast_const();
            std::slice::from_raw_parts(row, width - latent)
        };
        for head in 0..self.heads {
            let (at, head) = (self.q.at(token, head * width + latent), &mut row[latent..]);
            // SAFETY: the rotated part of a head, which this chunk alone touches; the level was detected.
            unsafe {
                load_floats(self.q.dtype, at, head);
                turn(self.level, self.pairs, head, table);
                store_floats(self.q.dtype, at, head);
            }
        }
        // SAFETY: the token's latent and key; the level was detected.
        unsafe {
            load_floats(self.x.dtype, self.x.at(token, self.from), row);
            self.norm.apply(&mut row[..latent], &mut norm_scratch[..latent]);
            turn(self.level, self.pairs, &mut row[latent..], table);
        }
        let to = self.kv.index(self.tables.kv_slot.get(token) as usize, 0, 0);
        let to = self.pages.wrapping_add(to * self.kv.dtype.block_bytes());
        // SAFETY: `index` checked the slot; live tokens have slots of their own.
        unsafe { store_floats(self.kv.dtype, to, row) };
    }
}

impl Step for LatentKvStep {
    fn scratch(&self) -> Scratch {
        Scratch { shared: 0, own: 2 * self.kv.head_dim as usize * size_of::<f32>() }
    }

    fn run(&self, team: &Team<'_>) {
        let live = self.tables.counts.get(count::TOKENS as usize) as usize;
        let tokens = live.min(self.q.rows);
        let chunks = if tokens < 4 { 1 } else { chunks(tokens, team.threads()) };
        team.parallel(chunks, &|chunk, worker| {
            part(tokens, chunks, chunk).for_each(|token| self.token(token, team.own(worker)));
        });
    }
}
