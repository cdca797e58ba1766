//! The kernels and settings of experts and their router that can be requested.

use crate::variant::{Options, UnknownVariant};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A kernel of experts and its settings; what is `None` is left to the rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ExpertsVariant {
    /// The kernel for every format and shape; else the one for Hopper.
    pub reference: bool,
    /// Most tokens of a task.
    pub tile: Option<u32>,
    /// Weight rows of a unit of gate and up.
    pub up: Option<u32>,
    /// Weight rows of a unit of down.
    pub down: Option<u32>,
    /// Chunks of 64 columns in a stage.
    pub depth: Option<u32>,
    /// Threads that copy tokens.
    pub copiers: Option<u32>,
}

impl fmt::Display for ExpertsVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let options = [
            ("tile", self.tile),
            ("up", self.up),
            ("down", self.down),
            ("depth", self.depth),
            ("copiers", self.copiers),
        ];
        Options::write(f, if self.reference { "ref" } else { "" }, &options)
    }
}

impl FromStr for ExpertsVariant {
    type Err = UnknownVariant;

    fn from_str(text: &str) -> Result<Self, UnknownVariant> {
        let reference = text == "ref";
        let mut options = Options::parse(text, if reference { "" } else { text })?;
        let variant = ExpertsVariant {
            reference,
            tile: options.take("tile"),
            up: options.take("up"),
            down: options.take("down"),
            depth: options.take("depth"),
            copiers: options.take("copiers"),
        };
        options.finish()?;
        match variant == ExpertsVariant::default() {
            true => Err(UnknownVariant(text.into())),
            false => Ok(variant),
        }
    }
}
