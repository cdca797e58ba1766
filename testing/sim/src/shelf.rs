//! The fake device's store: copies are done late, some fail, and old pages give way to new ones.
//!
//! A copy reads or writes the page when it is done, not when it begins, so that a page that was used for something else
//! in between is detected. States of recurrent layers are copied in the same way.

use crate::device::{FakeDevice, POISON};
use crate::oracle::Prefix;
use crate::rng::Rng;
use engine::exec::Page;
use engine::pages::{CacheEvent, Medium, PageKey};
use engine::store::{Moved, PageNote, Store};
use std::collections::{BTreeMap, VecDeque};

/// What the store has, and what it is copying.
pub(crate) struct Shelf {
    kept: BTreeMap<PageKey, (bool, Vec<u64>)>,
    order: VecDeque<PageKey>,
    /// What tokens left, and in which order it came.
    states: VecDeque<(PageKey, Option<Prefix>)>,
    room: usize,
    under_way: Vec<(u32, Copy)>,
    events: Vec<CacheEvent>,
    rng: Rng,
    loads: u64,
}

enum Copy {
    Save(Page, PageNote),
    Load(PageKey, Page),
    SaveState(u32, PageKey),
    LoadState(PageKey, u32),
}

impl Shelf {
    pub(crate) fn new(mut rng: Rng) -> Self {
        let room = rng.range(1, 60) as usize;
        Self {
            kept: BTreeMap::new(),
            order: VecDeque::new(),
            states: VecDeque::new(),
            room,
            under_way: Vec::new(),
            events: Vec::new(),
            rng,
            loads: 0,
        }
    }

    /// The blocks that events should tell of.
    pub(crate) fn blocks(&self) -> Vec<u64> {
        let public = self.kept.iter().filter(|(_, (public, _))| *public);
        let mut blocks: Vec<u64> = public.map(|(key, _)| key.block()).collect();
        blocks.sort_unstable();
        blocks
    }

    fn keep_state(&mut self, key: PageKey, state: Option<Prefix>) {
        if self.states.iter().any(|(known, _)| *known == key) {
            return;
        }
        if self.states.len() >= self.room {
            self.states.pop_front();
        }
        self.states.push_back((key, state));
    }

    /// Begins a copy, or refuses to.
    fn begin_save(&mut self, copy: Copy) -> bool {
        if self.rng.one_in(4) || self.under_way.len() > 6 {
            return false;
        }
        self.begin(copy);
        true
    }

    fn begin(&mut self, copy: Copy) {
        let delay = self.rng.range(0, 3);
        self.under_way.push((delay, copy));
    }

    fn keep(&mut self, note: PageNote, cells: Vec<u64>) {
        let PageNote { key, parent, tokens, public } = note;
        if self.kept.contains_key(&key) {
            return;
        }
        let medium = Medium::Host;
        while self.kept.len() >= self.room {
            let oldest = self.order.pop_front().expect("one per page");
            if let Some((true, _)) = self.kept.remove(&oldest) {
                self.events.push(CacheEvent::Removed { block: oldest.block(), medium });
            }
        }
        self.order.push_back(key);
        self.kept.insert(key, (public, cells));
        if public {
            let (block, parent) = (key.block(), parent.map(PageKey::block));
            self.events.push(CacheEvent::Stored { block, parent, tokens, medium });
        }
    }
}

impl FakeDevice {
    fn shelf(&mut self) -> &mut Shelf {
        self.shelf.as_mut().expect("only a device with a store is asked")
    }
}

impl Store for FakeDevice {
    fn has(&mut self, key: PageKey) -> bool {
        self.shelf().kept.contains_key(&key)
    }

    fn save(&mut self, page: Page, note: PageNote) -> bool {
        self.shelf().begin_save(Copy::Save(page, note))
    }

    fn load(&mut self, key: PageKey, page: Page) {
        self.fill(page, &[]);
        self.shelf().begin(Copy::Load(key, page));
    }

    fn has_state(&mut self, key: PageKey) -> bool {
        self.shelf().states.iter().any(|(known, _)| *known == key)
    }

    fn save_state(&mut self, slot: u32, note: PageNote) -> bool {
        self.shelf().begin_save(Copy::SaveState(slot, note.key))
    }

    fn load_state(&mut self, key: PageKey, slot: u32) {
        self.carried.put(slot, None);
        self.shelf().begin(Copy::LoadState(key, slot));
    }

    fn poll(&mut self, done: &mut Vec<Moved>) {
        let mut left = Vec::new();
        for (delay, copy) in std::mem::take(&mut self.shelf().under_way) {
            if delay > 0 {
                left.push((delay - 1, copy));
                continue;
            }
            match copy {
                Copy::Save(page, note) => {
                    let cells = self.page(page).to_vec();
                    self.shelf().keep(note, cells);
                    done.push(Moved::Saved(page));
                }
                Copy::Load(key, page) => {
                    let shelf = self.shelf();
                    let lost = shelf.rng.one_in(8);
                    let cells = shelf.kept.get(&key).filter(|_| !lost).map(|kept| kept.1.clone());
                    shelf.loads += u64::from(cells.is_some());
                    self.fill(page, cells.as_deref().unwrap_or(&[]));
                    done.push(Moved::Loaded(page, cells.is_some()));
                }
                Copy::SaveState(slot, key) => {
                    let state = self.carried.copy(slot);
                    self.shelf().keep_state(key, state);
                    done.push(Moved::StateSaved(slot));
                }
                Copy::LoadState(key, slot) => {
                    let shelf = self.shelf();
                    let lost = shelf.rng.one_in(8);
                    let there = shelf.states.iter().find(|(known, _)| *known == key && !lost);
                    let there = there.map(|(_, state)| *state);
                    self.carried.put(slot, there.flatten());
                    done.push(Moved::StateLoaded(slot, there.is_some()));
                }
            }
        }
        self.shelf().under_way = left;
    }

    fn abandon(&mut self) {
        self.shelf().under_way.clear();
    }

    fn take_events(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.shelf().events)
    }
}

impl FakeDevice {
    /// Writes a page, or poisons what is not given.
    fn fill(&mut self, page: Page, cells: &[u64]) {
        let to = self.page_mut(page);
        to.fill(POISON);
        to[..cells.len()].copy_from_slice(cells);
    }
}
