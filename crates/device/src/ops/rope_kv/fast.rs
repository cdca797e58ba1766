//! Tokens are divided among the threads; heads of a token are in f32 scratch.

use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::simd::{Level, fma, levels};
use crate::cpu::step::{Own, Scratch, Step, Team, chunks, part};
use crate::cpu::tables::Tables;
use crate::cpu::view::{Matrix, Words, load_floats, store_floats};
use crate::op::{KvLayer, Pairs, RopeKv};
use crate::ops::rms_norm::NormStep;
use crate::step::count;

/// The op with its addresses resolved.
pub(crate) struct RopeKvStep {
    qkv: Matrix,
    q_heads: usize,
    q_norm: Option<NormStep>,
    k_norm: Option<NormStep>,
    rope: Matrix,
    pairs: Pairs,
    tables: Tables,
    kv: KvLayer,
    pages: *mut u8,
    scales: Option<Words>,
    level: Level,
}

// SAFETY: addresses in an arena that the recording keeps; tokens are divided so that no two chunks touch the same row
// or slot.
unsafe impl Send for RopeKvStep {}
// SAFETY: as above.
unsafe impl Sync for RopeKvStep {}

impl RopeKv {
    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        Box::new(self.resolve(memory, lowering))
    }

    /// The step itself, for attention that rotates first.
    pub(crate) fn resolve(&self, memory: &CpuMemory, lowering: &Lowering) -> RopeKvStep {
        RopeKvStep {
            qkv: Matrix::new(memory, &self.qkv),
            q_heads: self.q_heads as usize,
            q_norm: self.q_norm.as_ref().map(|norm| norm.resolve(memory, lowering)),
            k_norm: self.k_norm.as_ref().map(|norm| norm.resolve(memory, lowering)),
            rope: Matrix::new(memory, &self.rope),
            pairs: self.pairs,
            tables: Tables::new(memory, &self.state),
            kv: self.kv,
            pages: memory.address(self.kv.span),
            scales: self.kv.scales.map(|scales| Words::of_span(memory, scales)),
            level: lowering.level,
        }
    }
}

/// Fuses the same multiplication as ggml, for the same bits; that costs nothing.
#[inline(always)]
fn rotate_body<const FMA: bool>(head: &mut [f32], table: &[f32]) {
    let (low, high) = head.split_at_mut(table.len() / 2);
    let (cos, sin) = table.split_at(table.len() / 2);
    for i in 0..low.len() {
        let (a, b) = (low[i], high[i]);
        low[i] = fma::<FMA>(a, cos[i], -(b * sin[i]));
        high[i] = fma::<FMA>(a, sin[i], b * cos[i]);
    }
}

#[inline(always)]
fn rotate_neighbours_body<const FMA: bool>(head: &mut [f32], table: &[f32]) {
    let (cos, sin) = table.split_at(table.len() / 2);
    for (pair, (cos, sin)) in head.chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
        let (a, b) = (pair[0], pair[1]);
        pair[0] = fma::<FMA>(a, *cos, -(b * sin));
        pair[1] = fma::<FMA>(a, *sin, b * cos);
    }
}

levels! {
    /// As [`rotate`], for pairs of neighbouring elements.
    fn rotate_neighbours(head: &mut [f32], table: &[f32]) = rotate_neighbours_body;
}

levels! {
    /// Rotates a head by a row of the table.
    fn rotate(head: &mut [f32], table: &[f32]) = rotate_body;
}

/// Rotates a head by a row of the table.
///
/// # Safety
/// The level is one the processor has, and the row has as many elements as the head.
pub(crate) unsafe fn turn(level: Level, pairs: Pairs, head: &mut [f32], table: &[f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        match pairs {
            Pairs::Halves => rotate(level, head, table),
            Pairs::Neighbours => rotate_neighbours(level, head, table),
        }
    }
}

impl RopeKvStep {
    /// Processes one token's heads; `own` is the worker's scratch.
    fn token(&self, token: usize, own: Own) {
        let dim = self.kv.head_dim as usize;
        // SAFETY: this worker's own scratch.
        let (head, norm_scratch) = unsafe { own.floats(2 * dim) }.split_at_mut(dim);
        let kv_heads = self.kv.heads as usize;
        let position = (self.tables.position.get(token) as usize).min(self.rope.rows - 1);
        let slot = self.tables.kv_slot.get(token) as usize;
        // SAFETY: a row of the table, dim floats.
        let table = unsafe {
            std::slice::from_raw_parts(self.rope.at(position, 0).cast::<f32>().cast_const(), dim)
        };
        for index in 0..self.q_heads + 2 * kv_heads {
            let at = self.qkv.at(token, index * dim);
            // SAFETY: a head of this token's row, which this chunk alone touches.
            unsafe { load_floats(self.qkv.dtype, at, head) };
            let is_q = index < self.q_heads;
            if index < self.q_heads + kv_heads {
                if let Some(norm) = if is_q { &self.q_norm } else { &self.k_norm } {
                    norm.apply(head, norm_scratch);
                }
                // SAFETY: the level was detected; lengths match.
                unsafe { turn(self.level, self.pairs, head, table) };
            }
            if is_q {
                // SAFETY: as for the load.
                unsafe { store_floats(self.qkv.dtype, at, head) };
            } else {
                let kv = index - self.q_heads;
                let to = self.kv.index(slot, kv / kv_heads, kv % kv_heads);
                let to = self.pages.wrapping_add(to * self.kv.dtype.block_bytes());
                if let Some(scales) = &self.scales {
                    let by = 1.0 / scales.float(kv);
                    head.iter_mut().for_each(|value| *value *= by);
                }
                // SAFETY: `index` checked the slot; live tokens have slots of their own.
                unsafe { store_floats(self.kv.dtype, to, head) };
            }
        }
    }
}

impl Step for RopeKvStep {
    fn scratch(&self) -> Scratch {
        Scratch { shared: 0, own: 2 * self.kv.head_dim as usize * size_of::<f32>() }
    }

    fn run(&self, team: &Team<'_>) {
        let live = self.tables.counts.get(count::TOKENS as usize) as usize;
        let tokens = live.min(self.qkv.rows);
        let chunks = if tokens < 4 { 1 } else { chunks(tokens, team.threads()) };
        team.parallel(chunks, &|chunk, worker| {
            part(tokens, chunks, chunk).for_each(|token| self.token(token, team.own(worker)));
        });
    }
}
