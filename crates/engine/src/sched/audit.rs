//! Recounts holders, seats and states from scratch, for tests and the simulator.

use super::Scheduler;
use crate::exec::{Page, SCRATCH_PAGE, Seat};
use crate::pages::CachedPage;
use crate::request::RequestId;
use crate::sequence::{Leaving, Seated, Sequence};

/// What one sequence holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Whose.
    pub id: RequestId,
    /// Which continuation.
    pub choice: u32,
    /// Its pages in order of position, those of every table; empty while it waits.
    pub pages: Vec<Page>,
    /// Its seat; none while it waits.
    pub seat: Option<Seat>,
    /// Known tokens that no launched step has fed; none when it is leaving its seat.
    pub unfed: u32,
    /// Whether its end was announced and it only waits for steps in flight.
    pub ended: bool,
}

impl Scheduler {
    /// Recounts holders, seats and states; an error names what does not add up.
    pub(crate) fn audit(&self) -> Result<(), String> {
        let cursors = self.sequences.iter().filter_map(Sequence::seated).map(|at| &at.cursor);
        let saving: usize = self.sequences.iter().map(|sequence| sequence.cold.saved.len()).sum();
        let restored = self.sequences.iter().filter(|sequence| sequence.cold.restore.is_some());
        let (loading, kept) = self.fetched_states();
        let states = (saving + loading, restored.count() + kept);
        self.pool.audit(cursors.chain(self.fetch_cursors()), states)?;
        let pages = self.pool.counts().total as usize;
        let mut holders = vec![0u32; pages];
        let (mut seated, mut reserved, mut leaving, mut waiting) = (0, 0, 0, 0);
        for sequence in self.sequences.iter() {
            let Some(at) = sequence.seated() else {
                waiting += 1;
                continue;
            };
            seated += 1;
            reserved += sequence.cold.unforked;
            leaving += u32::from(at.leaving.is_some());
            let copied = sequence.cold.copies.iter().map(|(page, _)| page);
            let table = at.table.iter().filter(|page| **page != SCRATCH_PAGE);
            for page in table.chain(copied).chain(&sequence.cold.reserve) {
                holders[page.0 as usize] += 1;
            }
            if at.confirmed > at.fed || at.published * self.geometry.page_size > at.fed {
                return Err(format!("{:?} published more than it fed", sequence.id));
            }
        }
        self.copied().for_each(|page| holders[page.0 as usize] += 1);
        for (index, &held) in holders.iter().enumerate() {
            let refs = self.pool.refs(Page(index as u32));
            if refs != held {
                return Err(format!("page {index} has {held} holders, the ledger says {refs}"));
            }
        }
        if (seated, reserved, leaving) != (self.seated, self.reserved, self.leaving) {
            return Err(format!("{seated} seated, {reserved} reserved, {leaving} leaving: not so"));
        }
        if waiting != self.queue.len() {
            return Err(format!("{waiting} sequences wait, the queue has {}", self.queue.len()));
        }
        Ok(())
    }

    /// What every living sequence holds.
    pub(crate) fn holdings(&self) -> Vec<Holding> {
        let held = |at: &Seated, sequence: &Sequence| {
            let pages = at.table.iter().chain(&sequence.cold.reserve).copied();
            pages.filter(|page| *page != SCRATCH_PAGE).collect()
        };
        let holding = |sequence: &Sequence| {
            let at = sequence.seated();
            let stays = at.filter(|at| at.leaving.is_none());
            Holding {
                id: sequence.id,
                choice: sequence.choice,
                pages: at.map(|at| held(at, sequence)).unwrap_or_default(),
                seat: at.map(|at| at.seat),
                unfed: stays.map_or(0, |at| sequence.goal().saturating_sub(at.fed)),
                ended: at.is_some_and(|at| at.leaving == Some(Leaving::Ended)),
            }
        };
        self.sequences.iter().map(holding).collect()
    }

    /// Every cached page of tokens.
    pub(crate) fn cached(&self) -> Vec<CachedPage> {
        self.pool.cached()
    }
}
