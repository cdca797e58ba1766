//! Speculation: which drafts a step verifies. A way to draft is one file that implements [`Drafting`]: it adds to
//! the model's program what makes drafts inside the step.

mod draft;
mod eagle3;
mod mtp;
mod ngram;
pub(crate) mod pace;

use crate::LoadError;
use crate::builder::Written;
use crate::config::ModelConfig;
use crate::open::{ModelSource, OpenModel};
use crate::precision::Precision;
use device::cpu::Numerics;
use device::{Arena, Device, Target};
use graph::Bindings;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// Most drafts that a row can have.
pub(crate) const MOST_DRAFTS: u32 = 8;

/// Where drafts come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// From the sequence itself: what followed the last time that its latest tokens occurred.
    Ngram,
    /// From a smaller model with the same vocabulary.
    Draft,
    /// From a layer that was trained to draft from the model's hidden states.
    Eagle3,
    /// From a layer of the model's own that predicts further tokens.
    Mtp,
}

/// A way to draft.
pub(crate) trait Drafting {
    /// Its name in options.
    fn name(&self) -> &'static str;

    /// Adds its programs to the one of the model that verifies. Returns the model whose weights they need, if that is
    /// another one.
    fn attach(&self, verifier: &mut Written, ask: &Ask<'_>) -> Result<Option<Beside>, LoadError>;
}

/// What a drafter must know.
pub(crate) struct Ask<'a> {
    /// The model that verifies.
    pub(crate) verifier: &'a ModelConfig,
    /// Its files.
    pub(crate) own: &'a ModelSource,
    /// The files that the drafter was given.
    pub(crate) source: Option<&'a ModelSource>,
    /// The device.
    pub(crate) target: &'a dyn Target,
    /// Its order of sums.
    pub(crate) numerics: Numerics,
    /// Its number formats.
    pub(crate) precision: Precision,
    /// The longest context that is served.
    pub(crate) context: u32,
    /// Most rows of a step with drafts.
    pub(crate) most_rows: u32,
}

/// A model's program with what drafts for it.
#[derive(Debug)]
pub(crate) struct Drafted {
    /// The model's own.
    pub(crate) written: Written,
    /// What else has to be filled.
    pub(crate) beside: Option<Beside>,
}

impl Drafted {
    /// Adds to a model's program what drafts by `spec` need, if anything, from `source`.
    pub(crate) fn new(
        mut written: Written,
        spec: Option<Speculation>,
        ask: &Ask<'_>,
    ) -> Result<Drafted, LoadError> {
        let beside = match spec {
            Some(spec) => spec.method.drafting().attach(&mut written, ask)?,
            None => None,
        };
        Ok(Drafted { written, beside })
    }

    /// Bytes of the files beside the model's own.
    pub(crate) fn bytes(&self) -> u64 {
        self.beside.as_ref().map_or(0, |beside| beside.model.bytes())
    }

    /// Fills every weight and table of both; `progress` gets bytes read so far.
    pub(crate) fn fill(
        &self,
        model: &OpenModel,
        device: &Device,
        arena: &Arena,
        bindings: &Bindings,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<(), LoadError> {
        model.fill(&self.written, device, arena, bindings, progress)?;
        let Some(beside) = &self.beside else { return Ok(()) };
        let own = model.bytes();
        let report = |done| progress(own + done);
        beside.model.fill(&beside.written, device, arena, bindings, &report)?;
        let table = bindings.state.features.and_then(|features| features.ids);
        if let (Some(ids), Some(table)) = (&beside.ids, table) {
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            device.write(arena, table.span.part(0, bytes.len() as u64), &bytes)?;
        }
        Ok(())
    }
}

/// A model that drafts.
#[derive(Debug)]
pub(crate) struct Beside {
    pub(crate) model: OpenModel,
    pub(crate) written: Written,
    /// Which of the model's tokens its own are, if they are not the same.
    pub(crate) ids: Option<Vec<u32>>,
}

impl Method {
    /// All, in the order of help texts.
    pub const ALL: [Method; 4] = [Method::Ngram, Method::Draft, Method::Eagle3, Method::Mtp];

    pub(crate) fn drafting(self) -> &'static dyn Drafting {
        match self {
            Method::Ngram => &ngram::Ngram,
            Method::Draft => &draft::Draft,
            Method::Eagle3 => &eagle3::Eagle3,
            Method::Mtp => &mtp::Mtp,
        }
    }

    /// Its name in options.
    pub fn name(self) -> &'static str {
        self.drafting().name()
    }
}

/// What `--spec` asks for: `METHOD` or `METHOD:k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speculation {
    /// Where drafts come from.
    pub method: Method,
    /// Drafts of each row, 1 to 8.
    pub drafts: u32,
}

impl Speculation {
    /// Tokens per row that steps are recorded for besides one: for all drafts, about half of them, and one.
    pub(crate) fn q_lens(self) -> Vec<u32> {
        let mut drafts = vec![1, self.drafts.div_ceil(2), self.drafts];
        drafts.sort_unstable();
        drafts.dedup();
        drafts.into_iter().map(|drafts| drafts + 1).collect()
    }
}

/// Why a step has drafts or none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Why {
    /// No step was chosen yet, or one without drafts has to be measured first.
    #[default]
    Unmeasured,
    /// No graph has drafts for so many rows.
    NoGraph,
    /// No row may return more than one token.
    NoRow,
    /// Drafts make more tokens per second.
    Pays,
    /// They would make fewer.
    TooSlow,
    /// They would make fewer, and it is time to look again.
    Test,
}

/// The drafts of a decode step, and why so many.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Choice {
    /// Drafts of each row.
    pub drafts: u32,
    /// Why.
    pub why: Why,
    /// The best number of drafts, if there are to be any.
    pub best: u32,
    /// Tokens that a row then returns.
    pub gain: f64,
    /// The time of such a step, in that of one without.
    pub slowdown: f64,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Choice { drafts, best, gain, slowdown, .. } = *self;
        let what = format!("{gain:.2} tokens a row in {slowdown:.2} times the time");
        match self.why {
            Why::Unmeasured => f.write_str("none: a step without drafts is to be measured first"),
            Why::NoGraph => f.write_str("none: no graph has drafts for so many rows"),
            Why::NoRow => f.write_str("none: no row may return more than one token"),
            Why::Pays => write!(f, "{drafts}: {what}"),
            Why::TooSlow => write!(f, "none: {best} would give {what}"),
            Why::Test => write!(f, "{drafts}, to measure again: {what}"),
        }
    }
}

/// What drafts did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpecUse {
    /// Drafts that were verified.
    pub drafted: u64,
    /// Those that were accepted.
    pub accepted: u64,
    /// Decode steps by drafts per row.
    pub steps: BTreeMap<u32, u64>,
    /// The choice for the last decode step.
    pub last: Choice,
}

/// Drafts of a row if their number is not given.
const USUAL_DRAFTS: u32 = 3;

/// Why a text is no speculation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// No such method.
    #[error("`{name}` is no method; there are {}", names())]
    Method {
        /// What was given.
        name: String,
    },
    /// A number of drafts that cannot be.
    #[error("`{number}` is no number of drafts from 1 to {MOST_DRAFTS}")]
    Drafts {
        /// What was given.
        number: String,
    },
}

fn names() -> String {
    Method::ALL.map(Method::name).join(", ")
}

impl FromStr for Speculation {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Speculation, SpecError> {
        let (name, number) = text.split_once(':').map_or((text, None), |(a, b)| (a, Some(b)));
        let method = Method::ALL.into_iter().find(|method| method.name() == name);
        let method = method.ok_or_else(|| SpecError::Method { name: name.into() })?;
        let drafts = match number {
            None => USUAL_DRAFTS,
            Some(number) => {
                let drafts =
                    number.parse().ok().filter(|drafts| (1..=MOST_DRAFTS).contains(drafts));
                drafts.ok_or_else(|| SpecError::Drafts { number: number.into() })?
            }
        };
        Ok(Speculation { method, drafts })
    }
}

impl fmt::Display for Speculation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.method.name(), self.drafts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_method_may_have_a_number_of_drafts() {
        let ngram = |drafts| Ok(Speculation { method: Method::Ngram, drafts });
        assert_eq!("ngram".parse(), ngram(USUAL_DRAFTS));
        assert_eq!("ngram:8".parse(), ngram(8));
        for wrong in
            ["ngram:0", "ngram:9", "ngram:", "ngram:x", "ngram:-1", "", "Ngram", "medusa:2"]
        {
            assert!(wrong.parse::<Speculation>().is_err(), "{wrong}");
        }
        assert_eq!(ngram(5).unwrap().to_string(), "ngram:5");
        let unknown = "medusa".parse::<Speculation>().unwrap_err();
        assert_eq!(
            unknown.to_string(),
            "`medusa` is no method; there are ngram, draft, eagle3, mtp"
        );
        assert_eq!("draft:2".parse(), Ok(Speculation { method: Method::Draft, drafts: 2 }));
    }
}
