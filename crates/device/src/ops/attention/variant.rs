//! The kernels and settings of attention that can be requested.

use crate::variant::{Options, UnknownVariant};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A kernel of attention and its settings; what is `None` is left to the rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AttentionVariant {
    /// Which kernel.
    pub kernel: Option<AttentionKernel>,
    /// Warps of a block.
    pub warps: Option<u32>,
    /// Depth of the ring of pages.
    pub stages: Option<u32>,
    /// Fewest pages of a piece.
    pub least: Option<u32>,
    /// Blocks that share a piece.
    pub cluster: Option<u32>,
    /// KV tokens of a tile of the Hopper kernel.
    pub kv: Option<u32>,
    /// 1: warpgroups of the Hopper kernel take turns.
    pub turns: Option<u32>,
}

/// The kernels that can be requested by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionKernel {
    /// The kernel for every format and shape.
    Reference,
    /// Tensor cores without Hopper's warpgroups.
    Mma,
}

impl fmt::Display for AttentionVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.kernel {
            None => "",
            Some(AttentionKernel::Reference) => "ref",
            Some(AttentionKernel::Mma) => "mma",
        };
        let options = [
            ("warps", self.warps),
            ("stages", self.stages),
            ("least", self.least),
            ("cluster", self.cluster),
            ("kv", self.kv),
            ("turns", self.turns),
        ];
        Options::write(f, name, &options)
    }
}

impl FromStr for AttentionVariant {
    type Err = UnknownVariant;

    fn from_str(text: &str) -> Result<Self, UnknownVariant> {
        let (kernel, rest) = match text.split_once(',').unwrap_or((text, "")) {
            ("ref", rest) => (Some(AttentionKernel::Reference), rest),
            ("mma", rest) => (Some(AttentionKernel::Mma), rest),
            _ => (None, text),
        };
        let mut options = Options::parse(text, rest)?;
        let variant = AttentionVariant {
            kernel,
            warps: options.take("warps"),
            stages: options.take("stages"),
            least: options.take("least"),
            cluster: options.take("cluster"),
            kv: options.take("kv"),
            turns: options.take("turns"),
        };
        options.finish().map(|()| variant)
    }
}
