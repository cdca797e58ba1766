//! Rows of many tokens by chunks: `kernels/scan_prepare.cu` and `kernels/scan_chunks.cu`, for keys and values in bf16. Rows of few
//! tokens and those that take drafts from a log are left to `kernels/scan.cu`, which skips the others.
//!
//! Operands of products are rounded to bf16, and a chunk begins where a step does, so results depend on how a prompt is cut.
//! [`Pick::Fixed`] therefore takes every token by itself.

use super::{LENGTH_EPS, Rule, ScanVariant};
use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, SEMAPHORE_BYTES, aligned, code};
use crate::op::Scan;
use crate::ops::{Named, require};
use crate::variant::Pick;
use crate::{DType, Error, Result, Span};

/// Tokens of a step from which on chunks are expected to be faster; `u32::MAX` leaves all to `scan.cu`.
const FEWEST_TOKENS: u32 = 128;
/// Tokens of a row from which on it is taken by chunks.
pub(super) const LONG: u32 = 17;
/// Tokens of a chunk.
const CHUNK: u32 = 64;
/// Blocks of 16 × 16 on and below a chunk's diagonal, and bytes of each.
const BLOCKS: u32 = 10;
const BLOCK_BYTES: u32 = 512;
/// Most elements of a key: a warp has 16 columns of the matrix in registers.
const MOST_KEY: u32 = 128;
/// Columns of a warp.
const COLUMNS: u32 = 16;
/// Threads that prepare a chunk.
const PREPARERS: u32 = 128;

/// What the warps of a block do.
#[derive(Clone, Copy, Debug)]
struct Form {
    /// Have columns of the matrix.
    warps: u32,
    /// As many as have columns copy and compute results, a chunk later.
    apart: bool,
}

impl Form {
    fn threads(self) -> u32 {
        32 * self.warps * (1 + u32::from(self.apart))
    }
}

impl Scan {
    /// Whether rows of many tokens are taken by chunks.
    pub(super) fn by_chunks(&self, target: &Target) -> bool {
        let many = self.y.rows >= FEWEST_TOKENS;
        match self.pick {
            Pick::Best | Pick::Rule => many && self.chunks_fit(target),
            Pick::Named(ScanVariant::Chunks) => self.chunks_fit(target),
            Pick::Named(ScanVariant::Tokens) | Pick::Fixed => false,
        }
    }

    /// Refuses chunks that were requested by name where there is no kernel for them.
    pub(super) fn check_variant(&self, target: &Target) -> Result<()> {
        let asked = self.pick == Pick::Named(ScanVariant::Chunks);
        require(!asked || self.chunks_fit(target), Self::NAME, || {
            format!("no kernel takes these tokens by chunks on {}", target.arch())
        })
    }

    fn chunks_fit(&self, target: &Target) -> bool {
        let halves = [&self.x, &self.y].into_iter().all(|t| t.dtype == DType::BF16 && aligned(t));
        let shape = self.key.is_multiple_of(16) && self.key <= MOST_KEY;
        let shape = shape && self.value.is_multiple_of(2 * COLUMNS);
        let long = !self.single && self.q_len == 1;
        halves && shape && long && self.form(target).is_some() && target.capability.0 >= 8
    }

    /// A single long prompt should not wait for results from chunk to chunk; many prompts lose a twentieth by that.
    fn form(&self, target: &Target) -> Option<Form> {
        let order = [(4, true), (2, true), (2, false)].map(|(warps, apart)| Form { warps, apart });
        order.into_iter().find(|form| {
            self.value.is_multiple_of(form.warps * COLUMNS)
                && self.chunk_shared(*form) <= target.shared_per_block
        })
    }

    /// Bytes of what is prepared for a chunk and a head.
    fn record_bytes(&self) -> u32 {
        let products = if self.rule == Rule::Delta { 2 } else { 1 };
        products * BLOCKS * BLOCK_BYTES + 4 * CHUNK * 4 + 16
    }

    /// Bytes of chunks in shared memory: queries, keys and values in padded rows, and what is prepared. If results are made apart,
    /// operands that are handed on, twice.
    fn chunk_shared(&self, form: Form) -> u32 {
        let row = 2 * (self.key + 8) + COLUMNS * form.warps + 8;
        let stage = CHUNK * row * 2 + self.record_bytes();
        let handed = form.warps * (self.key + CHUNK) / 16 * BLOCK_BYTES;
        if form.apart { 3 * stage + 2 * handed } else { 2 * stage }
    }

    /// Places for chunks: rows are numbered in order and begin a chunk each.
    fn slots(&self) -> u32 {
        self.y.rows / CHUNK + self.rows
    }

    /// Bytes of scratch: what is prepared for all chunks and heads, behind the semaphores of other ops.
    pub(super) fn chunk_room(&self, target: &Target) -> u64 {
        let records = u64::from(self.slots()) * u64::from(self.heads);
        let bytes = SEMAPHORE_BYTES + records * u64::from(self.record_bytes());
        if self.by_chunks(target) { bytes } else { 0 }
    }

    /// A kernel with the macros that both have.
    fn chunk_kernel(&self, target: &Target, source: &str) -> Kernel {
        let Scan { heads, groups, turns, key, .. } = *self;
        let at = self.columns(0);
        Kernel::new(target, source, source).defines(&[
            ("DELTA", u32::from(self.rule == Rule::Delta)),
            ("KEY", key),
            ("HEADS", heads),
            ("GROUPS", groups),
            ("SHARE", if turns { 0 } else { heads / groups }),
            ("LONG", LONG),
            ("DRAFTS", self.state.limits.drafts()),
            ("Q_AT", at.query as u32),
            ("K_AT", at.key as u32),
        ])
    }

    /// What does not depend on the matrices, then the matrices.
    pub(super) fn chunk_launches(&self, target: &Target) -> Result<[Lowered; 2]> {
        let (room, needs) = (self.scratch.map_or(0, |span| span.len), self.chunk_room(target));
        require(room >= needs, Self::NAME, || {
            format!("the kernel needs {needs} bytes of scratch and has {room}")
        })?;
        let behind = |span: Span| span.part(SEMAPHORE_BYTES, span.len - SEMAPHORE_BYTES);
        let records = self.scratch.map(behind);
        let (s, limits) = (&self.state, &self.state.limits);
        let tables = [&s.row_seat, &s.q_start, &s.kv_len];
        let replay = s.row_replay.map(|replay| replay.span);
        let least = if let Rule::StateSpace { least } = self.rule { least } else { 0.0 };
        let prepare = self
            .chunk_kernel(target, "scan_prepare")
            .defines(&[
                ("GT", code(self.gates.dtype, Self::NAME)?),
                ("AT", code(self.a.dtype, Self::NAME)?),
                ("DT", code(self.dt.dtype, Self::NAME)?),
            ])
            .grid(self.slots(), self.groups, 1)
            .threads(PREPARERS)
            .tensors(&[&self.x, &self.gates, &self.a, &self.dt])
            .optional(records)
            .tensors(&tables)
            .optional(replay)
            .ints(&[self.rows, limits.seats, limits.context(), self.from])
            .ints(&[self.x.stride, self.gates.stride])
            .arg(Arg::F32(least))
            .arg(Arg::F32(LENGTH_EPS));
        let skip = self.skip.as_ref();
        let form = self.form(target).ok_or_else(|| Error::Contract {
            op: Self::NAME.into(),
            problem: "no block has room for chunks".into(),
        })?;
        let chunks = self
            .chunk_kernel(target, "scan_chunks")
            .defines(&[
                ("VALUE", self.value),
                ("V_AT", self.columns(0).value as u32),
                ("WARPS", form.warps),
                ("APART", u32::from(form.apart)),
                ("SKIP", u32::from(skip.is_some())),
                ("ST", skip.map_or(Ok(0), |skip| code(skip.dtype, Self::NAME))?),
            ])
            .grid(self.value / (COLUMNS * form.warps), self.heads, self.rows)
            .threads(form.threads())
            .shared(self.chunk_shared(form))
            .tensors(&[&self.x])
            .optional(records)
            .optional(skip.map(|skip| skip.span))
            .tensors(&[&self.carry, &self.y])
            .tensors(&tables)
            .optional(replay)
            .ints(&[limits.seats, limits.context()])
            .ints(&[self.x.stride, self.carry.stride, self.y.stride]);
        Ok([prepare.lowered(), chunks.lowered()])
    }
}
