//! The operator's settings: listen address, API keys and limits.

use crate::budget::most_for_one;
use crate::kv_events::KvEvents;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// The server's configuration, apart from the model.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// The listen address; loopback by default.
    pub listen: SocketAddr,
    /// Accepted API keys; if empty, no key is required.
    pub api_keys: Vec<String>,
    /// Names accepted in the `Host` header besides IP addresses and `localhost`. Other names are
    /// refused if any are listed here, and on loopback without keys, where DNS rebinding would let
    /// a web page of another origin read responses.
    pub allowed_hosts: Vec<String>,
    /// Origins whose web pages may use the server from a browser; `*` is every origin.
    pub allow_origins: Vec<String>,
    /// Whether clients with different API keys share cached prefixes. Sharing leaks information:
    /// the time that a prompt takes shows whether another client sent the same prefix.
    pub share_prefix_cache: bool,
    /// Whether the routes that change the model's memory and weights are served.
    pub admin: bool,
    /// Folders that weights may be read from while the server runs; any other path is refused.
    pub weight_roots: Vec<PathBuf>,
    /// Gives the model's memory back when nothing was asked for so long; the next request brings it back.
    pub sleep_after: Option<Duration>,
    /// Limits on requests, memory and time.
    pub limits: Limits,
    /// vLLM's gRPC services, if they are served; needs the feature `grpc`.
    pub grpc: Option<Grpc>,
    /// Where changes of the prefix cache are published, if anywhere.
    pub kv_events: Option<KvEvents>,
    /// The file for step records, one JSON object per line.
    pub trace: Option<PathBuf>,
    /// The number of log lines that could not be written; the log writer increments it.
    pub log_lines_dropped: Arc<AtomicU64>,
    /// HTTP threads; the engine has its own thread.
    pub threads: usize,
    /// Worker threads that parse, render and tokenize large bodies.
    pub work_threads: usize,
    /// Returns freed memory to the system, which the allocator would otherwise keep; called after
    /// large bodies, at most once a second.
    pub trim: Option<fn()>,
}

/// Where and as what the gRPC services are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grpc {
    /// The listen address.
    pub listen: SocketAddr,
    /// The model as its clients find it: a folder with its tokenizer.
    pub model_id: String,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 8000)),
            api_keys: Vec::new(),
            allowed_hosts: Vec::new(),
            allow_origins: Vec::new(),
            share_prefix_cache: false,
            admin: false,
            weight_roots: Vec::new(),
            sleep_after: None,
            limits: Limits::default(),
            grpc: None,
            kv_events: None,
            trace: None,
            log_lines_dropped: Arc::default(),
            threads: cores().clamp(2, 8),
            work_threads: (cores() / 2).clamp(2, 8),
            trim: None,
        }
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(2, std::num::NonZero::get)
}

/// One row of the table of limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The field of [`Limits`] and the name on the command line.
    pub name: &'static str,
    /// The default.
    pub default: u64,
    /// The allowed values.
    pub range: RangeInclusive<u64>,
    /// A description, for `--help` and the page.
    pub doc: &'static str,
}

/// More than any machine has, and small enough that sums do not overflow.
const ANY: RangeInclusive<u64> = 1..=1 << 40;

macro_rules! range {
    () => {
        ANY
    };
    ($range:expr) => {
        $range
    };
}

macro_rules! limits {
    ($($(#[doc = $doc:literal])+ $name:ident = $default:expr $(, in $range:expr)?;)*) => {
        /// All limits of the server. A request that exceeds one gets an error that states the
        /// bound; nothing is truncated silently.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Limits {
            $($(#[doc = $doc])+ pub $name: u64,)*
        }

        impl Default for Limits {
            fn default() -> Self {
                Self { $($name: $default,)* }
            }
        }

        impl Limits {
            /// The limits in order, for `--help` and the page.
            pub const TABLE: &'static [Limit] = &[
                $(Limit {
                    name: stringify!($name),
                    default: $default,
                    range: range!($($range)?),
                    doc: concat!($($doc),+).trim_ascii(),
                },)*
            ];

            /// Sets a limit by name; an unknown name or a value out of range is an error.
            pub fn set(&mut self, name: &str, value: u64) -> Result<(), String> {
                let row = Self::TABLE.iter().find(|row| row.name == name);
                if let Some(Limit { range, .. }) = row.filter(|row| !row.range.contains(&value)) {
                    let (least, most) = (range.start(), range.end());
                    return Err(format!("{name}: the value must be between {least} and {most}"));
                }
                match name {
                    $(stringify!($name) => self.$name = value,)*
                    _ => {
                        let names: Vec<&str> = Self::TABLE.iter().map(|row| row.name).collect();
                        let names = names.join(", ");
                        return Err(format!("{name}: unknown limit; the limits are {names}"));
                    }
                }
                Ok(())
            }

            /// Every limit with its current value.
            pub fn in_force(&self) -> impl Iterator<Item = (&'static Limit, u64)> {
                let values = [$(self.$name),*];
                Self::TABLE.iter().zip(values)
            }

            /// The value of a limit by name.
            pub fn get(&self, name: &str) -> Option<u64> {
                match name {
                    $(stringify!($name) => Some(self.$name),)*
                    _ => None,
                }
            }
        }
    };
}

limits! {
    /// Open connections, and open HTTP/2 streams of all connections; the next one gets 503.
    connections = 4096;
    /// Open HTTP/2 streams of one connection; the client waits with the next.
    streams = 100, in 1..=1 << 20;
    /// Bytes of a request line and its headers together.
    header_bytes = 32 * 1024, in 8192..=1 << 30;
    /// Headers in a request.
    headers = 100, in 1..=10_000;
    /// Milliseconds for the headers of a request to arrive; then the connection is closed.
    header_ms = 10_000;
    /// Bytes of a request body.
    body_bytes = 8 * 1024 * 1024;
    /// Milliseconds for a request body to arrive.
    body_ms = 30_000;
    /// Bytes of all bodies being received, parsed or tokenized; then 429. Bodies of more than 64
    /// KiB leave a quarter of it to smaller ones.
    body_budget_bytes = 32 * 1024 * 1024;
    /// Milliseconds that a body may wait for its share of that budget.
    body_wait_ms = 1000;
    /// Bodies of 4 KiB or more that wait for a worker thread; then 429.
    work_waiting = 256;
    /// Strings, names, lists, objects and other values in the JSON of a request; token ids are not
    /// counted.
    json_values = 128 * 1024;
    /// Nesting levels in the JSON of a request.
    json_depth = 128, in 1..=128;
    /// Requests accepted and not yet finished (running and waiting together); then 429.
    inflight = 1024;
    /// Prompts in one call of completions.
    batch = 256;
    /// Texts in one call of embeddings, rerank, score or classify.
    inputs = 2048;
    /// Choices per prompt (`n`).
    choices = 256;
    /// Choices in one call, over all its prompts (prompts × `n`).
    sequences = 256;
    /// Messages in a chat.
    messages = 4096;
    /// Tools offered in a chat.
    tools = 128;
    /// Bytes of all tools of a chat, as JSON.
    tools_bytes = 1024 * 1024;
    /// Bytes of a tool name.
    tool_name_bytes = 256;
    /// Entries of `chat_template_kwargs`.
    kwargs = 64;
    /// Bytes of `chat_template_kwargs`, as JSON.
    kwargs_bytes = 64 * 1024;
    /// Nesting levels of `chat_template_kwargs`.
    kwargs_depth = 16, in 1..=64;
    /// Stop strings of a request.
    stops = 16;
    /// Bytes of one stop string.
    stop_bytes = 256;
    /// Entries of `stop_token_ids`.
    stop_token_ids = 64;
    /// Entries of `logit_bias`.
    logit_bias = 1024;
    /// Alternatives reported per token.
    top_logprobs = 20, in 1..=20;
    /// Characters of `cache_salt`.
    salt_chars = 256;
    /// Bytes of a JSON schema (of `response_format` or of a tool).
    schema_bytes = 256 * 1024;
    /// Milliseconds for compiling a grammar or schema.
    grammar_ms = 4_000;
    /// Tokens that one call of tokenize returns, or that one call of detokenize accepts.
    tokenize_tokens = 128 * 1024;
    /// Bytes of prompts that `echo` returns in one call.
    echo_bytes = 4 * 1024 * 1024;
    /// Log-probabilities of prompt tokens (tokens × alternatives) that `echo` returns in one call.
    echo_logprobs = 4 * 1024 * 1024;
    /// Approximate bytes of a response that is not streamed.
    answer_bytes = 32 * 1024 * 1024;
    /// Approximate bytes of all responses being collected (those not streamed); then 503.
    answer_budget_bytes = 256 * 1024 * 1024;
    /// Tokens that may be queued for a client; a client that falls further behind loses its stream.
    backlog = 4096;
    /// Milliseconds without an event after which a stream gets a comment line, so that proxies keep
    /// it open.
    ping_ms = 10_000;
    /// Milliseconds that a client may go without reading a byte of its response before its
    /// connection is closed.
    write_ms = 60_000;
    /// Responses kept for `previous_response_id`; the oldest are removed.
    responses = 1024;
    /// Approximate bytes of all kept responses, with their conversations.
    responses_bytes = 64 * 1024 * 1024;
    /// Live views (`/live`) open at once; then 503.
    watchers = 16;
    /// Milliseconds a step may take before the server reports that it is not ready.
    stall_ms = 60_000;
    /// Milliseconds that running requests have to finish after SIGTERM.
    drain_ms = 30_000;
    /// Milliseconds after SIGTERM during which `/health` fails but requests are still accepted, so that routers stop
    /// sending them.
    leave_ms = 0, in 0..=600_000;
}

impl Limits {
    /// Whether the limits are consistent with each other.
    pub(crate) fn check(&self) -> Result<(), String> {
        for (name, one, budget_name, budget) in [
            ("body_bytes", self.body_bytes, "body_budget_bytes", self.body_budget_bytes),
            ("answer_bytes", self.answer_bytes, "answer_budget_bytes", self.answer_budget_bytes),
        ] {
            let most = most_for_one(budget);
            if one > most {
                return Err(format!(
                    "the limit {name}={one} is too large: {budget_name}={budget} allows one request \
                     at most {most}"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_and_struct_agree() {
        let mut limits = Limits::default();
        for row in Limits::TABLE {
            assert_eq!(limits.get(row.name), Some(row.default), "{}", row.name);
            assert!(row.doc.ends_with('.'), "{}: {}", row.name, row.doc);
            assert!(row.range.contains(&row.default), "{}", row.name);
            for value in [*row.range.start(), *row.range.end()] {
                limits.set(row.name, value).unwrap();
                assert_eq!(limits.get(row.name), Some(value));
            }
            for value in [0, row.range.start().wrapping_sub(1), row.range.end() + 1, u64::MAX] {
                let right = row.range.contains(&value);
                assert!(right || limits.set(row.name, value).is_err(), "{}", row.name);
            }
        }
        assert!(limits.set("nothing", 1).is_err());
        assert!(limits.set("header_bytes", 8191).is_err(), "hyper needs at least 8192");
        assert!(limits.in_force().all(|(row, value)| value == *row.range.end()));
        assert_eq!(limits.in_force().count(), Limits::TABLE.len());
    }

    #[test]
    fn a_limit_beyond_its_budget_is_refused() {
        let mut limits = Limits::default();
        assert_eq!(limits.check(), Ok(()));
        limits.body_bytes = limits.body_budget_bytes;
        assert!(limits.check().unwrap_err().contains("body_budget_bytes"));
    }

    #[test]
    fn default_listen_address_is_loopback() {
        assert!(ServerConfig::default().listen.ip().is_loopback());
    }
}
