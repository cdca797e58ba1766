//! Who holds which page. Every page is in exactly one state: *free*, *held* (by sequences only),
//! *published* (in the prefix tree, read by sequences or not) or *scratch*.

use super::tree::Node;
use crate::exec::{Page, SCRATCH_PAGE};

/// Pages by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// All pages, the scratch page included.
    pub total: u32,
    /// Without a holder.
    pub free: u32,
    /// Held by sequences and not in the prefix tree.
    pub held: u32,
    /// In the prefix tree, whether a sequence reads them or not.
    pub published: u32,
    /// Of the published ones, those no sequence reads.
    pub unread: u32,
}

impl PageCounts {
    /// Whether every page, the scratch page included, is in exactly one state.
    pub(crate) fn balances(&self) -> bool {
        self.free + self.held + self.published + 1 == self.total && self.unread <= self.published
    }
}

/// One page's holders, and the node of the prefix tree that has it.
#[derive(Clone, Copy, Default)]
struct Held {
    refs: u32,
    node: Node,
}

impl Held {
    fn published(self) -> bool {
        self.node != Node::NONE
    }
}

pub(crate) struct Ledger {
    free: Vec<Page>,
    pages: Vec<Held>,
    held: u32,
    published: u32,
    unread: u32,
}

impl Ledger {
    pub(crate) fn new(pages: u32) -> Self {
        assert!(pages >= 2, "a pool needs the scratch page and one more");
        Self {
            free: (1..pages).rev().map(Page).collect(),
            pages: vec![Held::default(); pages as usize],
            held: 0,
            published: 0,
            unread: 0,
        }
    }

    pub(crate) fn free(&self) -> u32 {
        self.free.len() as u32
    }

    pub(crate) fn refs(&self, page: Page) -> u32 {
        self.pages[page.0 as usize].refs
    }

    pub(crate) fn published(&self, page: Page) -> bool {
        self.pages[page.0 as usize].published()
    }

    /// The node that has a page, if it is published.
    pub(crate) fn node(&self, page: Page) -> Option<Node> {
        let held = self.pages[page.0 as usize];
        held.published().then_some(held.node)
    }

    /// free → held.
    pub(crate) fn take(&mut self) -> Option<Page> {
        let page = self.free.pop()?;
        self.pages[page.0 as usize].refs += 1;
        self.held += 1;
        Some(page)
    }

    /// One more holder of a page that is held or published; returns how many there are.
    pub(crate) fn share(&mut self, page: Page) -> u32 {
        assert_ne!(page, SCRATCH_PAGE, "the scratch page has no holders");
        let held = &mut self.pages[page.0 as usize];
        held.refs += 1;
        if held.refs == 1 {
            assert!(held.published(), "{page:?} was shared while free");
            self.unread -= 1;
        }
        held.refs
    }

    /// One holder fewer; returns how many are left. held → free with the last one.
    pub(crate) fn give(&mut self, page: Page) -> u32 {
        let held = &mut self.pages[page.0 as usize];
        assert!(held.refs > 0, "{page:?} was given back more often than taken");
        held.refs -= 1;
        let left = held.refs;
        if left == 0 {
            if held.published() {
                self.unread += 1;
            } else {
                self.held -= 1;
                self.free.push(page);
            }
        }
        left
    }

    /// held → published.
    pub(crate) fn publish(&mut self, page: Page, node: Node) {
        let held = &mut self.pages[page.0 as usize];
        assert!(!held.published(), "{page:?} is published already");
        assert!(held.refs > 0, "{page:?} was published while free");
        held.node = node;
        self.held -= 1;
        self.published += 1;
    }

    /// published and unread → free.
    pub(crate) fn withdraw(&mut self, page: Page) {
        let held = &mut self.pages[page.0 as usize];
        assert_ne!(std::mem::take(&mut held.node), Node::NONE, "{page:?} was not published");
        self.published -= 1;
        if held.refs == 0 {
            self.unread -= 1;
        }
        self.free.push(page);
    }

    pub(crate) fn counts(&self) -> PageCounts {
        PageCounts {
            total: self.pages.len() as u32,
            free: self.free(),
            held: self.held,
            published: self.published,
            unread: self.unread,
        }
    }

    /// Recounts every page from scratch.
    pub(crate) fn audit(&self) -> Result<(), String> {
        let mut free = vec![false; self.pages.len()];
        for page in &self.free {
            if std::mem::replace(&mut free[page.0 as usize], true) {
                return Err(format!("{page:?} is free twice"));
            }
        }
        let (mut held, mut published, mut unread) = (0, 0, 0);
        for (index, &is_free) in free.iter().enumerate() {
            let held_by @ Held { refs, .. } = self.pages[index];
            match (is_free, held_by.published()) {
                (true, true) => return Err(format!("page {index} is free and published")),
                (true, false) if refs > 0 => return Err(format!("page {index} is free and held")),
                (true, false) => {}
                (false, true) => {
                    published += 1;
                    unread += u32::from(refs == 0);
                }
                (false, false) if index == SCRATCH_PAGE.0 as usize => {
                    if refs > 0 {
                        return Err("the scratch page is held".into());
                    }
                }
                (false, false) if refs == 0 => return Err(format!("page {index} leaked")),
                (false, false) => held += 1,
            }
        }
        let recount = PageCounts { held, published, unread, ..self.counts() };
        if recount != self.counts() || !recount.balances() {
            return Err(format!("the ledger says {:?}, the pages say {recount:?}", self.counts()));
        }
        Ok(())
    }
}
