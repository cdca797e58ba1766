//! Programs, plans and runners from outside, over small random models.

mod adapters;
mod caches;
mod drafter;
mod explain;
mod hazards;
mod inputs;
mod passes;
mod plans;
mod poison;
mod prep;
mod repeat;
mod replay;
mod runner;
mod verify_rows;
mod world;
