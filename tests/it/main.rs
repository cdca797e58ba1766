//! The program from outside.

mod bad_files;
mod exit_codes;
mod fake_hub;
mod grammar;
mod graphs;
mod hostile_folders;
mod nvtx;
mod output;
mod plans;
mod process;
mod pull;
mod quality;
mod quantize;
#[path = "../../crates/formats/tests/random/mod.rs"]
mod random;
mod run;
mod serve;
mod smollm2;
#[path = "../../crates/formats/tests/sources/mod.rs"]
mod sources;
mod thinking;
mod widened;
