//! Element types the ops know, quantised blocks included.

use crate::scaled::{self, e4m3};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// How an element, or a block of elements, is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DType {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    BF16,
    /// Unsigned 32-bit; token ids, positions, lengths, page numbers.
    U32,
    /// Bytes.
    U8,
    /// The eight-bit float e4m3 (`scaled::e4m3`): keys and values in pages, times the scales of their layer.
    E4M3,
    /// 32 elements: f16 scale, then 4-bit values; w = d·(q − 8).
    Q4_0,
    /// 32 elements: f16 scale and minimum, then 4-bit values; w = d·q + m.
    Q4_1,
    /// 32 elements: f16 scale, fifth bits, 4-bit values; w = d·(q − 16).
    Q5_0,
    /// 32 elements: f16 scale and minimum, fifth bits, 4-bit values; w = d·q + m.
    Q5_1,
    /// 32 elements: f16 scale, signed bytes; w = d·q.
    Q8_0,
    /// 256 elements, 2 bits, 16 sub-blocks with 4-bit scales and minima.
    Q2K,
    /// 256 elements, 3 bits, 16 sub-blocks with 6-bit scales.
    Q3K,
    /// 256 elements, 4 bits, 8 sub-blocks with 6-bit scales and minima.
    Q4K,
    /// 256 elements, 5 bits, 8 sub-blocks with 6-bit scales and minima.
    Q5K,
    /// 256 elements, 6 bits, 16 sub-blocks with 8-bit scales.
    Q6K,
    /// The CPU's own packing of 4-bit types: see `cpu::pack`.
    P4,
    /// The CPU's own packing of 5- to 8-bit types: see `cpu::pack`.
    P8,
    /// e4m3 bytes, then an f32 scale for each row. The order of bytes and scales of this and the types below:
    /// `crate::scaled`.
    F8Row,
    /// e4m3 bytes, then an f32 scale for each 128 × 128 of them.
    F8Block,
    /// The same, where rows of two matrices alternate: blocks are 128 rows of one of them.
    F8Pairs,
    /// The same, where eight rows of each take turns.
    F8Turns,
    /// 4-bit values in pieces of 16 rows × 128 columns; each row of a piece has an f16 scale and an 8-bit zero;
    /// w = d·(q − zero).
    I4,
    /// The same in pieces of 16 rows × 64 columns.
    I4G64,
    /// The same in pieces of 16 rows × 32 columns.
    I4G32,
    /// Four-bit floats in pieces of 16 rows × 64 columns, with an exponent for each 32 columns of a row: `crate::scaled::mxfp4`.
    Mxfp4,
}

impl DType {
    /// Elements per block; 1 for plain types.
    pub const fn block_elems(self) -> usize {
        match self {
            DType::F32 | DType::F16 | DType::BF16 | DType::U32 | DType::U8 | DType::E4M3 => 1,
            DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 | DType::Q8_0 => 32,
            DType::Q2K | DType::Q3K | DType::Q4K | DType::Q5K | DType::Q6K => 256,
            // 16 rows × 32 columns are packed together; per row this is what 32 columns take.
            DType::P4 | DType::P8 => 32,
            DType::F8Row | DType::F8Block | DType::F8Pairs | DType::F8Turns => 16,
            // 16 rows are packed together.
            DType::I4 => 128,
            DType::I4G64 | DType::Mxfp4 => 64,
            DType::I4G32 => 32,
        }
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> usize {
        match self {
            DType::F32 | DType::U32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::U8 | DType::E4M3 => 1,
            DType::Q4_0 => 18,
            DType::Q4_1 => 20,
            DType::Q5_0 => 22,
            DType::Q5_1 => 24,
            DType::Q8_0 => 34,
            DType::Q2K => 84,
            DType::Q3K => 110,
            DType::Q4K => 144,
            DType::Q5K => 176,
            DType::Q6K => 210,
            DType::P4 => 16 + 4,
            DType::P8 => 32 + 4,
            DType::F8Row | DType::F8Block | DType::F8Pairs | DType::F8Turns => 16,
            DType::I4 => 64 + 3,
            DType::I4G64 => 32 + 3,
            DType::I4G32 => 16 + 3,
            DType::Mxfp4 => 32 + 2,
        }
    }

    /// Whether elements are stored alone, so that any of them can be addressed.
    pub const fn is_plain(self) -> bool {
        self.block_elems() == 1
    }

    /// Appends numbers as they are stored.
    ///
    /// # Panics
    /// If this is not a floating-point type.
    pub fn encode(self, numbers: &[f32], out: &mut Vec<u8>) {
        match self {
            DType::F32 => out.extend(numbers.iter().flat_map(|x| x.to_le_bytes())),
            DType::F16 => out.extend(numbers.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes())),
            DType::BF16 => {
                out.extend(numbers.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()));
            }
            DType::E4M3 => out.extend(numbers.iter().map(|&x| e4m3::encode(x))),
            other => panic!("numbers are not stored as {other:?}"),
        }
    }

    /// Stored numbers as f32.
    ///
    /// # Panics
    /// If this is not a floating-point type.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        let halves = |convert: fn([u8; 2]) -> f32| {
            bytes.as_chunks::<2>().0.iter().map(|bytes| convert(*bytes)).collect()
        };
        match self {
            DType::F32 => {
                bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
            }
            DType::F16 => halves(|bytes| f16::from_le_bytes(bytes).to_f32()),
            DType::BF16 => halves(|bytes| bf16::from_le_bytes(bytes).to_f32()),
            DType::E4M3 => bytes.iter().map(|&byte| e4m3::decode(byte)).collect(),
            other => panic!("numbers are not stored as {other:?}"),
        }
    }

    /// Bytes of `elems` consecutive elements; `elems` must be whole blocks. Scales that lie behind all elements of a
    /// matrix are not counted.
    pub const fn bytes(self, elems: usize) -> usize {
        elems / self.block_elems() * self.block_bytes()
    }

    /// Bytes of a dense matrix, with the scales behind its elements.
    pub const fn matrix_bytes(self, rows: usize, cols: usize) -> usize {
        self.bytes(rows * cols) + scaled::scale_bytes(self, rows, cols)
    }
}

/// A byte count for people, exact below one KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl std::fmt::Display for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let (mut unit, mut value) = (0, self.0 as f64);
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        match unit {
            0 => write!(f, "{} B", self.0),
            _ => write!(f, "{value:.1} {}", UNITS[unit]),
        }
    }
}
