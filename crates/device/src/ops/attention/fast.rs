//! Work is divided by row, KV head and block of tokens; the query heads that share a KV head are processed together.

#[cfg(target_arch = "x86_64")]
use super::avx512;
use super::{ggml, portable};
use crate::DType;
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::simd::Level;
use crate::cpu::step::{Own, Scratch, Step, Team};
use crate::cpu::tables::Tables;
use crate::cpu::view::{Matrix, Words, load_floats};
use crate::op::AttentionChain;
use crate::op::KvLayer;
use crate::ops::rope_kv::RopeKvStep;

/// The op with its addresses resolved.
pub(super) struct AttentionStep {
    qkv: Matrix,
    pub(super) out: Matrix,
    q_heads: usize,
    kv: KvLayer,
    pages: *const u8,
    scales: Option<Words>,
    tables: Tables,
    scale: f32,
    softcap: Option<f32>,
    /// Learned scores, one for each query head.
    sinks: Option<Matrix>,
    window: Option<usize>,
    causal: bool,
    rows: usize,
    single: bool,
    rope: Option<RopeKvStep>,
    pub(super) level: Level,
    /// The AVX-512 kernels fit the shape.
    wide: bool,
    /// Every sum in ggml's order.
    ggml: bool,
    /// Every token separately, however many there are.
    fixed: bool,
}

// SAFETY: addresses in an arena that the recording keeps; chunks write different heads of the output.
unsafe impl Send for AttentionStep {}
// SAFETY: as above.
unsafe impl Sync for AttentionStep {}

impl AttentionChain {
    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        let level = lowering.level;
        let group = self.attention.q_heads / self.attention.kv.heads;
        let ggml = lowering.ggml();
        let fits = self.attention.kv.head_dim.is_multiple_of(16) && group <= 16;
        let wide = level == Level::Avx512 && fits && !ggml;
        Box::new(AttentionStep {
            qkv: Matrix::new(memory, &self.attention.qkv),
            out: Matrix::new(memory, &self.attention.out),
            q_heads: self.attention.q_heads as usize,
            kv: self.attention.kv,
            pages: memory.address(self.attention.kv.span),
            scales: self.attention.kv.scales.map(|scales| Words::of_span(memory, scales)),
            tables: Tables::new(memory, &self.attention.state),
            scale: self.attention.scale,
            softcap: self.attention.softcap,
            sinks: self.attention.sinks.as_ref().map(|sinks| Matrix::new(memory, sinks)),
            window: self.attention.window.map(|window| window as usize),
            causal: self.attention.causal,
            rows: self.attention.rows as usize,
            single: self.attention.single,
            rope: self.rope.as_ref().map(|rope| rope.resolve(memory, lowering)),
            level,
            wide,
            ggml,
            fixed: self.fixed(),
        })
    }
}

/// The query heads of a row that share a KV head, and a worker's scratch.
pub(super) struct Heads<'a> {
    pub(super) step: &'a AttentionStep,
    pub(super) seat: usize,
    /// Tokens of the row, this step's included.
    length: usize,
    pub(super) kv_head: usize,
    pub(super) own: Own,
}

impl Heads<'_> {
    pub(super) fn dim(&self) -> usize {
        self.step.kv.head_dim as usize
    }

    pub(super) fn group(&self) -> usize {
        self.step.group()
    }

    pub(super) fn page_size(&self) -> usize {
        self.step.kv.page_size as usize
    }

    pub(super) fn dtype(&self) -> DType {
        self.step.kv.dtype
    }

    pub(super) fn scale(&self) -> f32 {
        self.step.scale
    }

    /// The soft cap of scores, if there is one.
    pub(super) fn softcap(&self) -> Option<f32> {
        self.step.softcap
    }

    /// The learned score of a query head of the group, if there is one.
    pub(super) fn sink(&self, g: usize) -> Option<f32> {
        let head = self.kv_head * self.group() + g;
        self.step.sinks.as_ref().map(|sinks| sinks.get(0, head))
    }

    /// What its sink adds to the sum of a query head's weights, where the largest score is `max`.
    pub(super) fn sink_weight(&self, g: usize, max: f32) -> f32 {
        self.sink(g).map_or(0.0, |sink| (sink - max).exp())
    }

    /// The first position a token at `position` sees.
    pub(super) fn first(&self, position: usize) -> usize {
        self.step.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// One past the last position a token at `position` sees.
    pub(super) fn end(&self, position: usize) -> usize {
        match (self.step.causal, self.step.window) {
            (true, _) => position + 1,
            (false, None) => self.length,
            (false, Some(window)) => position.saturating_add(window).min(self.length),
        }
    }

    /// Where k (`part` 0) or v (1) of a position lies; the rest of its page follows.
    pub(super) fn line(&self, part: usize, position: usize) -> *const u8 {
        let size = self.page_size();
        let slot = self.step.tables.page(self.seat, position) * size + position % size;
        let at = self.step.kv.index(slot, part, self.kv_head) * self.dtype().block_bytes();
        self.step.pages.wrapping_add(at)
    }

    /// The factor of what is stored of keys (`part` 0) or values (1); `None` without scales.
    pub(super) fn factor(&self, part: usize) -> Option<f32> {
        let at = part * self.step.kv.heads as usize + self.kv_head;
        self.step.scales.as_ref().map(|scales| scales.float(at))
    }

    /// k (`part` 0) or v (1) of a position as f32.
    ///
    /// # Safety
    /// The position is that of a live slot.
    pub(super) unsafe fn load_line(&self, part: usize, position: usize, to: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe { load_floats(self.dtype(), self.line(part, position), to) };
        if let Some(factor) = self.factor(part) {
            to.iter_mut().for_each(|value| *value *= factor);
        }
    }

    /// One query.
    ///
    /// # Safety
    /// `to` has room for a head.
    pub(super) unsafe fn load_query(&self, token: usize, g: usize, to: *mut f32) {
        let (qkv, dim) = (&self.step.qkv, self.dim());
        let at = qkv.at(token, (self.kv_head * self.group() + g) * dim);
        // SAFETY: a head of the token's row.
        unsafe { load_floats(qkv.dtype, at, std::slice::from_raw_parts_mut(to, dim)) };
    }

    /// All queries of a token.
    ///
    /// # Safety
    /// `to` has room for the group.
    pub(super) unsafe fn load_queries(&self, token: usize, to: *mut f32) {
        for g in 0..self.group() {
            // SAFETY: the caller's promise.
            unsafe { self.load_query(token, g, to.add(g * self.dim())) };
        }
    }
}

/// The work of one chunk: consecutive tokens of a row for a KV head.
#[derive(Clone, Copy)]
struct Block {
    row: usize,
    kv_head: usize,
    token: usize,
    tokens: usize,
    /// Of the first token; `None`: the row attends to nothing.
    position: Option<usize>,
}

impl AttentionStep {
    fn group(&self) -> usize {
        self.q_heads / self.kv.heads as usize
    }

    fn context(&self) -> usize {
        self.tables.limits.context() as usize
    }

    /// Most tokens of a block.
    fn block_tokens(&self) -> usize {
        #[cfg(target_arch = "x86_64")]
        if self.wide {
            return avx512::LANES / self.group();
        }
        8
    }

    /// First token and number of tokens of a row.
    fn tokens(&self, row: usize) -> (usize, usize) {
        if self.single {
            return (row, 1);
        }
        let start = self.tables.q_start.get(row) as usize;
        (start, self.tables.q_start.get(row + 1) as usize - start)
    }

    fn blocks(&self) -> usize {
        let size = self.block_tokens();
        let blocks: usize = (0..self.rows).map(|row| self.tokens(row).1.div_ceil(size)).sum();
        blocks * self.kv.heads as usize
    }

    /// Block `index`; a row's last blocks, which attend to the most tokens, come first.
    fn block(&self, index: usize) -> Block {
        let (size, heads) = (self.block_tokens(), self.kv.heads as usize);
        let (mut left, kv_head) = (index / heads, index % heads);
        let mut row = 0;
        if self.single {
            (row, left) = (left, 0);
        }
        loop {
            let (start, count) = self.tokens(row);
            let blocks = count.div_ceil(size);
            if left < blocks {
                let skip = (blocks - 1 - left) * size;
                let old = self.tables.kept(row, count);
                let tokens = size.min(count - skip);
                let position = old.map(|old| old + skip);
                return Block { row, kv_head, token: start + skip, tokens, position };
            }
            left -= blocks;
            row += 1;
        }
    }

    fn run_block(&self, block: Block, own: Own) {
        let Block { row, kv_head, token, tokens, position } = block;
        let Some(position) = position else {
            // A pad row of a decode step, or a row whose length does not fit its pages.
            let cols = self.group() * self.kv.head_dim as usize;
            for token in token..token + tokens {
                let at = self.out.at(token, kv_head * cols);
                // SAFETY: the group's heads of a token, which this chunk alone writes.
                unsafe { at.write_bytes(0, self.out.dtype.bytes(cols)) };
            }
            return;
        };
        let seat = self.tables.row_seat.get(row) as usize;
        let length = self.tables.kv_len.get(row) as usize;
        let heads = Heads { step: self, seat, length, kv_head, own };
        #[cfg(target_arch = "x86_64")]
        if self.wide {
            // SAFETY: `wide` says the processor has AVX-512; the row's tokens are in its pages.
            unsafe {
                if self.fixed || tokens * self.group() <= 6 {
                    (0..tokens).for_each(|i| avx512::few(&heads, token + i, position + i));
                } else {
                    avx512::block(&heads, token, tokens, position);
                }
            }
            return;
        }
        let alone = self.tokens(row).1 == 1;
        // llama.cpp's order of sums is known for causal attention only.
        (0..tokens).for_each(|i| match self.ggml && self.causal {
            true => ggml::token(&heads, token + i, position + i, alone),
            false => portable::token(&heads, token + i, position + i),
        });
    }
}

impl Step for AttentionStep {
    fn scratch(&self) -> Scratch {
        let (dim, group, context) = (self.kv.head_dim as usize, self.group(), self.context());
        let own = match self.ggml {
            #[cfg(target_arch = "x86_64")]
            false if self.wide => avx512::own_bytes(dim, group, context),
            false => portable::own_floats(dim, group, context) * size_of::<f32>(),
            true => {
                let floats = portable::own_floats(dim, group, context);
                ggml::own_floats(dim, group, context).max(floats) * size_of::<f32>()
            }
        };
        let own = Scratch { shared: 0, own };
        self.rope.as_ref().map_or(own, |rope| rope.scratch().max(own))
    }

    fn run(&self, team: &Team<'_>) {
        if let Some(rope) = &self.rope {
            rope.run(team);
        }
        // The heads of a row lie side by side in its pages: with many rows, one thread takes them all.
        let (blocks, heads) = (self.blocks(), self.kv.heads as usize);
        let together = if blocks >= 4 * heads * team.threads() { heads } else { 1 };
        team.parallel(blocks / together, &|chunk, worker| {
            for index in chunk * together..(chunk + 1) * together {
                self.run_block(self.block(index), team.own(worker));
            }
        });
    }
}
