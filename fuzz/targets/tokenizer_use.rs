//! Any tokenizer file with any text: a `tokenizer.json` or GGUF, a zero byte, a text. A GGUF
//! contains zero bytes, so the last one is the separator.
#![no_main]

use formats::Error;
use formats::gguf::Gguf;
use formats::tokenizer::{Detokenizer, Tokenizer};
use libfuzzer_sys::fuzz_target;
use std::path::Path;
use std::sync::Arc;

fuzz_target!(|input: &[u8]| {
    let at = input.iter().rposition(|&byte| byte == 0);
    let (file, text) = at.map_or((input, &b"Hello,  w\xc3\xb6rld 123 <|im_end|>"[..]), |at| {
        (&input[..at], &input[at + 1..])
    });
    let path = Path::new("fuzz");
    let made = match file.starts_with(b"GGUF") {
        true => Gguf::read(path, file, file.len() as u64).and_then(|gguf| Tokenizer::from_gguf(&gguf)),
        false => Tokenizer::from_json(path, file),
    };
    let Ok(tokenizer) = made else { return };
    let tokenizer = Arc::new(tokenizer);
    let text = String::from_utf8_lossy(text);
    let Ok(ids) = tokenizer.encode(&text, true) else { return };
    // With a limit: the same ids, or an error if there are more.
    assert_eq!(tokenizer.encode_limited(&text, true, ids.len()).ok().as_ref(), Some(&ids));
    if let Some(fewer) = ids.len().checked_sub(1) {
        let found = tokenizer.encode_limited(&text, true, fewer);
        assert!(matches!(found, Err(Error::TooLong { .. })), "{found:?}");
    }
    assert!(tokenizer.fewest_tokens(text.len()) <= ids.len());
    let _ = tokenizer.encode_text(&text, false);
    // Streaming equals decoding.
    let mut stream = Detokenizer::new(tokenizer.clone());
    let mut streamed = String::new();
    for &id in &ids {
        streamed.push_str(stream.push(id));
    }
    streamed.push_str(stream.finish());
    assert_eq!(streamed, tokenizer.decode(&ids));
});
