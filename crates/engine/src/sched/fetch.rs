//! Pages that come from the store, and pages that go there, with the states behind them.

use super::Scheduler;
use crate::exec::Page;
use crate::pages::{Cursor, Match, PageKey};
use crate::plant::{Plant, planted};
use crate::sequence::Key;
use crate::store::{PageNote, Store};

/// Most waiting requests whose pages are being loaded.
const MOST_FETCHES: usize = 4;
/// Most waiting requests that are looked at between two steps; the others wait until they come first.
const MOST_SCANNED: u32 = 64;
/// How often the pages of one request are loaded: they may be evicted before it is seated.
const MOST_TRIES: u32 = 3;

/// A waiting request whose pages are being loaded.
pub(super) struct Fetch {
    key: Key,
    /// Tells the request from a later one with the same key.
    arrival: u64,
    /// What the tree had, held so that it stays.
    found: Match,
    tenant: u64,
    /// Pages to fill, in order; empty when all is done.
    pages: Vec<Page>,
    /// The slot of the state behind the last of them, until all is done.
    state: Option<u32>,
    /// Whether that state came.
    carried: bool,
    /// Copies that are not done.
    left: usize,
    /// The first page that could not be filled.
    broken: usize,
}

/// The pages of a waiting request's prefix that a sequence cannot begin behind.
pub(crate) struct Missing {
    /// Their names. Those before the first one have what is needed.
    names: Vec<PageKey>,
    /// Of these, from the first, pages that the tree has; only states are missing there.
    cached: usize,
    /// Whether a sequence needs the state behind the last page.
    carries: bool,
}

impl Missing {
    /// How many of them it makes sense to fetch.
    pub(crate) fn found(&self, store: &mut dyn Store) -> usize {
        let pages = self.names[self.cached..].iter().take_while(|name| store.has(**name)).count();
        let there = &self.names[..self.cached + pages];
        match self.carries {
            true => there.iter().rposition(|name| store.has_state(*name)).map_or(0, |at| at + 1),
            false => there.len(),
        }
    }
}

/// What is to be filled for a request.
#[derive(Default)]
pub(crate) struct Begun {
    pub(crate) pages: Vec<(PageKey, Page)>,
    pub(crate) state: Option<(PageKey, u32)>,
}

impl Scheduler {
    /// The next page without readers that may have to be saved.
    pub(crate) fn next_to_save(&mut self) -> Option<(Page, PageNote)> {
        self.pool.next_idle()
    }

    pub(crate) fn save_later(&mut self, page: Page) {
        self.pool.idle_again(page);
    }

    /// The page is being saved: it stays until [`Self::saved`].
    pub(crate) fn begin_save(&mut self, page: Page) {
        if planted(Plant::FreeWhileSaving) {
            return;
        }
        self.pool.share(page);
        self.saving.push(page);
    }

    pub(crate) fn saved(&mut self, page: Page) {
        if let Some(at) = self.saving.iter().position(|saving| *saving == page) {
            self.saving.swap_remove(at);
            self.pool.give(page);
        }
    }

    /// The next copy of what a seat carried that may have to be saved.
    pub(crate) fn next_state_to_save(&mut self) -> Option<(u32, PageNote)> {
        self.pool.next_fresh_state()
    }

    pub(crate) fn save_state_later(&mut self, slot: u32) {
        self.pool.fresh_state_again(slot);
    }

    pub(crate) fn begin_state_save(&mut self, slot: u32) {
        if !planted(Plant::ReplaceWhileSaving) {
            self.pool.begin_state_save(slot);
        }
    }

    pub(crate) fn state_saved(&mut self, slot: u32) {
        if !planted(Plant::ReplaceWhileSaving) {
            self.pool.state_saved(slot);
        }
    }

    /// Waiting requests that may find more in the store than in the tree, the first in order of service first.
    pub(crate) fn wanting_pages(&mut self) -> Vec<Key> {
        for index in (0..self.fetches.len()).rev() {
            if self.fetches[index].left == 0 && !self.fetch_waits(index) {
                let fetch = self.fetches.swap_remove(index);
                self.release(fetch.found);
            }
        }
        let mut found = Vec::new();
        let (epoch, mut at, mut scanned) = (self.pool.epoch(), None, 0);
        while scanned < MOST_SCANNED
            && !self.fetches_are_many()
            && let Some((rank, key)) = self.queue.after(at)
        {
            at = Some(rank);
            scanned += 1;
            if self.is_fetching(key) || self.prefix_is_coming(key) {
                continue;
            }
            let sequence = &mut self.sequences[key];
            let again = sequence.cold.looked_up.replace(epoch) != Some(epoch);
            if again && !sequence.needs_every_token() && sequence.cold.fetches < MOST_TRIES {
                found.push(key);
            }
        }
        found
    }

    /// Whether no more requests may have their pages loaded now.
    pub(crate) fn fetches_are_many(&self) -> bool {
        self.fetches.len() >= MOST_FETCHES
    }

    /// The store was not asked for this request after all: it waits until it is.
    pub(crate) fn ask_later(&mut self, key: Key) {
        self.sequences[key].cold.looked_up = None;
    }

    /// The pages of a waiting request's prefix behind which it cannot begin yet.
    pub(crate) fn missing_pages(&mut self, key: Key) -> Missing {
        let sequence = &self.sequences[key];
        let size = self.geometry.page_size;
        let most = (sequence.goal().saturating_sub(1) / size) as usize;
        let tenant = sequence.cold.spec.tenant;
        let known = self.pool.known(tenant, &sequence.tokens) as usize;
        let mut name = self.pool.root(tenant);
        let pages = sequence.tokens.chunks_exact(size as usize).take(most);
        let names = pages.map(|tokens| {
            name = name.child(tokens);
            name
        });
        let names: Vec<PageKey> = names.skip(known).collect();
        let carries = self.reports.carries;
        let reach =
            if carries { self.pool.reach(tenant, &sequence.tokens) as usize } else { known };
        let cached = (reach - known).min(names.len());
        Missing { names, cached, carries }
    }

    /// Takes room for the first `count` of them that the tree does not have, and for the state behind them; for nothing if there
    /// is no room for the whole request.
    pub(crate) fn begin_fetch(&mut self, key: Key, missing: &Missing, count: usize) -> Begun {
        let Missing { names, cached, carries } = missing;
        let Some(&last) = names[..count].last() else { return Begun::default() };
        let names = &names[(*cached).min(count)..count];
        let found =
            if *carries { self.pages_to(key, names.len(), count) } else { self.find_cached(key) };
        let need = self.pages_needed(key, found.count);
        let done = self.done();
        let room = self.pool.ensure(need + self.spare_pages());
        let state = if *carries && room { self.pool.take_state_after(done) } else { None };
        if !room || (*carries && state.is_none()) {
            self.release(found);
            // Others have the slots, and will be seated soon.
            if room && !self.fetches.is_empty() {
                self.ask_later(key);
            }
            return Begun::default();
        }
        let take = |_: &PageKey| self.pool.take().expect("ensured above");
        let mut pages: Vec<Page> = names.iter().map(take).collect();
        // Pages in a row are copied together.
        pages.sort_unstable();
        let sequence = &mut self.sequences[key];
        sequence.cold.fetches += 1;
        let (arrival, tenant) = (sequence.cold.arrival, sequence.cold.spec.tenant);
        let (left, broken) = (pages.len() + usize::from(state.is_some()), pages.len());
        let loads = names.iter().copied().zip(pages.iter().copied()).collect();
        let carried = false;
        self.fetches.push(Fetch {
            key,
            arrival,
            found,
            tenant,
            pages,
            state,
            carried,
            left,
            broken,
        });
        Begun { pages: loads, state: state.map(|slot| (last, slot)) }
    }

    /// A page was filled, or not.
    pub(crate) fn loaded(&mut self, page: Page, whole: bool) {
        let of = |fetch: &Fetch| fetch.pages.iter().position(|other| *other == page);
        let Some((fetch, at)) =
            self.fetches.iter().enumerate().find_map(|(index, fetch)| Some((index, of(fetch)?)))
        else {
            return;
        };
        let entry = &mut self.fetches[fetch];
        entry.left -= 1;
        if !whole && !planted(Plant::TrustUnfilled) {
            entry.broken = entry.broken.min(at);
        }
        if entry.left == 0 {
            self.complete(fetch);
        }
    }

    /// The state behind the pages of a fetch came, or not.
    pub(crate) fn state_loaded(&mut self, slot: u32, whole: bool) {
        let of = |fetch: &Fetch| fetch.state == Some(slot);
        let Some(fetch) = self.fetches.iter().position(of) else { return };
        let entry = &mut self.fetches[fetch];
        entry.carried = whole || planted(Plant::TrustUnfilled);
        entry.left -= 1;
        if entry.left == 0 {
            self.complete(fetch);
        }
    }

    /// The last step that is done, with all before it.
    fn done(&self) -> u64 {
        let formed = self.stalled.then_some(self.numbered);
        let pending = self.flights.front().map(|flight| flight.number).or(formed);
        pending.map_or(self.numbered, |number| number - 1)
    }

    /// All copies are done: publishes what was filled, for the request, or for others if it has left.
    fn complete(&mut self, index: usize) {
        let entry = &mut self.fetches[index];
        let (pages, held) = (std::mem::take(&mut entry.pages), entry.found.count as usize);
        let (whole, tenant, key) = (entry.broken, entry.tenant, entry.key);
        let (state, carried) = (entry.state.take(), entry.carried && whole == pages.len());
        let mut cursor = std::mem::take(&mut entry.found.cursor);
        let size = self.geometry.page_size as usize;
        let waits = self.fetch_waits(index);
        if waits {
            let tokens = self.sequences[key].tokens.chunks_exact(size).skip(held);
            let mut all = true;
            for (tokens, &page) in tokens.zip(&pages[..whole]) {
                all &= self.pool.publish(&mut cursor, tenant, tokens, &[page]);
            }
            self.stats.fetched_pages += whole as u64;
            match (state, cursor.node()) {
                (Some(slot), Some(node)) if carried && all => {
                    self.pool.attach_state(node, slot);
                    self.fetches[index].found.state = self.pool.keep_state(node);
                }
                (Some(slot), _) => self.pool.release_state(slot),
                (None, _) => {}
            }
        } else if let Some(slot) = state {
            self.pool.release_state(slot);
        }
        self.pool.give_table(&pages);
        let found = &mut self.fetches[index].found;
        found.cursor = cursor;
        let table = std::mem::take(&mut found.table);
        self.pool.give_table(&table);
        if !waits {
            let fetch = self.fetches.swap_remove(index);
            self.release(fetch.found);
        }
        self.refused = None;
    }

    fn fetch_waits(&self, index: usize) -> bool {
        let Fetch { key, arrival, .. } = self.fetches[index];
        let sequence = self.sequences.get(key);
        sequence.is_some_and(|found| found.cold.arrival == arrival && found.seated().is_none())
    }

    /// Whether a request has to wait for its pages, or until the store was asked for them.
    pub(super) fn awaits_pages(&self, key: Key) -> bool {
        let unasked = self.sequences[key].cold.looked_up.is_none();
        (self.reports.store && self.config.prefix_cache && unasked) || self.is_fetching(key)
    }

    /// Whether pages of this request are being loaded.
    fn is_fetching(&self, key: Key) -> bool {
        let of = |fetch: &Fetch| {
            fetch.key == key && fetch.left > 0 && fetch.arrival == self.sequences[key].cold.arrival
        };
        self.fetches.iter().any(of)
    }

    /// Lets go of what was loaded for requests, seated by now or not: what nobody reads may be evicted again, so
    /// loaded pages never keep others from being seated.
    pub(super) fn end_fetches(&mut self) {
        let mut index = 0;
        while index < self.fetches.len() {
            if self.fetches[index].left > 0 {
                index += 1;
                continue;
            }
            let fetch = self.fetches.swap_remove(index);
            self.release(fetch.found);
        }
    }

    pub(super) fn release(&mut self, found: Match) {
        self.pool.give_table(&found.table);
        self.pool.close(found.cursor);
        if let Some(slot) = found.state {
            self.pool.unpin_state(slot);
        }
    }

    /// Copies between pages and the store that are under way.
    pub(crate) fn copies(&self) -> usize {
        let loading = self.fetches.iter().filter(|fetch| fetch.left > 0).count();
        loading + self.saving.len() + self.pool.states_saving()
    }

    /// Slots that states are loaded into, and copies of states that are kept for requests, for the audit.
    pub(super) fn fetched_states(&self) -> (usize, usize) {
        let count =
            |of: &dyn Fn(&Fetch) -> bool| self.fetches.iter().filter(|fetch| of(fetch)).count();
        (count(&|fetch| fetch.state.is_some()), count(&|fetch| fetch.found.state.is_some()))
    }

    /// The device's state is lost: nothing that was copied counts.
    pub(super) fn forget_copies(&mut self) {
        self.fetches.clear();
        self.saving.clear();
        self.store_stale = true;
    }

    /// Pages held for copies, for the audit.
    pub(super) fn copied(&self) -> impl Iterator<Item = Page> {
        let held = self
            .fetches
            .iter()
            .flat_map(|fetch| fetch.pages.iter().chain(&fetch.found.table).copied());
        held.chain(self.saving.iter().copied())
    }

    /// Where the pages that are being loaded will be published, for the audit.
    pub(super) fn fetch_cursors(&self) -> impl Iterator<Item = &Cursor> {
        self.fetches.iter().map(|fetch| &fetch.found.cursor)
    }
}
