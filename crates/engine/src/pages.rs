//! KV pages: who holds which, and which may be reused.
//!
//! `Pool` is the only way to a page. It joins the `ledger`, which counts holders, with the
//! `tree`, which finds pages by the tokens that are in them.
//!
//! A device may have several page tables per seat ([`Kept`]): then a page of tokens has a page of each. Pages are the
//! same for all tables, so that what one gives back another can take.

pub(crate) mod ledger;
mod names;
mod states;
pub(crate) mod tree;

use crate::exec::{Kept, Page, SCRATCH_PAGE};
use crate::plant::{Plant, planted};
use crate::request::Token;
use crate::store::PageNote;
use ledger::Ledger;
pub use ledger::PageCounts;
use names::Names;
pub use names::{CacheEvent, Medium, PageKey};
use states::States;
use std::collections::VecDeque;
use std::sync::Arc;
use tree::{Found, Gone, Node, Tree};

/// All pages of a device but the scratch page, with or without a prefix tree over them.
pub(crate) struct Pool {
    ledger: Ledger,
    tree: Tree,
    page_size: u32,
    kept: Kept,
    cache: bool,
    /// Of the tree's hash.
    seed: u64,
    /// Grows whenever a page may have become available, so that a refused admission need not be
    /// tried again before anything changed.
    epoch: u64,
    /// Only where names or events are asked for.
    names: Option<Names>,
    idle: IdlePages,
    /// What the tree gave up last; kept to be reused.
    gone: Gone,
    /// Copies of what seats carry, where prefixes need them.
    states: States,
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

/// Where a sequence publishes next: below this node of the tree, which stays as long as the cursor; goes back through
/// [`Pool::close`].
#[derive(Debug, Default)]
pub(crate) struct Cursor(Node);

impl Cursor {
    /// `None` at the root.
    pub(crate) fn node(&self) -> Option<Node> {
        (self.0 != Node::NONE).then_some(self.0)
    }
}

/// A page of tokens in the prefix tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedPage {
    /// Its pages by table; the scratch page where one is gone.
    pub pages: Vec<Page>,
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
    /// A table: the pages of each page of tokens one after the other; the scratch page where no later token needs one.
    pub(crate) table: Vec<Page>,
    /// Pages of tokens.
    pub(crate) count: u32,
    /// Of these, from the first, those without the pages of windows.
    pub(crate) freed: u32,
    pub(crate) cursor: Cursor,
    /// The copy of what a seat carries behind them, kept for the caller.
    pub(crate) state: Option<u32>,
    /// Pages of tokens that the tree has, with and without what is needed to go on.
    pub(crate) reach: u32,
}

impl Pool {
    pub(crate) fn new(pages: u32, page_size: u32, kept: Kept, cache: bool, seed: u64) -> Self {
        let cached = if cache { pages } else { 0 };
        let (ledger, tree) = (Ledger::new(pages), Tree::new(cached, page_size, kept, seed));
        Self {
            ledger,
            tree,
            page_size,
            kept,
            cache,
            seed,
            epoch: 0,
            names: None,
            idle: IdlePages::default(),
            gone: Gone::default(),
            states: States::default(),
        }
    }

    /// Prefixes end where there is a copy of what a seat carries, for which the device has so many slots; 0 where they end
    /// anywhere.
    pub(crate) fn with_states(self, slots: u32, store: bool) -> Self {
        Self { states: States::new(slots).with_store(store && self.cache), ..self }
    }

    /// With `log`, collects what is cached and evicted; with `store`, what became idle.
    pub(crate) fn with_names(self, log: bool, store: bool) -> Self {
        let pages = self.ledger.counts().total;
        let nodes = self.tree.room();
        let names = (self.cache && (log || store)).then(|| Names::new(nodes, log, store));
        let queued = if store && self.cache { vec![false; pages as usize] } else { Vec::new() };
        Self { names, idle: IdlePages { queued, ..IdlePages::default() }, ..self }
    }

    /// The next page that lost its last reader, with what a store has to know.
    pub(crate) fn next_idle(&mut self) -> Option<(Page, PageNote)> {
        let names = self.names.as_ref()?;
        loop {
            let page = self.idle.pop()?;
            // It may have been evicted, and be in use for something else.
            if let Some(node) = self.ledger.node(page)
                && self.ledger.refs(page) == 0
            {
                let (parent, public) = names.note(node)?;
                let tokens = self.tree.tokens(node).into();
                return Some((page, PageNote { key: names.key(node), parent, tokens, public }));
            }
        }
    }

    /// The next copy of what a seat carried that may have to be saved, with what a store has to know: it counts as behind the page
    /// of this name, and does not need the pages before it.
    pub(crate) fn next_fresh_state(&mut self) -> Option<(u32, PageNote)> {
        let names = self.names.as_ref()?;
        let (slot, node) = self.states.next_fresh()?;
        let tokens = self.tree.tokens(node).into();
        Some((slot, PageNote { key: names.key(node), parent: None, tokens, public: false }))
    }

    /// It could not be saved now.
    pub(crate) fn fresh_state_again(&mut self, slot: u32) {
        self.states.fresh_again(slot);
    }

    /// The copy is being saved, and stays until [`Pool::state_saved`].
    pub(crate) fn begin_state_save(&mut self, slot: u32) {
        self.states.begin_save(slot);
    }

    pub(crate) fn state_saved(&mut self, slot: u32) {
        self.states.saved(slot);
        self.epoch += 1;
    }

    /// Copies of what seats carried that are being saved.
    pub(crate) fn states_saving(&self) -> usize {
        self.states.saving()
    }

    /// Other weights compute the pages from now on.
    pub(crate) fn renew(&mut self, weights: u64) {
        if let Some(names) = &mut self.names {
            names.renew(weights);
        }
    }

    /// The name with which the prefixes of a tenant begin.
    pub(crate) fn root(&self, tenant: u64) -> PageKey {
        self.names.as_ref().map_or_else(|| PageKey::root(tenant, 0), |names| names.root(tenant))
    }

    /// It could not be saved now.
    pub(crate) fn idle_again(&mut self, page: Page) {
        self.idle.push(page);
    }

    /// What was cached and evicted since the last call.
    pub(crate) fn take_events(&mut self) -> Vec<CacheEvent> {
        self.names.as_mut().map(Names::take).unwrap_or_default()
    }

    /// A page for one holder: a free one, else one of the least recently used pages without readers.
    pub(crate) fn take(&mut self) -> Option<Page> {
        self.make_free(1);
        self.ledger.take()
    }

    /// Adds the pages of one more page of tokens to a table, those of layers that see every token from `reserve` while
    /// there are some. False, with nothing changed, if there are not enough.
    pub(crate) fn grow(&mut self, table: &mut Vec<Page>, reserve: &mut Vec<Page>) -> bool {
        let reserved = self.kept.full.min(reserve.len() as u32);
        let more = self.kept.width() - reserved;
        self.make_free(more);
        if self.ledger.free() < more {
            return false;
        }
        table.extend(reserve.drain(reserve.len() - reserved as usize..));
        table.extend((0..more).filter_map(|_| self.ledger.take()));
        true
    }

    /// Evicts until so many pages are free, if it can. Then a few more are evicted for the next calls: their tree nodes
    /// are cache misses, which overlap when taken together.
    fn make_free(&mut self, pages: u32) {
        if self.ledger.free() >= pages {
            return;
        }
        let few = (self.ledger.counts().total / 1024).min(16);
        while self.ledger.free() < pages + few && self.evict() {}
    }

    /// Pages that are free or have no readers.
    pub(crate) fn available(&self) -> u32 {
        self.ledger.free() + self.ledger.counts().unread
    }

    /// Makes at least `pages` free by eviction; returns false if it cannot. Nothing is evicted when it
    /// is clear beforehand that it would not be enough.
    pub(crate) fn ensure(&mut self, pages: u32) -> bool {
        if self.available() < pages {
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
        let evicted = self.tree.evict(&mut self.gone);
        self.withdraw();
        evicted
    }

    /// Frees the pages that the tree gave up, and logs its nodes that went.
    fn withdraw(&mut self) {
        for page in self.gone.pages.drain(..) {
            self.ledger.withdraw(page);
        }
        for node in self.gone.nodes.drain(..) {
            self.states.forget(node);
            if let Some(names) = &mut self.names
                && !planted(Plant::SilentEviction)
            {
                names.remove(node);
            }
        }
    }

    /// One more holder.
    pub(crate) fn share(&mut self, page: Page) {
        if self.ledger.share(page) == 1
            && let Some(node) = self.ledger.node(page)
        {
            self.tree.pin(node, page);
        }
    }

    /// One holder fewer; without holders the page is free, or waits in the tree for the next.
    pub(crate) fn give(&mut self, page: Page) {
        if self.ledger.give(page) == 0 {
            self.epoch += 1;
            if let Some(node) = self.ledger.node(page) {
                self.tree.unpin(node, page);
                self.idle.push(page);
            }
        }
    }

    /// Gives the pages of a table back, the last first: the start of a sequence is more likely to be reused than its end.
    pub(crate) fn give_table(&mut self, table: &[Page]) {
        for &page in table.iter().rev().filter(|page| **page != SCRATCH_PAGE) {
            self.give(page);
        }
    }

    /// Whether its only holder may write into it.
    pub(crate) fn writable(&self, page: Page) -> bool {
        self.ledger.refs(page) == 1 && !self.ledger.published(page)
    }

    /// The longest cached prefix of `tokens` after which a sequence can go on, at most `most` pages of it: what a window
    /// before its end sees must be there.
    pub(crate) fn find(&mut self, tenant: u64, tokens: &[Token], most: u32) -> Match {
        let mut path = Vec::new();
        let count = self.walk(tenant, tokens, most, |node| path.push(node));
        self.hold(path, count, true)
    }

    /// The same without what a sequence needs to go on: all pages of `tokens` that the tree has, whatever is behind them.
    pub(crate) fn find_pages(&mut self, tenant: u64, tokens: &[Token], most: u32) -> Match {
        let mut path = Vec::new();
        self.walk(tenant, tokens, most, |node| path.push(node));
        let count = path.len() as u32;
        self.hold(path, count, false)
    }

    /// Holds the first `count` nodes of a path for the caller, and the state behind them if it is asked for.
    fn hold(&mut self, path: Vec<Node>, count: u32, state: bool) -> Match {
        let mut found = Match { count, reach: path.len() as u32, ..Match::default() };
        found.freed = self.kept.first_page(found.count * self.page_size, self.page_size);
        for (&node, index) in path[..found.count as usize].iter().zip(0..) {
            let pages = self.tree.pages(node);
            let seen = if index < found.freed { self.kept.full as usize } else { pages.len() };
            let from = found.table.len();
            found.table.extend(&pages[..seen]);
            found.table.resize(from + pages.len(), SCRATCH_PAGE);
        }
        for &page in found.table.iter().filter(|page| **page != SCRATCH_PAGE) {
            self.share(page);
        }
        if let Some(&node) = path[..found.count as usize].last() {
            self.tree.open(node);
            found.cursor = Cursor(node);
            if state {
                found.state = self.keep_state(node);
            }
        }
        found
    }

    /// Keeps the copy of what the tokens up to this node left, if there is one, until [`Pool::unpin_state`].
    pub(crate) fn keep_state(&mut self, node: Node) -> Option<u32> {
        let slot = self.states.of(node)?;
        self.states.pin(slot);
        Some(slot)
    }

    /// How many pages of `tokens` the tree has for a sequence that goes on after them.
    pub(crate) fn known(&self, tenant: u64, tokens: &[Token]) -> u32 {
        self.walk(tenant, tokens, u32::MAX, |_| {})
    }

    /// How many pages of `tokens` the tree has, with and without what is needed to go on.
    pub(crate) fn reach(&self, tenant: u64, tokens: &[Token]) -> u32 {
        let mut reach = 0;
        self.walk(tenant, tokens, u32::MAX, |_| reach += 1);
        reach
    }

    /// Visits the nodes of `tokens`, at most `most`, and returns after how many of them a sequence can go on.
    fn walk(&self, tenant: u64, tokens: &[Token], most: u32, mut visit: impl FnMut(Node)) -> u32 {
        if !self.cache {
            return 0;
        }
        let tenant = if planted(Plant::IgnoreTenant) { 0 } else { tenant };
        let mut at = self.tree.root(tenant);
        // Nodes in a row that have the pages of windows, up to the last one visited.
        let (mut known, mut row) = (0, 0);
        let pages = tokens.chunks_exact(self.page_size as usize).take(most as usize);
        for (page, count) in pages.zip(1..) {
            at = at.and_then(|node| self.tree.child(node, page));
            let Some(node) = at else { break };
            visit(node);
            if self.kept.windowed > 0 {
                row = if self.tree.has_window(node) { row + 1 } else { 0 };
                let seen = count - self.kept.first_page(count * self.page_size, self.page_size);
                if row < seen && !planted(Plant::ReadPast) {
                    continue;
                }
            }
            if self.states.are_needed() && self.states.of(node).is_none() {
                continue;
            }
            known = count;
        }
        known
    }

    /// Offers the pages of a full page of tokens whose content is confirmed, and moves the cursor below it. Where the tree
    /// has pages with the same tokens already, those stay and these remain private. False if it has no room for more.
    pub(crate) fn publish(
        &mut self,
        cursor: &mut Cursor,
        tenant: u64,
        tokens: &[Token],
        pages: &[Page],
    ) -> bool {
        if !self.cache {
            return true;
        }
        let tenant = if planted(Plant::IgnoreTenant) { 0 } else { tenant };
        let parent = cursor.node().unwrap_or_else(|| self.tree.root_or_new(tenant));
        let node = match self.tree.look(parent, tokens) {
            Ok(node) => node,
            // A page can be in the tree once; a planted bug may try a second time.
            Err(_) if self.ledger.published(pages[0]) => return true,
            Err(hash) => {
                let Some(node) = self.tree.insert(parent, hash, tokens) else { return false };
                if let Some(names) = &mut self.names {
                    names.insert(cursor.node(), tenant, tokens, node);
                }
                node
            }
        };
        for taken in self.tree.adopt(node, pages) {
            pages[taken].iter().for_each(|&page| self.ledger.publish(page, node));
        }
        self.tree.open(node);
        self.close(std::mem::replace(cursor, Cursor(node)));
        true
    }

    /// Room for a copy of what a seat carries, which this step makes.
    pub(crate) fn take_state(&mut self, step: u64) -> Option<u32> {
        let slot = self.states.take()?;
        self.states.touch(slot, step);
        Some(slot)
    }

    /// Room for a copy that the store makes, where all steps up to `done` are done.
    pub(crate) fn take_state_after(&mut self, done: u64) -> Option<u32> {
        self.states.take_after(done)
    }

    /// This step reads the copy.
    pub(crate) fn touch_state(&mut self, slot: u32, step: u64) {
        self.states.touch(slot, step);
    }

    /// The copy is of what the tokens up to this node left. A cursor at it or below it is open.
    pub(crate) fn attach_state(&mut self, node: Node, slot: u32) {
        self.states.attach(slot, node);
    }

    /// A copy that was kept by [`Pool::find`] is no longer needed.
    pub(crate) fn unpin_state(&mut self, slot: u32) {
        self.states.unpin(slot);
    }

    /// A copy that belongs to no page.
    pub(crate) fn release_state(&mut self, slot: u32) {
        self.states.release(slot);
    }

    /// The cursor of a second sequence with the same path.
    pub(crate) fn fork(&mut self, cursor: &Cursor) -> Cursor {
        if let Some(node) = cursor.node() {
            self.tree.open(node);
        }
        Cursor(cursor.0)
    }

    /// Gives a cursor back.
    pub(crate) fn close(&mut self, cursor: Cursor) {
        if let Some(node) = cursor.node() {
            self.tree.close(node, &mut self.gone);
            self.withdraw();
            // Its pages may be evicted now.
            self.epoch += 1;
        }
    }

    /// Forgets everything: the device's memory was lost.
    pub(crate) fn reset(&mut self) {
        let pages = self.ledger.counts().total;
        self.ledger = Ledger::new(pages);
        self.epoch += 1;
        self.states.reset();
        if let Some(names) = &mut self.names {
            names.clear();
        }
        let cached = if self.cache { pages } else { 0 };
        let new = Tree::new(cached, self.page_size, self.kept, self.seed);
        let old = std::mem::replace(&mut self.tree, new);
        if planted(Plant::KeepTree) {
            for Found { tenant, tokens, .. } in old.walk().into_iter().filter(|old| old.depth == 0)
            {
                let mut table = Vec::new();
                if self.grow(&mut table, &mut Vec::new()) {
                    let mut cursor = Cursor::default();
                    self.publish(&mut cursor, tenant, &tokens, &table);
                    self.close(cursor);
                    self.give_table(&table);
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

    /// Every cached page of tokens.
    pub(crate) fn cached(&self) -> Vec<CachedPage> {
        let page = |Found { tenant, depth, tokens, pages }: Found| {
            let start = depth * self.page_size;
            CachedPage { pages, tenant, start, tokens }
        };
        self.tree.walk().into_iter().map(page).collect()
    }

    /// Checks ledger and tree against each other, page by page; `cursors` are all that are open, `states` how many
    /// copies of what seats carry sequences save and are to begin with.
    pub(crate) fn audit<'a>(
        &self,
        cursors: impl Iterator<Item = &'a Cursor>,
        states: (usize, usize),
    ) -> Result<(), String> {
        self.ledger.audit()?;
        self.states.audit(states.0, states.1)?;
        self.tree.audit(|page| self.ledger.refs(page), cursors.filter_map(Cursor::node))
    }
}
