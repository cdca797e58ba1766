//! Takes the results of steps, in launch order.

use super::{Flight, FlightRow, Scheduler};
use crate::exec::{Kept, RowResult, SCRATCH_PAGE, Sampled, StepResult};
use crate::plant::{Plant, planted};
use crate::request::{Drafts, Finish, Output, TokenLogprob};
use crate::sequence::{Key, Leaving, Place, Seated, Sequence};

impl Scheduler {
    /// Takes one result. An error means that the result is impossible: then the device's state cannot be
    /// trusted.
    pub(crate) fn apply(&mut self, result: &mut StepResult) -> Result<(), String> {
        if result.number <= self.void {
            self.stale_in_flight =
                self.stale_in_flight.saturating_sub(usize::from(!result.more_follow));
            return Ok(());
        }
        let Some(flight) = self.flights.front() else {
            return Err(format!("step {} is not in flight", result.number));
        };
        if !planted(Plant::TrustResult) {
            self.believable(flight, result)?;
        }
        let Flight { number, steps, fed, mut rows } =
            self.flights.pop_front().expect("looked at above");
        self.strikes = 0;
        match (result.took, fed) {
            (Some(took), (tokens @ 1.., decoding)) => self.balance.measured(decoding, tokens, took),
            (Some(took), (0, _)) => self.balance.decoded(rows.len() as u32, took),
            (None, _) => {}
        }
        self.out.reserve(rows.len());
        if result.more_follow {
            rows.iter().for_each(|row| self.goes_on(*row));
        }
        let skip = planted(Plant::LastStepOnly) && result.more_follow;
        let mut unsaid = 0;
        for index in 0..if skip { 0 } else { rows.len() } {
            if !self.apply_plain(rows[index], &result.rows[index]) {
                self.say(&rows[unsaid..index], &result.rows[unsaid..index]);
                self.apply_row(rows[index], &mut result.rows[index]);
                unsaid = index + 1;
            }
        }
        if !skip {
            self.say(&rows[unsaid..], &result.rows[unsaid..]);
        }
        if result.more_follow {
            self.stats.decode_steps += 1;
            rows.iter_mut().for_each(|row| row.end += row.most);
            self.flights.push_front(Flight { number, steps: steps - 1, fed, rows });
        } else {
            rows.clear();
            self.spare.push(rows);
        }
        Ok(())
    }

    /// The device has begun the next step of the same launch for this sequence.
    fn goes_on(&mut self, row: FlightRow) {
        if let Some(at) = self.sequences.get_mut(row.key).and_then(Sequence::seated_mut) {
            at.fed += row.most;
            at.flying += 1;
            at.ahead += row.most;
        }
    }

    fn believable(&self, flight: &Flight, result: &StepResult) -> Result<(), String> {
        let (number, rows) = (flight.number, flight.rows.len());
        if result.number != number {
            return Err(format!("step {} came back instead of {number}", result.number));
        }
        if result.rows.len() != rows {
            return Err(format!("step {number} has {rows} rows, {} came back", result.rows.len()));
        }
        let stopped = result.rows.iter().any(|row| row.tokens.iter().any(|found| found.stopped));
        if result.more_follow && (flight.steps <= 1 || stopped) {
            return Err(format!("step {number} went on where it had to end"));
        }
        let width = |row: &FlightRow| if row.hidden { self.reports.hidden } else { 0 };
        let reported = |found: &RowResult| match &found.detail {
            Some(detail) => (detail.scores.len(), detail.hidden.as_ref().map_or(0, Vec::len)),
            None => (0, 0),
        };
        for (index, (row, found)) in flight.rows.iter().zip(&result.rows).enumerate() {
            let count = found.tokens.len() as u32;
            let least = if row.exact { row.most } else { 0 };
            let known = found.tokens.iter().all(|found| found.token < self.geometry.vocab);
            if !(least..=row.most).contains(&count)
                || !known
                || reported(found) != (row.targets as usize, width(row) as usize)
            {
                return Err(format!("row {index} of step {number} is not what was asked for"));
            }
        }
        Ok(())
    }

    /// The fast path, for most rows of most steps: tokens that neither fill a page nor end the answer and
    /// have no log-probabilities. Does not emit them; [`Self::say`] does. Returns false, with nothing changed,
    /// if the row needs the general path.
    fn apply_plain(&mut self, row: FlightRow, result: &RowResult) -> bool {
        let count = result.tokens.len() as u32;
        let Some(sequence) = self.sequences.get_mut(row.key) else { return false };
        let Place::Seated(at) = &mut sequence.place else { return false };
        let may_stop = sequence.may_stop;
        let more = |found: &Sampled| {
            found.stopped || found.logprob.is_some() || may_stop.passes(found.token)
        };
        let tells_more =
            result.tokens.iter().any(more) || result.detail.is_some() || sequence.guided;
        let known = sequence.tokens.len() as u32;
        let may_end = known + count >= sequence.max_len || at.leaving.is_some();
        let early = planted(Plant::PublishUnconfirmed) || planted(Plant::PublishPartial);
        let full = known + count > (at.published + 1) * self.geometry.page_size;
        let may_publish = early || (full && self.config.prefix_cache);
        let moves_on = self.geometry.window_start(known - 1 + count) > at.freed;
        let apart = tells_more || may_end || may_publish || moves_on || !sequence.announced;
        if apart || row.prompt || count == 0 {
            return false;
        }
        at.came_back(row, count);
        at.confirmed = known - 1 + count;
        if result.drafted > 0 {
            sequence.cold.drafts.add(result);
        }
        sequence.tokens.extend(result.tokens.iter().map(|found| found.token));
        true
    }

    /// Emits the tokens of plain rows, all in one `extend`, so that they are written directly into the output list.
    fn say(&mut self, rows: &[FlightRow], results: &[RowResult]) {
        let before = self.out.len();
        let sequences = &self.sequences;
        self.out.extend(rows.iter().zip(results).flat_map(|(row, result)| {
            let Sequence { id, choice, .. } = sequences[row.key];
            let say = move |found: &Sampled| {
                let token = found.token;
                Output::Token { id, choice, token, logprob: None }
            };
            result.tokens.iter().map(say)
        }));
        self.stats.tokens += (self.out.len() - before) as u64;
    }

    fn apply_row(&mut self, row: FlightRow, result: &mut RowResult) {
        let FlightRow { key, end, .. } = row;
        let Some(at) = self.sequences.get_mut(key).and_then(Sequence::seated_mut) else { return };
        at.came_back(row, result.tokens.len() as u32);
        if at.leaving == Some(Leaving::Ended) {
            self.stats.discarded_rows += 1;
            self.discard(key, end, result);
        } else if row.prompt {
            self.advance(key, end);
            if self.confirm_prompt(key, result)
                && let Some(found) = result.tokens.first_mut()
            {
                self.token(key, found);
            }
        } else {
            self.sequences[key].cold.drafts.add(result);
            self.apply_tokens(key, &mut result.tokens);
        }
        self.vacate_if_done(key);
    }

    /// The tokens that a decode row returned, one after the other: each confirms that the one before it was fed.
    /// Tokens after the end of the answer are dropped.
    fn apply_tokens(&mut self, key: Key, tokens: &mut [Sampled]) {
        for found in tokens {
            let sequence = &self.sequences[key];
            let (len, announced) = (sequence.len(), sequence.announced);
            self.advance(key, len);
            if !announced {
                self.announce(key);
            }
            if !self.token(key, found) {
                return;
            }
        }
    }

    /// Marks the first `confirmed` tokens of a sequence as written to its pages.
    fn advance(&mut self, key: Key, confirmed: u32) {
        let page_size = self.geometry.page_size;
        let Some(at) = self.sequences[key].seated_mut() else { return };
        at.confirmed = confirmed;
        let early = planted(Plant::PublishUnconfirmed) || planted(Plant::PublishPartial);
        if early || confirmed >= (at.published + 1) * page_size {
            self.publish(key);
        }
        if !self.sequences[key].cold.saved.is_empty() {
            self.attach_states(key);
        }
        self.move_window(key);
    }

    /// Gives back the pages that no later token of a sequence sees. Steps in flight feed tokens after the confirmed ones,
    /// and see no more than the first of them.
    fn move_window(&mut self, key: Key) {
        let Kept { full, windowed, .. } = self.geometry.kept;
        let Some(at) = self.sequences[key].seated_mut() else { return };
        let mut first = self.geometry.window_start(at.confirmed);
        if planted(Plant::FreeTooEarly) && first > 0 {
            first += 1;
        }
        while at.freed < first {
            let from = (at.freed * (full + windowed) + full) as usize;
            for place in (from..from + windowed as usize).rev() {
                let page = std::mem::replace(&mut at.table[place], SCRATCH_PAGE);
                self.pool.give(page);
            }
            at.freed += 1;
        }
    }

    /// The extra step of a row that ended: nothing of it is kept.
    fn discard(&mut self, key: Key, end: u32, result: &RowResult) {
        if planted(Plant::PublishDiscarded) {
            let sequence = &mut self.sequences[key];
            sequence.tokens.extend(result.tokens.iter().map(|found| found.token));
            if let Some(at) = sequence.seated_mut() {
                at.confirmed = end;
            }
            if sequence.len() >= end {
                self.publish(key);
            }
        }
        if planted(Plant::TokenAfterEnd)
            && let Some(found) = result.tokens.first()
        {
            let (id, choice) = (self.sequences[key].id, self.sequences[key].choice);
            self.out.push(Output::Token { id, choice, token: found.token, logprob: None });
        }
    }

    /// Offers every page that is full and confirmed to the tree.
    fn publish(&mut self, key: Key) {
        if !self.config.prefix_cache {
            return;
        }
        let (page_size, width) = (self.geometry.page_size, self.geometry.kept.width());
        let sequence = &mut self.sequences[key];
        let tenant = sequence.cold.spec.tenant;
        let Place::Seated(at) = &mut sequence.place else { return };
        let mut full = at.confirmed / page_size;
        if planted(Plant::PublishUnconfirmed) {
            full = at.fed.min(sequence.tokens.len() as u32) / page_size;
        }
        if planted(Plant::PublishPartial) {
            full = (at.confirmed + 1).min(sequence.tokens.len() as u32) / page_size;
        }
        while at.published < full {
            let from = (at.published * page_size) as usize;
            let tokens = &sequence.tokens[from..from + page_size as usize];
            let pages = &at.table[(at.published * width) as usize..][..width as usize];
            if !self.pool.publish(&mut at.cursor, tenant, tokens, pages) {
                return;
            }
            at.published += 1;
            let mut saved = sequence.cold.saved.iter_mut();
            if let Some(saved) = saved.find(|saved| saved.pages == at.published) {
                saved.node = at.cursor.node();
            }
        }
    }

    /// What a chunk of a prompt reported besides its token. False when the sequence ended with it.
    fn confirm_prompt(&mut self, key: Key, result: &mut RowResult) -> bool {
        let sequence = &mut self.sequences[key];
        let detail = result.detail.as_deref_mut();
        if sequence.scoring() {
            let scores =
                detail.map(|detail| std::mem::take(&mut detail.scores)).unwrap_or_default();
            let first = sequence.cold.scores.len() + 1;
            let targets = &sequence.tokens[first..first + scores.len()];
            let scored = targets.iter().zip(scores);
            sequence.cold.scores.extend(scored.map(|(&token, (logprob, top))| TokenLogprob {
                token,
                logprob,
                top,
            }));
        }
        if let Some(hidden) = result.detail.as_ref().and_then(|detail| detail.hidden.as_ref()) {
            sequence.add_hidden(hidden);
        }
        if !sequence.announced
            && sequence.seated().is_some_and(|at| at.confirmed >= sequence.goal())
        {
            self.announce(key);
            let sequence = &mut self.sequences[key];
            if let Some(embed) = sequence.cold.spec.embed {
                let (id, vector) = (sequence.id, sequence.vector(embed));
                self.out.push(Output::Embedded { id, vector });
                self.end(key, Finish::Stop(None));
                return false;
            }
            if !sequence.wants_answer() {
                self.end(key, Finish::Length);
                return false;
            }
        }
        true
    }

    /// Emits that the prompt is done, once per request.
    pub(super) fn announce(&mut self, key: Key) {
        let sequence = &mut self.sequences[key];
        sequence.announced = true;
        self.out.push(Output::Prefilled {
            id: sequence.id,
            prompt_tokens: sequence.prompt_len,
            cached_tokens: sequence.cold.cached,
            prompt_logprobs: std::mem::take(&mut sequence.cold.scores),
        });
    }

    /// One more token. False when the sequence ended with it.
    fn token(&mut self, key: Key, found: &mut Sampled) -> bool {
        let token = found.token;
        let sequence = &mut self.sequences[key];
        let stops = sequence.may_stop.passes(token)
            && sequence.cold.spec.stops.binary_search(&token).is_ok();
        self.stats.stop_disagreements += u64::from(stops != found.stopped);
        let ends = sequence.matcher().is_some_and(|matcher| matcher.ends_with(token));
        let enough = || sequence.answer_len() >= sequence.cold.spec.sampling.min_tokens;
        if (stops && enough()) || ends {
            let logprob = scored(found);
            self.end_with(key, Finish::Stop(Some(token)), logprob);
            return planted(Plant::KeepAfterStop) && self.sequences.get(key).is_some();
        }
        let mut finish = None;
        if let Some(matcher) = sequence.matcher() {
            match matcher.accept(token) {
                Ok(true) => finish = Some(Finish::Stop(None)),
                Ok(false) => {}
                Err(error) => {
                    self.end(key, Finish::Grammar(error.to_string()));
                    return false;
                }
            }
        }
        sequence.tokens.push(token);
        let (id, choice) = (sequence.id, sequence.choice);
        let logprob = scored(found);
        self.out.push(Output::Token { id, choice, token, logprob });
        self.stats.tokens += 1;
        if sequence.guided || sequence.len() >= sequence.max_len {
            sequence.think();
        }
        let extra = u32::from(planted(Plant::OneTooMany));
        if finish.is_none() && sequence.len() >= sequence.max_len + extra {
            finish = Some(Finish::Length);
        }
        let goes_on = finish.is_none();
        if let Some(finish) = finish {
            self.end(key, finish);
        }
        goes_on
    }
}

/// Takes the log-probability of a token.
fn scored(found: &mut Sampled) -> Option<TokenLogprob> {
    let (logprob, top) = *found.logprob.take()?;
    Some(TokenLogprob { token: found.token, logprob, top })
}

impl Drafts {
    /// Counts those of a decode row.
    fn add(&mut self, result: &RowResult) {
        self.drafted += result.drafted;
        self.accepted += result.drafted.min((result.tokens.len() as u32).saturating_sub(1));
    }
}

impl Seated {
    /// A row is back with `count` of the tokens it might have returned.
    fn came_back(&mut self, row: FlightRow, count: u32) {
        self.flying -= 1;
        self.ahead -= row.most;
        if !row.prompt && !planted(Plant::KeepShortfall) {
            self.fed -= row.most.saturating_sub(count);
        }
    }
}
