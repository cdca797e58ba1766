//! Models from outside, against other implementations and while they run. One program, because each takes long to link;
//! what measures its own process is beside it.

mod adapters;
#[path = "../answers/mod.rs"]
mod answers;
mod calibrate;
mod configs;
mod deterministic;
mod distribution;
mod encoders;
mod experts;
mod goldens;
mod gone;
mod heads;
mod hostile_gguf;
mod kept;
mod kept_states;
mod loading;
#[path = "../../../formats/tests/make/mod.rs"]
mod make;
#[path = "../models/mod.rs"]
mod models;
mod prefill;
mod quantise;
mod recurrent;
mod replay;
mod routing;
mod sleep;
mod speculate;
mod update;
mod windows;
