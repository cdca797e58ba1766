//! The server with the mock backend, over real sockets.

mod abuse;
mod adapters;
mod anthropic;
mod bed;
mod callers;
mod chat;
mod checkpoint;
mod completions;
mod document;
#[expect(dead_code, reason = "the engine's own tests use all of it")]
#[path = "../../../engine/tests/it/echo.rs"]
mod echo;
mod faults;
mod fields;
mod grammars;
#[cfg(feature = "grpc")]
mod grpc;
mod harmony;
mod http2;
mod kv_events;
mod large;
mod limits;
mod messages;
mod ollama;
mod page;
mod pause;
mod responses;
mod routes;
mod score;
mod sleep;
mod streams;
mod thinking;
mod token_ids;
mod tools;
mod upgrade;
mod weights;
