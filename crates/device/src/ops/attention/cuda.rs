//! Half formats, pages of 16 and heads of up to 256: `kernels/attention.cu` for decode, also with the drafts of each row
//! packed into the columns of a tile. Rows of many tokens:
//! `kernels/attention_wgmma.cu` on Hopper with heads of 64 or 128 and scores without a cap (if there can be many
//! rows, those of one token run in the decode kernel, whose blocks are small), else `kernels/attention_varlen.cu`.
//! Everything else: `kernels/attention_ref.cu`. Attention both ways never runs in the decode kernel.
//!
//! [`Pick::Fixed`]: the decode kernel without splits for any number of tokens. A variant that was requested by name
//! and cannot run is an error.

use crate::Result;
use crate::cuda::launch::{Arg, Lowered, Target, TensorMap};
use crate::cuda::lower::{Kernel, SEMAPHORE_BYTES, aligned, code};
use crate::op::{Attention, AttentionChain, KvLayer, Norm, RopeKv};
use crate::ops::prologue::cuda::ways;
use crate::ops::require;
use crate::step::count;
use crate::variant::{AttentionKernel, AttentionVariant, Pick, Variant};
use crate::{DType, Span, Tensor};

const WARPS: u32 = 4;
/// Blocks of tokens that the Hopper kernel's list has room for.
const MOST_SLOTS: u32 = 3072;
/// From this many rows on, a step may have enough rows of one token to be worth a separate launch.
const MANY_ROWS: u32 = 32;
/// Up to this many tokens of a sequence, most of a wide tile of the Hopper kernel would be masked.
const SHORT: u32 = 1024;

impl AttentionChain {
    pub(crate) fn scratch_bytes(&self, target: &Target) -> u64 {
        let ones = self.takes_ones(target).then(|| self.of_ones());
        let (split, y, z) = ones.as_ref().unwrap_or(self).pieces(target);
        if !self.tensor_cores(target) || split == 0 || !self.attention.causal {
            return 0;
        }
        let parts = u64::from(y * z) * u64::from(self.attention.kv.heads);
        SEMAPHORE_BYTES + parts * u64::from(ones.as_ref().unwrap_or(self).part_bytes())
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        self.check_variant(target)?;
        if let Some(rope) = &self.rope {
            rope.require_halves()?;
        }
        if self.tensor_cores(target) {
            let (room, needs) = (
                self.attention.scratch.map_or(0, |scratch| scratch.len),
                self.scratch_bytes(target),
            );
            require(room >= needs, Self::NAME, || {
                format!("the kernel needs {needs} bytes of scratch and has {room}")
            })?;
            require(
                self.rope.is_none() || self.decodes() || self.attention.single,
                Self::NAME,
                || "no kernel rotates so many tokens of a row".into(),
            )?;
            return Ok(match (self.decodes() || self.fixed(), self.attention.kv.head_dim) {
                (_, 64 | 128) if !self.attention.causal && self.warpgroups(target) => {
                    vec![self.wgmma(target, true)?]
                }
                _ if !self.attention.causal => vec![self.varlen(target)?],
                (false, 64 | 128) if self.takes_ones(target) => {
                    vec![self.wgmma(target, false)?, self.of_ones().fast(target, true)?]
                }
                (false, 64 | 128) if self.warpgroups(target) => vec![self.wgmma(target, true)?],
                (false, _) => vec![self.varlen(target)?],
                (true, _) => vec![self.fast(target, false)?],
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
        if !self.attention.single || !self.tensor_cores(target) {
            return Vec::new();
        }
        let plain = AttentionVariant::default();
        let clusters = [1, 2, 4, 8].into_iter().filter(|_| self.attention.rows <= 16);
        let clusters = clusters.filter(|cluster| *cluster != self.cluster(target));
        let clusters = clusters.map(|cluster| AttentionVariant { cluster: Some(cluster), ..plain });
        let (_, own, _) = self.shape(target);
        let stages = [2, 3].into_iter().filter(|stages| *stages != own);
        let stages = stages.map(|stages| AttentionVariant { stages: Some(stages), ..plain });
        let least = [2, 8].map(|least| AttentionVariant { least: Some(least), ..plain });
        let warps = AttentionVariant { warps: Some(8), stages: Some(2), ..plain };
        let all = least.into_iter().chain([warps]).chain(stages).chain(clusters);
        let worth = |variant: &AttentionVariant| {
            let attention = Attention { pick: Pick::Named(*variant), ..self.attention.clone() };
            AttentionChain { attention, ..self.clone() }.check_variant(target).is_ok()
        };
        all.filter(worth).map(Variant::Attention).collect()
    }

    /// The requested variant, else the one measured to be best, else the default.
    fn asked(&self, target: &Target) -> AttentionVariant {
        let measured = || target.tuned.variant(&self.shape_text()?).copied();
        match self.attention.pick {
            Pick::Named(variant) => variant,
            Pick::Best if self.attention.single => match measured() {
                Some(Variant::Attention(variant)) => variant,
                _ => AttentionVariant::default(),
            },
            Pick::Best | Pick::Rule | Pick::Fixed => AttentionVariant::default(),
        }
    }

    /// Refuses settings that the selected kernel does not support.
    fn check_variant(&self, target: &Target) -> Result<()> {
        let asked = self.asked(target);
        let AttentionVariant { kernel, warps, stages, least, cluster, kv, turns } = asked;
        let cores = self.tensor_cores(target);
        let decode = cores && self.decodes();
        let hopper = cores && !decode && matches!(self.attention.kv.head_dim, 64 | 128);
        let hopper = hopper && self.warpgroups(target);
        let clusters = self.decodes() && target.capability.0 >= 9;
        let fits = !cores || !(self.decodes() || self.fixed()) || {
            let (tokens, _, shared) = self.shape(target);
            shared + self.static_bytes(tokens, self.warps(target)) <= target.shared_per_block
        };
        let can = match kernel {
            Some(AttentionKernel::Reference) => {
                [warps, stages, least, cluster, kv, turns] == [None; 6]
            }
            Some(AttentionKernel::Mma) => cores,
            None => true,
        };
        let can = can
            && fits
            && (least.is_none() || decode)
            && (warps.is_none() || (cores && !hopper))
            && (stages.is_none() || decode || hopper)
            && cluster.is_none_or(|n| n == 1 || (decode && clusters && [2, 4, 8].contains(&n)))
            && ((kv.is_none() && turns.is_none()) || hopper);
        require(can, Self::NAME, || {
            let (rows, heads, dim) =
                (self.attention.rows, self.attention.q_heads, self.attention.kv.head_dim);
            format!(
                "no kernel `{asked}` for {rows} rows of {heads} heads of {dim} on {}",
                target.arch()
            )
        })
    }

    fn named(&self) -> Option<AttentionKernel> {
        match self.attention.pick {
            Pick::Named(variant) => variant.kernel,
            Pick::Best | Pick::Rule | Pick::Fixed => None,
        }
    }

    fn tensor_cores(&self, target: &Target) -> bool {
        let kv = &self.attention.kv;
        let x = self.attention.qkv.dtype;
        let bytes = kv.dtype == DType::E4M3 && target.capability >= (8, 9);
        let half = matches!(x, DType::F16 | DType::BF16) && (x == kv.dtype || bytes);
        let norms = self.rope.iter().flat_map(|rope| [rope.q_norm, rope.k_norm]).flatten();
        let norms_fit = norms
            .map(|norm: Norm| norm.weight.dtype)
            .all(|dtype| dtype == DType::F32 || dtype == x);
        let dims = kv.head_dim.is_multiple_of(16) && kv.head_dim <= 256 && kv.page_size == 16;
        let group = self.group();
        let group_fits = group * kv.head_dim <= 4096 && group <= 32;
        let asked = self.named() != Some(AttentionKernel::Reference);
        let out = self.attention.out.stride.is_multiple_of(4)
            && self.attention.out.span.offset.is_multiple_of(16);
        asked
            && half
            && norms_fit
            && dims
            && group_fits
            && out
            && aligned(&self.attention.qkv)
            && target.capability.0 >= 8
    }

    /// Query heads that share a KV head.
    fn group(&self) -> u32 {
        self.attention.q_heads / self.attention.kv.heads
    }

    /// Columns of a tile: packed tokens and query heads.
    fn columns(&self) -> u32 {
        if self.attention.kv.head_dim > 128 { 8 } else { 32 }
    }

    /// Tokens of every row, where the decode kernel takes whole rows; else 0.
    fn each(&self) -> u32 {
        let fits = |each: &u32| each * self.group() <= self.columns() && !self.fixed();
        let even = self.attention.even.filter(fits).filter(|_| self.attention.causal);
        if self.attention.single { 1 } else { even.unwrap_or(0) }
    }

    /// Whether the decode kernel takes whole rows, and splits long ones.
    fn decodes(&self) -> bool {
        self.each() > 0
    }

    /// Whether its kernel can also do `rope`, the op before it, for rows of several tokens.
    pub(crate) fn can_rotate(&self, rope: &RopeKv, target: &Target) -> bool {
        let fused = AttentionChain { rope: Some(Box::new(rope.clone())), ..self.clone() };
        self.rope.is_none()
            && self.attention.even.is_some()
            && fused.check().is_ok()
            && rope.require_halves().is_ok()
            && fused.tensor_cores(target)
            && fused.decodes()
            && fused.check_variant(target).is_ok()
    }

    /// A kernel with the macros that all kernels of attention have.
    fn kernel(&self, target: &Target, name: &str) -> Kernel {
        let kv = &self.attention.kv;
        let kernel = Kernel::new(target, name, name).defines(&[
            ("D", kv.head_dim),
            ("HQ", self.attention.q_heads),
            ("HKV", kv.heads),
            ("PAGE", kv.page_size),
        ]);
        if self.narrow() && name != "attention_ref" { kernel.define("KT", 3) } else { kernel }
    }

    /// Whether pages are e4m3.
    fn narrow(&self) -> bool {
        self.attention.kv.dtype == DType::E4M3
    }

    /// Bytes from one token's keys to the next in shared memory.
    fn pitch(&self) -> u32 {
        let dim = self.attention.kv.head_dim;
        match self.narrow() {
            true if dim.is_multiple_of(128) => dim,
            true => ((dim / 16) | 1) * 16,
            false => 2 * dim + 16,
        }
    }

    /// Where results go, and the tables that say which tokens and pages each row has.
    fn tables(&self) -> [&Tensor; 5] {
        let s = &self.attention.state;
        [&self.attention.out, &s.row_seat, &s.q_start, &s.kv_len, &s.page_table]
    }

    /// The sizes of those tables and of the rows of q, k and v.
    fn sizes(&self) -> [u32; 4] {
        let Attention { rows, state, qkv, out, .. } = &self.attention;
        [*rows, state.limits.pages_per_seat, qkv.stride, out.stride]
    }

    /// How rows are split into pieces (SPLIT in the kernel), and blocks per KV head in two dimensions. With a few
    /// rows each row has its own pieces. With more rows all rows share a list of pieces, so that few blocks are
    /// without work. Many rows fill the GPU without splitting.
    fn pieces(&self, target: &Target) -> (u32, u32, u32) {
        let ways = (ways(self.attention.rows, target) * 8).div_ceil(self.attention.kv.heads);
        // A word for each row and KV head counts the pieces that are done.
        let counted = u64::from(self.attention.rows) * u64::from(self.attention.kv.heads) * 4
            <= SEMAPHORE_BYTES;
        match self.attention.rows {
            _ if self.fixed() || !counted => (0, self.attention.rows, 1),
            0..=4 if self.decodes() => {
                let (cluster, rows) = (self.cluster(target), self.attention.rows);
                (2, (ways / rows.max(1)).max(8).div_ceil(cluster), rows)
            }
            5..=64 if self.decodes() => {
                (1, self.attention.rows + ways.div_ceil(self.cluster(target)), 1)
            }
            _ => (0, self.attention.rows, 1),
        }
    }

    /// Blocks that suit a cluster, where there can be clusters.
    fn suited_cluster(&self, target: &Target) -> Option<u32> {
        let clusters = self.decodes() && !self.fixed() && target.capability.0 >= 9;
        clusters.then_some(match self.attention.rows {
            // Clusters of eight leave some multiprocessors unused, so they are only for contexts that do not need all
            // of them: 8 k tokens, and the drafts after them.
            1 | 2 if self.context() <= (8 << 10) + self.room_for_drafts() => 8,
            5..=16 => 2,
            _ => 1,
        })
    }

    /// Blocks that share a piece and merge in shared memory.
    fn cluster(&self, target: &Target) -> u32 {
        let asked = self.asked(target).cluster;
        let Some(suited) = self.suited_cluster(target) else { return 1 };
        // The partial results of a cluster's blocks must fit beside the rings.
        let each = self.each().max(1);
        let warps = self.warps(target);
        let rings = (2 * warps * self.stage_bytes()).max(warps * self.part_bytes());
        let rings = rings + self.static_bytes(each, warps);
        let fits = |cluster: &u32| self.exchanged(*cluster) + rings <= target.shared_per_block;
        let fitting = [8, 4, 2].into_iter().find(|cluster| *cluster <= suited && fits(cluster));
        asked.unwrap_or(fitting.unwrap_or(1))
    }

    /// Bytes that the blocks of a cluster leave for each of them: of its share of the columns, from every block.
    fn exchanged(&self, cluster: u32) -> u32 {
        let columns = (self.each().max(1) * self.group()).div_ceil(cluster);
        let words = columns * (self.attention.kv.head_dim + 4);
        if cluster > 1 { cluster * words * 4 } else { 0 }
    }

    /// Bytes of the partial result of a piece.
    fn part_bytes(&self) -> u32 {
        self.each().max(1) * self.group() * (self.attention.kv.head_dim + 4) * 4
    }

    /// Warps that share the pages of a piece: fewer if two stages of each do not fit.
    fn warps(&self, target: &Target) -> u32 {
        let fits = |warps: &u32| {
            let rings = (2 * warps * self.stage_bytes()).max(warps * self.part_bytes());
            rings + self.static_bytes(self.each().max(1), *warps) <= target.shared_per_block
        };
        // A warp is done with a page of bytes so soon that more of them pay, where blocks are few.
        let many = self.few_bytes() && !(9..=16).contains(&self.attention.rows);
        let most = if many { [2 * WARPS, WARPS, 2] } else { [WARPS, WARPS, 2] };
        let suited = || most.into_iter().find(fits).unwrap_or(1);
        self.asked(target).warps.unwrap_or_else(suited)
    }

    /// Whether this is a decode step of few rows over pages of e4m3.
    fn few_bytes(&self) -> bool {
        self.narrow() && self.decodes() && !self.fixed() && self.attention.rows <= 32
    }

    /// Bytes of a page's keys and values of a head in a ring.
    fn stage_bytes(&self) -> u32 {
        2 * 16 * self.pitch()
    }

    /// Static shared memory of the decode kernel for this many tokens and warps: queries, the newest tokens, maxima
    /// and totals.
    fn static_bytes(&self, tokens: u32, warps: u32) -> u32 {
        let (dim, group) = (self.attention.kv.head_dim, self.group());
        let columns = (tokens * group).next_multiple_of(8);
        let newest = if self.rope.is_some() { tokens } else { 1 };
        columns * (2 * (dim + 8) + 8 * warps) + newest * 4 * dim + 64
    }

    /// (tokens per block, stages, dynamic shared memory).
    fn shape(&self, target: &Target) -> (u32, u32, u32) {
        let (dim, group) = (self.attention.kv.head_dim, self.group());
        let tokens = match self.each() {
            0 => (self.columns() / group).max(1),
            each => each,
        };
        let stage = self.stage_bytes();
        let warps = self.warps(target);
        let cluster = self.cluster(target);
        let left = self.exchanged(cluster);
        // Two blocks per multiprocessor; three with shallower rings if the last round of blocks is then as full.
        let room = (108u32 << 10).saturating_sub(left);
        let deep = (room / (warps * stage)).clamp(2, 4);
        let filled = |stages: u32| {
            let (items, each) = (
                self.attention.rows * self.attention.kv.heads,
                warps * stages * stage + left + 1024,
            );
            let slots = target.sms * (target.shared_per_sm / each).max(1);
            f64::from(items) / f64::from(items.next_multiple_of(slots))
        };
        let shallow = self.decodes() && !self.fixed() && filled(2) >= filled(deep);
        let suited = match self.narrow() && self.decodes() && !self.fixed() {
            true if self.few_bytes() && warps > WARPS => 2,
            // Four blocks of bytes on a multiprocessor.
            true => ((48 << 10) / (warps * stage)).clamp(2, 4),
            false if shallow => 2,
            false => deep,
        };
        let stages = self.asked(target).stages.unwrap_or(suited);
        let merged = warps * tokens * group * (dim + 4) * 4;
        let shared = (warps * stages * stage).max(merged) + left;
        (tokens, stages, shared)
    }

    /// Whether rows of one token, among rows of any length, are a launch of their own.
    fn takes_ones(&self, target: &Target) -> bool {
        let dims = matches!(self.attention.kv.head_dim, 64 | 128);
        let several = !self.decodes() && !self.fixed() && self.attention.causal;
        several && dims && self.warpgroups(target) && self.attention.rows >= MANY_ROWS
    }

    /// The rows of one token, among rows of any length.
    fn of_ones(&self) -> AttentionChain {
        let (single, even, pick) = (true, None, Pick::Best);
        let attention = Attention { single, even, pick, ..self.attention.clone() };
        AttentionChain { attention, ..self.clone() }
    }

    fn fast(&self, target: &Target, ones: bool) -> Result<Lowered> {
        let (kv, s) = (&self.attention.kv, &self.attention.state);
        let (split, y, z) = self.pieces(target);
        let scratch = self.attention.scratch.filter(|_| split > 0);
        let cluster = if split == 0 { 1 } else { self.cluster(target) };
        let (tokens, stages, shared) = self.shape(target);
        let rope = self.rope.as_deref();
        let (q_norm, k_norm) = rope.map_or((None, None), |rope| (rope.q_norm, rope.k_norm));
        let norm_type =
            |norm: Option<Norm>| norm.map_or(Ok(0), |norm| code(norm.weight.dtype, "attention"));
        let part = |from: u64, len: Option<u64>| {
            scratch.map(|scratch: Span| scratch.part(from, len.unwrap_or(scratch.len - from)))
        };
        let kernel = self
            .kernel(target, "attention")
            .defines(&[
                ("WARPS", self.warps(target)),
                ("STAGES", stages),
                ("SPLIT", split),
                ("CLUSTER", cluster),
                ("ROWS32", if split == 1 { self.attention.rows.div_ceil(32) } else { 1 }),
                ("LEAST_PAGES", self.asked(target).least.unwrap_or(WARPS)),
                ("SINGLE", u32::from(self.decodes())),
                ("ROPE", u32::from(rope.is_some())),
                ("Q_TOKENS", tokens),
                ("WINDOW", self.attention.window.unwrap_or(0)),
                ("TYPE", code(self.attention.qkv.dtype, "attention")?),
                ("YT", code(self.attention.out.dtype, "attention")?),
                ("QN", u32::from(q_norm.is_some())),
                ("KN", u32::from(k_norm.is_some())),
                ("QNT", norm_type(q_norm)?),
                ("KNT", norm_type(k_norm)?),
                ("COUNT_SPLIT", count::SPLIT),
                ("FIXED", u32::from(self.fixed())),
                ("ONES", u32::from(ones)),
            ])
            .softcap(self.attention.softcap);
        let kernel = kernel
            .grid(
                if self.decodes() {
                    kv.heads
                } else {
                    self.attention.out.rows / tokens + self.attention.rows
                },
                if self.decodes() { y * cluster } else { kv.heads },
                if self.decodes() { z } else { 1 },
            )
            .cluster_along_y(cluster)
            .threads(self.warps(target) * 32)
            .shared(shared)
            .tensors(&[&self.attention.qkv])
            .spans(&[kv.span])
            .tensors(&self.tables())
            .tensors(&[&s.counts])
            .optional(part(0, Some(SEMAPHORE_BYTES)))
            .optional(part(SEMAPHORE_BYTES, None))
            .optional(q_norm.map(|norm| norm.weight.span))
            .optional(k_norm.map(|norm| norm.weight.span))
            .optional(rope.map(|rope| rope.rope.span))
            .ints(&self.sizes())
            .ints(&rope.map_or([0, 1], |rope| [rope.rope.stride, rope.rope.rows]))
            .arg(Arg::F32(self.attention.scale))
            .arg(Arg::F32(q_norm.map_or(0.0, |norm| norm.eps)))
            .arg(Arg::F32(k_norm.map_or(0.0, |norm| norm.eps)))
            .page_scales(kv);
        Ok(self.sinks(kernel)?.lowered())
    }

    /// Tokens that a block of the Hopper kernel takes, and the highest number of such blocks in a step.
    fn packed(&self) -> (u32, u32) {
        let tokens = 128 / self.group();
        (tokens, self.attention.out.rows / tokens + self.attention.rows)
    }

    /// The longest a sequence can be.
    fn context(&self) -> u32 {
        self.attention.state.limits.context()
    }

    /// Tokens of the pages that a sequence has beyond its context, for drafts.
    fn room_for_drafts(&self) -> u32 {
        let limits = &self.attention.state.limits;
        limits.tokens_per_row.saturating_sub(1).next_multiple_of(limits.page_size)
    }

    fn warpgroups(&self, target: &Target) -> bool {
        let (_, slots) = self.packed();
        // The list of blocks is in shared memory; a word holds a row and a block.
        let listed = slots <= MOST_SLOTS && self.attention.rows <= u32::from(u16::MAX);
        let wide = self.attention.out.stride.is_multiple_of(8)
            && self.attention.qkv.span.offset.is_multiple_of(16);
        let asked = self.named() != Some(AttentionKernel::Mma) && !self.fixed();
        // A line of a page is a signed coordinate of the tensor map.
        let kv = &self.attention.kv;
        let lines = u64::from(kv.pages) * u64::from(kv.page_size) * 2 * u64::from(kv.heads);
        let mapped = lines <= i32::MAX as u64;
        // The kernel scales and exponentiates scores in one instruction, so it cannot apply a cap.
        let plain = self.attention.softcap.is_none();
        target.capability == (9, 0) && listed && wide && asked && mapped && plain
    }

    fn wgmma(&self, target: &Target, ones: bool) -> Result<Lowered> {
        let (kv, s) = (&self.attention.kv, &self.attention.state);
        let group = self.group();
        let (tokens, slots) = self.packed();
        let stages = self.asked(target).stages.unwrap_or(2);
        // Few sizes, so that buckets of a model share a kernel.
        let room = slots.max(512).next_power_of_two().min(MOST_SLOTS);
        // Wide tiles leave room for only one q, and their warpgroups do not take turns. Tiles of bytes lie beside them.
        let (raw, one_q) = (3, |tile: u32| tile > 128 || (self.narrow() && kv.head_dim == 128));
        let shared = |tile: u32| {
            let q = if one_q(tile) { 128 } else { 256 };
            let raw = if self.narrow() { raw * tile * kv.head_dim } else { 0 };
            2 * kv.head_dim * (q + 2 * stages * tile) + 1024 + raw
        };
        let wide = kv.head_dim == 128
            && !self.narrow()
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
            self.attention.qkv.span,
            self.attention.qkv.dtype,
            &[kv.head_dim.into(), self.attention.q_heads.into(), self.attention.qkv.rows.into()],
            &[bytes, u64::from(self.attention.qkv.stride) * 2],
            &[64, group, tokens],
        );
        let lines = u64::from(kv.pages) * u64::from(kv.page_size) * 2 * u64::from(kv.heads);
        let pages = match self.narrow() {
            true => Arg::Address(kv.span),
            false => {
                map(kv.span, kv.dtype, &[kv.head_dim.into(), lines], &[bytes], &[64, kv.page_size])
            }
        };
        let kernel = self
            .kernel(target, "attention_wgmma")
            .defines(&[
                ("Q_TOKENS", tokens),
                ("KV", tile),
                ("STAGES", stages),
                ("Q_STAGES", if one_q(tile) { 1 } else { 2 }),
                ("TURNS", self.asked(target).turns.unwrap_or(narrow)),
                ("SLOTS", room),
                ("WINDOW", self.attention.window.unwrap_or(0)),
                ("CAUSAL", u32::from(self.attention.causal)),
                ("LAST", u32::from(self.attention.last_only)),
                ("ONES", u32::from(ones)),
                ("TYPE", code(self.attention.qkv.dtype, "attention")?),
                ("YT", code(self.attention.out.dtype, "attention")?),
            ])
            .grid(target.sms.min(slots * kv.heads), 1, 1)
            .threads(384)
            .shared(shared(tile))
            .arg(q)
            .arg(pages)
            .tensors(&self.tables())
            .ints(&[self.attention.rows, slots, s.limits.pages_per_seat, self.attention.out.stride])
            .arg(Arg::F32(self.attention.scale))
            .page_scales(kv);
        let kernel = if self.narrow() { kernel.define("RAW", raw) } else { kernel };
        Ok(self.sinks(kernel)?.lowered())
    }

    fn varlen(&self, target: &Target) -> Result<Lowered> {
        let kv = &self.attention.kv;
        // Keys and values of two tiles; for wide heads smaller tiles, and the queries.
        let wide = kv.head_dim > 128;
        let shared = |warps: u32| {
            let queries = if wide { 16 * warps * (2 * kv.head_dim + 16) } else { 0 };
            2 * 2 * if wide { 32 } else { 64 } * self.pitch() + queries
        };
        let fits = |warps: &u32| shared(*warps) + 64 <= target.shared_per_block;
        let suited = || [WARPS, 2].into_iter().find(fits).unwrap_or(1);
        let warps = self.asked(target).warps.unwrap_or_else(suited);
        require(fits(&warps), Self::NAME, || {
            let (bytes, room) = (shared(warps), target.shared_per_block);
            format!("the kernel needs {bytes} bytes of shared memory and a block has {room}")
        })?;
        let tokens = (16 * warps / self.group()).max(1);
        let kernel = self
            .kernel(target, "attention_varlen")
            .defines(&[
                ("WARPS", warps),
                ("Q_TOKENS", tokens),
                ("WINDOW", self.attention.window.unwrap_or(0)),
                ("CAUSAL", u32::from(self.attention.causal)),
                ("TYPE", code(self.attention.qkv.dtype, "attention")?),
                ("YT", code(self.attention.out.dtype, "attention")?),
            ])
            .softcap(self.attention.softcap)
            .grid(kv.heads, self.attention.out.rows / tokens + self.attention.rows, 1)
            .threads(warps * 32)
            .shared(shared(warps))
            .tensors(&[&self.attention.qkv])
            .spans(&[kv.span])
            .tensors(&self.tables())
            .ints(&self.sizes())
            .arg(Arg::F32(self.attention.scale))
            .page_scales(kv);
        Ok(self.sinks(kernel)?.lowered())
    }

    /// The sinks as the last argument, and their type as a macro; without any the kernel has neither.
    fn sinks(&self, kernel: Kernel) -> Result<Kernel> {
        let Some(sinks) = &self.attention.sinks else { return Ok(kernel) };
        Ok(kernel.define("SINKS", code(sinks.dtype, "attention")?).spans(&[sinks.span]))
    }

    fn reference_launch(&self, target: &Target) -> Result<Lowered> {
        let (kv, s) = (&self.attention.kv, &self.attention.state);
        let kernel = self
            .kernel(target, "attention_ref")
            .defines(&[
                ("WINDOW", self.attention.window.unwrap_or(0)),
                ("CAUSAL", u32::from(self.attention.causal)),
                ("SINGLE", u32::from(self.attention.single)),
                ("XT", code(self.attention.qkv.dtype, "attention")?),
                ("KT", code(kv.dtype, "attention")?),
                ("YT", code(self.attention.out.dtype, "attention")?),
            ])
            .softcap(self.attention.softcap)
            .grid(self.attention.out.rows, self.attention.q_heads, 1)
            .threads(128)
            .tensors(&[&self.attention.qkv])
            .spans(&[kv.span])
            .tensors(&self.tables())
            .tensors(&[&s.token_row])
            .ints(&self.sizes())
            .arg(Arg::F32(self.attention.scale))
            .page_scales(kv);
        Ok(self.sinks(kernel)?.lowered())
    }
}

impl Kernel {
    /// The scales of keys and of values, for pages of e4m3.
    pub(in crate::ops) fn page_scales(self, kv: &KvLayer) -> Kernel {
        let half = kv.scale_bytes() / 2;
        match kv.scales.filter(|_| kv.dtype == DType::E4M3) {
            Some(scales) => self.spans(&[scales.part(0, half), scales.part(half, half)]),
            None => self,
        }
    }

    /// The soft cap as a constant; without one the macro stays undefined.
    fn softcap(self, cap: Option<f32>) -> Kernel {
        match cap {
            None => self,
            Some(cap) => self.define("SOFTCAP", format!("{cap:?}f")),
        }
    }
}
