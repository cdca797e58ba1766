//! Any bytes as a safetensors file: every accepted file is accepted by the reference.
#![no_main]

use formats::safetensors::SafeTensors;
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fuzz_target!(|bytes: &[u8]| {
    let Ok(ours) = SafeTensors::read(Path::new("fuzz"), bytes, bytes.len() as u64) else { return };
    let reference = safetensors::SafeTensors::deserialize(bytes).expect("the reference accepts it");
    assert_eq!(ours.tensors.len(), reference.len());
    for tensor in &ours.tensors {
        let theirs = reference.tensor(&tensor.name).expect("the same names");
        assert_eq!(theirs.shape(), tensor.shape);
        let range = tensor.offset as usize..(tensor.offset + tensor.bytes) as usize;
        assert_eq!(theirs.data(), &bytes[range]);
    }
});
