//! The server over the mock, through real sockets.

mod abuse;
mod bed;
mod chat;
mod checkpoint;
mod completions;
mod document;
mod faults;
mod grammars;
mod routes;
mod streams;
mod tools;
