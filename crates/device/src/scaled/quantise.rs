//! Quantises rows of floats: values and scales in plain order, as checkpoints store them and [`super::Chunk`] takes them.

use super::{BLOCK, e4m3, is_fp8, scale_cols, scale_row, scales, search};
use crate::DType;

pub use super::search::Zeros;

/// Rows of e4m3.
#[derive(Clone, Debug, PartialEq)]
pub struct Fp8Rows {
    /// Rows × columns.
    pub bytes: Vec<u8>,
    /// As many as the type has for these rows, row of scales by row of scales.
    pub scales: Vec<f32>,
}

/// e4m3 by the largest value of each row or block. Rows start where a block does.
///
/// # Panics
/// If `dtype` has no e4m3 values, or `floats` are not whole rows.
pub fn fp8_rows(dtype: DType, floats: &[f32], cols: usize) -> Fp8Rows {
    assert!(is_fp8(dtype) && floats.len().is_multiple_of(cols), "{dtype:?}");
    let each = scale_cols(dtype, cols);
    let wide = if each == 1 { cols } else { BLOCK };
    let mut most = vec![0.0f32; scales(dtype, floats.len() / cols, cols)];
    for (at, floats) in floats.chunks_exact(cols).enumerate() {
        let most = &mut most[scale_row(dtype, at) * each..][..each];
        for (most, floats) in most.iter_mut().zip(floats.chunks(wide)) {
            *most = floats.iter().fold(*most, |most, x| most.max(x.abs()));
        }
    }
    let scale =
        |most: &f32| if *most > 0.0 { (most / e4m3::MOST).max(f32::MIN_POSITIVE) } else { 1.0 };
    let scales: Vec<f32> = most.iter().map(scale).collect();
    let mut bytes = vec![0; floats.len()];
    let rows = bytes.chunks_exact_mut(cols).zip(floats.chunks_exact(cols));
    for (at, (bytes, floats)) in rows.enumerate() {
        let scales = &scales[scale_row(dtype, at) * each..][..each];
        for ((bytes, floats), scale) in bytes.chunks_mut(wide).zip(floats.chunks(wide)).zip(scales)
        {
            let inverse = 1.0 / scale;
            for (byte, x) in bytes.iter_mut().zip(floats) {
                *byte = e4m3::encode(x * inverse);
            }
        }
    }
    Fp8Rows { bytes, scales }
}

/// Rows of 4-bit values.
#[derive(Clone, Debug, PartialEq)]
pub struct Int4Rows {
    /// 0 to 15, rows × columns.
    pub values: Vec<u8>,
    /// Rows × groups; each is a number of f16.
    pub scales: Vec<f32>,
    /// Rows × groups.
    pub zeros: Vec<u8>,
}

/// 4 bits by a search for the scale and zero with the least squared error in each group of columns.
///
/// # Panics
/// If `floats` are not whole groups.
pub fn int4_rows(floats: &[f32], group: usize, zeros: Zeros) -> Int4Rows {
    assert!(floats.len().is_multiple_of(group), "{} in groups of {group}", floats.len());
    let mut values = vec![0; floats.len()];
    let groups = floats.chunks_exact(group).zip(values.chunks_exact_mut(group));
    let found = groups.map(|(floats, values)| search::int4(floats, values, zeros));
    let (scales, zeros) = found.map(|found| (found.scale, found.zero)).unzip();
    Int4Rows { values, scales, zeros }
}
