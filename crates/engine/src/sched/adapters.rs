//! Which adapter is in which slot of the device. A slot is given to another adapter only when no seated sequence uses
//! the one that is there.

use super::Scheduler;
use crate::sequence::Key;

/// The slots of the device.
#[derive(Debug, Default)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    clock: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// 0 for none.
    adapter: u64,
    /// When it was last needed.
    used: u64,
    /// The device was told.
    told: bool,
}

impl Slots {
    pub(super) fn new(count: u32) -> Slots {
        Slots { slots: vec![Slot::default(); count as usize], clock: 0 }
    }

    pub(super) fn count(&self) -> usize {
        self.slots.len()
    }

    /// Forgets what is in them.
    pub(super) fn clear(&mut self) {
        self.slots.fill(Slot::default());
    }

    fn position(&self, adapter: u64) -> Option<usize> {
        self.slots.iter().position(|slot| slot.adapter == adapter)
    }

    /// The least recently used slot whose adapter is not `busy`.
    fn free(&self, busy: impl Fn(u64) -> bool) -> Option<usize> {
        let free = |index: &usize| !busy(self.slots[*index].adapter);
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

    /// Whether a waiting sequence needs a slot, and none can be given to it now.
    pub(super) fn awaits_slot(&self, key: Key) -> bool {
        let adapter = self.sequences[key].cold.spec.adapter;
        adapter != 0
            && self.slots.position(adapter).is_none()
            && self.slots.free(|other| self.is_adapter_busy(other)).is_none()
    }

    /// Gives the adapter of a sequence that is being seated a slot.
    pub(super) fn take_slot(&mut self, key: Key) {
        let adapter = self.sequences[key].cold.spec.adapter;
        if adapter == 0 {
            return;
        }
        let found = self.slots.position(adapter);
        let index = found.or_else(|| self.slots.free(|other| self.is_adapter_busy(other)));
        let index = index.expect("admission asked for it");
        self.slots.clock += 1;
        let (slot, used) = (&mut self.slots.slots[index], self.slots.clock);
        if slot.adapter != adapter {
            *slot = Slot { adapter, used, told: false };
        }
        slot.used = used;
    }

    /// The slot of a sequence that joins; tells the device what belongs there if it does not know.
    pub(super) fn join_slot(&mut self, adapter: u64) -> u32 {
        if adapter == 0 {
            return 0;
        }
        let index = self.slots.position(adapter).expect("taken when it was seated");
        let slot = index as u32 + 1;
        if !std::mem::replace(&mut self.slots.slots[index].told, true) {
            self.step.adapters.push((slot, adapter));
        }
        slot
    }
}
