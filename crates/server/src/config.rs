//! What the operator decides: where to listen, who may call, and how much of everything.

use crate::budget::most_for_one;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Everything about serving that is not the model.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Where to listen; loopback unless the operator says otherwise.
    pub listen: SocketAddr,
    /// Any of these opens every route; empty means no key is asked for.
    pub api_keys: Vec<String>,
    /// Names in a `Host` header that are served besides IP addresses and `localhost`. Any other is
    /// refused where names are given here, and on loopback without keys: there a page of another
    /// origin could have its own name resolve to this machine and read answers as its own.
    pub allowed_hosts: Vec<String>,
    /// Whether callers with different API keys share cached prefixes. How long a prompt takes tells
    /// whether another one began the same way; with several keys that is nobody else's business.
    pub share_prefix_cache: bool,
    /// How much of everything.
    pub limits: Limits,
    /// Where step records go, one JSON object a line.
    pub trace: Option<PathBuf>,
    /// Lines of the log that could not be written; whoever writes the log counts them.
    pub log_lines_dropped: Arc<AtomicU64>,
    /// Threads for HTTP; the engine has its own thread besides.
    pub threads: usize,
    /// Threads that parse, render and tokenize large bodies.
    pub work_threads: usize,
    /// Gives freed memory back to the system; called now and then after large bodies. The allocator
    /// would keep it for the next ones.
    pub trim: Option<fn()>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 8000)),
            api_keys: Vec::new(),
            allowed_hosts: Vec::new(),
            share_prefix_cache: false,
            limits: Limits::default(),
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
    /// Unless told otherwise.
    pub default: u64,
    /// What it can be set to.
    pub range: RangeInclusive<u64>,
    /// What it bounds.
    pub doc: &'static str,
}

/// Far beyond what any machine has, and far below where sums overflow.
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
        /// How much of everything: the one table of limits. A request beyond any of them is
        /// answered with an error that names the limit; nothing is cut silently.
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
            /// The table, in order: for `--help`, the documentation and the page.
            pub const TABLE: &'static [Limit] = &[
                $(Limit {
                    name: stringify!($name),
                    default: $default,
                    range: range!($($range)?),
                    doc: concat!($($doc),+).trim_ascii(),
                },)*
            ];

            /// Sets a limit by name; an unknown name or a value out of its range is refused.
            pub fn set(&mut self, name: &str, value: u64) -> Result<(), String> {
                let row = Self::TABLE.iter().find(|row| row.name == name);
                if let Some(Limit { range, .. }) = row.filter(|row| !row.range.contains(&value)) {
                    let (least, most) = (range.start(), range.end());
                    return Err(format!("{name}: a value between {least} and {most} is needed"));
                }
                match name {
                    $(stringify!($name) => self.$name = value,)*
                    _ => {
                        let names: Vec<&str> = Self::TABLE.iter().map(|row| row.name).collect();
                        let names = names.join(", ");
                        return Err(format!("{name}: there is no such limit; there are {names}"));
                    }
                }
                Ok(())
            }

            /// Every limit with the value in force.
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
    /// Sockets open at once; the next one is told 503 and closed.
    connections = 4096;
    /// Bytes of a request's line and headers together.
    header_bytes = 32 * 1024, in 8192..=1 << 30;
    /// Headers in a request.
    headers = 100, in 1..=10_000;
    /// Milliseconds for a request's headers to arrive.
    header_ms = 10_000;
    /// Bytes of a request's body.
    body_bytes = 8 * 1024 * 1024;
    /// Milliseconds for a request's body to arrive.
    body_ms = 30_000;
    /// Bytes of all bodies that are being received, parsed or tokenized; then 429. Bodies of more than
    /// 64 KiB leave a quarter to smaller ones.
    body_budget_bytes = 32 * 1024 * 1024;
    /// Milliseconds that a body waits for its part of the budget.
    body_wait_ms = 1000;
    /// Bodies of more than 4 KiB that wait for a thread to parse and tokenize them; then 429.
    work_waiting = 256;
    /// Strings, names, lists, objects and other values in a request's JSON; token ids are not counted.
    json_values = 128 * 1024;
    /// Levels of nesting of a request's JSON.
    json_depth = 128, in 1..=128;
    /// Requests accepted and not yet finished (running and waiting together); then 429.
    inflight = 1024;
    /// Prompts in one call of completions or embeddings.
    batch = 256;
    /// Continuations of one prompt (`n`).
    choices = 32;
    /// Continuations in one call, over all its prompts (prompts × `n`).
    sequences = 256;
    /// Messages in a chat.
    messages = 4096;
    /// Tools offered in a chat.
    tools = 128;
    /// Bytes of a chat's tools together, as JSON.
    tools_bytes = 1024 * 1024;
    /// Bytes of a tool's name.
    tool_name_bytes = 256;
    /// Entries of `chat_template_kwargs`.
    kwargs = 64;
    /// Bytes of `chat_template_kwargs`, as JSON.
    kwargs_bytes = 64 * 1024;
    /// Levels of nesting of `chat_template_kwargs`.
    kwargs_depth = 16, in 1..=64;
    /// Stop strings of a request.
    stops = 16;
    /// Bytes of one stop string.
    stop_bytes = 256;
    /// Entries of `stop_token_ids`.
    stop_token_ids = 64;
    /// Entries of `logit_bias`.
    logit_bias = 1024;
    /// Alternatives reported for a token.
    top_logprobs = 20, in 1..=20;
    /// Characters of `cache_salt`.
    salt_chars = 256;
    /// Bytes of a JSON schema (of `response_format` or of a tool).
    schema_bytes = 256 * 1024;
    /// Milliseconds a schema may take to be compiled.
    grammar_ms = 4_000;
    /// Tokens that one call of tokenize gives, or of detokenize takes.
    tokenize_tokens = 128 * 1024;
    /// Bytes of prompts that `echo` puts before the answers of one call.
    echo_bytes = 4 * 1024 * 1024;
    /// Log-probabilities of prompt tokens (tokens × alternatives) that `echo` reports in one call.
    echo_logprobs = 4 * 1024 * 1024;
    /// Bytes of an answer that is not streamed, about.
    answer_bytes = 32 * 1024 * 1024;
    /// Bytes of all answers that are being gathered, about; then 503. A stream is not gathered.
    answer_budget_bytes = 256 * 1024 * 1024;
    /// Tokens a stream may be ahead of its reader; a reader further behind loses its stream.
    backlog = 4096;
    /// Milliseconds of silence after which a stream gets a comment line, so that proxies keep it.
    ping_ms = 10_000;
    /// Milliseconds that a client may take no byte of its answer before its connection is closed.
    write_ms = 60_000;
    /// Live views (`/live`) open at once; then 503.
    watchers = 16;
    /// Milliseconds a step may take before the server says that it is not ready.
    stall_ms = 60_000;
    /// Milliseconds that running requests have to finish after SIGTERM.
    drain_ms = 30_000;
}

impl Limits {
    /// Whether the limits can all be in force at once.
    pub(crate) fn check(&self) -> Result<(), String> {
        for (name, one, budget_name, budget) in [
            ("body_bytes", self.body_bytes, "body_budget_bytes", self.body_budget_bytes),
            ("answer_bytes", self.answer_bytes, "answer_budget_bytes", self.answer_budget_bytes),
        ] {
            let most = most_for_one(budget);
            if one > most {
                return Err(format!(
                    "the limit {name}={one} is more than {budget_name}={budget} leaves to one \
                     request, which is {most}"
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
    fn the_table_and_the_struct_agree() {
        let mut limits = Limits::default();
        for row in Limits::TABLE {
            assert_eq!(limits.get(row.name), Some(row.default), "{}", row.name);
            assert!(row.doc.ends_with('.'), "{}: {}", row.name, row.doc);
            assert!(row.range.contains(&row.default), "{}", row.name);
            for value in [*row.range.start(), *row.range.end()] {
                limits.set(row.name, value).unwrap();
                assert_eq!(limits.get(row.name), Some(value));
            }
            for value in [0, row.range.start() - 1, row.range.end() + 1, u64::MAX] {
                assert!(limits.set(row.name, value).is_err(), "{}", row.name);
            }
        }
        assert!(limits.set("nothing", 1).is_err());
        assert!(limits.set("header_bytes", 8191).is_err(), "the connections cannot hold to it");
        assert!(limits.in_force().all(|(row, value)| value == *row.range.end()));
        assert_eq!(limits.in_force().count(), Limits::TABLE.len());
    }

    #[test]
    fn a_limit_that_a_budget_never_allows_is_refused() {
        let mut limits = Limits::default();
        assert_eq!(limits.check(), Ok(()));
        limits.body_bytes = limits.body_budget_bytes;
        assert!(limits.check().unwrap_err().contains("body_budget_bytes"));
    }

    #[test]
    fn loopback_unless_told_otherwise() {
        assert!(ServerConfig::default().listen.ip().is_loopback());
    }
}
