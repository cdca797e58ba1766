//! Any bytes as a GGUF with a vocabulary, used to encode and decode a text.
#![no_main]

use formats::gguf::Gguf;
use formats::tokenizer::Tokenizer;
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fuzz_target!(|bytes: &[u8]| {
    let Ok(gguf) = Gguf::read(Path::new("fuzz.gguf"), bytes, bytes.len() as u64) else { return };
    let Ok(tokenizer) = Tokenizer::from_gguf(&gguf) else { return };
    let text = "Hello,  wörld 123\n\n<|im_end|> 日本 😀 don't";
    for ids in [tokenizer.encode(text, true), tokenizer.encode_text(text, false)] {
        let _ = ids.map(|ids| tokenizer.decode(&ids));
    }
});
