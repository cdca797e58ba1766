//! Packed weights: integer dot products of 16 rows at a time.

use super::acts::Acts;
use super::finish::Finish;
use super::ggml;
#[cfg(target_arch = "x86_64")]
use super::{amx, avx2, avx512, vnni};
use crate::DType;
use crate::cpu::features::Features;
use crate::cpu::numerics::Lowering;
use crate::cpu::pack::{self, COLS, ROWS};
use crate::cpu::quant::half_at;
use crate::cpu::simd::Level;

/// Which instructions are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ops) enum Kind {
    /// Matrix tiles for many rows, AVX-512 for few.
    Amx,
    /// AVX-512 dot products of bytes.
    Vnni,
    /// AVX-512 without them.
    Avx512,
    /// AVX2.
    Avx2,
    /// Plain loops, vectorised by the compiler.
    Portable,
    /// Sums in ggml's order, by AVX-512 dot products of bytes if `vnni`.
    Ggml { level: Level, vnni: bool },
}

impl Kind {
    /// The best the processor has.
    pub(in crate::ops) fn of(lowering: &Lowering) -> Kind {
        if lowering.ggml() {
            return Kind::Ggml { level: lowering.level, vnni: lowering.features.vnni };
        }
        match &lowering.features {
            Features { vnni: true, amx_int8: true, .. } => Kind::Amx,
            Features { vnni: true, .. } => Kind::Vnni,
            Features { avx512: true, .. } => Kind::Avx512,
            Features { avx2: true, .. } => Kind::Avx2,
            _ => Kind::Portable,
        }
    }
}

/// Bytes of scratch a worker needs.
#[cfg(target_arch = "x86_64")]
pub(in crate::ops) fn own_bytes(cols: usize) -> usize {
    amx::own_bytes(cols)
}

/// Bytes of scratch a worker needs.
#[cfg(not(target_arch = "x86_64"))]
pub(in crate::ops) fn own_bytes(_cols: usize) -> usize {
    0
}

/// How many bytes ahead of the current block are prefetched.
#[cfg(target_arch = "x86_64")]
pub(in crate::ops) const AHEAD: usize = 2560;

/// From this many rows of activations on, unpacking weights for tiles is worth it.
pub(in crate::ops) const MANY: usize = 12;

/// The second phase of a linear.
pub(in crate::ops) struct Task<'a> {
    pub(in crate::ops) dtype: DType,
    pub(in crate::ops) w: *const u8,
    pub(in crate::ops) acts: &'a Acts,
    pub(in crate::ops) rows: usize,
    pub(in crate::ops) finish: &'a Finish,
    /// The worker's scratch of [`own_bytes`].
    pub(in crate::ops) own: *mut u8,
}

impl Task<'_> {
    /// Bytes of 16 rows of w.
    pub(in crate::ops) fn group_bytes(&self) -> usize {
        self.acts.blocks() * pack::block_bytes(self.dtype)
    }

    /// Groups of 16 rows of w for every row of activations.
    ///
    /// # Safety
    /// The groups lie in w, the activations are prepared, the processor has `kind`, and no other thread computes
    /// these groups.
    pub(in crate::ops) unsafe fn run(&self, kind: Kind, groups: std::ops::Range<usize>) {
        let p4 = self.dtype == DType::P4;
        // SAFETY: the caller's promise.
        unsafe {
            match kind {
                #[cfg(target_arch = "x86_64")]
                Kind::Amx if self.rows >= MANY => amx::run(self, groups),
                #[cfg(target_arch = "x86_64")]
                Kind::Amx | Kind::Vnni if p4 => vnni::run::<false>(self, groups),
                #[cfg(target_arch = "x86_64")]
                Kind::Amx | Kind::Vnni => vnni::run::<true>(self, groups),
                #[cfg(target_arch = "x86_64")]
                Kind::Avx512 if p4 => avx512::run::<false>(self, groups),
                #[cfg(target_arch = "x86_64")]
                Kind::Avx512 => avx512::run::<true>(self, groups),
                #[cfg(target_arch = "x86_64")]
                Kind::Avx2 => avx2::run(self, groups),
                Kind::Ggml { level, vnni } => ggml::run(self, level, vnni, groups),
                _ => self.portable(groups),
            }
        }
    }

    unsafe fn portable(&self, groups: std::ops::Range<usize>) {
        let bytes = self.group_bytes();
        for group in groups {
            // SAFETY: a group of w.
            let weights = unsafe { std::slice::from_raw_parts(self.w.add(group * bytes), bytes) };
            for row in 0..self.rows {
                let mut products = [0.0f32; ROWS];
                let blocks = weights.chunks_exact(pack::block_bytes(self.dtype));
                for (at, block) in blocks.enumerate() {
                    // SAFETY: a row that was prepared.
                    let (q, d, s, z) = unsafe {
                        let index = self.acts.index(row, at);
                        (
                            &*self.acts.q.add(index * COLS).cast::<[i8; COLS]>(),
                            *self.acts.d.add(index),
                            *self.acts.s.add(index),
                            *self.acts.z.add(index),
                        )
                    };
                    let dots = match self.dtype {
                        DType::P4 => dots_p4(&block[pack::SCALES..], q),
                        _ => dots_p8(&block[pack::SCALES..], q, z),
                    };
                    for r in 0..ROWS {
                        let scale = half_at(block, 2 * r) * d;
                        let min = half_at(block, 2 * ROWS + 2 * r);
                        products[r] += scale * dots[r] as f32 + min * s;
                    }
                }
                self.finish.row16(row, group * ROWS, &mut products);
            }
        }
    }
}

fn dots_p4(lines: &[u8], q: &[i8; COLS]) -> [i32; ROWS] {
    let mut dots = [0i32; ROWS];
    for (g, line) in lines.chunks_exact(64).enumerate() {
        for (i, byte) in line.iter().enumerate() {
            let (low, high) = (i32::from(byte & 15), i32::from(byte >> 4));
            let c = 4 * g + i % 4;
            dots[i / 4] += low * i32::from(q[c]) + high * i32::from(q[16 + c]);
        }
    }
    dots
}

fn dots_p8(lines: &[u8], q: &[i8; COLS], z: i32) -> [i32; ROWS] {
    let mut dots = [z; ROWS];
    for (g, line) in lines.chunks_exact(64).enumerate() {
        for (i, byte) in line.iter().enumerate() {
            dots[i / 4] += i32::from(*byte) * i32::from(q[4 * g + i % 4]);
        }
    }
    dots
}
