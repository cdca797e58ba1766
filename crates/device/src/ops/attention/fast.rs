//! Query heads of a token are attended together per KV head; (token, KV head) pairs are cut among the
//! threads.

use super::Attention;
use crate::cpu::features::Features;
use crate::cpu::memory::CpuMemory;
use crate::cpu::simd::{Level, dot, exp, fma, levels};
use crate::cpu::step::{Scratch, Step, Team, chunks, part};
use crate::cpu::tables::Tables;
use crate::cpu::view::{Matrix, load_floats, store_floats};
use crate::op::KvLayer;
use crate::ops::rope_kv::RopeKvStep;
use crate::step::count;

struct AttentionStep {
    qkv: Matrix,
    out: Matrix,
    q_heads: usize,
    kv: KvLayer,
    pages: *const u8,
    tables: Tables,
    scale: f32,
    window: Option<usize>,
    rows: usize,
    single: bool,
    rope: Option<RopeKvStep>,
    level: Level,
}

// SAFETY: addresses in an arena that the recording keeps; chunks write different heads of the output.
unsafe impl Send for AttentionStep {}
// SAFETY: as above.
unsafe impl Sync for AttentionStep {}

impl Attention {
    pub(crate) fn prepare(&self, memory: &CpuMemory, features: &Features) -> Box<dyn Step> {
        Box::new(AttentionStep {
            qkv: Matrix::new(memory, &self.qkv),
            out: Matrix::new(memory, &self.out),
            q_heads: self.q_heads as usize,
            kv: self.kv,
            pages: memory.address(self.kv.span),
            tables: Tables::new(memory, &self.state),
            scale: self.scale,
            window: self.window.map(|window| window as usize),
            rows: self.rows as usize,
            single: self.single,
            rope: self.rope.as_ref().map(|rope| rope.resolve(memory, features)),
            level: Level::of(features),
        })
    }
}

impl AttentionStep {
    fn group(&self) -> usize {
        self.q_heads / self.kv.heads as usize
    }

    fn context(&self) -> usize {
        (self.tables.limits.pages_per_seat * self.tables.limits.page_size) as usize
    }

    /// Floats of a worker's scratch: queries, outputs, one row of k or v, scores.
    fn own_floats(&self) -> usize {
        let dim = self.kv.head_dim as usize;
        self.group() * (2 * dim + self.context()) + dim
    }

    /// One token's query heads that share a KV head.
    fn token_head(&self, row: usize, token: usize, position: usize, kv_head: usize, own: *mut u8) {
        let dim = self.kv.head_dim as usize;
        let (group, size) = (self.group(), self.kv.page_size as usize);
        // SAFETY: this worker's own scratch, of the size asked for.
        let own = unsafe { std::slice::from_raw_parts_mut(own.cast::<f32>(), self.own_floats()) };
        let (queries, rest) = own.split_at_mut(group * dim);
        let (outs, rest) = rest.split_at_mut(group * dim);
        let (line, scores) = rest.split_at_mut(dim);
        let first = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let count = position + 1 - first;
        let seat = self.tables.row_seat.get(row) as usize;
        // SAFETY: the group's heads are consecutive in the token's row.
        unsafe {
            load_floats(self.qkv.dtype, self.qkv.at(token, kv_head * group * dim), queries);
        }
        let kv_line = |position: usize, part: usize| {
            let slot = self.tables.page(seat, position) * size + position % size;
            let at = self.kv.index(slot, part, kv_head) * self.kv.dtype.block_bytes();
            self.pages.wrapping_add(at)
        };
        for p in 0..count {
            // SAFETY: `index` checked the slot.
            unsafe { load_floats(self.kv.dtype, kv_line(first + p, 0), line) };
            for g in 0..group {
                // SAFETY: the level was detected.
                let dot = unsafe { score(self.level, &queries[g * dim..(g + 1) * dim], line) };
                scores[g * count + p] = self.scale * dot;
            }
        }
        for scores in scores[..group * count].chunks_exact_mut(count) {
            // SAFETY: the level was detected.
            unsafe { softmax(self.level, scores) };
        }
        outs.fill(0.0);
        for p in 0..count {
            // SAFETY: `index` checked the slot.
            unsafe { load_floats(self.kv.dtype, kv_line(first + p, 1), line) };
            for g in 0..group {
                let weight = scores[g * count + p];
                // SAFETY: the level was detected.
                unsafe { add(self.level, &mut outs[g * dim..(g + 1) * dim], line, weight) };
            }
        }
        let at = self.out.at(token, kv_head * group * dim);
        // SAFETY: the group's heads of this token, which this chunk alone writes.
        unsafe { store_floats(self.out.dtype, at, outs) };
    }

    fn zero(&self, token: usize) {
        let bytes = self.out.dtype.bytes(self.out.cols);
        // SAFETY: a row of the output.
        unsafe { self.out.at(token, 0).write_bytes(0, bytes) };
    }

    /// The row of a token, and its position; none for a pad token.
    fn locate(&self, token: usize) -> Option<(usize, usize)> {
        let tables = &self.tables;
        if self.single {
            let kv_len = tables.kv_len.get(token) as usize;
            return (kv_len > 0).then(|| (token, kv_len - 1));
        }
        let row = tables.token_row.get(token) as usize;
        (row < self.rows).then(|| {
            let end = tables.q_start.get(row + 1) as usize;
            (row, tables.kv_len.get(row) as usize - (end - token))
        })
    }
}

#[inline(always)]
fn score_body<const FMA: bool>(q: &[f32], k: &[f32]) -> f32 {
    dot::<FMA>(q, k)
}

#[inline(always)]
fn softmax_body<const FMA: bool>(scores: &mut [f32]) {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut total = 0.0;
    for score in scores.iter_mut() {
        *score = exp::<FMA>(*score - max);
        total += *score;
    }
    let inverse = 1.0 / total;
    scores.iter_mut().for_each(|score| *score *= inverse);
}

#[inline(always)]
fn add_body<const FMA: bool>(out: &mut [f32], v: &[f32], weight: f32) {
    for (out, v) in out.iter_mut().zip(v) {
        *out = fma::<FMA>(*v, weight, *out);
    }
}

levels! {
    /// q·k.
    fn score(q: &[f32], k: &[f32]) -> f32 = score_body;
}

levels! {
    /// Scores to weights that sum to 1.
    fn softmax(scores: &mut [f32]) = softmax_body;
}

levels! {
    /// out += weight · v.
    fn add(out: &mut [f32], v: &[f32], weight: f32) = add_body;
}

impl Step for AttentionStep {
    fn scratch(&self) -> Scratch {
        let own = Scratch { shared: 0, own: self.own_floats() * size_of::<f32>() };
        self.rope.as_ref().map_or(own, |rope| rope.scratch().max(own))
    }

    fn run(&self, team: &Team<'_>) {
        if let Some(rope) = &self.rope {
            rope.run(team);
        }
        let tokens = if self.single {
            self.rows
        } else {
            (self.tables.counts.get(count::TOKENS as usize) as usize).min(self.out.rows)
        };
        let heads = self.kv.heads as usize;
        let items = tokens * heads;
        let chunks = chunks(items, team.threads());
        team.parallel(chunks, &|chunk, worker| {
            for item in part(items, chunks, chunk) {
                let (token, head) = (item / heads, item % heads);
                match self.locate(token) {
                    Some((row, position)) => {
                        self.token_head(row, token, position, head, team.own(worker));
                    }
                    None if head == 0 && self.single => self.zero(token),
                    None => {}
                }
            }
        });
    }
}
