//! A buffer is a span of an arena's region: plain data, no lifetime, no address.

use serde::{Deserialize, Serialize};

/// The named parts of an arena. Each is one allocation with its own report line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Region {
    /// Model weights and tables; written once, at load.
    Weights,
    /// State that outlives a step: lengths, last tokens, page tables, sampling parameters.
    State,
    /// Values that live within a step; shared between buckets.
    Workspace,
    /// KV pages; gets the memory that is left when everything else is known.
    Kv,
    /// Host memory the device can address: mailbox and ring.
    HostMapped,
    /// Values between the members of a fused op; no arena has such a region.
    Inside,
}

impl Region {
    /// All regions of an arena, in report order.
    pub const ALL: [Region; 5] =
        [Region::Weights, Region::State, Region::Workspace, Region::Kv, Region::HostMapped];

    /// The name used in reports and errors.
    pub const fn name(self) -> &'static str {
        match self {
            Region::Weights => "weights",
            Region::State => "state",
            Region::Workspace => "workspace",
            Region::Kv => "kv",
            Region::HostMapped => "host-mapped",
            Region::Inside => "inside",
        }
    }
}

/// Tells arenas apart, so that a span of one is refused by another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ArenaId(pub u32);

/// Every span starts at a multiple of this: wide enough for bulk copies, tensor maps and AVX-512.
pub const ALIGN: u64 = 256;

/// Bytes `offset..offset + len` of a region of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Span {
    /// The arena.
    pub arena: ArenaId,
    /// The region.
    pub region: Region,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Span {
    /// The part `offset..offset + len` of this span.
    ///
    /// # Panics
    /// If the part is not inside the span: spans are made by layout code, so this is a bug there.
    #[track_caller]
    pub fn part(self, offset: u64, len: u64) -> Span {
        let end = offset.checked_add(len).expect("span part overflows");
        assert!(end <= self.len, "part {offset}+{len} of a span of {} bytes", self.len);
        Span { offset: self.offset + offset, len, ..self }
    }

    /// One past the last byte.
    pub const fn end(self) -> u64 {
        self.offset.saturating_add(self.len)
    }

    /// Whether two spans share a byte.
    pub fn overlaps(self, other: Span) -> bool {
        let some = self.len > 0 && other.len > 0;
        some && self.arena == other.arena
            && self.region == other.region
            && self.offset < other.end()
            && other.offset < self.end()
    }
}
