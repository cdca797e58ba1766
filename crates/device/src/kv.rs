//! Where keys and values of a layer lie, or the latents that both are made of.

use crate::{DType, Span};
use serde::{Deserialize, Serialize};

/// One layer's pages: `[page][k, v][kv_head][token in page][head_dim]`, or for latents
/// `[page][token in page][head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct KvLayer {
    /// The layer's part of the KV region.
    pub span: Span,
    /// F32, F16, BF16 or E4M3.
    pub dtype: DType,
    /// For E4M3: f32 scales of every head's keys, then of its values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scales: Option<Span>,
    /// Pages, the scratch page included.
    pub pages: u32,
    /// Tokens per page.
    pub page_size: u32,
    /// KV heads.
    pub heads: u32,
    /// Elements per head.
    pub head_dim: u32,
    /// Pages of latents: one head of keys, whose first so many elements are the values, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latent: Option<u32>,
}

impl KvLayer {
    /// What a page holds of each head: keys and values, or one row for both.
    pub const fn parts(&self) -> u32 {
        if self.latent.is_some() { 1 } else { 2 }
    }

    /// Elements of one page: all parts of all heads.
    pub const fn page_elems(&self) -> u64 {
        let heads = self.parts() as u64 * self.heads as u64;
        heads.saturating_mul(self.head_dim as u64).saturating_mul(self.page_size as u64)
    }

    /// Bytes of its scales; 0 if its type has none.
    pub const fn scale_bytes(&self) -> u64 {
        if matches!(self.dtype, DType::E4M3) { 2 * 4 * self.heads as u64 } else { 0 }
    }

    /// Bytes of one page of this layer.
    pub const fn page_bytes(&self) -> u64 {
        self.page_elems().saturating_mul(self.dtype.block_bytes() as u64)
    }
}
