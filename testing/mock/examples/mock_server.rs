//! A server with the mock backend: everything is real except the model. For client tests, load
//! tests and demos of the page.
//!
//!     cargo run --release -p mock --example mock_server -- 127.0.0.1:8000
//!
//! Environment: `KEY` (API key), `STEP_US` (duration of a step), `SEATS`, `INFLIGHT`, `PANIC_EVERY`
//! (steps), `TRACE` (file), `LOG` (a tracing filter), `ECHO` (repeat the prompt), `MODEL` (a
//! checkpoint whose tokenizer and chat template are used; set `ECHO` too).

use mock::{Mock, MockConfig, demo, echo};
use server::answer::{Reasoning, ToolFormat};
use server::{Model, ServerConfig};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use text::bytes::ByteText;
use text::{CheckpointText, TextModel};

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// The tokenizer and chat template of a checkpoint; its weights are not read.
fn checkpoint(path: &Path) -> CheckpointText {
    let checkpoint =
        formats::checkpoint::Checkpoint::open(path).expect("cannot open the checkpoint");
    let tokenizer =
        formats::tokenizer::Tokenizer::of(&checkpoint).expect("cannot read the tokenizer");
    let template =
        formats::chat::ChatTemplate::of(&checkpoint).expect("cannot read the chat template");
    let config = model::ModelConfig::of(&checkpoint).expect("cannot read the config");
    CheckpointText::new(Arc::new(tokenizer), template, config.eos, config.vocab as u32)
}

fn main() {
    let filter = std::env::var("LOG").unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let mut config = ServerConfig::default();
    if let Some(listen) = std::env::args().nth(1) {
        config.listen =
            listen.parse().expect("the argument must be an address such as 127.0.0.1:8000");
    }
    config.api_keys.extend(std::env::var("KEY"));
    config.trace = std::env::var("TRACE").ok().map(Into::into);
    config.limits.inflight = number("INFLIGHT", config.limits.inflight);
    let text: Arc<dyn TextModel> = match std::env::var("MODEL") {
        Ok(path) => Arc::new(checkpoint(Path::new(&path))),
        Err(_) => Arc::new(ByteText),
    };
    let panic_every = number("PANIC_EVERY", 0);
    let mock = MockConfig {
        oracle: if std::env::var("ECHO").is_ok() { echo() } else { demo() },
        step_time: Duration::from_micros(number("STEP_US", 10_000)),
        seats: number("SEATS", 256),
        vocab: text.vocab(),
        embedding: 64,
        panic_every: (panic_every > 0).then_some(panic_every),
        ..MockConfig::default()
    };
    let mut model = Model::new("mock", mock.context, text);
    model.embedding = Some(mock.embedding as u32);
    model.tools = ToolFormat::Hermes;
    model.reasoning = Reasoning::detect("</think>");
    let factory = Box::new(move || Ok(Box::new(Mock::new(mock.clone())) as _));
    let reserved = server::Reserved::new(&config).expect("cannot listen");
    let exit = server::serve(config, reserved, factory, model, |_| {});
    let exit = exit.expect("cannot start the server");
    eprintln!("{exit:?}");
}
