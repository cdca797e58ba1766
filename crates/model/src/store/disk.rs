//! Pages in a file: slots of one size, each with a head that says what is in it and a checksum of both.
//!
//! A head is erased before its page is written and written after it, so that a slot is either what its head says or
//! empty; what a crash of the machine leaves in another order fails its checksum and is not used. The name of the file
//! and its first block say for which model and which numbers it is: any other file is not touched.

use super::lru::{Lru, Slot};
use engine::pages::PageKey;
use engine::request::Token;
use engine::store::PageNote;
use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of a head, and of the file's first block.
const HEAD: usize = 4096;
const MAGIC: &[u8; 8] = b"dacapoK1";
/// Bytes of a head before its tokens.
const FIXED: usize = 80;

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The system refused.
    #[error("{0}: {1}")]
    Io(PathBuf, io::Error),
    /// Others could change what is read back.
    #[error(transparent)]
    NotPrivate(#[from] device::private::NotPrivate),
    /// Two servers would overwrite each other's pages.
    #[error("{0} is in use by another process: give each server a folder of its own")]
    InUse(PathBuf),
    /// Not one page fits.
    #[error("a page takes {page} bytes on disk, and {asked} were given")]
    TooSmall {
        /// Bytes of a page with its head.
        page: u64,
        /// Bytes that were given.
        asked: u64,
    },
}

/// What every page of a file has in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// The model, its weights and how it computes.
    pub(crate) identity: [u8; 32],
    /// Bytes of a page in every cache together.
    pub(crate) page_bytes: u64,
    /// Tokens of a page.
    pub(crate) page_tokens: u32,
}

/// A file of pages, and what is where in it.
#[derive(Debug)]
pub(crate) struct Disk {
    file: Arc<PageFile>,
    slots: Lru,
}

/// The file itself. Different slots may be read and written at once.
#[derive(Debug)]
pub(super) struct PageFile {
    file: File,
    shape: Shape,
}

impl Disk {
    /// Opens or creates the file of this shape in a folder; it takes at most `bytes` bytes.
    pub(crate) fn open(folder: &Path, bytes: u64, shape: Shape) -> Result<Disk, DiskError> {
        let slot = HEAD as u64 + shape.page_bytes;
        let room = bytes.saturating_sub(HEAD as u64) / slot;
        let room = u32::try_from(room).unwrap_or(u32::MAX);
        if room == 0 {
            return Err(DiskError::TooSmall { page: slot, asked: bytes });
        }
        let name: String =
            shape.identity.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let path = folder.join(format!("{name}.kv"));
        let io = |error| DiskError::Io(path.clone(), error);
        device::private::make(folder)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(&path);
        let file = file.map_err(io)?;
        if file.try_lock().is_err() {
            return Err(DiskError::InUse(path));
        }
        let first = first_block(&shape);
        let mut found = vec![0; HEAD];
        let known = file.read_exact_at(&mut found, 0).is_ok() && found == first;
        if !known {
            file.set_len(0).map_err(io)?;
            file.write_all_at(&first, 0).map_err(io)?;
        }
        let most = HEAD as u64 + u64::from(room) * slot;
        if file.metadata().map_err(io)?.len() > most {
            file.set_len(most).map_err(io)?;
        }
        let file = PageFile { file, shape };
        let slots = Lru::restore(room, file.scan(room).map_err(io)?);
        Ok(Disk { file: Arc::new(file), slots })
    }

    /// The file, for the thread that reads and writes it.
    pub(super) fn file(&self) -> Arc<PageFile> {
        self.file.clone()
    }

    /// What is where; looking a page up counts as a use.
    pub(super) fn slots(&mut self) -> &mut Lru {
        &mut self.slots
    }

    /// The same, to count.
    pub(super) fn look(&self) -> &Lru {
        &self.slots
    }

    /// Every page, pages before those that follow them if nothing was used since the file was opened.
    pub(super) fn notes(&self) -> impl Iterator<Item = &PageNote> {
        self.slots.notes()
    }
}

impl PageFile {
    /// Pages found in the file whose pages before them are there too: others can never be reached.
    fn scan(&self, room: u32) -> io::Result<Vec<(Slot, PageNote)>> {
        let len = self.file.metadata()?.len();
        let mut head = vec![0; HEAD];
        let mut left = Vec::new();
        for slot in (0..room).map(Slot).take_while(|slot| self.at(*slot) + HEAD as u64 <= len) {
            self.file.read_exact_at(&mut head, self.at(slot))?;
            if let Some((note, _)) = self.parse(&head) {
                left.push((slot, note));
            }
        }
        let (mut found, mut known) = (Vec::new(), HashSet::new());
        loop {
            let reached = |(_, note): &(Slot, PageNote)| {
                note.parent.is_none_or(|parent| known.contains(&parent))
            };
            let (now, later): (Vec<_>, Vec<_>) = left.into_iter().partition(reached);
            if now.is_empty() {
                return Ok(found);
            }
            for (slot, note) in now {
                // The same page twice: the second is of no use.
                if known.insert(note.key) {
                    found.push((slot, note));
                }
            }
            left = later;
        }
    }

    fn at(&self, slot: Slot) -> u64 {
        HEAD as u64 + u64::from(slot.0) * (HEAD as u64 + self.shape.page_bytes)
    }

    /// Writes a page into a slot.
    pub(super) fn write(&self, slot: Slot, note: &PageNote, page: &[u8]) -> io::Result<()> {
        let at = self.at(slot);
        self.file.write_all_at(&[0; FIXED], at)?;
        self.file.write_all_at(page, at + HEAD as u64)?;
        self.file.write_all_at(&head(note, page), at)
    }

    /// The bytes of a page; `None` if the slot does not have it whole.
    pub(super) fn read(&self, slot: Slot, key: PageKey) -> Option<Vec<u8>> {
        let (mut head, mut page) = (vec![0; HEAD], vec![0; self.shape.page_bytes as usize]);
        let at = self.at(slot);
        let read = self.file.read_exact_at(&mut head, at);
        let read = read.and_then(|()| self.file.read_exact_at(&mut page, at + HEAD as u64));
        let whole = read.is_ok()
            && self.parse(&head).is_some_and(|(note, checksum)| {
                note.key == key && *blake3::hash(&page).as_bytes() == checksum
            });
        whole.then_some(page)
    }

    /// What a head says, and the checksum of the page; `None` if the slot is empty or damaged.
    fn parse(&self, head: &[u8]) -> Option<(PageNote, [u8; 32])> {
        let (body, sum) = head.split_at(HEAD - 32);
        if body[..8] != *MAGIC || blake3::hash(body).as_bytes() != sum {
            return None;
        }
        let key = |from: usize| PageKey(body[from..from + 16].try_into().expect("16 bytes"));
        let (flags, count) = (body[40], u32::from_le_bytes(body[44..48].try_into().ok()?));
        let checksum = body[48..80].try_into().ok()?;
        let count = (count == self.shape.page_tokens).then_some(count as usize)?;
        let tokens = body[FIXED..FIXED + 4 * count].chunks_exact(4);
        let tokens =
            tokens.map(|token| Token::from_le_bytes(token.try_into().expect("four bytes")));
        let note = PageNote {
            key: key(8),
            parent: (flags & 1 > 0).then(|| key(24)),
            tokens: tokens.collect(),
            public: flags & 2 > 0,
        };
        Some((note, checksum))
    }
}

fn head(note: &PageNote, page: &[u8]) -> Vec<u8> {
    let mut head = Vec::with_capacity(HEAD);
    head.extend(MAGIC);
    head.extend(note.key.0);
    head.extend(note.parent.unwrap_or_default().0);
    head.extend([u8::from(note.parent.is_some()) | u8::from(note.public) << 1, 0, 0, 0]);
    head.extend((note.tokens.len() as u32).to_le_bytes());
    head.extend(blake3::hash(page).as_bytes());
    note.tokens.iter().for_each(|token| head.extend(token.to_le_bytes()));
    head.resize(HEAD - 32, 0);
    let sum = blake3::hash(&head);
    head.extend(sum.as_bytes());
    head
}

fn first_block(shape: &Shape) -> Vec<u8> {
    let mut block = Vec::with_capacity(HEAD);
    block.extend(MAGIC);
    block.extend(shape.identity);
    block.extend(shape.page_bytes.to_le_bytes());
    block.extend(shape.page_tokens.to_le_bytes());
    block.resize(HEAD, 0);
    block
}

#[cfg(test)]
mod tests;
