//! Any bytes as a GGUF header: accepted tensors are within the file.
#![no_main]

use formats::gguf::Gguf;
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fuzz_target!(|bytes: &[u8]| {
    let Ok(gguf) = Gguf::read(Path::new("fuzz.gguf"), bytes, bytes.len() as u64) else { return };
    for tensor in gguf.tensors() {
        assert!(tensor.offset + tensor.bytes <= bytes.len() as u64);
        assert_eq!(
            tensor.dtype.bytes_for(tensor.shape.iter().product()),
            Some(tensor.bytes as usize)
        );
    }
});
