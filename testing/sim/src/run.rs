//! One run: clients, engine and device, with all checks after every step.

use crate::client::{Scenario, Visit};
use crate::device::{Carried, FakeDevice, Faults};
use crate::expect::{Answer, Next, prompt_logprobs, vector};
use crate::oracle::cell;
use crate::rng::{Rng, mix};
use crate::shelf::Shelf;
use engine::exec::SCRATCH_PAGE;
use engine::pages::{CacheEvent, CachedPage, Medium};
use engine::request::{Event, Finish, Output, Reject, Request, RequestId, Token};
use engine::{Engine, EngineStats};
use std::collections::{BTreeMap, BTreeSet};

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Report {
    /// The engine's counters at the end.
    pub stats: EngineStats,
    /// Ticks until all requests ended.
    pub ticks: u64,
    /// Launches and polls.
    pub calls: u64,
    /// Most pages held at once by live sequences.
    pub peak_pages: u32,
    /// Steps that were not the first of their launch.
    pub repeated: u64,
    /// Tokens that were not the first of their row, and decode rows that returned none.
    pub extra: (u64, u64),
    /// Every answer: tokens and end, by request and choice.
    pub answers: BTreeMap<(RequestId, u32), (Vec<Token>, Finish)>,
    /// A hash of all outputs of the engine, in order.
    pub trace: u64,
}

/// A request that was submitted.
struct Client {
    request: Request,
    answers: Vec<Answer>,
    heard: Vec<Vec<Token>>,
    finished: Vec<Option<Finish>>,
    prefilled: bool,
    embedded: bool,
    rejected: bool,
    cancelled: bool,
    /// Results delivered when the cancellation was submitted.
    cancelled_at: Option<u64>,
    cancel_tick: Option<u64>,
    reads_every: Option<u64>,
    unread: u64,
}

impl Client {
    fn done(&self) -> bool {
        self.rejected || self.finished.iter().all(Option::is_some)
    }
}

/// Drives one scenario.
pub(crate) struct Run {
    engine: Engine<FakeDevice>,
    scenario: Scenario,
    clients: BTreeMap<RequestId, Client>,
    rng: Rng,
    now: u64,
    tick: u64,
    /// Launched steps in a row that fed no prompt although one was waiting.
    promptless: u64,
    launches: u64,
    prompt_launches: u64,
    peak_pages: u32,
    trace: u64,
    printed: u64,
    /// Launches refused at the last output.
    refusals: u64,
    /// What is cached by the engine's events: by block, where a page ends and its tokens.
    told: BTreeMap<u64, (u32, Box<[Token]>)>,
    /// The same of the store.
    told_host: BTreeSet<u64>,
    /// When the engine is vacated and the device's pages are wiped; `None` for never.
    naps: Option<Rng>,
    /// That happened.
    napped: u32,
}

/// How often a run is vacated, at most.
const MOST_NAPS: u32 = 20;

impl Run {
    /// A run of this scenario, with the scenario's faults unless others are given.
    pub(crate) fn new(scenario: Scenario, seed: u64, faults: Option<Faults>) -> Self {
        let random = match scenario.faults {
            0 => Faults::None,
            n => Faults::OneIn(n),
        };
        let mut device = FakeDevice::new(
            scenario.geometry,
            scenario.coverage,
            faults.unwrap_or(random),
            scenario.max_delay,
            (scenario.steps, scenario.tokens),
            Rng::new(seed, 2),
        );
        let mut shelf = Rng::new(seed, 13);
        let windows = scenario.geometry.kept.windowed > 0;
        let carries = scenario.states > 0;
        device.shelf = (shelf.one_in(2) && !windows).then(|| Shelf::new(shelf));
        if carries {
            device.carried = Carried::new(scenario.geometry.seats, scenario.states);
        }
        let mut naps = Rng::new(seed, 19);
        Self {
            engine: Engine::new(device, scenario.config.clone()),
            scenario,
            clients: BTreeMap::new(),
            rng: Rng::new(seed, 3),
            now: 0,
            tick: 0,
            promptless: 0,
            launches: 0,
            prompt_launches: 0,
            peak_pages: 0,
            trace: 0,
            printed: 0,
            refusals: 0,
            told: BTreeMap::new(),
            told_host: BTreeSet::new(),
            naps: naps.one_in(3).then_some(naps),
            napped: 0,
        }
    }

    /// Prints the first `ticks` ticks.
    pub(crate) fn print_ticks(mut self, ticks: u64) -> Self {
        self.printed = ticks;
        self.engine.executor_mut().log = Some(Vec::new());
        self
    }

    fn print(&mut self, outputs: &[Output]) {
        let launched = self.engine.executor_mut().log.replace(Vec::new()).unwrap_or_default();
        println!("tick {}: {:?}", self.tick, self.engine.stats().pages);
        launched.iter().for_each(|line| println!("{line}"));
        outputs.iter().for_each(|output| println!("  {output:?}"));
    }

    /// Runs until all requests have ended, or until a check fails.
    pub(crate) fn finish(mut self) -> Result<Report, String> {
        let visits = std::mem::take(&mut self.scenario.visits);
        let work: u64 = visits
            .iter()
            .map(|visit| {
                let request = &visit.request;
                let each = request.prompt.len() as u64 + u64::from(request.sampling.max_tokens);
                each * u64::from(request.choices)
            })
            .sum();
        let last = visits.last().map_or(0, |visit| visit.at);
        // A generous limit: every token computed alone, several times, with late results.
        let limit = last + 1000 + work * 12 * u64::from(2 + self.scenario.max_delay);
        let mut visits = visits.into_iter().peekable();
        loop {
            let mut events = self.cancellations();
            while let Some(visit) = visits.next_if(|visit| visit.at <= self.tick) {
                events.push(self.arrive(visit));
            }
            self.step(events).map_err(|what| format!("tick {}: {what}", self.tick))?;
            let served = visits.peek().is_none() && self.clients.values().all(Client::done);
            if served && self.engine.is_idle() {
                return self.conclude();
            }
            if self.tick > limit {
                let waiting: Vec<_> =
                    self.clients.values().filter(|c| !c.done()).map(|c| c.request.id.0).collect();
                return Err(format!("tick {}: requests {waiting:?} never ended", self.tick));
            }
            self.tick += 1;
        }
    }

    fn arrive(&mut self, visit: Visit) -> Event {
        let Visit { request, cancel_after, reads_every, .. } = visit;
        let longest = self.scenario.longest();
        let choices = 0..request.choices;
        let client = Client {
            answers: choices.map(|choice| Answer::new(&request, choice, longest)).collect(),
            heard: vec![Vec::new(); request.choices as usize],
            finished: vec![None; request.choices as usize],
            prefilled: false,
            embedded: false,
            rejected: false,
            cancelled: false,
            cancelled_at: None,
            cancel_tick: cancel_after.map(|after| self.tick + after),
            reads_every,
            unread: 0,
            request: request.clone(),
        };
        self.clients.insert(request.id, client);
        Event::Submit(Box::new(request))
    }

    /// The cancellations of this tick: planned ones, and slow clients.
    fn cancellations(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        for (&id, client) in &mut self.clients {
            if let Some(every) = client.reads_every
                && self.tick.is_multiple_of(every)
            {
                client.unread = client.unread.saturating_sub(1);
            }
            let planned = client.cancel_tick.is_some_and(|tick| tick <= self.tick);
            let slow = client.reads_every.is_some() && client.unread > 8;
            if (planned || slow) && !client.cancelled {
                client.cancelled = true;
                events.push(Event::Cancel(id));
            }
        }
        events
    }

    fn step(&mut self, events: Vec<Event>) -> Result<(), String> {
        self.nap()?;
        let before = self.engine.holdings();
        let refusals = self.engine.executor().refusals;
        let (none_waiting, launch) =
            (self.engine.stats().waiting == 0, self.engine.executor().repeating());
        self.now += self.scenario.tick;
        let outputs = if self.rng.one_in(2) {
            self.engine.step(self.now, events)
        } else {
            self.engine.step_wait(self.now, events)
        };
        if self.tick < self.printed {
            self.print(&outputs);
        }
        let delivered = self.engine.executor().delivered;
        for client in self.clients.values_mut().filter(|client| client.cancelled) {
            client.cancelled_at.get_or_insert(delivered);
        }
        for output in outputs {
            self.trace = mix(self.trace ^ hash(&output));
            if !matches!(output, Output::Finished { .. } | Output::Rejected { .. }) {
                self.refusals = refusals;
            }
            self.check_output(output)?;
        }
        self.check_device()?;
        self.check_stop(none_waiting, launch)?;
        self.engine.audit()?;
        self.check_cache()?;
        self.check_events()?;
        let after = self.engine.holdings();
        let waited = before.iter().any(|held| held.unfed > 1 && after.contains(held));
        self.check_fairness(waited)?;
        self.check_holdings()
    }

    /// Now and then: nothing of the device's pages is needed any more, as when a model sleeps.
    fn nap(&mut self) -> Result<(), String> {
        // A request that is sent back for ever never ends.
        let tired = self.napped < MOST_NAPS;
        if !self.naps.as_mut().is_some_and(|naps| naps.one_in(30) && tired) {
            return Ok(());
        }
        self.napped += 1;
        for output in self.engine.vacate() {
            self.trace = mix(self.trace ^ hash(&output));
            self.check_output(output)?;
        }
        let left = self.engine.stats();
        if left.running + left.in_flight > 0 || !self.engine.cached_pages().is_empty() {
            return Err(format!("the engine was vacated and still has {left:?}"));
        }
        self.engine.executor_mut().lose();
        Ok(())
    }

    fn check_device(&self) -> Result<(), String> {
        match self.engine.executor().violations.first() {
            Some(what) => Err(what.clone()),
            None => Ok(()),
        }
    }

    /// The first request in an empty queue must stop a launch of several steps, and the engine must
    /// not restart unless the device failed.
    fn check_stop(&self, none_waiting: bool, launch: Option<u64>) -> Result<(), String> {
        let (stats, device) = (self.engine.stats(), self.engine.executor());
        let same = launch.is_some() && device.repeating() == launch;
        if none_waiting && stats.waiting > 0 && same && !device.asked {
            return Err("a request waits, and the current launch was not asked to stop".into());
        }
        if stats.restarts > 0 && stats.retries == 0 && !device.failed {
            return Err("the engine restarted although nothing failed".into());
        }
        Ok(())
    }

    /// Every cached page has the tokens that the tree records, written by a confirmed step.
    fn check_cache(&self) -> Result<(), String> {
        let device = self.engine.executor();
        let pages = |CachedPage { pages, start, tokens, .. }: CachedPage| {
            let there = pages.into_iter().filter(|page| *page != SCRATCH_PAGE);
            there.map(move |page| (page, start, tokens.clone()))
        };
        for (page, start, tokens) in self.engine.cached_pages().into_iter().flat_map(pages) {
            if device.is_writing(page) {
                return Err(format!("{page:?} was published while a step in flight writes it"));
            }
            let found = device.page(page);
            for (position, (&token, &found)) in (start..).zip(tokens.iter().zip(found)) {
                if cell(token, position) != found {
                    return Err(format!(
                        "{page:?} is published with token {token} at {position}, but holds {found:x}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// What the engine told about the cache adds up to the pages of the tree that belong to no tenant.
    fn check_events(&mut self) -> Result<(), String> {
        for event in self.engine.take_cache_events() {
            match event {
                CacheEvent::Stored { block, medium: Medium::Host, .. } => {
                    self.told_host.insert(block);
                }
                CacheEvent::Removed { block, medium: Medium::Host } => {
                    self.told_host.remove(&block);
                }
                CacheEvent::Stored { block, parent, tokens, .. } => {
                    let above = match parent {
                        Some(parent) => self.told.get(&parent).map(|(end, _)| *end),
                        None => Some(0),
                    };
                    let start = above.ok_or("a page was told before the one above it")?;
                    let end = start + tokens.len() as u32;
                    if self.told.insert(block, (end, tokens)).is_some() {
                        return Err("a page was told twice".into());
                    }
                }
                CacheEvent::Removed { block, .. } => {
                    self.told.remove(&block).ok_or("a page was removed that was never told")?;
                }
                CacheEvent::Cleared => self.told.clear(),
            }
        }
        let kept = self.engine.executor().shelf.as_ref().map(Shelf::blocks).unwrap_or_default();
        if !self.told_host.iter().copied().eq(kept) {
            return Err("what is told of the store is not what it has".into());
        }
        let told = self.told.values().map(|(end, tokens)| (*end, tokens.to_vec()));
        let mut told: Vec<(u32, Vec<Token>)> = told.collect();
        let cached = self.engine.cached_pages().into_iter().filter(|page| page.tenant == 0);
        let mut cached: Vec<(u32, Vec<Token>)> = cached
            .map(|page| (page.start + page.tokens.len() as u32, page.tokens.to_vec()))
            .collect();
        told.sort();
        cached.sort();
        match told == cached {
            true => Ok(()),
            false => Err(format!("{} pages are told, {} are cached", told.len(), cached.len())),
        }
    }

    /// No request is overtaken beyond the bound, and prompts wait at most every other step.
    fn check_fairness(&mut self, prompt_waited: bool) -> Result<(), String> {
        let stats = self.engine.stats();
        let patience = self.scenario.config.patience;
        if stats.most_overtaken > patience {
            return Err(format!(
                "overtaken {} times, the bound is {patience}",
                stats.most_overtaken
            ));
        }
        let device = self.engine.executor();
        let (launches, prompts) = (device.launches, device.prompt_launches);
        if !prompt_waited || prompts > self.prompt_launches {
            self.promptless = 0;
        } else {
            self.promptless += launches - self.launches;
        }
        (self.launches, self.prompt_launches) = (launches, prompts);
        // One step formed before the prompt arrived, and one for decode.
        if self.promptless > 3 {
            return Err(format!("prompts waited for {} steps", self.promptless));
        }
        Ok(())
    }

    /// A cancelled request holds no pages after the next launches have returned.
    fn check_holdings(&mut self) -> Result<(), String> {
        let delivered = self.engine.executor().delivered;
        // The device may have run a whole launch of steps before it was asked to stop.
        let bound = 1 + u64::from(self.scenario.steps);
        let mut pages: Vec<u32> = Vec::new();
        for held in self.engine.holdings() {
            pages.extend(held.pages.iter().map(|page| page.0));
            let cancelled = self.clients.get(&held.id).and_then(|client| client.cancelled_at);
            if !held.pages.is_empty() && cancelled.is_some_and(|at| delivered >= at + bound) {
                return Err(format!("{:?} was cancelled and still holds pages", held.id));
            }
        }
        pages.sort_unstable();
        pages.dedup();
        self.peak_pages = self.peak_pages.max(pages.len() as u32);
        Ok(())
    }

    fn check_output(&mut self, output: Output) -> Result<(), String> {
        let id = output.id();
        // Repeatedly refused launches also count as a failed device, as configured.
        let device = self.engine.executor();
        let config = &self.scenario.config;
        let patience = u64::from((config.launch_retries + 1) * (config.restarts + 1));
        let failed = device.failed || device.refusals - self.refusals >= patience;
        let full = self.scenario.config.max_waiting;
        let now = self.now;
        let Some(client) = self.clients.get_mut(&id) else {
            return Err(format!("{output:?} for an unknown request"));
        };
        if client.done() {
            return Err(format!("{output:?} after the end"));
        }
        match output {
            Output::Rejected { reason, .. } => {
                client.rejected = true;
                match reason {
                    Reject::TooLong { .. } => Ok(()),
                    Reject::QueueFull { waiting } if waiting >= u64::from(full) => Ok(()),
                    reason => Err(format!("{id:?} was refused: {reason}")),
                }
            }
            Output::Prefilled { prompt_tokens, cached_tokens, prompt_logprobs: scores, .. } => {
                let prompt = client.request.prompt.len() as u32;
                let twice = std::mem::replace(&mut client.prefilled, true);
                if twice || prompt_tokens != prompt || cached_tokens >= prompt {
                    return Err(format!("{id:?} was prefilled with {cached_tokens} of {prompt}"));
                }
                if scores != prompt_logprobs(&client.request) {
                    return Err(format!("{id:?} has wrong prompt log-probabilities"));
                }
                if cached_tokens > self.could_share(id) {
                    return Err(format!(
                        "{id:?} found {cached_tokens} tokens that are not its own"
                    ));
                }
                Ok(())
            }
            Output::Embedded { vector: found, .. } => {
                let expected = client.request.embed.map(|embed| vector(&client.request, embed));
                let twice = std::mem::replace(&mut client.embedded, true);
                if twice || !client.prefilled || expected.as_ref() != Some(&found) {
                    return Err(format!("{id:?} got {found:?} as its vector, not {expected:?}"));
                }
                Ok(())
            }
            Output::Token { choice, token, logprob, .. } => {
                client.unread += 1;
                let at = choice as usize;
                if !client.prefilled || client.finished[at].is_some() {
                    return Err(format!("{id:?}.{choice} got a token out of turn"));
                }
                let expected = client.answers[at].advance();
                if expected != Next::Token(token, logprob) {
                    let heard = client.heard[at].len();
                    return Err(format!(
                        "{id:?}.{choice} got token {token} after {heard}, expected {expected:?}"
                    ));
                }
                client.heard[at].push(token);
                Ok(())
            }
            Output::Finished { choice, finish, .. } => {
                let at = choice as usize;
                if client.finished[at].is_some() {
                    return Err(format!("{id:?}.{choice} ended twice"));
                }
                client.finished[at] = Some(finish.clone());
                let deadline = client.request.deadline;
                let legitimate = match &finish {
                    Finish::Cancelled => client.cancelled,
                    Finish::Deadline => deadline.is_some_and(|deadline| deadline < now),
                    Finish::Failed(_) => failed,
                    Finish::Grammar(_) => false,
                    end if client.request.embed.is_some() => {
                        client.embedded && *end == Finish::Stop(None)
                    }
                    end => client.answers[at].advance() == Next::End(end.clone()),
                };
                if !legitimate {
                    return Err(format!("{id:?}.{choice} ended with {finish:?}"));
                }
                Ok(())
            }
        }?;
        self.check_deadline(id)
    }

    /// The longest prefix of a prompt that its tenant has sent before. A requeued request may find
    /// its own pages.
    fn could_share(&self, id: RequestId) -> u32 {
        let stats = self.engine.stats();
        let own = &self.clients[&id].request;
        if stats.preemptions + stats.restarts > 0 || self.napped > 0 {
            return own.prompt.len() as u32;
        }
        let tenants = self
            .clients
            .iter()
            .filter(|(other, client)| **other != id && client.request.tenant == own.tenant);
        let shown = tenants.flat_map(|(_, client)| {
            let prompt = &client.request.prompt;
            client.heard.iter().map(move |heard| [&prompt[..], heard].concat())
        });
        let common = |other: Vec<Token>| {
            other.iter().zip(own.prompt.iter()).take_while(|(a, b)| a == b).count() as u32
        };
        shown.map(common).max().unwrap_or(0)
    }

    /// A request must end soon after its deadline.
    fn check_deadline(&self, id: RequestId) -> Result<(), String> {
        let client = &self.clients[&id];
        let late = client
            .request
            .deadline
            .is_some_and(|deadline| deadline + 50 * self.scenario.tick < self.now);
        if late && !client.done() { Err(format!("{id:?} lives past its deadline")) } else { Ok(()) }
    }

    fn conclude(self) -> Result<Report, String> {
        let pages = self.engine.pages();
        if pages.held != 0 || pages.free + pages.unread + 1 != pages.total {
            return Err(format!("at the end pages are still held: {pages:?}"));
        }
        let disagreed = self.engine.stats().stop_disagreements;
        if disagreed > 0 {
            return Err(format!("{disagreed} tokens stop for the engine or for the device alone"));
        }
        let mut answers = BTreeMap::new();
        for (&id, client) in &self.clients {
            if client.rejected {
                continue;
            }
            // Whether the failure was legitimate was checked when it occurred.
            let gone = |end: &Option<Finish>| matches!(end, Some(Finish::Failed(_)));
            if client.request.deadline.is_none()
                && !client.cancelled
                && !client.prefilled
                && !client.finished.iter().any(gone)
            {
                return Err(format!("{id:?} was never prefilled"));
            }
            for (choice, heard) in (0..).zip(&client.heard) {
                let finish = client.finished[choice as usize].clone();
                let finish = finish.ok_or_else(|| format!("{id:?}.{choice} never ended"))?;
                answers.insert((id, choice), (heard.clone(), finish));
            }
        }
        Ok(Report {
            stats: self.engine.stats(),
            ticks: self.tick,
            calls: self.engine.executor().calls,
            peak_pages: self.peak_pages,
            repeated: self.engine.executor().repeated,
            extra: (self.engine.executor().extra, self.engine.executor().empty),
            answers,
            trace: self.trace,
        })
    }
}

fn hash(output: &Output) -> u64 {
    match output {
        Output::Rejected { id, .. } => id.0 | 1 << 60,
        Output::Prefilled { id, cached_tokens, .. } => {
            id.0 << 20 | u64::from(*cached_tokens) | 2 << 60
        }
        Output::Embedded { id, .. } => id.0 | 5 << 60,
        Output::Token { id, choice, token, .. } => {
            id.0 << 20 | u64::from(*choice) << 10 | u64::from(*token) | 3 << 60
        }
        Output::Finished { id, choice, .. } => id.0 << 20 | u64::from(*choice) | 4 << 60,
    }
}
