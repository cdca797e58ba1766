//! Half formats, pages of 16 and latents of whole 128s: `kernels/latent_attention.cu`, on GPUs whose blocks can have so
//! much shared memory. Everything else: `kernels/latent_attention_ref.cu`, a block for each token and head.
//!
//! [`Pick::Fixed`]: the same without splits. A variant that was requested by name and cannot run is an error.

use crate::cuda::launch::{Arg, Lowered, Target};
use crate::cuda::lower::{Kernel, SEMAPHORE_BYTES, aligned, code};
use crate::op::LatentAttention;
use crate::ops::prologue::cuda::ways;
use crate::ops::{Named, require};
use crate::step::count;
use crate::variant::{AttentionKernel, AttentionVariant, Pick};
use crate::{DType, Result, Span};

/// Tokens of a tile.
const TILE: u32 = 64;
/// Heads of a block: rows of the matrix instruction.
const HEADS: u32 = 16;
/// From more tokens than this on, a decode step has enough blocks without splitting rows.
const MOST_SPLIT: u32 = 256;

impl LatentAttention {
    /// Bytes of the partial results of pieces.
    pub(super) fn part_room(&self, target: &Target) -> u64 {
        match self.tensor_cores(target) && self.splits() {
            true => {
                let parts = u64::from(self.pieces(target)) * u64::from(self.groups());
                SEMAPHORE_BYTES + parts * u64::from(HEADS * (self.latent() + 2) * 4)
            }
            false => 0,
        }
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        if let Pick::Named(AttentionVariant { kernel, warps, stages, least, cluster, kv, turns }) =
            self.pick
        {
            let settings = [warps, least, cluster, kv, turns] == [None; 5];
            let cores = self.tensor_cores(target) && stages.is_none_or(|n| (2..=3).contains(&n));
            let can = settings && if self.is_reference() { stages.is_none() } else { cores };
            let can = can && kernel != Some(AttentionKernel::Mma);
            require(can, Self::NAME, || format!("no such kernel{}", self.pick.suffix()))?;
        }
        if !self.tensor_cores(target) {
            return Ok(vec![self.reference_launch(target)?]);
        }
        let (room, needs) = (self.scratch.map_or(0, |span| span.len), self.part_room(target));
        require(room >= needs, Self::NAME, || {
            format!("the kernel needs {needs} bytes of scratch and has {room}")
        })?;
        let mut launches = vec![self.fast(target)?];
        if self.splits() {
            launches.push(self.merge(target)?);
        }
        Ok(launches)
    }

    fn is_reference(&self) -> bool {
        let kernel = Some(AttentionKernel::Reference);
        matches!(self.pick, Pick::Named(variant) if variant.kernel == kernel)
    }

    fn tensor_cores(&self, target: &Target) -> bool {
        let (kv, x) = (&self.kv, self.q.dtype);
        let half = matches!(x, DType::F16 | DType::BF16) && x == kv.dtype;
        let dims = kv.head_dim.is_multiple_of(32) && self.latent().is_multiple_of(128);
        let fits = kv.page_size == 16 && self.shared() + (8 << 10) <= target.shared_per_block;
        let wide = aligned(&self.q) && aligned(&self.out);
        !self.is_reference() && half && dims && fits && wide && target.capability.0 >= 8
    }

    fn stages(&self) -> u32 {
        match self.pick {
            Pick::Named(AttentionVariant { stages: Some(stages), .. }) => stages,
            _ => 3,
        }
    }

    /// Bytes of the ring of tiles.
    fn shared(&self) -> u32 {
        self.stages() * TILE * (2 * self.kv.head_dim + 16)
    }

    /// Blocks that share the heads of a token.
    fn groups(&self) -> u32 {
        self.heads.div_ceil(HEADS)
    }

    /// Tokens of every row, if all have as many; else 0.
    fn each(&self) -> u32 {
        if self.single { 1 } else { self.even.unwrap_or(0) }
    }

    /// Whether pieces of a token's context are computed by different blocks.
    fn splits(&self) -> bool {
        self.each() > 0 && self.pick != Pick::Fixed && self.out.rows <= MOST_SPLIT
    }

    /// Most pieces of all tokens: one for each, and as many as run at once.
    fn pieces(&self, target: &Target) -> u32 {
        self.out.rows + target.sms.div_ceil(self.groups())
    }

    /// Where partial results go: behind the semaphores, which other ops need to be zero.
    fn parts(&self) -> Option<Span> {
        let behind = |span: Span| span.part(SEMAPHORE_BYTES, span.len - SEMAPHORE_BYTES);
        self.scratch.filter(|_| self.splits()).map(behind)
    }

    /// A kernel with the macros that those with tensor cores have.
    fn kernel(&self, target: &Target, entry: &str) -> Result<Kernel> {
        let kernel = Kernel::new(target, "latent_attention", entry).defines(&[
            ("D", self.kv.head_dim),
            ("LATENT", self.latent()),
            ("HQ", self.heads),
            ("PAGE", self.kv.page_size),
            ("SINGLE", u32::from(self.each() > 0)),
            ("Q_TOKENS", self.each().max(1)),
            ("SPLIT", u32::from(self.splits())),
            ("BLOCKS", target.sms),
            ("WAYS", ways(self.rows, target)),
            ("ITEMS32", if self.splits() { self.out.rows.div_ceil(32) } else { 1 }),
            ("LAST", u32::from(self.last_only && self.each() == 0)),
            ("COUNT_SPLIT", count::SPLIT),
            ("STAGES", self.stages()),
            ("TYPE", code(self.q.dtype, Self::NAME)?),
            ("YT", code(self.out.dtype, Self::NAME)?),
        ]);
        Ok(kernel)
    }

    fn fast(&self, target: &Target) -> Result<Lowered> {
        let s = &self.state;
        let blocks = if self.splits() { self.pieces(target) } else { self.out.rows };
        let kernel = self
            .kernel(target, "latent_attention")?
            .grid(blocks, self.groups(), 1)
            .shared(self.shared())
            .tensors(&[&self.q])
            .spans(&[self.kv.span])
            .tensors(&[&self.out, &s.row_seat, &s.q_start, &s.kv_len, &s.page_table])
            .tensors(&[&s.token_row, &s.counts])
            .optional(self.parts())
            .ints(&[self.rows, s.limits.pages_per_seat, self.q.stride, self.out.stride])
            .arg(Arg::F32(self.scale));
        Ok(kernel.lowered())
    }

    fn merge(&self, target: &Target) -> Result<Lowered> {
        let kernel = self
            .kernel(target, "latent_merge")?
            .grid(self.out.rows, self.heads, 1)
            .threads(128)
            .tensors(&[&self.out, &self.state.kv_len, &self.state.counts])
            .optional(self.parts())
            .ints(&[self.rows, self.out.stride]);
        Ok(kernel.lowered())
    }

    fn reference_launch(&self, target: &Target) -> Result<Lowered> {
        let (kv, s) = (&self.kv, &self.state);
        let kernel = Kernel::new(target, "latent_attention_ref", "latent_attention_ref")
            .defines(&[
                ("D", kv.head_dim),
                ("LATENT", self.latent()),
                ("PAGE", kv.page_size),
                ("SINGLE", u32::from(self.single)),
                ("XT", code(self.q.dtype, Self::NAME)?),
                ("KT", code(kv.dtype, Self::NAME)?),
                ("YT", code(self.out.dtype, Self::NAME)?),
            ])
            .grid(self.out.rows, self.heads, 1)
            .threads(128)
            .tensors(&[&self.q])
            .spans(&[kv.span])
            .tensors(&[&self.out, &s.row_seat, &s.q_start, &s.kv_len, &s.page_table])
            .tensors(&[&s.token_row])
            .ints(&[self.rows, s.limits.pages_per_seat, self.q.stride, self.out.stride])
            .arg(Arg::F32(self.scale));
        Ok(kernel.lowered())
    }
}
