//! A recorded list of nodes, and the definition of a node.

use crate::{Arena, Op, Result, Span, device::Driver, error::Forbidden};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// An op with the names a profile or an error shows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// What to do.
    pub op: Op,
    /// Its name within the layer, for example `qkv`.
    pub name: String,
    /// Which layer, if any.
    pub layer: Option<u32>,
}

/// An element of a recording.
#[expect(clippy::large_enum_variant, reason = "nearly every item is a node")]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Item {
    /// An op.
    Node(Node),
    /// Runs the body if the word at `cond` is non-zero when it is reached.
    If {
        /// A u32 in the arena.
        cond: Span,
        /// What to run.
        body: Vec<Item>,
    },
    /// Runs the body while the word at `cond` is non-zero (tested before each round).
    While {
        /// A u32 in the arena.
        cond: Span,
        /// What to run.
        body: Vec<Item>,
    },
}

/// How a recording is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordOptions {
    /// Dependent launch between kernels that support it.
    pub dependent_launch: bool,
}

impl Default for RecordOptions {
    fn default() -> Self {
        RecordOptions { dependent_launch: true }
    }
}

/// A recording as a device stores it; devices implement it. It keeps the arena alive.
pub(crate) trait Recorded: Send + Sync + std::fmt::Debug {
    /// Starts it; returns once it is launched (CPU: when it is done).
    fn replay(&self) -> Result<()>;
    /// Bytes the device spends on it.
    fn bytes(&self) -> u64;
    /// Nodes as the device counts them.
    fn device_nodes(&self) -> usize;
}

/// A recorded program, to be replayed any number of times. It keeps alive everything it points to.
#[derive(Debug)]
pub struct Graph {
    pub(crate) name: String,
    pub(crate) items: Vec<Item>,
    pub(crate) arena: Arena,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) recorded: Box<dyn Recorded>,
}

impl Graph {
    /// The name it was recorded under.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What was recorded, in order.
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// Bytes the device spends on it, its arena not counted.
    pub fn bytes(&self) -> u64 {
        self.recorded.bytes()
    }

    /// Nodes as the device counts them.
    pub fn device_nodes(&self) -> usize {
        self.recorded.device_nodes()
    }

    /// Replays it from the start. Refused while recording, while memory of the arena is released and after it was closed.
    pub fn replay(&self) -> Result<()> {
        self.driver.capture().allow(Forbidden::Replay)?;
        self.arena.inner.check_open(&self.name)?;
        self.arena.inner.check_whole(&self.name)?;
        self.recorded.replay()
    }
}
