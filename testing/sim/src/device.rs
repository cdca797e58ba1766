//! A fake device that stores its state in memory, returns results late, and fails on schedule.
//!
//! Everything that would break a real device (a page with two writers, a read of an unwritten cell,
//! a step that no graph covers) is recorded as a violation.

mod cells;
mod states;
mod vectors;

use crate::oracle::{HIDDEN, Prefix, VOCAB, cell};
use crate::rng::Rng;
use crate::shelf::Shelf;
use engine::exec::{
    Coverage, Detail, ExecError, Executor, Geometry, Page, Row, RowResult, SCRATCH_PAGE, Sampled,
    Seat, SeatParams, Step, StepKind, StepResult, Tokens,
};
use engine::plant::{Plant, planted};
use engine::request::{Pooling, Token};
use engine::store::Store;
pub(crate) use states::Carried;
use std::collections::{BTreeMap, VecDeque};

pub(crate) const POISON: u64 = u64::MAX;

/// How a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A launch that did nothing; a poll that finds nothing.
    NotLaunched,
    /// Everything on the device is lost.
    StateLost,
    /// The device fails for good.
    Gone,
    /// No graph covers the step.
    NotCovered,
    /// The result is malformed in one of several ways.
    Corrupt,
}

impl Fault {
    /// All kinds of faults.
    pub const ALL: [Fault; 5] =
        [Fault::NotLaunched, Fault::StateLost, Fault::Gone, Fault::NotCovered, Fault::Corrupt];
}

/// When calls fail.
#[derive(Clone, Debug)]
pub(crate) enum Faults {
    /// Never.
    None,
    /// At this call, counted from 1 over launches and polls.
    At(u64, Fault),
    /// Once in this many calls, at random.
    OneIn(u32),
}

/// A launch whose last result has not been polled.
struct Pending {
    /// The launched step; after each step, its next one.
    step: Step,
    /// Steps it may still run.
    left: u32,
    /// Steps that ran and were not polled.
    done: VecDeque<Done>,
}

struct Done {
    result: StepResult,
    /// Polls until the result is available.
    delay: u32,
    /// Pages the step writes, and for which seat.
    writes: BTreeMap<Page, Seat>,
    /// How many tokens fewer than allowed its decode rows returned.
    short: BTreeMap<Seat, u32>,
}

struct SeatState {
    len: u32,
    token: Token,
    params: SeatParams,
    seen: Vec<(Token, bool)>,
    tables: Vec<Vec<Page>>,
}

impl SeatState {
    /// The token after `len` others, whose hash is given.
    fn sample(
        &self,
        prefix: &Prefix,
        len: u32,
        seen: &[(Token, bool)],
        mask: Option<&[u32]>,
    ) -> Sampled {
        let token = prefix.next(len, &self.params, seen, mask);
        let stopped = self.params.stop_tokens.contains(&token);
        let logprob = self.params.logprobs.map(|top| Box::new(prefix.logprob(token, top)));
        Sampled { token, stopped, logprob }
    }
}

fn mask_of(step: &Step, row: usize) -> Option<&[u32]> {
    let mask = step.masks.iter().find(|(index, _)| *index as usize == row);
    mask.map(|(_, bits)| &bits[..])
}

/// The fake device.
pub(crate) struct FakeDevice {
    geometry: Geometry,
    coverage: Coverage,
    cells: Vec<u64>,
    /// Of every page: the hash of what came before its first token, as whoever wrote that had it.
    before: Vec<Prefix>,
    seats: Vec<Option<SeatState>>,
    pending: VecDeque<Pending>,
    faults: Faults,
    max_delay: u32,
    rng: Rng,
    steps: u32,
    /// Most tokens of a decode row.
    tokens: u32,
    /// The number of the step that was refused last.
    refused: u64,
    /// Launches it refused.
    pub refusals: u64,
    /// Tokens that were not the first of their row.
    pub extra: u64,
    /// Decode rows that returned none.
    pub empty: u64,
    /// The current launch was asked to stop its loop.
    pub asked: bool,
    /// Steps that were not the first of their launch.
    pub repeated: u64,
    /// Launches and polls so far.
    pub calls: u64,
    /// Steps launched.
    pub launches: u64,
    /// Results returned.
    pub delivered: u64,
    /// Whether a fault happened that may fail a request.
    pub failed: bool,
    /// Set if the device failed for good; whether the engine was told.
    gone: Option<bool>,
    /// Steps launched with prompt tokens.
    pub prompt_launches: u64,
    /// Keeps evicted pages, if it has one.
    pub(crate) shelf: Option<Shelf>,
    /// What seats carry, on a device whose layers are recurrent.
    pub(crate) carried: Carried,
    /// A log of the launches, if requested.
    pub log: Option<Vec<String>>,
    /// Violations, in order.
    pub violations: Vec<String>,
}

impl FakeDevice {
    /// An empty device.
    pub(crate) fn new(
        geometry: Geometry,
        coverage: Coverage,
        faults: Faults,
        max_delay: u32,
        (steps, tokens): (u32, u32),
        rng: Rng,
    ) -> Self {
        Self {
            cells: vec![POISON; (geometry.pages * geometry.page_size) as usize],
            before: vec![Prefix::new(); geometry.pages as usize],
            seats: (0..geometry.seats).map(|_| None).collect(),
            geometry,
            coverage,
            pending: VecDeque::new(),
            faults,
            max_delay,
            rng,
            steps,
            tokens,
            refused: 0,
            refusals: 0,
            extra: 0,
            empty: 0,
            asked: false,
            repeated: 0,
            calls: 0,
            launches: 0,
            delivered: 0,
            failed: false,
            gone: None,
            prompt_launches: 0,
            shelf: None,
            carried: Carried::default(),
            log: None,
            violations: Vec::new(),
        }
    }

    /// Whether a step in flight writes this page.
    pub(crate) fn is_writing(&self, page: Page) -> bool {
        self.in_flight().any(|step| step.writes.contains_key(&page))
    }

    fn in_flight(&self) -> impl Iterator<Item = &Done> {
        self.pending.iter().flat_map(|launch| &launch.done)
    }

    /// The current launch, if it will run more steps.
    pub(crate) fn repeating(&self) -> Option<u64> {
        self.pending.back().filter(|launch| launch.left > 0).map(|launch| launch.step.number)
    }

    fn wrong(&mut self, what: String) {
        if self.violations.len() < 8 {
            self.violations.push(format!("device: {what}"));
        }
    }

    fn fault(&mut self, launch: bool) -> Option<Fault> {
        self.calls += 1;
        let fault = match self.faults {
            Faults::None => None,
            Faults::At(call, fault) => (call == self.calls).then_some(fault),
            Faults::OneIn(n) => self.rng.one_in(n).then(|| match self.rng.range(0, 19) {
                0..=9 => Fault::NotLaunched,
                10..=13 if self.rng.one_in(16) => Fault::Gone,
                10..=13 => Fault::StateLost,
                14 => Fault::NotCovered,
                _ => Fault::Corrupt,
            }),
        };
        match fault? {
            Fault::Corrupt if launch => None,
            Fault::NotCovered if !launch => None,
            fault => Some(fault),
        }
    }

    /// Loses all state; cells are poisoned, so that later reads are detected.
    pub(crate) fn lose(&mut self) {
        self.cells.fill(POISON);
        self.carried.lose();
        self.seats.iter_mut().for_each(|seat| *seat = None);
        self.pending.clear();
    }

    fn covered(&mut self, step: &Step) {
        let Coverage { decode_rows, prefill_tokens, prefill_rows } = self.coverage;
        let (rows, tokens) = (step.rows.len() as u32, step.tokens() as u32);
        let fits = match step.kind() {
            StepKind::Decode => rows <= decode_rows,
            StepKind::Prefill => rows <= prefill_rows && tokens <= prefill_tokens,
        };
        if !fits || rows == 0 {
            self.wrong(format!("no graph covers {rows} rows, {tokens} tokens"));
        }
        let prompts = step.rows.iter().skip_while(|row| row.tokens().is_empty());
        if prompts.into_iter().any(|row| row.tokens().is_empty()) {
            self.wrong("a decode row comes after a prompt".into());
        }
        if self.pending.len() >= Self::DEPTH {
            self.wrong(format!("{} steps are in flight already", self.pending.len()));
        }
        // Before a launch, the results of all earlier steps but the last must have been polled.
        if self.pending.back().is_some_and(|launch| launch.left > 0 || launch.done.len() > 1) {
            self.wrong("a launch before the previous one is at its last step".into());
        }
        let once = step.kind() == StepKind::Prefill || !step.masks.is_empty();
        if step.steps > self.steps || (once && step.steps > 1) {
            self.wrong(format!("a launch of {} steps", step.steps));
        }
    }

    /// Runs the next step of a launch. Like a device, it checks at the beginning of the step what
    /// could end the loop: a missing page for the next token, or a request to stop.
    fn run(&mut self, mut launch: Pending) -> Pending {
        let asked = self.asked;
        let step = &mut launch.step;
        let mut writes = BTreeMap::new();
        let rows = (0..step.rows.len()).map(|row| self.run_row(step, row, &mut writes));
        let rows: Vec<RowResult> = rows.collect();
        let mut no_page = |row: &Row| {
            let state = self.seats[row.seat.0 as usize].as_ref();
            let last = |state: &SeatState| state.len + row.most - 1;
            state.is_none_or(|state| self.cell_at(row.seat, last(state)).is_none())
        };
        let no_page = step.rows.iter().any(&mut no_page);
        let mut found = rows.iter().flat_map(|row| row.tokens.iter());
        let stopped = found.any(|found| found.stopped) && !planted(Plant::RunPastStop);
        let decode = step.rows.iter().zip(&rows).filter(|(row, _)| row.prompt.is_none());
        let short = decode.map(|(row, found)| (row.seat, row.most - found.tokens.len() as u32));
        let short = short.collect();
        launch.left = if stopped || no_page || asked { 0 } else { launch.left - 1 };
        // As on a real device: a part that every step has, and a part for each token.
        let took = Some(500 + 40 * step.tokens() as u64);
        let result = StepResult { number: step.number, more_follow: launch.left > 0, rows, took };
        let delay = self.rng.range(0, self.max_delay);
        launch.done.push_back(Done { result, delay, writes, short });
        launch
    }

    /// Runs up to `most` more steps of the current launch.
    fn run_on(&mut self, most: u32) {
        for _ in 0..most {
            let Some(launch) = self.pending.pop_back_if(|launch| launch.left > 0) else { return };
            self.repeated += 1;
            let launch = self.run(launch);
            self.pending.push_back(launch);
        }
    }

    fn update(&mut self, step: &Step) {
        for join in &step.joins {
            self.seats[join.seat.0 as usize] = Some(SeatState {
                len: join.len,
                token: join.last_token,
                seen: join.params.seen.clone(),
                params: join.params.clone(),
                tables: vec![Vec::new(); self.geometry.kept.width() as usize],
            });
        }
        for entry in &step.pages {
            let limit = self.geometry.pages_per_seat;
            let Some(state) = &mut self.seats[entry.seat.0 as usize] else {
                self.wrong(format!("a page for {:?}, which is empty", entry.seat));
                continue;
            };
            let index = entry.index as usize;
            let table = &mut state.tables[entry.table as usize];
            if table.len() <= index {
                table.resize(index + 1, SCRATCH_PAGE);
            }
            table[index] = entry.page;
            if entry.index >= limit || entry.page.0 >= self.geometry.pages {
                self.wrong(format!("{entry:?} is out of bounds"));
            }
        }
        let size = self.geometry.page_size as usize;
        for &(from, to) in &step.copies {
            if step.copies.iter().any(|&(source, _)| source == to) {
                self.wrong(format!("{to:?} is copied from and to in one step"));
            }
            let first = from.0 as usize * size;
            self.cells.copy_within(first..first + size, to.0 as usize * size);
            self.before[to.0 as usize] = self.before[from.0 as usize];
        }
        self.copy_states(step);
        self.check_histories(step);
    }

    /// Where rows may return several tokens, a sequence that joins tells the tokens that are in its pages.
    fn check_histories(&mut self, step: &Step) {
        for join in &step.joins {
            let wanted = if self.tokens > 1 { join.len } else { 0 };
            let told = join.history.len() as u32 == wanted;
            let gone = |position: u32| {
                let Geometry { kept, page_size, .. } = self.geometry;
                kept.full == 0 && position / page_size < kept.first_page(join.len, page_size)
            };
            let same = |(position, &token): (u32, &Token)| {
                let there = self.cell_at(join.seat, position).map(|at| self.cells[at]);
                gone(position) || there == Some(cell(token, position))
            };
            if !told || !(0..).zip(&join.history).all(same) {
                let (seat, len, told) = (join.seat, join.len, join.history.len());
                self.wrong(format!("{seat:?} joins with {len} tokens and tells {told}, or others"));
            }
        }
    }

    /// Writes one row's tokens, of which `kept` stay, and checks that no other seat writes the same pages.
    fn feed(
        &mut self,
        row: &Row,
        tokens: &[Token],
        kept: usize,
        writes: &mut BTreeMap<Page, Seat>,
    ) {
        let (seat, start) =
            (row.seat, self.seats[row.seat.0 as usize].as_ref().map_or(0, |s| s.len));
        let mut prefix = self.read_to(seat, start, start);
        let mut passed = vec![prefix];
        for (position, &token) in (start..).zip(tokens) {
            for table in 0..self.geometry.kept.width() {
                let Some(at) = self.cell_in(table, seat, position) else {
                    self.wrong(format!("{seat:?} writes position {position} to no page"));
                    continue;
                };
                let page = Page(at as u32 / self.geometry.page_size);
                let before = self.in_flight().find_map(|step| step.writes.get(&page));
                if let Some(&other) = writes.get(&page).or(before)
                    && other != seat
                {
                    self.wrong(format!("{page:?} is written by {other:?} and {seat:?}"));
                }
                writes.insert(page, seat);
                self.cells[at] = cell(token, position);
                if position.is_multiple_of(self.geometry.page_size) {
                    self.before[page.0 as usize] = prefix;
                }
            }
            prefix.push(cell(token, position));
            passed.push(prefix);
        }
        self.carry_on(row, start, &passed, kept);
    }

    fn run_row(
        &mut self,
        step: &Step,
        index: usize,
        writes: &mut BTreeMap<Page, Seat>,
    ) -> RowResult {
        let row = &step.rows[index];
        let seat = row.seat;
        let Some(state) = &self.seats[seat.0 as usize] else {
            self.wrong(format!("a row for {seat:?}, which is empty"));
            return RowResult::default();
        };
        let start = state.len;
        let (sampled, tokens) = match row.tokens() {
            [] => {
                let joins = step.joins.iter().any(|join| join.seat == seat);
                self.draft(row, joins, mask_of(step, index))
            }
            prompt => (Vec::new(), prompt.to_vec()),
        };
        let all = row.prompt.is_some() || planted(Plant::ReadRejected);
        let kept = if all { tokens.len() } else { sampled.len() };
        let len = start + kept as u32;
        if step.rows[..index].iter().any(|other| other.seat == seat) {
            self.wrong(format!("{seat:?} has two rows in one step"));
        }
        self.feed(row, &tokens, kept, writes);
        if row.prompt.is_none() {
            return self.decoded(seat, len, sampled);
        }

        let mut prefix = self.read_to(seat, start, start);
        let (mut scores, mut hidden) = (Vec::new(), vec![0.0; HIDDEN as usize]);
        for position in start..len {
            for table in 1..self.geometry.kept.width() {
                self.found(table, seat, position);
            }
            prefix.push(self.found(0, seat, position));
            if let Some(score) = row.score()
                && let Some(&target) = score.targets.get((position - start) as usize)
            {
                scores.push(prefix.logprob(target, score.top));
            }
            if row.hidden() == Some(Pooling::Last) {
                hidden.fill(0.0);
            }
            hidden.iter_mut().zip(prefix.hidden()).for_each(|(sum, x)| *sum += x);
        }
        let state = self.seats[seat.0 as usize].as_mut().expect("checked above");
        state.len = len;
        let hidden = row.hidden().map(|_| hidden);
        let detail = Detail { scores, hidden };
        let mut result = RowResult::default();
        if row.sample {
            let found = state.sample(&prefix, len, &state.seen, mask_of(step, index));
            state.token = found.token;
            state.seen.push((found.token, true));
            result.tokens = found.into();
        }
        result.detail = (detail != Detail::default()).then(|| Box::new(detail));
        result
    }

    /// What a decode row returns, and what it writes: the token that its seat holds, then a draft for each further one
    /// that it may return. Those that the row does not return are wrong drafts; they stay in the pages until the next
    /// row writes over them.
    fn draft(
        &mut self,
        row: &Row,
        joins: bool,
        mask: Option<&[u32]>,
    ) -> (Vec<Sampled>, Vec<Token>) {
        let seat = row.seat;
        let (prefix, first, len) = self.read(seat);
        let exact = joins || self.tokens == 1;
        let count = if exact { 1 } else { self.rng.range(0, row.most) };
        let state = self.seats[seat.0 as usize].as_ref().expect("the caller looked");
        let (mut prefix, mut seen) = (prefix, state.seen.clone());
        let (mut sampled, mut written) = (Vec::new(), vec![first]);
        for position in (len..).take(row.most as usize) {
            prefix.push(cell(*written.last().expect("not empty"), position));
            let found = state.sample(&prefix, position + 1, &seen, mask);
            seen.push((found.token, true));
            let wrong = sampled.len() as u32 + 1 >= count;
            written.push((found.token + u32::from(wrong)) % VOCAB);
            if (sampled.len() as u32) < count {
                sampled.push(found);
            }
        }
        // Where a row had drafts, bugs of their acceptance.
        let last = sampled.len();
        if last > 0 && last < row.most as usize {
            let draft = Sampled { token: written[last], ..Sampled::default() };
            if planted(Plant::AcceptOneMore) {
                sampled.push(draft);
            } else if planted(Plant::KeepDraft) {
                sampled[last - 1].token = draft.token;
            }
        }
        if planted(Plant::BlindStop) {
            let accepted = sampled.len().saturating_sub(1);
            sampled[..accepted].iter_mut().for_each(|found| found.stopped = false);
        }
        written.truncate(row.most as usize);
        self.extra += (sampled.len() as u64).saturating_sub(1);
        self.empty += u64::from(sampled.is_empty());
        (sampled, written)
    }

    /// The hash of what is in a seat's pages, the token that it feeds next, and its position.
    fn read(&mut self, seat: Seat) -> (Prefix, Token, u32) {
        let state = self.seats[seat.0 as usize].as_ref().expect("the caller looked");
        let (token, len) = (state.token, state.len);
        (self.read_to(seat, len, len), token, len)
    }

    /// A decode row is done: its seat has `len` tokens in its pages.
    fn decoded(&mut self, seat: Seat, len: u32, sampled: Vec<Sampled>) -> RowResult {
        let state = self.seats[seat.0 as usize].as_mut().expect("the caller looked");
        state.len = len;
        state.token = sampled.last().map_or(state.token, |found| found.token);
        state.seen.extend(sampled.iter().map(|found| (found.token, true)));
        RowResult { tokens: sampled.into_iter().collect(), drafted: 0, detail: None }
    }

    /// A row starts where its seat is, as far as the engine can know: tokens that rows in flight may still return count
    /// as returned. A step that was refused before may have been formed before other results came back.
    fn check_starts(&mut self, step: &Step) {
        for row in &step.rows {
            let Some(state) = &self.seats[row.seat.0 as usize] else { continue };
            let short: u32 = self.in_flight().filter_map(|done| done.short.get(&row.seat)).sum();
            let (least, retried) = (state.len + short, self.refused == step.number);
            if row.start < least || (row.start > least && !retried) {
                let (seat, start) = (row.seat, row.start);
                self.wrong(format!("{seat:?} may have {least} tokens, its row starts at {start}"));
            }
            let most = if row.prompt.is_some() { 1 } else { self.tokens };
            if row.most == 0 || row.most > most {
                self.wrong(format!("a row that may return {} tokens", row.most));
            }
        }
    }

    /// Corrupts a result in a way that the engine must detect.
    fn corrupt(&mut self, result: &mut StepResult) {
        let kind = self.rng.range(0, 3);
        let several = self.tokens > 1;
        let sampled = result.rows.iter_mut().find(|row| !row.tokens.is_empty());
        match (kind, sampled) {
            (0, Some(row)) => row.tokens[0].token = VOCAB + 7,
            // Where rows may return none, one returns more than it may.
            (1, Some(row)) if several => (0..6).for_each(|_| row.tokens.push(Sampled::default())),
            (1, Some(_)) => result.rows.iter_mut().for_each(|row| row.tokens = Tokens::default()),
            (2, _) => result.number += 1,
            _ => drop(result.rows.pop()),
        }
    }
}

impl Executor for FakeDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn coverage(&self) -> Coverage {
        self.coverage
    }

    fn scores_prompts(&self) -> bool {
        true
    }

    fn hidden(&self) -> Option<u32> {
        Some(HIDDEN)
    }

    fn launch(&mut self, step: &Step) -> Result<(), ExecError> {
        let fault = self.fault(true);
        if fault == Some(Fault::Gone) {
            self.failed = true;
            self.lose();
            self.gone.get_or_insert(false);
        }
        if let Some(told) = self.gone {
            if told {
                self.wrong("a launch after the device failed for good".into());
            }
            self.gone = Some(true);
            return Err(ExecError::Gone("planned".into()));
        }
        match fault {
            Some(Fault::NotLaunched) => {
                self.refusals += 1;
                self.refused = step.number;
                return Err(ExecError::NotLaunched("planned".into()));
            }
            Some(Fault::NotCovered) => {
                self.failed = true;
                return Err(ExecError::NotCovered("planned".into()));
            }
            Some(Fault::StateLost) => {
                self.failed = true;
                self.lose();
                return Err(ExecError::StateLost("planned".into()));
            }
            Some(Fault::Corrupt | Fault::Gone) | None => {}
        }
        self.launches += 1;
        if let Some(log) = &mut self.log {
            let row = |row: &Row| (row.seat.0, row.start, row.tokens().len(), row.sample);
            let rows: Vec<_> = step.rows.iter().map(row).collect();
            let (number, joins, pages) = (step.number, step.joins.len(), step.pages.len());
            let (copies, steps) = (&step.copies, step.steps);
            log.push(format!(
                "  step {number}, up to {steps}: {joins} joins, {pages} pages, copies {copies:?}, \
                 rows (seat, start, tokens, sample) {rows:?}"
            ));
        }
        self.prompt_launches += u64::from(step.kind() == StepKind::Prefill);
        self.covered(step);
        self.update(step);
        self.check_starts(step);
        self.check_vectors(step);
        self.asked = false;
        let left = step.steps.max(1);
        let launch = Pending { step: step.clone(), left, done: VecDeque::new() };
        let launch = self.run(launch);
        self.pending.push_back(launch);
        let ahead = self.rng.range(0, 2);
        self.run_on(ahead);
        Ok(())
    }

    fn carries_state(&self) -> bool {
        self.carried.copies() > 0
    }

    fn state_copies(&self) -> u32 {
        self.carried.copies()
    }

    fn steps(&self) -> u32 {
        self.steps
    }

    fn tokens_per_row(&self) -> u32 {
        self.tokens
    }

    fn stop_loop(&mut self) {
        self.asked = true;
    }

    fn store(&mut self) -> Option<&mut dyn Store> {
        if self.shelf.is_some() { Some(self) } else { None }
    }

    fn poll(&mut self, block: bool) -> Result<Option<StepResult>, ExecError> {
        let fault = self.fault(false);
        if let Some(fault @ (Fault::StateLost | Fault::Gone)) = fault {
            self.failed = true;
            self.lose();
            // A poll cannot distinguish the two; the next launch does.
            if fault == Fault::Gone {
                self.gone.get_or_insert(false);
            }
            return Err(ExecError::StateLost("planned".into()));
        }
        if self.repeating().is_some() {
            let ahead = self.rng.range(0, 2);
            self.run_on(ahead);
        }
        if self.pending.front().is_some_and(|launch| launch.done.is_empty()) {
            self.run_on(1);
        }
        let first = self.pending.front_mut().and_then(|launch| launch.done.front_mut());
        let Some(first) = first else { return Ok(None) };
        if fault == Some(Fault::NotLaunched) || (first.delay > 0 && !block) {
            first.delay = first.delay.saturating_sub(1);
            return Ok(None);
        }
        let launch = self.pending.front_mut().expect("checked above");
        let mut result = launch.done.pop_front().expect("checked above").result;
        if !result.more_follow {
            self.pending.pop_front();
        }
        self.delivered += 1;
        if fault == Some(Fault::Corrupt) {
            self.failed = true;
            self.corrupt(&mut result);
        }
        Ok(Some(result))
    }
}
