//! A simulator that tries to break the engine.
//!
//! Seeded clients talk to the real engine over a fake device that is late, fails and lies on
//! schedule. In place of a model there is an [`oracle`]: the next token is a hash of everything
//! before it, read back through the page tables. After every step checkers recount the books. All
//! of a run follows from its seed, so a seed that fails can be replayed alone.

pub mod campaign;
pub mod client;
pub mod device;
pub mod expect;
pub mod oracle;
pub mod rng;
pub mod run;
