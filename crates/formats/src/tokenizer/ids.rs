//! Collects the ids of a text, up to the caller's limit.

use crate::{Error, Result};

#[derive(Debug)]
pub(super) struct Ids {
    ids: Vec<u32>,
    max: usize,
}

impl Ids {
    pub(super) fn new(max: usize) -> Self {
        Self { ids: Vec::new(), max }
    }

    pub(super) fn push(&mut self, id: u32) -> Result<()> {
        if self.ids.len() == self.max {
            return Err(Error::TooLong { max_tokens: self.max });
        }
        self.ids.push(id);
        Ok(())
    }

    pub(super) fn extend(&mut self, ids: &[u32]) -> Result<()> {
        ids.iter().try_for_each(|&id| self.push(id))
    }

    pub(super) fn into_inner(self) -> Vec<u32> {
        self.ids
    }
}
