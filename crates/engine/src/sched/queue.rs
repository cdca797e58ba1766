//! Sequences that wait, in order of service.

use crate::sequence::{Key, Rank};
use std::collections::BTreeMap;

/// Waiting sequences by rank, and by arrival for those who must not be overtaken for ever.
#[derive(Default)]
pub(crate) struct Queue {
    order: BTreeMap<Rank, (Key, u64)>,
    arrivals: BTreeMap<(u64, Key), Rank>,
}

impl Queue {
    pub(crate) fn push(&mut self, rank: Rank, arrival: u64, key: Key) {
        let before = self.order.insert(rank, (key, arrival));
        assert!(before.is_none(), "two waiting sequences have one rank");
        self.arrivals.insert((arrival, key), rank);
    }

    pub(crate) fn first(&self) -> Option<Key> {
        self.order.first_key_value().map(|(_, &(key, _))| key)
    }

    pub(crate) fn remove(&mut self, rank: Rank) {
        if let Some((key, arrival)) = self.order.remove(&rank) {
            self.arrivals.remove(&(arrival, key));
        }
    }

    /// Those who arrived before `arrival` and still wait.
    pub(crate) fn before(&self, arrival: u64) -> Vec<Key> {
        let mut keys = Vec::new();
        for &(at, key) in self.arrivals.keys() {
            if at >= arrival {
                break;
            }
            keys.push(key);
        }
        keys
    }

    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }
}
