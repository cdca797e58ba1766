//! Moves weights into the arena: in parallel, a few rows at a time, arranged and converted on the way.

use super::LoadError;
use super::place::{Placed, Sources, device_dtype};
use device::cpu::pack::pack_rows;
use device::graph::Node;
use device::op::{Noise, Op, Pairs};
use device::target::WeightUse;
use device::{Arena, DType, Device};
use formats::checkpoint::{Checkpoint, TensorInfo};
use formats::quant::dequantise;
use formats::tensor_names::RopeLayout;
use half::{bf16, f16};
use rayon::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of source rows handled at once; bounds the memory of a load to this times the threads.
const CHUNK_BYTES: usize = 16 << 20;

/// The order in which rows of q and k heads are wanted.
#[derive(Clone, Copy, Debug)]
pub struct HeadRows {
    layout: RopeLayout,
    head_dim: usize,
}

impl HeadRows {
    /// As a program with these pairs computes with.
    pub fn new(checkpoint: &Checkpoint, head_dim: usize, pairs: Pairs) -> HeadRows {
        let layout = match pairs {
            Pairs::Halves => checkpoint.rope_layout(),
            Pairs::Neighbours => RopeLayout::Halves,
        };
        HeadRows { layout, head_dim }
    }
}

/// How a checkpoint pairs the elements of a head.
pub fn pairs_of(checkpoint: &Checkpoint) -> Pairs {
    match checkpoint.rope_layout() {
        RopeLayout::Halves => Pairs::Halves,
        RopeLayout::Interleaved => Pairs::Neighbours,
    }
}

/// Fills every weight from a checkpoint; `progress` gets bytes done so far.
pub fn from_checkpoint(
    device: &Device,
    arena: &Arena,
    placed: &[Placed],
    checkpoint: &Checkpoint,
    sources: &Sources<'_>,
    heads: HeadRows,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(), LoadError> {
    let done = AtomicU64::new(0);
    let head_dim = heads.head_dim;
    let jobs: Vec<(usize, std::ops::Range<usize>)> = placed
        .iter()
        .enumerate()
        .flat_map(|(index, weight)| {
            let row_bytes = weight.spec.cols * 4;
            // Whole heads and whole packing groups, so that a chunk's rows come from few ranges.
            let step = head_dim
                .next_multiple_of(16)
                .max(CHUNK_BYTES / row_bytes / head_dim.max(16) * head_dim.next_multiple_of(16));
            let rows = weight.spec.rows();
            (0..rows).step_by(step).map(move |from| (index, from..(from + step).min(rows)))
        })
        .collect();
    jobs.into_par_iter().try_for_each(|(index, rows)| {
        let weight = &placed[index];
        let read = fill_rows(device, arena, weight, checkpoint, sources, heads, rows)?;
        progress(done.fetch_add(read, Ordering::Relaxed) + read);
        Ok(())
    })
}

/// Fills every weight from a seed: matrices uniform with the deviation models are initialised with,
/// norms around 1.
pub fn from_seed(
    device: &Device,
    arena: &Arena,
    placed: &[Placed],
    seed: u64,
) -> Result<(), LoadError> {
    for (index, weight) in placed.iter().enumerate() {
        let is_bias = weight.spec.name.ends_with("bias");
        let (mean, scale) = match weight.spec.kind {
            WeightUse::Vector if !is_bias => (1.0, 0.1),
            // Uniform in ±√3·σ has deviation σ = 0.02.
            _ => (0.0, 0.02 * 3f32.sqrt()),
        };
        let to = weight.tensor;
        let seed = seed ^ (index as u64 + 1).wrapping_mul(0xD1B5_4A32_D192_ED03);
        let op = Op::Noise(Noise { to, seed, mean, scale });
        device.run(arena, &Node { op, name: weight.spec.name.clone(), layer: None })?;
    }
    device.sync()?;
    Ok(())
}

/// Fills rows of one weight; returns source bytes read.
fn fill_rows(
    device: &Device,
    arena: &Arena,
    weight: &Placed,
    checkpoint: &Checkpoint,
    sources: &Sources<'_>,
    heads: HeadRows,
    rows: std::ops::Range<usize>,
) -> Result<u64, LoadError> {
    let (spec, tensor) = (&weight.spec, &weight.tensor);
    if spec.kind == WeightUse::Vector {
        return fill_vector(device, arena, weight, checkpoint, sources, heads);
    }
    let HeadRows { layout, head_dim } = heads;
    // For each part, the range of stored rows this chunk needs.
    let mut ranges: Vec<Option<(usize, usize)>> = vec![None; spec.parts.len()];
    for row in rows.clone() {
        let (part, stored) = spec.source(row, layout, head_dim);
        let range = ranges[part].get_or_insert((stored, stored));
        *range = (range.0.min(stored), range.1.max(stored));
    }
    let mut parts = Vec::with_capacity(spec.parts.len());
    let mut read = 0;
    for (part, range) in spec.parts.iter().zip(&ranges) {
        let info = sources[&part.role];
        let row_bytes = info.bytes / part.rows;
        let mut bytes = Vec::new();
        if let Some((from, to)) = range {
            bytes.resize((to - from + 1) * row_bytes, 0);
            checkpoint.read_range(&info.name, from * row_bytes, &mut bytes)?;
            read += bytes.len() as u64;
        }
        parts.push((info, row_bytes, bytes, range.map_or(0, |(from, _)| from)));
    }
    let packed = matches!(tensor.dtype, DType::P4 | DType::P8);
    let mut gathered = Vec::new();
    let mut floats = vec![0.0; spec.cols];
    for row in rows.clone() {
        let (part, stored) = spec.source(row, layout, head_dim);
        let (info, row_bytes, bytes, from) = &parts[part];
        let bytes = &bytes[(stored - from) * row_bytes..][..*row_bytes];
        if packed || source_dtype(info) == tensor.dtype {
            gathered.extend_from_slice(bytes);
        } else {
            dequantise(info.dtype, bytes, &mut floats).map_err(LoadError::Quant)?;
            push_floats(&floats, tensor.dtype, &mut gathered);
        }
    }
    if packed {
        let mut out = vec![0; tensor.dtype.bytes(rows.len() * spec.cols)];
        pack_rows(source_dtype(parts[0].0), &gathered, rows.len(), spec.cols, &mut out);
        gathered = out;
    }
    let row_bytes = tensor.dtype.bytes(spec.cols) as u64;
    let to = tensor.span.part(rows.start as u64 * row_bytes, rows.len() as u64 * row_bytes);
    device.write(arena, to, &gathered)?;
    Ok(read)
}

fn fill_vector(
    device: &Device,
    arena: &Arena,
    weight: &Placed,
    checkpoint: &Checkpoint,
    sources: &Sources<'_>,
    heads: HeadRows,
) -> Result<u64, LoadError> {
    let mut all = Vec::with_capacity(weight.spec.cols);
    let mut read = 0;
    for part in &weight.spec.parts {
        let info = sources[&part.role];
        let stored = checkpoint.read_f32(&info.name)?;
        read += info.bytes as u64;
        match part.role.is_rotated() {
            true => all.extend(
                (0..stored.len()).map(|i| stored[heads.layout.stored_row(i, heads.head_dim)]),
            ),
            false => all.extend(stored),
        }
    }
    let mut out = Vec::with_capacity(all.len() * 4);
    push_floats(&all, weight.tensor.dtype, &mut out);
    device.write(arena, weight.tensor.span, &out)?;
    Ok(read)
}

fn source_dtype(info: &TensorInfo) -> DType {
    device_dtype(info.dtype).expect("sources() refused every other type")
}

fn push_floats(floats: &[f32], dtype: DType, out: &mut Vec<u8>) {
    match dtype {
        DType::F32 => out.extend(floats.iter().flat_map(|x| x.to_le_bytes())),
        DType::F16 => out.extend(floats.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes())),
        DType::BF16 => out.extend(floats.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes())),
        other => unreachable!("weights are never converted to {other:?}"),
    }
}
