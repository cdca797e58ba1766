//! The HTTP server: OpenAI's API, metrics and a live page over an engine on its own thread.
//!
//! [`serve`] runs a [`Server`] with a [`ServerConfig`] (address, keys, [`Limits`]) for one
//! [`Model`] (name, tokenizer, chat template) and a [`link::Backend`], which is the engine or a
//! mock. This is the only crate that uses tokio and the only HTTP server.
//!
//! A request takes this path: [`http`] checks host and key, the route's `handler` under [`openai`]
//! validates and converts it, [`link`] sends it to the engine's thread, and the tokens that come
//! back pass through [`answer`] (characters, stop strings, reasoning, tool calls) into the response
//! body. The body polls the engine's replies directly: there is no task per stream, and dropping
//! the body cancels the request.
//!
//! ```
//! use server::{Exit, Model, Server, ServerConfig, link};
//! use std::io::{Read, Write};
//! use std::net::TcpStream;
//! use std::sync::Arc;
//! use text::bytes::ByteText;
//!
//! let runtime = tokio::runtime::Runtime::new()?;
//! let config = ServerConfig { listen: ([127, 0, 0, 1], 0).into(), ..ServerConfig::default() };
//! let model = Model::new("mock", 8192, Arc::new(ByteText));
//! let backend = link::once(mock::Mock::new(mock::MockConfig::default()));
//! let server = runtime.block_on(Server::bind(&config, backend, model))?;
//! let address = server.address()?;
//! let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
//! let running = runtime.spawn(server.run(async { drop(stopped.await) }));
//!
//! let mut client = TcpStream::connect(address)?;
//! client.write_all(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
//! let mut response = String::new();
//! client.read_to_string(&mut response)?;
//! assert!(response.starts_with("HTTP/1.1 200 OK"));
//!
//! stop.send(()).unwrap();
//! assert_eq!(runtime.block_on(running)?, Exit::Drained);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod admin;
pub mod answer;
pub mod anthropic;
mod app;
mod budget;
mod config;
mod describe;
mod error;
mod fleet;
pub mod grammars;
#[cfg(feature = "grpc")]
mod grpc;
pub mod http;
mod kv_events;
pub mod link;
mod live;
mod metrics;
pub mod ollama;
pub mod openai;
mod openapi;
mod page;
mod serve;
mod trace;
pub mod work;

pub use app::{AdapterNames, App, Model, Scorer};
pub use config::{Grpc, Limit, Limits, ServerConfig};
pub use error::{ApiError, ErrorBody, ErrorResponse};
pub use http::conn::Exit;
pub use kv_events::{EventForm, KvEvents};
pub use metrics::Metrics;
pub use openapi::document;
pub use serve::{Reserved, ServeError, Server, serve};

/// Whether this build can serve gRPC (the feature `grpc`).
pub const HAS_GRPC: bool = cfg!(feature = "grpc");
