//! Takes the results of steps, in launch order.

use super::{Flight, FlightRow, Scheduler};
use crate::exec::{RowResult, StepResult};
use crate::plant::{Plant, planted};
use crate::request::{Finish, Output, Token, TokenLogprob};
use crate::sequence::{Key, Leaving, Place, Sequence};

impl Scheduler {
    /// Takes one result. An error says that it cannot be true: then nothing the device holds can be
    /// trusted.
    pub(crate) fn apply(&mut self, result: &mut StepResult) -> Result<(), String> {
        if result.number <= self.void {
            self.ghosts = self.ghosts.saturating_sub(usize::from(!result.again));
            return Ok(());
        }
        let Some(flight) = self.flights.front() else {
            return Err(format!("step {} is not in flight", result.number));
        };
        if !planted(Plant::TrustResult) {
            self.believable(flight, result)?;
        }
        let Flight { number, steps, mut rows } = self.flights.pop_front().expect("looked at above");
        self.strikes = 0;
        self.out.reserve(rows.len());
        if result.again {
            rows.iter().for_each(|row| self.goes_on(row.key));
        }
        let skip = planted(Plant::LastStepOnly) && result.again;
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
        if result.again {
            self.stats.decode_steps += 1;
            rows.iter_mut().for_each(|row| row.end += 1);
            self.flights.push_front(Flight { number, steps: steps - 1, rows });
        } else {
            rows.clear();
            self.spare.push(rows);
        }
        Ok(())
    }

    /// The device has begun the next step of the same launch for this sequence.
    fn goes_on(&mut self, key: Key) {
        if let Some(at) = self.sequences.get_mut(key).and_then(Sequence::seated_mut) {
            at.fed += 1;
            at.flying += 1;
            at.sampling += 1;
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
        let stopped = result.rows.iter().any(|row| row.stopped);
        if result.again && (flight.steps <= 1 || stopped) {
            return Err(format!("step {number} went on where it had to end"));
        }
        let width = |row: &FlightRow| if row.hidden { self.reports.hidden } else { 0 };
        let reported = |found: &RowResult| match &found.detail {
            Some(detail) => (detail.scores.len(), detail.hidden.as_ref().map_or(0, Vec::len)),
            None => (0, 0),
        };
        for (index, (row, found)) in flight.rows.iter().zip(&result.rows).enumerate() {
            let known = found.token.is_none_or(|token| token < self.geometry.vocab);
            if found.token.is_some() != row.sample
                || !known
                || reported(found) != (row.targets as usize, width(row) as usize)
            {
                return Err(format!("row {index} of step {number} is not what was asked for"));
            }
        }
        Ok(())
    }

    /// A token in the middle of a page and of an answer, about which nothing else has to be known or
    /// said: most rows of most steps. It is still to be said. False when there is more to it, and nothing
    /// was done.
    fn apply_plain(&mut self, row: FlightRow, result: &RowResult) -> bool {
        let Some(token) = result.token else { return false };
        let Some(sequence) = self.sequences.get_mut(row.key) else { return false };
        let Place::Seated(at) = &mut sequence.place else { return false };
        let tells_more = result.stopped || result.detail.is_some() || sequence.guided;
        let may_end = sequence.may_stop.passes(token)
            || sequence.tokens.len() as u32 + 1 >= sequence.max_len
            || at.leaving.is_some();
        let early = planted(Plant::PublishUnconfirmed) || planted(Plant::PublishPartial);
        let full = row.end >= (at.published + 1) * self.geometry.page_size;
        let may_publish = early || (full && self.config.prefix_cache);
        let apart = tells_more || may_end || may_publish || !sequence.announced;
        if apart || !row.sample {
            return false;
        }
        at.flying -= 1;
        at.sampling -= 1;
        at.confirmed = row.end;
        sequence.tokens.push(token);
        true
    }

    /// Says the tokens of rows that were plain. All at once: then they are written where they stay.
    fn say(&mut self, rows: &[FlightRow], results: &[RowResult]) {
        self.stats.tokens += rows.len() as u64;
        let sequences = &self.sequences;
        self.out.extend(rows.iter().zip(results).map(|(row, result)| {
            let Sequence { id, choice, .. } = sequences[row.key];
            let token = result.token.unwrap_or_default();
            Output::Token { id, choice, token, logprob: None }
        }));
    }

    fn apply_row(&mut self, row: FlightRow, result: &mut RowResult) {
        let FlightRow { key, end, sample, .. } = row;
        let page_size = self.geometry.page_size;
        let Some(at) = self.sequences.get_mut(key).and_then(Sequence::seated_mut) else { return };
        at.flying -= 1;
        at.sampling -= u32::from(sample);
        if at.leaving == Some(Leaving::Ended) {
            self.stats.discarded_rows += 1;
            self.discard(key, end, result);
        } else {
            at.confirmed = end;
            let early = planted(Plant::PublishUnconfirmed) || planted(Plant::PublishPartial);
            if early || end >= (at.published + 1) * page_size {
                self.publish(key);
            }
            self.confirm(key, sample, result);
        }
        self.vacate_if_done(key);
    }

    /// The extra step of a row that ended: nothing of it is kept.
    fn discard(&mut self, key: Key, end: u32, result: &RowResult) {
        if planted(Plant::PublishDiscarded) {
            let sequence = &mut self.sequences[key];
            if let Some(token) = result.token {
                sequence.tokens.push(token);
            }
            if let Some(at) = sequence.seated_mut() {
                at.confirmed = end;
            }
            if sequence.len() >= end {
                self.publish(key);
            }
        }
        if planted(Plant::TokenAfterEnd)
            && let Some(token) = result.token
        {
            let (id, choice) = (self.sequences[key].id, self.sequences[key].choice);
            self.out.push(Output::Token { id, choice, token, logprob: None });
        }
    }

    /// Offers every page that is full and confirmed to the tree.
    fn publish(&mut self, key: Key) {
        if !self.config.prefix_cache {
            return;
        }
        let page_size = self.geometry.page_size;
        let sequence = &mut self.sequences[key];
        let tenant = sequence.far.spec.tenant;
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
            let page = at.table[at.published as usize];
            self.pool.publish(&mut at.cursor, tenant, tokens, page);
            at.published += 1;
        }
    }

    fn confirm(&mut self, key: Key, sample: bool, result: &mut RowResult) {
        let sequence = &mut self.sequences[key];
        let detail = result.detail.as_deref_mut();
        if sequence.scoring() {
            let scores =
                detail.map(|detail| std::mem::take(&mut detail.scores)).unwrap_or_default();
            let first = sequence.far.scores.len() + 1;
            let targets = &sequence.tokens[first..first + scores.len()];
            let scored = targets.iter().zip(scores);
            sequence.far.scores.extend(scored.map(|(&token, (logprob, top))| TokenLogprob {
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
            if let Some(embed) = sequence.far.spec.embed {
                let (id, vector) = (sequence.id, sequence.vector(embed));
                self.out.push(Output::Embedded { id, vector });
                self.end(key, Finish::Stop(None));
                return;
            }
            if !sequence.wants_answer() {
                self.end(key, Finish::Length);
                return;
            }
        }
        if let Some(token) = result.token.filter(|_| sample) {
            self.token(key, token, result);
        }
    }

    /// Says that the prompt is done, once per request.
    pub(super) fn announce(&mut self, key: Key) {
        let sequence = &mut self.sequences[key];
        sequence.announced = true;
        self.out.push(Output::Prefilled {
            id: sequence.id,
            prompt_tokens: sequence.prompt_len,
            cached_tokens: sequence.far.cached,
            prompt_logprobs: std::mem::take(&mut sequence.far.scores),
        });
    }

    fn token(&mut self, key: Key, token: Token, result: &mut RowResult) {
        let sequence = &mut self.sequences[key];
        let stops = sequence.may_stop.passes(token)
            && sequence.far.spec.stops.binary_search(&token).is_ok();
        self.stats.stop_disagreements += u64::from(stops != result.stopped);
        let ends = sequence.guided
            && sequence.far.matcher.as_ref().is_some_and(|matcher| matcher.ends_with(token));
        let enough = || sequence.answer_len() >= sequence.far.spec.sampling.min_tokens;
        if (stops && enough()) || ends {
            self.end(key, Finish::Stop(Some(token)));
            return;
        }
        let mut finish = None;
        if sequence.guided
            && let Some(matcher) = &mut sequence.far.matcher
        {
            match matcher.accept(token) {
                Ok(true) => finish = Some(Finish::Stop(None)),
                Ok(false) => {}
                Err(error) => {
                    self.end(key, Finish::Grammar(error.to_string()));
                    return;
                }
            }
        }
        sequence.tokens.push(token);
        let (id, choice) = (sequence.id, sequence.choice);
        let logprob = result.detail.as_mut().and_then(|detail| detail.logprob.take());
        let logprob = logprob.map(|(logprob, top)| TokenLogprob { token, logprob, top });
        self.out.push(Output::Token { id, choice, token, logprob });
        self.stats.tokens += 1;
        let extra = u32::from(planted(Plant::OneTooMany));
        if finish.is_none() && sequence.len() >= sequence.max_len + extra {
            finish = Some(Finish::Length);
        }
        if let Some(finish) = finish {
            self.end(key, finish);
        }
    }
}
