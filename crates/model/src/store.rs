//! Keeps evicted KV pages: in host memory that the device copies to and from, in a file, or in both.
//!
//! Threads of its own copy pages, read and write the file ([`mover`]); the engine's thread keeps the index and never
//! waits for them. A page that is being filled is in no step, and one that is being saved is not changed, so no step
//! waits for a copy either. A page is found only when all of it was saved. What host memory gives up goes to the file.
//!
//! States of recurrent layers have a store of the same kind, with slots of their size and a file of their own ([`Stores`]).

mod disk;
mod identity;
mod lru;
mod mover;

pub use disk::DiskError;
pub(crate) use disk::{Disk, Shape};
pub(crate) use identity::identity;

use crate::executor::GraphExecutor;
use device::{Span, Tensor};
use engine::exec::Page;
use engine::pages::{CacheEvent, Medium, PageKey};
use engine::store::{Moved, PageNote, Store, StoreUse};
use lru::{Lru, Slot};
use mover::{Done, InFile, Mover, Written};
use std::collections::HashMap;
use std::path::PathBuf;

/// Most pages that are being saved: each stays in the device's cache until it was. A turn of the engine may take 50 ms on a GPU,
/// in which twice as many as a step computes must begin, or pages are evicted before their turn.
const MOST_SAVES: usize = 512;

/// Where evicted pages, and states of recurrent layers, are kept; nowhere by default. States get half of the bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeepOptions {
    /// Bytes of pinned host memory.
    pub host_bytes: Option<u64>,
    /// A folder for a file, and its most bytes.
    pub disk: Option<(PathBuf, u64)>,
}

/// What a medium did.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    saved: u64,
    loaded: u64,
    evicted: u64,
    failed: u64,
}

/// What is being saved to a medium, and under which number: it may give way and come again meanwhile.
type Pending = HashMap<PageKey, u64>;

/// Pages in host memory.
#[derive(Debug)]
struct Host {
    /// For each cache the pages of all slots, one after the other: pages in consecutive slots are one copy per cache.
    areas: Vec<Span>,
    slots: Lru,
    pending: Pending,
    /// Slots that are being read or written, and how often.
    busy: HashMap<Slot, u32>,
    count: Count,
}

/// Pages in a file.
#[derive(Debug)]
struct Filed {
    disk: Disk,
    pending: Pending,
    count: Count,
}

/// Evicted pages and where they are.
#[derive(Debug)]
pub(crate) struct PageStore {
    host: Option<Host>,
    filed: Option<Filed>,
    /// Bytes of a page in each cache.
    caches: Vec<u64>,
    mover: Mover,
    saves: usize,
    /// Numbers saves.
    ticket: u64,
    /// What was asked for and not begun: from which slot of host memory into which page.
    loads: Vec<(Slot, Page)>,
    done: Vec<Moved>,
    events: Vec<CacheEvent>,
}

/// What a store keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// Pages of the device.
    Pages,
    /// Copies of what seats carry; their slots on the device are numbered like pages.
    States,
}

/// The store of pages, and that of states where layers are recurrent.
#[derive(Debug)]
pub(crate) struct Stores {
    pub(crate) pages: PageStore,
    pub(crate) states: Option<PageStore>,
}

impl Stores {
    fn of(&mut self, what: What) -> &mut PageStore {
        match (what, &mut self.states) {
            (What::States, Some(states)) => states,
            _ => &mut self.pages,
        }
    }

    fn all(&mut self) -> impl Iterator<Item = (What, &mut PageStore)> {
        let states = self.states.as_mut().map(|states| (What::States, states));
        [(What::Pages, &mut self.pages)].into_iter().chain(states)
    }

    /// What each medium did with pages.
    pub(crate) fn uses(&self) -> Vec<StoreUse> {
        self.pages.uses()
    }
}

impl PageStore {
    /// Over slots in host memory and a file, or one of them. `caches` are the bytes of a page in each cache.
    pub(crate) fn new(host: Option<Span>, disk: Option<Disk>, caches: Vec<u64>) -> PageStore {
        let host = host.map(|span| {
            let slots = span.len / caches.iter().sum::<u64>().max(1);
            let mut at = 0;
            let area = |bytes: &u64| {
                let area = span.part(at, slots * bytes);
                at += area.len;
                area
            };
            let areas = caches.iter().map(area).collect();
            let slots = Lru::new(u32::try_from(slots).unwrap_or(u32::MAX));
            let (pending, busy) = (Pending::new(), HashMap::new());
            Host { areas, slots, pending, busy, count: Count::default() }
        });
        let mut events = Vec::new();
        if let Some(disk) = &disk {
            let known = disk.notes().filter(|note| note.public);
            known.for_each(|note| tell(&mut events, note, Medium::Disk));
        }
        let filed =
            disk.map(|disk| Filed { disk, pending: Pending::new(), count: Count::default() });
        PageStore {
            host,
            filed,
            caches,
            mover: Mover::new(),
            saves: 0,
            ticket: 0,
            loads: Vec::new(),
            done: Vec::new(),
            events,
        }
    }

    /// The parts of a slot of host memory, one for each cache.
    fn place(&self, slot: Slot) -> Vec<Span> {
        let areas = self.host.iter().flat_map(|host| &host.areas);
        let part = |(area, &bytes): (&Span, &u64)| area.part(u64::from(slot.0) * bytes, bytes);
        areas.zip(&self.caches).map(part).collect()
    }

    fn next_ticket(&mut self) -> u64 {
        self.ticket += 1;
        self.ticket
    }

    /// Takes a slot of the file for a page; `None` if the file has it or there is none.
    fn file_slot(&mut self, note: &PageNote) -> Option<InFile> {
        let ticket = self.next_ticket();
        let filed = self.filed.as_mut()?;
        if filed.disk.slots().get(note.key).is_some() {
            return None;
        }
        let (slot, evicted) = filed.disk.slots().insert(note.clone());
        if let Some(evicted) = evicted {
            filed.count.evicted += 1;
            // What was not whole yet was told to nobody.
            if filed.pending.remove(&evicted.key).is_none() {
                untell(&mut self.events, &evicted, Medium::Disk);
            }
        }
        filed.pending.insert(note.key, ticket);
        Some((filed.disk.file(), slot, ticket))
    }

    /// Takes what a thread did into the index.
    fn take(&mut self, done: Done) {
        for written in done.written {
            self.written(written);
        }
        if let Some(page) = done.saved {
            self.saves -= 1;
            self.done.push(Moved::Saved(page));
        }
        for slot in done.slots {
            let host = self.host.as_mut().expect("a slot of host memory");
            let busy = host.busy.get_mut(&slot).expect("it was busy");
            *busy -= 1;
            if *busy == 0 {
                host.busy.remove(&slot);
            }
        }
        for (page, medium, key, whole) in done.loaded {
            let count = match medium {
                Medium::Disk => self.filed.as_mut().map(|filed| &mut filed.count),
                _ => self.host.as_mut().map(|host| &mut host.count),
            };
            if let Some(count) = count {
                *(if whole { &mut count.loaded } else { &mut count.failed }) += 1;
            }
            if let (false, Some(filed), Some(key)) = (whole, &mut self.filed, key)
                && let Some(lost) = filed.disk.slots().remove(key)
            {
                untell(&mut self.events, &lost, Medium::Disk);
            }
            self.done.push(Moved::Loaded(page, whole));
        }
    }

    /// A page was saved to a medium, or could not be.
    fn written(&mut self, Written { medium, note, ticket, whole }: Written) {
        let (slots, pending, count) = match medium {
            Medium::Disk => {
                let Some(filed) = &mut self.filed else { return };
                (filed.disk.slots(), &mut filed.pending, &mut filed.count)
            }
            _ => {
                let Some(host) = &mut self.host else { return };
                (&mut host.slots, &mut host.pending, &mut host.count)
            }
        };
        *(if whole { &mut count.saved } else { &mut count.failed }) += 1;
        // It may have given way meanwhile.
        if pending.get(&note.key) != Some(&ticket) {
            return;
        }
        pending.remove(&note.key);
        match whole {
            true if note.public => tell(&mut self.events, &note, medium),
            true => {}
            false => drop(slots.remove(note.key)),
        }
    }

    fn has(&mut self, key: PageKey) -> bool {
        let host = self
            .host
            .as_mut()
            .is_some_and(|host| !host.pending.contains_key(&key) && host.slots.get(key).is_some());
        host || self.filed.as_mut().is_some_and(|filed| {
            !filed.pending.contains_key(&key) && filed.disk.slots().get(key).is_some()
        })
    }

    fn abandon(&mut self) {
        self.loads.clear();
        for done in self.mover.finish_all() {
            self.take(done);
        }
        self.done.clear();
        self.saves = 0;
        // A copy to host memory may have failed with the device, so none of them is trusted.
        if let Some(host) = &mut self.host {
            let empty = Lru::new(host.slots.room());
            let lost = std::mem::replace(&mut host.slots, empty);
            lost.notes().for_each(|note| untell(&mut self.events, note, Medium::Host));
            host.count.failed += lost.len() as u64;
            host.pending.clear();
            host.busy.clear();
        }
    }

    /// What each medium did.
    fn uses(&self) -> Vec<StoreUse> {
        let of = |medium: Medium, slots: &Lru, count: Count| StoreUse {
            medium,
            pages: slots.len() as u64,
            room: slots.room().into(),
            saved: count.saved,
            loaded: count.loaded,
            evicted: count.evicted,
            failed: count.failed,
        };
        let host = self.host.as_ref().map(|host| of(Medium::Host, &host.slots, host.count));
        let filed = self.filed.as_ref();
        let filed = filed.map(|filed| of(Medium::Disk, filed.disk.look(), filed.count));
        host.into_iter().chain(filed).collect()
    }
}

fn tell(events: &mut Vec<CacheEvent>, note: &PageNote, medium: Medium) {
    let (block, parent) = (note.key.block(), note.parent.map(PageKey::block));
    events.push(CacheEvent::Stored { block, parent, tokens: note.tokens.clone(), medium });
}

fn untell(events: &mut Vec<CacheEvent>, note: &PageNote, medium: Medium) {
    if note.public {
        events.push(CacheEvent::Removed { block: note.key.block(), medium });
    }
}

/// The parts of a page in every cache, or of a state in every layer.
fn parts(executor: &GraphExecutor, what: What, page: Page) -> Vec<Span> {
    let part = |bytes: u64, span: Span| span.part(u64::from(page.0) * bytes, bytes);
    let bindings = executor.runners().bindings();
    match what {
        What::Pages => {
            bindings.kv.iter().map(|cache| part(cache.page_bytes(), cache.span)).collect()
        }
        What::States => {
            let copies = bindings.carry_copies.iter();
            copies.map(|copies| part(state_bytes(copies), copies.span)).collect()
        }
    }
}

/// Bytes of one of the copies in a layer.
pub(crate) fn state_bytes(copies: &Tensor) -> u64 {
    copies.dtype.bytes(copies.cols as usize) as u64
}

impl GraphExecutor {
    fn stores(&mut self) -> &mut Stores {
        self.store.as_mut().expect("only an executor with a store is asked")
    }

    fn kept(&mut self, what: What) -> &mut PageStore {
        self.stores().of(what)
    }

    fn there(&self) -> mover::There {
        (self.device().clone(), self.runners().arena().clone())
    }

    /// Begins to save to host memory; false if the slot that would give way is in use.
    fn save_host(&mut self, what: What, page: Page, note: PageNote) -> bool {
        let (there, from) = (self.there(), parts(self, what, page));
        let store = self.kept(what);
        let host = store.host.as_mut().expect("the caller looked");
        if host.slots.oldest().is_some_and(|slot| host.busy.contains_key(&slot)) {
            return false;
        }
        let (slot, evicted) = host.slots.insert(note.clone());
        *host.busy.entry(slot).or_default() += 1;
        let mut retired = None;
        if let Some(evicted) = evicted {
            host.count.evicted += 1;
            untell(&mut store.events, &evicted, Medium::Host);
            retired = store.file_slot(&evicted).map(|at| (evicted, at));
        }
        let ticket = store.next_ticket();
        let host = store.host.as_mut().expect("the caller looked");
        host.pending.insert(note.key, ticket);
        let to = store.place(slot);
        store.mover.save(there, page, (from, to, slot), (note, ticket), retired);
        true
    }

    /// Begins to save to the file.
    fn save_disk(&mut self, what: What, page: Page, note: PageNote) -> bool {
        let (there, from) = (self.there(), parts(self, what, page));
        let store = self.kept(what);
        match store.file_slot(&note) {
            Some((file, slot, ticket)) => {
                store.mover.write(there, page, from, (note, ticket), (file, slot));
            }
            None => return false,
        }
        true
    }

    fn save_to(&mut self, what: What, page: Page, note: PageNote) -> bool {
        let store = self.kept(what);
        let known = |pending: &Pending| pending.contains_key(&note.key);
        if store.host.as_ref().is_some_and(|host| known(&host.pending))
            || store.filed.as_ref().is_some_and(|filed| known(&filed.pending))
        {
            // The same is being saved from another page.
            store.done.push(Moved::Saved(page));
            return true;
        }
        if store.saves >= MOST_SAVES {
            return false;
        }
        let begun = match store.host.is_some() {
            true => self.save_host(what, page, note),
            false => self.save_disk(what, page, note),
        };
        self.kept(what).saves += usize::from(begun);
        begun
    }

    fn load_from(&mut self, what: What, key: PageKey, page: Page) {
        let store = self.kept(what);
        if let Some(host) = &mut store.host
            && !host.pending.contains_key(&key)
            && let Some(slot) = host.slots.get(key)
        {
            *host.busy.entry(slot).or_default() += 1;
            return store.loads.push((slot, page));
        }
        let filed = store.filed.as_mut();
        let slot = filed.and_then(|filed| Some((filed.disk.slots().get(key)?, filed.disk.file())));
        let Some((slot, file)) = slot else {
            return store.done.push(Moved::Loaded(page, false));
        };
        let (there, to) = (self.there(), parts(self, what, page));
        self.kept(what).mover.read(there, page, to, (file, slot, key));
    }

    fn begin_in(&mut self, what: What) {
        let loads = std::mem::take(&mut self.kept(what).loads);
        if loads.is_empty() {
            return;
        }
        let pages: Vec<_> = loads.iter().map(|(_, page)| parts(self, what, *page)).collect();
        let there = self.there();
        let store = self.kept(what);
        let places = loads.iter().map(|(slot, _)| store.place(*slot)).collect();
        store.mover.load(there, loads, places, pages);
    }
}

/// A copy of a store of states, as the engine knows it.
fn of_state(moved: Moved) -> Moved {
    match moved {
        Moved::Saved(slot) => Moved::StateSaved(slot.0),
        Moved::Loaded(slot, whole) => Moved::StateLoaded(slot.0, whole),
        known => known,
    }
}

impl Store for GraphExecutor {
    fn has(&mut self, key: PageKey) -> bool {
        self.kept(What::Pages).has(key)
    }

    fn save(&mut self, page: Page, note: PageNote) -> bool {
        self.save_to(What::Pages, page, note)
    }

    fn load(&mut self, key: PageKey, page: Page) {
        self.load_from(What::Pages, key, page);
    }

    fn has_state(&mut self, key: PageKey) -> bool {
        self.stores().states.as_mut().is_some_and(|states| states.has(key))
    }

    fn save_state(&mut self, slot: u32, note: PageNote) -> bool {
        self.save_to(What::States, Page(slot), note)
    }

    fn load_state(&mut self, key: PageKey, slot: u32) {
        self.load_from(What::States, key, Page(slot));
    }

    fn begin(&mut self) {
        self.begin_in(What::Pages);
        if self.stores().states.is_some() {
            self.begin_in(What::States);
        }
    }

    fn poll(&mut self, done: &mut Vec<Moved>) {
        for (what, store) in self.stores().all() {
            while let Some(found) = store.mover.poll() {
                store.take(found);
            }
            match what {
                What::Pages => done.append(&mut store.done),
                What::States => done.extend(store.done.drain(..).map(of_state)),
            }
        }
    }

    fn rest(&mut self) {
        for (_, store) in self.stores().all() {
            if store.done.is_empty()
                && let Some(found) = store.mover.wait_a_moment()
            {
                store.take(found);
            }
        }
    }

    fn abandon(&mut self) {
        self.stores().all().for_each(|(_, store)| store.abandon());
    }

    fn take_events(&mut self) -> Vec<CacheEvent> {
        // States are told to nobody.
        std::mem::take(&mut self.kept(What::Pages).events)
    }
}
