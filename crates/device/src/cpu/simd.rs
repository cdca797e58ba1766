//! Loops written once and compiled for each instruction set; the choice is made when an op is lowered.

use super::features::Features;

/// The instruction set a loop is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    Avx512,
    Avx2,
    Portable,
}

impl Level {
    /// The best the processor has.
    pub(crate) fn of(features: &Features) -> Level {
        match features {
            Features { avx512: true, avx2: true, .. } => Level::Avx512,
            Features { avx2: true, .. } => Level::Avx2,
            _ => Level::Portable,
        }
    }
}

/// Declares `unsafe fn name(level, args…)` that runs `body::<FMA>(args…)` compiled for the level. The body must be
/// `#[inline(always)]`, or it would be compiled for the baseline instruction set only.
macro_rules! levels {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident;) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// The level is one the processor has, and the pointers are as the body needs them.
        #[allow(clippy::too_many_arguments)]
        $vis unsafe fn $name(level: $crate::cpu::simd::Level, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn avx512($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the caller's promise.
                #[allow(unused_unsafe)]
                unsafe { $body::<true>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn avx2($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the caller's promise.
                #[allow(unused_unsafe)]
                unsafe { $body::<true>($($arg),*) }
            }
            // SAFETY: the caller's promise.
            #[allow(unused_unsafe)]
            unsafe {
                match level {
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::simd::Level::Avx512 => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::simd::Level::Avx2 => avx2($($arg),*),
                    _ => $body::<false>($($arg),*),
                }
            }
        }
    };
}
pub(crate) use levels;

/// a·b + c, fused where the level has it.
#[inline(always)]
pub(crate) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// e^x to 2 ulp, without branches so that loops over it become vectors. 0 below −87, large above 88.
#[inline(always)]
pub(crate) fn exp<const FMA: bool>(x: f32) -> f32 {
    let x = x.clamp(-87.0, 88.0);
    // Adding and subtracting 1.5·2²³ rounds to the nearest integer without a call.
    let magic = 12_582_912.0f32;
    let n = x * std::f32::consts::LOG2_E + magic;
    let power = n.to_bits() << 23;
    let n = n - magic;
    let r = fma::<FMA>(n, -0.693_359_4, x);
    let r = fma::<FMA>(n, 2.121_944_4e-4, r);
    let p = fma::<FMA>(r, 1.987_569_1e-4, 1.398_2e-3);
    let p = fma::<FMA>(p, r, 8.333_452e-3);
    let p = fma::<FMA>(p, r, 4.166_579_6e-2);
    let p = fma::<FMA>(p, r, 1.666_666_5e-1);
    let p = fma::<FMA>(p, r, 0.5);
    let p = fma::<FMA>(p * r, r, r) + 1.0;
    f32::from_bits(p.to_bits().wrapping_add(power))
}

/// tanh x to 3 ulp, without branches. A polynomial near 0, where the quotient would lose digits.
#[inline(always)]
pub(crate) fn tanh<const FMA: bool>(x: f32) -> f32 {
    let size = x.abs();
    let s = x * x;
    let p = fma::<FMA>(s, -5.704_988_7e-3, 2.063_909e-2);
    let p = fma::<FMA>(p, s, -5.373_971_6e-2);
    let p = fma::<FMA>(p, s, 1.333_144_2e-1);
    let p = fma::<FMA>(p, s, -3.333_328e-1);
    let near = fma::<FMA>(p * s, x, x);
    // Beyond ±9.1 it is 1 in f32.
    let far = 1.0 - 2.0 / (exp::<FMA>(2.0 * size.min(10.0)) + 1.0);
    if size < 0.625 { near } else { far.copysign(x) }
}

/// Lanes that reductions sum separately: one AVX-512 register.
pub(crate) const LANES: usize = 16;

/// The sum of lanes, pairwise.
#[inline(always)]
pub(crate) fn sum(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// x·y.
#[inline(always)]
pub(crate) fn dot<const FMA: bool>(x: &[f32], y: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (xs, ys) = (x.chunks_exact(LANES), y.chunks_exact(LANES));
    let (x_rest, y_rest) = (xs.remainder(), ys.remainder());
    for (x, y) in xs.zip(ys) {
        for i in 0..LANES {
            lanes[i] = fma::<FMA>(x[i], y[i], lanes[i]);
        }
    }
    let rest = x_rest.iter().zip(y_rest).fold(0.0, |sum, (x, y)| fma::<FMA>(*x, *y, sum));
    sum(lanes) + rest
}

#[inline(always)]
fn rms_norm_body<const FMA: bool>(values: &mut [f32], weight: &[f32], eps: f32) {
    let mean = dot::<FMA>(values, values) / values.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    for (value, weight) in values.iter_mut().zip(weight) {
        *value = *value * scale * weight;
    }
}

levels! {
    /// Normalises a row in place.
    pub(crate) fn rms_norm(values: &mut [f32], weight: &[f32], eps: f32) = rms_norm_body;
}

#[inline(always)]
fn soft_cap_body<const FMA: bool>(values: &mut [f32], factor: f32, cap: f32) {
    values.iter_mut().for_each(|v| *v = cap * tanh::<FMA>(*v * factor));
}

levels! {
    /// cap · tanh(values · factor).
    pub(crate) fn soft_cap(values: &mut [f32], factor: f32, cap: f32) = soft_cap_body;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tanh_is_close_everywhere() {
        for i in -15_000..=15_000 {
            let x = i as f32 / 1000.0 + 1e-5;
            let want = f64::from(x).tanh();
            for got in [tanh::<false>(x), tanh::<true>(x)] {
                assert!(
                    (f64::from(got) / want - 1.0).abs() < 4e-7,
                    "tanh({x}) = {got}, not {want}"
                );
            }
        }
        assert_eq!(tanh::<false>(0.0), 0.0);
        assert_eq!(tanh::<false>(f32::NEG_INFINITY), -1.0);
    }

    #[test]
    fn exp_is_close_everywhere() {
        for i in -870..=880 {
            let x = i as f32 / 10.0 + 0.0123;
            let (got, want) = (exp::<false>(x), f64::from(x.clamp(-87.0, 88.0)).exp());
            assert!((f64::from(got) / want - 1.0).abs() < 3e-7, "exp({x}) = {got}, not {want}");
        }
        assert_eq!(exp::<false>(0.0), 1.0);
    }
}
