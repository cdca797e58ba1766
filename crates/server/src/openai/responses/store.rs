//! Finished responses, kept for requests that continue them: a bounded number of bounded size, the
//! oldest removed first, each for the client that made it.

use serde_json::Value;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

/// A finished response.
pub(crate) struct Stored {
    /// The client that made it.
    pub(crate) owner: u64,
    /// The conversation so far, as messages, with its answer and without its system prompt.
    pub(crate) messages: Vec<Value>,
    /// The response itself.
    pub(crate) response: Value,
    /// Approximate bytes of it.
    pub(crate) bytes: u64,
}

#[derive(Default)]
struct Kept {
    by_id: HashMap<String, Arc<Stored>>,
    order: VecDeque<String>,
    bytes: u64,
}

/// All kept responses.
pub(crate) struct Store {
    kept: Mutex<Kept>,
    most: u64,
    most_bytes: u64,
}

impl Store {
    /// An empty store for `most` responses of `most_bytes` bytes together.
    pub(crate) fn new(most: u64, most_bytes: u64) -> Self {
        Self { kept: Mutex::default(), most, most_bytes }
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A response of this client.
    pub(crate) fn get(&self, owner: u64, id: &str) -> Option<Arc<Stored>> {
        self.lock().by_id.get(id).filter(|stored| stored.owner == owner).cloned()
    }

    /// Keeps a response; removes the oldest ones until it fits. One that never fits is not kept.
    pub(crate) fn put(&self, id: String, stored: Stored) {
        if stored.bytes > self.most_bytes {
            return;
        }
        let mut kept = self.lock();
        kept.bytes += stored.bytes;
        kept.order.push_back(id.clone());
        kept.by_id.insert(id, Arc::new(stored));
        while kept.bytes > self.most_bytes || kept.by_id.len() as u64 > self.most {
            let Some(oldest) = kept.order.pop_front() else { break };
            kept.remove(&oldest);
        }
    }

    /// Removes a response of this client; false if there is none.
    pub(crate) fn delete(&self, owner: u64, id: &str) -> bool {
        let mut kept = self.lock();
        let found = kept.by_id.get(id).is_some_and(|stored| stored.owner == owner);
        if found {
            kept.order.retain(|one| one != id);
            kept.remove(id);
        }
        found
    }
}

impl Kept {
    fn remove(&mut self, id: &str) {
        if let Some(stored) = self.by_id.remove(id) {
            self.bytes -= stored.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(owner: u64, bytes: u64) -> Stored {
        Stored { owner, messages: Vec::new(), response: Value::Null, bytes }
    }

    #[test]
    fn the_oldest_are_removed_and_clients_are_separate() {
        let store = Store::new(3, 100);
        for id in ["a", "b", "c", "d"] {
            store.put(id.into(), stored(1, 10));
        }
        assert!(store.get(1, "a").is_none() && store.get(1, "b").is_some());
        assert!(store.get(2, "b").is_none());
        store.put("large".into(), stored(1, 101));
        assert!(store.get(1, "large").is_none());
        store.put("e".into(), stored(1, 85));
        assert!(store.get(1, "c").is_none() && store.get(1, "d").is_some());
        assert!(!store.delete(2, "e") && store.delete(1, "e") && !store.delete(1, "e"));
        assert_eq!(store.lock().bytes, 10);
        assert_eq!(store.lock().order.len(), 1);
    }
}
