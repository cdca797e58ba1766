//! Copies of what seats carry, behind pages of the prefix tree. A device whose layers are recurrent can go on after a
//! cached prefix only with the state that its last token left, so a prefix ends where such a copy is. There is room for
//! few of them: the least recently used one is replaced. With a store every copy is saved once it is behind a page, and
//! comes back with the pages before it.

use super::tree::Node;
use std::collections::{BTreeMap, VecDeque};

/// The device's room for copies, and which node each belongs to.
#[derive(Debug, Default)]
pub(crate) struct States {
    slots: Vec<Slot>,
    of: BTreeMap<Node, u32>,
    clock: u64,
    /// Copies that the store may not have yet, and where they were; only with a store.
    fresh: Option<VecDeque<(u32, Node)>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// A sequence saves into it, or it belongs to a node.
    taken: bool,
    node: Option<Node>,
    /// Sequences that are to begin with it.
    pins: u32,
    used: u64,
    /// The last step that reads or writes it on the device.
    touched: u64,
    /// It is being saved to the store.
    saving: bool,
}

impl States {
    pub(crate) fn new(slots: u32) -> States {
        States { slots: vec![Slot::default(); slots as usize], ..States::default() }
    }

    /// Remembers what a store has to save.
    pub(crate) fn with_store(self, store: bool) -> States {
        States { fresh: store.then(VecDeque::new), ..self }
    }

    /// Whether prefixes need them.
    pub(crate) fn are_needed(&self) -> bool {
        !self.slots.is_empty()
    }

    /// The copy behind a node.
    pub(crate) fn of(&self, node: Node) -> Option<u32> {
        self.of.get(&node).copied()
    }

    /// Keeps a copy until [`States::unpin`].
    pub(crate) fn pin(&mut self, slot: u32) {
        self.clock += 1;
        let slot = &mut self.slots[slot as usize];
        slot.pins += 1;
        slot.used = self.clock;
    }

    pub(crate) fn unpin(&mut self, slot: u32) {
        self.slots[slot as usize].pins -= 1;
    }

    /// Room for another copy: a free slot, else that of the least recently used copy. None if all are in use.
    pub(crate) fn take(&mut self) -> Option<u32> {
        self.take_after(u64::MAX)
    }

    /// The same for a copy that the store makes, which is not in order with steps: only of what no step after `done` uses.
    pub(crate) fn take_after(&mut self, done: u64) -> Option<u32> {
        let all = || self.slots.iter().enumerate().filter(|(_, slot)| slot.touched <= done);
        let free = all().find(|(_, slot)| !slot.taken);
        let idle = |slot: &Slot| slot.node.is_some() && slot.pins == 0 && !slot.saving;
        let replaced = || all().filter(|(_, slot)| idle(slot)).min_by_key(|(_, slot)| slot.used);
        let index = free.or_else(replaced).map(|(index, _)| index)?;
        if let Some(node) = self.slots[index].node {
            self.of.remove(&node);
        }
        let touched = self.slots[index].touched;
        self.slots[index] = Slot { taken: true, touched, ..Slot::default() };
        Some(index as u32)
    }

    /// A step copies from it or to it.
    pub(crate) fn touch(&mut self, slot: u32, step: u64) {
        self.slots[slot as usize].touched = step;
    }

    /// The next copy that may have to be saved, and the node that it belongs to.
    pub(crate) fn next_fresh(&mut self) -> Option<(u32, Node)> {
        let fresh = self.fresh.as_mut()?;
        while let Some((slot, node)) = fresh.pop_front() {
            // It may have been replaced meanwhile.
            if self.of.get(&node) == Some(&slot) {
                return Some((slot, node));
            }
        }
        None
    }

    /// It could not be saved now.
    pub(crate) fn fresh_again(&mut self, slot: u32) {
        let node = self.slots[slot as usize].node;
        if let (Some(fresh), Some(node)) = (&mut self.fresh, node) {
            fresh.push_back((slot, node));
        }
    }

    /// The copy is being saved: it stays until [`States::saved`].
    pub(crate) fn begin_save(&mut self, slot: u32) {
        self.slots[slot as usize].saving = true;
    }

    /// The copy was saved, or could not be.
    pub(crate) fn saved(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        entry.saving = false;
        if entry.node.is_none() {
            self.release(slot);
        }
    }

    /// Copies that are being saved.
    pub(crate) fn saving(&self) -> usize {
        self.slots.iter().filter(|slot| slot.saving).count()
    }

    /// The copy is the state behind this node. One that the node has already stays, and this one is free again.
    pub(crate) fn attach(&mut self, slot: u32, node: Node) {
        if self.of.contains_key(&node) {
            return self.release(slot);
        }
        self.clock += 1;
        self.of.insert(node, slot);
        if let Some(fresh) = &mut self.fresh {
            fresh.push_back((slot, node));
        }
        let slot = &mut self.slots[slot as usize];
        (slot.node, slot.used) = (Some(node), self.clock);
    }

    /// Nothing will be behind it.
    pub(crate) fn release(&mut self, slot: u32) {
        let slot = &mut self.slots[slot as usize];
        *slot = Slot { touched: slot.touched, ..Slot::default() };
    }

    /// The node went. No sequence is to begin behind it: its cursor would have kept it.
    pub(crate) fn forget(&mut self, node: Node) {
        let Some(slot) = self.of.remove(&node) else { return };
        match &mut self.slots[slot as usize] {
            // Its place is free when it was saved.
            entry if entry.saving => entry.node = None,
            _ => self.release(slot),
        }
    }

    /// Forgets everything.
    pub(crate) fn reset(&mut self) {
        let (slots, store) = (self.slots.len() as u32, self.fresh.is_some());
        *self = States::new(slots).with_store(store);
    }

    /// Whether slots add up, where sequences and the store write into `saving` and sequences are to begin with `pinned`.
    pub(crate) fn audit(&self, saving: usize, pinned: usize) -> Result<(), String> {
        let count = |of: &dyn Fn(&Slot) -> bool| self.slots.iter().filter(|slot| of(slot)).count();
        let taken = count(&|slot| slot.taken);
        let pins: u32 = self.slots.iter().map(|slot| slot.pins).sum();
        let whole = self.of.iter().all(|(node, slot)| {
            self.slots[*slot as usize].taken && self.slots[*slot as usize].node == Some(*node)
        });
        let left = count(&|slot| slot.saving && slot.node.is_none());
        let right = taken == saving + self.of.len() + left && pins as usize == pinned && whole;
        match right {
            true => Ok(()),
            false => Err(format!(
                "{taken} states for {saving} sequences and {} nodes, {pins} of {pinned} kept",
                self.of.len()
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_copy_is_replaced() {
        let mut states = States::new(3);
        let slots: Vec<u32> = (0..3).map(|_| states.take().unwrap()).collect();
        assert_eq!(states.take(), None, "all are being saved");
        for (slot, node) in slots.iter().zip(0..) {
            states.attach(*slot, Node(node));
        }
        states.pin(slots[0]);
        states.unpin(slots[0]);
        assert_eq!(states.take(), Some(slots[1]), "used before the others");
        assert_eq!((states.of(Node(1)), states.of(Node(0))), (None, Some(slots[0])));
        states.pin(slots[2]);
        states.attach(slots[1], Node(0));
        assert_eq!(states.of(Node(0)), Some(slots[0]), "the first copy stays");
        assert_eq!(states.take(), Some(slots[1]), "and the second is free");
        assert_eq!(states.take(), Some(slots[0]), "the other is kept");
        assert_eq!(states.take(), None);
        states.audit(2, 1).unwrap();
        states.forget(Node(7));
        states.unpin(slots[2]);
        states.forget(Node(2));
        states.audit(2, 0).unwrap();
        assert!(states.audit(1, 0).is_err());
        states.reset();
        states.audit(0, 0).unwrap();
    }

    #[test]
    fn a_copy_stays_while_it_is_saved() {
        let mut states = States::new(2).with_store(true);
        let [first, second] = [0, 1].map(|node| {
            let slot = states.take().unwrap();
            states.attach(slot, Node(node));
            slot
        });
        assert_eq!(states.next_fresh(), Some((first, Node(0))));
        states.begin_save(first);
        assert_eq!(states.take(), Some(second), "the other is being saved");
        assert_eq!(states.next_fresh(), None, "replaced before it was saved");
        assert_eq!(states.take(), None);
        states.forget(Node(0));
        assert_eq!(
            (states.take(), states.saving()),
            (None, 1),
            "its node went, and it is being saved"
        );
        states.audit(1, 0).unwrap();
        states.saved(first);
        states.touch(first, 7);
        assert_eq!(states.take_after(6), None, "a step still reads it");
        assert_eq!(states.take_after(7), Some(first));
        states.audit(2, 0).unwrap();
        states.attach(first, Node(3));
        states.fresh_again(first);
        assert_eq!(states.next_fresh(), Some((first, Node(3))));
    }
}
