//! The server: OpenAI's API over an engine that runs on a thread of its own, and a page to watch
//! it. This is the only crate that knows tokio, HTTP and JSON on the wire.
//!
//! The way of a request: [`http`] lets it in, its route's `handler` under [`openai`] validates and
//! converts it, [`link`] hands it to the engine's thread, and what comes back passes through
//! [`answer`] (characters, stop strings, thinking, tool calls) into a body that the client reads.
//! A body follows the engine directly: there is no task per stream, and dropping the body is what
//! cancels the request.
//!
//! ```no_run
//! use server::{Model, ServerConfig, link, mock, text::bytes::ByteText};
//! use std::sync::Arc;
//!
//! let model = Model::new("mock", 8192, Arc::new(ByteText));
//! let backend = link::once(mock::Mock::new(mock::MockConfig::default()));
//! server::serve(ServerConfig::default(), backend, model).unwrap();
//! ```

pub mod answer;
mod app;
mod budget;
mod config;
mod describe;
mod error;
pub mod grammars;
pub mod http;
pub mod link;
mod live;
pub mod load;
mod metrics;
pub mod mock;
pub mod openai;
mod openapi;
mod page;
mod serve;
pub mod text;
pub mod trace;
pub mod work;

pub use app::{App, Model};
pub use config::{Limit, Limits, ServerConfig};
pub use error::{ApiError, ErrorBody, ErrorResponse};
pub use http::conn::Exit;
pub use metrics::Metrics;
pub use openapi::document;
pub use serve::{ServeError, Server, serve};
