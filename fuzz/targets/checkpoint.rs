//! Any bytes as a checkpoint file: opened, configured, and every tensor read.
#![no_main]

use formats::chat::ChatTemplate;
use formats::checkpoint::Checkpoint;
use libfuzzer_sys::fuzz_target;
use model::ModelConfig;

fuzz_target!(|bytes: &[u8]| {
    let path = std::env::temp_dir().join(format!("dacapo-fuzz-{}", std::process::id()));
    std::fs::write(&path, bytes).expect("the temporary folder can be written");
    let Ok(checkpoint) = Checkpoint::open(&path) else { return };
    for tensor in checkpoint.tensors() {
        let mut data = vec![0; tensor.bytes];
        checkpoint.read_into(&tensor.name, &mut data).expect("a checked tensor can be read");
        let _ = checkpoint.read_f32(&tensor.name);
    }
    if let Ok(config) = ModelConfig::of(&checkpoint) {
        for rope in config.decoder.ropes() {
            assert_eq!(rope.frequencies(config.head_dim, 64).len(), config.head_dim / 2);
        }
    }
    let _ = ChatTemplate::of(&checkpoint);
});
