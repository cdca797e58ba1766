//! Which kernel runs an op: picked by a rule, by a measurement, or by name. A variant is a type; its text
//! (`wgmma,wide=64,split=2`) is for tables and for people.

pub use crate::ops::attention::variant::{AttentionKernel, AttentionVariant};
pub use crate::ops::experts::variant::ExpertsVariant;
pub use crate::ops::linear::variant::{LinearVariant, WgmmaShape};
pub use crate::ops::route::variant::RouteVariant;
pub use crate::ops::scan::variant::ScanVariant;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How the kernel of an op is picked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pick<V> {
    /// The fastest measured for the op's shape; where none was measured, as [`Pick::Rule`].
    #[default]
    Best,
    /// By the target's rule.
    Rule,
    /// The kernel whose order of summation does not depend on the number of rows.
    Fixed,
    /// This kernel; an error if it cannot run.
    Named(V),
}

impl<V> Pick<V> {
    /// Whether it is [`Pick::Best`].
    pub(crate) fn is_best(&self) -> bool {
        matches!(self, Pick::Best)
    }

    /// The same for another type of variants.
    pub fn map<W>(self, map: impl FnOnce(V) -> W) -> Pick<W> {
        match self {
            Pick::Best => Pick::Best,
            Pick::Rule => Pick::Rule,
            Pick::Fixed => Pick::Fixed,
            Pick::Named(variant) => Pick::Named(map(variant)),
        }
    }

    /// The same for one op's variants; `None` if it names a variant of another op.
    pub(crate) fn narrow<W>(self, own: impl FnOnce(V) -> Option<W>) -> Option<Pick<W>> {
        Some(match self {
            Pick::Best => Pick::Best,
            Pick::Rule => Pick::Rule,
            Pick::Fixed => Pick::Fixed,
            Pick::Named(variant) => Pick::Named(own(variant)?),
        })
    }
}

impl<V: fmt::Display> Pick<V> {
    /// What it adds to an op's description; empty for [`Pick::Best`].
    pub(crate) fn suffix(&self) -> String {
        if self.is_best() { String::new() } else { format!(" [{self}]") }
    }
}

impl<V: fmt::Display> fmt::Display for Pick<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pick::Best => f.write_str("best"),
            Pick::Rule => f.write_str("rule"),
            Pick::Fixed => f.write_str("fixed"),
            Pick::Named(variant) => variant.fmt(f),
        }
    }
}

/// A variant of any op that has some.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Variant {
    /// Of a linear.
    Linear(LinearVariant),
    /// Of attention.
    Attention(AttentionVariant),
    /// Of the router of experts.
    Route(RouteVariant),
    /// Of experts.
    Experts(ExpertsVariant),
    /// Of a scan.
    Scan(ScanVariant),
    /// Of layers: all of them as one kernel.
    OneNode,
}

/// The variant as one op's, if it is that.
macro_rules! own {
    ($($(#[$doc:meta])* $name:ident: $Of:ident($Own:ident);)*) => {
        impl Variant {
            $($(#[$doc])* pub(crate) fn $name(self) -> Option<$Own> {
                if let Variant::$Of(variant) = self { Some(variant) } else { None }
            })*
        }
    };
}

own! {
    /// A linear's.
    linear: Linear(LinearVariant);
    /// Attention's.
    attention: Attention(AttentionVariant);
    /// The router's.
    route: Route(RouteVariant);
    /// That of experts.
    experts: Experts(ExpertsVariant);
    /// A scan's.
    scan: Scan(ScanVariant);
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Variant::Linear(variant) => variant.fmt(f),
            Variant::Attention(variant) => variant.fmt(f),
            Variant::Route(variant) => variant.fmt(f),
            Variant::Experts(variant) => variant.fmt(f),
            Variant::Scan(variant) => variant.fmt(f),
            Variant::OneNode => f.write_str("one"),
        }
    }
}

/// A text that names no variant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` names no kernel variant")]
pub struct UnknownVariant(pub String);

/// `key=value` pairs after a variant's name.
pub(crate) struct Options<'a> {
    text: &'a str,
    pairs: Vec<(&'a str, u32)>,
}

impl<'a> Options<'a> {
    /// The pairs of `rest`; `text` is the whole variant, for errors.
    pub(crate) fn parse(text: &'a str, rest: &'a str) -> Result<Self, UnknownVariant> {
        let pair = |pair: &'a str| {
            let (key, value) = pair.split_once('=')?;
            Some((key, u32::from_str(value).ok()?))
        };
        let pairs = rest.split(',').filter(|pair| !pair.is_empty()).map(pair);
        let pairs = pairs.collect::<Option<_>>().ok_or_else(|| UnknownVariant(text.into()))?;
        Ok(Self { text, pairs })
    }

    /// The value of a key, once.
    pub(crate) fn take(&mut self, key: &str) -> Option<u32> {
        let at = self.pairs.iter().position(|(name, _)| *name == key)?;
        Some(self.pairs.remove(at).1)
    }

    /// An error if a key was not taken.
    pub(crate) fn finish(self) -> Result<(), UnknownVariant> {
        self.pairs.is_empty().then_some(()).ok_or_else(|| UnknownVariant(self.text.into()))
    }

    /// A name and the pairs that have a value.
    pub(crate) fn write(
        f: &mut fmt::Formatter<'_>,
        name: &str,
        options: &[(&str, Option<u32>)],
    ) -> fmt::Result {
        let given = options.iter().filter_map(|(key, value)| Some(format!("{key}={}", (*value)?)));
        let parts: Vec<String> = Some(name.to_owned())
            .filter(|name| !name.is_empty())
            .into_iter()
            .chain(given)
            .collect();
        f.write_str(&parts.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variant_is_read_as_it_is_written() {
        let linear = [
            "stream",
            "stream,stages=4",
            "wgmma",
            "wgmma,wide=64,columns=128,split=2,stages=5,turns=3,half=1",
            "tiles",
            "gemm",
            "ref",
        ];
        for text in linear {
            assert_eq!(text.parse::<LinearVariant>().unwrap().to_string(), text);
        }
        for text in ["ref", "mma", "mma,stages=3", "warps=8,stages=2", "least=4", "cluster=8"] {
            assert_eq!(text.parse::<AttentionVariant>().unwrap().to_string(), text);
        }
        for text in ["ref", "tile=16", "tile=32,up=128,down=64,depth=2,copiers=64"] {
            assert_eq!(text.parse::<ExpertsVariant>().unwrap().to_string(), text);
        }
        for text in ["ref", "tokens=16,shares=8"] {
            assert_eq!(text.parse::<RouteVariant>().unwrap().to_string(), text);
        }
        for text in ["tokens", "chunks"] {
            assert_eq!(text.parse::<ScanVariant>().unwrap().to_string(), text);
        }
        for text in ["", "tile", "ref,tile=8", "rows=3"] {
            assert!(text.parse::<ExpertsVariant>().is_err(), "{text}");
            assert!(text.parse::<RouteVariant>().is_err(), "{text}");
            assert!(text.parse::<ScanVariant>().is_err(), "{text}");
        }
        for text in ["wgmma,wide", "wgmma,tall=3", "wgmma,wide=64,wide=64", "tiles,x=1", "mma", ""]
        {
            assert!(text.parse::<LinearVariant>().is_err(), "{text}");
        }
        for text in ["gemm", "stages=a", "stages=1,depth=2"] {
            assert!(text.parse::<AttentionVariant>().is_err(), "{text}");
        }
    }
}
