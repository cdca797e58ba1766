//! Names of cached pages that mean the same in every process, and the log of what is cached where.

use crate::exec::Page;
use crate::request::Token;

/// Names the content of a page: a hash of its tokens and of all tokens before it. Equal prefixes of one tenant have
/// equal names in every process; nobody can construct two prefixes with one name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageKey(pub [u8; 16]);

impl PageKey {
    /// Where the prefixes of a tenant begin.
    pub fn root(tenant: u64) -> PageKey {
        let mut hasher = blake3::Hasher::new_derive_key("dacapo 2026 names of KV pages");
        hasher.update(&tenant.to_le_bytes());
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

/// The names of all pages in the tree, and what changed since the log was last taken.
pub(crate) struct Names {
    keys: Vec<PageKey>,
    /// Pages whose event was logged, so that their removal is logged too.
    told: Vec<bool>,
    log: Option<Vec<CacheEvent>>,
    /// The page before each, and whether events tell of it; only for a store.
    notes: Option<Vec<(Option<PageKey>, bool)>>,
}

impl Names {
    /// For so many pages; with `log` changes are collected for [`Names::take`].
    pub(crate) fn new(pages: u32, log: bool, store: bool) -> Names {
        let pages = pages as usize;
        Names {
            keys: vec![PageKey::default(); pages],
            told: vec![false; pages],
            log: log.then(Vec::new),
            notes: store.then(|| vec![(None, false); pages]),
        }
    }

    /// The name before a page's, and whether events tell of it; `None` without a store.
    pub(crate) fn note(&self, page: Page) -> Option<(Option<PageKey>, bool)> {
        Some(self.notes.as_ref()?[page.0 as usize])
    }

    pub(crate) fn key(&self, page: Page) -> PageKey {
        self.keys[page.0 as usize]
    }

    /// A page entered the tree, after `parent` or as a first page.
    pub(crate) fn insert(
        &mut self,
        parent: Option<Page>,
        tenant: u64,
        tokens: &[Token],
        page: Page,
    ) {
        let above = parent.map(|parent| self.key(parent));
        let key = above.unwrap_or_else(|| PageKey::root(tenant)).child(tokens);
        self.keys[page.0 as usize] = key;
        if let Some(notes) = &mut self.notes {
            notes[page.0 as usize] = (above, tenant == 0);
        }
        let (block, parent) = (key.block(), above.map(PageKey::block));
        if let Some(log) = self.log.as_mut().filter(|_| tenant == 0) {
            let tokens = tokens.into();
            log.push(CacheEvent::Stored { block, parent, tokens, medium: Medium::Device });
            self.told[page.0 as usize] = true;
        }
    }

    /// A page left the tree.
    pub(crate) fn remove(&mut self, page: Page) {
        let block = self.key(page).block();
        if std::mem::take(&mut self.told[page.0 as usize])
            && let Some(log) = &mut self.log
        {
            log.push(CacheEvent::Removed { block, medium: Medium::Device });
        }
    }

    /// Every page left the tree.
    pub(crate) fn clear(&mut self) {
        (0..self.keys.len() as u32).for_each(|page| self.remove(Page(page)));
    }

    pub(crate) fn take(&mut self) -> Vec<CacheEvent> {
        self.log.as_mut().map(std::mem::take).unwrap_or_default()
    }
}
