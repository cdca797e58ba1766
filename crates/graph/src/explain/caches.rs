//! What a program keeps of tokens between steps, by kind.

use crate::layout::page_bytes;
use crate::plan::bytes;
use crate::program::{Cache, Program};
use device::StepLimits;
use serde::Serialize;

/// Layers that keep the same tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct CacheKind {
    /// Layers.
    pub layers: u32,
    /// Page tables of a sequence: pages that a page of tokens takes.
    pub tables: u32,
    /// The last tokens that are kept; `None` for all.
    pub window: Option<u32>,
    /// Whether they keep latents; else keys and values.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub latents: bool,
    /// Bytes that a token takes in these layers.
    pub token_bytes: u64,
}

// The signature is serde's.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(value: &u64) -> bool {
    *value == 0
}

/// The caches of a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Caches {
    /// By kind: layers that keep everything first.
    pub kinds: Vec<CacheKind>,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Tokens of a page.
    pub page_size: u32,
    /// Bytes of a sequence's recurrent states, however long it is.
    #[serde(skip_serializing_if = "is_zero")]
    pub carry_bytes: u64,
}

impl Caches {
    /// Of a program whose steps have these limits.
    pub(crate) fn of(program: &Program, limits: &StepLimits) -> Caches {
        let page_size = limits.page_size;
        let kept = program.kept();
        let kind = |tables: std::ops::Range<u32>, window: Option<u32>| {
            let of = |(index, _): &(usize, &Cache)| tables.contains(&kept.table(*index));
            let own = || program.caches.iter().enumerate().filter(of);
            let token_bytes = own().map(|(_, cache)| cache.token_bytes()).sum();
            let latents = own().all(|(_, cache)| matches!(cache, Cache::Latent { .. }));
            let (layers, tables) = (own().count() as u32, tables.len() as u32);
            CacheKind { layers, tables, window, latents, token_bytes }
        };
        let (full, all) = (kept.full, kept.tables());
        let kinds = [kind(0..full, None), kind(full..all, Some(kept.window))];
        let kinds = kinds.into_iter().filter(|kind| kind.layers > 0).collect();
        let (page_bytes, carry_bytes) =
            (page_bytes(program, page_size), program.seat_bytes(limits));
        Caches { kinds, page_bytes, page_size, carry_bytes }
    }

    /// For people: a line for each kind.
    pub(crate) fn table(&self) -> String {
        let mut text = String::new();
        for CacheKind { layers, tables, window, latents, token_bytes } in &self.kinds {
            let kept = window.map_or("every token".into(), |window| format!("{window} tokens"));
            let kept = if *latents { format!("the latents of {kept}") } else { kept };
            text.push_str(&format!(
                "  {:<10} {layers} layers keep {kept}: {} a token, {tables} pages of {} for {} tokens\n",
                "cache",
                bytes(*token_bytes),
                bytes(self.page_bytes),
                self.page_size
            ));
        }
        if self.carry_bytes > 0 {
            text.push_str(&format!(
                "  {:<10} recurrent layers carry {} a sequence\n",
                "cache",
                bytes(self.carry_bytes)
            ));
        }
        text
    }
}
