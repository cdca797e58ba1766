//! The prefix tree: pages found by the tokens in them and before them.
//!
//! A radix tree with pages as digits: each edge is one page of tokens, so a node stands for a whole
//! prefix. Tenants have separate roots. Only leaves that no sequence reads can be evicted, the
//! least recently used first; a parent becomes a leaf when its last child goes.

use crate::exec::{Page, SCRATCH_PAGE};
use crate::plant::{Plant, planted};
use crate::request::Token;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

/// Names a node while it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Node(u32);

/// Finds a child: a hash of its parent and its tokens. One table for the whole tree, because most nodes
/// have one child and a step publishes and evicts many: a table each would be an allocation each.
type Edge = u64;

fn edge(parent: Node, tokens: &[Token]) -> Edge {
    let words = std::iter::once(parent.0).chain(tokens.iter().copied());
    let hash = words.fold(0u64, |hash, word| {
        (hash.rotate_left(23) ^ u64::from(word)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
    });
    hash ^ hash >> 32
}

/// Edges are hashes already.
#[derive(Default)]
struct Hashed(u64);

impl Hasher for Hashed {
    fn write(&mut self, _: &[u8]) {
        unreachable!("an edge is one word");
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = word;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// One cached page: whose, how many pages before it, and what is in it.
pub(crate) struct Found {
    pub(crate) tenant: u64,
    pub(crate) depth: u32,
    pub(crate) tokens: Arc<[Token]>,
    pub(crate) page: Page,
}

pub(crate) struct Tree {
    page_size: usize,
    nodes: Vec<Entry>,
    /// A page of tokens per node, in the order of the nodes: a step publishes and evicts many pages, and
    /// an allocation each would be most of what that costs.
    tokens: Vec<Token>,
    vacant: Vec<Node>,
    /// Two nodes of equal hash take neighbouring ones. When the first goes, the second is no longer
    /// found; it is then evicted in its turn.
    edges: HashMap<Edge, Node, BuildHasherDefault<Hashed>>,
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
    page: Page,
    /// How it is found; nothing finds a root.
    edge: Edge,
    children: u32,
    used: u64,
    pinned: bool,
    /// Whether it is part of the tree.
    lives: bool,
}

impl Tree {
    pub(crate) fn new(page_size: u32) -> Self {
        Self {
            page_size: page_size as usize,
            nodes: Vec::new(),
            tokens: Vec::new(),
            vacant: Vec::new(),
            edges: HashMap::default(),
            roots: BTreeMap::new(),
            idle: BTreeSet::new(),
            unread: 0,
            clock: 0,
        }
    }

    fn tokens(&self, node: Node) -> &[Token] {
        let from = node.0 as usize * self.page_size;
        &self.tokens[from..from + self.page_size]
    }

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
            page: SCRATCH_PAGE,
            edge: 0,
            children: 0,
            used: 0,
            pinned: true,
            lives: true,
        });
        self.roots.insert(tenant, root);
        root
    }

    pub(crate) fn child(&self, node: Node, tokens: &[Token]) -> Option<Node> {
        self.look(node, tokens).ok()
    }

    /// The child of these tokens, or the edge a new one takes.
    fn look(&self, node: Node, tokens: &[Token]) -> Result<Node, Edge> {
        let mut edge = edge(node, tokens);
        while let Some(&child) = self.edges.get(&edge) {
            if self.entry(child).parent == Some(node) && self.tokens(child) == tokens {
                return Ok(child);
            }
            edge = edge.wrapping_add(1);
        }
        Err(edge)
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
        let Err(edge) = self.look(parent, tokens) else {
            unreachable!("a page of these tokens is there already");
        };
        let (tenant, used, pinned) =
            (self.entry(parent).tenant, self.entry(parent).used, self.entry(parent).pinned);
        if !pinned {
            self.idle.remove(&(used, parent));
        }
        self.clock += 1;
        let node = self.place(Entry {
            parent: Some(parent),
            tenant,
            page,
            edge,
            children: 0,
            used: self.clock,
            pinned: true,
            lives: true,
        });
        let from = node.0 as usize * self.page_size;
        self.tokens[from..from + self.page_size].copy_from_slice(tokens);
        self.edges.insert(edge, node);
        self.entry_mut(parent).children += 1;
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
        let (parent, page, edge) = (entry.parent?, entry.page, entry.edge);
        entry.lives = false;
        if !entry.pinned {
            self.unread -= 1;
        }
        self.vacant.push(leaf);
        self.edges.remove(&edge);
        let above = self.entry_mut(parent);
        above.children -= 1;
        if above.parent.is_none() {
            if above.children == 0 {
                above.lives = false;
                let tenant = above.tenant;
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
        if !entry.pinned && entry.children == 0 {
            self.idle.insert((entry.used, node));
        }
    }

    fn any_leaf(&self) -> Option<Node> {
        let leaf = |entry: &Entry| entry.lives && entry.parent.is_some() && entry.children == 0;
        self.nodes.iter().position(leaf).map(|at| Node(at as u32))
    }

    fn place(&mut self, entry: Entry) -> Node {
        if let Some(node) = self.vacant.pop() {
            *self.entry_mut(node) = entry;
            return node;
        }
        self.nodes.push(entry);
        self.tokens.resize(self.nodes.len() * self.page_size, 0);
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
        let depth = |entry: &Entry| {
            let above = |node: &Node| self.entry(*node).parent;
            let parents = std::iter::successors(entry.parent, above);
            parents.count() as u32 - 1
        };
        let pages = (0..).map(Node).zip(&self.nodes);
        let pages = pages.filter(|(_, entry)| entry.lives && entry.parent.is_some());
        let mut found: Vec<Found> = pages
            .map(|(node, entry)| Found {
                tenant: entry.tenant,
                depth: depth(entry),
                tokens: self.tokens(node).into(),
                page: entry.page,
            })
            .collect();
        found.sort_by_key(|found| (found.depth, found.page));
        found
    }

    /// Whether pins agree with holders and only idle leaves can be evicted.
    pub(crate) fn audit(&self, refs: impl Fn(Page) -> u32) -> Result<(), String> {
        let mut unread = 0;
        let mut children = vec![0; self.nodes.len()];
        for (at, entry) in self.nodes.iter().enumerate().filter(|(_, entry)| entry.lives) {
            let node = Node(at as u32);
            let Some(parent) = entry.parent else { continue };
            children[parent.0 as usize] += 1;
            if !self.entry(parent).lives || self.edges.get(&entry.edge) != Some(&node) {
                return Err(format!("{:?} hangs on nothing", entry.page));
            }
            let read = refs(entry.page) > 0;
            unread += u32::from(!read);
            if read != entry.pinned {
                return Err(format!("{:?} is read: {read}, pinned: {}", entry.page, entry.pinned));
            }
            let idle = self.idle.contains(&(entry.used, node));
            if idle != (!read && entry.children == 0) {
                return Err(format!("{:?} is on the wrong side of eviction", entry.page));
            }
        }
        let counted = self.nodes.iter().zip(&children);
        if counted.filter(|(entry, _)| entry.lives).any(|(entry, &found)| entry.children != found) {
            return Err("a node has other children than it counts".into());
        }
        if unread != self.unread {
            return Err(format!("{unread} cached pages are unread, counted {}", self.unread));
        }
        Ok(())
    }
}
