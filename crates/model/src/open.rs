//! A model's files, or only its shape: its program for a device, and its weights in that device's memory.

use crate::builder::{Builder, Precision, Setting, Written};
use crate::config::{Embedding, ModelConfig, Task};
use crate::stored::{Files, ScaledParts, device_dtype};
use crate::weights::WeightSpec;
use crate::{LoadError, fill, rope};
use device::cpu::Numerics;
use device::op::Pairs;
use device::{Arena, DType, Device, Target};
use formats::checkpoint::{Checkpoint, TensorInfo};
use graph::Bindings;
use graph::program::{Pooling, Program, ProgramOp, Step};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Where a model comes from.
#[derive(Clone, Debug)]
pub enum ModelSource {
    /// A folder with a checkpoint, or a `.gguf` or `.safetensors` file.
    Checkpoint(PathBuf),
    /// Weights of real size drawn from a seed.
    Dummy {
        /// The shape.
        config: Box<ModelConfig>,
        /// Same seed, same weights.
        seed: u64,
    },
}

/// A model whose configuration has been read.
#[derive(Debug)]
pub struct OpenModel {
    /// Its numbers.
    pub config: ModelConfig,
    weights: Weights,
}

#[derive(Debug)]
enum Weights {
    Stored(Box<Files>),
    Drawn { seed: u64 },
}

impl OpenModel {
    /// Opens the files and reads the configuration.
    pub fn open(source: &ModelSource) -> Result<OpenModel, LoadError> {
        match source {
            ModelSource::Checkpoint(path) => {
                let files = Files::open(path)?;
                let config = ModelConfig::of(&files.checkpoint)?;
                Ok(OpenModel { config, weights: Weights::Stored(Box::new(files)) })
            }
            ModelSource::Dummy { config, seed } => {
                let weights = Weights::Drawn { seed: *seed };
                Ok(OpenModel { config: (**config).clone(), weights })
            }
        }
    }

    /// The program for contexts of `context` tokens, with weights stored in the target's formats. Refuses a
    /// checkpoint whose tensors are not those of the program, and lists all of its problems at once.
    pub fn write(
        &self,
        target: &dyn Target,
        numerics: Numerics,
        precision: Precision,
        context: u32,
    ) -> Result<Written, LoadError> {
        let written = self.write_for(&self.config, target, numerics, precision, context)?;
        let routes = |step: &Step| matches!(step.op, ProgramOp::Route(_));
        if numerics == Numerics::Ggml && written.program.steps.iter().any(routes) {
            return Err(LoadError::GgmlExperts);
        }
        if let Weights::Stored(files) = &self.weights {
            let scaled = files.scaled_parts(&written.weights)?;
            let ignores = |name: &str| is_ignorable(name) || self.config.decoder.ignores(name);
            check_tensors(&files.checkpoint, &scaled, &written.weights, &ignores)?;
        }
        Ok(written)
    }

    /// The programs of a generating model that make vectors of prompts by the same weights: of the mean of their tokens'
    /// states, and of the last one.
    pub(crate) fn write_vectors(
        &self,
        target: &dyn Target,
        numerics: Numerics,
        precision: Precision,
        context: u32,
    ) -> Result<Vec<Program>, LoadError> {
        let program = |pooling| {
            let task = Task::Embed(Embedding { pooling, unit: false });
            let config = ModelConfig { task, ..self.config.clone() };
            Ok(self.write_for(&config, target, numerics, precision, context)?.program)
        };
        [Pooling::Mean, Pooling::Last].into_iter().map(program).collect()
    }

    fn write_for(
        &self,
        config: &ModelConfig,
        target: &dyn Target,
        numerics: Numerics,
        precision: Precision,
        context: u32,
    ) -> Result<Written, LoadError> {
        let stored = |spec: &WeightSpec| {
            let quantised = precision.quantise.and_then(|quantise| quantise.stored(spec));
            let parts: Vec<DType> = match quantised {
                Some(dtype) => vec![dtype],
                None => self.types(spec),
            };
            target.stored(spec.kind, &parts, spec.rows(), spec.cols())
        };
        // ggml sums the terms of a head's dot product in the order of the file.
        let pairs = match numerics {
            Numerics::Ggml => config.pairs,
            Numerics::Fast => Pairs::Halves,
        };
        let ggml = numerics == Numerics::Ggml;
        let setting = Setting { precision, context, pairs, ggml, stored: &stored };
        let mut builder = Builder::new(config, setting);
        config.decoder.build(config, &mut builder);
        Ok(builder.finish()?)
    }

    /// Bytes of the checkpoint's tensors; 0 for weights from a seed.
    pub fn bytes(&self) -> u64 {
        match &self.weights {
            Weights::Stored(files) => files.checkpoint.total_bytes(),
            Weights::Drawn { .. } => 0,
        }
    }

    /// Fills every weight and rotation table of a program; `progress` gets bytes read so far.
    pub fn fill(
        &self,
        written: &Written,
        device: &Device,
        arena: &Arena,
        bindings: &Bindings,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<(), LoadError> {
        let to = fill::Target { device, arena };
        let bound = |spec: &WeightSpec| bindings.weights[&spec.name];
        let placed: Vec<_> = written.weights.iter().map(|spec| (spec, bound(spec))).collect();
        match &self.weights {
            Weights::Stored(files) => to.copy(&placed, files, progress)?,
            Weights::Drawn { seed } => to.draw(&placed, *seed)?,
        }
        for (layer, pages) in bindings.kv.iter().enumerate() {
            let Some(span) = pages.scales else { continue };
            let scales = match &self.weights {
                Weights::Stored(files) => files.page_scales(layer, pages.heads as usize)?,
                Weights::Drawn { .. } => vec![1.0; 2 * pages.heads as usize],
            };
            let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            device.write(arena, span.part(0, bytes.len() as u64), &bytes)?;
        }
        let (dim, positions) = (self.config.head_dim, written.program.shape.max_positions);
        for (rotation, table) in written.ropes.iter().zip(&bindings.ropes) {
            let numbers = rope::table(rotation, dim, positions as usize, device.numerics());
            let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
            device.write(arena, table.span, &bytes)?;
        }
        Ok(())
    }

    /// The types of a weight's parts.
    fn types(&self, spec: &WeightSpec) -> Vec<DType> {
        let mut types = match &self.weights {
            Weights::Stored(files) => files.types(spec),
            Weights::Drawn { .. } => vec![DType::BF16; spec.parts.len()],
        };
        for (dtype, part) in types.iter_mut().zip(&spec.parts) {
            // A norm's weight less 1 is small: adding the 1 must not round it away.
            if (part.add, part.factor) != (0.0, 1.0) {
                *dtype = DType::F32;
            }
        }
        types
    }
}

/// Lists all tensors that are missing, extra or of the wrong shape at once.
fn check_tensors(
    checkpoint: &Checkpoint,
    scaled: &ScaledParts,
    specs: &[WeightSpec],
    ignores: &dyn Fn(&str) -> bool,
) -> Result<(), LoadError> {
    let mut problems = Vec::new();
    let mut wanted: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for spec in specs {
        for part in &spec.parts {
            let shape = part.tensor_shape(spec.kind, spec.tensor_cols);
            match scaled.get(&part.tensor) {
                None => _ = wanted.insert(&part.tensor, shape),
                Some(weight) if shape == [weight.rows(), weight.cols()] => {}
                Some(weight) => {
                    let found = [weight.rows(), weight.cols()];
                    problems.push(format!("{}: shape {found:?}, expected {shape:?}", part.tensor));
                }
            }
        }
    }
    let with_scales: BTreeSet<&str> = scaled.values().flat_map(|weight| weight.tensors()).collect();
    let mut found = BTreeSet::new();
    for info in checkpoint.tensors() {
        let Some(shape) = wanted.get(info.name.as_str()) else {
            if !ignores(&info.name) && !with_scales.contains(info.name.as_str()) {
                problems.push(format!("{}: not part of this model", info.name));
            }
            continue;
        };
        found.insert(info.name.as_str());
        problems.extend(wrong(info, shape));
    }
    for name in wanted.keys().filter(|name| !found.contains(**name)) {
        problems.push(format!("{name}: missing"));
    }
    match problems.is_empty() {
        true => Ok(()),
        false => Err(LoadError::Tensors { path: checkpoint.path().to_owned(), problems }),
    }
}

fn wrong(info: &TensorInfo, shape: &[usize]) -> Option<String> {
    // A vector may be stored as a matrix of one row.
    let one_row = shape.len() == 1 && info.shape.len() == 2 && info.shape[0] == 1;
    if info.shape != shape && !(one_row && info.shape[1] == shape[0]) {
        return Some(format!("{}: shape {:?}, expected {shape:?}", info.name, info.shape));
    }
    if device_dtype(info.dtype).is_none() {
        return Some(format!("{}: type {} cannot be a weight", info.name, info.dtype));
    }
    None
}

/// Whether a tensor that no weight is made of may be left unread: buffers that old exporters wrote, divisors that the
/// configuration has already taken in, a head that is the embedding once more, and the scales of a KV cache in fp8.
fn is_ignorable(name: &str) -> bool {
    let last = name.rsplit('.').nth(1).unwrap_or_default();
    matches!(name, "lm_head.weight" | "output.weight" | "rope_freqs.weight")
        || name.ends_with(".rotary_emb.inv_freq")
        || name.ends_with(".attn_rot_embd")
        || name.ends_with(".self_attn.masked_bias")
        || name.ends_with(".self_attn.k_scale")
        || name.ends_with(".self_attn.v_scale")
        || last.starts_with("rope_factors_")
}
