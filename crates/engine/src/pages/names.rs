//! Names of cached pages that mean the same in every process, and the log of what is cached where.

use super::tree::Node;
use crate::request::Token;

/// Names the content of a page: a hash of its tokens and of all tokens before it. Equal prefixes of one tenant have
/// equal names in every process; nobody can construct two prefixes with one name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageKey(pub [u8; 16]);

impl PageKey {
    /// Where the prefixes of a tenant begin. `weights` is 0 for the weights that the device began with.
    pub fn root(tenant: u64, weights: u64) -> PageKey {
        let mut hasher = blake3::Hasher::new_derive_key("dacapo 2026 names of KV pages");
        hasher.update(&tenant.to_le_bytes());
        if weights != 0 {
            hasher.update(&weights.to_le_bytes());
        }
        PageKey::of(&hasher)
    }

    /// The page of these tokens after this one.
    pub fn child(self, tokens: &[Token]) -> PageKey {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.0);
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        PageKey::of(&hasher)
    }

    fn of(hasher: &blake3::Hasher) -> PageKey {
        PageKey(*hasher.finalize().as_bytes().first_chunk().expect("a hash has 32 bytes"))
    }

    /// Its first eight bytes: the id of the block for routers.
    pub fn block(self) -> u64 {
        u64::from_be_bytes(*self.0.first_chunk().expect("a name has 16 bytes"))
    }
}

/// Where a cached page lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Medium {
    /// In the device's KV region: in the prefix tree.
    Device,
    /// In host memory.
    Host,
    /// In a file.
    Disk,
}

/// One change of what is cached. Only of pages without a tenant: the others are private to a key or a salt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// A page is complete and can be found.
    Stored {
        /// Its id.
        block: u64,
        /// The id of the page before it; `None` for the first page of a prompt.
        parent: Option<u64>,
        /// What is in it.
        tokens: Box<[Token]>,
        /// Where.
        medium: Medium,
    },
    /// A page is no longer there.
    Removed {
        /// Its id.
        block: u64,
        /// Where it was.
        medium: Medium,
    },
    /// Nothing is cached any more.
    Cleared,
}

/// The names of all nodes of the tree, and what changed since the log was last taken.
pub(crate) struct Names {
    keys: Vec<PageKey>,
    /// Nodes whose event was logged, so that their removal is logged too.
    told: Vec<bool>,
    log: Option<Vec<CacheEvent>>,
    /// The page before each, and whether events tell of it; only for a store.
    notes: Option<Vec<(Option<PageKey>, bool)>>,
    /// Which weights compute the pages.
    weights: u64,
}

impl Names {
    /// For so many nodes; with `log` changes are collected for [`Names::take`].
    pub(crate) fn new(nodes: usize, log: bool, store: bool) -> Names {
        Names {
            keys: vec![PageKey::default(); nodes],
            told: vec![false; nodes],
            log: log.then(Vec::new),
            notes: store.then(|| vec![(None, false); nodes]),
            weights: 0,
        }
    }

    /// Other weights compute the pages from now on; none is in the tree.
    pub(crate) fn renew(&mut self, weights: u64) {
        self.weights = weights;
    }

    /// Where the prefixes of a tenant begin.
    pub(crate) fn root(&self, tenant: u64) -> PageKey {
        PageKey::root(tenant, self.weights)
    }

    /// The name before a page's, and whether events tell of it; `None` without a store.
    pub(crate) fn note(&self, node: Node) -> Option<(Option<PageKey>, bool)> {
        Some(self.notes.as_ref()?[node.index()])
    }

    pub(crate) fn key(&self, node: Node) -> PageKey {
        self.keys[node.index()]
    }

    /// A page entered the tree, after `parent` or as a first page.
    pub(crate) fn insert(
        &mut self,
        parent: Option<Node>,
        tenant: u64,
        tokens: &[Token],
        node: Node,
    ) {
        let above = parent.map(|parent| self.key(parent));
        let key = above.unwrap_or_else(|| self.root(tenant)).child(tokens);
        self.keys[node.index()] = key;
        if let Some(notes) = &mut self.notes {
            notes[node.index()] = (above, tenant == 0);
        }
        let (block, parent) = (key.block(), above.map(PageKey::block));
        if let Some(log) = self.log.as_mut().filter(|_| tenant == 0) {
            let tokens = tokens.into();
            log.push(CacheEvent::Stored { block, parent, tokens, medium: Medium::Device });
            self.told[node.index()] = true;
        }
    }

    /// A page left the tree.
    pub(crate) fn remove(&mut self, node: Node) {
        self.forget(node.index());
    }

    fn forget(&mut self, node: usize) {
        let block = self.keys[node].block();
        if std::mem::take(&mut self.told[node])
            && let Some(log) = &mut self.log
        {
            log.push(CacheEvent::Removed { block, medium: Medium::Device });
        }
    }

    /// Every page left the tree.
    pub(crate) fn clear(&mut self) {
        (0..self.keys.len()).for_each(|node| self.forget(node));
    }

    pub(crate) fn take(&mut self) -> Vec<CacheEvent> {
        self.log.as_mut().map(std::mem::take).unwrap_or_default()
    }
}
