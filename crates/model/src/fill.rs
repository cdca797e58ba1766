//! Moves weights into the arena: in parallel, a few rows at a time, arranged and converted on the way.

use crate::LoadError;
use crate::stored::{Files, ScaledParts, ScaledRow, StoredRows};
use crate::weights::WeightSpec;
use device::cpu::pack::pack_parts;
use device::graph::Node;
use device::op::{Noise, Op};
use device::scaled::{self as layouts, Chunk};
use device::target::WeightUse;
use device::{Arena, DType, Device, Tensor};
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
        files: &Files,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<(), LoadError> {
        let specs = placed.iter().map(|(spec, _)| (*spec).clone()).collect::<Vec<_>>();
        let scaled = files.scaled_parts(&specs)?;
        let done = AtomicU64::new(0);
        let chunks = |(index, (spec, tensor)): (usize, &Placed<'_>)| {
            // Whole heads and whole packing groups, so that a chunk's rows come from few ranges; rows that share scales.
            let heads = spec.parts.iter().filter_map(|part| part.heads).map(|heads| heads.dim);
            let shared =
                if layouts::is_scaled(tensor.dtype) { layouts::unit(tensor.dtype) } else { 16 };
            let unit = heads.max().unwrap_or(1).next_multiple_of(shared);
            let step = unit.max(CHUNK_BYTES / (spec.cols() * 4) / unit * unit);
            let rows = spec.rows();
            let chunk = move |from: usize| (index, from..(from + step).min(rows));
            (0..rows).step_by(step).map(chunk).collect::<Vec<_>>()
        };
        let jobs: Vec<(usize, Range<usize>)> = placed.iter().enumerate().flat_map(chunks).collect();
        jobs.into_par_iter().try_for_each(|(index, rows)| {
            let (spec, tensor) = &placed[index];
            let read = match spec.kind {
                WeightUse::Vector => self.fill_vector(spec, tensor, files)?,
                _ => self.fill_rows(spec, tensor, (files, &scaled), rows)?,
            };
            progress(done.fetch_add(read, Ordering::Relaxed) + read);
            Ok(())
        })
    }

    /// Fills every weight from a seed: matrices uniform with the deviation models are initialised with,
    /// norms around 1. Where there are experts, embeddings are as large as what layers add to them: else attention would
    /// make all tokens of a sequence alike, and they would go to the same experts.
    pub(crate) fn draw(&self, placed: &[Placed<'_>], seed: u64) -> Result<(), LoadError> {
        let experts = placed.iter().any(|(spec, _)| spec.kind == WeightUse::Experts);
        for (index, (spec, to)) in placed.iter().enumerate() {
            let is_bias = spec.name.ends_with("bias");
            let (mean, scale) = match spec.kind {
                WeightUse::Vector if !is_bias => (1.0, 0.1),
                WeightUse::Table if experts => (0.0, 3f32.sqrt()),
                // Uniform in ±√3·σ has deviation σ = 0.02.
                _ => (0.0, 0.02 * 3f32.sqrt()),
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
        (files, scaled): (&Files, &ScaledParts),
        rows: Range<usize>,
    ) -> Result<u64, LoadError> {
        let stored = StoredRows::read(spec, files, scaled, rows.clone())?;
        if matches!(tensor.dtype, DType::P4 | DType::P8) {
            return self.pack(spec, tensor, &stored, rows);
        }
        if layouts::is_scaled(tensor.dtype) {
            return self.quantise(spec, tensor, &stored, rows);
        }
        let mut gathered = Vec::new();
        let mut floats = vec![0.0; spec.cols()];
        for row in rows.clone() {
            match stored.bytes(spec, row) {
                Some((dtype, bytes)) if dtype == tensor.dtype => gathered.extend_from_slice(bytes),
                _ => {
                    stored.floats(spec, row, &mut floats)?;
                    tensor.dtype.encode(&floats, &mut gathered);
                }
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
        let source = |row| stored.bytes(spec, row).expect("only GGUF blocks are packed");
        let sources: Vec<(DType, &[u8])> = rows.clone().map(source).collect();
        let mut packed = vec![0; tensor.dtype.bytes(rows.len() * spec.cols())];
        pack_parts(tensor.dtype, &sources, spec.cols(), &mut packed);
        self.put(spec, tensor, &rows, &packed)?;
        Ok(stored.read)
    }

    /// Rows of one weight with their scales, or quantised.
    fn quantise(
        &self,
        spec: &WeightSpec,
        tensor: &Tensor,
        stored: &StoredRows<'_>,
        rows: Range<usize>,
    ) -> Result<u64, LoadError> {
        let cols = spec.cols();
        let mut chunk = Chunk::new(tensor.dtype, (spec.rows(), cols), rows.clone());
        if !put_scaled(spec, stored, rows.clone(), &mut chunk) {
            let mut floats = vec![0.0; rows.len() * cols];
            for (row, floats) in rows.clone().zip(floats.chunks_exact_mut(cols)) {
                stored.floats(spec, row, floats)?;
            }
            chunk.quantise(&floats);
        }
        for (at, bytes) in chunk.parts() {
            self.device.write(self.arena, tensor.span.part(at, bytes.len() as u64), &bytes)?;
        }
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
        files: &Files,
    ) -> Result<u64, LoadError> {
        // Parts of experts come from one tensor.
        let (mut tensors, mut read) = (BTreeMap::new(), 0);
        for part in &spec.parts {
            if !tensors.contains_key(&part.tensor) {
                let stored = files.checkpoint_of(&part.tensor).read_f32(&part.tensor)?;
                read += (stored.len() * 4) as u64;
                tensors.insert(&part.tensor, stored);
            }
        }
        let element = |at: usize| {
            let (index, stored) = spec.source(at);
            let part = &spec.parts[index];
            part.element(tensors[&part.tensor][stored])
        };
        let all: Vec<f32> = (0..spec.cols()).map(element).collect();
        let mut out = Vec::with_capacity(all.len() * 4);
        tensor.dtype.encode(&all, &mut out);
        self.device.write(self.arena, tensor.span, &out)?;
        Ok(read)
    }
}

/// Takes values and scales as they are stored; false if some row has none that fit.
fn put_scaled(
    spec: &WeightSpec,
    stored: &StoredRows<'_>,
    rows: Range<usize>,
    chunk: &mut Chunk,
) -> bool {
    for row in rows {
        match stored.scaled(spec, row) {
            Some(ScaledRow::Fp8(bytes, scales)) if scales.len() == chunk.scales_of_row() => {
                chunk.set_fp8(row, bytes, scales);
            }
            Some(ScaledRow::Int4(values, scales, zeros)) => {
                let Some(groups) = chunk.groups_of_row() else { return false };
                // One group for the whole row is repeated.
                let each = groups / scales.len();
                let all = |at: usize| at / each;
                let scales: Vec<f32> = (0..groups).map(|at| scales[all(at)]).collect();
                let zeros: Vec<u8> = (0..groups).map(|at| zeros[all(at)]).collect();
                chunk.set_int4(row, values, &scales, &zeros);
            }
            Some(ScaledRow::Mxfp4(bytes, exponents)) if chunk.takes_mxfp4(exponents) => {
                chunk.set_mxfp4(row, bytes, exponents);
            }
            _ => return false,
        }
    }
    true
}
