//! Work is divided by token and group of heads. Positions are taken in blocks from the first on, with a running maximum:
//! the order of sums follows from a token's position alone.

use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::simd::{Level, dot, exp, fma, levels};
use crate::cpu::step::{Own, Scratch, Step, Team};
use crate::cpu::tables::Tables;
use crate::cpu::view::{Matrix, load_floats, store_floats};
use crate::op::{KvLayer, LatentAttention};

/// Positions of a block.
const BLOCK: usize = 32;
/// Heads of a group where tokens are few.
const FEW: usize = 4;

struct LatentAttentionStep {
    q: Matrix,
    out: Matrix,
    heads: usize,
    kv: KvLayer,
    latent: usize,
    pages: *const u8,
    tables: Tables,
    scale: f32,
    rows: usize,
    single: bool,
    level: Level,
}

// SAFETY: addresses in an arena that the recording keeps; chunks write different heads of the output.
unsafe impl Send for LatentAttentionStep {}
// SAFETY: as above.
unsafe impl Sync for LatentAttentionStep {}

impl LatentAttention {
    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        Box::new(LatentAttentionStep {
            q: Matrix::new(memory, &self.q),
            out: Matrix::new(memory, &self.out),
            heads: self.heads as usize,
            kv: self.kv,
            latent: self.latent() as usize,
            pages: memory.address(self.kv.span),
            tables: Tables::new(memory, &self.state),
            scale: self.scale,
            rows: self.rows as usize,
            single: self.single,
            level: lowering.level,
        })
    }
}

/// A token, with its row and position; `None`: the row attends to nothing.
type Place = (usize, Option<(usize, usize)>);

impl LatentAttentionStep {
    fn width(&self) -> usize {
        self.kv.head_dim as usize
    }

    /// Floats of a worker's scratch: queries, a block of latents, results, scores, maxima and totals of all heads.
    fn own_floats(&self) -> usize {
        self.heads * (self.width() + self.latent + BLOCK + 2) + BLOCK * self.width()
    }

    fn tokens(&self) -> usize {
        match self.single {
            true => self.rows,
            false => (self.tables.q_start.get(self.rows) as usize).min(self.q.rows),
        }
    }

    fn place(&self, token: usize) -> Place {
        if self.single {
            return (token, self.tables.kept(token, 1).map(|old| (token, old)));
        }
        let row = self.tables.token_row.get(token) as usize;
        if row >= self.rows {
            return (token, None);
        }
        let start = self.tables.q_start.get(row) as usize;
        let count = self.tables.q_start.get(row + 1) as usize - start;
        let old = self.tables.kept(row, count);
        (token, old.map(|old| (row, old + token - start)))
    }

    fn group(&self, (token, place): Place, heads: std::ops::Range<usize>, own: Own) {
        let (width, latent, level) = (self.width(), self.latent, self.level);
        let (count, to) = (heads.len(), self.out.at(token, heads.start * latent));
        let Some((row, position)) = place else {
            // SAFETY: heads of a token, which this chunk alone writes.
            unsafe { to.write_bytes(0, self.out.dtype.bytes(count * latent)) };
            return;
        };
        // SAFETY: this worker's own scratch.
        let own = unsafe { own.floats(self.own_floats()) };
        let (queries, own) = own.split_at_mut(count * width);
        let (lines, own) = own.split_at_mut(BLOCK * width);
        let (sums, own) = own.split_at_mut(count * latent);
        let (scores, own) = own.split_at_mut(count * BLOCK);
        let (maxima, own) = own.split_at_mut(count);
        let totals = &mut own[..count];
        // SAFETY: heads of the token's row.
        unsafe { load_floats(self.q.dtype, self.q.at(token, heads.start * width), queries) };
        queries.iter_mut().for_each(|q| *q *= self.scale);
        sums.fill(0.0);
        maxima.fill(f32::NEG_INFINITY);
        totals.fill(0.0);
        let (seat, size) = (self.tables.row_seat.get(row) as usize, self.kv.page_size as usize);
        for first in (0..=position).step_by(BLOCK) {
            let block = BLOCK.min(position + 1 - first);
            let lines = &mut lines[..block * width];
            for (line, p) in lines.chunks_exact_mut(width).zip(first..) {
                let slot = self.tables.page(seat, p) * size + p % size;
                let at = self.kv.index(slot, 0, 0) * self.kv.dtype.block_bytes();
                // SAFETY: `index` checked the slot, which is a live one.
                unsafe { load_floats(self.kv.dtype, self.pages.wrapping_add(at), line) };
            }
            for head in 0..count {
                let (query, scores) =
                    (&queries[head * width..][..width], &mut scores[head * BLOCK..][..block]);
                let sums = &mut sums[head * latent..][..latent];
                let (maximum, total) = (&mut maxima[head], &mut totals[head]);
                // SAFETY: the level was detected.
                unsafe { take(level, query, lines, scores, sums, maximum, total) };
            }
        }
        for (sums, total) in sums.chunks_exact_mut(latent).zip(totals) {
            let inverse = 1.0 / *total;
            sums.iter_mut().for_each(|sum| *sum *= inverse);
        }
        // SAFETY: heads of a token, which this chunk alone writes.
        unsafe { store_floats(self.out.dtype, to, sums) };
    }
}

/// Adds a block of latents to what a head has of those before it.
#[inline(always)]
fn take_body<const FMA: bool>(
    query: &[f32],
    lines: &[f32],
    scores: &mut [f32],
    sums: &mut [f32],
    maximum: &mut f32,
    total: &mut f32,
) {
    let width = query.len();
    let mut top = *maximum;
    for (score, line) in scores.iter_mut().zip(lines.chunks_exact(width)) {
        *score = dot::<FMA>(query, line);
        top = top.max(*score);
    }
    if top > *maximum {
        let keep = exp::<FMA>(*maximum - top);
        *total *= keep;
        sums.iter_mut().for_each(|sum| *sum *= keep);
        *maximum = top;
    }
    for (score, line) in scores.iter().zip(lines.chunks_exact(width)) {
        let weight = exp::<FMA>(*score - top);
        *total += weight;
        for (sum, value) in sums.iter_mut().zip(line) {
            *sum = fma::<FMA>(weight, *value, *sum);
        }
    }
}

levels! {
    /// Adds a block of latents to what a head has of those before it.
    fn take(query: &[f32], lines: &[f32], scores: &mut [f32], sums: &mut [f32], maximum: &mut f32, total: &mut f32) = take_body;
}

impl Step for LatentAttentionStep {
    fn scratch(&self) -> Scratch {
        Scratch { shared: 0, own: self.own_floats() * size_of::<f32>() }
    }

    fn run(&self, team: &Team<'_>) {
        let tokens = self.tokens();
        // A group converts every latent once, so larger ones pay where there are enough tokens.
        let each = if tokens >= 4 * team.threads() { self.heads } else { FEW.min(self.heads) };
        let groups = self.heads.div_ceil(each);
        team.parallel(tokens * groups, &|chunk, worker| {
            // The last tokens, which see the most, come first.
            let (token, first) = (tokens - 1 - chunk / groups, chunk % groups * each);
            let heads = first..(first + each).min(self.heads);
            self.group(self.place(token), heads, team.own(worker));
        });
    }
}
