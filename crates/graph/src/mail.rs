//! What the host tells a step, and what the step tells back. In steady decode it is nothing and one
//! ring entry: mail is written only when something changed.

mod input;
mod letter;

pub use input::{JoinInput, PageInput, RowInput, SeatParams, StepInput};
pub use letter::{check, write_letter};

use crate::ShapeKey;
use device::mail::{Entry, MailBank, MailRow, RingReader};
use device::step::ring;
use device::{Arena, StepState};
use std::collections::VecDeque;

/// Why mail cannot be sent or read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MailError {
    /// More of something than there is room for.
    #[error("a step can carry {cap} {what}, not {given}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many there are.
        given: usize,
        /// How many fit.
        cap: u32,
    },
    /// A seat or page-table entry past its limit.
    #[error("{what} {index} does not exist; there are {limit}")]
    Outside {
        /// What.
        what: &'static str,
        /// Its index.
        index: u32,
        /// How many there are.
        limit: u32,
    },
    /// The device ran other rows than it was sent: a row list got lost.
    #[error("launch {launch} ran {found} rows; {sent} were sent")]
    Rows {
        /// The launch.
        launch: u64,
        /// Rows sent.
        sent: usize,
        /// Rows in the ring.
        found: u32,
    },
    /// The device refused: among others, a bank that a launch under way still reads.
    #[error(transparent)]
    Device(#[from] device::Error),
}

/// What a row produced.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowOutput {
    /// The sampled token, if the row asked for one.
    pub token: Option<u32>,
    /// It is one of the seat's stop tokens.
    pub stopped: bool,
    /// Its log-probability and as many alternatives as the seat asked for, best first.
    pub logprob: Option<(f32, Vec<(u32, f32)>)>,
}

/// What a step produced.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutput {
    /// The launch.
    pub launch: u64,
    /// One per row of the step.
    pub rows: Vec<RowOutput>,
}

/// The host's end of the two banks and the ring. It counts launches as the device does.
#[derive(Debug)]
pub struct Mailbox {
    state: StepState,
    banks: MailBank,
    ring: RingReader,
    launched: u64,
    rows: Vec<MailRow>,
    key: Option<ShapeKey>,
    /// Alternatives each seat asked for.
    top: Vec<usize>,
    /// The same for the rows of each launch under way.
    pending: VecDeque<Vec<usize>>,
}

impl Mailbox {
    /// For a state that no step has touched.
    pub fn new(arena: &Arena, state: &StepState) -> Result<Mailbox, MailError> {
        Ok(Mailbox {
            state: *state,
            banks: MailBank::new(arena, state)?,
            ring: RingReader::new(arena, state)?,
            launched: 0,
            rows: Vec::new(),
            key: None,
            top: vec![0; state.limits.seats as usize],
            pending: VecDeque::new(),
        })
    }

    /// Launches so far.
    pub fn launched(&self) -> u64 {
        self.launched
    }

    /// Launches whose results have not been taken.
    pub fn in_flight(&self) -> u64 {
        self.launched - self.ring.confirmed()
    }

    /// Writes what changed for the next launch, which will run `key`, and returns its number. Refused
    /// while two launches are under way: both banks are theirs. Until [`Mailbox::sent`] the number is
    /// not used up.
    pub fn post(&mut self, input: &StepInput, key: &ShapeKey) -> Result<u64, MailError> {
        check(input, &self.state.limits)?;
        let number = self.launched + 1;
        let rows: Vec<MailRow> = input.rows.iter().map(RowInput::mail_row).collect();
        // A row list belongs to a bucket: a new bucket gets it again, changed or not.
        let same = rows == self.rows && self.key.as_ref() == Some(key);
        let rows_changed = !same || input.speaks_of_rows();
        let mut letter = self.banks.open(number, self.ring.confirmed())?;
        if rows_changed || !input.is_quiet() {
            write_letter(&mut letter, input, rows_changed.then_some(&rows[..]))?;
            letter.send();
        }
        for join in &input.joins {
            self.top[join.seat as usize] = join.params.logprobs.unwrap_or(0) as usize;
        }
        self.rows = rows;
        self.key = Some(key.clone());
        Ok(number)
    }

    /// The launch posted last is on its way.
    pub fn sent(&mut self) {
        self.launched += 1;
        let top = |row: &MailRow| self.top[row.seat as usize];
        self.pending.push_back(self.rows.iter().map(top).collect());
    }

    /// The posted launch did not happen: what the device holds is what it held, so the next post says
    /// all of it again.
    pub fn not_sent(&mut self) {
        self.rows.clear();
        self.key = None;
    }

    /// The result of the oldest launch whose result has not been taken, when it is there.
    pub fn take(&mut self) -> Result<Option<StepOutput>, MailError> {
        if self.in_flight() == 0 {
            return Ok(None);
        }
        let Some(entry) = self.ring.poll()? else { return Ok(None) };
        let top = self.pending.pop_front().unwrap_or_default();
        if top.len() != entry.rows as usize {
            let (launch, sent, found) = (entry.launch, top.len(), entry.rows);
            return Err(MailError::Rows { launch, sent, found });
        }
        let rows = top.iter().zip(0..).map(|(&top, index)| output(&entry, index, top)).collect();
        Ok(Some(StepOutput { launch: entry.launch, rows }))
    }
}

fn output(entry: &Entry<'_>, index: u32, top: usize) -> RowOutput {
    let row = entry.row(index);
    let has = |flag: u32| row.flags & flag != 0;
    RowOutput {
        token: has(ring::SAMPLED).then_some(row.token),
        stopped: has(ring::STOPPED),
        logprob: has(ring::LOGPROBS).then(|| (row.logprob, row.top().take(top).collect())),
    }
}
