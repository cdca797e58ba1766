//! What the operator decides: where to listen, who may call, and how much of everything.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

/// Everything about serving that is not the model.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Where to listen; loopback unless the operator says otherwise.
    pub listen: SocketAddr,
    /// Any of these opens every route; empty means no key is asked for.
    pub api_keys: Vec<String>,
    /// How much of everything.
    pub limits: Limits,
    /// Where step records go, one JSON object a line.
    pub trace: Option<PathBuf>,
    /// Threads for HTTP; the engine has its own thread besides.
    pub threads: usize,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 8000)),
            api_keys: Vec::new(),
            limits: Limits::default(),
            trace: None,
            threads: std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 8)),
        }
    }
}

/// One row of the table of limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The field of [`Limits`] and the name on the command line.
    pub name: &'static str,
    /// Unless told otherwise.
    pub default: u64,
    /// What it bounds.
    pub doc: &'static str,
}

macro_rules! limits {
    ($($(#[doc = $doc:literal])+ $name:ident = $default:expr;)*) => {
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
                    doc: concat!($($doc),+).trim_ascii(),
                },)*
            ];

            /// Sets a limit by name; an unknown name or a zero is refused.
            pub fn set(&mut self, name: &str, value: u64) -> Result<(), String> {
                if value == 0 {
                    return Err(format!("{name}: a limit must be at least 1"));
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
    header_bytes = 32 * 1024;
    /// Headers in a request.
    headers = 100;
    /// Milliseconds for a request's headers to arrive.
    header_ms = 10_000;
    /// Bytes of a request's body.
    body_bytes = 8 * 1024 * 1024;
    /// Milliseconds for a request's body to arrive.
    body_ms = 30_000;
    /// Requests accepted and not yet finished (running and waiting together); then 429.
    inflight = 1024;
    /// Prompts in one call of completions, embeddings or tokenize.
    batch = 256;
    /// Continuations of one prompt (`n`).
    choices = 32;
    /// Messages in a chat.
    messages = 4096;
    /// Tools offered in a chat.
    tools = 128;
    /// Stop strings of a request.
    stops = 16;
    /// Bytes of one stop string.
    stop_bytes = 256;
    /// Entries of `logit_bias`.
    logit_bias = 1024;
    /// Alternatives reported for a token.
    top_logprobs = 20;
    /// Bytes of a JSON schema (of `response_format` or of a tool).
    schema_bytes = 256 * 1024;
    /// Milliseconds a schema may take to be compiled.
    grammar_ms = 4_000;
    /// Tokens a stream may be ahead of its reader; a reader further behind loses its stream.
    backlog = 4096;
    /// Milliseconds of silence after which a stream gets a comment line, so that proxies keep it.
    ping_ms = 10_000;
    /// Milliseconds a step may take before the server says that it is not ready.
    stall_ms = 60_000;
    /// Milliseconds that running requests have to finish after SIGTERM.
    drain_ms = 30_000;
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
            limits.set(row.name, 7).unwrap();
            assert_eq!(limits.get(row.name), Some(7));
            assert!(limits.set(row.name, 0).is_err());
        }
        assert!(limits.set("nothing", 1).is_err());
    }

    #[test]
    fn loopback_unless_told_otherwise() {
        assert!(ServerConfig::default().listen.ip().is_loopback());
    }
}
