//! `quant_method: mxfp4`: experts of all of a layer in one tensor of four-bit floats, with an exponent for each 32 columns of
//! a row. The tensors have the name of the weight and `_blocks` or `_scales` behind it; other weights are plain.

use super::tensors;
use super::{ScaledRows, ScaledWeight, Scheme, Settings};
use crate::Result;
use crate::checkpoint::Checkpoint;
use crate::dtype::DType;
use std::ops::Range;

/// Columns with one exponent.
pub(super) const GROUP: usize = 32;
/// Bytes of the elements of a group.
const BYTES: usize = GROUP / 2;
/// Bytes of a block in GGUF: the exponent, then the elements.
const BLOCK_BYTES: usize = 1 + BYTES;

#[derive(Debug)]
pub(super) struct Config;

impl Config {
    pub(super) fn read(settings: &Settings<'_>) -> Result<Self> {
        // Which weights are quantised is decided by the tensors; the list still has to be one.
        settings.names("modules_to_not_convert")?;
        Ok(Self)
    }

    /// The weight of that name, which has no `.weight` behind it.
    pub(super) fn weight(
        &self,
        checkpoint: &Checkpoint,
        name: &str,
    ) -> Result<Option<ScaledWeight>> {
        let (blocks, scales) = (format!("{name}_blocks"), format!("{name}_scales"));
        if checkpoint.get(&blocks).is_none() {
            return Ok(None);
        }
        let info = tensors::typed(checkpoint, &blocks, &[DType::U8])?;
        let &[experts, rows, groups, BYTES] = &info.shape[..] else {
            let allowed = format!("[experts, rows, columns / {GROUP}, {BYTES}]");
            return Err(checkpoint.invalid(&blocks, "shape", format!("{:?}", info.shape), allowed));
        };
        if experts * rows * groups == 0 {
            let allowed = "no dimension of 0";
            return Err(checkpoint.invalid(&blocks, "shape", format!("{:?}", info.shape), allowed));
        }
        let shape = [experts, rows, groups];
        tensors::expect(checkpoint, &scales, &[DType::U8, DType::F8_E8M0], &shape, &blocks)?;
        let tensors = vec![blocks.clone(), scales.clone()];
        let stored = super::Stored::Mxfp4(Stored { blocks, scales });
        let (rows, cols) = (experts * rows, groups * GROUP);
        Ok(Some(ScaledWeight { scheme: Scheme::Mxfp4, rows, cols, stored, tensors }))
    }
}

#[derive(Clone, Debug)]
pub(super) struct Stored {
    blocks: String,
    scales: String,
}

impl Stored {
    pub(super) fn read(
        &self,
        checkpoint: &Checkpoint,
        cols: usize,
        rows: Range<usize>,
    ) -> Result<ScaledRows> {
        let part = |name: &str, each: usize| {
            let mut bytes = vec![0; rows.len() * each];
            checkpoint.read_range(name, rows.start * each, &mut bytes)?;
            Ok::<_, crate::Error>(bytes)
        };
        let (bytes, exponents) = (part(&self.blocks, cols / 2)?, part(&self.scales, cols / GROUP)?);
        Ok(ScaledRows::Mxfp4 { bytes, exponents })
    }
}

/// Rows of GGUF blocks, where the lower halves of a block's bytes are its first 16 elements, in the order of this module.
pub(super) fn from_blocks(blocks: &[u8]) -> ScaledRows {
    let (mut bytes, mut exponents) = (Vec::new(), Vec::new());
    for block in blocks.chunks_exact(BLOCK_BYTES) {
        let element = |at: usize| match at < BYTES {
            true => block[1 + at] & 15,
            false => block[1 + at - BYTES] >> 4,
        };
        exponents.push(block[0]);
        bytes.extend((0..BYTES).map(|at| element(2 * at) | element(2 * at + 1) << 4));
    }
    ScaledRows::Mxfp4 { bytes, exponents }
}
