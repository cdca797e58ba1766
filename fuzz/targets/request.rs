//! Any bytes as the body of any route: parsed and validated, or refused with a client error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use text::bytes::ByteText;
use server::{Limits, Model};
use std::sync::{Arc, LazyLock};

const ROUTES: [&str; 11] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
    "/v1/messages/count_tokens",
    "/api/embed",
];

static MODEL: LazyLock<Model> = LazyLock::new(|| Model::new("m", 8192, Arc::new(ByteText)));

fuzz_target!(|input: &[u8]| {
    let Some((first, body)) = input.split_first() else { return };
    let route = ROUTES[usize::from(*first) % ROUTES.len()];
    if let Err(e) = server::openai::check(route, body, &MODEL, &Limits::default()) {
        assert!(!e.message.is_empty());
        assert!(e.status.is_client_error(), "{e:?}");
    }
});
