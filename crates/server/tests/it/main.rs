//! The server with the mock backend, over real sockets.

mod abuse;
mod bed;
mod callers;
mod chat;
mod checkpoint;
mod completions;
mod document;
mod faults;
mod grammars;
mod large;
mod limits;
mod routes;
mod streams;
mod tools;
