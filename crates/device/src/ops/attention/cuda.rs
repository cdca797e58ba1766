//! Half formats and pages of 16: `kernels/attention.cu` for decode (and wide heads); for rows of many
//! tokens `kernels/attention_wgmma.cu` on Hopper with heads of 64 or 128 (where rows can be many, those of
//! one token by the decode kernel, whose blocks are small), else `kernels/attention_varlen.cu`. Everything else:
//! `kernels/attention_ref.cu`.
//!
//! [`Pick::Fixed`]: the decode kernel without splits for any number of tokens. A variant that was asked for by
//! name and cannot run is an error.

use crate::Result;
use crate::cuda::launch::{Arg, Lowered, Target, TensorMap};
use crate::cuda::lower::{Kernel, SEMAPHORE_BYTES, aligned, code};
use crate::op::{AttentionChain, Norm};
use crate::ops::prologue::cuda::ways;
use crate::ops::require;
use crate::step::count;
use crate::variant::{AttentionKernel, AttentionVariant, Pick, Variant};
use crate::{DType, Span};

const WARPS: u32 = 4;
/// Blocks of tokens that the Hopper kernel's list has room for.
const MOST_SLOTS: u32 = 3072;
/// Rows from which a step may have so many of one token that these are worth a launch of their own.
const MANY_ROWS: u32 = 32;
/// Tokens of a sequence up to which wide tiles of the Hopper kernel would mostly be cut off.
const SHORT: u32 = 1024;

impl AttentionChain {
    pub(crate) fn scratch_bytes(&self, target: &Target) -> u64 {
        let (split, y, z) = self.pieces(target);
        if !self.tensor_cores(target) || split == 0 {
            return 0;
        }
        let parts = u64::from(y * z) * u64::from(self.kv.heads);
        SEMAPHORE_BYTES + parts * u64::from(self.part_bytes())
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        self.check_variant(target)?;
        if let Some(rope) = &self.rope {
            rope.require_halves()?;
        }
        if self.tensor_cores(target) {
            let (room, needs) =
                (self.scratch.map_or(0, |scratch| scratch.len), self.scratch_bytes(target));
            require(room >= needs, Self::NAME, || {
                format!("the kernel needs {needs} bytes of scratch and has {room}")
            })?;
            return Ok(match (self.single || self.fixed(), self.kv.head_dim) {
                (false, 64 | 128) if self.warpgroups(target) && self.rows >= MANY_ROWS => {
                    vec![self.wgmma(target, false)?, self.ones(target)?]
                }
                (false, 64 | 128) if self.warpgroups(target) => vec![self.wgmma(target, true)?],
                (false, ..=128) => vec![self.varlen(target)?],
                _ => vec![self.fast(target, false)?],
            });
        }
        let mut launches = match &self.rope {
            Some(rope) => rope.lower(target)?,
            None => Vec::new(),
        };
        launches.push(self.reference_launch(target)?);
        Ok(launches)
    }

    /// Other settings worth measuring.
    pub(crate) fn candidates(&self, target: &Target) -> Vec<Variant> {
        if !self.single || !self.tensor_cores(target) {
            return Vec::new();
        }
        let plain = AttentionVariant::default();
        let clusters = [1, 2, 4, 8].into_iter().filter(|_| self.rows <= 16);
        let clusters = clusters.filter(|cluster| *cluster != self.cluster(target));
        let clusters = clusters.map(|cluster| AttentionVariant { cluster: Some(cluster), ..plain });
        let (_, own, _) = self.shape(target);
        let stages = [2, 3].into_iter().filter(|stages| *stages != own);
        let stages = stages.map(|stages| AttentionVariant { stages: Some(stages), ..plain });
        let least = [2, 8].map(|least| AttentionVariant { least: Some(least), ..plain });
        let warps = AttentionVariant { warps: Some(8), stages: Some(2), ..plain };
        let all = least.into_iter().chain([warps]).chain(stages).chain(clusters);
        let worth = |variant: &AttentionVariant| {
            let pick = Pick::Named(*variant);
            AttentionChain { pick, ..self.clone() }.check_variant(target).is_ok()
        };
        all.filter(worth).map(Variant::Attention).collect()
    }

    /// What was asked for, else what was measured to be best, else nothing.
    fn asked(&self, target: &Target) -> AttentionVariant {
        let measured = || target.tuned.variant(&self.shape_text()?).copied();
        match self.pick {
            Pick::Named(variant) => variant,
            Pick::Best if self.single => match measured() {
                Some(Variant::Attention(variant)) => variant,
                _ => AttentionVariant::default(),
            },
            Pick::Best | Pick::Rule | Pick::Fixed => AttentionVariant::default(),
        }
    }

    /// Refuses settings that the kernel which would run does not have.
    fn check_variant(&self, target: &Target) -> Result<()> {
        let asked = self.asked(target);
        let AttentionVariant { kernel, warps, stages, least, cluster, kv, turns } = asked;
        let cores = self.tensor_cores(target);
        let decode = cores && (self.single || self.kv.head_dim > 128);
        let hopper = cores && !decode && matches!(self.kv.head_dim, 64 | 128);
        let hopper = hopper && self.warpgroups(target);
        let clusters = self.single && target.capability.0 >= 9;
        let can = match kernel {
            Some(AttentionKernel::Reference) => {
                [warps, stages, least, cluster, kv, turns] == [None; 6]
            }
            Some(AttentionKernel::Mma) => cores,
            None => true,
        };
        let can = can
            && (least.is_none() || decode)
            && (warps.is_none() || (cores && !hopper))
            && (stages.is_none() || decode || hopper)
            && cluster.is_none_or(|n| n == 1 || (decode && clusters && [2, 4, 8].contains(&n)))
            && ((kv.is_none() && turns.is_none()) || hopper);
        require(can, Self::NAME, || {
            let (rows, heads, dim) = (self.rows, self.q_heads, self.kv.head_dim);
            format!(
                "no kernel `{asked}` for {rows} rows of {heads} heads of {dim} on {}",
                target.arch()
            )
        })
    }

    fn named(&self) -> Option<AttentionKernel> {
        match self.pick {
            Pick::Named(variant) => variant.kernel,
            Pick::Best | Pick::Rule | Pick::Fixed => None,
        }
    }

    fn tensor_cores(&self, target: &Target) -> bool {
        let kv = &self.kv;
        let half = matches!(kv.dtype, DType::F16 | DType::BF16) && self.qkv.dtype == kv.dtype;
        let norms = self.rope.iter().flat_map(|rope| [rope.q_norm, rope.k_norm]).flatten();
        let norms_fit = norms
            .map(|norm: Norm| norm.weight.dtype)
            .all(|dtype| dtype == DType::F32 || dtype == kv.dtype);
        let dims = kv.head_dim.is_multiple_of(16) && kv.head_dim <= 256 && kv.page_size == 16;
        let group = self.q_heads / kv.heads;
        let group_fits = group * kv.head_dim <= 4096 && group <= 32;
        let asked = self.named() != Some(AttentionKernel::Reference);
        let out = self.out.stride.is_multiple_of(4) && self.out.span.offset.is_multiple_of(16);
        asked
            && half
            && norms_fit
            && dims
            && group_fits
            && out
            && aligned(&self.qkv)
            && target.capability.0 >= 8
    }

    /// How rows are cut into pieces (SPLIT in the kernel), and blocks per KV head in two dimensions. A few rows
    /// have pieces of their own; more rows share a list of them, so that blocks without work stay few; many rows
    /// fill the GPU without.
    fn pieces(&self, target: &Target) -> (u32, u32, u32) {
        let ways = (ways(self.rows, target) * 8).div_ceil(self.kv.heads);
        // A word for each row and KV head counts the pieces that are done.
        let counted = u64::from(self.rows) * u64::from(self.kv.heads) * 4 <= SEMAPHORE_BYTES;
        match self.rows {
            _ if self.fixed() || !counted => (0, self.rows, 1),
            0..=4 if self.single => {
                let cluster = self.cluster(target);
                (2, (ways / self.rows.max(1)).max(8).div_ceil(cluster), self.rows)
            }
            5..=64 if self.single => (1, self.rows + ways.div_ceil(self.cluster(target)), 1),
            _ => (0, self.rows, 1),
        }
    }

    /// Blocks that share a piece and merge in shared memory.
    fn cluster(&self, target: &Target) -> u32 {
        let asked = self.asked(target).cluster;
        let suited = match self.rows {
            _ if !self.single || self.fixed() || target.capability.0 < 9 => return 1,
            // Eight to a cluster leave some multiprocessors out: not for contexts that need them all.
            1 | 2 if self.state.limits.pages_per_seat <= 512 => 8,
            5..=16 => 2,
            _ => 1,
        };
        asked.unwrap_or(suited)
    }

    /// Bytes of the partial result of a piece.
    fn part_bytes(&self) -> u32 {
        self.q_heads / self.kv.heads * (self.kv.head_dim + 4) * 4
    }

    /// Warps that share the pages of a piece.
    fn warps(&self, target: &Target) -> u32 {
        self.asked(target).warps.unwrap_or(WARPS)
    }

    /// (tokens per block, stages, dynamic shared memory).
    fn shape(&self, target: &Target) -> (u32, u32, u32) {
        let (dim, group) = (self.kv.head_dim, self.q_heads / self.kv.heads);
        let columns = if dim > 128 { 8 } else { 32 };
        let tokens = if self.single { 1 } else { (columns / group).max(1) };
        let stage = 2 * 16 * (2 * dim + 16);
        let warps = self.warps(target);
        let cluster = self.cluster(target);
        let left = if cluster > 1 { cluster * self.part_bytes() } else { 0 };
        // Two blocks to a multiprocessor; three with shallower rings where rounds of them are as full.
        let room = (108u32 << 10).saturating_sub(left);
        let deep = (room / (warps * stage)).clamp(2, 4);
        let filled = |stages: u32| {
            let (items, each) = (self.rows * self.kv.heads, warps * stages * stage + left + 1024);
            let slots = target.sms * (target.shared_per_sm / each).max(1);
            f64::from(items) / f64::from(items.next_multiple_of(slots))
        };
        let shallow = self.single && !self.fixed() && filled(2) >= filled(deep);
        let suited = if shallow { 2 } else { deep };
        let stages = self.asked(target).stages.unwrap_or(suited);
        let merged = warps * tokens * group * (dim + 4) * 4;
        let shared = (warps * stages * stage).max(merged) + left;
        (tokens, stages, shared.min(target.shared_per_block))
    }

    /// The rows of one token, whatever the others have.
    fn ones(&self, target: &Target) -> Result<Lowered> {
        let (single, scratch, pick) = (true, None, Pick::Best);
        AttentionChain { single, scratch, pick, ..self.clone() }.fast(target, true)
    }

    fn fast(&self, target: &Target, ones: bool) -> Result<Lowered> {
        let (kv, s) = (&self.kv, &self.state);
        // Rows of one token among many others are not cut into pieces: there are blocks enough.
        let (split, y, z) = if ones { (0, self.rows, 1) } else { self.pieces(target) };
        let scratch = self.scratch.filter(|_| split > 0);
        let cluster = if split == 0 { 1 } else { self.cluster(target) };
        let (tokens, stages, shared) = self.shape(target);
        let rope = self.rope.as_deref();
        let (q_norm, k_norm) = rope.map_or((None, None), |rope| (rope.q_norm, rope.k_norm));
        let norm_type =
            |norm: Option<Norm>| norm.map_or(Ok(0), |norm| code(norm.weight.dtype, "attention"));
        let part = |from: u64, len: Option<u64>| {
            scratch.map(|scratch: Span| scratch.part(from, len.unwrap_or(scratch.len - from)))
        };
        let kernel = Kernel::new(target, "attention", "attention")
            .defines(&[
                ("D", kv.head_dim),
                ("HQ", self.q_heads),
                ("HKV", kv.heads),
                ("PAGE", kv.page_size),
                ("WARPS", self.warps(target)),
                ("STAGES", stages),
                ("SPLIT", split),
                ("CLUSTER", cluster),
                ("ROWS32", if split == 1 { self.rows.div_ceil(32) } else { 1 }),
                ("LEAST_PAGES", self.asked(target).least.unwrap_or(WARPS)),
                ("SINGLE", u32::from(self.single)),
                ("ROPE", u32::from(rope.is_some())),
                ("Q_TOKENS", tokens),
                ("WINDOW", self.window.unwrap_or(0)),
                ("TYPE", code(kv.dtype, "attention")?),
                ("YT", code(self.out.dtype, "attention")?),
                ("QN", u32::from(q_norm.is_some())),
                ("KN", u32::from(k_norm.is_some())),
                ("QNT", norm_type(q_norm)?),
                ("KNT", norm_type(k_norm)?),
                ("COUNT_SPLIT", count::SPLIT),
                ("FIXED", u32::from(self.fixed())),
                ("ONES", u32::from(ones)),
            ])
            .grid(
                if self.single { kv.heads } else { self.out.rows / tokens + self.rows },
                if self.single { y * cluster } else { kv.heads },
                if self.single { z } else { 1 },
            )
            .cluster_along_y(cluster)
            .threads(self.warps(target) * 32)
            .shared(shared)
            .tensors(&[&self.qkv])
            .spans(&[kv.span])
            .tensors(&[&self.out, &s.row_seat, &s.q_start, &s.kv_len, &s.page_table, &s.counts])
            .optional(part(0, Some(SEMAPHORE_BYTES)))
            .optional(part(SEMAPHORE_BYTES, None))
            .optional(q_norm.map(|norm| norm.weight.span))
            .optional(k_norm.map(|norm| norm.weight.span))
            .optional(rope.map(|rope| rope.rope.span))
            .ints(&[self.rows, s.limits.pages_per_seat, self.qkv.stride, self.out.stride])
            .ints(&rope.map_or([0, 1], |rope| [rope.rope.stride, rope.rope.rows]))
            .arg(Arg::F32(self.scale))
            .arg(Arg::F32(q_norm.map_or(0.0, |norm| norm.eps)))
            .arg(Arg::F32(k_norm.map_or(0.0, |norm| norm.eps)));
        Ok(kernel.lowered())
    }

    /// Tokens a block of the Hopper kernel takes, and the most such blocks of a step.
    fn packed(&self) -> (u32, u32) {
        let tokens = 128 / (self.q_heads / self.kv.heads);
        (tokens, self.out.rows / tokens + self.rows)
    }

    /// The longest a sequence can be.
    fn context(&self) -> u32 {
        self.state.limits.context()
    }

    fn warpgroups(&self, target: &Target) -> bool {
        let (_, slots) = self.packed();
        // The list of blocks is in shared memory, a row and a block in a word.
        let listed = slots <= MOST_SLOTS && self.rows <= u32::from(u16::MAX);
        let wide = self.out.stride.is_multiple_of(8) && self.qkv.span.offset.is_multiple_of(16);
        let asked = self.named() != Some(AttentionKernel::Mma) && !self.fixed();
        // A line of a page is a signed coordinate of the tensor map.
        let kv = &self.kv;
        let lines = u64::from(kv.pages) * u64::from(kv.page_size) * 2 * u64::from(kv.heads);
        let mapped = lines <= i32::MAX as u64;
        target.capability == (9, 0) && listed && wide && asked && mapped
    }

    fn wgmma(&self, target: &Target, ones: bool) -> Result<Lowered> {
        let (kv, s) = (&self.kv, &self.state);
        let group = self.q_heads / kv.heads;
        let (tokens, slots) = self.packed();
        let stages = self.asked(target).stages.unwrap_or(2);
        // Few sizes, so that the buckets of a model share a kernel.
        let room = slots.max(512).next_power_of_two().min(MOST_SLOTS);
        // Wide tiles leave room for q once only, and their warpgroups need no turns.
        let shared = |tile: u32| {
            let q = if tile > 128 { 128 } else { 256 };
            2 * kv.head_dim * (q + 2 * stages * tile) + 1024
        };
        let wide = kv.head_dim == 128
            && self.context() > SHORT
            && shared(176) + room * 9 + 2048 <= target.shared_per_block;
        let tile = self.asked(target).kv.unwrap_or(if wide { 176 } else { 128 });
        let narrow = u32::from(tile <= 128);
        let bytes = u64::from(kv.head_dim) * 2;
        let map = |span, dtype, dims: &[u64], strides: &[u64], tile: &[u32]| {
            let (dims, strides, tile) = (dims.to_vec(), strides.to_vec(), tile.to_vec());
            Arg::TensorMap(TensorMap { span, dtype, dims, strides, tile, swizzle: 128 })
        };
        let q = map(
            self.qkv.span,
            kv.dtype,
            &[kv.head_dim.into(), self.q_heads.into(), self.qkv.rows.into()],
            &[bytes, u64::from(self.qkv.stride) * 2],
            &[64, group, tokens],
        );
        let lines = u64::from(kv.pages) * u64::from(kv.page_size) * 2 * u64::from(kv.heads);
        let pages =
            map(kv.span, kv.dtype, &[kv.head_dim.into(), lines], &[bytes], &[64, kv.page_size]);
        let kernel = Kernel::new(target, "attention_wgmma", "attention_wgmma")
            .defines(&[
                ("D", kv.head_dim),
                ("HQ", self.q_heads),
                ("HKV", kv.heads),
                ("PAGE", kv.page_size),
                ("Q_TOKENS", tokens),
                ("KV", tile),
                ("STAGES", stages),
                ("Q_STAGES", 1 + narrow),
                ("TURNS", self.asked(target).turns.unwrap_or(narrow)),
                ("SLOTS", room),
                ("WINDOW", self.window.unwrap_or(0)),
                ("LAST", u32::from(self.last_only)),
                ("ONES", u32::from(ones)),
                ("TYPE", code(kv.dtype, "attention")?),
                ("YT", code(self.out.dtype, "attention")?),
            ])
            .grid(target.sms.min(slots * kv.heads), 1, 1)
            .threads(384)
            .shared(shared(tile))
            .arg(q)
            .arg(pages)
            .tensors(&[&self.out, &s.row_seat, &s.q_start, &s.kv_len, &s.page_table])
            .ints(&[self.rows, slots, s.limits.pages_per_seat, self.out.stride])
            .arg(Arg::F32(self.scale));
        Ok(kernel.lowered())
    }

    fn varlen(&self, target: &Target) -> Result<Lowered> {
        let (kv, s) = (&self.kv, &self.state);
        let warps = self.asked(target).warps.unwrap_or(4);
        let tokens = (16 * warps / (self.q_heads / kv.heads)).max(1);
        let kernel = Kernel::new(target, "attention_varlen", "attention_varlen")
            .defines(&[
                ("D", kv.head_dim),
                ("HQ", self.q_heads),
                ("HKV", kv.heads),
                ("PAGE", kv.page_size),
                ("WARPS", warps),
                ("Q_TOKENS", tokens),
                ("WINDOW", self.window.unwrap_or(0)),
                ("TYPE", code(kv.dtype, "attention")?),
                ("YT", code(self.out.dtype, "attention")?),
            ])
            .grid(kv.heads, self.out.rows / tokens + self.rows, 1)
            .threads(warps * 32)
            .shared(2 * 2 * 64 * (2 * kv.head_dim + 16))
            .tensors(&[&self.qkv])
            .spans(&[kv.span])
            .tensors(&[&self.out, &s.row_seat, &s.q_start, &s.kv_len, &s.page_table])
            .ints(&[self.rows, s.limits.pages_per_seat, self.qkv.stride, self.out.stride])
            .arg(Arg::F32(self.scale));
        Ok(kernel.lowered())
    }

    fn reference_launch(&self, target: &Target) -> Result<Lowered> {
        let (kv, s) = (&self.kv, &self.state);
        let kernel = Kernel::new(target, "attention_ref", "attention_ref")
            .defines(&[
                ("D", kv.head_dim),
                ("HQ", self.q_heads),
                ("HKV", kv.heads),
                ("PAGE", kv.page_size),
                ("WINDOW", self.window.unwrap_or(0)),
                ("SINGLE", u32::from(self.single)),
                ("XT", code(self.qkv.dtype, "attention")?),
                ("KT", code(kv.dtype, "attention")?),
                ("YT", code(self.out.dtype, "attention")?),
            ])
            .grid(self.out.rows, self.q_heads, 1)
            .threads(128)
            .tensors(&[&self.qkv])
            .spans(&[kv.span])
            .tensors(&[&self.out, &s.row_seat, &s.q_start, &s.kv_len, &s.page_table, &s.token_row])
            .ints(&[self.rows, s.limits.pages_per_seat, self.qkv.stride, self.out.stride])
            .arg(Arg::F32(self.scale));
        Ok(kernel.lowered())
    }
}
