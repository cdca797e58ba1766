//! The threads that move pages: from the device to host memory, from there to the device, and to and from the file.

use super::disk::PageFile;
use super::lru::Slot;
use crate::lane::{Job, Lane};
use device::{Arena, Device, Span};
use engine::exec::Page;
use engine::pages::{Medium, PageKey};
use engine::store::PageNote;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// How long the engine's thread waits for a copy when it has nothing else to do: requests and cancellations that come
/// meanwhile wait so long.
const MOMENT: Duration = Duration::from_millis(1);

/// The device and its memory.
pub(super) type There = (Device, Arena);

/// A slot of the file that is being written, and under which number.
pub(super) type InFile = (Arc<PageFile>, Slot, u64);

/// A page that was saved to a medium, or could not be.
#[derive(Debug)]
pub(super) struct Written {
    pub(super) medium: Medium,
    pub(super) note: PageNote,
    pub(super) ticket: u64,
    pub(super) whole: bool,
}

/// What a job did.
#[derive(Debug, Default)]
pub(super) struct Done {
    pub(super) written: Vec<Written>,
    /// The page of the device that was saved, or could not be.
    pub(super) saved: Option<Page>,
    /// Slots of host memory that it used.
    pub(super) slots: Vec<Slot>,
    /// Pages of the device that were filled, or not; from where; and under which name, if from the file.
    pub(super) loaded: Vec<(Page, Medium, Option<PageKey>, bool)>,
}

/// The threads, started when they are first needed.
#[derive(Debug)]
pub(super) struct Mover {
    lanes: [Option<Lane<Done>>; 3],
    reports: (Sender<Done>, Receiver<Done>),
    /// Jobs given and not reported.
    under_way: usize,
    unwanted: Arc<AtomicBool>,
}

/// Which thread.
#[derive(Clone, Copy)]
enum Which {
    Save,
    Load,
    File,
}

impl Mover {
    pub(super) fn new() -> Mover {
        let (lanes, unwanted) = (Default::default(), Arc::default());
        Mover { lanes, reports: channel(), under_way: 0, unwanted }
    }

    fn give(&mut self, which: Which, job: Job<Done>) {
        let name = ["kv-save", "kv-load", "kv-file"][which as usize];
        let lane = self.lanes[which as usize]
            .get_or_insert_with(|| Lane::new(name, self.reports.0.clone(), self.unwanted.clone()));
        lane.give(job);
        self.under_way += 1;
    }

    /// Saves a page of the device to a slot of host memory. What was there goes to the file first, if it is given with
    /// its slot in the file.
    pub(super) fn save(
        &mut self,
        (device, arena): There,
        page: Page,
        (from, to, slot): (Vec<Span>, Vec<Span>, Slot),
        (note, ticket): (PageNote, u64),
        retired: Option<(PageNote, InFile)>,
    ) {
        let which = if retired.is_some() { Which::File } else { Which::Save };
        let job = move |wanted: bool| {
            let mut done = Done { saved: Some(page), slots: vec![slot], ..Done::default() };
            if let Some((note, (file, slot, ticket))) = retired {
                let bytes = wanted.then(|| device.read_apart(&arena, &to).ok()).flatten();
                let whole = bytes.is_some_and(|bytes| file.write(slot, &note, &bytes).is_ok());
                done.written.push(Written { medium: Medium::Disk, note, ticket, whole });
            }
            let copies = merged(&[from], &[to]);
            let whole = wanted && device.copy_apart(&arena, &copies).is_ok();
            done.written.push(Written { medium: Medium::Host, note, ticket, whole });
            done
        };
        self.give(which, Box::new(job));
    }

    /// Saves a page of the device to a slot of the file.
    pub(super) fn write(
        &mut self,
        (device, arena): There,
        page: Page,
        from: Vec<Span>,
        (note, ticket): (PageNote, u64),
        (file, slot): (Arc<PageFile>, Slot),
    ) {
        let job = move |wanted: bool| {
            let bytes = wanted.then(|| device.read_apart(&arena, &from).ok()).flatten();
            let whole = bytes.is_some_and(|bytes| file.write(slot, &note, &bytes).is_ok());
            let written = vec![Written { medium: Medium::Disk, note, ticket, whole }];
            Done { written, saved: Some(page), ..Done::default() }
        };
        self.give(Which::File, Box::new(job));
    }

    /// Fills pages of the device from slots of host memory.
    pub(super) fn load(
        &mut self,
        (device, arena): There,
        loads: Vec<(Slot, Page)>,
        places: Vec<Vec<Span>>,
        pages: Vec<Vec<Span>>,
    ) {
        let job = move |wanted: bool| {
            let whole = wanted && device.copy_apart(&arena, &merged(&places, &pages)).is_ok();
            let (slots, pages): (Vec<Slot>, Vec<Page>) = loads.into_iter().unzip();
            let loaded = pages.into_iter().map(|page| (page, Medium::Host, None, whole)).collect();
            Done { slots, loaded, ..Done::default() }
        };
        self.give(Which::Load, Box::new(job));
    }

    /// Fills a page of the device from a slot of the file.
    pub(super) fn read(
        &mut self,
        (device, arena): There,
        page: Page,
        to: Vec<Span>,
        (file, slot, key): (Arc<PageFile>, Slot, PageKey),
    ) {
        let job = move |wanted: bool| {
            let bytes = wanted.then(|| file.read(slot, key));
            // What is not wanted any more is not damaged.
            let lost = matches!(bytes, Some(None)).then_some(key);
            let bytes = bytes.flatten();
            let whole = bytes.is_some_and(|bytes| device.write_apart(&arena, &to, &bytes).is_ok());
            Done { loaded: vec![(page, Medium::Disk, lost, whole)], ..Done::default() }
        };
        self.give(Which::File, Box::new(job));
    }

    /// What is done, if something is.
    pub(super) fn poll(&mut self) -> Option<Done> {
        let done = self.reports.1.try_recv().ok()?;
        self.under_way -= 1;
        Some(done)
    }

    /// The same, but waits for it for a moment if something is under way.
    pub(super) fn wait_a_moment(&mut self) -> Option<Done> {
        if self.under_way == 0 {
            return None;
        }
        let done = self.reports.1.recv_timeout(MOMENT).ok()?;
        self.under_way -= 1;
        Some(done)
    }

    /// Ends everything under way: what has not begun is not done, the rest is waited for.
    pub(super) fn finish_all(&mut self) -> Vec<Done> {
        self.unwanted.store(true, Ordering::Release);
        // Both ends of the channel are here, so it stays open.
        let all =
            (0..std::mem::take(&mut self.under_way)).filter_map(|_| self.reports.1.recv().ok());
        let all = all.collect();
        self.unwanted.store(false, Ordering::Release);
        all
    }
}

/// Copies from the parts of some pages to those of others, where parts that follow each other on both sides are one.
fn merged(from: &[Vec<Span>], to: &[Vec<Span>]) -> Vec<(Span, Span)> {
    let mut copies: Vec<(Span, Span)> = Vec::new();
    let caches = from.first().map_or(0, Vec::len);
    for cache in 0..caches {
        for (from, to) in from.iter().zip(to) {
            let (from, to) = (from[cache], to[cache]);
            let follows = |a: Span, b: Span| a.region == b.region && a.end() == b.offset;
            match copies.last_mut() {
                Some((source, target)) if follows(*source, from) && follows(*target, to) => {
                    source.len += from.len;
                    target.len += to.len;
                }
                _ => copies.push((from, to)),
            }
        }
    }
    copies
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::{OpenArena, Region};

    #[test]
    fn neighbours_on_both_sides_are_one_copy() {
        let mut arena = OpenArena::new();
        let [device, host] = [Region::Kv, Region::HostMapped]
            .map(|region| [0, 1].map(|_| arena.alloc(region, "area", 1000)));
        let page = |areas: [Span; 2], n: u64| areas.map(|area| area.part(n * 100, 100)).to_vec();
        let pages = |areas, of: &[u64]| of.iter().map(|n| page(areas, *n)).collect::<Vec<_>>();
        let lens = |slots: &[u64], to: &[u64]| -> Vec<u64> {
            let copies = merged(&pages(host, slots), &pages(device, to));
            assert!(copies.iter().all(|(from, to)| from.len == to.len));
            copies.iter().map(|(from, _)| from.len).collect()
        };
        assert_eq!(lens(&[3, 4, 5], &[1, 2, 3]), [300, 300]);
        assert_eq!(lens(&[3, 4, 6], &[1, 2, 3]), [200, 100, 200, 100]);
        assert_eq!(lens(&[3, 4, 5], &[1, 2, 4]), [200, 100, 200, 100]);
        assert_eq!(lens(&[5, 4], &[1, 2]), [100; 4]);
    }
}
