//! engine

pub mod exec;
pub mod request;
