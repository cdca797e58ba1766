//! AMX: eight lines of a packed block are one tile of weights, 16 rows of activations × 32 columns one tile of the
//! other operand. Multiplying them gives 16 × 16 exact integers, which AVX-512 scales and adds. Weights are unpacked
//! once per group and used for every row of activations.
#![cfg(target_arch = "x86_64")]

use super::packed::{AHEAD, Task};
use crate::DType;
use crate::cpu::pack::{self, COLS, ROWS, SCALES};
use std::arch::asm;
use std::arch::x86_64::*;

/// Rows of activations per tile.
const TILE: usize = 16;
/// Bytes of an unpacked block.
const BLOCK: usize = ROWS * COLS;

/// Bytes of the result tiles.
const DOTS: usize = 4 * 1024;

/// Bytes of scratch for weights of `cols` columns: values, scales, minima, and four result tiles.
pub(super) fn own_bytes(cols: usize) -> usize {
    let blocks = cols / COLS;
    blocks * (BLOCK + 2 * 64) + DOTS + 64
}

/// The shapes of the tile registers, as the processor reads them.
#[repr(C, align(64))]
pub(super) struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Bytes per row.
    pub(super) row_bytes: [u16; 16],
    pub(super) rows: [u8; 16],
}

impl Config {
    /// No tile has any rows.
    pub(super) const EMPTY: Config =
        Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
}

/// Results are 0 and 3, activations 1 and 4, weights 2 and 5.
static CONFIG: Config = {
    let mut config = Config::EMPTY;
    let mut i = 0;
    while i < 6 {
        config.row_bytes[i] = if i % 3 == 1 { COLS as u16 } else { 64 };
        config.rows[i] = if i % 3 == 2 { COLS as u8 / 4 } else { TILE as u8 };
        i += 1;
    }
    config
};

/// A group's weights, ready for every tile of activations.
struct Group {
    values: *const u8,
    /// Bytes from one block's values to the next.
    step: usize,
    d: *mut f32,
    m: *mut f32,
    /// The next group's blocks, of `packed` bytes each, if this worker multiplies it, too.
    next: Option<*const u8>,
    packed: usize,
}

impl Group {
    /// Prefetches a part of the next group while two blocks of this one are multiplied with the tile at `row` of
    /// `rows`, which spreads the memory traffic evenly. The first two tiles share the prefetches.
    #[inline(always)]
    fn fetch(&self, rows: usize, row: usize, at: usize) {
        let Some(next) = self.next.filter(|_| row < 2 * TILE) else { return };
        let bytes = 2 * self.packed;
        let (from, bytes) = match rows {
            0..=TILE => (at * self.packed, bytes),
            _ => (at * self.packed + row / TILE * self.packed, bytes / 2),
        };
        for line in 0..bytes / 64 {
            // SAFETY: a prefetch may point anywhere.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(from + 64 * line).cast()) };
        }
    }
}

/// Groups of 16 weight rows for every row of activations.
///
/// # Safety
/// As [`Task::run`]; the processor has AMX int8 and the system permits it.
pub(super) unsafe fn run(task: &Task<'_>, groups: std::ops::Range<usize>) {
    // SAFETY: the caller's promise; the tile state is released before anything else runs.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly));
        let last = groups.end;
        for group in groups {
            match task.dtype {
                DType::P4 => run_group::<false>(task, group, group + 1 < last),
                _ => run_group::<true>(task, group, group + 1 < last),
            }
        }
        asm!("tilerelease", options(nostack, nomem));
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn run_group<const P8: bool>(task: &Task<'_>, group: usize, more: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        let weights = unpack::<P8>(task, group, more);
        for row in (0..task.rows).step_by(TILE) {
            tile::<P8>(task, &weights, group, row);
        }
    }
}

/// Values as unsigned bytes and scales as f32, in the worker's scratch.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack<const P8: bool>(task: &Task<'_>, group: usize, more: bool) -> Group {
    let blocks = task.acts.blocks();
    let bytes = pack::block_bytes(task.dtype);
    let from = task.w.wrapping_add(group * task.group_bytes());
    let d = task.own.wrapping_add(DOTS).cast::<f32>();
    let m = d.wrapping_add(16 * blocks);
    let values = m.wrapping_add(16 * blocks).cast::<u8>();
    let low = _mm512_set1_epi8(15);
    // SAFETY: the group lies in w; the scratch has `own_bytes`.
    unsafe {
        for at in 0..blocks {
            let block = from.add(at * bytes);
            for line in 0..bytes / 64 {
                // A prefetch may point anywhere.
                _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(AHEAD + 64 * line).cast());
            }
            let scale = _mm512_cvtph_ps(_mm256_loadu_si256(block.cast()));
            let min = _mm512_cvtph_ps(_mm256_loadu_si256(block.add(2 * ROWS).cast()));
            _mm512_storeu_ps(d.add(16 * at), scale);
            _mm512_storeu_ps(m.add(16 * at), min);
            if !P8 {
                for g in 0..4 {
                    let line = _mm512_loadu_si512(block.add(SCALES + 64 * g).cast());
                    let to = values.add(at * BLOCK + 64 * g);
                    _mm512_storeu_si512(to.cast(), _mm512_and_si512(line, low));
                    let high = _mm512_and_si512(_mm512_srli_epi16::<4>(line), low);
                    _mm512_storeu_si512(to.add(256).cast(), high);
                }
            }
        }
    }
    let (values, step) =
        if P8 { (from.wrapping_add(SCALES), bytes) } else { (values.cast_const(), BLOCK) };
    let next = more.then_some(from.wrapping_add(task.group_bytes()));
    Group { values, step, d, m, next, packed: bytes }
}

/// Runs the body for r = 0..16, each r a constant, so that arrays stay in registers.
macro_rules! each_row {
    ($r:ident => $body:block) => {
        each_row!(@ $r $body; 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $r:ident $body:block; $($i:literal)*) => {
        $({
            const $r: usize = $i;
            $body
        })*
    };
}

/// 16 rows of activations from `row` on.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn tile<const P8: bool>(task: &Task<'_>, weights: &Group, group: usize, row: usize) {
    let acts = task.acts;
    let blocks = acts.blocks();
    let mut acc = [_mm512_setzero_ps(); TILE];
    // SAFETY: activations are laid out in whole tiles of rows; the result tiles are the front of the
    // scratch.
    unsafe {
        let first = acts.index(row, 0);
        let q = acts.q.add(first * COLS).cast::<u8>();
        let (d, s, z) = (acts.d.add(first), acts.s.add(first), acts.z.add(first));
        let dots = task.own.cast::<i32>();
        // A macro, not a closure: `acc` must stay in registers.
        macro_rules! add {
            ($at:expr, $dots:expr) => {
                let (at, dots): (usize, *const i32) = ($at, $dots);
                let scale = _mm512_loadu_ps(weights.d.add(16 * at));
                let min = _mm512_loadu_ps(weights.m.add(16 * at));
                let (d, s, z) = (d.add(TILE * at), s.add(TILE * at), z.add(TILE * at));
                each_row!(R => {
                    let mut dot = _mm512_loadu_si512(dots.add(16 * R).cast());
                    if P8 {
                        dot = _mm512_add_epi32(dot, _mm512_set1_epi32(*z.add(R)));
                    }
                    let both = _mm512_mul_ps(scale, _mm512_set1_ps(*d.add(R)));
                    acc[R] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), both, acc[R]);
                    acc[R] = _mm512_fmadd_ps(min, _mm512_set1_ps(*s.add(R)), acc[R]);
                });
            };
        }
        // A macro for the same reason. Multiplies two blocks, into one of two pairs of result tiles.
        macro_rules! multiply {
            ($at:expr) => {
                let at: usize = $at;
                let w = weights.values.add(at * weights.step);
                asm!(
                    "tilezero tmm0",
                    "tilezero tmm3",
                    "tileloadd tmm1, [{q} + {row}]",
                    "tileloadd tmm2, [{w0} + {line}]",
                    "tdpbsud tmm0, tmm1, tmm2",
                    "tileloadd tmm4, [{q} + {row} + 512]",
                    "tileloadd tmm5, [{w1} + {line}]",
                    "tdpbsud tmm3, tmm4, tmm5",
                    "tilestored [{dots} + {line}], tmm0",
                    "tilestored [{dots} + {line} + 1024], tmm3",
                    q = in(reg) q.add(at * TILE * COLS),
                    row = in(reg) COLS,
                    w0 = in(reg) w,
                    w1 = in(reg) w.add(weights.step),
                    line = in(reg) 64usize,
                    dots = in(reg) dots.add(256 * (at % 4)),
                    out("tmm0") _, out("tmm1") _, out("tmm2") _,
                    out("tmm3") _, out("tmm4") _, out("tmm5") _,
                    options(nostack),
                );
            };
        }
        // Multiply the next pair before adding this one: instructions that wait for a tile fill the processor's
        // reorder window, and nothing after them would start.
        let pairs = blocks / 2;
        if pairs > 0 {
            multiply!(0);
        }
        for pair in 0..pairs {
            weights.fetch(task.rows, row, 2 * pair);
            if pair + 1 < pairs {
                multiply!(2 * pair + 2);
            }
            let dots = dots.add(512 * (pair % 2));
            add!(2 * pair, dots);
            add!(2 * pair + 1, dots.add(256));
        }
        let at = 2 * pairs;
        if at < blocks {
            asm!(
                "tilezero tmm0",
                "tileloadd tmm1, [{q} + {row}]",
                "tileloadd tmm2, [{w} + {line}]",
                "tdpbsud tmm0, tmm1, tmm2",
                "tilestored [{dots} + {line}], tmm0",
                q = in(reg) q.add(at * TILE * COLS),
                row = in(reg) COLS,
                w = in(reg) weights.values.add(at * weights.step),
                line = in(reg) 64usize,
                dots = in(reg) dots,
                out("tmm0") _, out("tmm1") _, out("tmm2") _,
                options(nostack),
            );
            add!(at, dots);
        }
    }
    for (i, acc) in acc.into_iter().enumerate().take(task.rows - row) {
        // SAFETY: this task alone computes the group.
        unsafe { task.finish.lanes16(row + i, group * ROWS, acc) };
    }
}
