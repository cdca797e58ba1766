//! Copies of what seats carry, behind pages of the prefix tree. A device whose layers are recurrent can go on after a
//! cached prefix only with the state that its last token left, so a prefix ends where such a copy is. There is room for
//! few of them: the least recently used one is replaced.

use super::tree::Node;
use std::collections::BTreeMap;

/// The device's room for copies, and which node each belongs to.
#[derive(Debug, Default)]
pub(crate) struct States {
    slots: Vec<Slot>,
    of: BTreeMap<Node, u32>,
    clock: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// A sequence saves into it, or it belongs to a node.
    taken: bool,
    node: Option<Node>,
    /// Sequences that are to begin with it.
    pins: u32,
    used: u64,
}

impl States {
    pub(crate) fn new(slots: u32) -> States {
        States { slots: vec![Slot::default(); slots as usize], ..States::default() }
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
        let free = self.slots.iter().position(|slot| !slot.taken);
        let index = free.or_else(|| {
            let idle = |(_, slot): &(usize, &Slot)| slot.node.is_some() && slot.pins == 0;
            let slots = self.slots.iter().enumerate().filter(idle);
            slots.min_by_key(|(_, slot)| slot.used).map(|(index, _)| index)
        })?;
        if let Some(node) = self.slots[index].node {
            self.of.remove(&node);
        }
        self.slots[index] = Slot { taken: true, ..Slot::default() };
        Some(index as u32)
    }

    /// The copy is the state behind this node. One that the node has already stays, and this one is free again.
    pub(crate) fn attach(&mut self, slot: u32, node: Node) {
        if self.of.contains_key(&node) {
            return self.release(slot);
        }
        self.clock += 1;
        self.of.insert(node, slot);
        let slot = &mut self.slots[slot as usize];
        (slot.node, slot.used) = (Some(node), self.clock);
    }

    /// Nothing will be behind it.
    pub(crate) fn release(&mut self, slot: u32) {
        self.slots[slot as usize] = Slot::default();
    }

    /// The node went. No sequence is to begin behind it: its cursor would have kept it.
    pub(crate) fn forget(&mut self, node: Node) {
        if let Some(slot) = self.of.remove(&node) {
            self.release(slot);
        }
    }

    /// Forgets everything.
    pub(crate) fn reset(&mut self) {
        *self = States::new(self.slots.len() as u32);
    }

    /// Whether slots add up, where sequences save into `saving` and are to begin with `pinned`.
    pub(crate) fn audit(&self, saving: usize, pinned: usize) -> Result<(), String> {
        let count = |of: &dyn Fn(&Slot) -> bool| self.slots.iter().filter(|slot| of(slot)).count();
        let taken = count(&|slot| slot.taken);
        let pins: u32 = self.slots.iter().map(|slot| slot.pins).sum();
        let whole = self.of.iter().all(|(node, slot)| {
            self.slots[*slot as usize].taken && self.slots[*slot as usize].node == Some(*node)
        });
        let right = taken == saving + self.of.len() && pins as usize == pinned && whole;
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
}
