//! Keeps evicted KV pages: in host memory that the device copies to and from, in a file, or in both.
//!
//! Host memory is pinned and part of the arena; copies run on the device's second stream. What is launched after a copy
//! waits for it, so a page is complete before any step reads it, and is not overwritten before it was saved. What host
//! memory gives up goes to the file. Reading and writing the file happens on the engine's thread.

mod disk;
mod identity;
mod lru;

pub use disk::DiskError;
pub(crate) use disk::{Disk, Shape};
pub(crate) use identity::identity;

use crate::executor::GraphExecutor;
use device::{Arena, Device, Span};
use engine::exec::Page;
use engine::pages::{CacheEvent, Medium, PageKey};
use engine::store::{Moved, PageNote, Store, StoreUse};
use lru::{Lru, Slot};
use std::path::PathBuf;

/// Where evicted pages are kept; nowhere by default.
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

/// Pages in host memory.
#[derive(Debug)]
struct Host {
    /// All slots, one after the other.
    span: Span,
    slots: Lru,
    count: Count,
}

/// Evicted pages and where they are.
#[derive(Debug)]
pub(crate) struct PageStore {
    host: Option<Host>,
    disk: Option<(Disk, Count)>,
    /// Bytes of a page in every cache together.
    page_bytes: u64,
    done: Vec<Moved>,
    events: Vec<CacheEvent>,
}

impl PageStore {
    /// Over slots in host memory and a file, or one of them.
    pub(crate) fn new(host: Option<Span>, disk: Option<Disk>, page_bytes: u64) -> PageStore {
        let host = host.map(|span| {
            let slots = u32::try_from(span.len / page_bytes).unwrap_or(u32::MAX);
            Host { span, slots: Lru::new(slots), count: Count::default() }
        });
        let mut store =
            PageStore { host, disk: None, page_bytes, done: Vec::new(), events: Vec::new() };
        if let Some(disk) = &disk {
            let known = disk.notes().filter(|note| note.public);
            known.for_each(|note| tell(&mut store.events, note, Medium::Disk));
        }
        store.disk = disk.map(|disk| (disk, Count::default()));
        store
    }

    fn place(&self, slot: Slot) -> Option<Span> {
        let host = self.host.as_ref()?;
        Some(host.span.part(u64::from(slot.0) * self.page_bytes, self.page_bytes))
    }

    fn write_file(&mut self, note: PageNote, bytes: &[u8]) {
        let Some((disk, count)) = &mut self.disk else { return };
        if disk.slots().get(note.key).is_some() {
            return;
        }
        match disk.write(&note, bytes) {
            Ok(evicted) => {
                count.saved += 1;
                if let Some(evicted) = evicted {
                    count.evicted += 1;
                    untell(&mut self.events, &evicted, Medium::Disk);
                }
                if note.public {
                    tell(&mut self.events, &note, Medium::Disk);
                }
            }
            Err(_) => count.failed += 1,
        }
    }

    /// What each medium did.
    pub(crate) fn uses(&self) -> Vec<StoreUse> {
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
        let disk = self.disk.as_ref();
        let disk = disk.map(|(disk, count)| of(Medium::Disk, disk.look(), *count));
        host.into_iter().chain(disk).collect()
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

/// The parts of a page in every cache.
fn parts(executor: &GraphExecutor, page: Page) -> Vec<Span> {
    let caches = executor.runners().bindings().kv.iter();
    let part = |bytes: u64, span: Span| span.part(u64::from(page.0) * bytes, bytes);
    caches.map(|cache| part(cache.page_bytes(), cache.span)).collect()
}

/// Copies between the parts of a page and a place in host memory.
fn copy(
    (device, arena): (&Device, &Arena),
    parts: &[Span],
    place: Span,
    save: bool,
) -> device::Result<()> {
    let mut at = 0;
    for &part in parts {
        let kept = place.part(at, part.len);
        let (from, to) = if save { (part, kept) } else { (kept, part) };
        device.copy_beside(arena, from, to)?;
        at += part.len;
    }
    Ok(())
}

impl GraphExecutor {
    fn kept(&mut self) -> &mut PageStore {
        self.store.as_mut().expect("only an executor with a store is asked")
    }

    /// Saves to host memory; false if that failed.
    fn save_host(&mut self, page: Page, note: PageNote) -> bool {
        let parts = parts(self, page);
        let host = self.kept().host.as_mut().expect("the caller looked");
        let (slot, evicted) = host.slots.insert(note.clone());
        host.count.saved += 1;
        let place = self.kept().place(slot).expect("it has host memory");
        if let Some(evicted) = evicted {
            let store = self.kept();
            untell(&mut store.events, &evicted, Medium::Host);
            store.host.as_mut().expect("looked at above").count.evicted += 1;
            if store.disk.is_some() {
                // Waits for the steps under way, and the copy that filled it.
                match self.device().read(self.runners().arena(), place) {
                    Ok(bytes) => self.kept().write_file(evicted, &bytes),
                    Err(_) => return false,
                }
            }
        }
        let there = (self.device(), self.runners().arena());
        let copied = copy(there, &parts, place, true).is_ok();
        let store = self.kept();
        let host = store.host.as_mut().expect("looked at above");
        match copied {
            true if note.public => tell(&mut store.events, &note, Medium::Host),
            true => {}
            false => {
                host.slots.remove(note.key);
                host.count.failed += 1;
            }
        }
        copied
    }

    /// Saves to the file.
    fn save_disk(&mut self, page: Page, note: PageNote) {
        let read = self.device().read_all(self.runners().arena(), &parts(self, page));
        let store = self.kept();
        match (read, &mut store.disk) {
            (Ok(bytes), _) => store.write_file(note, &bytes),
            (Err(_), Some((_, count))) => count.failed += 1,
            (Err(_), None) => {}
        }
    }

    fn load_host(&mut self, slot: Slot, page: Page) -> bool {
        let place = self.kept().place(slot).expect("it has host memory");
        let parts = parts(self, page);
        let there = (self.device(), self.runners().arena());
        let copied = copy(there, &parts, place, false).is_ok();
        let host = self.kept().host.as_mut().expect("the caller looked");
        *(if copied { &mut host.count.loaded } else { &mut host.count.failed }) += 1;
        copied
    }

    fn load_disk(&mut self, key: PageKey, page: Page) -> bool {
        let parts = parts(self, page);
        let store = self.kept();
        let Some((disk, count)) = &mut store.disk else { return false };
        let bytes = match disk.read(key) {
            Ok(bytes) => bytes,
            Err(lost) => {
                if let Some(lost) = lost {
                    count.failed += 1;
                    untell(&mut store.events, &lost, Medium::Disk);
                }
                return false;
            }
        };
        count.loaded += 1;
        self.device().write_all(self.runners().arena(), &parts, &bytes).is_ok()
    }
}

impl Store for GraphExecutor {
    fn has(&mut self, key: PageKey) -> bool {
        let store = self.kept();
        let host = store.host.as_mut().is_some_and(|host| host.slots.get(key).is_some());
        host || store.disk.as_mut().is_some_and(|(disk, _)| disk.slots().get(key).is_some())
    }

    fn save(&mut self, page: Page, note: PageNote) -> bool {
        match self.kept().host.is_some() {
            true => drop(self.save_host(page, note)),
            false => self.save_disk(page, note),
        }
        // What is launched from now on waits for the copy.
        self.kept().done.push(Moved::Saved(page));
        true
    }

    fn load(&mut self, key: PageKey, page: Page) {
        let host = self.kept().host.as_mut().and_then(|host| host.slots.get(key));
        let whole = match host {
            Some(slot) => self.load_host(slot, page),
            None => self.load_disk(key, page),
        };
        self.kept().done.push(Moved::Loaded(page, whole));
    }

    fn poll(&mut self, done: &mut Vec<Moved>) {
        done.append(&mut self.kept().done);
    }

    fn abandon(&mut self) {
        let store = self.kept();
        store.done.clear();
        // A copy to host memory may have failed with the device, so none of them is trusted.
        if let Some(host) = &mut store.host {
            let empty = Lru::new(host.slots.room());
            let lost = std::mem::replace(&mut host.slots, empty);
            lost.notes().for_each(|note| untell(&mut store.events, note, Medium::Host));
            host.count.failed += lost.len() as u64;
        }
    }

    fn take_events(&mut self) -> Vec<CacheEvent> {
        std::mem::take(&mut self.kept().events)
    }
}
