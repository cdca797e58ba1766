//! Sizes that follow from the limits of a step: the length of every table and the offsets in a bank. Sizes are
//! computed in 64 bits; limits whose tables do not fit 32 bits are refused before anything is laid out.

use super::{
    FedTables, HostInputs, InputLayout, JOIN_WORDS, MAX_BIASES, MailLayout, PARAM_WORDS,
    StepLimits, StepState, count, input, mail, ring,
};
use crate::{DType, Error, Result, Span, Tensor};

/// Most words of a table and most positions of a sequence: kernels count both in 32 bits, some with a sign.
const MOST: u64 = i32::MAX as u64;
/// Most words of the `seen` table, which kernels count in 64 bits.
const MOST_SEEN: u64 = 1 << 40;

/// Lays out consecutive areas, in words.
struct Areas(u64);

impl Areas {
    fn take(&mut self, count: u64, words: u64) -> u64 {
        let at = self.0;
        self.0 = at.saturating_add(count.saturating_mul(words));
        at
    }
}

/// A number of words; the limits were checked.
#[track_caller]
fn narrow(words: u64) -> u32 {
    u32::try_from(words).expect("limits that StepLimits::check refuses")
}

/// A mail bank's areas, as [`MailLayout`] but for any limits.
struct WideMail {
    /// Where rows, tokens, joins, pages, biases, seen, history and masks begin.
    starts: [u64; 8],
    caps: [u64; 4],
    words: u64,
}

impl StepLimits {
    /// Refuses limits whose tables are too long to be counted in 32 bits, or that leave a table empty.
    pub fn check(&self) -> Result<()> {
        let StepLimits { seats, rows, tokens, pages_per_seat, page_size, vocab, .. } = *self;
        let tokens_per_row = self.tokens_per_row;
        let needed = [
            ("rows", rows),
            ("tokens", tokens),
            ("pages_per_seat", pages_per_seat),
            ("page_size", page_size),
            ("vocab", vocab),
            ("tokens_per_row", tokens_per_row),
            ("tables", self.tables),
        ];
        if let Some((name, _)) = needed.iter().find(|(_, value)| *value == 0) {
            return Err(Error::Limits { problem: format!("{name} is 0; at least 1 is needed") });
        }
        let [seats, rows, tokens] = [seats, rows, tokens].map(u64::from);
        let per_seat = PARAM_WORDS.max(2 * MAX_BIASES).max(pages_per_seat);
        let sizes = [
            ("a sequence, in tokens,", u64::from(pages_per_seat) * u64::from(page_size), MOST),
            ("a table of all seats, in words,", (seats + 1) * u64::from(per_seat), MOST),
            ("the page tables of all seats, in words,", self.wide_tables(), MOST),
            ("the slots of all tables, in words,", self.wide_slots(), MOST),
            ("the seen tokens of all seats, in words,", (seats + 1) * u64::from(vocab), MOST_SEEN),
            ("the tokens of all seats, in words,", self.wide_history(), MOST),
            ("a mail bank, in words,", self.wide_mail().words, MOST),
            ("a block of inputs, in words,", self.wide_input(rows)[6], MOST),
            ("the ring, in words,", self.wide_entry().saturating_mul(ring::ENTRIES.into()), MOST),
            ("rows × tokens of a step", rows * tokens, MOST),
        ];
        match sizes.into_iter().find(|(_, size, most)| size > most) {
            None => Ok(()),
            Some((what, size, most)) => Err(Error::Limits {
                problem: format!(
                    "{what} would be {size} long and {most} is the most: ask for fewer rows or seats, or a \
                     shorter context"
                ),
            }),
        }
    }

    /// The longest a sequence can be, in tokens.
    pub fn context(&self) -> u32 {
        narrow(u64::from(self.pages_per_seat) * u64::from(self.page_size))
    }

    /// Drafts that a row may have.
    pub fn drafts(&self) -> u32 {
        self.tokens_per_row - 1
    }

    /// Tokens in the log of a recurrent state: the drafts of the last step, the token after them, and the drafts of this step.
    pub fn logged(&self) -> u32 {
        match self.drafts() {
            0 => 0,
            drafts => 2 * drafts + 1,
        }
    }

    /// Words of the tokens of all sequences, where they are kept.
    fn wide_history(&self) -> u64 {
        let context = u64::from(self.pages_per_seat) * u64::from(self.page_size);
        if self.tokens_per_row > 1 {
            (u64::from(self.seats) + 1).saturating_mul(context)
        } else {
            0
        }
    }

    /// Words of all page tables. Each begins where kernels can load it.
    fn wide_tables(&self) -> u64 {
        let each = (u64::from(self.seats) + 1).saturating_mul(u64::from(self.pages_per_seat));
        several(each, self.tables)
    }

    /// Words of the slots of all tables.
    fn wide_slots(&self) -> u64 {
        several(u64::from(self.tokens), self.tables)
    }

    /// Words from one page table to the next, where there are several.
    pub(crate) fn table_words(&self) -> u32 {
        narrow(self.wide_tables() / u64::from(self.tables))
    }

    /// Words from the slots of one table to those of the next, where there are several.
    pub(crate) fn slot_words(&self) -> u32 {
        narrow(self.wide_slots() / u64::from(self.tables))
    }

    fn wide_mail(&self) -> WideMail {
        let [rows, tokens, per_seat] = [self.rows, self.tokens, self.pages_per_seat].map(u64::from);
        // Every row may join with whole page tables found in the prefix tree.
        let pages_cap = (rows * per_seat).saturating_mul(u64::from(self.tables));
        let biases_cap = rows * u64::from(MAX_BIASES);
        let context = per_seat * u64::from(self.page_size);
        // All rows at once, if that is a few megabytes; always enough for one row.
        let most = rows.saturating_mul(context).min(1 << 20).max(context);
        let seen_cap = if self.penalties { most } else { 0 };
        let history_cap = if self.tokens_per_row > 1 { most } else { 0 };
        let mut areas = Areas(u64::from(mail::HEADER_WORDS));
        let starts = [
            areas.take(rows, 3),
            areas.take(tokens, 1),
            areas.take(rows, u64::from(JOIN_WORDS)),
            areas.take(pages_cap, 3),
            areas.take(biases_cap, 4),
            areas.take(seen_cap, 3),
            areas.take(history_cap, 1),
        ];
        areas.0 = areas.0.div_ceil(64).saturating_mul(64);
        let masks = areas.take(rows, u64::from(self.vocab.div_ceil(32)));
        let [rows, tokens, joins, pages, biases, seen, history] = starts;
        WideMail {
            starts: [rows, tokens, joins, pages, biases, seen, history, masks],
            caps: [pages_cap, biases_cap, seen_cap, history_cap],
            words: areas.0,
        }
    }

    /// The offsets of areas in a mail bank.
    ///
    /// # Panics
    /// For limits that [`StepLimits::check`] refuses.
    pub fn mail_layout(&self) -> MailLayout {
        let WideMail { starts, caps, words } = self.wide_mail();
        let [rows, tokens, joins, pages, biases, seen, history, masks] = starts.map(narrow);
        let [pages_cap, biases_cap, seen_cap, history_cap] = caps.map(narrow);
        MailLayout {
            rows,
            tokens,
            joins,
            pages,
            pages_cap,
            biases,
            biases_cap,
            seen,
            seen_cap,
            history,
            history_cap,
            masks,
            mask_words: self.vocab.div_ceil(32),
            words: narrow(words),
        }
    }

    /// The areas of an input block and, last, the words of all.
    fn wide_input(&self, rows: u64) -> [u64; 7] {
        let mut areas = Areas(u64::from(input::HEADER_WORDS));
        [
            areas.take(rows, 1),
            areas.take(rows, 1),
            areas.take(rows, 1),
            areas.take(rows, u64::from(input::ROW_WORDS)),
            areas.take(rows, u64::from(PARAM_WORDS)),
            areas.take(rows, u64::from(self.pages_per_seat)),
            areas.0,
        ]
    }

    /// The offsets of areas in an input block for a bucket of `rows`.
    ///
    /// # Panics
    /// For limits that [`StepLimits::check`] refuses, and more rows than they have.
    pub fn input_layout(&self, rows: u32) -> InputLayout {
        let areas = self.wide_input(u64::from(rows));
        let [tokens, positions, lengths, rows, params, pages, words] = areas.map(narrow);
        InputLayout { tokens, positions, lengths, rows, params, pages, words }
    }

    fn wide_entry(&self) -> u64 {
        let row = u64::from(self.tokens_per_row) * u64::from(ring::PLACE_WORDS);
        u64::from(ring::HEADER_WORDS).saturating_add(u64::from(self.rows).saturating_mul(row))
    }

    /// Words of a row in a ring entry: a place for every token it may return.
    ///
    /// # Panics
    /// For limits that [`StepLimits::check`] refuses.
    pub fn ring_row_words(&self) -> u32 {
        narrow(u64::from(self.tokens_per_row) * u64::from(ring::PLACE_WORDS))
    }

    /// Words of one ring entry.
    ///
    /// # Panics
    /// For limits that [`StepLimits::check`] refuses.
    pub fn ring_entry_words(&self) -> u32 {
        narrow(self.wide_entry())
    }

    /// Words of the ring.
    ///
    /// # Panics
    /// For limits that [`StepLimits::check`] refuses.
    pub fn ring_words(&self) -> u32 {
        narrow(u64::from(ring::ENTRIES) * self.wide_entry())
    }
}

/// Words of several areas of `each` words that all start at a multiple of [`TABLE_ALIGN`]; just so many for one.
fn several(each: u64, areas: u32) -> u64 {
    let aligned = each.div_ceil(TABLE_ALIGN / 4).saturating_mul(TABLE_ALIGN / 4);
    if areas == 1 { each } else { aligned.saturating_mul(u64::from(areas)) }
}

/// Spans of the state start at multiples of this: kernels load several words at once.
const TABLE_ALIGN: u64 = 16;

fn require_words(span: Span, what: &str, words: u64) -> Result<()> {
    require_bytes(span, what, words * 4)
}

fn require_bytes(span: Span, what: &str, bytes: u64) -> Result<()> {
    let offset = span.offset;
    let problem = match () {
        () if span.len < bytes => format!("{what} has {} bytes; {bytes} are needed", span.len),
        () if !offset.is_multiple_of(TABLE_ALIGN) => {
            format!("{what} starts at byte {offset}, not at a multiple of {TABLE_ALIGN}")
        }
        () => return Ok(()),
    };
    Err(Error::Contract { op: "step state".into(), problem })
}

impl StepState {
    /// Refuses a state whose tables are shorter than its limits say, or do not start where kernels can load them.
    pub fn check(&self) -> Result<()> {
        let limits = &self.limits;
        limits.check()?;
        let [rows, tokens, seats] = [limits.rows, limits.tokens, limits.seats].map(u64::from);
        let per_seat = |words: u32| (seats + 1) * u64::from(words);
        let tables = [
            (&self.seat_len, "seat_len", per_seat(1)),
            (&self.seat_token, "seat_token", per_seat(1)),
            (&self.page_table, "page_table", limits.wide_tables()),
            (&self.params, "params", per_seat(PARAM_WORDS)),
            (&self.biases, "biases", per_seat(2 * MAX_BIASES)),
            (&self.row_seat, "row_seat", rows),
            (&self.row_flags, "row_flags", rows),
            (&self.row_q_len, "row_q_len", rows),
        ];
        let fed = self.fed();
        fed.check(rows, tokens, limits.wide_slots())?;
        if let Some(fed) = &self.drafting {
            fed.check(rows, tokens, tokens)?;
        }
        let seen = self.seen.iter().map(|seen| (seen, "seen", per_seat(limits.vocab)));
        let several = limits.tokens_per_row > 1;
        if several && (self.history.is_none() || self.row_drafts.is_none()) {
            let problem = "no tables for the drafts of rows that return several tokens".into();
            return Err(Error::Contract { op: "step state".into(), problem });
        }
        let history = self.history.iter().map(|table| (table, "history", limits.wide_history()));
        let drafts = self.row_drafts.iter().map(|table| (table, "row_drafts", rows));
        let settled = self.settled.iter().map(|table| (table, "settled", seats));
        let replay = self.row_replay.iter().map(|table| (table, "row_replay", rows));
        let tables = tables.into_iter().chain(seen).chain(history).chain(drafts);
        let tables = tables.chain(settled).chain(replay);
        for (table, what, words) in tables {
            require_u32(table, what)?;
            require_words(table.span, what, words)?;
        }
        if let Some(features) = &self.features {
            require_u32(&features.last_len, "last_len")?;
            require_words(features.last_len.span, "last_len", seats + 1)?;
            let enough =
                [(features.token, tokens), (features.last, seats + 1), (features.drafted, rows)];
            if let Some((table, _)) =
                enough.iter().find(|(table, rows)| u64::from(table.rows) < *rows)
            {
                let problem = format!("{table} has too few rows for hidden states");
                return Err(Error::Contract { op: "step state".into(), problem });
            }
            for (table, rows) in enough {
                let bytes = rows * table.dtype.bytes(table.stride as usize) as u64;
                require_bytes(table.span, "hidden states", bytes)?;
            }
            if let Some(ids) = &features.ids {
                require_u32(ids, "drafted ids")?;
                require_words(ids.span, "drafted ids", u64::from(ids.cols))?;
            }
        }
        let mail = u64::from(limits.mail_layout().words);
        for bank in self.mail {
            require_words(bank, "a mail bank", mail)?;
        }
        require_words(self.ring, "the ring", u64::from(limits.ring_words()))?;
        require_words(self.leave, "leave", 1)
    }
}

impl FedTables {
    /// Refuses tables that are too short.
    fn check(&self, rows: u64, tokens: u64, slots: u64) -> Result<()> {
        let tables = [
            (&self.counts, "counts", u64::from(count::WORDS)),
            (&self.q_start, "q_start", rows + 1),
            (&self.kv_len, "kv_len", rows),
            (&self.last_index, "last_index", rows),
            (&self.token, "token", tokens),
            (&self.position, "position", tokens),
            (&self.kv_slot, "kv_slot", slots),
            (&self.token_row, "token_row", tokens),
        ];
        tables.into_iter().try_for_each(|(table, what, words)| {
            require_u32(table, what)?;
            require_words(table.span, what, words)
        })
    }
}

fn require_u32(table: &Tensor, what: &str) -> Result<()> {
    if table.dtype == DType::U32 {
        return Ok(());
    }
    let problem = format!("{what} is {:?}, not u32", table.dtype);
    Err(Error::Contract { op: "step state".into(), problem })
}

impl HostInputs {
    /// Refuses blocks that are too short for `rows` rows, or do not start where kernels can load them.
    pub fn check(&self, limits: &StepLimits, rows: u32) -> Result<()> {
        let words = u64::from(limits.input_layout(rows).words);
        let mut blocks = self.blocks.iter().chain(&self.staging);
        blocks.try_for_each(|block| require_words(*block, "a block of inputs", words))
    }
}
