//! A limit on the work of one call. It counts bytes, not time, so that the same text always gets the
//! same answer.

use crate::{Error, Result, limits};

/// The bytes that expressions may still read on behalf of one call.
#[derive(Debug)]
pub(super) struct Effort {
    left: usize,
}

impl Effort {
    /// What a text of `bytes` may cost.
    pub(super) fn for_text(bytes: usize) -> Self {
        let left = bytes.saturating_mul(limits::READS_PER_BYTE).saturating_add(1 << 20);
        Self { left }
    }

    /// Counts `bytes`; an error if the text takes too long.
    pub(super) fn spend(&mut self, bytes: usize) -> Result<()> {
        match self.left.checked_sub(bytes) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => {
                let cap = limits::READS_PER_BYTE;
                let found = "the tokenizer's expressions take too long on this text";
                let words =
                    format!("{found}: found more than {cap} reads of each byte, allowed: {cap}");
                Err(Error::Tokenizer(words))
            }
        }
    }
}
