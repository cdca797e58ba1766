//! The server with the mock backend, over real sockets.

mod abuse;
mod anthropic;
mod bed;
mod callers;
mod chat;
mod checkpoint;
mod completions;
mod document;
mod faults;
mod fields;
mod grammars;
mod http2;
mod large;
mod limits;
mod messages;
mod ollama;
mod page;
mod responses;
mod routes;
mod streams;
mod thinking;
mod tools;
mod upgrade;
