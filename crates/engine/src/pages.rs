//! KV pages: who holds which, and which may be reused.
//!
//! `Pool` is the only way to a page. It joins the `ledger`, which counts holders, with the
//! `tree`, which finds a page by the tokens that are in it.

pub(crate) mod ledger;
mod names;
pub(crate) mod tree;

use crate::exec::Page;
use crate::plant::{Plant, planted};
use crate::request::Token;
use crate::store::PageNote;
use ledger::Ledger;
pub use ledger::PageCounts;
use names::Names;
pub use names::{CacheEvent, Medium, PageKey};
use std::collections::VecDeque;
use std::sync::Arc;
use tree::{Found, Node, Tree};

/// All pages of a device but the scratch page, with or without a prefix tree over them.
pub(crate) struct Pool {
    ledger: Ledger,
    tree: Tree,
    page_size: u32,
    cache: bool,
    /// Of the tree's hash.
    seed: u64,
    /// Grows whenever a page may have become available, so that a refused admission need not be
    /// tried again before anything changed.
    epoch: u64,
    /// Only where names or events are asked for.
    names: Option<Names>,
    idle: IdlePages,
}

/// Pages that have lost their last reader, and may have to be saved. Each is in the line once.
#[derive(Default)]
struct IdlePages {
    line: VecDeque<Page>,
    queued: Vec<bool>,
}

impl IdlePages {
    fn push(&mut self, page: Page) {
        if let Some(queued) = self.queued.get_mut(page.0 as usize)
            && !std::mem::replace(queued, true)
        {
            self.line.push_back(page);
        }
    }

    fn pop(&mut self) -> Option<Page> {
        let page = self.line.pop_front()?;
        self.queued[page.0 as usize] = false;
        Some(page)
    }
}

/// Where a sequence publishes next: below this node of the tree. Holds the node's page, so that the
/// path to it cannot be evicted; goes back through [`Pool::close`].
#[derive(Debug, Default)]
pub(crate) struct Cursor(Node);

impl Cursor {
    /// `None` at the root.
    fn node(&self) -> Option<Node> {
        (self.0 != Node::NONE).then_some(self.0)
    }
}

/// A page of the prefix tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedPage {
    /// Which.
    pub page: Page,
    /// Whose.
    pub tenant: u64,
    /// The position of its first token.
    pub start: u32,
    /// What is in it.
    pub tokens: Arc<[Token]>,
}

/// The cached prefix of a prompt. The pages and the cursor are held for the caller.
#[derive(Debug, Default)]
pub(crate) struct Match {
    pub(crate) pages: Vec<Page>,
    pub(crate) cursor: Cursor,
}

impl Pool {
    pub(crate) fn new(pages: u32, page_size: u32, cache: bool, seed: u64) -> Self {
        let cached = if cache { pages } else { 0 };
        let (ledger, tree) = (Ledger::new(pages), Tree::new(cached, page_size, seed));
        Self {
            ledger,
            tree,
            page_size,
            cache,
            seed,
            epoch: 0,
            names: None,
            idle: IdlePages::default(),
        }
    }

    /// With `log`, collects what is cached and evicted; with `store`, what became idle.
    pub(crate) fn with_names(self, log: bool, store: bool) -> Self {
        let pages = self.ledger.counts().total;
        let names = (self.cache && (log || store)).then(|| Names::new(pages, log, store));
        let queued = if store && self.cache { vec![false; pages as usize] } else { Vec::new() };
        Self { names, idle: IdlePages { queued, ..IdlePages::default() }, ..self }
    }

    /// The next page that lost its last reader, with what a store has to know.
    pub(crate) fn next_idle(&mut self) -> Option<(Page, PageNote)> {
        let names = self.names.as_ref()?;
        loop {
            let page = self.idle.pop()?;
            // It may have been evicted, and be in use for something else.
            if self.ledger.published(page) && self.ledger.refs(page) == 0 {
                let (parent, public) = names.note(page)?;
                let tokens = self.tree.tokens(Node::of(page)).into();
                return Some((page, PageNote { key: names.key(page), parent, tokens, public }));
            }
        }
    }

    /// It could not be saved now.
    pub(crate) fn idle_again(&mut self, page: Page) {
        self.idle.push(page);
    }

    /// What was cached and evicted since the last call.
    pub(crate) fn take_events(&mut self) -> Vec<CacheEvent> {
        self.names.as_mut().map(Names::take).unwrap_or_default()
    }

    /// A page for one holder: a free one, else the least recently used page without readers. Then a few more
    /// are evicted for the next calls: their tree nodes are cache misses, which overlap when taken together.
    pub(crate) fn take(&mut self) -> Option<Page> {
        if self.ledger.free() == 0 {
            let few = (self.ledger.counts().total / 1024).min(16);
            for _ in 0..=few {
                self.evict();
            }
        }
        self.ledger.take()
    }

    /// Makes at least `pages` free by eviction; returns false if it cannot. Nothing is evicted when it
    /// is clear beforehand that it would not be enough.
    pub(crate) fn ensure(&mut self, pages: u32) -> bool {
        if self.ledger.free() + self.tree.unread() < pages {
            return false;
        }
        while self.ledger.free() < pages {
            if !self.evict() {
                return false;
            }
        }
        true
    }

    fn evict(&mut self) -> bool {
        let Some(page) = self.tree.evict() else { return false };
        self.ledger.withdraw(page);
        if let Some(names) = &mut self.names
            && !planted(Plant::SilentEviction)
        {
            names.remove(page);
        }
        true
    }

    /// One more holder.
    pub(crate) fn share(&mut self, page: Page) {
        if self.ledger.share(page) == 1 && self.ledger.published(page) {
            self.tree.pin(Node::of(page));
        }
    }

    /// One holder fewer; without holders the page is free, or waits in the tree for the next.
    pub(crate) fn give(&mut self, page: Page) {
        if self.ledger.give(page) == 0 {
            self.epoch += 1;
            if self.ledger.published(page) {
                self.tree.unpin(Node::of(page));
                self.idle.push(page);
            }
        }
    }

    /// Whether its only holder may write into it.
    pub(crate) fn writable(&self, page: Page) -> bool {
        self.ledger.refs(page) == 1 && !self.ledger.published(page)
    }

    /// The longest cached prefix of `tokens`, at most `most` pages of it.
    pub(crate) fn find(&mut self, tenant: u64, tokens: &[Token], most: u32) -> Match {
        let mut found = Match::default();
        if !self.cache {
            return found;
        }
        let tenant = if planted(Plant::IgnoreTenant) { 0 } else { tenant };
        let mut at = self.tree.root(tenant);
        for chunk in tokens.chunks_exact(self.page_size as usize).take(most as usize) {
            let Some(next) = at.and_then(|node| self.tree.child(node, chunk)) else { break };
            let page = self.tree.page(next);
            self.share(page);
            found.pages.push(page);
            at = Some(next);
        }
        if let (Some(node), Some(&page)) = (at, found.pages.last()) {
            self.share(page);
            found.cursor = Cursor(node);
        }
        found
    }

    /// How many pages of `tokens` the tree has.
    pub(crate) fn known(&self, tenant: u64, tokens: &[Token]) -> u32 {
        let mut at = self.tree.root(tenant);
        let pages = tokens.chunks_exact(self.page_size as usize);
        let known = pages.map_while(|page| {
            at = at.and_then(|node| self.tree.child(node, page));
            at
        });
        known.count() as u32
    }

    /// Offers a full page whose content is confirmed, and moves the cursor below it. When the tree
    /// has a page with the same tokens already, that one stays and this one remains private.
    pub(crate) fn publish(
        &mut self,
        cursor: &mut Cursor,
        tenant: u64,
        tokens: &[Token],
        page: Page,
    ) {
        if !self.cache {
            return;
        }
        let tenant = if planted(Plant::IgnoreTenant) { 0 } else { tenant };
        let parent = cursor.node().unwrap_or_else(|| self.tree.root_or_new(tenant));
        let node = match self.tree.look(parent, tokens) {
            Ok(node) => node,
            // A page can be in the tree once; a planted bug may try a second time.
            Err(_) if self.ledger.published(page) => return,
            Err(hash) => {
                self.ledger.publish(page);
                if let Some(names) = &mut self.names {
                    let above = cursor.node().map(|node| self.tree.page(node));
                    names.insert(above, tenant, tokens, page);
                }
                self.tree.insert(parent, hash, tokens, page)
            }
        };
        self.share(self.tree.page(node));
        self.close(std::mem::replace(cursor, Cursor(node)));
    }

    /// The cursor of a second sequence with the same path.
    pub(crate) fn fork(&mut self, cursor: &Cursor) -> Cursor {
        if let Some(node) = cursor.node() {
            self.share(self.tree.page(node));
        }
        Cursor(cursor.0)
    }

    /// Gives back what a cursor holds.
    pub(crate) fn close(&mut self, cursor: Cursor) {
        if let Some(node) = cursor.node() {
            self.give(self.tree.page(node));
        }
    }

    /// Forgets everything: the device's memory was lost.
    pub(crate) fn reset(&mut self) {
        let pages = self.ledger.counts().total;
        self.ledger = Ledger::new(pages);
        self.epoch += 1;
        if let Some(names) = &mut self.names {
            names.clear();
        }
        let cached = if self.cache { pages } else { 0 };
        let new = Tree::new(cached, self.page_size, self.seed);
        let old = std::mem::replace(&mut self.tree, new);
        if planted(Plant::KeepTree) {
            for Found { tenant, depth, tokens, .. } in old.walk() {
                if depth == 0
                    && let Some(page) = self.ledger.take()
                {
                    let root = self.tree.root_or_new(tenant);
                    if let Err(hash) = self.tree.look(root, &tokens) {
                        self.ledger.publish(page);
                        self.tree.insert(root, hash, &tokens, page);
                    }
                    self.give(page);
                }
            }
        }
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(crate) fn counts(&self) -> PageCounts {
        self.ledger.counts()
    }

    pub(crate) fn refs(&self, page: Page) -> u32 {
        self.ledger.refs(page)
    }

    /// The page a cursor holds.
    pub(crate) fn cursor_page(&self, cursor: &Cursor) -> Option<Page> {
        cursor.node().map(|node| self.tree.page(node))
    }

    /// Every cached page.
    pub(crate) fn cached(&self) -> Vec<CachedPage> {
        let page = |Found { tenant, depth, tokens, page }: Found| {
            let start = depth * self.page_size;
            CachedPage { page, tenant, start, tokens }
        };
        self.tree.walk().into_iter().map(page).collect()
    }

    /// Checks ledger and tree against each other, page by page.
    pub(crate) fn audit(&self) -> Result<(), String> {
        self.ledger.audit()?;
        self.tree.audit(|page| self.ledger.refs(page))
    }
}
