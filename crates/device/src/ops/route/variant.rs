//! The kernels of the router that can be requested.

use crate::variant::{Options, UnknownVariant};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A kernel of the router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouteVariant {
    /// The kernel for every format and shape.
    Reference,
    /// Clusters of blocks that share tokens.
    Clusters {
        /// Tokens of a cluster: 16, 32 or 64.
        tokens: u32,
        /// Blocks of a cluster.
        shares: u32,
    },
}

impl fmt::Display for RouteVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            RouteVariant::Reference => f.write_str("ref"),
            RouteVariant::Clusters { tokens, shares } => {
                Options::write(f, "", &[("tokens", Some(tokens)), ("shares", Some(shares))])
            }
        }
    }
}

impl FromStr for RouteVariant {
    type Err = UnknownVariant;

    fn from_str(text: &str) -> Result<Self, UnknownVariant> {
        if text == "ref" {
            return Ok(RouteVariant::Reference);
        }
        let unknown = || UnknownVariant(text.into());
        let mut options = Options::parse(text, text)?;
        let tokens = options.take("tokens").ok_or_else(unknown)?;
        let shares = options.take("shares").ok_or_else(unknown)?;
        options.finish()?;
        Ok(RouteVariant::Clusters { tokens, shares })
    }
}
