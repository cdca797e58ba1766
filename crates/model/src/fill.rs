//! Moves weights into the arena: in parallel, a few rows at a time, arranged and converted on the way.

use crate::LoadError;
use crate::open::device_dtype;
use crate::weights::{Arrange, WeightSpec};
use device::cpu::pack::pack_parts;
use device::graph::Node;
use device::op::{Noise, Op};
use device::target::WeightUse;
use device::{Arena, DType, Device, Tensor};
use formats::checkpoint::{Checkpoint, TensorInfo};
use formats::quant::dequantise;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of source rows handled at once; bounds the memory of a load to this times the threads.
const CHUNK_BYTES: usize = 16 << 20;

/// Where weights go.
#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    pub(crate) device: &'a Device,
    pub(crate) arena: &'a Arena,
}

/// A weight and its place.
type Placed<'a> = (&'a WeightSpec, Tensor);

impl Target<'_> {
    /// Fills every weight from a checkpoint whose tensors were checked; `progress` gets bytes done so far.
    pub(crate) fn copy(
        &self,
        placed: &[Placed<'_>],
        checkpoint: &Checkpoint,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<(), LoadError> {
        let done = AtomicU64::new(0);
        let chunks = |(index, (spec, _)): (usize, &Placed<'_>)| {
            // Whole heads and whole packing groups, so that a chunk's rows come from few ranges.
            let heads = spec.parts.iter().filter_map(|part| part.heads).map(|heads| heads.dim);
            let unit = heads.max().unwrap_or(1).next_multiple_of(16);
            let step = unit.max(CHUNK_BYTES / (spec.cols() * 4) / unit * unit);
            let rows = spec.rows();
            let chunk = move |from: usize| (index, from..(from + step).min(rows));
            (0..rows).step_by(step).map(chunk).collect::<Vec<_>>()
        };
        let jobs: Vec<(usize, Range<usize>)> = placed.iter().enumerate().flat_map(chunks).collect();
        jobs.into_par_iter().try_for_each(|(index, rows)| {
            let (spec, tensor) = &placed[index];
            let read = match spec.kind {
                WeightUse::Vector => self.fill_vector(spec, tensor, checkpoint)?,
                WeightUse::Table | WeightUse::Matrix => {
                    self.fill_rows(spec, tensor, checkpoint, rows)?
                }
            };
            progress(done.fetch_add(read, Ordering::Relaxed) + read);
            Ok(())
        })
    }

    /// Fills every weight from a seed: matrices uniform with the deviation models are initialised with,
    /// norms around 1. Where there are experts, embeddings are as large as what layers add to them: else attention would
    /// make all tokens of a sequence alike, and they would go to the same experts.
    pub(crate) fn draw(&self, placed: &[Placed<'_>], seed: u64) -> Result<(), LoadError> {
        let experts = placed.iter().any(|(spec, _)| spec.arrange == Arrange::PAIRS);
        for (index, (spec, to)) in placed.iter().enumerate() {
            let is_bias = spec.name.ends_with("bias");
            let (mean, scale) = match spec.kind {
                WeightUse::Vector if !is_bias => (1.0, 0.1),
                WeightUse::Table if experts => (0.0, 3f32.sqrt()),
                // Uniform in ±√3·σ has deviation σ = 0.02.
                WeightUse::Vector | WeightUse::Table | WeightUse::Matrix => {
                    (0.0, 0.02 * 3f32.sqrt())
                }
            };
            let seed = seed ^ (index as u64 + 1).wrapping_mul(0xD1B5_4A32_D192_ED03);
            let op = Op::Noise(Noise { to: *to, seed, mean, scale });
            self.device.run(self.arena, &Node { op, name: spec.name.clone(), layer: None })?;
        }
        self.device.sync()?;
        Ok(())
    }

    /// Fills rows of one weight; returns source bytes read.
    fn fill_rows(
        &self,
        spec: &WeightSpec,
        tensor: &Tensor,
        checkpoint: &Checkpoint,
        rows: Range<usize>,
    ) -> Result<u64, LoadError> {
        let stored = StoredRows::read(spec, checkpoint, rows.clone())?;
        if matches!(tensor.dtype, DType::P4 | DType::P8) {
            return self.pack(spec, tensor, &stored, rows);
        }
        let mut gathered = Vec::new();
        let mut floats = vec![0.0; spec.cols()];
        for row in rows.clone() {
            let (info, bytes) = stored.row(spec, row);
            if source_dtype(info) == tensor.dtype {
                gathered.extend_from_slice(bytes);
            } else {
                dequantise(info.dtype, bytes, &mut floats).map_err(LoadError::Quant)?;
                tensor.dtype.encode(&floats, &mut gathered);
            }
        }
        self.put(spec, tensor, &rows, &gathered)?;
        Ok(stored.read)
    }

    /// Packs rows of one weight the way the CPU multiplies them.
    fn pack(
        &self,
        spec: &WeightSpec,
        tensor: &Tensor,
        stored: &StoredRows<'_>,
        rows: Range<usize>,
    ) -> Result<u64, LoadError> {
        let sources: Vec<(DType, &[u8])> = rows
            .clone()
            .map(|row| stored.row(spec, row))
            .map(|(info, bytes)| (source_dtype(info), bytes))
            .collect();
        let mut packed = vec![0; tensor.dtype.bytes(rows.len() * spec.cols())];
        pack_parts(tensor.dtype, &sources, spec.cols(), &mut packed);
        self.put(spec, tensor, &rows, &packed)?;
        Ok(stored.read)
    }

    fn put(
        &self,
        spec: &WeightSpec,
        tensor: &Tensor,
        rows: &Range<usize>,
        bytes: &[u8],
    ) -> Result<(), LoadError> {
        let row_bytes = tensor.dtype.bytes(spec.cols()) as u64;
        let to = tensor.span.part(rows.start as u64 * row_bytes, rows.len() as u64 * row_bytes);
        Ok(self.device.write(self.arena, to, bytes)?)
    }

    fn fill_vector(
        &self,
        spec: &WeightSpec,
        tensor: &Tensor,
        checkpoint: &Checkpoint,
    ) -> Result<u64, LoadError> {
        let mut all = Vec::with_capacity(spec.cols());
        let mut read = 0;
        for part in &spec.parts {
            let stored = checkpoint.read_f32(&part.tensor)?;
            read += (stored.len() * 4) as u64;
            let element = |i| (stored[part.stored_row(i)] + part.add) * part.factor;
            all.extend((0..part.rows.len()).map(element));
        }
        let mut out = Vec::with_capacity(all.len() * 4);
        tensor.dtype.encode(&all, &mut out);
        self.device.write(self.arena, tensor.span, &out)?;
        Ok(read)
    }
}

/// The stored rows that some rows of a weight are made of: one range of each part that has any.
struct StoredRows<'a> {
    parts: BTreeMap<usize, StoredPart<'a>>,
    /// Bytes read.
    read: u64,
}

struct StoredPart<'a> {
    info: &'a TensorInfo,
    /// The first stored row that was read.
    from: usize,
    row_bytes: usize,
    /// Which bytes of a row are wanted.
    cols: Range<usize>,
    bytes: Vec<u8>,
}

impl<'a> StoredRows<'a> {
    fn read(
        spec: &WeightSpec,
        checkpoint: &'a Checkpoint,
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
            let info = checkpoint.get(&part.tensor).expect("the tensors were checked");
            let dtype = source_dtype(info);
            let row_bytes = info.bytes / part.tensor_rows;
            let mut bytes = vec![0; (to - from + 1) * row_bytes];
            checkpoint.read_range(&info.name, from * row_bytes, &mut bytes)?;
            all.read += bytes.len() as u64;
            let cols = dtype.bytes(spec.cols.start)..dtype.bytes(spec.cols.end);
            all.parts.insert(index, StoredPart { info, from, row_bytes, cols, bytes });
        }
        Ok(all)
    }

    /// The bytes of a row of the weight, and the tensor they are of.
    fn row(&self, spec: &WeightSpec, row: usize) -> (&'a TensorInfo, &[u8]) {
        let (part, stored) = spec.source(row);
        let StoredPart { info, from, row_bytes, cols, bytes } = &self.parts[&part];
        (info, &bytes[(stored - from) * row_bytes..][cols.clone()])
    }
}

fn source_dtype(info: &TensorInfo) -> DType {
    device_dtype(info.dtype).expect("the tensors were checked")
}
