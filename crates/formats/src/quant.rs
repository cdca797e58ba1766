//! Scalar dequantisation: the reference that every fast path is compared with.
//!
//! Each function computes exactly what the format defines, in the order of operations of the
//! `gguf` package, so results are equal to the last bit. It is not optimised for speed. Weights whose
//! scales are tensors of their own are in [`crate::scaled`].

pub(crate) mod fp4;
pub(crate) mod fp8;
mod k;
mod legacy;

use crate::dtype::DType;
use half::{bf16, f16};

/// Why a dequantisation was refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantError {
    /// The source does not hold exactly the elements the destination has room for.
    #[error("{dtype}: {bytes} bytes do not hold {elements} elements")]
    Length {
        /// Type of the source.
        dtype: DType,
        /// Bytes given.
        bytes: usize,
        /// Elements asked for.
        elements: usize,
    },
    /// The type holds integers, not weights.
    #[error("{0} cannot be read as floating point")]
    NotFloat(DType),
}

/// Writes the elements of `src` to `dst` as f32. `dst` is a whole number of blocks.
pub fn dequantise(dtype: DType, src: &[u8], dst: &mut [f32]) -> Result<(), QuantError> {
    if dtype.bytes_for(dst.len()) != Some(src.len()) {
        return Err(QuantError::Length { dtype, bytes: src.len(), elements: dst.len() });
    }
    match dtype {
        DType::F64 => plain(src, dst, |b| f64::from_le_bytes(b) as f32),
        DType::F32 => plain(src, dst, f32::from_le_bytes),
        DType::F16 => plain(src, dst, |b| f16::from_le_bytes(b).to_f32()),
        DType::BF16 => plain(src, dst, |b| bf16::from_le_bytes(b).to_f32()),
        DType::F8_E4M3 => plain(src, dst, |[b]| fp8::e4m3(b)),
        DType::F8_E8M0 => plain(src, dst, |[b]| fp8::e8m0(b)),
        DType::Q4_0 => blocks(src, dst, legacy::q4_0),
        DType::Q4_1 => blocks(src, dst, legacy::q4_1),
        DType::Q5_0 => blocks(src, dst, legacy::q5_0),
        DType::Q5_1 => blocks(src, dst, legacy::q5_1),
        DType::Q8_0 => blocks(src, dst, legacy::q8_0),
        DType::Q2_K => blocks(src, dst, k::q2),
        DType::Q3_K => blocks(src, dst, k::q3),
        DType::Q4_K => blocks(src, dst, k::q4),
        DType::Q5_K => blocks(src, dst, k::q5),
        DType::Q6_K => blocks(src, dst, k::q6),
        DType::MXFP4 => blocks(src, dst, fp4::mxfp4),
        _ => return Err(QuantError::NotFloat(dtype)),
    }
    Ok(())
}

fn plain<const BYTES: usize>(src: &[u8], dst: &mut [f32], read: impl Fn([u8; BYTES]) -> f32) {
    for (bytes, out) in src.as_chunks::<BYTES>().0.iter().zip(dst) {
        *out = read(*bytes);
    }
}

fn blocks<const BYTES: usize, const ELEMS: usize>(
    src: &[u8],
    dst: &mut [f32],
    read: impl Fn(&[u8; BYTES], &mut [f32; ELEMS]),
) {
    for (block, out) in src.as_chunks::<BYTES>().0.iter().zip(dst.as_chunks_mut::<ELEMS>().0) {
        read(block, out);
    }
}

/// The f16 stored at `at`, as f32.
fn scale(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_lengths_and_integers_are_refused() {
        let mut out = [0.0; 32];
        assert!(dequantise(DType::Q8_0, &[0; 33], &mut out).is_err());
        assert!(dequantise(DType::Q4_K, &[0; 144], &mut out).is_err());
        assert_eq!(dequantise(DType::I8, &[0; 32], &mut out), Err(QuantError::NotFloat(DType::I8)));
    }
}
