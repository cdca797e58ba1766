//! A load generator for any server that speaks OpenAI's API: this one or a peer. It has its own
//! small client, because what it measures is microseconds.

pub mod client;
mod dist;
mod report;
mod run;
mod sse;

pub use dist::{Dice, Dist};
pub use report::{Latency, Report, Slo, Timeline};
pub use run::{Arrivals, Endpoint, LoadSpec, Progress, Prompts, run, run_blocking};
pub use sse::SseParser;
