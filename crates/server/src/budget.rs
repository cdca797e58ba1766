//! One sum of bytes that all requests share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Notify;

/// A holder of no more than this may use the whole budget; one of more leaves a quarter of it to
/// others, so that large ones never shut out small ones.
const SMALL: u64 = 64 * 1024;

/// So many bytes and no more, whoever has them.
pub(crate) struct Budget {
    total: u64,
    used: AtomicU64,
    freed: Notify,
}

impl Budget {
    pub(crate) fn new(total: u64) -> Arc<Self> {
        Arc::new(Self { total, used: AtomicU64::new(0), freed: Notify::new() })
    }

    /// Nothing yet.
    pub(crate) fn lease(self: &Arc<Self>) -> Lease {
        Lease { budget: self.clone(), held: 0 }
    }

    #[cfg(test)]
    fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }
}

/// The most that one holder can ever get of a budget.
pub(crate) fn most_for_one(total: u64) -> u64 {
    (total - total / 4).max(SMALL.min(total))
}

/// Bytes of a budget, given back when it is dropped.
pub(crate) struct Lease {
    budget: Arc<Budget>,
    held: u64,
}

impl Lease {
    /// Takes `more` bytes if they are there.
    pub(crate) fn try_grow(&mut self, more: u64) -> bool {
        let held = self.held.saturating_add(more);
        let total = self.budget.total;
        let most = if held <= SMALL { total } else { most_for_one(total) };
        let grown = self.budget.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(more).filter(|used| *used <= most)
        });
        if grown.is_ok() {
            self.held = held;
        }
        grown.is_ok()
    }

    /// Takes `more` bytes, waiting for them a while; false when they did not come.
    pub(crate) async fn grow(&mut self, more: u64, patience: Duration) -> bool {
        if self.try_grow(more) {
            return true;
        }
        let budget = self.budget.clone();
        let wait = async {
            loop {
                let freed = budget.freed.notified();
                let mut freed = std::pin::pin!(freed);
                // Before it is tried: what is freed in between is not missed.
                freed.as_mut().enable();
                if self.try_grow(more) {
                    return;
                }
                freed.await;
            }
        };
        tokio::time::timeout(patience, wait).await.is_ok()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.held, Ordering::Relaxed);
        self.budget.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn large_holders_leave_room_and_those_who_wait_get_what_is_freed() {
        let budget = Budget::new(1 << 20);
        let (mut large, mut small) = (budget.lease(), budget.lease());
        assert!(!large.try_grow(1 << 20));
        assert!(large.try_grow(3 << 18));
        assert!(!large.try_grow(1));
        assert!(small.try_grow(SMALL) && !small.try_grow(1));
        assert_eq!(budget.used(), (3 << 18) + SMALL);
        let mut waits = budget.lease();
        assert!(!waits.grow(SMALL + 1, Duration::from_millis(1)).await);
        let waiting =
            tokio::spawn(async move { waits.grow(SMALL + 1, Duration::from_secs(60)).await });
        tokio::task::yield_now().await;
        drop(large);
        assert!(waiting.await.unwrap());
        drop(small);
        assert_eq!(budget.used(), 0);
    }
}
