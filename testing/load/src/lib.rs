//! A load generator for any server with OpenAI's API. It has its own small HTTP client to keep
//! measurement overhead low.

pub mod client;
mod dist;
mod prompts;
mod report;
mod run;
mod sse;

pub use dist::{Dice, Dist};
pub use prompts::Prompts;
pub use report::{Latency, Report, Slo, Timeline};
pub use run::{Arrivals, Endpoint, LoadSpec, Progress, run, run_blocking};
pub use sse::SseParser;
