//! A checkpoint's weights as rows: plain tensors, GGUF blocks, or values with scales in tensors of their own.

use crate::LoadError;
use crate::weights::{Arrange, HeadRows, Part, WeightSpec};
use device::DType;
use device::scaled::BLOCK;
use formats::checkpoint::{Checkpoint, TensorInfo};
use formats::quant::dequantise;
use formats::scaled::{Quantisation, ScaledRows, ScaledWeight, Scheme};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// A model's files.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) checkpoint: Checkpoint,
    quantisation: Option<Quantisation>,
    /// Files whose tensors replace those of the same names, the latest last.
    newer: Vec<Files>,
}

/// The weights with scales that some weights of a program are made of, by the names of their tensors.
pub(crate) type ScaledParts = BTreeMap<String, ScaledWeight>;

impl Files {
    pub(crate) fn open(path: &Path) -> Result<Files, LoadError> {
        let checkpoint = Checkpoint::open(path)?;
        let quantisation = Quantisation::of(&checkpoint)?;
        Ok(Files { checkpoint, quantisation, newer: Vec::new() })
    }

    /// Lets the tensors of other files replace these; returns how many there were before.
    pub(crate) fn cover(&mut self, newer: Files) -> usize {
        self.newer.push(newer);
        self.newer.len() - 1
    }

    /// Takes the latest files away until `left` are left.
    pub(crate) fn uncover(&mut self, left: usize) {
        self.newer.truncate(left);
    }

    /// Forgets files that the latest replace as a whole.
    pub(crate) fn keep_latest(&mut self) {
        let keep = self.newer.len().saturating_sub(1);
        self.newer.drain(..keep);
    }

    /// Whether these files have a tensor, plain or with scales.
    pub(crate) fn has(&self, tensor: &str) -> bool {
        self.checkpoint.get(tensor).is_some() || matches!(self.own_scaled(tensor), Ok(Some(_)))
    }

    /// The files that a tensor is read from.
    fn of(&self, tensor: &str) -> &Files {
        self.newer.iter().rev().find(|files| files.has(tensor)).unwrap_or(self)
    }

    /// The checkpoint that a tensor is read from.
    pub(crate) fn checkpoint_of(&self, tensor: &str) -> &Checkpoint {
        &self.of(tensor).checkpoint
    }

    /// A tensor's values with their scales; `None` if it is a plain one.
    fn scaled(&self, tensor: &str) -> Result<Option<ScaledWeight>, LoadError> {
        self.of(tensor).own_scaled(tensor)
    }

    fn own_scaled(&self, tensor: &str) -> Result<Option<ScaledWeight>, LoadError> {
        match &self.quantisation {
            Some(quantisation) => Ok(quantisation.weight(&self.checkpoint, tensor)?),
            None => Ok(None),
        }
    }

    /// Everything with scales that these weights are made of.
    pub(crate) fn scaled_parts(&self, specs: &[WeightSpec]) -> Result<ScaledParts, LoadError> {
        let mut all = BTreeMap::new();
        for part in specs.iter().flat_map(|spec| &spec.parts) {
            if let Some(weight) = self.scaled(&part.tensor)? {
                all.insert(part.tensor.clone(), weight);
            }
        }
        Ok(all)
    }

    /// The scales of a layer's keys, then of its values, for each of `heads` heads: those of the checkpoint (one for
    /// all heads, or one for each), else 1.
    pub(crate) fn page_scales(&self, layer: usize, heads: usize) -> Result<Vec<f32>, LoadError> {
        let mut scales = Vec::with_capacity(2 * heads);
        for which in ["k_scale", "v_scale"] {
            let name = format!("model.layers.{layer}.self_attn.{which}");
            let checkpoint = self.checkpoint_of(&name);
            let stored = match checkpoint.get(&name) {
                Some(_) => checkpoint.read_f32(&name)?,
                None => vec![1.0],
            };
            let positive = stored.iter().all(|scale| scale.is_finite() && *scale > 0.0);
            if !positive || ![1, heads].contains(&stored.len()) {
                let problem = format!("{name}: {stored:?} are no scales of {heads} heads");
                let path = self.checkpoint.path().to_owned();
                return Err(LoadError::Tensors { path, problems: vec![problem] });
            }
            scales.extend((0..heads).map(|head| stored[head % stored.len()]));
        }
        Ok(scales)
    }

    /// The types of a weight's parts. One that is missing or wrong is reported later, with all others.
    pub(crate) fn types(&self, spec: &WeightSpec) -> Vec<DType> {
        spec.parts.iter().map(|part| self.dtype(spec, part)).collect()
    }

    fn dtype(&self, spec: &WeightSpec, part: &Part) -> DType {
        if let Ok(Some(weight)) = self.scaled(&part.tensor) {
            return scaled_dtype(weight.scheme(), weight.cols())
                .filter(|dtype| *dtype != DType::F8Block || keeps_blocks(spec, part))
                .unwrap_or(DType::BF16);
        }
        let info = self.checkpoint_of(&part.tensor).get(&part.tensor);
        info.and_then(|info| device_dtype(info.dtype)).unwrap_or(DType::F32)
    }
}

/// How the device stores such a weight; `None` if it has no type for it.
fn scaled_dtype(scheme: Scheme, cols: usize) -> Option<DType> {
    match scheme {
        Scheme::Fp8Block => Some(DType::F8Block),
        Scheme::Fp8Row => Some(DType::F8Row),
        Scheme::Mxfp4 => Some(DType::Mxfp4),
        // Columns of one group lie apart.
        Scheme::Int4 { ordered: true, .. } => None,
        Scheme::Int4 { group: 64, .. } => Some(DType::I4G64),
        Scheme::Int4 { group: 32, .. } => Some(DType::I4G32),
        Scheme::Int4 { group, .. } => {
            let one = group >= cols && cols.is_multiple_of(BLOCK);
            (group == BLOCK || one).then_some(DType::I4)
        }
    }
}

/// Whether the blocks of a part are blocks of the weight, too: no block has rows of two parts, and rows of heads that
/// are put into another order stay in theirs.
fn keeps_blocks(spec: &WeightSpec, part: &Part) -> bool {
    let in_place = |heads: HeadRows| {
        let same = heads.stored == heads.wanted && heads.rotated == heads.dim;
        same || BLOCK.is_multiple_of(heads.dim)
    };
    let last = spec.parts.last() == Some(part) && spec.arrange == Arrange::Stacked;
    let alone = spec.parts.len() == 1;
    part.rows.start.is_multiple_of(BLOCK)
        && (part.rows.len().is_multiple_of(BLOCK) || last || alone)
        && part.heads.is_none_or(in_place)
}

/// The stored rows that some rows of a weight are made of: one range of each part that has any.
pub(crate) struct StoredRows<'a> {
    parts: BTreeMap<usize, StoredPart<'a>>,
    /// Bytes read.
    pub(crate) read: u64,
}

struct StoredPart<'a> {
    /// The first stored row that was read.
    from: usize,
    /// Which columns are wanted.
    cols: Range<usize>,
    rows: Rows<'a>,
}

enum Rows<'a> {
    Plain { info: &'a TensorInfo, row_bytes: usize, bytes: Vec<u8> },
    Scaled { rows: ScaledRows, cols: usize },
}

/// A row with scales.
pub(crate) enum ScaledRow<'a> {
    /// e4m3 and a scale for 128 columns, or for all.
    Fp8(&'a [u8], &'a [f32]),
    /// 4-bit values, scales and zeros of groups.
    Int4(&'a [u8], &'a [f32], &'a [u8]),
    /// MXFP4: elements and the exponents of their groups.
    Mxfp4(&'a [u8], &'a [u8]),
}

impl<'a> StoredRows<'a> {
    pub(crate) fn read(
        spec: &WeightSpec,
        files: &'a Files,
        scaled: &ScaledParts,
        rows: Range<usize>,
    ) -> Result<StoredRows<'a>, LoadError> {
        let mut ranges: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
        for row in rows {
            let (part, stored) = spec.source(row);
            let range = ranges.entry(part).or_insert((stored, stored));
            *range = (range.0.min(stored), range.1.max(stored));
        }
        let mut all = StoredRows { parts: BTreeMap::new(), read: 0 };
        for (index, (from, to)) in ranges {
            let part = &spec.parts[index];
            let checkpoint = files.checkpoint_of(&part.tensor);
            let rows = match scaled.get(&part.tensor) {
                Some(weight) => {
                    let rows = weight.read(checkpoint, from..to + 1)?;
                    all.read += match &rows {
                        ScaledRows::Fp8 { bytes, .. } => bytes.len() as u64,
                        ScaledRows::Int4 { values, .. } => values.len() as u64 / 2,
                        ScaledRows::Mxfp4 { bytes, .. } => bytes.len() as u64,
                    };
                    Rows::Scaled { rows, cols: weight.cols() }
                }
                None => {
                    let info = checkpoint.get(&part.tensor).expect("the tensors were checked");
                    let row_bytes = info.bytes / part.tensor_rows;
                    let mut bytes = vec![0; (to - from + 1) * row_bytes];
                    match part.turned {
                        true => read_turned(part, checkpoint, info, from, &mut bytes)?,
                        false => {
                            checkpoint.read_range(&info.name, from * row_bytes, &mut bytes)?;
                        }
                    }
                    all.read += bytes.len() as u64;
                    match info.dtype {
                        formats::dtype::DType::MXFP4 => Rows::Scaled {
                            rows: ScaledRows::of_mxfp4_blocks(&bytes),
                            cols: spec.tensor_cols,
                        },
                        _ => Rows::Plain { info, row_bytes, bytes },
                    }
                }
            };
            all.parts.insert(index, StoredPart { from, cols: spec.cols.clone(), rows });
        }
        Ok(all)
    }

    /// The part of a row of the weight, and its place there.
    fn part(&self, spec: &WeightSpec, row: usize) -> (&StoredPart<'a>, usize) {
        let (part, stored) = spec.source(row);
        let part = &self.parts[&part];
        (part, stored - part.from)
    }

    /// The bytes of a row of the weight, and their type; `None` if it has scales.
    pub(crate) fn bytes(&self, spec: &WeightSpec, row: usize) -> Option<(DType, &[u8])> {
        let (StoredPart { cols, rows, .. }, at) = self.part(spec, row);
        let Rows::Plain { info, row_bytes, bytes } = rows else { return None };
        let dtype = device_dtype(info.dtype).expect("the tensors were checked");
        let cols = dtype.bytes(cols.start)..dtype.bytes(cols.end);
        Some((dtype, &bytes[at * row_bytes..][cols]))
    }

    /// A row of the weight with its scales; `None` if it has none of its own, or only some of its columns are wanted.
    pub(crate) fn scaled(&self, spec: &WeightSpec, row: usize) -> Option<ScaledRow<'_>> {
        let (StoredPart { cols: wanted, rows, .. }, at) = self.part(spec, row);
        let Rows::Scaled { rows, cols } = rows else { return None };
        let (cols, whole) = (*cols, *wanted == (0..*cols));
        fn of<T>(all: &[T], row: usize, each: usize) -> &[T] {
            &all[row * each..][..each]
        }
        match rows {
            ScaledRows::Fp8 { bytes, scales } if whole => {
                let each = scales.len() / (bytes.len() / cols);
                Some(ScaledRow::Fp8(of(bytes, at, cols), of(scales, at, each)))
            }
            ScaledRows::Int4 { values, scales, zeros, groups: None } if whole => {
                let each = scales.len() / (values.len() / cols);
                let (scales, zeros) = (of(scales, at, each), of(zeros, at, each));
                Some(ScaledRow::Int4(of(values, at, cols), scales, zeros))
            }
            ScaledRows::Mxfp4 { bytes, exponents } if whole => {
                let each = cols / 2;
                let groups = exponents.len() / (bytes.len() / each);
                Some(ScaledRow::Mxfp4(of(bytes, at, each), of(exponents, at, groups)))
            }
            _ => None,
        }
    }

    /// A row of the weight as floats.
    pub(crate) fn floats(
        &self,
        spec: &WeightSpec,
        row: usize,
        out: &mut [f32],
    ) -> Result<(), LoadError> {
        let (StoredPart { cols: wanted, rows, .. }, at) = self.part(spec, row);
        match rows {
            Rows::Plain { info, row_bytes, bytes } => {
                let dtype = device_dtype(info.dtype).expect("the tensors were checked");
                let cols = dtype.bytes(wanted.start)..dtype.bytes(wanted.end);
                dequantise(info.dtype, &bytes[at * row_bytes..][cols], out)
                    .map_err(LoadError::Quant)
            }
            Rows::Scaled { rows, cols } => {
                let mut all = vec![0.0; *cols];
                row_of(rows, *cols, at).dequantise(*cols, &mut all);
                out.copy_from_slice(&all[wanted.clone()]);
                Ok(())
            }
        }
    }
}

/// Reads stored rows from `from` on, of a matrix that has a column for each: some elements of each of its lines.
fn read_turned(
    part: &Part,
    checkpoint: &Checkpoint,
    info: &TensorInfo,
    from: usize,
    bytes: &mut [u8],
) -> Result<(), LoadError> {
    let size = info.dtype.block_bytes();
    let rows = part.tensor_rows / part.stack.unwrap_or(1);
    let row_bytes = info.bytes / part.tensor_rows;
    let (cols, count) = (row_bytes / size, bytes.len() / row_bytes);
    let (matrix, first) = (from / rows, from % rows);
    let mut some = vec![0; count * size];
    for col in 0..cols {
        let at = (matrix * cols + col) * rows + first;
        checkpoint.read_range(&info.name, at * size, &mut some)?;
        for (row, element) in some.chunks_exact(size).enumerate() {
            bytes[row * row_bytes + col * size..][..size].copy_from_slice(element);
        }
    }
    Ok(())
}

/// One of some rows.
fn row_of(rows: &ScaledRows, cols: usize, at: usize) -> ScaledRows {
    fn of<T: Clone>(all: &[T], row: usize, rows: usize) -> Vec<T> {
        let each = all.len() / rows;
        all[row * each..][..each].to_vec()
    }
    match rows {
        ScaledRows::Fp8 { bytes, scales } => {
            let count = bytes.len() / cols;
            ScaledRows::Fp8 { bytes: of(bytes, at, count), scales: of(scales, at, count) }
        }
        ScaledRows::Int4 { values, scales, zeros, groups } => {
            let count = values.len() / cols;
            ScaledRows::Int4 {
                values: of(values, at, count),
                scales: of(scales, at, count),
                zeros: of(zeros, at, count),
                groups: groups.clone(),
            }
        }
        ScaledRows::Mxfp4 { bytes, exponents } => {
            let count = bytes.len() / (cols / 2);
            ScaledRows::Mxfp4 { bytes: of(bytes, at, count), exponents: of(exponents, at, count) }
        }
    }
}

/// The device's name for a checkpoint's type, when weights can be of it.
pub(crate) fn device_dtype(dtype: formats::dtype::DType) -> Option<DType> {
    use formats::dtype::DType as F;
    Some(match dtype {
        F::F32 => DType::F32,
        F::F16 => DType::F16,
        F::BF16 => DType::BF16,
        F::Q4_0 => DType::Q4_0,
        F::Q4_1 => DType::Q4_1,
        F::Q5_0 => DType::Q5_0,
        F::Q5_1 => DType::Q5_1,
        F::Q8_0 => DType::Q8_0,
        F::Q2_K => DType::Q2K,
        F::Q3_K => DType::Q3K,
        F::Q4_K => DType::Q4K,
        F::Q5_K => DType::Q5K,
        F::Q6_K => DType::Q6K,
        F::MXFP4 => DType::Mxfp4,
        _ => return None,
    })
}
