//! How the caches of a program share pages.
//!
//! Layers that see every token keep all of them; layers with a window keep the last ones. Both have pages of the same
//! size, so that what one gives back the other can take: a page holds a page of tokens in as many layers as there are
//! *places*. Layers are divided into *tables* of so many layers each, those that keep everything first. Every table has a
//! page table of its own for each seat. Layers of different tables at the same place share memory, and never a page.

use super::{Cache, Program};

/// How the caches of a program share pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Tables of layers that keep every token.
    pub full: u32,
    /// Tables of layers that keep a window.
    pub windowed: u32,
    /// Tokens that the latter keep.
    pub window: u32,
    /// Caches that a page has room for.
    pub places: u32,
    /// Of each cache: its table and its place.
    of: Vec<(u32, u32)>,
}

impl Kept {
    /// The tables of a seat.
    pub fn tables(&self) -> u32 {
        self.full + self.windowed
    }

    /// The table of a cache.
    pub fn table(&self, cache: usize) -> u32 {
        self.of.get(cache).map_or(0, |(table, _)| *table)
    }

    /// The place of a cache.
    pub(crate) fn place(&self, cache: usize) -> u32 {
        self.of[cache].1
    }
}

impl Program {
    /// How its caches share pages. Where some keep everything and some a window, pages have room for as many caches as
    /// there are of the rarer kind. Caches of different sizes cannot share memory: then all keep everything.
    pub fn kept(&self) -> Kept {
        let caches = || self.caches.iter();
        let windowed = caches().filter(|cache| cache.window().is_some()).count() as u32;
        let (all, window) = (self.caches.len() as u32, caches().filter_map(Cache::window).max());
        let full = all - windowed;
        let sizes = || caches().map(Cache::token_bytes);
        let alike = sizes().min() == sizes().max();
        let places = match (full, windowed) {
            (0, _) | (_, 0) => all,
            _ if !alike => all,
            _ => full.min(windowed),
        };
        let apart = places < all;
        // Windows alone need no tables of their own, whatever their sizes.
        let keeps_all = |cache: &Cache| cache.window().is_none() || (full > 0 && !apart);
        let tables = |caches: u32| if places == 0 { 0 } else { caches.div_ceil(places) };
        let tables_full = tables(caches().filter(|cache| keeps_all(cache)).count() as u32);
        let tables_windowed = tables(caches().filter(|cache| !keeps_all(cache)).count() as u32);
        let (mut next_full, mut next_windowed) = (0, tables_full * places);
        let of = caches().map(|cache| {
            let next = if keeps_all(cache) { &mut next_full } else { &mut next_windowed };
            let at = (*next / places, *next % places);
            *next += 1;
            at
        });
        Kept {
            of: of.collect(),
            full: tables_full,
            windowed: tables_windowed,
            window: if tables_windowed > 0 { window.unwrap_or(0) } else { 0 },
            places,
        }
    }

    /// The same program, which keeps every token in every layer.
    pub fn keep_all(&mut self) {
        self.caches.iter_mut().for_each(|cache| cache.keep(None));
        if let Some(drafter) = &mut self.drafter {
            drafter.programs_mut().for_each(Program::keep_all);
        }
    }
}
