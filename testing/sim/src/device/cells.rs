//! The cells of the fake device's pages, and how a row reads them through its page tables.

use super::{FakeDevice, POISON};
use crate::oracle::Prefix;
use engine::exec::{Geometry, Page, SCRATCH_PAGE, Seat};

impl FakeDevice {
    /// The cells of a page.
    pub(crate) fn page(&self, page: Page) -> &[u64] {
        let size = self.geometry.page_size as usize;
        let first = page.0 as usize * size;
        &self.cells[first..first + size]
    }

    pub(crate) fn page_mut(&mut self, page: Page) -> &mut [u64] {
        let size = self.geometry.page_size as usize;
        let first = page.0 as usize * size;
        &mut self.cells[first..first + size]
    }

    pub(super) fn cell_at(&self, seat: Seat, position: u32) -> Option<usize> {
        self.cell_in(0, seat, position)
    }

    /// The cell of a position in one of a seat's page tables.
    pub(super) fn cell_in(&self, table: u32, seat: Seat, position: u32) -> Option<usize> {
        let state = self.seats[seat.0 as usize].as_ref()?;
        let table = &state.tables[table as usize];
        let page = *table.get((position / self.geometry.page_size) as usize)?;
        let offset = position % self.geometry.page_size;
        (page != SCRATCH_PAGE).then_some((page.0 * self.geometry.page_size + offset) as usize)
    }

    /// What a seat's cell of a position holds in a table.
    pub(super) fn found(&mut self, table: u32, seat: Seat, position: u32) -> u64 {
        let found = self.cell_in(table, seat, position).map_or(POISON, |at| self.cells[at]);
        if found >> 32 != u64::from(position) {
            self.wrong(format!(
                "{seat:?} reads position {position} of table {table} and finds {found:x}"
            ));
        }
        found
    }

    /// The hash of a seat's first `end` tokens, read as layers read them: where some see every token, from those; else
    /// from what a token at `at` sees, the first page of which knows what came before it. Other tables must agree.
    pub(super) fn read_to(&mut self, seat: Seat, at: u32, end: u32) -> Prefix {
        let Geometry { kept, page_size, .. } = self.geometry;
        let seen = (at + 1).saturating_sub(kept.window);
        let start = if kept.full > 0 { 0 } else { seen / page_size * page_size };
        let mut prefix = Prefix::new();
        if start > 0
            && let Some(cell) = self.cell_at(seat, start.max(seen))
        {
            prefix = self.before[cell / page_size as usize];
        }
        for position in start..end {
            let in_window = position >= seen;
            if kept.full == 0 && !in_window {
                // In a page that the window reaches into: there, and not looked at.
                prefix.push(self.cell_at(seat, position).map_or(POISON, |at| self.cells[at]));
                continue;
            }
            let found = self.found(0, seat, position);
            prefix.push(found);
            for table in 1..kept.width() {
                if (table < kept.full || in_window) && self.found(table, seat, position) != found {
                    self.wrong(format!("{seat:?} has other tokens at {position} of table {table}"));
                }
            }
        }
        prefix
    }
}
