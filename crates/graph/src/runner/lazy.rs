//! Which graphs a lazy runner keeps. The set is bounded by bytes. A new graph must be needed more than
//! twice as often as each graph it evicts, so that traffic which alternates between two sizes does not
//! record both again and again.

use crate::ShapeKey;
use std::collections::BTreeMap;

/// Steps that must need a bucket before it is recorded.
pub(super) const EARN: u64 = 3;

/// How many steps needed each key since the runner started.
#[derive(Debug, Default)]
pub(super) struct Wants(BTreeMap<ShapeKey, u64>);

impl Wants {
    /// Counts a step that needed the key; true once the key has earned a graph.
    pub(super) fn want(&mut self, key: &ShapeKey) -> bool {
        let count = self.0.entry(*key).or_default();
        *count += 1;
        *count >= EARN
    }

    /// Which of `kept` (key, bytes) to give back so that `needed` more bytes fit `budget`; `None` when
    /// the new key is not worth it. Evicts the least needed first, and only keys needed less than half
    /// as often as the new one.
    pub(super) fn make_room(
        &self,
        newcomer: &ShapeKey,
        needed: u64,
        kept: &[(ShapeKey, u64)],
        budget: u64,
    ) -> Option<Vec<ShapeKey>> {
        let wanted = |key: &ShapeKey| self.0.get(key).copied().unwrap_or(0);
        let mut used: u64 = kept.iter().map(|(_, bytes)| bytes).sum();
        let mut order: Vec<&(ShapeKey, u64)> = kept.iter().collect();
        order.sort_by_key(|(key, _)| wanted(key));
        let mut out = Vec::new();
        let mut order = order.into_iter();
        while used + needed > budget {
            let (key, bytes) = order.next()?;
            if wanted(key) * 2 >= wanted(newcomer) {
                return None;
            }
            used -= bytes;
            out.push(*key);
        }
        Some(out)
    }
}
