//! A load generator for any server with OpenAI's API. It has its own small HTTP client to keep
//! measurement overhead low.

pub mod client;
mod dist;
mod report;
mod run;
mod sse;

pub use dist::{Dice, Dist};
pub use report::{Latency, Report, Slo, Timeline};
pub use run::{Arrivals, Endpoint, LoadSpec, Progress, Prompts, run, run_blocking};
pub use sse::SseParser;
