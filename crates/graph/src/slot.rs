//! Every input of a step is a slot: its owner, element type, length, and what fills the part that a
//! smaller batch does not use. There is no default padding policy: a slot without one does not compile.
//!
//! Tests and `--graph-debug verify` check a device against this registry. It reports a stale tail, a pad
//! row on a live page or a wrong length by slot name, before it causes a wrong token many steps later.

use device::step::{MAX_BIASES, PARAM_WORDS, count};
use device::{DType, StepLimits, StepState, Tensor};

/// Who writes a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The prologue, from mail: it outlives the step.
    Mail,
    /// The prologue, which derives it in every step.
    Prologue,
    /// The sampler, which advances it.
    Sampler,
}

/// How long a slot is; the limits are the one place lengths come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    /// This many words for each seat, the pad seat included.
    Seats(u32),
    /// A row of each page table for each seat.
    SeatPages,
    /// One word per seat and token of the vocabulary.
    SeatVocab,
    /// One word per seat and position.
    SeatContext,
    /// One word per row, and this many more.
    Rows(u32),
    /// One word per token.
    Tokens,
    /// The same for each page table.
    TableTokens,
    /// A fixed number of words.
    Fixed(u32),
}

impl Length {
    /// Words under the given limits.
    #[cfg_attr(not(test), expect(dead_code, reason = "tests hold the tables to it"))]
    pub(crate) fn words(self, limits: &StepLimits) -> u64 {
        let seats = u64::from(limits.seats) + 1;
        // Where there are several, each begins at a multiple of four words.
        let several = |words: u64, tables: u32| match tables {
            1 => words,
            tables => words.next_multiple_of(4) * u64::from(tables),
        };
        match self {
            Length::Seats(each) => seats * u64::from(each),
            Length::SeatPages => several(seats * u64::from(limits.pages_per_seat), limits.tables),
            Length::SeatVocab => seats * u64::from(limits.vocab),
            Length::SeatContext => seats * u64::from(limits.context()),
            Length::Rows(more) => u64::from(limits.rows + more),
            Length::Tokens => u64::from(limits.tokens),
            Length::TableTokens => several(u64::from(limits.tokens), limits.tables),
            Length::Fixed(words) => u64::from(words),
        }
    }
}

/// What fills the entries past the live part, up to the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Padding {
    /// Unchanged: nothing reads these entries.
    Keep,
    /// Zero.
    Zero,
    /// A value that means "no seat", "no row" or "no token".
    Sentinel(Sentinel),
    /// A slot inside the scratch page, which no request owns.
    ScratchPage,
}

/// Values that mean "none". They lie outside what a live row can have, and none is −1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sentinel {
    /// The pad seat: index `seats`.
    PadSeat,
    /// The row limit, one past the last row.
    RowLimit,
    /// The live token count: an empty range at the end.
    LiveTokens,
}

/// One input of a step.
#[derive(Clone, Copy)]
pub(crate) struct Slot {
    /// The name of its table.
    pub name: &'static str,
    /// Who writes it.
    pub owner: Owner,
    /// Element type.
    #[cfg_attr(not(test), expect(dead_code, reason = "tests hold the tables to it"))]
    pub dtype: DType,
    /// How long it is.
    pub length: Length,
    /// What fills the rest of a bucket.
    pub padding: Padding,
    /// Where it lies.
    pub table: fn(&StepState) -> Option<Tensor>,
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?} {:?} {:?}", self.name, self.owner, self.length, self.padding)
    }
}

macro_rules! slots {
    ($($name:ident: $owner:ident, $length:expr, $padding:expr;)*) => {
        /// All slots of a step.
        pub(crate) const SLOTS: &[Slot] = &[$(Slot {
            name: stringify!($name),
            owner: Owner::$owner,
            dtype: DType::U32,
            length: $length,
            padding: $padding,
            table: |state| state.$name.into(),
        },)*];
    };
}

slots! {
    seat_len: Sampler, Length::Seats(1), Padding::Keep;
    seat_token: Sampler, Length::Seats(1), Padding::Keep;
    page_table: Mail, Length::SeatPages, Padding::Keep;
    params: Mail, Length::Seats(PARAM_WORDS), Padding::Keep;
    biases: Mail, Length::Seats(2 * MAX_BIASES), Padding::Keep;
    counts: Prologue, Length::Fixed(count::WORDS), Padding::Keep;
    row_seat: Mail, Length::Rows(0), Padding::Sentinel(Sentinel::PadSeat);
    row_flags: Mail, Length::Rows(0), Padding::Zero;
    row_q_len: Mail, Length::Rows(0), Padding::Zero;
    q_start: Prologue, Length::Rows(1), Padding::Sentinel(Sentinel::LiveTokens);
    kv_len: Prologue, Length::Rows(0), Padding::Zero;
    last_index: Prologue, Length::Rows(0), Padding::Zero;
    token: Prologue, Length::Tokens, Padding::Zero;
    position: Prologue, Length::Tokens, Padding::Zero;
    kv_slot: Prologue, Length::TableTokens, Padding::ScratchPage;
    token_row: Prologue, Length::Tokens, Padding::Sentinel(Sentinel::RowLimit);
    seen: Sampler, Length::SeatVocab, Padding::Keep;
    history: Sampler, Length::SeatContext, Padding::Keep;
    row_drafts: Prologue, Length::Rows(0), Padding::Keep;
    settled: Prologue, Length::Seats(1), Padding::Keep;
    row_replay: Prologue, Length::Rows(0), Padding::Zero;
}

/// A pad entry that breaks its slot's padding policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("slot `{slot}` [{index}]: a pad entry holds {found}, its policy is {policy}")]
pub struct BadPadding {
    /// The slot.
    pub slot: &'static str,
    /// Which entry.
    pub index: usize,
    /// What it holds.
    pub found: u32,
    /// What it should hold.
    pub policy: String,
}

/// The live and padded size of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Live rows.
    pub rows: u32,
    /// Live tokens.
    pub tokens: u32,
    /// Rows of the bucket.
    pub bucket_rows: u32,
    /// Tokens of the bucket.
    pub bucket_tokens: u32,
}

impl Slot {
    /// Checks the pad part of the slot's contents after a step.
    pub(crate) fn check_padding(
        &self,
        words: &[u32],
        extent: &Extent,
        limits: &StepLimits,
    ) -> Result<(), BadPadding> {
        let (live, bucket) = match self.length {
            // The entry past the last live row of an exclusive sum is the live total: not padding.
            Length::Rows(more) => (extent.rows + more, extent.bucket_rows + more),
            // Of several tables the one that is given.
            Length::Tokens | Length::TableTokens => (extent.tokens, extent.bucket_tokens),
            _ => return Ok(()),
        };
        let expected = match self.padding {
            Padding::Keep => return Ok(()),
            Padding::Zero => 0,
            Padding::Sentinel(Sentinel::PadSeat) => limits.seats,
            Padding::Sentinel(Sentinel::RowLimit) => limits.rows,
            Padding::Sentinel(Sentinel::LiveTokens) => extent.tokens,
            Padding::ScratchPage => 0,
        };
        let good = |word: u32| match self.padding {
            Padding::ScratchPage => word < limits.page_size,
            _ => word == expected,
        };
        let pad = live as usize..bucket as usize;
        match pad.into_iter().find(|&index| !good(words[index])) {
            None => Ok(()),
            Some(index) => Err(BadPadding {
                slot: self.name,
                index,
                found: words[index],
                policy: format!("{:?}", self.padding),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::OpenArena;

    fn limits() -> StepLimits {
        StepLimits {
            seats: 5,
            rows: 4,
            tokens: 32,
            pages_per_seat: 7,
            page_size: 16,
            vocab: 100,
            penalties: true,
            tokens_per_row: 3,
            tables: 1,
        }
    }

    #[test]
    fn every_table_is_a_slot_and_has_the_length_the_slot_says() {
        lengths_are_those_of_slots(limits());
        lengths_are_those_of_slots(StepLimits { tables: 3, ..limits() });
    }

    fn lengths_are_those_of_slots(limits: StepLimits) {
        let mut arena = OpenArena::new();
        let mut tables = 0;
        let state = StepState::lay_out(limits, |region, name, bytes| {
            if region == device::Region::State {
                tables += 1;
                let slot = SLOTS.iter().find(|slot| slot.name == name).expect(name);
                assert_eq!(slot.length.words(&limits) * 4, bytes, "{name}");
            }
            arena.alloc(region, name, bytes)
        })
        .expect("limits of a few rows");
        assert_eq!(tables, SLOTS.len());
        for slot in SLOTS {
            let table = (slot.table)(&state).expect(slot.name);
            assert_eq!(u64::from(table.rows) * u64::from(table.cols), slot.length.words(&limits));
            assert_eq!(table.dtype, slot.dtype);
        }
    }

    #[test]
    fn padding_is_checked_only_past_the_live_part() {
        let extent = Extent { rows: 2, tokens: 3, bucket_rows: 4, bucket_tokens: 8 };
        let slot = |name: &str| SLOTS.iter().find(|slot| slot.name == name).unwrap();
        let check = |name: &str, words: &[u32]| slot(name).check_padding(words, &extent, &limits());
        assert_eq!(check("row_seat", &[0, 1, 5, 5]), Ok(()));
        assert_eq!(check("row_seat", &[0, 1, 5, 1]).unwrap_err().index, 3);
        assert_eq!(check("q_start", &[0, 1, 3, 3, 3]), Ok(()));
        assert_eq!(check("q_start", &[0, 1, 3, 3, 4]).unwrap_err().slot, "q_start");
        assert_eq!(check("kv_slot", &[99, 98, 97, 3, 4, 5, 6, 7]), Ok(()));
        assert_eq!(check("kv_slot", &[99, 98, 97, 3, 4, 5, 6, u32::MAX]).unwrap_err().index, 7);
        assert_eq!(check("token_row", &[0, 0, 1, 4, 4, 4, 4, 4]), Ok(()));
    }
}
