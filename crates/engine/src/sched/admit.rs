//! Gives seats and pages to waiting sequences, and chooses which to preempt when they run out.

use super::Scheduler;
use crate::exec::{Kept, Seat};
use crate::pages::Match;
use crate::plant::{Plant, planted};
use crate::sequence::{Key, Leaving, Place, Seated, Sequence};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// How often a sequence is sent back for pages before it is due.
const MOST_SENT_BACK: u32 = 2;
/// Most requests that let others pass at a time.
const MOST_PASSED: u32 = 8;

impl Scheduler {
    /// Seats as many as seats and pages allow, in order of service. A request that needs more than there is
    /// lets a few others pass, until it is due. True when a sequence was seated or preempted.
    pub(super) fn admit(&mut self) -> bool {
        // Nothing changed since the last refusal: no request can be seated now either.
        if self.refused == Some(self.pool.epoch()) {
            return false;
        }
        self.slots.begin_look();
        let (mut changed, mut waits, mut passed) = (false, false, 0);
        let mut at = None;
        while let Some((rank, key)) = self.queue.after(at) {
            let coming =
                self.awaits_pages(key) || self.awaits_slot(key) || self.prefix_is_coming(key);
            if !coming && self.seat(key) {
                changed = true;
                // A request that was overtaken may be due now; then it must go first.
                if passed > 0 && self.queue.first().is_some_and(|key| self.sequences[key].due) {
                    break;
                }
                continue;
            }
            waits |= coming;
            // Preempt only for the first; the others are seated only where there is room already.
            if passed == 0 && !coming {
                let before = self.stats.preemptions;
                let freed = self.make_room(key);
                changed |= self.stats.preemptions > before;
                if freed {
                    continue;
                }
            }
            passed += 1;
            if self.sequences[key].due || passed == MOST_PASSED || self.leaving > 0 {
                break;
            }
            at = Some(rank);
        }
        self.refused = (!waits).then(|| self.pool.epoch());
        self.end_fetches();
        changed
    }

    /// Whether a seated sequence of higher rank is computing a prefix of this one that is worth waiting
    /// for: at least a third of what this one would have to feed. Requests of one template that arrive
    /// together then compute the template once. It waits only for a seated prompt, so never for long.
    pub(super) fn prefix_is_coming(&self, key: Key) -> bool {
        let sequence = &self.sequences[key];
        if !self.config.prefix_cache || sequence.needs_every_token() || sequence.due {
            return false;
        }
        let (page_size, goal) = (self.geometry.page_size, sequence.goal());
        let most = goal.saturating_sub(1) / page_size;
        let tenant = sequence.cold.spec.tenant;
        let mut known = None;
        self.seats.iter().flatten().any(|&seated| {
            let other = &self.sequences[seated];
            let Some(at) = other.seated() else { return false };
            let reach = most.min(other.prompt_len / page_size);
            let carries = self.reports.carries;
            let done = at.published >= reach && !carries;
            if done || at.leaving.is_some() || other.cold.spec.tenant != tenant {
                return false;
            }
            let size = page_size as usize;
            let pages = sequence.tokens.chunks_exact(size).zip(other.tokens.chunks_exact(size));
            let same = pages.take_while(|(mine, theirs)| mine == theirs).count() as u32;
            let coming = match carries {
                // States that are in the tree already do not count.
                true => self.state_coming(seated, same.min(reach)),
                false => same.min(reach),
            };
            let known = *known.get_or_insert_with(|| self.pool.known(tenant, &sequence.tokens));
            let (gain, rest) = (coming.saturating_sub(known), goal - (known * page_size).min(goal));
            let waits = if carries { gain > 0 } else { at.published < coming };
            waits && 3 * gain * page_size >= rest && other.rank() < sequence.rank()
        })
    }

    /// Pages that admission leaves for running sequences: about one each, so that a newly seated one is
    /// not preempted at once.
    pub(super) fn spare_pages(&self) -> u32 {
        (self.seated * self.geometry.kept.width()).min(self.geometry.pages / 16)
    }

    /// Pages of tokens that a sequence needs at once in layers with a window.
    pub(super) fn window_pages(&self) -> u32 {
        let step = self.config.step_tokens.min(self.coverage.prefill_tokens);
        self.geometry.kept.window_pages(self.geometry.page_size, step)
    }

    fn seats_needed(&self, key: Key) -> u32 {
        1 + self.sequences[key].cold.unforked
    }

    /// Pages that a sequence takes when it is seated and finds `cached` pages of tokens: pages of layers that see every
    /// token for all of it, those of windows for what it needs at once.
    pub(super) fn pages_needed(&self, key: Key, cached: u32) -> u32 {
        let (Kept { full, windowed, .. }, begins) =
            (self.geometry.kept, self.begins_with(key, cached));
        (self.token_pages(key) - cached) * full + (begins - cached) * windowed
    }

    /// Pages of tokens in the table of a sequence that is seated and finds `cached` of them. Those it finds count as part
    /// of the window: it must not need more than it was accepted for because some of it is cached.
    fn begins_with(&self, key: Key, cached: u32) -> u32 {
        let (all, page_size, kept) =
            (self.token_pages(key), self.geometry.page_size, self.geometry.kept);
        let seen = kept.first_page(cached * page_size, page_size);
        if kept.windowed == 0 { all } else { all.min(seen + self.window_pages()) }
    }

    fn token_pages(&self, key: Key) -> u32 {
        self.sequences[key].len().div_ceil(self.geometry.page_size)
    }

    fn seat(&mut self, key: Key) -> bool {
        if self.seated + self.reserved + self.seats_needed(key) > self.seat_limit {
            return false;
        }
        let found = self.find_cached(key);
        let cached = found.count;
        if !self.pool.ensure(self.pages_needed(key, cached) + self.spare_pages()) {
            self.release(found);
            return false;
        }
        let Match { mut table, freed, cursor, state, reach, .. } = found;
        let (begins, all) = (self.begins_with(key, cached), self.token_pages(key));
        for _ in cached..begins {
            assert!(self.pool.grow(&mut table, &mut Vec::new()), "ensured above");
        }
        let kept = self.geometry.kept;
        let rest = (begins..all).flat_map(|_| 0..kept.full);
        let reserve = rest.map(|_| self.pool.take().expect("ensured above")).collect();
        // Reserve capacity for the whole answer, so that decode does not allocate; the same for tokens below.
        let whole = self.sequences[key].cold.limit.div_ceil(self.geometry.page_size) * kept.width();
        table.reserve((whole as usize).saturating_sub(table.len()));
        self.take_slot(key);
        let index = self.seats.iter().position(Option::is_none).expect("counted above");
        self.seats[index] = Some(key);
        self.seated += 1;
        self.reserved += self.sequences[key].cold.unforked;

        let fed = cached * self.geometry.page_size;
        let sequence = &mut self.sequences[key];
        self.queue.remove(sequence.rank());
        sequence.tokens.reserve(sequence.cold.limit.saturating_sub(sequence.len()) as usize);
        (sequence.cold.copies, sequence.cold.passed) = (Vec::new(), 0);
        sequence.cold.reserve = reserve;
        sequence.cold.restore = state;
        sequence.place = Place::Seated(Seated {
            table,
            seat: Seat(index as u32),
            sent: 0,
            freed,
            fed,
            confirmed: fed,
            flying: 0,
            ahead: 0,
            published: cached,
            shared: false,
            joined: false,
            primed: false,
            leaving: None,
            cursor,
        });
        if !sequence.announced {
            sequence.cold.cached = fed.min(sequence.prompt_len);
        }
        self.stats.prompt_tokens += u64::from(sequence.len());
        self.stats.cached_tokens += u64::from(fed);
        let turn = sequence.cold.turn;
        self.set_marks(key, cached, reach);
        self.turns.serve(turn);
        self.overtake(key);
        true
    }

    /// The cached prefix, short of the last token: that one must be fed so that there are logits to
    /// sample from. Prompt tokens whose log-probabilities are wanted have to be fed too.
    pub(super) fn find_cached(&mut self, key: Key) -> Match {
        let sequence = &self.sequences[key];
        if sequence.needs_every_token() {
            return Match::default();
        }
        let keep = if planted(Plant::MatchWholePrompt) { 0 } else { 1 };
        let most = (sequence.goal() - keep) / self.geometry.page_size;
        self.pool.find(sequence.cold.spec.tenant, &sequence.tokens, most)
    }

    /// All cached pages of the prefix, where `count` more than a sequence can begin behind are of use and the tree lacks `lacks` of
    /// these.
    pub(super) fn pages_to(&mut self, key: Key, lacks: usize, count: usize) -> Match {
        let sequence = &self.sequences[key];
        let (tenant, tokens) = (sequence.cold.spec.tenant, &sequence.tokens);
        let begins = self.pool.known(tenant, tokens) as usize;
        self.pool.find_pages(tenant, tokens, (begins + count - lacks) as u32)
    }

    /// The sequence was seated: counts it as overtaking the first waiting request of every call that
    /// arrived before it.
    fn overtake(&mut self, key: Key) {
        let mut calls = BTreeSet::new();
        for waiting in self.queue.before(self.sequences[key].cold.arrival) {
            let sequence = &mut self.sequences[waiting];
            if !calls.insert(sequence.cold.spec.call) {
                continue;
            }
            sequence.cold.overtaken += 1;
            self.stats.most_overtaken = self.stats.most_overtaken.max(sequence.cold.overtaken);
            if sequence.cold.overtaken >= self.config.patience
                && !sequence.due
                && !planted(Plant::NoPatience)
            {
                self.queue.remove(sequence.rank());
                sequence.due = true;
                self.queue.push(sequence.rank(), sequence.cold.arrival, waiting);
            }
        }
    }

    /// Preempts one sequence to make room for this one. Candidates have strictly lower priority, or belong
    /// to a call that holds more than its share; nothing is preempted if all of them together would not be
    /// enough. True when that freed something at once.
    fn make_room(&mut self, key: Key) -> bool {
        if self.leaving > 0 {
            return false;
        }
        let priority = self.sequences[key].cold.spec.priority;
        let lower = |sequence: &Sequence| sequence.cold.spec.priority < priority;
        if let Some(victim) = self.last_of(key, u32::MAX, lower) {
            return self.preempt(victim);
        }
        let Some((call, spare)) = self.largest_call(key) else { return false };
        let of_call = |sequence: &Sequence| {
            sequence.cold.spec.call == call && sequence.cold.spec.priority <= priority
        };
        let Some(victim) = self.last_of(key, spare, of_call) else { return false };
        // It is served after the sequence it makes room for, and after the other turns of its call.
        self.sequences[victim].cold.turn = self.turns.back(call);
        self.preempt(victim)
    }

    /// The last in order of service of the sequences that `may` be preempted, if all of them together,
    /// giving up at most `spare` seats, would make enough room for this one.
    fn last_of(&self, key: Key, spare: u32, may: impl Fn(&Sequence) -> bool) -> Option<Key> {
        let goes = |other: &Key| {
            let sequence = &self.sequences[*other];
            !sequence.due && sequence.cold.unforked < spare && may(sequence)
        };
        let (mut seats, mut pages) = (0, 0);
        for other in self.seats.iter().flatten().filter(|other| goes(other)) {
            let sequence = &self.sequences[*other];
            seats += 1 + sequence.cold.unforked;
            pages += self.pages_held(sequence);
        }
        let seats = seats.min(spare);
        let counts = self.pool.counts();
        let enough = seats > 0
            && self.seated + self.reserved + self.seats_needed(key) <= self.seat_limit + seats
            && pages + counts.free + counts.unread
                >= self.pages_needed(key, 0) + self.spare_pages();
        let going = self.seats.iter().flatten().copied().filter(|other| goes(other));
        going.max_by_key(|&other| self.sequences[other].rank()).filter(|_| enough)
    }

    fn pages_held(&self, sequence: &Sequence) -> u32 {
        let table = sequence.seated().map_or(0, |at| at.held(self.geometry.kept));
        table + sequence.cold.reserve.len() as u32
    }

    /// The call that holds the most seats, and how many of them it can give up for this one and still
    /// hold as many as this one's call then does. The smaller call always gains strictly, so two calls
    /// never preempt each other in turn.
    fn largest_call(&self, key: Key) -> Option<(u64, u32)> {
        let mut held: BTreeMap<u64, u32> = BTreeMap::new();
        for other in self.seats.iter().flatten() {
            let sequence = &self.sequences[*other];
            *held.entry(sequence.cold.spec.call).or_default() += 1 + sequence.cold.unforked;
        }
        let mine = held.remove(&self.sequences[key].cold.spec.call).unwrap_or(0);
        let then = mine + self.seats_needed(key);
        let (&call, &most) = held.iter().max_by_key(|&(call, seats)| (seats, Reverse(call)))?;
        (most > then).then(|| (call, most - then))
    }

    /// Preempts a sequence because pages ran out: the lowest priority first, then the call that holds the
    /// most pages, then the last in order of service. Small requests keep their pages while
    /// large ones run. The first in order of service is never sent back, so it ends. True when that freed
    /// pages at once, false when steps in flight still use them or only the first is left.
    pub(super) fn preempt_for_pages(&mut self) -> bool {
        let mut held: BTreeMap<u64, u32> = BTreeMap::new();
        for &key in self.seats.iter().flatten() {
            let sequence = &self.sequences[key];
            *held.entry(sequence.cold.spec.call).or_default() += self.pages_held(sequence);
        }
        let rank = |key: &Key| self.sequences[*key].rank();
        let first = self.seats.iter().flatten().copied().min_by_key(rank);
        let others = self.seats.iter().flatten().copied().filter(|key| Some(*key) != first);
        let victim = others.max_by_key(|key| {
            let sequence = &self.sequences[*key];
            let call = sequence.cold.spec.call;
            (!sequence.due, Reverse(sequence.cold.spec.priority), held[&call], call, rank(key))
        });
        let Some(victim) = victim.or(first) else { return false };
        // A large sequence is not sent back again and again.
        let sequence = &mut self.sequences[victim];
        sequence.cold.sent_back += 1;
        sequence.due |= sequence.cold.sent_back > MOST_SENT_BACK;
        self.preempt(victim)
    }

    fn preempt(&mut self, key: Key) -> bool {
        self.stats.preemptions += 1;
        self.leaving += 1;
        let at = self.sequences[key].seated_mut().expect("only the seated are preempted");
        assert!(at.leaving.is_none(), "one sequence leaves once");
        at.leaving = Some(Leaving::ToQueue);
        let at_once = at.flying == 0;
        if at_once {
            self.vacate(key);
        }
        at_once
    }
}
