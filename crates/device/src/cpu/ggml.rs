//! The arithmetic of ggml as llama.cpp has it when built for AVX-512, repeated operation by operation, so that our
//! results have the same bits. Found in llama.cpp's sources and its compiled form (the one in llama-cpp-python
//! 0.3.36); `tools/ggml_goldens.py` makes the values that tests compare with.
//!
//! Where it differs from the fast paths:
//!
//! * **norm**: squares are rounded to f32 and added one after the other in f64;
//! * **linears with quantised weights**: `linear/ggml.rs`, `linear/k_blocks.rs`;
//! * **attention**: `attention/ggml.rs`;
//! * **e^x**: another polynomial;
//! * **soft caps**: three rounded operations;
//! * **GELU**: a table of f16 results for each f16 input.
//!
//! A multiply-add that ggml fuses is fused here on every processor. Without an instruction for it, it is a library
//! call, and slow.

use super::simd::levels;
use half::f16;
use std::sync::LazyLock;

/// e^x, to 2 ulp; 0 for very negative x.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Adding 1.5·2²³ rounds to an integer, which is then in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    let float = f32::from_bits;
    let z = x.mul_add(float(0x3fb8_aa3b), MAGIC);
    let n = z - MAGIC;
    let high = (-n).mul_add(float(0x3f31_7200), x);
    let b = (-n).mul_add(float(0x35bf_be8e), high);
    let u = b * b;
    let p = float(0x3c07_2010).mul_add(b, float(0x3d2b_9f17));
    let q = float(0x3e2a_af33).mul_add(b, float(0x3eff_fedb));
    let one = float(0x3f7f_fff6).mul_add(b, 1.0);
    let j = p.mul_add(u, q).mul_add(u, one);
    // 2ⁿ in two steps, each a normal number: only the last multiplication rounds, and only if the result is
    // subnormal.
    let n_int = (z.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32);
    let first = n_int >> 1;
    let power = |n: i32| float((n.wrapping_add(127) as u32) << 23);
    let scaled = j * power(first) * power(n_int.wrapping_sub(first));
    let far = if n <= 0.0 { 0.0 } else { f32::INFINITY };
    if n.abs() > 192.0 { far } else { scaled }
}

#[inline(always)]
fn silu_mul_body<const FMA: bool>(products: &[f32], out: &mut [f32]) {
    for (out, pair) in out.iter_mut().zip(products.chunks_exact(2)) {
        let (gate, up) = (pair[0], pair[1]);
        *out = gate / (1.0 + exp(0.0 - gate)) * up;
    }
}

levels! {
    /// out[i] = silu(products[2i]) · products[2i + 1].
    pub(crate) fn silu_mul(products: &[f32], out: &mut [f32]) = silu_mul_body;
}

/// GELU of every f16, by its bits, as read back from f16.
pub(crate) type GeluTable = [f32; 1 << 16];

/// The table, made by the first caller. The C library's tanh is the one that ggml calls.
pub(crate) fn gelu_table() -> &'static GeluTable {
    static TABLE: LazyLock<Box<GeluTable>> = LazyLock::new(|| {
        let gelu = |x: f32| {
            let inner = 0.797_884_6 * x * (0.044_715 * x).mul_add(x, 1.0);
            0.5 * x * (1.0 + inner.tanh())
        };
        let entry = |bits: u16| f16::from_f32(gelu(f16::from_bits(bits).to_f32())).to_f32();
        let table: Vec<f32> = (0..=u16::MAX).map(entry).collect();
        table.into_boxed_slice().try_into().expect("an entry for every f16")
    });
    &TABLE
}

/// out[i] = gelu(pairs[2i]) · pairs[2i + 1]; the table is used between −10 and 10 only.
pub(crate) fn gelu_mul(table: &GeluTable, pairs: &[f32], out: &mut [f32]) {
    for (out, pair) in out.iter_mut().zip(pairs.chunks_exact(2)) {
        let (gate, up) = (pair[0], pair[1]);
        *out = if gate <= -10.0 {
            0.0
        } else if gate >= 10.0 {
            gate * up
        } else {
            table[usize::from(f16::from_f32(gate).to_bits())] * up
        };
    }
}

/// Soft cap in three rounded operations: division by the cap, the C library's tanh, multiplication.
pub(crate) fn soft_cap(values: &mut [f32], cap: f32) {
    values.iter_mut().for_each(|v| *v = (*v * (1.0 / cap)).tanh() * cap);
}

/// Normalises a row in place.
pub(crate) fn rms_norm(values: &mut [f32], weight: &[f32], eps: f32) {
    let mut sum = 0.0f64;
    for value in &*values {
        sum += f64::from(value * value);
    }
    let mean = (sum / values.len() as f64) as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    for (value, weight) in values.iter_mut().zip(weight) {
        *value = *value * scale * weight;
    }
}
