//! Who prepares a decode step's inputs, and how they get to the device (`--graph-prep`).
//!
//! By default the device does: tokens, positions, lengths, page tables, slots and parameters live on
//! the device, and the first node advances them. Engines without state on the device write all of them
//! for every step. The three ways such engines do it are here too, so that the difference can be
//! measured: the host keeps a mirror of every seat, writes a block of inputs into one of two
//! staging buffers, and
//!
//! - `copy` sends it with six copies in front of the replay, one for each table;
//! - `fused` has one copy of it recorded as the graph's first node (with each of the two buffers as its
//!   source: two graphs per bucket);
//! - `async` sends it with one copy on a second stream while the step before still runs, into the one of
//!   two blocks on the device that this step does not read.
//!
//! All four give the same tokens. Joins, masks, biases and penalty counts go by mail in each of them,
//! and so does everything about prefill steps.

use crate::mail::{MailError, StepInput, StepOutput};
use device::mail::Mapped;
use device::step::{HostInputs, PARAM_WORDS, input};
use device::{Arena, Device, Span, StepLimits};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Who prepares a decode step's inputs, and how they get to the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Prep {
    /// Six copies in front of every replay.
    Copy,
    /// One copy as the graph's first node.
    Fused,
    /// One copy on a second stream.
    Async,
    /// No copy: all inputs are on the device.
    #[default]
    Device,
}

impl Prep {
    /// All, in listing order.
    pub const ALL: [Prep; 4] = [Prep::Copy, Prep::Fused, Prep::Async, Prep::Device];

    /// The name in flags and documents.
    pub const fn name(self) -> &'static str {
        match self {
            Prep::Copy => "copy",
            Prep::Fused => "fused",
            Prep::Async => "async",
            Prep::Device => "device",
        }
    }
}

impl fmt::Display for Prep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The host's mirror of a seat on the device.
#[derive(Clone, Debug)]
struct Seat {
    len: u32,
    /// The token it feeds next, if the host has received it.
    token: Option<u32>,
    /// The last launch with a row of it.
    last: u64,
    params: [u32; PARAM_WORDS as usize],
    pages: Vec<u32>,
}

/// The host's mirror of all seats, and how its contents get to the device.
#[derive(Debug)]
pub struct Inputs {
    prep: Prep,
    spans: HostInputs,
    limits: StepLimits,
    staging: [Mapped; 2],
    seats: Vec<Seat>,
}

impl Inputs {
    /// A mirror of empty seats.
    pub fn new(
        arena: &Arena,
        prep: Prep,
        spans: HostInputs,
        limits: StepLimits,
    ) -> Result<Inputs, MailError> {
        if limits.tokens_per_row > 1 {
            return Err(MailError::Lengths { tokens: limits.tokens_per_row });
        }
        let [even, odd] = spans.staging;
        let staging = [Mapped::new(arena, even)?, Mapped::new(arena, odd)?];
        let seat = Seat {
            len: 0,
            token: None,
            last: 0,
            params: [0; PARAM_WORDS as usize],
            pages: vec![0; limits.pages_per_seat as usize],
        };
        let seats = vec![seat; limits.seats as usize];
        Ok(Inputs { prep, spans, limits, staging, seats })
    }

    /// Applies a step's joins and page entries to the mirror; applying them twice is harmless.
    pub(crate) fn learn(&mut self, step: &StepInput) {
        for join in &step.joins {
            let seat = &mut self.seats[join.seat as usize];
            seat.len = join.len;
            seat.token = Some(join.last_token);
            seat.last = 0;
            seat.params = join.params.words();
            seat.pages.fill(0);
        }
        for page in &step.pages {
            self.seats[page.seat as usize].pages[page.index as usize] = page.page;
        }
    }

    /// Writes the inputs of launch `number`, a decode step in a bucket of `bucket` rows, and sends them
    /// unless the graph does so itself (`in_graph`).
    pub fn prepare(
        &mut self,
        device: &Device,
        arena: &Arena,
        step: &StepInput,
        bucket: u32,
        number: u64,
        in_graph: bool,
    ) -> Result<(), MailError> {
        let layout = self.limits.input_layout(bucket);
        let block = (number % 2) as usize;
        let (size, rows) = (self.limits.page_size, step.rows.len() as u32);
        let pages = |seat: &Seat| (seat.len / size + 1).min(self.limits.pages_per_seat);
        let used = step.rows.iter().map(|row| pages(&self.seats[row.seat as usize]));
        let width = used.max().unwrap_or(0);
        let staging = &self.staging[block];
        staging.put(input::ROWS, &[rows, width]);
        for (row, r) in step.rows.iter().zip(0..) {
            let seat = &self.seats[row.seat as usize];
            let position = seat.len;
            let page = seat.pages.get((position / size) as usize).copied().unwrap_or(0);
            let slot = page * size + position % size;
            staging.put(layout.tokens + r, &[seat.token.unwrap_or(input::FROM_SEAT)]);
            staging.put(layout.positions + r, &[position]);
            staging.put(layout.lengths + r, &[position + 1]);
            let at = layout.rows + r * input::ROW_WORDS;
            staging.put(at, &[row.seat, row.flags, slot]);
            staging.put(layout.params + r * PARAM_WORDS, &seat.params);
            staging.put(layout.pages + r * width, &seat.pages[..width as usize]);
        }
        let (from, to) = (self.spans.staging[block], self.spans.blocks[block]);
        let part =
            |span: Span, at: u32, words: u32| span.part(u64::from(at) * 4, u64::from(words) * 4);
        match self.prep {
            Prep::Device => {}
            Prep::Fused if in_graph => {}
            Prep::Copy => {
                let tables = [
                    (0, layout.tokens + rows),
                    (layout.positions, rows),
                    (layout.lengths, rows),
                    (layout.rows, rows * input::ROW_WORDS),
                    (layout.params, rows * PARAM_WORDS),
                    (layout.pages, rows * width),
                ];
                for (at, words) in tables {
                    device.copy(arena, part(from, at, words), part(to, at, words))?;
                }
            }
            Prep::Fused => {
                let words = layout.words;
                device.copy(arena, part(from, 0, words), part(to, 0, words))?;
            }
            Prep::Async => {
                let words = layout.pages + rows * width;
                device.copy_beside(arena, part(from, 0, words), part(to, 0, words))?;
            }
        }
        Ok(())
    }

    /// A step is on its way: its seats are that much longer, their next tokens unknown.
    pub fn launched(&mut self, step: &StepInput, number: u64) {
        for row in &step.rows {
            let seat = &mut self.seats[row.seat as usize];
            seat.len += row.q_len;
            seat.token = None;
            seat.last = number;
        }
    }

    /// The result of a launch whose rows had these seats.
    pub(crate) fn heard(&mut self, seats: impl Iterator<Item = u32>, output: &StepOutput) {
        for (seat, row) in seats.zip(output.rows()) {
            let seat = &mut self.seats[seat as usize];
            if seat.last == output.launch {
                seat.token = row.last().map(|found| found.token);
            }
        }
    }
}
