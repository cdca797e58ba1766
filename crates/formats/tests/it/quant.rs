//! Every type against the `gguf` package: random blocks, equal to the last bit.

use formats::dtype::DType;
use formats::quant::dequantise;

#[test]
fn every_type_is_bit_exact_with_the_gguf_package() {
    let types = [
        (DType::F32, &include_bytes!("../data/quant/f32.bin")[..]),
        (DType::F16, include_bytes!("../data/quant/f16.bin")),
        (DType::BF16, include_bytes!("../data/quant/bf16.bin")),
        (DType::Q4_0, include_bytes!("../data/quant/q4_0.bin")),
        (DType::Q4_1, include_bytes!("../data/quant/q4_1.bin")),
        (DType::Q5_0, include_bytes!("../data/quant/q5_0.bin")),
        (DType::Q5_1, include_bytes!("../data/quant/q5_1.bin")),
        (DType::Q8_0, include_bytes!("../data/quant/q8_0.bin")),
        (DType::Q2_K, include_bytes!("../data/quant/q2_k.bin")),
        (DType::Q3_K, include_bytes!("../data/quant/q3_k.bin")),
        (DType::Q4_K, include_bytes!("../data/quant/q4_k.bin")),
        (DType::Q5_K, include_bytes!("../data/quant/q5_k.bin")),
        (DType::Q6_K, include_bytes!("../data/quant/q6_k.bin")),
        (DType::MXFP4, include_bytes!("../data/quant/mxfp4.bin")),
    ];
    for (dtype, golden) in types {
        // A file is blocks and then their elements as f32.
        let count = golden.len() / (dtype.block_bytes() + 4 * dtype.block_elems());
        let (blocks, expected) = golden.split_at(count * dtype.block_bytes());
        let mut found = vec![0.0f32; count * dtype.block_elems()];
        dequantise(dtype, blocks, &mut found).unwrap();
        for (i, (found, expected)) in found.iter().zip(expected.as_chunks::<4>().0).enumerate() {
            let expected = f32::from_le_bytes(*expected);
            assert_eq!(
                found.to_bits(),
                expected.to_bits(),
                "{dtype} element {i}: {found} {expected}"
            );
        }
    }
}
