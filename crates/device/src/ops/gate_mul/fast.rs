//! Gates on the CPU: the op itself, and the epilogue of linears.

use super::{Activation, GateMul};
use crate::Span;
use crate::cpu::ggml;
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::simd::{Level, exp, fma, levels};
use crate::cpu::step::{Scratch, Step, Team, chunks, part};
use crate::cpu::view::{Matrix, load_floats, store_floats};
use crate::ops::activate::activate;
use crate::ops::live_rows;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// An activation and the instructions it is computed with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gate {
    kind: Kind,
    level: Level,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Silu,
    GeluTanh,
    /// Another function, without a kernel for pairs.
    Other(Activation),
    /// With ggml's e^x.
    GgmlSilu,
    /// By ggml's table.
    GgmlGelu(&'static ggml::GeluTable),
}

impl Gate {
    pub(crate) fn new(act: Activation, lowering: &Lowering) -> Gate {
        let kind = match (act, lowering.ggml()) {
            (Activation::Silu, false) => Kind::Silu,
            (Activation::Silu, true) => Kind::GgmlSilu,
            (Activation::GeluTanh, false) => Kind::GeluTanh,
            (Activation::GeluTanh, true) => Kind::GgmlGelu(ggml::gelu_table()),
            (
                Activation::Gelu | Activation::Tanh | Activation::Relu | Activation::ReluSquared,
                _,
            ) => Kind::Other(act),
        };
        Gate { kind, level: lowering.level }
    }

    /// Combines gate and up to one value.
    #[inline]
    pub(crate) fn row(&self, pairs: &[f32], out: &mut [f32]) {
        // SAFETY: the level was detected.
        unsafe {
            match self.kind {
                Kind::Silu => silu_mul(self.level, pairs, out),
                Kind::GeluTanh => gelu_mul(self.level, pairs, out),
                Kind::Other(act) => {
                    let gates = pairs.iter().step_by(2);
                    out.iter_mut().zip(gates).for_each(|(out, gate)| *out = *gate);
                    activate(self.level, out, act);
                    let ups = pairs[1..].iter().step_by(2);
                    out.iter_mut().zip(ups).for_each(|(out, up)| *out *= up);
                }
                Kind::GgmlSilu => ggml::silu_mul(self.level, pairs, out),
                Kind::GgmlGelu(table) => ggml::gelu_mul(table, pairs, out),
            }
        }
    }

    /// As [`Gate::row`], eight at a time.
    #[inline]
    pub(crate) fn row16(&self, pairs: &[f32; 16], out: &mut [f32; 8]) {
        match self.kind {
            // SAFETY: the level was detected.
            Kind::Silu => unsafe { silu_mul16(self.level, pairs, out) },
            Kind::GeluTanh | Kind::Other(_) | Kind::GgmlSilu | Kind::GgmlGelu(_) => {
                self.row(pairs, out);
            }
        }
    }

    /// Whether there is [`Gate::lanes16`].
    #[cfg(target_arch = "x86_64")]
    #[inline]
    pub(crate) fn has_lanes16(&self) -> bool {
        matches!(self.kind, Kind::Silu)
    }

    /// As [`Gate::row16`], from a register, for the activations that [`Gate::has_lanes16`] names.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(crate) fn lanes16(&self, pairs: __m512) -> __m256 {
        silu_mul_avx512(pairs)
    }
}

/// Columns of `y` that are computed at a time.
const COLUMNS: usize = 2048;

/// Blocks of columns of all rows, divided among the threads.
struct GateMulStep {
    x: Matrix,
    y: Matrix,
    gate: Gate,
    live: Option<Span>,
    memory: CpuMemory,
}

impl GateMul {
    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        let (x, y) = (Matrix::new(memory, &self.x), Matrix::new(memory, &self.y));
        let gate = Gate::new(self.act, lowering);
        Box::new(GateMulStep { x, y, gate, live: self.live, memory: *memory })
    }
}

impl Step for GateMulStep {
    fn scratch(&self) -> Scratch {
        Scratch { shared: 0, own: 3 * COLUMNS * size_of::<f32>() }
    }

    fn run(&self, team: &Team<'_>) {
        let (rows, cols) = (live_rows(&self.memory, self.live, self.y.rows), self.y.cols);
        let blocks = cols.div_ceil(COLUMNS);
        let items = rows * blocks;
        // A few thousand elements take less time than waking threads does.
        let few = items * cols.min(COLUMNS) < 16 << 10;
        let cuts = if few { items.min(1) } else { chunks(items, team.threads()) };
        team.parallel(cuts, &|chunk, worker| {
            // SAFETY: this worker's own scratch.
            let own = unsafe { team.own(worker).floats(3 * COLUMNS) };
            let (pairs, out) = own.split_at_mut(2 * COLUMNS);
            for item in part(items, cuts, chunk) {
                let (row, col) = (item / blocks, item % blocks * COLUMNS);
                let here = COLUMNS.min(cols - col);
                let (pairs, out) = (&mut pairs[..2 * here], &mut out[..here]);
                // SAFETY: a part of a row of `x` and of `y`, which this chunk alone touches.
                unsafe { load_floats(self.x.dtype, self.x.at(row, 2 * col), pairs) };
                self.gate.row(pairs, out);
                // SAFETY: as above.
                unsafe { store_floats(self.y.dtype, self.y.at(row, col), out) };
            }
        });
    }
}

/// out[i] = silu(pairs[2i]) · pairs[2i + 1].
#[inline(always)]
fn silu_mul_body<const FMA: bool>(pairs: &[f32], out: &mut [f32]) {
    for (out, pair) in out.iter_mut().zip(pairs.chunks_exact(2)) {
        let (gate, up) = (pair[0], pair[1]);
        *out = gate / (1.0 + exp::<FMA>(-gate)) * up;
    }
}

#[inline(always)]
fn silu_mul16_body<const FMA: bool>(pairs: &[f32; 16], out: &mut [f32; 8]) {
    silu_mul_body::<FMA>(pairs, out);
}

/// out[i] = gelu(pairs[2i]) · pairs[2i + 1]. (1 + tanh u) / 2 is 1 / (1 + e^-2u).
#[inline(always)]
fn gelu_mul_body<const FMA: bool>(pairs: &[f32], out: &mut [f32]) {
    for (out, pair) in out.iter_mut().zip(pairs.chunks_exact(2)) {
        let (gate, up) = (pair[0], pair[1]);
        // 2·√(2/π), and that times 0.044715.
        let twice = gate * fma::<FMA>(gate * gate, 0.071_354_814, 1.595_769);
        *out = gate / (1.0 + exp::<FMA>(-twice)) * up;
    }
}

/// As [`silu_mul`], with the same bits: gates are the even lanes; the results of odd lanes are dropped.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn silu_mul_avx512(gate: __m512) -> __m256 {
    let set = |x: f32| _mm512_set1_ps(x);
    let up = _mm512_movehdup_ps(gate);
    // The steps of `simd::exp`, for −gate.
    let x = _mm512_sub_ps(_mm512_setzero_ps(), gate);
    let x = _mm512_min_ps(_mm512_max_ps(x, set(-87.0)), set(88.0));
    let magic = set(12_582_912.0);
    let n = _mm512_add_ps(_mm512_mul_ps(x, set(std::f32::consts::LOG2_E)), magic);
    let power = _mm512_slli_epi32::<23>(_mm512_castps_si512(n));
    let n = _mm512_sub_ps(n, magic);
    let r = _mm512_fmadd_ps(n, set(-0.693_359_4), x);
    let r = _mm512_fmadd_ps(n, set(2.121_944_4e-4), r);
    let p = _mm512_fmadd_ps(r, set(1.987_569_1e-4), set(1.398_2e-3));
    let p = _mm512_fmadd_ps(p, r, set(8.333_452e-3));
    let p = _mm512_fmadd_ps(p, r, set(4.166_579_6e-2));
    let p = _mm512_fmadd_ps(p, r, set(1.666_666_5e-1));
    let p = _mm512_fmadd_ps(p, r, set(0.5));
    let p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), set(1.0));
    let exp = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), power));
    let silu = _mm512_div_ps(gate, _mm512_add_ps(set(1.0), exp));
    let even = _mm512_maskz_compress_ps(0x5555, _mm512_mul_ps(silu, up));
    _mm512_castps512_ps256(even)
}

levels! {
    /// Combines gate and up to one value, eight at a time.
    fn silu_mul16(pairs: &[f32; 16], out: &mut [f32; 8]) = silu_mul16_body;
}

levels! {
    /// Combines gate and up to one value.
    fn silu_mul(pairs: &[f32], out: &mut [f32]) = silu_mul_body;
}

levels! {
    /// Combines gate and up to one value.
    fn gelu_mul(pairs: &[f32], out: &mut [f32]) = gelu_mul_body;
}
