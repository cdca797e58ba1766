//! AWQ in the layout called `gemm`: words of eight output features, transposed, their values out of order.

use super::int4::{self, Group, VALUES, WORDS};
use super::tensors::{self, SCALES};
use super::{ScaledRows, ScaledWeight, Settings};
use crate::Result;
use crate::checkpoint::Checkpoint;
use std::ops::Range;

/// Which four bits of a word hold each of its eight features.
const PLACES: [usize; VALUES] = [0, 4, 1, 5, 2, 6, 3, 7];

#[derive(Debug)]
pub(super) struct Config {
    group: Group,
}

impl Config {
    pub(super) fn read(settings: &Settings<'_>) -> Result<Self> {
        settings.expect_int("bits", settings.int("bits")?, 4)?;
        for key in ["version", "format", "checkpoint_format"] {
            if settings.text(key)?.is_some_and(|found| !found.eq_ignore_ascii_case("gemm")) {
                return Err(settings.unsupported(key, "gemm"));
            }
        }
        if settings.bool("zero_point")? == Some(false) {
            return Err(settings.unsupported("zero_point", "true"));
        }
        // Which modules were left as they are shows in their tensors.
        settings.names("modules_to_not_convert")?;
        Ok(Self { group: Group::read(settings)? })
    }

    pub(super) fn weight(
        &self,
        checkpoint: &Checkpoint,
        module: &str,
    ) -> Result<Option<ScaledWeight>> {
        let [qweight, qzeros, scales] =
            ["qweight", "qzeros", "scales"].map(|end| format!("{module}.{end}"));
        if !int4::is_packed(checkpoint, module)? {
            return Ok(None);
        }
        let (cols, words) = tensors::matrix(checkpoint, &qweight, WORDS)?;
        let rows = words * VALUES;
        let group = self.group.columns(checkpoint, &qweight, cols)?;
        let groups = cols / group;
        tensors::expect(checkpoint, &qzeros, WORDS, &[groups, words], &qweight)?;
        tensors::expect(checkpoint, &scales, SCALES, &[groups, rows], &qweight)?;
        let tensors = vec![qweight.clone(), qzeros.clone(), scales.clone()];
        let stored = super::Stored::Awq(Stored { qweight, qzeros, scales, groups, all_rows: rows });
        let scheme = int4::scheme(group, None);
        Ok(Some(ScaledWeight { scheme, rows, cols, stored, tensors }))
    }
}

#[derive(Clone, Debug)]
pub(super) struct Stored {
    qweight: String,
    qzeros: String,
    scales: String,
    groups: usize,
    all_rows: usize,
}

impl Stored {
    pub(super) fn read(
        &self,
        checkpoint: &Checkpoint,
        cols: usize,
        rows: Range<usize>,
    ) -> Result<ScaledRows> {
        let shape = [self.groups, self.all_rows];
        let scales = int4::transposed_scales(checkpoint, &self.scales, shape, &rows)?;
        let place = |word, i: usize| int4::value(word, PLACES[i]);
        let zeros = int4::transposed_zeros(checkpoint, &self.qzeros, shape, &rows, place)?;
        let mut values = vec![0; rows.len() * cols];
        let words = int4::words(&rows);
        let needed = [4 * words.start, 4 * words.len()];
        let shape = [cols, 4 * (self.all_rows / VALUES)];
        tensors::strips(checkpoint, &self.qweight, shape, needed, |strip| {
            // A row's values lie together, so the loop over columns is inside.
            for (out, row) in rows.clone().enumerate() {
                let (word, shift) = (row / VALUES - words.start, 4 * PLACES[row % VALUES]);
                let values = &mut values[out * cols + strip.first..][..strip.rows];
                for (column, value) in values.iter_mut().enumerate() {
                    *value = (strip.word(column, word) >> shift) as u8 & 15;
                }
            }
        })?;
        Ok(ScaledRows::Int4 { values, scales, zeros, groups: None })
    }
}
