//! A simulator that tests the engine with random clients and faults.
//!
//! Seeded clients use the real engine on a fake device that is late, fails and corrupts results on
//! schedule. Instead of a model there is an `oracle`: the next token is a hash of everything
//! before it, read through the page tables. After every step, checkers verify outputs, pages and
//! counters. A run depends only on its seed, so a failing seed can be replayed.

pub mod campaign;
pub(crate) mod client;
pub mod device;
pub mod expect;
pub(crate) mod oracle;
pub(crate) mod rng;
pub mod run;
mod shelf;
