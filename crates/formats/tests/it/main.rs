//! Files of models from outside. One program, because each takes long to link; what measures its own process is
//! beside it.

mod chats;
mod checkpoints;
mod encoders;
mod fetch;
mod hostile;
mod hostile_scaled;
#[path = "../make/mod.rs"]
mod make;
mod pipelines;
mod quant;
#[path = "../random/mod.rs"]
mod random;
mod refusal;
mod scaled;
mod smollm2;
mod templates;
mod tokenizers;
