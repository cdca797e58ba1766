//! The devices from outside: memory, recording, kernels, and how ops are lowered to them.
//! One program, because each takes long to link; `parity` and what measures its own process are beside it.

mod arena;
mod cache;
mod capture;
mod compiler;
mod contracts;
#[path = "../devices/mod.rs"]
mod devices;
mod lowering;
mod nvrtc;
mod shapes;
mod tuned;
