//! The kernels of a scan that can be requested.

use crate::variant::UnknownVariant;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A kernel of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScanVariant {
    /// Token by token, for every format and shape.
    Tokens,
    /// Rows of many tokens by chunks, on matrix units.
    Chunks,
}

impl fmt::Display for ScanVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ScanVariant::Tokens => "tokens",
            ScanVariant::Chunks => "chunks",
        })
    }
}

impl FromStr for ScanVariant {
    type Err = UnknownVariant;

    fn from_str(text: &str) -> Result<Self, UnknownVariant> {
        let all = [ScanVariant::Tokens, ScanVariant::Chunks];
        let named = all.into_iter().find(|variant| variant.to_string() == text);
        named.ok_or_else(|| UnknownVariant(text.into()))
    }
}
