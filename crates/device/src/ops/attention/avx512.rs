//! AVX-512 attention. Keys and values are converted to f32 a tile at a time; many queries of a KV head lie side by
//! side in lanes, so that scores, softmax and sums need no reduction across a register. Few queries (decode) use
//! plain dot products instead.
#![cfg(target_arch = "x86_64")]

use super::fast::Heads;
use crate::DType;
use crate::cpu::simd::{Level, soft_cap};
use crate::cpu::step::{Part, Parts};
use crate::cpu::view::store_floats;
use std::arch::x86_64::*;

/// Positions of a tile.
const TILE: usize = 32;
/// Most queries side by side.
pub(super) const LANES: usize = 48;
/// The score of a position that must not be seen.
const NEVER: f32 = -1e30;

/// Bytes of scratch for either kernel: no token sees more than `context` positions, no block has more than
/// [`LANES`] queries.
pub(super) fn own_bytes(dim: usize, group: usize, context: usize) -> usize {
    FewParts::new(dim, group, context).bytes.max(BlockParts::new(dim, LANES).bytes)
}

/// The scratch of [`few`] for a token that sees `count` positions.
struct FewParts {
    queries: Part,
    outs: Part,
    tile: Part,
    scores: Part,
    /// Scores of a query, padded to whole registers.
    padded: usize,
    bytes: usize,
}

impl FewParts {
    fn new(dim: usize, group: usize, count: usize) -> FewParts {
        let padded = count.next_multiple_of(16);
        let mut parts = Parts::default();
        FewParts {
            queries: parts.take(group * dim),
            outs: parts.take(group * dim),
            tile: parts.take(TILE * dim),
            scores: parts.take(group * padded),
            padded,
            bytes: parts.bytes(),
        }
    }
}

/// The scratch of [`block`] for `width` queries side by side, whole registers of them.
struct BlockParts {
    queries: Part,
    outs: Part,
    tile: Part,
    weights: Part,
    lasts: Part,
    firsts: Part,
    /// One query while it is loaded, one output while it is stored.
    row: Part,
    bytes: usize,
}

impl BlockParts {
    fn new(dim: usize, width: usize) -> BlockParts {
        let mut parts = Parts::default();
        BlockParts {
            queries: parts.take(dim * width),
            outs: parts.take(dim * width),
            tile: parts.take(TILE * dim),
            weights: parts.take(TILE * width),
            lasts: parts.take(width),
            firsts: parts.take(width),
            row: parts.take(dim),
            bytes: parts.bytes(),
        }
    }
}

/// e^x; 0 for very negative x.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn exp(x: __m512) -> __m512 {
    let x = _mm512_max_ps(x, _mm512_set1_ps(-100.0));
    let n = _mm512_roundscale_ps::<0>(_mm512_mul_ps(x, _mm512_set1_ps(std::f32::consts::LOG2_E)));
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693_359_4), x);
    let r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.121_944_4e-4), r);
    let mut p = _mm512_set1_ps(1.987_569_1e-4);
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5, 1.0, 1.0] {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    }
    _mm512_scalef_ps(p, n)
}

/// `count` values of a float dtype as f32, those of e4m3 times `factor`; `count` is a multiple of 16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn convert(dtype: DType, from: *const u8, factor: f32, to: *mut f32, count: usize) {
    // SAFETY: the caller gives `count` readable and writable values.
    unsafe {
        for i in (0..count).step_by(16) {
            let value = match dtype {
                DType::F16 => _mm512_cvtph_ps(_mm256_loadu_si256(from.add(2 * i).cast())),
                DType::BF16 => {
                    let half = _mm256_loadu_si256(from.add(2 * i).cast());
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
                }
                DType::E4M3 => {
                    let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.add(i).cast()));
                    let size = _mm512_and_si512(bytes, _mm512_set1_epi32(0x7f));
                    // Exponent and mantissa in the fields of f32, whose bias is 120 larger.
                    let value = _mm512_castsi512_ps(_mm512_slli_epi32::<20>(size));
                    let value = _mm512_mul_ps(value, _mm512_set1_ps(f32::from_bits(247 << 23)));
                    let none = _mm512_cmpeq_epi32_mask(size, _mm512_set1_epi32(0x7f));
                    let value = _mm512_mask_mov_ps(value, none, _mm512_set1_ps(f32::NAN));
                    let sign = _mm512_slli_epi32::<24>(_mm512_xor_si512(bytes, size));
                    let value = _mm512_xor_ps(value, _mm512_castsi512_ps(sign));
                    _mm512_mul_ps(value, _mm512_set1_ps(factor))
                }
                _ => _mm512_loadu_ps(from.add(4 * i).cast()),
            };
            _mm512_storeu_ps(to.add(i), value);
        }
    }
}

/// Prefetches k (0) or v (1) of the page that holds `position`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn fetch(heads: &Heads<'_>, part: usize, position: usize) {
    let (size, dim) = (heads.page_size(), heads.dim());
    let page = heads.line(part, position - position % size);
    for line in 0..(size * dim * heads.dtype().block_bytes() / 64).min(64) {
        _mm_prefetch::<_MM_HINT_T0>(page.wrapping_add(64 * line).cast());
    }
}

/// k (`part` 0) or v (1) of positions `first..first + count` as f32 rows; more follow up to `end`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn load_tile(
    heads: &Heads<'_>,
    part: usize,
    first: usize,
    count: usize,
    end: usize,
    to: *mut f32,
) {
    let (size, dim) = (heads.page_size(), heads.dim());
    let mut at = 0;
    while at < count {
        let position = first + at;
        // Tokens of a page are consecutive.
        let run = (size - position % size).min(count - at);
        // Prefetch the pages of the next tile now; they are needed a tile later.
        if at + run == count {
            (position + run..end.min(position + run + TILE)).step_by(size).for_each(|next| {
                fetch(heads, part, next);
            });
        }
        // SAFETY: `line` checked the page; the tile has room for `count` rows.
        unsafe {
            let (from, to) = (heads.line(part, position), to.add(at * dim));
            convert(heads.dtype(), from, heads.factor(part).unwrap_or(1.0), to, run * dim);
        }
        at += run;
    }
}

/// Lane i of the result is the sum of register i.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn sums(v: &[__m512; 16]) -> __m512 {
    // Four registers to one, each quarter of which holds partial sums of one of them; then sum the quarters.
    let four = |a: __m512, b: __m512, c: __m512, d: __m512| {
        let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        let low = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
        let high = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
        _mm512_add_ps(low, high)
    };
    let a = four(v[0], v[1], v[2], v[3]);
    let b = four(v[4], v[5], v[6], v[7]);
    let c = four(v[8], v[9], v[10], v[11]);
    let d = four(v[12], v[13], v[14], v[15]);
    let ab_low = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
    let ab_high = _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b);
    let cd_low = _mm512_shuffle_f32x4::<0b10_00_10_00>(c, d);
    let cd_high = _mm512_shuffle_f32x4::<0b11_01_11_01>(c, d);
    let ab = _mm512_add_ps(ab_low, ab_high);
    let cd = _mm512_add_ps(cd_low, cd_high);
    let low = _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd);
    let high = _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd);
    _mm512_add_ps(low, high)
}

/// Applies the soft cap to scores, if there is one.
///
/// # Safety
/// The processor has AVX-512; there are `count` scores.
unsafe fn cap(heads: &Heads<'_>, scores: *mut f32, count: usize) {
    let Some(cap) = heads.softcap() else { return };
    // SAFETY: the caller's promise.
    unsafe {
        let scores = std::slice::from_raw_parts_mut(scores, count);
        soft_cap(Level::Avx512, scores, 1.0 / cap, cap);
    }
}

/// One token's queries of a KV head.
///
/// # Safety
/// The processor has AVX-512; `heads` is a live token's.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn few(heads: &Heads<'_>, token: usize, position: usize) {
    let (dim, group) = (heads.dim(), heads.group());
    let (first, end) = (heads.first(position), heads.end(position));
    let count = end - first;
    let parts = FewParts::new(dim, group, count);
    let (padded, own) = (parts.padded, heads.own.bytes(parts.bytes));
    let (queries, outs) = (parts.queries.of(own), parts.outs.of(own));
    let (tile, scores) = (parts.tile.of(own), parts.scores.of(own));
    // SAFETY: parts of the scratch, which holds them all; `heads` reads live slots only.
    unsafe {
        heads.load_queries(token, queries);
        let scale = _mm512_set1_ps(heads.scale());
        for start in (0..count).step_by(TILE) {
            let here = TILE.min(count - start);
            if start + TILE >= count {
                fetch(heads, 1, first);
                fetch(heads, 1, (end - 1).min(first + heads.page_size()));
            }
            load_tile(heads, 0, first + start, here, end, tile);
            for p in (0..here).step_by(16) {
                for g in 0..group {
                    let mut dots = [_mm512_setzero_ps(); 16];
                    let q = queries.add(g * dim);
                    for (i, dot) in dots.iter_mut().enumerate().take(16.min(here - p)) {
                        let k = tile.add((p + i) * dim);
                        let mut sum = _mm512_setzero_ps();
                        for d in (0..dim).step_by(16) {
                            let (k, q) = (_mm512_loadu_ps(k.add(d)), _mm512_loadu_ps(q.add(d)));
                            sum = _mm512_fmadd_ps(k, q, sum);
                        }
                        *dot = sum;
                    }
                    let to = scores.add(g * padded + start + p);
                    _mm512_storeu_ps(to, _mm512_mul_ps(sums(&dots), scale));
                }
            }
        }
        for g in 0..group {
            let scores = scores.add(g * padded);
            cap(heads, scores, count);
            (count..padded).for_each(|p| *scores.add(p) = f32::NEG_INFINITY);
            let mut max = _mm512_set1_ps(NEVER);
            for p in (0..padded).step_by(16) {
                max = _mm512_max_ps(max, _mm512_loadu_ps(scores.add(p)));
            }
            let largest = _mm512_reduce_max_ps(max);
            let max = _mm512_set1_ps(largest);
            let mut total = _mm512_setzero_ps();
            for p in (0..padded).step_by(16) {
                let weight = exp(_mm512_sub_ps(_mm512_loadu_ps(scores.add(p)), max));
                total = _mm512_add_ps(total, weight);
                _mm512_storeu_ps(scores.add(p), weight);
            }
            let total = _mm512_reduce_add_ps(total) + heads.sink_weight(g, largest);
            let inverse = _mm512_set1_ps(1.0 / total);
            for p in (0..padded).step_by(16) {
                let weight = _mm512_loadu_ps(scores.add(p));
                _mm512_storeu_ps(scores.add(p), _mm512_mul_ps(weight, inverse));
            }
        }
        (0..group * dim).for_each(|i| *outs.add(i) = 0.0);
        for start in (0..count).step_by(TILE) {
            let here = TILE.min(count - start);
            load_tile(heads, 1, first + start, here, end, tile);
            for g in 0..group {
                let weights = scores.add(g * padded + start);
                let out = outs.add(g * dim);
                let mut d = 0;
                while d + 64 <= dim {
                    weigh::<4>(dim, here, tile.add(d), weights, out.add(d));
                    d += 64;
                }
                while d < dim {
                    weigh::<1>(dim, here, tile.add(d), weights, out.add(d));
                    d += 16;
                }
            }
        }
        heads.store(token, 0, std::slice::from_raw_parts(outs, group * dim));
    }
}

/// out += Σ weight · v over `count` rows, 16·D columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn weigh<const D: usize>(
    dim: usize,
    count: usize,
    v: *const f32,
    weights: *const f32,
    out: *mut f32,
) {
    // SAFETY: `count` rows of v and as many weights.
    unsafe {
        let mut sums = [_mm512_setzero_ps(); D];
        for p in 0..count {
            let weight = _mm512_set1_ps(*weights.add(p));
            for (d, sum) in sums.iter_mut().enumerate() {
                *sum = _mm512_fmadd_ps(_mm512_loadu_ps(v.add(p * dim + 16 * d)), weight, *sum);
            }
        }
        for (d, sum) in sums.iter().enumerate() {
            let out = out.add(16 * d);
            _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), *sum));
        }
    }
}

/// Queries of `tokens` consecutive tokens (from `token` at `position`) of a KV head, side by side.
///
/// # Safety
/// As [`few`]; tokens × group is at most [`LANES`].
pub(super) unsafe fn block(heads: &Heads<'_>, token: usize, tokens: usize, position: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        match (tokens * heads.group()).div_ceil(16) {
            1 => block_of::<1>(heads, token, tokens, position),
            2 => block_of::<2>(heads, token, tokens, position),
            _ => block_of::<3>(heads, token, tokens, position),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn block_of<const N: usize>(
    heads: &Heads<'_>,
    token: usize,
    tokens: usize,
    position: usize,
) {
    let (dim, group) = (heads.dim(), heads.group());
    let width = 16 * N;
    let lanes = tokens * group;
    assert!(lanes <= width, "{lanes} queries side by side");
    let parts = BlockParts::new(dim, width);
    let own = heads.own.bytes(parts.bytes);
    let (queries, outs) = (parts.queries.of(own), parts.outs.of(own));
    let (tile, weights) = (parts.tile.of(own), parts.weights.of(own));
    let (lasts, firsts) = (parts.lasts.of(own).cast::<i32>(), parts.firsts.of(own).cast::<i32>());
    let row = parts.row.of(own);
    // SAFETY: parts of the scratch, which holds them all; `heads` reads live slots only.
    unsafe {
        (0..dim * width).for_each(|i| {
            *queries.add(i) = 0.0;
            *outs.add(i) = 0.0;
        });
        for lane in 0..width {
            // Lanes past the last query repeat it, so that they stay finite.
            let lane_token = (lane / group).min(tokens - 1);
            *lasts.add(lane) = heads.end(position + lane_token) as i32 - 1;
            *firsts.add(lane) = heads.first(position + lane_token) as i32;
        }
        for lane in 0..lanes {
            heads.load_query(token + lane / group, lane % group, row);
            (0..dim).for_each(|d| *queries.add(d * width + lane) = *row.add(d) * heads.scale());
        }
        let mut max = [_mm512_set1_ps(NEVER); N];
        let mut total = [_mm512_setzero_ps(); N];
        let (from, end) = (heads.first(position), heads.end(position + tokens - 1));
        for start in (from..end).step_by(TILE) {
            let here = TILE.min(end - start);
            load_tile(heads, 0, start, here, end, tile);
            let mut tile_max = max;
            let mut p = 0;
            while p < here {
                let many = if here - p >= 8 { 8 } else { 1 };
                if many == 8 {
                    scores::<N, 8>(dim, tile.add(p * dim), queries, weights.add(p * width));
                } else {
                    scores::<N, 1>(dim, tile.add(p * dim), queries, weights.add(p * width));
                }
                cap(heads, weights.add(p * width), many * width);
                for i in p..p + many {
                    let scores = weights.add(i * width);
                    mask::<N>(start + i, lasts, firsts, scores, &mut tile_max);
                }
                p += many;
            }
            let mut shrink = [_mm512_setzero_ps(); N];
            for n in 0..N {
                shrink[n] = exp(_mm512_sub_ps(max[n], tile_max[n]));
                total[n] = _mm512_mul_ps(total[n], shrink[n]);
                max[n] = tile_max[n];
            }
            for p in 0..here {
                for n in 0..N {
                    let at = weights.add(p * width + 16 * n);
                    let score = _mm512_loadu_ps(at);
                    let allowed =
                        _mm512_cmp_ps_mask::<_CMP_GT_OQ>(score, _mm512_set1_ps(0.5 * NEVER));
                    let weight = exp(_mm512_sub_ps(score, max[n]));
                    let weight = _mm512_maskz_mov_ps(allowed, weight);
                    total[n] = _mm512_add_ps(total[n], weight);
                    _mm512_storeu_ps(at, weight);
                }
            }
            load_tile(heads, 1, start, here, end, tile);
            for d in (0..dim).step_by(8) {
                values::<N>(dim, here, tile.add(d), weights, outs.add(d * width), &shrink);
            }
        }
        let (mut totals, mut largest) = ([0.0f32; LANES], [0.0f32; LANES]);
        for n in 0..N {
            _mm512_storeu_ps(totals.as_mut_ptr().add(16 * n), total[n]);
            _mm512_storeu_ps(largest.as_mut_ptr().add(16 * n), max[n]);
        }
        for lane in 0..lanes {
            let inverse = 1.0 / (totals[lane] + heads.sink_weight(lane % group, largest[lane]));
            (0..dim).for_each(|d| *row.add(d) = *outs.add(d * width + lane) * inverse);
            let row = std::slice::from_raw_parts(row, dim);
            heads.store(token + lane / group, lane % group, row);
        }
    }
}

/// Masks the key at `position` in the lanes that do not see it, and updates the largest score of each lane.
///
/// # Safety
/// `lasts` and `firsts` have a position for each lane, `scores` a score.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn mask<const N: usize>(
    position: usize,
    lasts: *const i32,
    firsts: *const i32,
    scores: *mut f32,
    max: &mut [__m512; N],
) {
    let here = _mm512_set1_epi32(position as i32);
    for (n, max) in max.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let at = scores.add(16 * n);
            let last = _mm512_loadu_si512(lasts.add(16 * n).cast());
            let first = _mm512_loadu_si512(firsts.add(16 * n).cast());
            let allowed =
                _mm512_cmple_epi32_mask(here, last) & _mm512_cmpge_epi32_mask(here, first);
            let never = _mm512_set1_ps(NEVER);
            let score = _mm512_mask_blend_ps(allowed, never, _mm512_loadu_ps(at));
            _mm512_storeu_ps(at, score);
            *max = _mm512_max_ps(*max, score);
        }
    }
}

/// Scores of `P` keys for all lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn scores<const N: usize, const P: usize>(
    dim: usize,
    keys: *const f32,
    queries: *const f32,
    to: *mut f32,
) {
    let mut acc = [[_mm512_setzero_ps(); N]; P];
    // SAFETY: P rows of keys, dim rows of 16·N queries.
    unsafe {
        for d in 0..dim {
            let mut q = [_mm512_setzero_ps(); N];
            for (n, q) in q.iter_mut().enumerate() {
                *q = _mm512_loadu_ps(queries.add(d * 16 * N + 16 * n));
            }
            for (p, acc) in acc.iter_mut().enumerate() {
                let k = _mm512_set1_ps(*keys.add(p * dim + d));
                for (acc, q) in acc.iter_mut().zip(q) {
                    *acc = _mm512_fmadd_ps(k, q, *acc);
                }
            }
        }
        for (p, acc) in acc.iter().enumerate() {
            for (n, acc) in acc.iter().enumerate() {
                _mm512_storeu_ps(to.add(p * 16 * N + 16 * n), *acc);
            }
        }
    }
}

/// Eight rows of the output: out = shrink · out + Σ v · weight.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn values<const N: usize>(
    dim: usize,
    count: usize,
    v: *const f32,
    weights: *const f32,
    out: *mut f32,
    shrink: &[__m512; N],
) {
    let mut acc = [[_mm512_setzero_ps(); N]; 8];
    // SAFETY: `count` rows of v and of 16·N weights, 8 rows of outputs.
    unsafe {
        for (d, acc) in acc.iter_mut().enumerate() {
            for (n, acc) in acc.iter_mut().enumerate() {
                let old = _mm512_loadu_ps(out.add(d * 16 * N + 16 * n));
                *acc = _mm512_mul_ps(old, shrink[n]);
            }
        }
        for p in 0..count {
            let mut weight = [_mm512_setzero_ps(); N];
            for (n, weight) in weight.iter_mut().enumerate() {
                *weight = _mm512_loadu_ps(weights.add(p * 16 * N + 16 * n));
            }
            for (d, acc) in acc.iter_mut().enumerate() {
                let v = _mm512_set1_ps(*v.add(p * dim + d));
                for (acc, weight) in acc.iter_mut().zip(weight) {
                    *acc = _mm512_fmadd_ps(v, weight, *acc);
                }
            }
        }
        for (d, acc) in acc.iter().enumerate() {
            for (n, acc) in acc.iter().enumerate() {
                _mm512_storeu_ps(out.add(d * 16 * N + 16 * n), *acc);
            }
        }
    }
}

impl Heads<'_> {
    /// Writes the outputs of query heads `from..` of the KV head.
    ///
    /// # Safety
    /// No other thread writes them now.
    unsafe fn store(&self, token: usize, from: usize, values: &[f32]) {
        let out = &self.step.out;
        let col = (self.kv_head * self.group() + from) * self.dim();
        // SAFETY: inside the token's row of the output.
        unsafe { store_floats(out.dtype, out.at(token, col), values) };
    }
}
