//! Any bytes as a config.json and, after a zero byte, a generation_config.json.
#![no_main]

use libfuzzer_sys::fuzz_target;
use model::ModelConfig;
use std::path::Path;

fuzz_target!(|bytes: &[u8]| {
    let mut parts = bytes.splitn(2, |&byte| byte == 0);
    let config = parts.next().unwrap_or_default();
    let generation = parts.next().map(|bytes| (Path::new("generation_config.json"), bytes));
    let Ok(config) = ModelConfig::from_hf(Path::new("config.json"), config, generation) else {
        return;
    };
    assert!(config.q_heads.is_multiple_of(config.kv_heads) && config.head_dim.is_multiple_of(2));
    for rope in config.decoder.ropes() {
        assert!(rope.frequencies(config.head_dim, 64).iter().all(|x| !x.is_nan()));
    }
    let vocab = config.vocab as u32;
    assert!(config.eos.iter().chain(&config.bos).chain(&config.pad).all(|&id| id < vocab));
});
