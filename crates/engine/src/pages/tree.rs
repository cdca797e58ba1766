//! The prefix tree: pages found by the tokens in them and before them.
//!
//! A radix tree with pages as digits: each edge is one page of tokens, so a node stands for a whole
//! prefix. Tenants have separate roots. Only leaves that no sequence reads can be evicted, the
//! least recently used first; a parent becomes a leaf when its last child goes.

use crate::exec::{Page, SCRATCH_PAGE};
use crate::plant::{Plant, planted};
use crate::request::Token;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Names a node while it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Node(u32);

/// One cached page: whose, how many pages before it, and what is in it.
pub(crate) struct Found {
    pub(crate) tenant: u64,
    pub(crate) depth: u32,
    pub(crate) tokens: Arc<[Token]>,
    pub(crate) page: Page,
}

#[derive(Default)]
pub(crate) struct Tree {
    nodes: Vec<Entry>,
    vacant: Vec<Node>,
    roots: BTreeMap<u64, Node>,
    /// Leaves that no sequence reads, by last use.
    idle: BTreeSet<(u64, Node)>,
    /// Nodes that no sequence reads, leaves or not.
    unread: u32,
    clock: u64,
}

struct Entry {
    /// `None` for a root.
    parent: Option<Node>,
    tenant: u64,
    tokens: Arc<[Token]>,
    page: Page,
    children: BTreeMap<Arc<[Token]>, Node>,
    used: u64,
    pinned: bool,
}

impl Tree {
    pub(crate) fn root(&self, tenant: u64) -> Option<Node> {
        self.roots.get(&tenant).copied()
    }

    pub(crate) fn root_or_new(&mut self, tenant: u64) -> Node {
        if let Some(root) = self.root(tenant) {
            return root;
        }
        let root = self.place(Entry {
            parent: None,
            tenant,
            tokens: Arc::from([]),
            page: SCRATCH_PAGE,
            children: BTreeMap::new(),
            used: 0,
            pinned: true,
        });
        self.roots.insert(tenant, root);
        root
    }

    pub(crate) fn child(&self, node: Node, tokens: &[Token]) -> Option<Node> {
        self.entry(node).children.get(tokens).copied()
    }

    pub(crate) fn page(&self, node: Node) -> Page {
        self.entry(node).page
    }

    /// Pages nobody reads. Nearly all can be evicted: a page nobody reads below which somebody
    /// reads a page that was computed twice cannot.
    pub(crate) fn unread(&self) -> u32 {
        self.unread
    }

    /// A new child, pinned, because its publisher holds the page.
    pub(crate) fn insert(&mut self, parent: Node, tokens: &[Token], page: Page) -> Node {
        let tokens: Arc<[Token]> = tokens.into();
        let (tenant, used, pinned) =
            (self.entry(parent).tenant, self.entry(parent).used, self.entry(parent).pinned);
        if !pinned {
            self.idle.remove(&(used, parent));
        }
        self.clock += 1;
        let node = self.place(Entry {
            parent: Some(parent),
            tenant,
            tokens: tokens.clone(),
            page,
            children: BTreeMap::new(),
            used: self.clock,
            pinned: true,
        });
        self.entry_mut(parent).children.insert(tokens, node);
        node
    }

    /// A first reader came.
    pub(crate) fn pin(&mut self, node: Node) {
        let entry = self.entry_mut(node);
        entry.pinned = true;
        let used = entry.used;
        self.idle.remove(&(used, node));
        self.unread -= 1;
    }

    /// The last reader left.
    pub(crate) fn unpin(&mut self, node: Node) {
        self.clock += 1;
        let clock = self.clock;
        let entry = self.entry_mut(node);
        entry.pinned = false;
        entry.used = clock;
        self.unread += 1;
        self.rest(node);
    }

    /// Marks a node as used now.
    pub(crate) fn touch(&mut self, node: Node) {
        self.clock += 1;
        let clock = self.clock;
        let entry = self.entry_mut(node);
        let before = std::mem::replace(&mut entry.used, clock);
        if self.idle.remove(&(before, node)) {
            self.idle.insert((clock, node));
        }
    }

    /// Removes the least recently used leaf nobody reads; its page is the caller's to free.
    pub(crate) fn evict(&mut self) -> Option<Page> {
        let leaf = match self.idle.pop_first() {
            Some((_, leaf)) => leaf,
            None if planted(Plant::EvictReferenced) => self.any_leaf()?,
            None => return None,
        };
        let entry = self.entry_mut(leaf);
        let (parent, page) = (entry.parent?, entry.page);
        let tokens = std::mem::replace(&mut entry.tokens, Arc::from([]));
        if !entry.pinned {
            self.unread -= 1;
        }
        self.vacant.push(leaf);
        self.entry_mut(parent).children.remove(&tokens);
        if self.entry(parent).parent.is_none() {
            if self.entry(parent).children.is_empty() {
                let tenant = self.entry(parent).tenant;
                self.roots.remove(&tenant);
                self.vacant.push(parent);
            }
        } else {
            self.rest(parent);
        }
        Some(page)
    }

    /// Makes a node evictable if it is a leaf without readers.
    fn rest(&mut self, node: Node) {
        let entry = self.entry(node);
        if !entry.pinned && entry.children.is_empty() {
            self.idle.insert((entry.used, node));
        }
    }

    fn any_leaf(&self) -> Option<Node> {
        let mut node = *self.roots.values().next()?;
        while let Some(&child) = self.entry(node).children.values().next() {
            node = child;
        }
        Some(node)
    }

    fn place(&mut self, entry: Entry) -> Node {
        if let Some(node) = self.vacant.pop() {
            *self.entry_mut(node) = entry;
            return node;
        }
        self.nodes.push(entry);
        Node(self.nodes.len() as u32 - 1)
    }

    fn entry(&self, node: Node) -> &Entry {
        &self.nodes[node.0 as usize]
    }

    fn entry_mut(&mut self, node: Node) -> &mut Entry {
        &mut self.nodes[node.0 as usize]
    }

    /// Every page, parents before children.
    pub(crate) fn walk(&self) -> Vec<Found> {
        let mut found = Vec::new();
        let mut open: Vec<(Node, u32)> = self.roots.values().map(|&root| (root, 0)).collect();
        while let Some((node, depth)) = open.pop() {
            for &child in self.entry(node).children.values() {
                let entry = self.entry(child);
                let (tenant, page) = (entry.tenant, entry.page);
                found.push(Found { tenant, depth, tokens: entry.tokens.clone(), page });
                open.push((child, depth + 1));
            }
        }
        found
    }

    /// Whether pins agree with holders and only idle leaves can be evicted.
    pub(crate) fn audit(&self, refs: impl Fn(Page) -> u32) -> Result<(), String> {
        let mut unread = 0;
        let mut open: Vec<Node> = self.roots.values().copied().collect();
        while let Some(node) = open.pop() {
            let entry = self.entry(node);
            open.extend(entry.children.values());
            if entry.parent.is_none() {
                continue;
            }
            let read = refs(entry.page) > 0;
            unread += u32::from(!read);
            if read != entry.pinned {
                return Err(format!("{:?} is read: {read}, pinned: {}", entry.page, entry.pinned));
            }
            let idle = self.idle.contains(&(entry.used, node));
            if idle != (!read && entry.children.is_empty()) {
                return Err(format!("{:?} is on the wrong side of eviction", entry.page));
            }
        }
        if unread != self.unread {
            return Err(format!("{unread} cached pages are unread, counted {}", self.unread));
        }
        Ok(())
    }
}
