//! A reader that tracks its offset and how much of the file is left.

use crate::error::one_line;
use crate::{Error, Result, limits};
use std::fmt::Display;
use std::io::Read;
use std::path::Path;

pub(super) struct Cursor<'a, R> {
    file: &'a Path,
    source: R,
    position: u64,
    length: u64,
    array_elements: u64,
}

impl<'a, R: Read> Cursor<'a, R> {
    pub(super) fn new(file: &'a Path, source: R, length: u64) -> Self {
        Self { file, source, position: 0, length, array_elements: 0 }
    }

    pub(super) fn file(&self) -> &'a Path {
        self.file
    }

    pub(super) fn position(&self) -> u64 {
        self.position
    }

    pub(super) fn length(&self) -> u64 {
        self.length
    }

    pub(super) fn refuse(
        &self,
        offset: u64,
        field: impl AsRef<str>,
        found: impl Display,
        allowed: impl Display,
    ) -> Error {
        Error::invalid(self.file, offset, field, found, allowed)
    }

    /// The error for a file that ends too early.
    pub(super) fn cut_short(&self, what: &str) -> Error {
        Error::CutShort { file: self.file.to_owned(), what: one_line(what) }
    }

    /// Fails unless `bytes` more can come, both of the file and of the header's cap.
    fn claim(&self, field: &str, bytes: u64) -> Result<()> {
        let left = self.length.min(limits::GGUF_HEADER_BYTES).saturating_sub(self.position);
        if bytes <= left {
            return Ok(());
        }
        if self.length <= limits::GGUF_HEADER_BYTES {
            let what = format!("{field} needs {bytes} bytes and {left} are left");
            return Err(self.cut_short(&what));
        }
        let allowed = format!("a header of at most {} bytes", limits::GGUF_HEADER_BYTES);
        Err(self.refuse(self.position, field, format!("{bytes} bytes"), allowed))
    }

    pub(super) fn fill(&mut self, field: &str, buffer: &mut [u8]) -> Result<()> {
        self.claim(field, buffer.len() as u64)?;
        self.source
            .read_exact(buffer)
            .map_err(|source| Error::io(self.file, "cannot read the header", source))?;
        self.position += buffer.len() as u64;
        Ok(())
    }

    pub(super) fn bytes<const N: usize>(&mut self, field: &str) -> Result<[u8; N]> {
        let mut buffer = [0; N];
        self.fill(field, &mut buffer)?;
        Ok(buffer)
    }

    pub(super) fn u32(&mut self, field: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.bytes(field)?))
    }

    pub(super) fn u64(&mut self, field: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.bytes(field)?))
    }

    /// A count of things that take at least `each` bytes of what is left, at most `cap` of them.
    pub(super) fn count(&mut self, field: &str, cap: u64, each: u64) -> Result<u64> {
        let start = self.position;
        let count = self.u64(field)?;
        if count > cap {
            return Err(self.refuse(start, field, count, format!("at most {cap}")));
        }
        let left = self.length.saturating_sub(self.position);
        if count > left / each {
            let what = format!("{field}: {count}, which do not fit the {left} bytes that are left");
            return Err(self.cut_short(&what));
        }
        Ok(count)
    }

    /// A count of array elements. All arrays of the file share one limit.
    pub(super) fn array_count(&mut self, field: &str, each: u64) -> Result<u64> {
        let cap = limits::GGUF_ARRAY_ELEMENTS - self.array_elements;
        let count = self.count(field, cap, each)?;
        self.array_elements += count;
        Ok(count)
    }

    pub(super) fn string(&mut self, field: &str, cap: u64) -> Result<String> {
        let start = self.position;
        let length = self.count(field, cap, 1)?;
        self.claim(field, length)?;
        let mut bytes = vec![0; length as usize];
        self.fill(field, &mut bytes)?;
        String::from_utf8(bytes).map_err(|error| {
            let found = format!("invalid UTF-8 after {} bytes", error.utf8_error().valid_up_to());
            self.refuse(start, field, found, "UTF-8")
        })
    }
}
