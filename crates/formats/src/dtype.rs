//! Element types of checkpoint tensors, plain and block-quantised.

use std::fmt;

/// How the elements of a tensor are stored. Block types pack [`DType::block_elems`] consecutive
/// elements of a row into [`DType::block_bytes`] bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, non_camel_case_types)]
pub enum DType {
    F64,
    F32,
    F16,
    BF16,
    F8_E4M3,
    F8_E8M0,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    MXFP4,
}

use DType::*;

impl DType {
    /// Every type, in order of declaration.
    pub const ALL: [DType; 26] = [
        F64, F32, F16, BF16, F8_E4M3, F8_E8M0, I64, I32, I16, I8, U64, U32, U16, U8, Bool, Q4_0,
        Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, MXFP4,
    ];

    /// The name used by safetensors for plain types and by GGUF for quantised ones.
    pub fn name(self) -> &'static str {
        match self {
            F64 => "F64",
            F32 => "F32",
            F16 => "F16",
            BF16 => "BF16",
            F8_E4M3 => "F8_E4M3",
            F8_E8M0 => "F8_E8M0",
            I64 => "I64",
            I32 => "I32",
            I16 => "I16",
            I8 => "I8",
            U64 => "U64",
            U32 => "U32",
            U16 => "U16",
            U8 => "U8",
            Bool => "BOOL",
            Q4_0 => "Q4_0",
            Q4_1 => "Q4_1",
            Q5_0 => "Q5_0",
            Q5_1 => "Q5_1",
            Q8_0 => "Q8_0",
            Q2_K => "Q2_K",
            Q3_K => "Q3_K",
            Q4_K => "Q4_K",
            Q5_K => "Q5_K",
            Q6_K => "Q6_K",
            MXFP4 => "MXFP4",
        }
    }

    /// The type of that [`DType::name`], in any letter case.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name().eq_ignore_ascii_case(name))
    }

    /// The type of that safetensors name: the plain types only.
    pub(crate) fn from_safetensors(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| !dtype.is_quantised() && dtype.name() == name)
    }

    /// The type of that `ggml_type` number, or the name of a type that exists but is not
    /// supported.
    pub(crate) fn from_ggml(number: u32) -> Result<Self, &'static str> {
        Ok(match number {
            0 => F32,
            1 => F16,
            2 => Q4_0,
            3 => Q4_1,
            6 => Q5_0,
            7 => Q5_1,
            8 => Q8_0,
            10 => Q2_K,
            11 => Q3_K,
            12 => Q4_K,
            13 => Q5_K,
            14 => Q6_K,
            24 => I8,
            25 => I16,
            26 => I32,
            27 => I64,
            28 => F64,
            30 => BF16,
            39 => MXFP4,
            4 => return Err("Q4_2"),
            5 => return Err("Q4_3"),
            9 => return Err("Q8_1"),
            15 => return Err("Q8_K"),
            16 => return Err("IQ2_XXS"),
            17 => return Err("IQ2_XS"),
            18 => return Err("IQ3_XXS"),
            19 => return Err("IQ1_S"),
            20 => return Err("IQ4_NL"),
            21 => return Err("IQ3_S"),
            22 => return Err("IQ2_S"),
            23 => return Err("IQ4_XS"),
            29 => return Err("IQ1_M"),
            31 => return Err("Q4_0_4_4"),
            32 => return Err("Q4_0_4_8"),
            33 => return Err("Q4_0_8_8"),
            34 => return Err("TQ1_0"),
            35 => return Err("TQ2_0"),
            40 => return Err("NVFP4"),
            41 => return Err("Q1_0"),
            _ => return Err("an unknown ggml type"),
        })
    }

    /// Elements in one block; 1 for plain types.
    pub fn block_elems(self) -> usize {
        match self {
            Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 | MXFP4 => 32,
            Q2_K | Q3_K | Q4_K | Q5_K | Q6_K => 256,
            _ => 1,
        }
    }

    /// Bytes of one block; the element size for plain types.
    pub fn block_bytes(self) -> usize {
        match self {
            F64 | I64 | U64 => 8,
            F32 | I32 | U32 => 4,
            F16 | BF16 | I16 | U16 => 2,
            F8_E4M3 | F8_E8M0 | I8 | U8 | Bool => 1,
            MXFP4 => 17,
            Q4_0 => 18,
            Q4_1 => 20,
            Q5_0 => 22,
            Q5_1 => 24,
            Q8_0 => 34,
            Q2_K => 84,
            Q3_K => 110,
            Q4_K => 144,
            Q5_K => 176,
            Q6_K => 210,
        }
    }

    /// Whether elements are packed in blocks with shared scales.
    pub(crate) fn is_quantised(self) -> bool {
        self.block_elems() > 1
    }

    /// Bytes of `elements` consecutive elements, `None` when they are not whole blocks or the
    /// count overflows.
    pub fn bytes_for(self, elements: usize) -> Option<usize> {
        let blocks =
            elements.is_multiple_of(self.block_elems()).then(|| elements / self.block_elems())?;
        blocks.checked_mul(self.block_bytes())
    }
}

/// Elements of a tensor of that shape; `None` when multiplying the dimensions overflows in any order, even if
/// one of them is zero.
pub(crate) fn elements(shape: &[u64]) -> Option<usize> {
    let widest =
        shape.iter().try_fold(1usize, |n, &d| n.checked_mul(usize::try_from(d.max(1)).ok()?));
    widest.map(|n| if shape.contains(&0) { 0 } else { n })
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for dtype in DType::ALL {
            assert_eq!(DType::parse(dtype.name()), Some(dtype));
            assert_eq!(dtype.bytes_for(dtype.block_elems()), Some(dtype.block_bytes()));
        }
        assert_eq!(DType::parse("IQ4_XS"), None);
        assert_eq!(DType::from_ggml(23), Err("IQ4_XS"));
    }

    #[test]
    fn no_order_of_dimensions_overflows() {
        assert_eq!(elements(&[]), Some(1));
        assert_eq!(elements(&[3, 0, 5]), Some(0));
        assert_eq!(elements(&[0, 1 << 40, 1 << 40]), None);
        assert_eq!(elements(&[1 << 40, 1 << 40, 0]), None);
    }

    #[test]
    fn partial_blocks_and_overflow_have_no_size() {
        assert_eq!(DType::Q4_K.bytes_for(255), None);
        assert_eq!(DType::F32.bytes_for(usize::MAX), None);
    }
}
