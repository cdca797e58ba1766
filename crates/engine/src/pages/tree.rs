//! The prefix tree: pages found by the tokens in them and before them.
//!
//! A radix tree with pages of tokens as digits: each edge is one page of tokens, so a node stands for a whole
//! prefix. Tenants have separate roots. A node has the pages of its tokens, one for each page table of the device, in
//! up to two parts: those of layers that see every token, and those of layers that see a window of tokens.
//! A part without readers can be evicted, the least recently used first. The pages of a window go alone, and leave a node
//! that is part of longer prefixes; pages that every later token sees go with the node, which must be a leaf.
//! A node that has neither pages, children nor cursors is removed.
//!
//! In a full cache every step publishes some pages and evicts as many, at random places of tables larger
//! than the processor's caches. So a node is little more than half a cache line, and the order
//! of eviction is a queue that is only read from the front and written at the back.

use crate::exec::{Kept, Page, SCRATCH_PAGE};
use crate::plant::{Plant, planted};
use crate::request::Token;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

/// Names a node while it lives; the numbers past all nodes with tokens are roots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Node(pub(super) u32);

/// The parent of a root, the end of a chain.
const NONE: Node = Node::NONE;

/// Nodes for each page where nodes outlive their pages.
const SKELETON: usize = 4;

impl Default for Node {
    fn default() -> Node {
        NONE
    }
}

impl Node {
    /// In place of a node.
    pub(crate) const NONE: Node = Node(u32::MAX);

    /// Its place in tables by node.
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// The pages of a node that come and go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Part {
    /// The only part; where there are two, that of layers that see every token.
    First,
    /// That of layers that see a window, where others see every token.
    Window,
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

/// A node: whose, how many pages before it, what is in it, and its pages by table; the scratch page where one is gone.
pub(crate) struct Found {
    pub(crate) tenant: u64,
    pub(crate) depth: u32,
    pub(crate) tokens: Arc<[Token]>,
    pub(crate) pages: Vec<Page>,
}

/// What an eviction took out of the tree.
#[derive(Default)]
pub(crate) struct Gone {
    pub(crate) pages: Vec<Page>,
    pub(crate) nodes: Vec<Node>,
}

pub(crate) struct Tree {
    seed: u64,
    page_size: usize,
    kept: Kept,
    /// Most nodes with tokens.
    room: usize,
    /// Those, in the tree or not, then the roots.
    nodes: Vec<Entry>,
    vacant: Vec<Node>,
    /// The pages of every node, by table; the scratch page where there is none.
    pages: Vec<Page>,
    /// The state of every [`Part::Window`]; empty if there is only one part.
    windows: Vec<Readers>,
    /// What is in the pages.
    tokens: Vec<Token>,
    /// The first node of each hash; the others follow by [`Entry::next`].
    heads: Vec<Node>,
    roots: BTreeMap<u64, Node>,
    tenants: Vec<u64>,
    vacant_roots: Vec<Node>,
    idle: Idle,
}

#[derive(Clone, Copy)]
struct Entry {
    /// [`NONE`] for a root.
    parent: Node,
    /// Nodes below it, and cursors at it.
    children: u32,
    /// The next node of the same chain, and the one before: a node is unlinked without a search.
    next: Node,
    before: Node,
    hash: u32,
    /// Of its first part.
    readers: Readers,
    /// Whether it is part of the tree.
    lives: bool,
}

/// Whether a part is read.
#[derive(Clone, Copy, Default)]
struct Readers {
    /// When the last reader left.
    used: u64,
    pinned: bool,
}

const VACANT: Entry = Entry {
    parent: NONE,
    children: 0,
    next: NONE,
    before: NONE,
    hash: 0,
    readers: Readers { used: 0, pinned: false },
    lives: false,
};

/// A part of a node that waits to be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Turn {
    used: u64,
    node: Node,
    part: Part,
}

/// Parts in the order their last readers left.
///
/// Nothing is removed from the middle: an entry whose part was read again or removed is skipped when its
/// turn comes. A node that still has children at its turn is skipped too; if it becomes a leaf later, it
/// goes to `late`.
#[derive(Default)]
struct Idle {
    line: VecDeque<Turn>,
    late: BinaryHeap<Reverse<Turn>>,
    /// The last turn of the line.
    turn: u64,
    clock: u64,
}

impl Idle {
    /// A new turn at the end of the line.
    fn push(&mut self, node: Node, part: Part) -> u64 {
        self.clock += 1;
        self.line.push_back(Turn { used: self.clock, node, part });
        self.clock
    }

    /// A node that became a leaf, and whose last reader left at `used`.
    fn leaf(&mut self, used: u64, node: Node) {
        if used <= self.turn {
            self.late.push(Reverse(Turn { used, node, part: Part::First }));
        }
    }

    fn pop(&mut self) -> Option<Turn> {
        let front = self.line.front().copied();
        if let Some(&Reverse(late)) = self.late.peek()
            && front.is_none_or(|front| late < front)
        {
            self.late.pop();
            return Some(late);
        }
        self.turn = front?.used;
        self.line.pop_front()
    }
}

impl Tree {
    /// Over so many pages.
    pub(crate) fn new(pages: u32, page_size: u32, kept: Kept, seed: u64) -> Self {
        let (pages, page_size) = (pages as usize, page_size as usize);
        // A node of layers that see everything has such a page as long as it lives. Where all layers have windows, nodes
        // outlive their pages while longer prefixes are cached.
        let room = if kept.full > 0 { pages } else { SKELETON * pages };
        let both = kept.full > 0 && kept.windowed > 0;
        Self {
            seed,
            page_size,
            kept,
            room,
            nodes: vec![VACANT; room],
            vacant: (0..room as u32).rev().map(Node).collect(),
            pages: vec![SCRATCH_PAGE; room * kept.width() as usize],
            windows: vec![Readers::default(); if both { room } else { 0 }],
            tokens: vec![0; room * page_size],
            heads: vec![NONE; (2 * room).next_power_of_two()],
            roots: BTreeMap::new(),
            tenants: Vec::new(),
            vacant_roots: Vec::new(),
            idle: Idle::default(),
        }
    }

    /// Most nodes with tokens.
    pub(crate) fn room(&self) -> usize {
        self.room
    }

    pub(crate) fn tokens(&self, node: Node) -> &[Token] {
        let from = node.index() * self.page_size;
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
        *self.entry_mut(root) = Entry { lives: true, ..VACANT };
        self.tenants[root.index() - self.room] = tenant;
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

    /// A node's pages by table; the scratch page where one is gone.
    pub(crate) fn pages(&self, node: Node) -> &[Page] {
        let width = self.kept.width() as usize;
        &self.pages[node.index() * width..(node.index() + 1) * width]
    }

    /// Whether a node has the pages that a window needs.
    pub(crate) fn has_window(&self, node: Node) -> bool {
        self.pages(node)[self.kept.full as usize] != SCRATCH_PAGE
    }

    /// The tables of a part.
    fn tables(&self, part: Part) -> Range<usize> {
        let (full, width) = (self.kept.full as usize, self.kept.width() as usize);
        match part {
            Part::First if self.windows.is_empty() => 0..width,
            Part::First => 0..full,
            Part::Window => full..width,
        }
    }

    fn parts(&self) -> &'static [Part] {
        if self.windows.is_empty() { &[Part::First] } else { &[Part::First, Part::Window] }
    }

    fn has(&self, node: Node, part: Part) -> bool {
        self.pages(node)[self.tables(part).start] != SCRATCH_PAGE
    }

    fn readers(&self, node: Node, part: Part) -> &Readers {
        match part {
            Part::First => &self.nodes[node.index()].readers,
            Part::Window => &self.windows[node.index()],
        }
    }

    fn readers_mut(&mut self, node: Node, part: Part) -> &mut Readers {
        match part {
            Part::First => &mut self.nodes[node.index()].readers,
            Part::Window => &mut self.windows[node.index()],
        }
    }

    /// The part whose first page this is: pages of a part get and lose readers together, and the first counts for all.
    fn led_by(&self, node: Node, page: Page) -> Option<Part> {
        let pages = self.pages(node);
        self.parts().iter().copied().find(|part| pages[self.tables(*part).start] == page)
    }

    /// A new child without pages; `hash` is from [`Tree::look`]. `None` if there is no room for another node.
    pub(crate) fn insert(&mut self, parent: Node, hash: u32, tokens: &[Token]) -> Option<Node> {
        let node = self.vacant.pop()?;
        let head = self.head(hash);
        let next = std::mem::replace(&mut self.heads[head], node);
        if next != NONE {
            self.entry_mut(next).before = node;
        }
        *self.entry_mut(node) = Entry { parent, next, hash, lives: true, ..VACANT };
        let from = node.index() * self.page_size;
        self.tokens[from..from + self.page_size].copy_from_slice(tokens);
        self.entry_mut(parent).children += 1;
        Some(node)
    }

    /// Gives a node the pages of the parts that it lacks, pinned, because their publisher holds them; returns the tables
    /// whose pages it took.
    pub(crate) fn adopt(&mut self, node: Node, pages: &[Page]) -> [Range<usize>; 2] {
        let mut taken = [0..0, 0..0];
        for (&part, taken) in self.parts().iter().zip(&mut taken) {
            let tables = self.tables(part);
            if self.has(node, part) || pages[tables.start] == SCRATCH_PAGE {
                continue;
            }
            let from = node.index() * pages.len();
            self.pages[from + tables.start..from + tables.end]
                .copy_from_slice(&pages[tables.clone()]);
            self.readers_mut(node, part).pinned = true;
            *taken = tables;
        }
        taken
    }

    /// A first reader of a page came.
    pub(crate) fn pin(&mut self, node: Node, page: Page) {
        if let Some(part) = self.led_by(node, page) {
            self.readers_mut(node, part).pinned = true;
        }
    }

    /// The last reader of a page left.
    pub(crate) fn unpin(&mut self, node: Node, page: Page) {
        let Some(part) = self.led_by(node, page) else { return };
        let used = self.idle.push(node, part);
        *self.readers_mut(node, part) = Readers { used, pinned: false };
        let Entry { children, readers, .. } = *self.entry(node);
        if part == Part::Window && children == 0 && !readers.pinned {
            self.idle.leaf(readers.used, node);
        }
        // Drops stale entries, so that the queue never holds more than twice the parts.
        if self.idle.line.len() > 2 * (self.room + self.windows.len()) {
            let mut line = std::mem::take(&mut self.idle.line);
            line.retain(|turn| self.waits(turn));
            self.idle.line = line;
        }
    }

    /// Whether the part's last reader left at that time, and it was neither read since nor evicted.
    fn waits(&self, turn: &Turn) -> bool {
        let readers = self.readers(turn.node, turn.part);
        let there = self.entry(turn.node).lives && self.has(turn.node, turn.part);
        there && !readers.pinned && readers.used == turn.used
    }

    fn may_go(&self, turn: &Turn) -> bool {
        let alone = turn.part == Part::Window || self.kept.full == 0;
        let whole = || {
            let window = self.windows.get(turn.node.index());
            self.entry(turn.node).children == 0 && !window.is_some_and(|window| window.pinned)
        };
        self.waits(turn) && (alone || whole())
    }

    /// Evicts the least recently used part that can go; the caller frees its pages. False if there is none.
    pub(crate) fn evict(&mut self, gone: &mut Gone) -> bool {
        let turn = loop {
            match self.idle.pop() {
                Some(turn) if self.may_go(&turn) => break turn,
                Some(_) => {}
                None if planted(Plant::EvictReferenced) => {
                    let Some(node) = self.any_leaf() else { return false };
                    break Turn { used: 0, node, part: Part::First };
                }
                None => return false,
            }
        };
        match turn.part {
            Part::First if self.entry(turn.node).children == 0 => self.remove(turn.node, gone),
            // Nodes below it stay; so does a leaf without its window, until its own turn.
            part => self.drop_part(turn.node, part, gone),
        }
        true
    }

    fn drop_part(&mut self, node: Node, part: Part, gone: &mut Gone) {
        if !self.has(node, part) {
            return;
        }
        let from = node.index() * self.kept.width() as usize;
        let tables = self.tables(part);
        let pages = &mut self.pages[from + tables.start..from + tables.end];
        gone.pages.extend(pages.iter());
        pages.fill(SCRATCH_PAGE);
    }

    /// Removes a leaf with all its pages, and nodes above it that only led to it.
    fn remove(&mut self, leaf: Node, gone: &mut Gone) {
        let mut next = Some(leaf);
        while let Some(node) = next.take() {
            for &part in self.parts() {
                self.drop_part(node, part, gone);
            }
            self.unchain(node);
            let entry = self.entry_mut(node);
            entry.lives = false;
            let parent = entry.parent;
            self.vacant.push(node);
            gone.nodes.push(node);
            next = self.lose_child(parent);
        }
    }

    /// A child or a cursor of a node went. Returns the node if nothing is left of it.
    fn lose_child(&mut self, node: Node) -> Option<Node> {
        let entry = self.entry_mut(node);
        entry.children -= 1;
        let Entry { children, parent, readers, .. } = *entry;
        if children > 0 {
            return None;
        }
        if parent == NONE {
            self.entry_mut(node).lives = false;
            self.roots.remove(&self.tenants[node.index() - self.room]);
            self.vacant_roots.push(node);
            return None;
        }
        if !self.has(node, Part::First) {
            return Some(node);
        }
        if !readers.pinned {
            self.idle.leaf(readers.used, node);
        }
        None
    }

    /// A cursor comes to a node, which then stays.
    pub(crate) fn open(&mut self, node: Node) {
        self.entry_mut(node).children += 1;
    }

    /// A cursor leaves a node.
    pub(crate) fn close(&mut self, node: Node, gone: &mut Gone) {
        if let Some(node) = self.lose_child(node) {
            self.remove(node, gone);
        }
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
        &self.nodes[node.index()]
    }

    fn entry_mut(&mut self, node: Node) -> &mut Entry {
        &mut self.nodes[node.index()]
    }

    fn living(&self) -> impl Iterator<Item = (Node, &Entry)> {
        let nodes = (0..).map(Node).zip(&self.nodes[..self.room]);
        nodes.filter(|(_, entry)| entry.lives)
    }

    /// Every node, parents before children.
    pub(crate) fn walk(&self) -> Vec<Found> {
        let mut found: Vec<Found> = self
            .living()
            .map(|(node, entry)| {
                let above = |node: &Node| Some(self.entry(*node).parent).filter(|up| *up != NONE);
                let path = std::iter::successors(Some(entry.parent), above);
                let (depth, root) = path.enumerate().last().expect("a page hangs on a root");
                Found {
                    tenant: self.tenants[root.index() - self.room],
                    depth: depth as u32,
                    tokens: self.tokens(node).into(),
                    pages: self.pages(node).to_vec(),
                }
            })
            .collect();
        found.sort_by(|a, b| (a.depth, &a.pages).cmp(&(b.depth, &b.pages)));
        found
    }

    /// Whether pins agree with holders, every node can be found and is there for something, and every idle part that can
    /// go has a turn. `cursors` are all that are open.
    pub(crate) fn audit(
        &self,
        refs: impl Fn(Page) -> u32,
        cursors: impl Iterator<Item = Node>,
    ) -> Result<(), String> {
        let late = self.idle.late.iter().map(|Reverse(turn)| turn);
        let turns: HashSet<_> = self.idle.line.iter().chain(late).copied().collect();
        let mut children = vec![0; self.nodes.len()];
        cursors.for_each(|node| children[node.index()] += 1);
        for (node, entry) in self.living() {
            children[entry.parent.index()] += 1;
            let found = self.entry(entry.parent).lives
                && self.child(entry.parent, self.tokens(node)) == Some(node);
            if !found {
                return Err(format!("{node:?} hangs on nothing"));
            }
            if !self.has(node, Part::First) && (entry.children == 0 || self.kept.full > 0) {
                return Err(format!("{node:?} has no pages and leads to none"));
            }
            for &part in self.parts().iter().filter(|part| self.has(node, **part)) {
                self.audit_part(node, part, &refs, &turns)?;
            }
        }
        let counted = self.nodes.iter().zip(&children);
        if counted.filter(|(entry, _)| entry.lives).any(|(entry, &found)| entry.children != found) {
            return Err("a node has other children than it counts".into());
        }
        Ok(())
    }

    fn audit_part(
        &self,
        node: Node,
        part: Part,
        refs: &impl Fn(Page) -> u32,
        turns: &HashSet<Turn>,
    ) -> Result<(), String> {
        let Readers { used, pinned } = *self.readers(node, part);
        for &page in &self.pages(node)[self.tables(part)] {
            let read = refs(page) > 0;
            if read != pinned {
                return Err(format!("{page:?} is read: {read}, pinned: {pinned}"));
            }
        }
        let turn = Turn { used, node, part };
        if self.may_go(&turn) && !turns.contains(&turn) {
            return Err(format!("{node:?} is on the wrong side of eviction"));
        }
        Ok(())
    }
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
