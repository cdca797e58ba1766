//! Any text through a tokenizer: plain text never becomes a control token, and streaming equals
//! decoding. The first byte selects the tokenizer.
#![no_main]

use formats::gguf::Gguf;
use formats::tokenizer::{Detokenizer, Tokenizer};
use libfuzzer_sys::fuzz_target;
use std::path::Path;
use std::sync::{Arc, LazyLock};

static TOKENIZERS: LazyLock<Vec<Arc<Tokenizer>>> = LazyLock::new(|| {
    let files: [&[u8]; 4] = [
        include_bytes!("../../crates/formats/tests/data/tokenizers/qwen2.gguf"),
        include_bytes!("../../crates/formats/tests/data/tokenizers/smollm.gguf"),
        include_bytes!("../../crates/formats/tests/data/tokenizers/llama-bpe.gguf"),
        include_bytes!("../../crates/formats/tests/data/tokenizers/llama.gguf"),
    ];
    let read = |bytes: &[u8]| {
        let gguf = Gguf::read(Path::new("fuzz"), bytes, bytes.len() as u64).expect("a good file");
        Arc::new(Tokenizer::from_gguf(&gguf).expect("a good vocabulary"))
    };
    files.into_iter().map(read).collect()
});

fuzz_target!(|bytes: &[u8]| {
    let Some((&first, bytes)) = bytes.split_first() else { return };
    let tokenizer = &TOKENIZERS[usize::from(first) % TOKENIZERS.len()];
    let text = String::from_utf8_lossy(bytes);
    let plain = tokenizer.encode_text(&text, false).expect("any text encodes");
    assert!(!plain.iter().any(|&id| tokenizer.is_control(id)));
    for ids in [plain, tokenizer.encode(&text, true).expect("any text encodes")] {
        let mut stream = Detokenizer::new(tokenizer.clone());
        let mut streamed = String::new();
        for id in &ids {
            streamed.push_str(stream.push(*id));
        }
        streamed.push_str(stream.finish());
        assert_eq!(streamed, tokenizer.decode(&ids));
    }
});
