//! Time on the device's clock: marks between launches, and the time between them.

use crate::Result;

/// Marks as a device implements them.
pub(crate) trait Marks: Send + std::fmt::Debug {
    /// Marks the end of everything launched so far.
    fn mark(&mut self, index: usize) -> Result<()>;
    /// Microseconds between two marks; waits for the later one.
    fn micros(&self, from: usize, to: usize) -> Result<f64>;
}

/// Marks in the order of launches. A mark costs the device almost nothing and the host about as much as a small
/// launch; measurements that must not include that do not use a stopwatch.
#[derive(Debug)]
pub struct Stopwatch {
    pub(crate) marks: Box<dyn Marks>,
}

impl Stopwatch {
    /// Marks the point that is reached when everything launched so far is done.
    pub fn mark(&mut self, index: usize) -> Result<()> {
        self.marks.mark(index)
    }

    /// Microseconds from one mark to another; waits until the later one is reached.
    pub fn micros(&self, from: usize, to: usize) -> Result<f64> {
        self.marks.micros(from, to)
    }
}
