//! What the host sends to a step, and what the step returns. In steady decode the host sends nothing
//! and the step returns one ring entry: mail is written only when something changed.

mod input;
mod letter;

pub use input::{GivenRows, JoinInput, PageInput, SeatParams, StateInput, StepInput};
pub use letter::check;
pub(crate) use letter::write_letter;

use crate::{Form, ShapeKey};
use device::mail::{EntryToken, MailBank, MailRow, Mapped, RingReader, Words};
use device::step::ring;
use device::{Arena, StepState};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

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
    /// Two rows of a step have one seat: both would write the same slots.
    #[error("seat {seat} has more than one row in a step")]
    SeatTwice {
        /// The seat.
        seat: u32,
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
    /// Rows of an input that do not exist, or parts of rows.
    #[error("{values} values from row {row} on are not rows of input {input}")]
    Given {
        /// The input.
        input: u32,
        /// The first row.
        row: u32,
        /// Values given.
        values: usize,
    },
    /// A step to verify drafts has a row of another length.
    #[error("a row has {found} tokens in a step whose rows have {q_len}")]
    Uneven {
        /// The row's.
        found: u32,
        /// The step's.
        q_len: u32,
    },
    /// The host prepares inputs, and rows may return several tokens.
    #[error(
        "rows that return up to {tokens} tokens have lengths that only the device knows: it must prepare its inputs"
    )]
    Lengths {
        /// Most tokens of a row.
        tokens: u32,
    },
    /// A launch of several steps is under way. The number of the next launch is known only at its last step.
    #[error("launch {launch} repeats and is not at its last step")]
    Repeating {
        /// Its first step.
        launch: u64,
    },
    /// The device refused: among others, a bank that a launch under way still reads.
    #[error(transparent)]
    Device(#[from] device::Error),
}

/// A token that a row returned.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenOutput {
    /// The token.
    pub token: u32,
    /// It is one of the seat's stop tokens.
    pub stopped: bool,
    /// Its log-probability and as many alternatives as the seat asked for, best first.
    pub logprob: Option<(f32, Vec<(u32, f32)>)>,
}

/// What a step produced.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// The launch.
    pub launch: u64,
    /// Another step of the same launch follows; it counts as launch number + 1.
    pub more_follow: bool,
    /// The tokens of all rows, row after row: one list for all, so that a reused output allocates nothing.
    tokens: Vec<TokenOutput>,
    /// Per row: where its tokens end in the list.
    ends: Vec<u32>,
    /// Per row: drafts that were verified.
    drafts: Vec<u32>,
    /// The vectors of all rows, row after row, of a program that publishes them.
    vectors: Vec<f32>,
}

impl StepOutput {
    /// The tokens that a row returned, in order: none if it was not asked for any.
    pub fn row(&self, index: usize) -> &[TokenOutput] {
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.tokens[start as usize..self.ends[index] as usize]
    }

    /// The tokens of each row of the step.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[TokenOutput]> {
        (0..self.ends.len()).map(|index| self.row(index))
    }

    /// Drafts of a row that were verified.
    pub fn drafts(&self, index: usize) -> u32 {
        self.drafts[index]
    }

    /// The vector of a row; empty if the program publishes none.
    pub fn vector(&self, index: usize) -> &[f32] {
        let width = self.vectors.len() / self.ends.len().max(1);
        &self.vectors[index * width..(index + 1) * width]
    }

    /// The tokens of each row, mutable, so that they can be moved out, and its drafts that were verified.
    pub fn rows_drafted(&mut self) -> impl Iterator<Item = (&mut [TokenOutput], u32)> {
        let (mut rest, mut start) = (&mut self.tokens[..], 0);
        self.ends.iter().zip(&self.drafts).map(move |(&end, &drafts)| {
            let (row, after) = std::mem::take(&mut rest).split_at_mut((end - start) as usize);
            (rest, start) = (after, end);
            (row, drafts)
        })
    }
}

/// A row of a launch under way.
#[derive(Clone, Copy, Debug)]
struct Pending {
    seat: u32,
    /// Alternatives its seat asked for.
    top: usize,
}

/// A launch that may run further steps without the host.
#[derive(Clone, Copy, Debug)]
struct Repeating {
    /// Its first step.
    first: u64,
    /// Steps it may still run, the one under way included.
    steps: u32,
}

/// The host's end of the two banks and the ring. It counts launches as the device does: every step of a
/// launch that repeats is one. In steady decode it allocates nothing.
#[derive(Debug)]
pub struct Mailbox {
    state: StepState,
    banks: MailBank,
    ring: RingReader,
    leave: Mapped,
    /// The places of vectors.
    vectors: Option<[Mapped; 2]>,
    /// The launches under way that publish vectors.
    publishing: VecDeque<u64>,
    launched: u64,
    rows: Vec<MailRow>,
    key: Option<ShapeKey>,
    /// Decode steps get rows and pages from elsewhere.
    given: bool,
    /// Most steps of a launch that repeats, as the device has it.
    steps: u32,
    /// The launch under way that may still run more steps than the one under way.
    repeating: Option<Repeating>,
    /// Alternatives each seat asked for.
    top: Vec<usize>,
    /// The rows of each launch under way: the same list as long as nothing changes.
    pending: VecDeque<Arc<[Pending]>>,
    /// The list of the next launch, if it is that of the last one.
    same: Option<Arc<[Pending]>>,
    /// The rows of the launch whose result was taken last.
    taken: Option<Arc<[Pending]>>,
}

impl Mailbox {
    /// For a state that no step has touched.
    pub fn new(arena: &Arena, state: &StepState) -> Result<Mailbox, MailError> {
        Ok(Mailbox {
            state: *state,
            banks: MailBank::new(arena, state)?,
            ring: RingReader::new(arena, state)?,
            leave: Mapped::new(arena, state.leave)?,
            vectors: match state.vectors {
                Some([even, odd]) => Some([Mapped::new(arena, even)?, Mapped::new(arena, odd)?]),
                None => None,
            },
            publishing: VecDeque::new(),
            launched: 0,
            rows: Vec::new(),
            key: None,
            given: false,
            steps: 0,
            repeating: None,
            top: vec![0; state.limits.seats as usize],
            pending: VecDeque::new(),
            same: None,
            taken: None,
        })
    }

    /// The same, when decode steps take their rows and pages from blocks the host prepares: then mail
    /// does not repeat them.
    pub(crate) fn with_given(mut self, given: bool) -> Mailbox {
        self.given = given;
        self
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
    /// while two launches are under way, because they use both banks. The number is taken only by
    /// [`Mailbox::sent`].
    pub fn post(&mut self, input: &StepInput, key: &ShapeKey) -> Result<u64, MailError> {
        if let Some(Repeating { first: launch, .. }) = self.repeating {
            return Err(MailError::Repeating { launch });
        }
        check(input, &self.state.limits)?;
        let number = self.launched + 1;
        let as_before = self.rows == input.rows;
        if !as_before {
            letter::check_seats(&input.rows, &self.state.limits)?;
        }
        // A row list belongs to a bucket: a new bucket gets it again, changed or not.
        let same = as_before && self.key.as_ref() == Some(key);
        let given = self.given && key.single();
        let rows_changed = (!same && !given) || input.speaks_of_rows();
        let steps = if key.form == Form::Repeated { input.steps.max(1) } else { self.steps };
        let quiet = if given { input.joins.is_empty() } else { input.is_quiet() };
        let mut letter = self.banks.open(number, self.ring.confirmed())?;
        if rows_changed || !quiet || steps != self.steps {
            write_letter(&mut letter, input, rows_changed, !given)?;
            if steps != self.steps {
                letter.steps(steps);
            }
            letter.send();
        }
        for join in &input.joins {
            self.top[join.seat as usize] = join.params.logprobs.unwrap_or(0) as usize;
        }
        self.steps = steps;
        if !as_before {
            self.rows.clone_from(&input.rows);
        }
        if !as_before || !input.joins.is_empty() {
            self.same = None;
        }
        if self.key.as_ref() != Some(key) {
            self.key = Some(*key);
        }
        Ok(number)
    }

    /// The launch posted last was started.
    pub fn sent(&mut self) {
        self.launched += 1;
        if self.key.as_ref().is_some_and(|key| key.form == Form::Repeated) {
            self.repeating = Some(Repeating { first: self.launched, steps: self.steps });
        }
        let pending = |row: &MailRow| Pending { seat: row.seat, top: self.top[row.seat as usize] };
        let rows = self.same.get_or_insert_with(|| self.rows.iter().map(pending).collect());
        self.pending.push_back(rows.clone());
    }

    /// The posted launch did not happen: the device's state is unchanged, so the next post sends
    /// all of it again.
    pub(crate) fn not_sent(&mut self) {
        self.rows.clear();
        self.same = None;
        self.key = None;
        self.steps = 0;
    }

    /// The launch that was sent last publishes vectors.
    pub(crate) fn publishes(&mut self) {
        self.publishing.push_back(self.launched);
    }

    /// Asks the launch of several steps under way, or else the next one, to end early. It ends with the
    /// first step that begins after it has seen this: at the latest the one after the step under way.
    pub fn stop_loop(&mut self) {
        let launch = self.repeating.map_or(self.launched + 1, |launch| launch.first);
        self.leave.set(0, launch as u32, Ordering::Release);
    }

    /// The result of the oldest launch whose result has not been taken, when it is there.
    pub fn take(&mut self) -> Result<Option<StepOutput>, MailError> {
        let mut output = StepOutput::default();
        Ok(self.take_into(&mut output)?.then_some(output))
    }

    /// As [`Mailbox::take`], into a reused output; returns whether there was a result.
    pub(crate) fn take_into(&mut self, output: &mut StepOutput) -> Result<bool, MailError> {
        if self.in_flight() == 0 {
            return Ok(false);
        }
        let Some(entry) = self.ring.poll()? else { return Ok(false) };
        let Some(rows) = self.pending.front() else { return Ok(false) };
        if rows.len() != entry.rows as usize {
            let (launch, sent, found) = (entry.launch, rows.len(), entry.rows);
            return Err(MailError::Rows { launch, sent, found });
        }
        output.launch = entry.launch;
        output.more_follow = entry.again;
        output.tokens.clear();
        output.ends.clear();
        output.drafts.clear();
        for (row, index) in rows.iter().zip(0..) {
            output.tokens.extend(entry.row(index).map(|token| token_output(token, row.top)));
            output.ends.push(output.tokens.len() as u32);
            output.drafts.push(entry.drafts(index));
        }
        output.vectors.clear();
        let published = self.publishing.pop_front_if(|launch| *launch == entry.launch).is_some();
        if let (Some(places), Some(spans), true) = (&self.vectors, self.state.vectors, published) {
            let place = &places[(entry.launch % 2) as usize];
            let words = (spans[0].len / 4) as u32 / self.state.limits.rows * entry.rows;
            let word = |at| f32::from_bits(place.get(at, Ordering::Relaxed));
            output.vectors.extend((0..words).map(word));
        }
        self.taken = Some(rows.clone());
        if output.more_follow {
            self.launched += 1;
            // At the last step the next launch may be posted: its number is known.
            self.repeating.iter_mut().for_each(|launch| launch.steps -= 1);
            self.repeating.take_if(|launch| launch.steps <= 1);
        } else {
            if self.pending.len() == 1 {
                self.repeating = None;
            }
            self.pending.pop_front();
        }
        Ok(true)
    }

    /// The seats of the result taken last, row by row.
    pub(crate) fn taken_seats(&self) -> impl Iterator<Item = u32> {
        self.taken.iter().flat_map(|rows| rows.iter()).map(|row| row.seat)
    }
}

fn token_output(found: EntryToken<'_>, top: usize) -> TokenOutput {
    let has = |flag: u32| found.flags & flag != 0;
    TokenOutput {
        token: found.token,
        stopped: has(ring::STOPPED),
        logprob: has(ring::LOGPROBS).then(|| (found.logprob, found.top().take(top).collect())),
    }
}
