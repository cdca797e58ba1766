//! Which page is in which slot, and which gives way to the next.

use engine::pages::PageKey;
use engine::store::PageNote;
use std::collections::{BTreeMap, HashMap};

/// A place for one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Slot(pub(super) u32);

/// A fixed number of slots; the least recently used gives way.
#[derive(Debug)]
pub(super) struct Lru {
    room: u32,
    free: Vec<Slot>,
    /// Slots that were never used, from here on.
    fresh: u32,
    slots: HashMap<PageKey, (Slot, u64)>,
    /// By when they were last used.
    order: BTreeMap<u64, PageNote>,
    clock: u64,
}

impl Lru {
    pub(super) fn new(room: u32) -> Lru {
        let (slots, order) = (HashMap::new(), BTreeMap::new());
        Lru { room, free: Vec::new(), fresh: 0, slots, order, clock: 0 }
    }

    pub(super) fn room(&self) -> u32 {
        self.room
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Where a page is; counts as a use.
    pub(super) fn get(&mut self, key: PageKey) -> Option<Slot> {
        let (slot, used) = self.slots.get_mut(&key)?;
        let note = self.order.remove(used).expect("every slot has a turn");
        self.clock += 1;
        *used = self.clock;
        self.order.insert(self.clock, note);
        Some(*slot)
    }

    /// The slot that gives way next; `None` while there is room.
    pub(super) fn oldest(&self) -> Option<Slot> {
        if !self.free.is_empty() || self.fresh < self.room {
            return None;
        }
        let (_, oldest) = self.order.first_key_value()?;
        self.slots.get(&oldest.key).map(|(slot, _)| *slot)
    }

    /// A slot for a page that has none, and what gave way. There is room for one page at least.
    pub(super) fn insert(&mut self, note: PageNote) -> (Slot, Option<PageNote>) {
        let mut evicted = None;
        if self.free.is_empty() && self.fresh == self.room {
            let (_, oldest) = self.order.first_key_value().expect("no slot is free");
            let key = oldest.key;
            evicted = self.remove(key);
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.fresh += 1;
            Slot(self.fresh - 1)
        });
        self.put(slot, note);
        (slot, evicted)
    }

    /// Puts a page into a slot that is known to be unused.
    fn put(&mut self, slot: Slot, note: PageNote) {
        self.clock += 1;
        self.slots.insert(note.key, (slot, self.clock));
        self.order.insert(self.clock, note);
    }

    /// Slots that hold pages already, as found in a file; all others up to the last are free.
    pub(super) fn restore(room: u32, found: Vec<(Slot, PageNote)>) -> Lru {
        let mut lru = Lru::new(room);
        lru.fresh = found.iter().map(|(slot, _)| slot.0 + 1).max().unwrap_or(0);
        let mut used = vec![false; lru.fresh as usize];
        for (slot, note) in found {
            used[slot.0 as usize] = true;
            lru.put(slot, note);
        }
        let unused = used.iter().enumerate().filter(|(_, used)| !**used);
        lru.free = unused.map(|(slot, _)| Slot(slot as u32)).collect();
        lru
    }

    pub(super) fn remove(&mut self, key: PageKey) -> Option<PageNote> {
        let (slot, used) = self.slots.remove(&key)?;
        self.free.push(slot);
        self.order.remove(&used)
    }

    /// Every page, the least recently used first.
    pub(super) fn notes(&self) -> impl Iterator<Item = &PageNote> {
        self.order.values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(n: u8) -> PageNote {
        PageNote { key: PageKey([n; 16]), parent: None, tokens: [].into(), public: true }
    }

    #[test]
    fn the_least_recently_used_gives_way() {
        let mut lru = Lru::new(2);
        let (first, none) = lru.insert(note(1));
        assert_eq!(none, None);
        lru.insert(note(2));
        assert_eq!(lru.get(PageKey([1; 16])), Some(first));
        let (slot, evicted) = lru.insert(note(3));
        assert_eq!(evicted, Some(note(2)));
        assert_eq!((slot, lru.len()), (Slot(1), 2));
        assert_eq!(lru.get(PageKey([2; 16])), None);
        assert_eq!(lru.remove(PageKey([1; 16])), Some(note(1)));
        assert_eq!(lru.insert(note(4)), (first, None));
    }

    #[test]
    fn slots_between_those_found_are_free() {
        let mut lru = Lru::restore(4, vec![(Slot(2), note(1)), (Slot(0), note(2))]);
        assert_eq!(lru.insert(note(3)), (Slot(1), None));
        assert_eq!(lru.insert(note(4)), (Slot(3), None));
        assert_eq!(lru.insert(note(5)), (Slot(2), Some(note(1))));
        assert_eq!(lru.notes().count(), 4);
    }
}
