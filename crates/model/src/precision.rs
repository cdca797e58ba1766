//! The number formats that a model is computed with.

use crate::weights::WeightSpec;
use device::target::WeightUse;
use device::{DType, scaled};

/// The number formats of a program on its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// Activations.
    pub act: DType,
    /// KV pages.
    pub kv: DType,
    /// Weights; `None` stores each in the format that the device multiplies fastest.
    pub weights: Option<DType>,
    /// Quantises the matrices of layers, except routers, while they are loaded.
    pub quantise: Option<Quantise>,
    /// Steps have so few rows that weights may stay in a form by which many are multiplied slowly.
    pub few_rows: bool,
}

/// A format that weights are quantised to while they are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantise {
    /// e4m3 with a scale for each 128 × 128.
    Fp8,
    /// 4 bits with a scale and a zero for each 128 columns of a row; for 64 or 32 where columns do not divide.
    Int4,
}

impl Quantise {
    /// Whether it quantises a weight.
    pub(crate) fn takes(self, spec: &WeightSpec) -> bool {
        self.stored(spec).is_some()
    }

    /// The type that a weight is quantised to, if it is.
    pub(crate) fn stored(self, spec: &WeightSpec) -> Option<DType> {
        let (rows, cols) = (spec.rows(), spec.cols());
        if !matches!(spec.kind, WeightUse::Matrix | WeightUse::Experts) {
            return None;
        }
        let types: &[DType] = match self {
            Quantise::Fp8 => &[DType::F8Block],
            Quantise::Int4 => &[DType::I4, DType::I4G64, DType::I4G32],
        };
        // Kernels want the blocks of each expert whole, and both of its matrices in the same type.
        let whole = |size: usize| size.is_multiple_of(scaled::BLOCK);
        let whole = whole(cols) && spec.parts.iter().all(|part| whole(part.rows.len()));
        let cut = |dtype| spec.kind == WeightUse::Experts && dtype == DType::F8Block && !whole;
        types.iter().copied().find(|dtype| !cut(*dtype) && scaled::fits(*dtype, rows, cols))
    }
}

impl Precision {
    /// Nothing is rounded below float32: slow; the reference that other precisions are compared with.
    pub const EXACT: Precision = Precision::of(DType::F32);
    /// What a GPU computes with by default; a CPU can, too.
    pub const BF16: Precision = Precision::of(DType::BF16);

    const fn of(dtype: DType) -> Precision {
        Precision { act: dtype, kv: dtype, weights: Some(dtype), quantise: None, few_rows: false }
    }
}
