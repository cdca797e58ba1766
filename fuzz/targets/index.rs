//! Any bytes as an index of shards: every name is inside the folder.
#![no_main]

use formats::safetensors::read_index;
use libfuzzer_sys::fuzz_target;
use std::path::{Component, Path};

fuzz_target!(|bytes: &[u8]| {
    let Ok(shards) = read_index(Path::new("fuzz.index.json"), bytes) else { return };
    for shard in shards.keys() {
        let mut parts = Path::new(shard).components();
        assert!(matches!(parts.next(), Some(Component::Normal(_))) && parts.next().is_none());
    }
});
