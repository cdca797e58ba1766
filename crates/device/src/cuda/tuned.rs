//! The variant of a kernel that was measured to be fastest for an op of a shape. Lowering follows the table if the op
//! asks for no kernel itself; if the table has no entry either, it follows its rule.
//!
//! A table for some GPUs ships with the sources (`tuned/*.tsv`: shape, variant, nanoseconds, nanoseconds by the
//! rule). `dacapo bench tune` measures on this machine and stores its table beside the compiled kernels, under a hash
//! of everything that decides it: GPU and kernel sources. It is read whole or ignored, so with a damaged file the
//! program starts, but tuning has to be repeated.

use super::cache::Cache;
use super::launch::Target;
use super::source::SOURCES;
use crate::variant::Variant;
use crate::{Error, Op, Result, private};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// Tables that were measured by the project: architecture, multiprocessors, contents.
const SHIPPED: [(&str, u32, &str); 1] = [("sm_90a", 132, include_str!("tuned/sm_90a-132.tsv"))];

/// The result for one shape.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Choice {
    /// The fastest variant; `None` if none was faster than the rule's choice.
    pub variant: Option<Variant>,
    /// Nanoseconds per op with this variant.
    pub nanos: u32,
    /// Nanoseconds per op with the rule's choice.
    pub rule_nanos: u32,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [best, rule] = [self.nanos, self.rule_nanos].map(|nanos| f64::from(nanos) * 1e-3);
        match &self.variant {
            None => write!(f, "default, {rule:.1} µs is the best measured"),
            Some(variant) => write!(f, "{variant}, tuned {best:.1} µs over {rule:.1}"),
        }
    }
}

/// Choices by shape.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Tuned(BTreeMap<String, Choice>);

impl Tuned {
    /// The choice for an op, if its shape was measured.
    pub fn choice(&self, op: &Op) -> Option<&Choice> {
        self.0.get(&shape(op)?)
    }

    /// The variant for a shape, if one beat the rule.
    pub(crate) fn variant(&self, shape: &str) -> Option<&Variant> {
        self.0.get(shape)?.variant.as_ref()
    }

    /// Stores a choice, in place of an older one for the same shape.
    pub fn insert(&mut self, shape: String, choice: Choice) {
        self.0.insert(shape, choice);
    }

    /// Shapes and choices, in the order of shapes.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Choice)> {
        self.0.iter().map(|(shape, choice)| (shape.as_str(), choice))
    }

    /// Adds all choices of another table, which replace those here.
    pub fn merge(&mut self, newer: Tuned) {
        self.0.extend(newer.0);
    }

    /// A table from its lines; `None` if one of them is incomplete.
    pub fn parse(text: &str) -> Option<Tuned> {
        let line = |line: &str| {
            let mut cells = line.split('\t');
            let shape = cells.next()?.to_owned();
            let variant = match cells.next()? {
                "" => None,
                text => Some(variant_of(&shape, text)?),
            };
            let [nanos, rule_nanos] = [cells.next()?.parse().ok()?, cells.next()?.parse().ok()?];
            cells.next().is_none().then_some((shape, Choice { variant, nanos, rule_nanos }))
        };
        text.lines().map(line).collect::<Option<_>>().map(Tuned)
    }

    /// The table that ships for an architecture and a number of multiprocessors; empty if there is none.
    pub fn shipped(arch: &str, sms: u32) -> Tuned {
        let found = SHIPPED.iter().find(|(a, s, _)| (*a, *s) == (arch, sms));
        // A test parses all shipped tables.
        found.and_then(|(.., text)| Tuned::parse(text)).unwrap_or_default()
    }

    /// The tables for a GPU: the shipped one, overridden by what was measured on this machine.
    pub fn of_machine(cache: &Cache, arch: &str, sms: u32) -> Tuned {
        let mut tuned = Tuned::shipped(arch, sms);
        let measured = cache.folder().ok().and_then(|at| Tuned::read(&file(at, arch, sms)));
        tuned.merge(measured.unwrap_or_default());
        tuned
    }

    /// A table from a file; `None` unless it exists, is complete, and no other user could have written it.
    pub fn read(path: &Path) -> Option<Tuned> {
        let text = String::from_utf8(private::read(path).ok()?).ok()?;
        let (sum, body) = text.split_once('\n')?;
        (blake3::hash(body.as_bytes()).to_hex().as_str() == sum).then_some(())?;
        Tuned::parse(body)
    }

    /// Writes the table to a temporary file and renames it, so that a concurrent read gets the new or the old table
    /// whole.
    pub fn write(&self, path: &Path) -> Result<()> {
        let failed = |problem: std::io::Error| Error::Io {
            path: path.display().to_string(),
            problem: problem.to_string(),
        };
        let body = self.to_string();
        let text = format!("{}\n{body}", blake3::hash(body.as_bytes()).to_hex());
        if let Some(folder) = path.parent() {
            private::make(folder).map_err(Error::NotPrivate)?;
        }
        let aside = path.with_extension(format!("{}.part", std::process::id()));
        std::fs::write(&aside, text).map_err(failed)?;
        std::fs::rename(&aside, path).map_err(failed)
    }
}

/// The lines of the table, as [`Tuned::parse`] reads them.
impl fmt::Display for Tuned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |(shape, c): (&String, &Choice)| {
            let variant = c.variant.map(|variant| variant.to_string()).unwrap_or_default();
            writeln!(f, "{shape}\t{variant}\t{}\t{}", c.nanos, c.rule_nanos)
        };
        self.0.iter().try_for_each(line)
    }
}

/// The file of a GPU's table; its name depends on the GPU and the kernel sources.
pub fn file(folder: &Path, arch: &str, sms: u32) -> PathBuf {
    let mut hash = blake3::Hasher::new();
    for (name, text) in SOURCES {
        hash.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes());
        hash.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
    }
    folder.join(format!("tuned-{arch}-{sms}-{}.tsv", &hash.finalize().to_hex()[..32]))
}

/// A text of everything that decides how long an op takes; `None` for ops without variants.
pub fn shape(op: &Op) -> Option<String> {
    op.shape()
}

/// Variants worth measuring for an op on a target, without the rule's choice.
pub fn candidates(op: &Op, target: &Target) -> Vec<Variant> {
    op.candidates(target)
}

/// The variant that a text names for an op of this shape.
fn variant_of(shape: &str, text: &str) -> Option<Variant> {
    match shape.split(' ').next()? {
        "attention" => text.parse().ok().map(Variant::Attention),
        "route" => text.parse().ok().map(Variant::Route),
        "experts" => text.parse().ok().map(Variant::Experts),
        "layers" => (text == Variant::OneNode.to_string()).then_some(Variant::OneNode),
        _ => text.parse().ok().map(Variant::Linear),
    }
}
