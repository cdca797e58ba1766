//! Which calls are running under which names, so that a client can abort them by name.

use crate::http::auth::Caller;
use engine::request::RequestId;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

/// A name that a client gave; those of different callers do not meet.
type Name = (Caller, String);

/// The named calls that are running.
#[derive(Clone, Default)]
pub(super) struct Running(Arc<Mutex<HashMap<Name, Range<u64>>>>);

impl Running {
    fn lock(&self) -> MutexGuard<'_, HashMap<Name, Range<u64>>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Enters a call until the result is dropped; `None` if the name is in use. An empty name is none.
    pub(super) fn enter(&self, caller: Caller, name: String) -> Option<Entry> {
        if name.is_empty() {
            return Some(Entry(None));
        }
        let name = (caller, name);
        let mut all = self.lock();
        if all.contains_key(&name) {
            return None;
        }
        all.insert(name.clone(), 0..0);
        Some(Entry(Some((self.clone(), name))))
    }

    /// The engine's requests of a call.
    pub(super) fn find(&self, caller: Caller, name: &str) -> Vec<RequestId> {
        let ids = self.lock().get(&(caller, name.to_string())).cloned();
        ids.into_iter().flatten().map(RequestId).collect()
    }
}

/// A call in the list.
pub(super) struct Entry(Option<(Running, Name)>);

impl Entry {
    /// Says which requests of the engine belong to it.
    pub(super) fn set(&self, ids: Range<u64>) {
        if let Some((all, name)) = &self.0 {
            all.lock().insert(name.clone(), ids);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some((all, name)) = &self.0 {
            all.lock().remove(name);
        }
    }
}
