//! Pages that come from the store, and pages that go there.

use super::Scheduler;
use crate::exec::Page;
use crate::pages::{Cursor, Match, PageKey};
use crate::plant::{Plant, planted};
use crate::sequence::Key;
use crate::store::PageNote;

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
    /// Copies that are not done.
    left: usize,
    /// The first page that could not be filled.
    broken: usize,
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

    /// The names of the pages of a waiting request's prefix that the tree does not have.
    pub(crate) fn missing_pages(&mut self, key: Key) -> Vec<PageKey> {
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
        names.skip(known).collect()
    }

    /// Takes pages for these names, which follow what the tree has; none if there is no room for the whole request.
    pub(crate) fn begin_fetch(&mut self, key: Key, names: &[PageKey]) -> Vec<(PageKey, Page)> {
        if names.is_empty() {
            return Vec::new();
        }
        let found = self.find_cached(key);
        let need = self.pages_needed(key, found.count);
        if !self.pool.ensure(need + self.spare_pages()) {
            self.release(found);
            return Vec::new();
        }
        let take = |_: &PageKey| self.pool.take().expect("ensured above");
        let mut pages: Vec<Page> = names.iter().map(take).collect();
        // Pages in a row are copied together.
        pages.sort_unstable();
        let sequence = &mut self.sequences[key];
        sequence.cold.fetches += 1;
        let (arrival, tenant) = (sequence.cold.arrival, sequence.cold.spec.tenant);
        let (left, broken) = (pages.len(), pages.len());
        let loads = names.iter().copied().zip(pages.iter().copied()).collect();
        self.fetches.push(Fetch { key, arrival, found, tenant, pages, left, broken });
        loads
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

    /// All copies are done: publishes what was filled, for the request, or for others if it has left.
    fn complete(&mut self, index: usize) {
        let entry = &mut self.fetches[index];
        let (pages, held) = (std::mem::take(&mut entry.pages), entry.found.count as usize);
        let (whole, tenant, key) = (entry.broken, entry.tenant, entry.key);
        let mut cursor = std::mem::take(&mut entry.found.cursor);
        let size = self.geometry.page_size as usize;
        let waits = self.fetch_waits(index);
        if waits {
            let tokens = self.sequences[key].tokens.chunks_exact(size).skip(held);
            for (tokens, &page) in tokens.zip(&pages[..whole]) {
                self.pool.publish(&mut cursor, tenant, tokens, &[page]);
            }
            self.stats.fetched_pages += whole as u64;
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
        loading + self.saving.len()
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
