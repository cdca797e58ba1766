//! Which graphs a lazy runner keeps. The set is bounded by bytes and ordered by use, and a newcomer
//! must be wanted clearly more than what it displaces: traffic that swings between two sizes records
//! each once, not once per swing.

use crate::ShapeKey;
use std::collections::BTreeMap;

/// Times a bucket must be wanted before it is recorded.
pub(super) const EARN: u64 = 3;

/// How often each key was wanted since the runner started.
#[derive(Debug, Default)]
pub(super) struct Wants(BTreeMap<ShapeKey, u64>);

impl Wants {
    /// Counts a wish; true once the key has earned a graph.
    pub(super) fn want(&mut self, key: &ShapeKey) -> bool {
        let count = self.0.entry(*key).or_default();
        *count += 1;
        *count >= EARN
    }

    /// Which of `kept` (key, bytes) to give back so that `needed` more bytes fit `budget`; `None` when
    /// the newcomer is not worth it. Least wanted first, and only those wanted less than half as often
    /// as the newcomer.
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
