//! Any bytes as a tokenizer.json, used to encode and decode a text.
#![no_main]

use formats::tokenizer::Tokenizer;
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fuzz_target!(|bytes: &[u8]| {
    let Ok(tokenizer) = Tokenizer::from_json(Path::new("tokenizer.json"), bytes) else { return };
    let text = "Hello,  wörld 123\n\n<|im_end|> 日本 😀 don't";
    for ids in [tokenizer.encode(text, true), tokenizer.encode_text(text, false)] {
        let _ = ids.map(|ids| tokenizer.decode(&ids));
    }
});
