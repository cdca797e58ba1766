//! Prompt lookup: drafts are what followed the last time that a sequence's latest tokens occurred. The op that looks is part of every
//! step that verifies drafts and has no drafter ([`device::op::Draft`]), so there is nothing to add.

use super::{Ask, Beside, Drafting};
use crate::LoadError;
use crate::builder::Written;

pub(super) struct Ngram;

impl Drafting for Ngram {
    fn name(&self) -> &'static str {
        "ngram"
    }

    fn attach(&self, _verifier: &mut Written, ask: &Ask<'_>) -> Result<Option<Beside>, LoadError> {
        match ask.source {
            Some(_) => Err(LoadError::SpecModel { method: self.name(), problem: "needs no model" }),
            None => Ok(None),
        }
    }
}
