//! How a weight is stored in a checkpoint of compressed-tensors: its tensors, and what its configuration says.

use crate::precision::Quantise;
use device::DType;
use device::scaled::feedback::{self, Inputs};
use device::scaled::quantise::{Fp8Rows, Int4Rows, Zeros, fp8_rows, int4_rows};
use device::scaled::{BLOCK, e4m3, fits};
use formats::dtype::DType as Stored;
use formats::write::NewTensor;
use serde_json::{Value, json};
use std::fmt;

/// Rows that are quantised together start at multiples of this: rows of blocks, and words of zeros, are whole.
pub(super) const UNIT: usize = BLOCK;
/// Values in a word.
const VALUES: usize = 8;

/// A way to store weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    /// e4m3 with a scale for each 128 × 128.
    Blocks,
    /// e4m3 with a scale for each row.
    Rows,
    /// 4 bits with a scale for each group of columns of a row; with a zero, too, unless all zeros are 8.
    Int4 { group: usize, zeros: Zeros },
}

impl Scheme {
    /// The scheme for matrices of these rows and columns; `None` if there is none.
    ///
    /// vLLM joins matrices whose rows are whole blocks only, so that others have a scale for each row. It reads experts of
    /// 4 bits without zeros only; `transformers` reads experts with blocks or zeros neither.
    pub(super) fn choose(
        format: Quantise,
        most_columns: usize,
        experts: bool,
        shapes: &[[usize; 2]],
    ) -> Option<Scheme> {
        if shapes.is_empty() {
            return None;
        }
        let all = |dtype| shapes.iter().all(|&[rows, cols]| fits(dtype, rows, cols));
        let whole = shapes.iter().flatten().all(|size| size.is_multiple_of(BLOCK));
        match format {
            Quantise::Fp8 if whole && !experts => Some(Scheme::Blocks),
            Quantise::Fp8 => all(DType::F8Row).then_some(Scheme::Rows),
            Quantise::Int4 => {
                let zeros = if experts { Zeros::Middle } else { Zeros::Searched };
                let groups = [(128, DType::I4), (64, DType::I4G64), (32, DType::I4G32)];
                let mut groups = groups.into_iter().filter(|(group, _)| *group <= most_columns);
                let found = groups.find(|(_, dtype)| all(*dtype))?;
                Some(Scheme::Int4 { group: found.0, zeros })
            }
        }
    }

    /// The tensors of a weight.
    pub(super) fn tensors(self, module: &str, [rows, cols]: [usize; 2]) -> Vec<NewTensor> {
        let tensor = |end: &str, dtype, shape: &[usize]| NewTensor {
            name: format!("{module}.{end}"),
            dtype,
            shape: shape.into(),
        };
        let fp8 = |scales: [usize; 2]| {
            vec![
                tensor("weight", Stored::F8_E4M3, &[rows, cols]),
                tensor("weight_scale", Stored::F32, &scales),
            ]
        };
        match self {
            Scheme::Blocks => fp8([rows.div_ceil(BLOCK), cols.div_ceil(BLOCK)]),
            Scheme::Rows => fp8([rows, 1]),
            Scheme::Int4 { group, zeros } => {
                let mut all = vec![
                    tensor("weight_packed", Stored::I32, &[rows, cols / VALUES]),
                    tensor("weight_scale", Stored::F16, &[rows, cols / group]),
                    tensor("weight_shape", Stored::I64, &[2]),
                ];
                if zeros == Zeros::Searched {
                    let shape = [rows.div_ceil(VALUES), cols / group];
                    all.push(tensor("weight_zero_point", Stored::I32, &shape));
                }
                all
            }
        }
    }

    /// Rows that are rounded together start at multiples of this.
    pub(super) fn unit(self) -> usize {
        match self {
            Scheme::Blocks => BLOCK,
            // Words of zeros are whole, and the lanes of a processor are full.
            Scheme::Rows | Scheme::Int4 { .. } => 16,
        }
    }

    /// Rounds rows of a weight: each value to the nearest, or all so that the outputs for these inputs change least.
    pub(super) fn round(self, floats: &[f32], cols: usize, inputs: Option<&Inputs<'_>>) -> Rounded {
        let fp8 = |dtype| match inputs {
            Some(inputs) => feedback::fp8_rows(dtype, floats, inputs),
            None => fp8_rows(dtype, floats, cols),
        };
        match self {
            Scheme::Blocks => Rounded::Fp8(fp8(DType::F8Block)),
            Scheme::Rows => Rounded::Fp8(fp8(DType::F8Row)),
            Scheme::Int4 { group, zeros } => Rounded::Int4(match inputs {
                Some(inputs) => feedback::int4_rows(floats, group, zeros, inputs),
                None => int4_rows(floats, group, zeros),
            }),
        }
    }

    /// The values that rounded rows stand for.
    pub(super) fn values(self, rounded: &Rounded, cols: usize) -> Vec<f32> {
        let mut all = Vec::new();
        match rounded {
            Rounded::Fp8(found) => {
                // Scales of a row, and rows and columns that have the same.
                let (each, high, wide) = match self {
                    Scheme::Blocks => (cols.div_ceil(BLOCK), BLOCK, BLOCK),
                    Scheme::Rows | Scheme::Int4 { .. } => (1, 1, cols),
                };
                for (at, byte) in found.bytes.iter().enumerate() {
                    let scale = found.scales[at / cols / high * each + at % cols / wide];
                    all.push(e4m3::decode(*byte) * scale);
                }
            }
            Rounded::Int4(found) => {
                let group = found.values.len() / found.scales.len();
                for (at, value) in found.values.iter().enumerate() {
                    let steps = f32::from(*value) - f32::from(found.zeros[at / group]);
                    all.push(steps * found.scales[at / group]);
                }
            }
        }
        all
    }

    /// Bytes of the tensors for rounded rows of a weight from `first` on: the end of a name, the byte where they start,
    /// and the bytes. `first` is a multiple of [`Scheme::unit`].
    pub(super) fn bytes(
        self,
        [all_rows, cols]: [usize; 2],
        first: usize,
        rounded: Rounded,
    ) -> Vec<(&'static str, u64, Vec<u8>)> {
        let f32s = |all: &[f32]| all.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let found = match rounded {
            Rounded::Fp8(found) => {
                let scales = match self {
                    Scheme::Blocks => first / BLOCK * cols.div_ceil(BLOCK),
                    Scheme::Rows | Scheme::Int4 { .. } => first,
                };
                return vec![
                    ("weight", (first * cols) as u64, found.bytes),
                    ("weight_scale", 4 * scales as u64, f32s(&found.scales)),
                ];
            }
            Rounded::Int4(found) => found,
        };
        let rows = found.values.len() / cols;
        let groups = found.scales.len() / rows;
        let packed = found.values.chunks_exact(2).map(|pair| pair[0] | pair[1] << 4).collect();
        let mut scales = Vec::with_capacity(2 * found.scales.len());
        DType::F16.encode(&found.scales, &mut scales);
        let mut all = vec![
            ("weight_packed", (first * cols / 2) as u64, packed),
            ("weight_scale", (2 * first * groups) as u64, scales),
        ];
        if first == 0 {
            let shape = [all_rows, cols].map(|size| (size as i64).to_le_bytes()).concat();
            all.push(("weight_shape", 0, shape));
        }
        if let Scheme::Int4 { zeros: Zeros::Searched, .. } = self {
            let at = (4 * (first / VALUES) * groups) as u64;
            all.push(("weight_zero_point", at, packed_zeros(&found.zeros, groups)));
        }
        all
    }

    /// The format's name in the configuration.
    pub(super) fn format(self) -> &'static str {
        match self {
            Scheme::Blocks | Scheme::Rows => "float-quantized",
            Scheme::Int4 { .. } => "pack-quantized",
        }
    }

    /// A group of `config_groups`: what the classes of compressed-tensors write for its presets `FP8_BLOCK`,
    /// `FP8_DYNAMIC`, `W4A16_ASYM` and `W4A16`.
    pub(super) fn config(self, targets: &[&str]) -> Value {
        let fp8 = |strategy: &str, group: Option<usize>, dynamic: bool| {
            json!({ "num_bits": 8, "type": "float", "symmetric": true, "group_size": group, "strategy": strategy,
                    "dynamic": dynamic })
        };
        let (weights, input) = match self {
            Scheme::Blocks => {
                let mut weights = fp8("block", None, false);
                weights["block_structure"] = json!([BLOCK, BLOCK]);
                (weights, fp8("group", Some(BLOCK), true))
            }
            Scheme::Rows => (fp8("channel", None, false), fp8("token", None, true)),
            Scheme::Int4 { group, zeros } => {
                let weights = json!({
                    "num_bits": 4, "type": "int", "symmetric": zeros == Zeros::Middle, "group_size": group,
                    "strategy": "group", "dynamic": false,
                });
                (weights, Value::Null)
            }
        };
        json!({ "targets": targets, "weights": weights, "input_activations": input, "output_activations": null,
                "format": self.format() })
    }
}

/// Rows of a weight as numbers of few bits.
#[derive(Clone, Debug)]
pub(super) enum Rounded {
    Fp8(Fp8Rows),
    Int4(Int4Rows),
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scheme::Blocks => f.write_str("fp8 with a scale for each 128 × 128"),
            Scheme::Rows => f.write_str("fp8 with a scale for each row"),
            Scheme::Int4 { group, zeros: Zeros::Searched } => {
                write!(f, "int4 in groups of {group} with zeros")
            }
            Scheme::Int4 { group, zeros: Zeros::Middle } => {
                write!(f, "int4 in groups of {group} without zeros")
            }
        }
    }
}

/// Zeros of rows, rows × groups, in words of eight rows, the first in the lowest bits.
fn packed_zeros(zeros: &[u8], groups: usize) -> Vec<u8> {
    let words = |rows: &[u8]| {
        let word = |group: usize| {
            let of = rows.iter().skip(group).step_by(groups).enumerate();
            of.fold(0u32, |word, (at, zero)| word | u32::from(*zero) << (4 * at))
        };
        (0..groups).flat_map(|group| word(group).to_le_bytes()).collect::<Vec<u8>>()
    };
    zeros.chunks(VALUES * groups).flat_map(words).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_packed_along_rows() {
        // Ten rows of two groups.
        let zeros: Vec<u8> = (0..10).flat_map(|row| [row, 15 - row]).collect();
        let words: Vec<u32> = packed_zeros(&zeros, 2)
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes(b.try_into().unwrap()))
            .collect();
        assert_eq!(words, [0x7654_3210, 0x89ab_cdef, 0x98, 0x67]);
    }

    #[test]
    fn the_scheme_is_one_that_others_read() {
        let choose = |format, group, experts, shapes: &[[usize; 2]]| {
            Scheme::choose(format, group, experts, shapes).map(|scheme| scheme.to_string())
        };
        let (fp8, int4) = (Quantise::Fp8, Quantise::Int4);
        let blocks = "fp8 with a scale for each 128 × 128";
        let rows = "fp8 with a scale for each row";
        let zeros = |group| format!("int4 in groups of {group} with zeros");
        assert_eq!(choose(fp8, 128, false, &[[256, 384]]).unwrap(), blocks);
        assert_eq!(choose(fp8, 128, false, &[[256, 384], [192, 128]]).unwrap(), rows);
        assert_eq!(choose(fp8, 128, true, &[[256, 384]]).unwrap(), rows);
        assert_eq!(choose(fp8, 128, false, &[[256, 100]]), None);
        assert_eq!(choose(int4, 128, false, &[[16, 256]]).unwrap(), zeros(128));
        assert_eq!(choose(int4, 64, false, &[[16, 256]]).unwrap(), zeros(64));
        assert_eq!(choose(int4, 128, false, &[[16, 256], [16, 96]]).unwrap(), zeros(32));
        let experts = choose(int4, 128, true, &[[16, 192]]).unwrap();
        assert_eq!(experts, "int4 in groups of 64 without zeros");
        assert_eq!(choose(int4, 128, false, &[[16, 48]]), None);
    }
}
