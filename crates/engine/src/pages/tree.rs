//! The prefix tree: pages found by the tokens in them and before them.
//!
//! A radix tree with pages as digits: each edge is one page of tokens, so a node stands for a whole
//! prefix. Tenants have separate roots. Only leaves that no sequence reads can be evicted, the
//! least recently used first; a parent becomes a leaf when its last child goes.
//!
//! In a full cache every step publishes some pages and evicts as many, at random places of tables larger
//! than the processor's caches. So a node is half a cache line at the number of its page, and the order
//! of eviction is a queue that is only read from the front and written at the back.

use crate::exec::{Page, SCRATCH_PAGE};
use crate::plant::{Plant, planted};
use crate::request::Token;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashSet, VecDeque};
use std::sync::Arc;

/// Names a node while it lives: the number of its page, or a number past all pages for a root.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Node(u32);

/// The parent of a root, the end of a chain.
const NONE: Node = Node::NONE;

impl Default for Node {
    fn default() -> Node {
        NONE
    }
}

impl Node {
    /// In place of a node.
    pub(crate) const NONE: Node = Node(u32::MAX);

    /// The node of a page, if it is in the tree.
    pub(crate) fn of(page: Page) -> Node {
        Node(page.0)
    }
}

/// A hash of a parent and the tokens below it, two at a time. With a secret seed a client that
/// chooses the tokens cannot choose which of them share a chain.
fn hash(seed: u64, parent: Node, tokens: &[Token]) -> u32 {
    let fold = |word: u64| {
        let product = u128::from(word) * 0x9E37_79B9_7F4A_7C15;
        product as u64 ^ (product >> 64) as u64
    };
    let start = fold(seed ^ u64::from(parent.0) ^ 0xA076_1D64_78BD_642F);
    let hash = tokens.chunks(2).fold(start, |hash, pair| {
        let high = pair.get(1).map_or(0, |&token| u64::from(token) << 32);
        fold(hash ^ high ^ u64::from(pair[0]))
    });
    (hash ^ hash >> 32) as u32
}

/// One cached page: whose, how many pages before it, and what is in it.
pub(crate) struct Found {
    pub(crate) tenant: u64,
    pub(crate) depth: u32,
    pub(crate) tokens: Arc<[Token]>,
    pub(crate) page: Page,
}

pub(crate) struct Tree {
    seed: u64,
    page_size: usize,
    pages: usize,
    /// One per page, in the tree or not, then the roots.
    nodes: Vec<Entry>,
    /// What is in the pages.
    tokens: Vec<Token>,
    /// The first node of each hash; the others follow by [`Entry::next`].
    heads: Vec<Node>,
    roots: BTreeMap<u64, Node>,
    tenants: Vec<u64>,
    vacant_roots: Vec<Node>,
    idle: Idle,
    /// Nodes that no sequence reads, leaves or not.
    unread: u32,
}

#[derive(Clone, Copy)]
struct Entry {
    /// [`NONE`] for a root.
    parent: Node,
    children: u32,
    /// The next node of the same chain, and the one before: a node is unlinked without a search.
    next: Node,
    before: Node,
    hash: u32,
    /// When its last reader left.
    used: u64,
    pinned: bool,
    /// Whether it is part of the tree.
    lives: bool,
}

const VACANT: Entry = Entry {
    parent: NONE,
    children: 0,
    next: NONE,
    before: NONE,
    hash: 0,
    used: 0,
    pinned: false,
    lives: false,
};

/// Nodes in the order their last readers left.
///
/// Nothing is removed from the middle: an entry whose node was read again or removed is skipped when its
/// turn comes. A node that still has children at its turn is skipped too; if it becomes a leaf later, it
/// goes to `late`.
#[derive(Default)]
struct Idle {
    line: VecDeque<(u64, Node)>,
    late: BinaryHeap<Reverse<(u64, Node)>>,
    /// The last turn of the line.
    turn: u64,
    clock: u64,
}

impl Idle {
    /// A new turn at the end of the line.
    fn push(&mut self, node: Node) -> u64 {
        self.clock += 1;
        self.line.push_back((self.clock, node));
        self.clock
    }

    /// A node that became a leaf, and whose last reader left at `used`.
    fn leaf(&mut self, used: u64, node: Node) {
        if used <= self.turn {
            self.late.push(Reverse((used, node)));
        }
    }

    fn pop(&mut self) -> Option<(u64, Node)> {
        let front = self.line.front().copied();
        if let Some(&Reverse(late)) = self.late.peek()
            && front.is_none_or(|front| late < front)
        {
            self.late.pop();
            return Some(late);
        }
        self.turn = front?.0;
        self.line.pop_front()
    }
}

impl Tree {
    pub(crate) fn new(pages: u32, page_size: u32, seed: u64) -> Self {
        let (pages, page_size) = (pages as usize, page_size as usize);
        Self {
            seed,
            page_size,
            pages,
            nodes: vec![VACANT; pages],
            tokens: vec![0; pages * page_size],
            heads: vec![NONE; (2 * pages).next_power_of_two()],
            roots: BTreeMap::new(),
            tenants: Vec::new(),
            vacant_roots: Vec::new(),
            idle: Idle::default(),
            unread: 0,
        }
    }

    pub(crate) fn tokens(&self, node: Node) -> &[Token] {
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
        let root = self.vacant_roots.pop().unwrap_or_else(|| {
            self.nodes.push(VACANT);
            self.tenants.push(tenant);
            Node(self.nodes.len() as u32 - 1)
        });
        *self.entry_mut(root) = Entry { pinned: true, lives: true, ..VACANT };
        self.tenants[root.0 as usize - self.pages] = tenant;
        self.roots.insert(tenant, root);
        root
    }

    pub(crate) fn child(&self, node: Node, tokens: &[Token]) -> Option<Node> {
        self.look(node, tokens).ok()
    }

    /// The child of these tokens, or the hash a new one takes.
    pub(crate) fn look(&self, node: Node, tokens: &[Token]) -> Result<Node, u32> {
        let hash = hash(self.seed, node, tokens);
        let mut at = self.heads[self.head(hash)];
        while at != NONE {
            let entry = self.entry(at);
            if entry.hash == hash && entry.parent == node && self.tokens(at) == tokens {
                return Ok(at);
            }
            at = entry.next;
        }
        Err(hash)
    }

    fn head(&self, hash: u32) -> usize {
        hash as usize & (self.heads.len() - 1)
    }

    pub(crate) fn page(&self, node: Node) -> Page {
        if (node.0 as usize) < self.pages { Page(node.0) } else { SCRATCH_PAGE }
    }

    /// Pages without readers. Nearly all can be evicted. The exception is one with a descendant that is
    /// read: that happens when a page was computed twice.
    pub(crate) fn unread(&self) -> u32 {
        self.unread
    }

    /// A new child, pinned, because its publisher holds the page; `hash` is from [`Tree::look`].
    pub(crate) fn insert(&mut self, parent: Node, hash: u32, tokens: &[Token], page: Page) -> Node {
        let node = Node::of(page);
        let head = self.head(hash);
        let next = std::mem::replace(&mut self.heads[head], node);
        if next != NONE {
            self.entry_mut(next).before = node;
        }
        *self.entry_mut(node) = Entry { parent, next, hash, pinned: true, lives: true, ..VACANT };
        let from = node.0 as usize * self.page_size;
        self.tokens[from..from + self.page_size].copy_from_slice(tokens);
        self.entry_mut(parent).children += 1;
        node
    }

    /// A first reader came.
    pub(crate) fn pin(&mut self, node: Node) {
        self.entry_mut(node).pinned = true;
        self.unread -= 1;
    }

    /// The last reader left.
    pub(crate) fn unpin(&mut self, node: Node) {
        let used = self.idle.push(node);
        let entry = self.entry_mut(node);
        entry.pinned = false;
        entry.used = used;
        self.unread += 1;
        // Drops stale entries, so that the queue never holds more than twice the pages.
        if self.idle.line.len() > 2 * self.pages {
            let nodes = &self.nodes;
            self.idle.line.retain(|&(used, node)| waits(&nodes[node.0 as usize], used));
        }
    }

    /// Removes the least recently used leaf without readers; the caller frees its page.
    pub(crate) fn evict(&mut self) -> Option<Page> {
        let leaf = loop {
            match self.idle.pop() {
                Some((used, node)) => {
                    let entry = self.entry(node);
                    if entry.children == 0 && waits(entry, used) {
                        break node;
                    }
                }
                None if planted(Plant::EvictReferenced) => break self.any_leaf()?,
                None => return None,
            }
        };
        let entry = self.entry_mut(leaf);
        let (parent, pinned) = (entry.parent, entry.pinned);
        entry.lives = false;
        self.unread -= u32::from(!pinned);
        self.unchain(leaf);
        let above = self.entry_mut(parent);
        above.children -= 1;
        let (left, used) = (above.children, above.used);
        if left == 0 && above.parent == NONE {
            above.lives = false;
            self.roots.remove(&self.tenants[parent.0 as usize - self.pages]);
            self.vacant_roots.push(parent);
        } else if left == 0 && !above.pinned {
            self.idle.leaf(used, parent);
        }
        Some(self.page(leaf))
    }

    fn unchain(&mut self, node: Node) {
        let Entry { hash, next, before, .. } = *self.entry(node);
        if next != NONE {
            self.entry_mut(next).before = before;
        }
        if before == NONE {
            let head = self.head(hash);
            self.heads[head] = next;
        } else {
            self.entry_mut(before).next = next;
        }
    }

    fn any_leaf(&self) -> Option<Node> {
        let leaf = |entry: &Entry| entry.lives && entry.parent != NONE && entry.children == 0;
        self.nodes.iter().position(leaf).map(|at| Node(at as u32))
    }

    fn entry(&self, node: Node) -> &Entry {
        &self.nodes[node.0 as usize]
    }

    fn entry_mut(&mut self, node: Node) -> &mut Entry {
        &mut self.nodes[node.0 as usize]
    }

    /// Every page, parents before children.
    pub(crate) fn walk(&self) -> Vec<Found> {
        let pages = (0..).map(Node).zip(&self.nodes[..self.pages]);
        let mut found: Vec<Found> = pages
            .filter(|(_, entry)| entry.lives)
            .map(|(node, entry)| {
                let above = |node: &Node| Some(self.entry(*node).parent).filter(|up| *up != NONE);
                let path = std::iter::successors(Some(entry.parent), above);
                let (depth, root) = path.enumerate().last().expect("a page hangs on a root");
                Found {
                    tenant: self.tenants[root.0 as usize - self.pages],
                    depth: depth as u32,
                    tokens: self.tokens(node).into(),
                    page: self.page(node),
                }
            })
            .collect();
        found.sort_by_key(|found| (found.depth, found.page));
        found
    }

    /// Whether pins agree with holders, every node can be found, and every idle leaf has a turn.
    pub(crate) fn audit(&self, refs: impl Fn(Page) -> u32) -> Result<(), String> {
        let late = self.idle.late.iter().map(|Reverse(turn)| turn);
        let turns: HashSet<_> = self.idle.line.iter().chain(late).copied().collect();
        let mut unread = 0;
        let mut children = vec![0; self.nodes.len()];
        for (at, entry) in self.nodes.iter().enumerate().filter(|(_, entry)| entry.lives) {
            let (node, parent) = (Node(at as u32), entry.parent);
            if parent == NONE {
                continue;
            }
            let page = self.page(node);
            children[parent.0 as usize] += 1;
            if !self.entry(parent).lives || self.child(parent, self.tokens(node)) != Some(node) {
                return Err(format!("{page:?} hangs on nothing"));
            }
            let read = refs(page) > 0;
            unread += u32::from(!read);
            if read != entry.pinned {
                return Err(format!("{page:?} is read: {read}, pinned: {}", entry.pinned));
            }
            if !read && entry.children == 0 && !turns.contains(&(entry.used, node)) {
                return Err(format!("{page:?} is on the wrong side of eviction"));
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

/// Whether the node's last reader left at `used`, and it was not read since.
fn waits(entry: &Entry, used: u64) -> bool {
    entry.lives && !entry.pinned && entry.used == used
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_prefixes_share_a_chain_depends_on_the_seed() {
        let pages: Vec<[Token; 4]> = (0..4096).map(|i| [i, 7, i / 3, 1]).collect();
        let chain = |seed: u64, page: &[Token]| hash(seed, Node(1), page) & 0xff;
        // Pages that a client who knew the seed could choose to fall on one chain.
        let chosen: Vec<_> = pages.iter().filter(|page| chain(0, &page[..]) == 9).collect();
        assert!(chosen.len() > 8, "{}", chosen.len());
        for seed in [1, 0x1234_5678_9abc_def0, u64::MAX] {
            let together = chosen.iter().filter(|page| chain(seed, &page[..]) == 9).count();
            assert!(together <= chosen.len() / 4, "{seed}: {together} of {}", chosen.len());
        }
        assert_eq!(hash(5, Node(1), &[1, 2, 3]), hash(5, Node(1), &[1, 2, 3]));
    }
}
