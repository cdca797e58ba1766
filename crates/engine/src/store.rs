//! Memory below the device, which keeps pages after their eviction: what the engine asks of it, and when.
//!
//! A page that no sequence reads any more is saved, once, while it is still in the prefix tree; so its eviction needs
//! no copy. A request that waits, and whose prefix the store has and the tree has not, gets pages for it; they are
//! filled while steps go on, and only when all are complete are they published to the tree and the request is seated.
//!
//! Where layers are recurrent, a page is no prefix without the state behind it. Copies of states are saved as soon as they are in
//! the tree, under the names of the pages that they are behind, and pages come back as far as there is such a copy, with it.

use crate::engine::Engine;
use crate::exec::{Executor, Page};
use crate::pages::{CacheEvent, Medium, PageKey};
use crate::request::Token;

/// A page to save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageNote {
    /// The name of its content.
    pub key: PageKey,
    /// The name of the page before it.
    pub parent: Option<PageKey>,
    /// What is in it.
    pub tokens: Box<[Token]>,
    /// Whether events tell of it.
    pub public: bool,
}

/// A copy that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// The page was saved, or could not be; it may change again.
    Saved(Page),
    /// The page is filled, or (false) its content was not there or damaged.
    Loaded(Page, bool),
    /// The state in this slot was saved, or could not be; it may change again.
    StateSaved(u32),
    /// The slot has the state, or (false) it was not there or damaged.
    StateLoaded(u32, bool),
}

/// What one medium of a store did. Counters only grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreUse {
    /// Which.
    pub medium: Medium,
    /// Pages it holds.
    pub pages: u64,
    /// Pages it has room for.
    pub room: u64,
    /// Pages saved.
    pub saved: u64,
    /// Pages loaded.
    pub loaded: u64,
    /// Pages given up for others.
    pub evicted: u64,
    /// Pages that could not be saved or were found damaged.
    pub failed: u64,
}

/// Memory that keeps pages by their names.
pub trait Store {
    /// Whether it has all of this page; counts as a use.
    fn has(&mut self, key: PageKey) -> bool;
    /// Begins to save a page, which does not change before [`Moved::Saved`]. False if it cannot begin now.
    fn save(&mut self, page: Page, note: PageNote) -> bool;
    /// Begins to fill a page.
    fn load(&mut self, key: PageKey, page: Page);
    /// Whether it has all of the state behind this page; counts as a use.
    fn has_state(&mut self, key: PageKey) -> bool;
    /// Begins to save the state in a slot, below [`Executor::state_copies`], which does not change before
    /// [`Moved::StateSaved`]. False if it cannot begin now.
    fn save_state(&mut self, slot: u32, note: PageNote) -> bool;
    /// Begins to fill a slot with the state behind this page.
    fn load_state(&mut self, key: PageKey, slot: u32);
    /// Begins what [`Self::load`] was asked for since the last call, if it waited for more.
    fn begin(&mut self) {}
    /// Waits a moment for a copy under way: called when there is nothing else to do.
    fn rest(&mut self) {}
    /// Adds the copies that are done.
    fn poll(&mut self, done: &mut Vec<Moved>);
    /// Ends all copies under way, done or not: when it returns, none touches a page any more.
    fn abandon(&mut self);
    /// What was stored and removed since the last call.
    fn take_events(&mut self) -> Vec<CacheEvent>;
}

impl<X: Executor> Engine<X> {
    /// Takes copies that are done, begins to load what waiting requests need, and to save what became idle.
    pub(crate) fn tend_store(&mut self) {
        let Some(store) = self.executor.store() else { return };
        if std::mem::take(&mut self.sched.store_stale) {
            store.abandon();
        }
        store.poll(&mut self.moved);
        for moved in self.moved.drain(..) {
            match moved {
                Moved::Saved(page) => self.sched.saved(page),
                Moved::Loaded(page, whole) => self.sched.loaded(page, whole),
                Moved::StateSaved(slot) => self.sched.state_saved(slot),
                Moved::StateLoaded(slot, whole) => self.sched.state_loaded(slot, whole),
            }
        }
        // Saved first: what is loaded may evict it.
        while let Some((page, note)) = self.sched.next_to_save() {
            if store.has(note.key) {
                continue;
            }
            if !store.save(page, note) {
                self.sched.save_later(page);
                break;
            }
            self.sched.begin_save(page);
        }
        while let Some((slot, note)) = self.sched.next_state_to_save() {
            if store.has_state(note.key) {
                continue;
            }
            if !store.save_state(slot, note) {
                self.sched.save_state_later(slot);
                break;
            }
            self.sched.begin_state_save(slot);
        }
        for key in self.sched.wanting_pages() {
            if self.sched.fetches_are_many() {
                self.sched.ask_later(key);
                continue;
            }
            let missing = self.sched.missing_pages(key);
            let count = missing.found(store);
            let begun = self.sched.begin_fetch(key, &missing, count);
            for (name, page) in begun.pages {
                store.load(name, page);
            }
            if let Some((name, slot)) = begun.state {
                store.load_state(name, slot);
            }
        }
        store.begin();
    }

    /// Saves what became idle, and waits for every copy.
    pub(crate) fn settle_store(&mut self) {
        loop {
            self.tend_store();
            match self.executor.store() {
                Some(store) if self.sched.copies() > 0 => store.rest(),
                _ => return,
            }
        }
    }
}
