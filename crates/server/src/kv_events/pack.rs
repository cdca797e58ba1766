//! Batches of events in msgpack, with the names and the order of vLLM's types.

use super::EventForm;
use engine::pages::{CacheEvent, Medium};
use engine::request::Token;

/// The names of media as routers know them. What a CPU computes with is `GPU` for them, too.
fn name(medium: Medium) -> &'static str {
    match medium {
        Medium::Device => "GPU",
        Medium::Host => "CPU",
        Medium::Disk => "STORAGE",
    }
}

/// One batch: its time in seconds since 1970, and events in order. Pages that follow each other become one event.
pub(super) fn batch(form: EventForm, time: f64, events: &[CacheEvent]) -> Vec<u8> {
    let events = merge(events);
    let mut out = Writer { form, bytes: Vec::with_capacity(64 + 40 * events.len()) };
    out.array(3);
    out.float(time);
    out.array(events.len());
    events.iter().for_each(|event| write(&mut out, event));
    // The rank among data-parallel engines.
    out.uint(0);
    out.bytes
}

enum Merged<'a> {
    Stored { blocks: Vec<u64>, parent: Option<u64>, tokens: Vec<&'a [Token]>, medium: Medium },
    Removed { blocks: Vec<u64>, medium: Medium },
    Cleared,
}

fn merge(events: &[CacheEvent]) -> Vec<Merged<'_>> {
    let mut merged: Vec<Merged<'_>> = Vec::new();
    for event in events {
        match (event, merged.last_mut()) {
            (
                CacheEvent::Stored { block, parent, tokens, medium },
                Some(Merged::Stored { blocks, tokens: all, medium: same, .. }),
            ) if *parent == blocks.last().copied()
                && medium == same
                && all[0].len() == tokens.len() =>
            {
                blocks.push(*block);
                all.push(tokens);
            }
            (
                CacheEvent::Removed { block, medium },
                Some(Merged::Removed { blocks, medium: same }),
            ) if medium == same => blocks.push(*block),
            (CacheEvent::Stored { block, parent, tokens, medium }, _) => {
                merged.push(Merged::Stored {
                    blocks: vec![*block],
                    parent: *parent,
                    tokens: vec![tokens],
                    medium: *medium,
                });
            }
            (CacheEvent::Removed { block, medium }, _) => {
                merged.push(Merged::Removed { blocks: vec![*block], medium: *medium });
            }
            (CacheEvent::Cleared, _) => merged.push(Merged::Cleared),
        }
    }
    merged
}

fn write(out: &mut Writer, event: &Merged<'_>) {
    match event {
        Merged::Stored { blocks, parent, tokens, medium } => {
            out.tagged("BlockStored", 7);
            out.blocks(blocks);
            out.key("parent_block_hash");
            match parent {
                Some(parent) => out.uint(*parent),
                None => out.nil(),
            }
            out.key("token_ids");
            out.array(tokens.iter().map(|tokens| tokens.len()).sum());
            tokens.iter().copied().flatten().for_each(|&token| out.uint(token.into()));
            out.key("block_size");
            out.uint(tokens[0].len() as u64);
            out.key("lora_id");
            out.nil();
            out.key("medium");
            out.text(name(*medium));
            out.key("lora_name");
            out.nil();
        }
        Merged::Removed { blocks, medium } => {
            out.tagged("BlockRemoved", 2);
            out.blocks(blocks);
            out.key("medium");
            out.text(name(*medium));
        }
        Merged::Cleared => out.tagged("AllBlocksCleared", 0),
    }
}

/// Writes structures either as maps or as arrays.
struct Writer {
    form: EventForm,
    bytes: Vec<u8>,
}

impl Writer {
    /// A structure of so many fields, after the name of its type; each follows as [`Writer::key`] and a value.
    fn tagged(&mut self, tag: &str, fields: usize) {
        match self.form {
            EventForm::Map => self.head(0x80, 16, 0xde, 1 + fields),
            EventForm::Array => self.array(1 + fields),
        }
        self.key("type");
        self.text(tag);
    }

    fn key(&mut self, name: &str) {
        if self.form == EventForm::Map {
            self.text(name);
        }
    }

    fn blocks(&mut self, blocks: &[u64]) {
        self.key("block_hashes");
        self.array(blocks.len());
        blocks.iter().for_each(|&block| self.uint(block));
    }

    fn array(&mut self, len: usize) {
        self.head(0x90, 16, 0xdc, len);
    }

    fn text(&mut self, text: &str) {
        // Names are shorter than 32 bytes.
        self.bytes.push(0xa0 | text.len() as u8);
        self.bytes.extend(text.as_bytes());
    }

    /// A length: in the first byte below `small`, else in 16 bits after the byte `wide`, else in 32 bits.
    fn head(&mut self, first: u8, small: usize, wide: u8, len: usize) {
        match len {
            len if len < small => self.bytes.push(first | len as u8),
            len if len <= usize::from(u16::MAX) => {
                self.bytes.push(wide);
                self.bytes.extend((len as u16).to_be_bytes());
            }
            len => {
                self.bytes.push(wide + 1);
                self.bytes.extend((len as u32).to_be_bytes());
            }
        }
    }

    fn uint(&mut self, value: u64) {
        match value {
            0..=0x7f => self.bytes.push(value as u8),
            0x80..=0xffff => {
                self.bytes.push(0xcd);
                self.bytes.extend((value as u16).to_be_bytes());
            }
            0x1_0000..=0xffff_ffff => {
                self.bytes.push(0xce);
                self.bytes.extend((value as u32).to_be_bytes());
            }
            _ => {
                self.bytes.push(0xcf);
                self.bytes.extend(value.to_be_bytes());
            }
        }
    }

    fn float(&mut self, value: f64) {
        self.bytes.push(0xcb);
        self.bytes.extend(value.to_be_bytes());
    }

    fn nil(&mut self) {
        self.bytes.push(0xc0);
    }
}
