//! Which adapter is in which slot of the device. A slot is given to another adapter only when no seated sequence uses
//! the one that is there, and is filled beside the steps of others: the sequence that needs it is seated afterwards.

use super::Scheduler;
use crate::sequence::Key;

/// The slots of the device.
#[derive(Debug, Default)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    clock: u64,
    /// Counts looks through the queue.
    look: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// 0 for none.
    adapter: u64,
    /// When it was last needed.
    used: u64,
    content: Content,
    /// The last look through the queue in which a waiting sequence wanted it.
    wanted: u64,
}

/// Whether the adapter of a slot is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Content {
    /// The device was not told.
    #[default]
    Missing,
    /// The device is filling it.
    Coming,
    /// It is there.
    There,
}

impl Slots {
    pub(super) fn new(count: u32) -> Slots {
        Slots { slots: vec![Slot::default(); count as usize], clock: 0, look: 0 }
    }

    pub(super) fn count(&self) -> usize {
        self.slots.len()
    }

    /// Forgets what is in them.
    pub(super) fn clear(&mut self) {
        self.slots.fill(Slot::default());
    }

    /// A look through the queue begins.
    pub(super) fn begin_look(&mut self) {
        self.look += 1;
    }

    fn position(&self, adapter: u64) -> Option<usize> {
        self.slots.iter().position(|slot| slot.adapter == adapter)
    }

    /// The least recently used slot that may get another adapter: none that is being filled, whose adapter is `busy`, or
    /// that a sequence before this one in the queue wants. Otherwise waiting sequences would take it from each other.
    fn free(&self, busy: impl Fn(u64) -> bool) -> Option<usize> {
        let free = |index: &usize| {
            let slot = &self.slots[*index];
            let taken = slot.content == Content::Coming || slot.wanted == self.look;
            !taken && !busy(slot.adapter)
        };
        (0..self.slots.len()).filter(free).min_by_key(|index| self.slots[*index].used)
    }
}

impl Scheduler {
    /// Whether a seated sequence has this adapter.
    fn is_adapter_busy(&self, adapter: u64) -> bool {
        let of = |key: &Key| self.sequences[*key].cold.spec.adapter == adapter;
        adapter != 0 && self.seats.iter().flatten().any(of)
    }

    /// Whether a live request has this adapter.
    pub(crate) fn needs_adapter(&self, adapter: u64) -> bool {
        let mut keys = self.live.values().flat_map(|live| &live.sequences);
        keys.any(|key| self.sequences[*key].cold.spec.adapter == adapter)
    }

    /// Whether the adapter of a waiting sequence is not on the device yet. Gives it a slot, if one is free.
    pub(super) fn awaits_slot(&mut self, key: Key) -> bool {
        let adapter = self.sequences[key].cold.spec.adapter;
        if adapter == 0 {
            return false;
        }
        let look = self.slots.look;
        if let Some(index) = self.slots.position(adapter) {
            let slot = &mut self.slots.slots[index];
            slot.wanted = look;
            return slot.content != Content::There;
        }
        if let Some(index) = self.slots.free(|other| self.is_adapter_busy(other)) {
            self.slots.clock += 1;
            let (used, content) = (self.slots.clock, Content::Missing);
            self.slots.slots[index] = Slot { adapter, used, content, wanted: look };
        }
        true
    }

    /// The next slot that the device has to fill, counted from 1, and the adapter.
    pub(crate) fn next_to_fill(&mut self) -> Option<(u32, u64)> {
        let missing = |slot: &Slot| slot.adapter != 0 && slot.content == Content::Missing;
        let index = self.slots.slots.iter().position(missing)?;
        let slot = &mut self.slots.slots[index];
        slot.content = Content::Coming;
        Some((index as u32 + 1, slot.adapter))
    }

    /// The device has filled a slot.
    pub(crate) fn filled(&mut self, slot: u32, adapter: u64) {
        let slot = &mut self.slots.slots[slot as usize - 1];
        // After a restart another one may be on its way there.
        if slot.adapter == adapter && slot.content == Content::Coming {
            slot.content = Content::There;
        }
    }

    /// Whether the device is filling a slot.
    pub(crate) fn is_filling(&self) -> bool {
        self.slots.slots.iter().any(|slot| slot.content == Content::Coming)
    }

    /// Notes that the adapter of a sequence that is being seated is used.
    pub(super) fn take_slot(&mut self, key: Key) {
        let adapter = self.sequences[key].cold.spec.adapter;
        if adapter != 0 {
            let index = self.slots.position(adapter).expect("admission asked for it");
            self.slots.clock += 1;
            self.slots.slots[index].used = self.slots.clock;
        }
    }

    /// The slot of a sequence that joins, counted from 1; 0 for none.
    pub(super) fn join_slot(&self, adapter: u64) -> u32 {
        let index = |adapter| self.slots.position(adapter).expect("taken when it was seated");
        if adapter == 0 { 0 } else { index(adapter) as u32 + 1 }
    }
}
