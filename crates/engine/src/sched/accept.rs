//! What is accepted, and what is refused with a reason.

use super::{Live, Scheduler};
use crate::request::{Drafts, Finish, Output, Pooling, Reject, Request, Token};
use crate::sampling;
use crate::sequence::{ColdState, Place, Sequence, Spec, StopFilter};
use crate::thought::Thought;
use std::sync::Arc;

impl Scheduler {
    pub(super) fn submit(&mut self, request: Request) {
        let id = request.id;
        match self.accept(request) {
            Ok(()) => self.stats.accepted += 1,
            Err(reason) => {
                self.stats.rejected += 1;
                self.out.push(Output::Rejected { id, reason });
            }
        }
    }

    /// The most tokens a sequence can ever have: what fits one page table and the pages that exist.
    pub(super) fn longest(&self) -> u32 {
        let pages = self.geometry.pages_per_seat.min(self.geometry.pages - 1);
        self.config.max_len.min(pages.saturating_mul(self.geometry.page_size))
    }

    fn accept(&mut self, request: Request) -> Result<(), Reject> {
        self.admissible(&request)?;
        let Request {
            id,
            prompt,
            sampling,
            choices,
            priority,
            deadline,
            call,
            tenant,
            prompt_logprobs,
            embed,
        } = request;
        let matcher = sampling.grammar.as_ref().map(|grammar| grammar.matcher());
        let call = call.unwrap_or(id).0;
        let prompt_len = prompt.len() as u32;
        let answer = if embed.is_some() { 0 } else { sampling.max_tokens };
        let max_len = prompt_len.saturating_add(answer).min(self.longest());
        let spec = Spec {
            stops: sampling::stops(&sampling, &self.config.eos),
            sampling,
            priority,
            tenant,
            call,
            prompt_logprobs,
            embed,
        };
        self.arrivals += 1;
        let turn = self.turns.enter(call, choices);
        let mut sequence = Sequence {
            tokens: prompt.to_vec(),
            id,
            may_stop: StopFilter::of(&spec.stops),
            choice: 0,
            prompt_len,
            max_len,
            announced: false,
            due: false,
            guided: matcher.is_some(),
            plain: !spec.sampling.speculate,
            place: Place::Waiting,
            cold: Box::new(ColdState {
                spec: Arc::new(spec),
                limit: max_len,
                matcher,
                thought: Thought::Over,
                arrival: self.arrivals,
                turn,
                unforked: choices - 1,
                overtaken: 0,
                sent_back: 0,
                looked_up: None,
                fetches: 0,
                cached: 0,
                scores: Vec::new(),
                hidden: Vec::new(),
                copy: None,
                passed: 0,
                drafts: Drafts::default(),
            }),
        };
        sequence.begin_thought();
        let (rank, arrival) = (sequence.rank(), sequence.cold.arrival);
        let nothing_to_do = sequence.goal() == 0;
        let key = self.sequences.insert(sequence);
        self.refused = None;
        self.queue.push(rank, arrival, key);
        self.live.insert(id, Live { sequences: vec![key], deadline, call });
        if let Some(deadline) = deadline {
            self.deadlines.insert((deadline, id));
        }
        if nothing_to_do {
            // One prompt token and no answer wanted: there is nothing to compute.
            self.announce(key);
            self.end(key, Finish::Length);
        }
        Ok(())
    }

    fn admissible(&self, request: &Request) -> Result<(), Reject> {
        let bad =
            |field, problem: &str| Err(Reject::BadParameter { field, problem: problem.into() });
        if self.live.contains_key(&request.id) {
            return Err(Reject::DuplicateId(request.id.0));
        }
        let waiting = self.queue.len() as u64;
        if waiting >= u64::from(self.config.max_waiting) {
            return Err(Reject::QueueFull { waiting });
        }
        if request.prompt.is_empty() {
            return Err(Reject::EmptyPrompt);
        }
        // One token of an answer has to fit as well, where there is one.
        let (found, longest) = (request.prompt.len() as u64, self.longest());
        let allowed = self.reports.whole.map_or(longest - 1, |whole| whole.min(longest)).into();
        if found > allowed {
            return Err(Reject::TooLong { found, allowed });
        }
        let unknown = |token: &&Token| **token >= self.geometry.vocab;
        if let Some(&token) = request.prompt.iter().find(unknown) {
            return Err(Reject::UnknownToken(token));
        }
        sampling::validate(&request.sampling, self.geometry.vocab, &self.config.eos)?;
        // A shorter mask is widened with tokens that are never allowed.
        let tokens = request.sampling.grammar.as_ref().map_or(0, |grammar| grammar.tokens());
        if tokens > self.geometry.vocab as usize {
            return bad("grammar", "it was compiled for another vocabulary");
        }
        if request.choices == 0 {
            return bad("choices", "at least one");
        }
        if request.choices > self.seat_limit {
            let problem = format!("at most {} run at once", self.seat_limit);
            return Err(Reject::BadParameter { field: "choices", problem });
        }
        if self.coverage.prefill_tokens == 0 || self.coverage.prefill_rows == 0 {
            return Err(Reject::NotCovered("no graph feeds prompts".into()));
        }
        let of_model = request.embed.map(|embed| embed.pooling == Pooling::Model);
        match (self.reports.whole, of_model) {
            (Some(_), None) => return bad("embed", "this model gives vectors, not text"),
            (Some(_), Some(false)) => return bad("embed", "this model has a pooling of its own"),
            (None, Some(true)) => return bad("embed", "this model has no pooling of its own"),
            (Some(_), Some(true)) | (None, None | Some(false)) => {}
        }
        if request.embed.is_some() {
            if self.reports.hidden == 0 {
                return bad("embed", "this device does not report hidden states");
            }
            if request.choices != 1 || request.prompt_logprobs.is_some() {
                return bad("embed", "a vector comes alone: one choice, no log-probabilities");
            }
        }
        match request.prompt_logprobs {
            Some(_) if !self.reports.scores => {
                bad("prompt_logprobs", "this device does not report them")
            }
            Some(count) if count > sampling::MAX_LOGPROBS => bad("prompt_logprobs", "at most 20"),
            _ => Ok(()),
        }
    }
}
