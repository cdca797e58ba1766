//! A memory budget in bytes that all requests share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Notify;

/// A lease of at most this many bytes may use the whole budget. A larger one leaves a quarter of it
/// free, so that large requests never block small ones.
const SMALL: u64 = 64 * 1024;

/// A fixed number of bytes, shared by all leases.
pub(crate) struct Budget {
    total: u64,
    used: AtomicU64,
    freed: Notify,
}

impl Budget {
    pub(crate) fn new(total: u64) -> Arc<Self> {
        Arc::new(Self { total, used: AtomicU64::new(0), freed: Notify::new() })
    }

    /// An empty lease.
    pub(crate) fn lease(self: &Arc<Self>) -> Lease {
        Lease { budget: self.clone(), held: 0 }
    }

    #[cfg(test)]
    fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }
}

/// The most bytes that one lease can hold.
pub(crate) fn most_for_one(total: u64) -> u64 {
    (total - total / 4).max(SMALL.min(total))
}

/// Bytes taken from a budget, returned when the lease is dropped.
pub(crate) struct Lease {
    budget: Arc<Budget>,
    held: u64,
}

impl Lease {
    /// Takes `more` bytes if they are free.
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

    /// Takes `more` bytes, waiting at most `timeout` for them; false on timeout.
    pub(crate) async fn grow(&mut self, more: u64, timeout: Duration) -> bool {
        if self.try_grow(more) {
            return true;
        }
        let budget = self.budget.clone();
        let wait = async {
            loop {
                let freed = budget.freed.notified();
                let mut freed = std::pin::pin!(freed);
                // Registered before the attempt, so that bytes freed in between wake it.
                freed.as_mut().enable();
                if self.try_grow(more) {
                    return;
                }
                freed.await;
            }
        };
        tokio::time::timeout(timeout, wait).await.is_ok()
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
    async fn large_leases_leave_room_and_waiters_get_freed_bytes() {
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
