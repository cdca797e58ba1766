//! What is accepted, and what is refused with a reason.

use super::{Live, Scheduler};
use crate::exec::Kept;
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
        let pages = self.geometry.pages_per_seat.min(self.longest_kept());
        self.config.max_len.min(pages.saturating_mul(self.geometry.page_size))
    }

    /// The most pages of tokens that fit the pages that exist.
    fn longest_kept(&self) -> u32 {
        let (Kept { full, windowed, .. }, pages) = (self.geometry.kept, self.geometry.pages - 1);
        if windowed == 0 {
            return pages / full;
        }
        // Pages of the prefix tree that a sequence publishes below, and that are not its own, cannot be evicted.
        let pages = pages.saturating_sub(full + windowed);
        let window = self.window_pages();
        // Windows alone do not grow.
        let long = pages.saturating_sub(window * windowed).checked_div(full).unwrap_or(u32::MAX);
        if pages >= window * windowed && long > window { long } else { pages / (full + windowed) }
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
            adapter,
            prompt_logprobs,
            embed,
        } = request;
        let tenant = with_adapter(tenant, adapter);
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
            adapter,
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
                copies: Vec::new(),
                reserve: Vec::new(),
                marks: [0; 2],
                restore: None,
                saved: Vec::new(),
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
        if request.adapter != 0 && self.slots.count() == 0 {
            return bad("adapter", "this device has no room for adapters");
        }
        if request.adapter != 0 && (request.embed.is_some() || request.prompt_logprobs.is_some()) {
            return bad("adapter", "not with vectors or log-probabilities of prompts");
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

/// The salt of cached pages: those of an adapter are found by nobody else.
fn with_adapter(tenant: u64, adapter: u64) -> u64 {
    if adapter == 0 {
        return tenant;
    }
    let mut hasher = blake3::Hasher::new_derive_key("dacapo 2026 pages of adapters");
    hasher.update(&tenant.to_le_bytes());
    hasher.update(&adapter.to_le_bytes());
    let bytes = hasher.finalize();
    // Pages without a salt are told to routers, which know no adapters.
    u64::from_le_bytes(*bytes.as_bytes().first_chunk().expect("32 bytes")).max(1)
}
