//! The kernels of a linear that can be requested.

use crate::variant::{Options, UnknownVariant};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A kernel of a linear; what is `None` is left to the kernel's rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinearVariant {
    /// Weights streamed once, for up to eight rows.
    Stream {
        /// Depth of the ring.
        stages: Option<u32>,
    },
    /// Warpgroup MMA on Hopper, weights as the tall operand.
    Wgmma(WgmmaShape),
    /// Warpgroup MMA on Hopper for many rows, in tiles of 256 by 256.
    Tiles,
    /// cuBLASLt.
    Gemm,
    /// Weights widened to bf16 first.
    Widen,
    /// The kernel for every format and shape.
    Reference,
}

/// The tiles of [`LinearVariant::Wgmma`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WgmmaShape {
    /// Weight rows of a tile.
    pub wide: Option<u32>,
    /// Tokens of a tile.
    pub columns: Option<u32>,
    /// Blocks that split K.
    pub split: Option<u32>,
    /// Sets of warpgroups of a block that take turns with K, for weights with scales.
    pub turns: Option<u32>,
    /// Depth of the ring.
    pub stages: Option<u32>,
    /// 1: a ring of half a multiprocessor's shared memory at most.
    pub half: Option<u32>,
    /// 0: x in bf16 with e4m3 weights; 1: x in e4m3.
    pub bytes: Option<u32>,
    /// For many tokens: 1: only tiles of live tokens, in rounds that end together.
    pub even: Option<u32>,
}

impl fmt::Display for LinearVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LinearVariant::Stream { stages } => Options::write(f, "stream", &[("stages", *stages)]),
            LinearVariant::Wgmma(shape) => {
                let WgmmaShape { wide, columns, split, turns, stages, half, bytes, even } = *shape;
                let options =
                    [("wide", wide), ("columns", columns), ("split", split), ("stages", stages)];
                Options::write(f, "wgmma", &options)?;
                turns.map_or(Ok(()), |turns| write!(f, ",turns={turns}"))?;
                half.map_or(Ok(()), |half| write!(f, ",half={half}"))?;
                bytes.map_or(Ok(()), |bytes| write!(f, ",bytes={bytes}"))?;
                even.map_or(Ok(()), |even| write!(f, ",even={even}"))
            }
            LinearVariant::Tiles => f.write_str("tiles"),
            LinearVariant::Gemm => f.write_str("gemm"),
            LinearVariant::Widen => f.write_str("widen"),
            LinearVariant::Reference => f.write_str("ref"),
        }
    }
}

impl FromStr for LinearVariant {
    type Err = UnknownVariant;

    fn from_str(text: &str) -> Result<Self, UnknownVariant> {
        let (name, rest) = text.split_once(',').unwrap_or((text, ""));
        let mut options = Options::parse(text, rest)?;
        let variant = match name {
            "stream" => LinearVariant::Stream { stages: options.take("stages") },
            "wgmma" => LinearVariant::Wgmma(WgmmaShape {
                wide: options.take("wide"),
                columns: options.take("columns"),
                split: options.take("split"),
                turns: options.take("turns"),
                stages: options.take("stages"),
                half: options.take("half"),
                bytes: options.take("bytes"),
                even: options.take("even"),
            }),
            "tiles" => LinearVariant::Tiles,
            "gemm" => LinearVariant::Gemm,
            "widen" => LinearVariant::Widen,
            "ref" => LinearVariant::Reference,
            _ => return Err(UnknownVariant(text.into())),
        };
        options.finish().map(|()| variant)
    }
}
