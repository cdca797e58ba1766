//! Any bytes as quantized blocks of any type.
#![no_main]

use formats::dtype::DType;
use formats::quant::dequantise;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((&first, bytes)) = bytes.split_first() else { return };
    let dtype = DType::ALL[usize::from(first) % DType::ALL.len()];
    let blocks = bytes.len() / dtype.block_bytes();
    let mut out = vec![0.0; blocks * dtype.block_elems()];
    let _ = dequantise(dtype, &bytes[..blocks * dtype.block_bytes()], &mut out);
    let _ = dequantise(dtype, bytes, &mut out);
});
