//! GPTQ: words of eight input features, transposed, with an order of columns (`g_idx`). The first version of the
//! format stores zeros less one.

use super::int4::{self, Group, VALUES, WORDS};
use super::tensors::{self, SCALES};
use super::{ScaledRows, ScaledWeight, Settings};
use crate::checkpoint::Checkpoint;
use crate::{Error, Result, limits};
use std::ops::Range;

/// One for each of the eight zeros of a word.
const ONES: u32 = 0x1111_1111;

#[derive(Debug)]
pub(super) struct Config {
    /// The group of `group_size`, then those of the exceptions in `dynamic`.
    groups: Vec<Group>,
    /// Whether every weight must have its order of columns.
    ordered: bool,
    /// What to add to a word of zeros.
    offset: u32,
}

impl Config {
    pub(super) fn read(settings: &Settings<'_>) -> Result<Self> {
        settings.expect_int("bits", settings.int("bits")?, 4)?;
        let mut groups = vec![Group::read(settings)?];
        let key = if settings.get("checkpoint_format").is_some() {
            "checkpoint_format"
        } else {
            "format"
        };
        let offset = match settings.text(key)? {
            None | Some("gptq") => ONES,
            Some("gptq_v2") => 0,
            Some(_) => return Err(settings.unsupported(key, "gptq, gptq_v2")),
        };
        if settings.bool("is_marlin_format")? == Some(true) {
            return Err(settings.unsupported("is_marlin_format", "false"));
        }
        if !matches!(settings.text("pack_dtype")?, None | Some("int32")) {
            return Err(settings.unsupported("pack_dtype", "int32"));
        }
        // Symmetric weights have zeros too, and which modules are quantised shows in their tensors.
        settings.bool("sym")?;
        settings.bool("lm_head")?;
        let mut ordered = settings.bool("desc_act")?.unwrap_or(false);
        if let Some(dynamic) = settings.object("dynamic")? {
            let keys: Vec<_> = dynamic.keys().collect();
            if keys.len() > limits::MODULE_GROUPS {
                let found = format!("{} exceptions", keys.len());
                let allowed = format!("at most {}", limits::MODULE_GROUPS);
                let field = settings.field("dynamic");
                return Err(Error::invalid(settings.file(), 0, field, found, allowed));
            }
            for key in keys {
                let Some(exception) = dynamic.object(key)? else { continue };
                if exception.get("bits").is_some() {
                    exception.expect_int("bits", exception.int("bits")?, 4)?;
                }
                if exception.get("group_size").is_some() {
                    groups.push(Group::read(&exception)?);
                }
                exception.bool("sym")?;
                ordered &= exception.bool("desc_act")? != Some(false);
            }
        }
        Ok(Self { groups, ordered, offset })
    }

    pub(super) fn weight(
        &self,
        checkpoint: &Checkpoint,
        module: &str,
    ) -> Result<Option<ScaledWeight>> {
        let [qweight, qzeros, scales, g_idx] =
            ["qweight", "qzeros", "scales", "g_idx"].map(|end| format!("{module}.{end}"));
        if !int4::is_packed(checkpoint, module)? {
            return Ok(None);
        }
        let (words, rows) = tensors::matrix(checkpoint, &qweight, WORDS)?;
        let cols = words * VALUES;
        let group = self.group(checkpoint, &qweight, &scales, cols)?;
        let groups = cols / group;
        let zero_words = rows.div_ceil(VALUES);
        tensors::expect(checkpoint, &scales, SCALES, &[groups, rows], &qweight)?;
        tensors::expect(checkpoint, &qzeros, WORDS, &[groups, zero_words], &qweight)?;
        let mut tensors = vec![qweight.clone(), qzeros.clone(), scales.clone()];
        let mut order = None;
        if self.ordered || checkpoint.get(&g_idx).is_some() {
            order = int4::order(checkpoint, &g_idx, cols, group, false)?;
            tensors.push(g_idx);
        }
        let scheme = int4::scheme(group, order.as_ref());
        let shape = [groups, rows];
        let offset = self.offset;
        let stored = super::Stored::Gptq(Stored { qweight, qzeros, scales, order, shape, offset });
        Ok(Some(ScaledWeight { scheme, rows, cols, stored, tensors }))
    }

    /// Columns of a group: where an exception may have its own, the shape of the scales tells which it is.
    fn group(
        &self,
        checkpoint: &Checkpoint,
        qweight: &str,
        scales: &str,
        cols: usize,
    ) -> Result<usize> {
        let (groups, _) = tensors::matrix(checkpoint, scales, SCALES)?;
        for group in &self.groups[1..] {
            if let Ok(columns) = group.columns(checkpoint, qweight, cols)
                && columns * groups == cols
            {
                return Ok(columns);
            }
        }
        self.groups[0].columns(checkpoint, qweight, cols)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Stored {
    qweight: String,
    qzeros: String,
    scales: String,
    order: Option<Vec<u32>>,
    /// Groups and rows of the whole weight.
    shape: [usize; 2],
    offset: u32,
}

impl Stored {
    pub(super) fn read(
        &self,
        checkpoint: &Checkpoint,
        cols: usize,
        rows: Range<usize>,
    ) -> Result<ScaledRows> {
        let scales = int4::transposed_scales(checkpoint, &self.scales, self.shape, &rows)?;
        // Whole words are added to, carries and all, because the first version was made from the second by
        // subtraction of whole words.
        let zero = |word: u32, i| int4::value(word.wrapping_add(self.offset), i);
        let zeros = int4::transposed_zeros(checkpoint, &self.qzeros, self.shape, &rows, zero)?;
        let mut values = vec![0; rows.len() * cols];
        let needed = [4 * rows.start, 4 * rows.len()];
        let shape = [cols / VALUES, 4 * self.shape[1]];
        tensors::strips(checkpoint, &self.qweight, shape, needed, |strip| {
            for row in 0..rows.len() {
                let first = row * cols + strip.first * VALUES;
                let values = &mut values[first..][..strip.rows * VALUES];
                for (line, values) in values.chunks_exact_mut(VALUES).enumerate() {
                    let word = strip.word(line, row);
                    for (i, value) in values.iter_mut().enumerate() {
                        *value = int4::value(word, i);
                    }
                }
            }
        })?;
        Ok(ScaledRows::Int4 { values, scales, zeros, groups: self.order.clone() })
    }
}
