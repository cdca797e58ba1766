//! Weights that another process has in memory: copied straight to their places, without a file between. Everything is
//! checked first: names, shapes, types, and that the memory holds what is said to lie there.

use super::UpdateError;
use crate::LoadError;
use crate::executor::GraphExecutor;
use crate::weights::{Part, WeightSpec};
use device::shared::{Pieces, SharedMemory, SharedName};
use device::target::WeightUse;
use device::{DType, DeviceKind, Span, Tensor};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// A tensor of another process, under the name it has in the model's checkpoint.
#[derive(Clone, Debug)]
pub struct SharedTensor {
    /// Its name.
    pub name: String,
    /// Its type: a plain one.
    pub dtype: DType,
    /// Dimensions, outermost first; rows lie one after the other.
    pub shape: Vec<usize>,
    /// The memory it lies in.
    pub memory: SharedName,
    /// Where its first byte is in there.
    pub offset: u64,
}

/// Tensors that were checked against a model.
#[derive(Debug)]
pub struct SharedUpdate {
    memories: Vec<SharedMemory>,
    /// Which memory, and what of it goes where.
    copies: Vec<(usize, Pieces)>,
    /// Vectors, converted.
    vectors: Vec<(Span, Vec<u8>)>,
    /// Every tensor of the model is there.
    whole: bool,
}

impl SharedUpdate {
    /// Whether it replaces all weights.
    pub fn is_whole(&self) -> bool {
        self.whole
    }
}

fn refused(problems: Vec<String>) -> UpdateError {
    let path = PathBuf::from("tensors in shared memory");
    UpdateError::Files(Box::new(LoadError::Tensors { path, problems }))
}

impl GraphExecutor {
    /// Opens the memory of tensors and compares them with the model. Changes nothing.
    pub fn check_shared(&self, tensors: &[SharedTensor]) -> Result<SharedUpdate, UpdateError> {
        let origin = self.holding.origin.as_ref().ok_or(UpdateError::NoOrigin)?;
        let (specs, bindings) = (&origin.drafted.written.weights, self.runners().bindings());
        let mut places: BTreeMap<&str, Vec<(&WeightSpec, usize)>> = BTreeMap::new();
        for spec in specs {
            for (index, part) in spec.parts.iter().enumerate() {
                places.entry(&part.tensor).or_default().push((spec, index));
            }
        }
        let mut problems = Vec::new();
        let mut update = SharedUpdate {
            memories: Vec::new(),
            copies: Vec::new(),
            vectors: Vec::new(),
            whole: false,
        };
        let mut opened: BTreeMap<&SharedName, usize> = BTreeMap::new();
        let mut given = BTreeSet::new();
        for tensor in tensors {
            let Some(places) = places.get(tensor.name.as_str()) else {
                problems.push(format!("{}: not part of this model", tensor.name));
                continue;
            };
            if !given.insert(tensor.name.as_str()) {
                problems.push(format!("{}: given twice", tensor.name));
                continue;
            }
            if !opened.contains_key(&tensor.memory) {
                match self.device().open_shared(&tensor.memory) {
                    Ok(memory) => {
                        opened.insert(&tensor.memory, update.memories.len());
                        update.memories.push(memory);
                    }
                    Err(error) => {
                        problems.push(format!("{}: {error}", tensor.name));
                        continue;
                    }
                }
            }
            for &(spec, index) in places {
                let bound = bindings.weights[&spec.name];
                let memory = opened[&tensor.memory];
                if let Err(problem) = self.place(&mut update, tensor, memory, (spec, index), &bound)
                {
                    problems.push(format!("{}: {problem}", tensor.name));
                }
            }
        }
        if tensors.is_empty() {
            problems.push("there are none".into());
        }
        if !problems.is_empty() {
            return Err(refused(problems));
        }
        update.whole = places.keys().all(|name| given.contains(name));
        Ok(update)
    }

    /// Notes what of a tensor goes where, for one weight that it is a part of.
    fn place(
        &self,
        update: &mut SharedUpdate,
        tensor: &SharedTensor,
        memory: usize,
        (spec, index): (&WeightSpec, usize),
        bound: &Tensor,
    ) -> Result<(), String> {
        let part = &spec.parts[index];
        let shape = part.tensor_shape(spec.kind, spec.tensor_cols);
        if tensor.shape != shape {
            return Err(format!("shape {:?}, expected {shape:?}", tensor.shape));
        }
        if !matches!(tensor.dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(format!("type {:?} is not a plain one", tensor.dtype));
        }
        let elements: usize = shape.iter().product();
        let bytes = tensor.dtype.bytes(elements) as u64;
        let end = tensor.offset.checked_add(bytes);
        if end.is_none_or(|end| end > update.memories[memory].bytes()) {
            let all = update.memories[memory].bytes();
            return Err(format!("{bytes} bytes at {} are outside of {all}", tensor.offset));
        }
        if spec.kind == WeightUse::Vector && part.stack.is_some() {
            return Err("a bias of experts cannot be copied: update it from files".into());
        }
        if spec.kind == WeightUse::Vector {
            let raw = self.device().read_shared(&update.memories[memory], tensor.offset, bytes);
            let stored = tensor.dtype.decode(&raw.map_err(|error| error.to_string())?);
            update.vectors.push(vector(spec, index, &stored, bound));
            return Ok(());
        }
        if bound.dtype != tensor.dtype {
            return Err(format!(
                "type {:?}, and the device has {:?}: update it from files",
                tensor.dtype, bound.dtype
            ));
        }
        if part.stack.is_some() || spec.cols() != spec.tensor_cols {
            return Err("a part of such a tensor cannot be copied: update it from files".into());
        }
        let row = bound.dtype.bytes(spec.cols()) as u64;
        let pieces = runs(spec, index).into_iter().map(|run| Pieces {
            from: tensor.offset + run.from as u64 * row,
            from_step: run.from_step as u64 * row,
            to: bound.span.part(run.to as u64 * row, row),
            to_step: run.to_step as u64 * row,
            count: run.count as u64,
        });
        update.copies.extend(pieces.map(|pieces| (memory, pieces)));
        Ok(())
    }

    /// Replaces weights by tensors of another process. As [`GraphExecutor::update`] otherwise; if a copy fails, the model
    /// has no weights before another update.
    pub fn update_shared(&mut self, update: SharedUpdate) -> Result<(), UpdateError> {
        if !self.is_at_rest() {
            return Err(UpdateError::Busy);
        }
        if self.asleep().weights {
            return Err(UpdateError::Asleep);
        }
        if self.holding.lost && !update.whole {
            return Err(refused(vec!["the model has no weights, and these are not all".into()]));
        }
        let copied = self.copy_all(&update);
        self.holding.foreign = true;
        self.holding.lost = copied.is_err();
        copied.map_err(|error| UpdateError::Broken(Box::new(error)))
    }

    fn copy_all(&self, update: &SharedUpdate) -> device::Result<()> {
        let (device, arena) = (self.device(), self.runners().arena());
        for (index, memory) in update.memories.iter().enumerate() {
            let of = |(from, pieces): &(usize, Pieces)| (*from == index).then_some(*pieces);
            let pieces: Vec<Pieces> = update.copies.iter().filter_map(of).collect();
            match device.kind() {
                DeviceKind::Cuda => device.copy_shared(arena, memory, &pieces)?,
                DeviceKind::Cpu => pieces
                    .par_iter()
                    .try_for_each(|pieces| device.copy_shared(arena, memory, &[*pieces]))?,
            }
        }
        let mut vectors = update.vectors.iter();
        vectors.try_for_each(|(span, bytes)| device.write(arena, *span, bytes))
    }
}

/// A vector's part of a weight as the device keeps it, and its place.
fn vector(spec: &WeightSpec, index: usize, stored: &[f32], bound: &Tensor) -> (Span, Vec<u8>) {
    let part: &Part = &spec.parts[index];
    let before: usize = spec.parts[..index].iter().map(|part| part.rows.len()).sum();
    let element = |at| part.element(stored[part.stored_row(at)]);
    let values: Vec<f32> = (0..part.rows.len()).map(element).collect();
    let mut bytes = Vec::new();
    bound.dtype.encode(&values, &mut bytes);
    let at = bound.dtype.bytes(before) as u64;
    (bound.span.part(at, bytes.len() as u64), bytes)
}

/// Rows of a tensor at equal distances, and where they go in the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    from: usize,
    from_step: usize,
    to: usize,
    to_step: usize,
    count: usize,
}

/// The rows of one part, as few runs.
fn runs(spec: &WeightSpec, index: usize) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for to in 0..spec.rows() {
        let (part, from) = spec.source(to);
        if part != index {
            continue;
        }
        if let Some(run) = runs.last_mut() {
            if run.count == 1 && from > run.from {
                (run.from_step, run.to_step) = (from - run.from, to - run.to);
            }
            let next = |first: usize, step: usize| first + step * run.count;
            let goes_on = run.from_step > 0
                && from == next(run.from, run.from_step)
                && to == next(run.to, run.to_step);
            if goes_on {
                run.count += 1;
                continue;
            }
        }
        runs.push(Run { from, from_step: 0, to, to_step: 0, count: 1 });
    }
    // One row alone has no distance.
    for run in runs.iter_mut().filter(|run| run.count == 1) {
        (run.from_step, run.to_step) = (1, 1);
    }
    runs
}
