//! Forms the next step: pages for decoding sequences, seats for waiting ones, then rows.

use super::{EngineStats, Flight, FlightRow, Ready, Scheduler};
use crate::exec::{
    Join, Kept, PageEntry, Prompt, Row, SCRATCH_PAGE, Score, Seat, SeatParams, Share,
};
use crate::plant::{Plant, planted};
use crate::request::{Finish, Pooling, Token};
use crate::sampling;
use crate::sequence::{Key, Place, Seated, Sequence, Work};
use grammar::Mask;
use std::collections::BTreeMap;

/// A prompt is short where its rest takes at most this part of a step: several such fit beside a long one.
const SHORT_SHARE: u32 = 4;
/// A prompt token after this many costs about another token more, for its attention (SmolLM2 on a CPU).
const CONTEXT: u32 = 4096;
/// A prompt token whose log-probabilities are wanted costs about so many, for its logits (the same).
const SCORED: u32 = 4;

impl Scheduler {
    /// Fills `step` and returns whether there is anything to launch. From here on the step counts as
    /// launched; it is either launched, tried again, or taken back by a restart.
    pub(crate) fn form(&mut self) -> bool {
        self.step.joins.clear();
        self.step.pages.clear();
        self.step.copies.clear();
        self.step.states.clear();
        self.step.masks.clear();
        self.seen = 0;
        self.told = 0;
        self.mask_cost = 0;
        self.mask_first = None;
        self.step.steps = 1;
        let rows = self.spare.pop().unwrap_or_default();
        self.forming = Flight { number: 0, steps: 1, fed: (0, 0), rows };
        self.step.share = Share::None;
        self.forming.rows.clear();

        let starved = self.gather();
        // A newly admitted request must not take the page that another sequence was preempted to free.
        if !starved && self.admit() {
            self.gather();
        }
        self.add_rows();
        self.step.rows.truncate(self.forming.rows.len());
        if self.step.rows.is_empty() {
            self.spare.push(std::mem::take(&mut self.forming.rows));
            return false;
        }
        if self.reports.steps > 1 {
            let steps = if starved { 1 } else { self.may_run() };
            self.lengthen(steps);
            self.settled = self.settled.saturating_add(steps);
        }
        self.numbered += 1;
        self.step.number = self.numbered;
        self.forming.number = self.numbered;
        self.stalled = true;
        self.tries = 0;
        self.fork_all();
        true
    }

    /// The formed step is on its way.
    pub(crate) fn launched(&mut self) {
        self.stalled = false;
        if self.feeds_prompts() {
            self.stats.prefill_steps += 1;
        } else {
            self.stats.decode_steps += 1;
        }
        let flight = std::mem::take(&mut self.forming);
        self.flights.push_back(flight);
    }

    /// Whether the formed step is one of [`crate::exec::StepKind::Prefill`]: prompts come after decode rows.
    fn feeds_prompts(&self) -> bool {
        self.step.rows.last().is_some_and(|row| row.prompt.is_some())
    }

    /// Finds the sequences that could have a row in this step: `ready` for decode, `prompts` in order of service.
    /// Every sequence that is ready owns the page it writes next; when pages run out, a sequence is sent back
    /// to the queue. Returns true if a sequence still waits for a page.
    fn gather(&mut self) -> bool {
        let starved = loop {
            let mut starved = false;
            self.ready.clear();
            self.prompts.clear();
            for seat in 0..self.seats.len() {
                let Some(key) = self.seats[seat] else { continue };
                let sequence = &self.sequences[key];
                let depth = self.config.depth as u32;
                let most = sequence.widest(self.reports.tokens);
                if let Some((seat, start)) = sequence.is_steady_decode(&self.geometry, depth, most)
                {
                    self.ready.push(Ready { key, seat, start, steady: true });
                    continue;
                }
                let none = Ready { key, seat: Seat(0), start: 0, steady: false };
                match sequence.work() {
                    Work::Decode if self.provide(key) => self.ready.push(none),
                    Work::Decode => starved = true,
                    Work::Prompt { .. } if self.provide_prompt(key) => self.prompts.push(key),
                    // Its own rows in flight give pages back when their window has moved on.
                    Work::Prompt { .. } => {
                        starved |= self.sequences[key].seated().is_some_and(|at| at.flying == 0);
                    }
                    Work::Held => self.stats.held_back_rows += 1,
                    Work::Nothing => {}
                }
            }
            // Preempt one at a time: sequences that are leaving will free more pages.
            if !starved || self.leaving > 0 || !self.preempt_for_pages() {
                break starved;
            }
        };
        self.order_prompts();
        if planted(Plant::StarvePrefill) && !self.ready.is_empty() {
            self.prompts.clear();
        }
        starved
    }

    /// Prompts in order of service, but of one call the second after the first of every other, and
    /// short ones before long ones: a long prompt takes many steps anyway, and gets the tokens of a step
    /// that the short ones do not use. A prompt that got no row too often is due and goes first.
    fn order_prompts(&mut self) {
        let short = self.prompt_tokens(self.ready.len() as u32) / SHORT_SHARE;
        let Self { prompts, sequences, .. } = self;
        if prompts.len() < 2 {
            return;
        }
        prompts.sort_by_key(|&key| sequences[key].rank());
        let mut before: BTreeMap<u64, u32> = BTreeMap::new();
        let order = |&key: &Key| {
            let sequence = &sequences[key];
            let nth = before.entry(sequence.cold.spec.call).or_default();
            *nth += 1;
            let left = sequence.goal() - sequence.seated().map_or(0, |at| at.fed);
            (!sequence.due, *nth, left > short, key)
        };
        let mut order: Vec<_> = prompts.iter().map(order).collect();
        // The sort is stable: what is equal here stays in order of service.
        order.sort_by_key(|&(not_due, nth, long, _)| (not_due, nth, long));
        prompts.clear();
        prompts.extend(order.iter().map(|&(.., key)| key));
    }

    /// Makes the pages at the next position this sequence's own.
    fn provide(&mut self, key: Key) -> bool {
        let (page_size, kept) = (self.geometry.page_size, self.geometry.kept);
        let sequence = &mut self.sequences[key];
        let Place::Seated(at) = &mut sequence.place else { return false };
        if at.fed >= at.room(&self.geometry) {
            return self.pool.grow(&mut at.table, &mut sequence.cold.reserve);
        }
        if !at.shared || planted(Plant::ShareTail) {
            return true;
        }
        let (index, width) = (at.fed / page_size, kept.width());
        let places = index * width..(index + 1) * width;
        let foreign = |place: &u32| !self.pool.writable(at.table[*place as usize]);
        let foreign: Vec<u32> = places.filter(foreign).collect();
        if !self.pool.ensure(foreign.len() as u32) {
            return false;
        }
        for place in foreign {
            let Some(copy) = self.pool.take() else { return false };
            let page = std::mem::replace(&mut at.table[place as usize], copy);
            at.sent = at.sent.min(index);
            if planted(Plant::LoseCopy) {
                self.pool.give(page);
            } else {
                // The source stays held until the step that copies it has been formed.
                sequence.cold.copies.push((page, place));
            }
        }
        at.shared = false;
        true
    }

    /// Makes sure that a prompt has pages for its next tokens: where layers have windows, it has those of a window and a
    /// step when it is seated, and gets others while it is fed.
    fn provide_prompt(&mut self, key: Key) -> bool {
        let sequence = &mut self.sequences[key];
        let Place::Seated(at) = &mut sequence.place else { return false };
        at.fed < at.room(&self.geometry)
            || self.pool.grow(&mut at.table, &mut sequence.cold.reserve)
    }

    /// Most tokens of a step that feeds prompts beside so many rows that decode.
    fn prompt_tokens(&self, decoding: u32) -> u32 {
        let most = if decoding > 0 { self.config.mixed_tokens } else { u32::MAX };
        let step = self.config.step_tokens.max(self.reports.whole.unwrap_or(0));
        step.min(self.coverage.prefill_tokens).min(most).max(1)
    }

    fn add_rows(&mut self) {
        let decoding = self.ready.len() as u32;
        let (budget, share) = self.balanced(decoding);
        let pooling = self.next_pooling();
        let vectors = pooling.is_some();
        let room = !vectors && decoding < budget && decoding < self.coverage.prefill_rows;
        self.order_masks();
        let waits = |this: &mut Self| this.mask_first.is_none() && this.gathers(decoding);
        let mixed = !self.prompts.is_empty() && room && !waits(self);
        // Without room for both they take turns.
        let prompts_only = !self.prompts.is_empty()
            && !room
            && (decoding == 0 || (self.prompts_turn && !(vectors && waits(self))));
        self.prompts_turn = !self.prompts.is_empty() && !room && !prompts_only;

        if vectors || (!mixed && !prompts_only) {
            // No prompt that needs a mask has a row in this step, so none gets the first mask; it keeps its turn.
            if let Some(first) = self.mask_first.take() {
                self.unmasked.push_front(first);
            }
        }
        let (mut tokens, mut rows) = (budget, self.coverage.prefill_rows);
        if !prompts_only {
            for index in 0..self.ready.len() {
                self.add_decode(self.ready[index]);
            }
            tokens = tokens.saturating_sub(decoding);
            rows = rows.saturating_sub(decoding);
        }
        self.since_prompts = self.since_prompts.saturating_add(1);
        if mixed || prompts_only {
            self.last_pooling = pooling;
            let (before, beside) = (tokens, self.forming.rows.len() as u32);
            for index in 0..self.prompts.len() {
                if tokens == 0 || rows == 0 {
                    self.pass_over(index);
                    break;
                }
                let key = self.prompts[index];
                let weight = self.weight(key);
                let cut = self.reports.whole.is_some() && self.left(key) > tokens;
                if cut || self.pooling(key) != pooling {
                    self.pass_over_one(key);
                    continue;
                }
                let fed = self.add_prompt(key, (tokens / weight).max(1));
                tokens = tokens.saturating_sub(fed.saturating_mul(weight));
                // One that waits for a mask, or to join, leaves its row to the next.
                rows -= u32::from(fed > 0);
            }
            // Where none could join, they have waited for nothing yet.
            if self.forming.rows.len() as u32 > beside {
                (self.since_prompts, self.rows_waited) = (0, 0);
            }
            self.step.share = share;
            self.forming.fed = (beside + before - tokens, beside);
        }
    }

    /// What a step that feeds prompts now makes of them: the vectors of one pooling, or text. Each is a program of its
    /// own, so a step has prompts of one kind, and one that makes vectors has no rows that decode. Where several kinds
    /// wait, the one that was fed last waits for another.
    fn next_pooling(&self) -> Option<Pooling> {
        let mut waiting = self.prompts.iter().map(|&key| self.pooling(key));
        let first = waiting.clone().next().flatten();
        waiting.find(|&pooling| pooling != self.last_pooling).unwrap_or(first)
    }

    /// The vector that a prompt is fed for; `None` if it is for text.
    fn pooling(&self, key: Key) -> Option<Pooling> {
        let embed = self.sequences[key].cold.spec.embed;
        embed.map(|embed| embed.pooling).filter(|_| !planted(Plant::MixVectors))
    }

    /// Most tokens of a step that feeds prompts beside so many rows that decode, and why so many.
    fn balanced(&mut self, decoding: u32) -> (u32, Share) {
        let most = self.prompt_tokens(decoding);
        let EngineStats { prompt_tokens, cached_tokens, tokens, .. } = self.stats;
        self.balance.count(prompt_tokens.saturating_sub(cached_tokens), tokens);
        if self.prompts.is_empty() {
            return (most, Share::None);
        }
        let waiting = self.prompts.iter().map(|&key| self.left(key)).fold(0, u32::saturating_add);
        self.balance.tokens(decoding, waiting, most)
    }

    /// What a prompt token costs on a device whose steps are kept short, in tokens of a short prompt.
    fn weight(&self, key: Key) -> u32 {
        if self.config.mixed_tokens >= self.config.step_tokens {
            return 1;
        }
        let sequence = &self.sequences[key];
        let context = sequence.seated().map_or(0, |at| at.fed);
        let scored = if sequence.scoring() { SCORED } else { 1 };
        scored * (1 + context / CONTEXT)
    }

    /// The sequence that waits longest for a mask gets the first one of this step: a decode row is moved to
    /// the front, and for a prompt (`mask_first`) the other rows wait a step.
    fn order_masks(&mut self) {
        while let Some(first) = self.unmasked.pop_front() {
            if let Some(index) = self.ready.iter().position(|ready| ready.key == first) {
                return self.ready.rotate_left(index);
            }
            if self.prompts.contains(&first) {
                self.mask_first = Some(first);
                return;
            }
        }
    }

    /// Whether the prompts wait, to be fed in one step with later ones. They do if prompts were fed lately,
    /// they have fewer tokens than there are decode rows, none of them has begun, and the rows lost by waiting
    /// since then are no more than a step with prompts costs: about a quarter of the decode rows.
    fn gathers(&mut self, decoding: u32) -> bool {
        let mut tokens = 0;
        for &key in &self.prompts {
            let sequence = &self.sequences[key];
            let Some(at) = sequence.seated().filter(|at| !at.joined && !sequence.due) else {
                return false;
            };
            tokens += sequence.goal() - at.fed;
        }
        let waited = self.rows_waited + self.prompts.len() as u32;
        let waits =
            tokens < decoding && self.since_prompts < self.config.gather && waited <= decoding / 4;
        if waits {
            self.rows_waited = waited;
        }
        waits
    }

    /// Prompts that got no row in this step; one passed over too often becomes due.
    fn pass_over(&mut self, from: usize) {
        for index in from..self.prompts.len() {
            self.pass_over_one(self.prompts[index]);
        }
    }

    fn pass_over_one(&mut self, key: Key) {
        let patience = self.config.patience;
        let sequence = &mut self.sequences[key];
        sequence.cold.passed += 1;
        sequence.due |= sequence.cold.passed > patience;
    }

    /// Tokens that a prompt still has to feed.
    fn left(&self, key: Key) -> u32 {
        let sequence = &self.sequences[key];
        sequence.goal() - sequence.seated().map_or(0, |at| at.fed)
    }

    fn add_decode(&mut self, ready: Ready) {
        let Ready { key, mut seat, mut start, steady } = ready;
        let joins = !steady && self.sequences[key].seated().is_some_and(|at| !at.joined);
        // In steady decode the device needs nothing from the host.
        if !steady && !self.prepare_decode(key) {
            return;
        }
        // The first row after a join returns one token, so that an answer begins when its prompt is done.
        let widest = self.sequences[key].widest(self.reports.tokens);
        let most = match (steady, joins) {
            (true, _) => widest,
            (false, true) => 1,
            (false, false) => self.sequences[key].most_next(&self.geometry, widest),
        };
        let Some(at) = self.sequences[key].seated_mut() else { return };
        if !steady {
            (seat, start) = (at.seat, at.fed);
        }
        at.fed += most;
        at.flying += 1;
        at.ahead += most;
        at.primed = true;
        let end = start + most;
        let exact = joins || self.reports.tokens == 1;
        let row = FlightRow { key, end, most, prompt: false, exact, targets: 0, hidden: false };
        let index = self.forming.rows.len();
        self.forming.rows.push(row);
        *self.step_row(index) = Row { most, ..Row::decode(seat, start) };
    }

    /// Row `index` of the step being formed: in steady decode it is the last step's, so that nothing is
    /// rebuilt.
    fn step_row(&mut self, index: usize) -> &mut Row {
        if index == self.step.rows.len() {
            self.step.rows.push(Row::decode(Seat(0), 0));
        }
        &mut self.step.rows[index]
    }

    /// How many steps the launch may have. Only one if a sequence feeds a prompt, needs a mask or is leaving.
    /// Never so many that a row could reach its last token before the last step. Waiting requests were just
    /// refused; they can be seated only when a sequence ends, which ends the launch too.
    ///
    /// After a launch that ends early no other is queued, and the device waits for the host. So a launch has
    /// at most half as many steps as ran since rows last came or went: where that happens often, steps are
    /// launched one by one, two in flight.
    fn may_run(&mut self) -> u32 {
        let rows = self.forming.rows.len();
        let changed = !self.step.joins.is_empty() || rows != self.settled_rows;
        self.settled_rows = rows;
        if changed || self.feeds_prompts() {
            self.settled = 0;
        }
        let blind = |key: &Key| self.sequences[*key].guided;
        let masked = self.seats.iter().flatten().any(blind) && !planted(Plant::BlindSteps);
        if masked || !self.prompts.is_empty() || self.leaving > 0 {
            return 1;
        }
        let left = |row: &FlightRow| {
            let sequence = &self.sequences[row.key];
            let known = sequence.len() + sequence.seated().map_or(0, |at| at.ahead);
            1 + sequence.max_len.saturating_sub(known) / row.most
        };
        let most = self.reports.steps.min(self.settled / 2).max(1);
        self.forming.rows.iter().map(left).min().map_or(1, |left| left.min(most))
    }

    /// Makes the formed step a launch of several steps.
    fn lengthen(&mut self, steps: u32) {
        if steps <= 1 {
            return;
        }
        self.step.steps = steps;
        self.forming.steps = steps;
        // Pages for all of its steps, as far as there are any: the launch ends early when one is missing.
        for row in &self.forming.rows {
            let sequence = &mut self.sequences[row.key];
            let Place::Seated(at) = &mut sequence.place else { continue };
            let last = row.end - 1 + (steps - 1) * row.most;
            while last >= at.room(&self.geometry)
                && self.pool.grow(&mut at.table, &mut sequence.cold.reserve)
            {}
            send_pages(at, self.geometry.kept, &mut self.step.pages);
        }
    }

    /// Adds a prompt chunk of at most `most` tokens; returns how many.
    fn add_prompt(&mut self, key: Key, most: u32) -> u32 {
        let Work::Prompt { end: goal } = self.sequences[key].work() else { return 0 };
        let fed = self.sequences[key].seated().map_or(0, |at| at.fed);
        let most = if planted(Plant::OverBudget) { most + 3 } else { most };
        let end = goal.min(fed.saturating_add(most)).min(self.cover(key, fed.saturating_add(most)));
        let end = self.cut_at_mark(key, fed, end);
        let sample = end == goal && self.sequences[key].wants_answer();
        let Some(start) = self.prepare(key, sample) else { return 0 };
        self.save_state(key, start);
        let sequence = &mut self.sequences[key];
        let score = sequence.score(start, end);
        let hidden = sequence.asks_hidden(end);
        let tokens = sequence.tokens[start as usize..end as usize].to_vec();
        sequence.cold.passed = 0;
        let at = sequence.seated_mut().expect("only the seated have rows");
        at.fed = end;
        at.flying += 1;
        at.ahead += u32::from(sample);
        at.primed = sample;
        let seat = at.seat;
        let targets = score.as_ref().map_or(0, |score| score.targets.len() as u32);
        let (most, hidden_asked) = (u32::from(sample), hidden.is_some());
        let row =
            FlightRow { key, end, most, prompt: true, exact: true, targets, hidden: hidden_asked };
        let index = self.forming.rows.len();
        self.forming.rows.push(row);
        let prompt = Some(Box::new(Prompt { tokens, score, hidden }));
        *self.step_row(index) = Row { seat, start, sample, most: 1, prompt };
        end - start
    }

    /// Adds pages for the tokens of a prompt up to `end`, as far as there are any; returns how many tokens have some. More
    /// than it was seated with only as long as enough are left for others.
    fn cover(&mut self, key: Key, end: u32) -> u32 {
        let (kept, spare, own) = (self.geometry.kept, self.spare_pages(), self.window_pages());
        let sequence = &mut self.sequences[key];
        let end = end.min(sequence.goal());
        let Place::Seated(at) = &mut sequence.place else { return 0 };
        while at.room(&self.geometry) < end {
            let enough = || self.pool.available() >= spare + kept.width();
            let may = at.pages(kept) - at.freed < own || enough();
            if !may || !self.pool.grow(&mut at.table, &mut sequence.cold.reserve) {
                break;
            }
        }
        at.room(&self.geometry)
    }

    /// Adds to the step what the device needs before a row of this sequence: mask, join, pages, page copies.
    /// Returns the row's start, or `None` when the sequence just ended or has to join in a later step.
    fn prepare(&mut self, key: Key, sample: bool) -> Option<u32> {
        if !self.sequences[key].seated()?.joined && !self.may_join(key) {
            return None;
        }
        let sequence = &mut self.sequences[key];
        if sample && sequence.guided {
            let spent = self.mask_cost > 0 && self.mask_cost >= self.config.mask_cost;
            if spent || self.mask_first.is_some_and(|first| first != key) {
                if !self.unmasked.contains(&key) {
                    self.unmasked.push_back(key);
                }
                return None;
            }
            match sequence.mask(self.geometry.vocab) {
                Ok(Mask { words: mut mask, cost }) => {
                    self.mask_first = None;
                    self.unmasked.retain(|&waiting| waiting != key);
                    self.mask_cost = self.mask_cost.saturating_add(cost);
                    // Logits may be padded past the tokenizer's last token: those are never allowed.
                    mask.resize(self.geometry.vocab.div_ceil(32) as usize, 0);
                    self.step.masks.push((self.forming.rows.len() as u32, mask));
                }
                Err(error) => {
                    self.end(key, Finish::Grammar(error.to_string()));
                    return None;
                }
            }
        }
        let sequence = &mut self.sequences[key];
        let (seat, fed, mut joined) = {
            let at = sequence.seated()?;
            (at.seat, at.fed, at.joined)
        };
        joined |= planted(Plant::StaleSeat) && self.numbered > 20 && seat.0 == 0;
        if !joined {
            self.restore_state(key);
            let sequence = &self.sequences[key];
            let adapter = sequence.cold.spec.adapter;
            let adapter = self.join_slot(adapter);
            let sequence = &self.sequences[key];
            self.step.joins.push(Join {
                seat,
                len: fed,
                last_token: sequence.tokens[fed as usize],
                params: SeatParams { adapter, ..sampling::seat_params(sequence) },
                history: match self.reports.tokens {
                    1 => Vec::new(),
                    _ if planted(Plant::ForgetHistory) => Vec::new(),
                    _ => sequence.tokens[..fed as usize].to_vec(),
                },
            });
        }
        let sequence = &mut self.sequences[key];
        let Place::Seated(at) = &mut sequence.place else { return None };
        at.joined = true;
        if planted(Plant::LosePageEntry) && at.sent == 2 {
            at.sent = 3;
        }
        send_pages(at, self.geometry.kept, &mut self.step.pages);
        for (source, place) in sequence.cold.copies.drain(..) {
            self.step.copies.push((source, at.table[place as usize]));
            self.stats.copies += 1;
            // The source is freed after all rows are added: until then no other sequence can get it.
        }
        Some(fed)
    }

    /// Whether the step has room for what a sequence tells when it joins: the tokens that count for penalties, and its
    /// history. The first always has.
    fn may_join(&mut self, key: Key) -> bool {
        let sequence = &self.sequences[key];
        let penalised = sampling::penalised(&sequence.cold.spec.sampling);
        let seen = if penalised { sequence.len() } else { 0 };
        let fed = sequence.seated().map_or(0, |at| at.fed);
        let told = if self.reports.tokens > 1 { fed } else { 0 };
        let fits = |held: u32, more: u32| {
            held == 0 || more == 0 || held.saturating_add(more) <= self.config.max_seen
        };
        let fits = fits(self.seen, seen) && fits(self.told, told);
        if fits {
            self.seen = self.seen.saturating_add(seen);
            self.told = self.told.saturating_add(told);
        }
        fits
    }

    /// As [`Self::prepare`], with pages for all tokens the row may return and for the rows launched ahead of results,
    /// so that the next launch needs no new ones. Takes only available pages: no sequence is preempted for them.
    fn prepare_decode(&mut self, key: Key) -> bool {
        let depth = self.config.depth as u32;
        let sequence = &mut self.sequences[key];
        let last = sequence.max_len.saturating_sub(2);
        let rows = (depth + 1) * self.reports.tokens;
        if let Place::Seated(at) = &mut sequence.place {
            // One page at a time is enough where a row returns one token.
            for _ in 0..self.reports.tokens {
                if (at.fed + rows - 1).min(last) >= at.room(&self.geometry) {
                    self.pool.grow(&mut at.table, &mut sequence.cold.reserve);
                }
            }
        }
        self.prepare(key, true).is_some()
    }
}

/// Adds the entries of a sequence's table that the device does not have.
fn send_pages(at: &mut Seated, kept: Kept, pages: &mut Vec<PageEntry>) {
    let (seat, width, end) = (at.seat, kept.width(), at.pages(kept));
    let entries = &at.table[(at.sent * width) as usize..(end * width) as usize];
    for (&page, place) in entries.iter().zip(at.sent * width..) {
        // What no later token sees stays the scratch page of a table that was joined.
        if page != SCRATCH_PAGE {
            pages.push(PageEntry { seat, table: place % width, index: place / width, page });
        }
    }
    at.sent = end;
}

impl Sequence {
    /// The prompt tokens a chunk is asked to score, if any.
    fn score(&self, start: u32, end: u32) -> Option<Score> {
        let top = self.cold.spec.prompt_logprobs.filter(|_| !self.announced)?;
        let last = (end + 1).min(self.prompt_len);
        let targets: &[Token] = self.tokens.get(start as usize + 1..last as usize)?;
        Some(Score { targets: targets.to_vec(), top })
    }
}
