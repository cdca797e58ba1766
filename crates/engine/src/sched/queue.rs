//! Sequences that wait, in order of service.

use crate::sequence::{Key, Rank};
use std::collections::BTreeMap;
use std::ops::Bound;

/// Waiting sequences by rank, and by arrival to count how often each was overtaken.
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

    /// The first, or the first behind a rank.
    pub(crate) fn after(&self, rank: Option<Rank>) -> Option<(Rank, Key)> {
        let from = rank.map_or(Bound::Unbounded, Bound::Excluded);
        let next = self.order.range((from, Bound::Unbounded)).next();
        next.map(|(&rank, &(key, _))| (rank, key))
    }

    pub(crate) fn first(&self) -> Option<Key> {
        self.after(None).map(|(_, key)| key)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    pub(crate) fn remove(&mut self, rank: Rank) {
        if let Some((key, arrival)) = self.order.remove(&rank) {
            self.arrivals.remove(&(arrival, key));
        }
    }

    /// The sequences that arrived before `arrival` and still wait.
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
