//! A model's files, or only its shape: its program for a device, and its weights in that device's memory.

use crate::adapter::AdapterRoom;
use crate::builder::{Builder, Setting, Written};
use crate::config::{Embedding, ModelConfig, Task};
use crate::precision::Precision;
use crate::stored::{Files, ScaledParts, device_dtype};
use crate::weights::{Part, WeightSpec};
use crate::{LoadError, fill, rope};
use device::cpu::Numerics;
use device::op::Pairs;
use device::scaled::is_scaled;
use device::target::WeightUse;
use device::{Arena, DType, Device, Target};
use formats::checkpoint::{Checkpoint, Format, TensorInfo};
use formats::scaled::ScaledWeight;
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
    /// Room for adapters beside its weights.
    pub(crate) adapters: Option<AdapterRoom>,
}

/// What was there before other files replaced it.
#[derive(Debug)]
pub(crate) enum Covered {
    /// So many files.
    Files(usize),
    /// Weights from a seed.
    Drawn {
        /// Which.
        seed: u64,
    },
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
                let weights = Weights::Stored(Box::new(files));
                Ok(OpenModel { config, weights, adapters: None })
            }
            ModelSource::Dummy { config, seed } => {
                let weights = Weights::Drawn { seed: *seed };
                Ok(OpenModel { config: (**config).clone(), weights, adapters: None })
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
        self.write_checked(None, target, numerics, precision, context)
    }

    /// The program with which it drafts for `verifier`.
    pub(crate) fn write_drafter(
        &self,
        verifier: &Program,
        target: &dyn Target,
        numerics: Numerics,
        precision: Precision,
        context: u32,
    ) -> Result<Written, LoadError> {
        self.write_checked(Some(verifier), target, numerics, precision, context)
    }

    fn write_checked(
        &self,
        verifier: Option<&Program>,
        target: &dyn Target,
        numerics: Numerics,
        precision: Precision,
        context: u32,
    ) -> Result<Written, LoadError> {
        let written =
            self.write_for(&self.config, verifier, target, numerics, precision, context)?;
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
            Ok(self.write_for(&config, None, target, numerics, precision, context)?.program)
        };
        [Pooling::Mean, Pooling::Last].into_iter().map(program).collect()
    }

    fn write_for(
        &self,
        config: &ModelConfig,
        verifier: Option<&Program>,
        target: &dyn Target,
        numerics: Numerics,
        precision: Precision,
        context: u32,
    ) -> Result<Written, LoadError> {
        let stored = |spec: &WeightSpec| {
            let types = self.types(spec);
            // Weights that are stored in four bits stay so: fp8 would take more memory.
            let quantise = precision.quantise.filter(|_| !types.contains(&DType::Mxfp4));
            let quantised = quantise.and_then(|quantise| quantise.stored(spec));
            let parts = quantised.map_or(types, |dtype| vec![dtype]);
            let dtype = target.stored(spec.kind, &parts, spec.rows(), spec.cols());
            if precision.few_rows { dtype } else { target.for_many_rows(dtype) }
        };
        // ggml sums the terms of a head's dot product in the order of the file.
        let pairs = match numerics {
            Numerics::Ggml => config.pairs,
            Numerics::Fast | Numerics::Exact => Pairs::Halves,
        };
        let ggml = numerics == Numerics::Ggml;
        let adapters = self.adapters;
        let setting =
            Setting { precision, context, pairs, ggml, stored: &stored, verifier, adapters };
        let mut builder = Builder::new(config, setting);
        config.decoder.build(config, &mut builder);
        Ok(builder.finish()?)
    }

    /// Whether its files have a tensor.
    pub(crate) fn has(&self, tensor: &str) -> bool {
        match &self.weights {
            Weights::Stored(files) => files.checkpoint.get(tensor).is_some(),
            Weights::Drawn { .. } => false,
        }
    }

    /// Which of `vocab` tokens the `own` ones of a head are, by its table of offsets; `None` if they are the same. From a seed
    /// they are spread evenly.
    pub(crate) fn drafted_ids(
        &self,
        own: usize,
        vocab: usize,
    ) -> Result<Option<Vec<u32>>, LoadError> {
        let files = match &self.weights {
            Weights::Drawn { .. } => {
                return Ok(Some((0..own).map(|id| (id * vocab / own) as u32).collect()));
            }
            Weights::Stored(files) => files,
        };
        let path = files.checkpoint.path().to_owned();
        let wrong = |problem: String| LoadError::Tensors { path, problems: vec![problem] };
        let Some(info) = files.checkpoint.get("d2t") else {
            let same = own == vocab;
            return if same { Ok(None) } else { Err(wrong("d2t: missing".into())) };
        };
        if info.shape != [own] || info.dtype != formats::dtype::DType::I64 {
            let found = format!("{} {:?}", info.dtype, info.shape);
            return Err(wrong(format!("d2t: {found}, expected I64 [{own}]")));
        }
        let mut bytes = vec![0; own * 8];
        files.checkpoint.read_into("d2t", &mut bytes)?;
        let offsets =
            bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().expect("8 bytes")));
        let id = |(id, offset): (usize, i64)| {
            let id = (id as i64).checked_add(offset).filter(|id| (0..vocab as i64).contains(id));
            id.map(|id| id as u32)
        };
        let ids: Option<Vec<u32>> = offsets.enumerate().map(id).collect();
        ids.map(Some).ok_or_else(|| wrong(format!("d2t: a token outside the {vocab} of the model")))
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
        self.fill_some(written, &|_| true, device, arena, bindings, progress)
    }

    /// As [`OpenModel::fill`], of the weights that `takes` accepts.
    pub(crate) fn fill_some(
        &self,
        written: &Written,
        takes: &dyn Fn(&WeightSpec) -> bool,
        device: &Device,
        arena: &Arena,
        bindings: &Bindings,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<(), LoadError> {
        let to = fill::Target { device, arena };
        let bound = |spec: &WeightSpec| bindings.weights[&spec.name];
        let specs = written.weights.iter().filter(|spec| takes(spec));
        let placed: Vec<_> = specs.map(|spec| (spec, bound(spec))).collect();
        match &self.weights {
            Weights::Stored(files) => to.copy(&placed, files, progress)?,
            Weights::Drawn { seed } => to.draw(&placed, *seed)?,
        }
        let (caches, tables) = written.before;
        // A drafter's caches come after these.
        let own = written.own_caches();
        for (layer, pages) in bindings.kv[caches..caches + own].iter().enumerate() {
            let Some(span) = pages.scales else { continue };
            let scales = match &self.weights {
                Weights::Stored(files) => files.page_scales(layer, pages.heads as usize)?,
                Weights::Drawn { .. } => vec![1.0; 2 * pages.heads as usize],
            };
            let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            device.write(arena, span.part(0, bytes.len() as u64), &bytes)?;
        }
        let positions = written.program.shape.max_positions;
        for (rotation, table) in written.ropes.iter().zip(&bindings.ropes[tables..]) {
            let dim = table.cols as usize;
            let numbers = rope::table(rotation, dim, positions as usize, device.numerics());
            let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
            device.write(arena, table.span, &bytes)?;
        }
        Ok(())
    }

    /// Checks files whose tensors are to replace those of this model: each must be one of them, of the same shape, and of
    /// a type that the device's weight can be made of. An error lists all that do not fit.
    pub(crate) fn check_update(
        &self,
        files: &Files,
        written: &Written,
        bindings: &Bindings,
    ) -> Result<(), LoadError> {
        let wrong = |problems| {
            let path = files.checkpoint.path().to_owned();
            Err(LoadError::Tensors { path, problems })
        };
        if self.config.gguf || files.checkpoint.format() == Format::Gguf {
            return wrong(vec!["weights are updated from safetensors to safetensors".into()]);
        }
        let of_files = |part: &Part| files.has(&part.tensor);
        let some: Vec<WeightSpec> = written
            .weights
            .iter()
            .filter_map(|spec| {
                let parts: Vec<Part> =
                    spec.parts.iter().filter(|part| of_files(part)).cloned().collect();
                (!parts.is_empty()).then(|| WeightSpec { parts, ..spec.clone() })
            })
            .collect();
        let scaled = files.scaled_parts(&some)?;
        let ignores = |name: &str| is_ignorable(name) || self.config.decoder.ignores(name);
        check_tensors(&files.checkpoint, &scaled, &some, &ignores)?;
        if some.is_empty() {
            return wrong(vec!["it has no tensor of this model".into()]);
        }
        let drawn = matches!(self.weights, Weights::Drawn { .. });
        let missing =
            written.weights.iter().flat_map(|spec| &spec.parts).filter(|part| !of_files(part));
        let missing: Vec<String> =
            missing.map(|part| format!("{}: missing", part.tensor)).collect();
        if drawn && !missing.is_empty() {
            // There are no tensors to combine them with.
            return wrong(missing);
        }
        let cannot = |spec: &&WeightSpec| {
            let dtype = bindings.weights[&spec.name].dtype;
            !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) && !is_scaled(dtype)
        };
        let cannot = some.iter().filter(cannot).map(|spec| format!("{}: is packed", spec.name));
        let cannot: Vec<String> = cannot.collect();
        if cannot.is_empty() { Ok(()) } else { wrong(cannot) }
    }

    /// Lets the tensors of other files, which were checked, replace those of this model. Returns what
    /// [`OpenModel::uncover`] needs to undo that.
    pub(crate) fn cover(&mut self, files: Files) -> Covered {
        match &mut self.weights {
            Weights::Stored(own) => Covered::Files(own.cover(files)),
            Weights::Drawn { seed } => {
                let seed = *seed;
                self.weights = Weights::Stored(Box::new(files));
                Covered::Drawn { seed }
            }
        }
    }

    /// Undoes [`OpenModel::cover`].
    pub(crate) fn uncover(&mut self, covered: Covered) {
        match (covered, &mut self.weights) {
            (Covered::Files(left), Weights::Stored(own)) => own.uncover(left),
            (Covered::Drawn { seed }, weights) => *weights = Weights::Drawn { seed },
            (Covered::Files(_), Weights::Drawn { .. }) => unreachable!("covered as files"),
        }
    }

    /// Forgets files that the latest replace as a whole.
    pub(crate) fn keep_latest(&mut self) {
        if let Weights::Stored(own) = &mut self.weights {
            own.keep_latest();
        }
    }

    /// The types of a weight's parts.
    fn types(&self, spec: &WeightSpec) -> Vec<DType> {
        let mut types = match &self.weights {
            Weights::Stored(files) => files.types(spec),
            Weights::Drawn { .. } => {
                let experts = self.config.expert_dtype.filter(|_| spec.kind == WeightUse::Experts);
                vec![experts.unwrap_or(DType::BF16); spec.parts.len()]
            }
        };
        for (dtype, part) in types.iter_mut().zip(&spec.parts) {
            // A norm's weight less 1 is small: adding the 1 must not round it away.
            if part.changes() {
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
                // Matrices of experts lie one after the other.
                Some(weight) if [part.tensor_rows, spec.tensor_cols] == weight_shape(weight) => {}
                Some(weight) => {
                    let found = weight_shape(weight);
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

fn weight_shape(weight: &ScaledWeight) -> [usize; 2] {
    [weight.rows(), weight.cols()]
}

fn wrong(info: &TensorInfo, shape: &[usize]) -> Option<String> {
    // A vector may be stored as a matrix of one row or of one column.
    let as_vector = match (shape, info.shape.as_slice()) {
        ([elements], [1, found] | [found, 1]) => elements == found,
        _ => false,
    };
    if info.shape != shape && !as_vector {
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
        // Layers that predict further tokens: `--spec mtp` reads them.
        || name.starts_with("mtp.")
        || name.ends_with(".rotary_emb.inv_freq")
        || name.ends_with(".attn_rot_embd")
        || name.ends_with(".self_attn.masked_bias")
        || name.ends_with(".self_attn.k_scale")
        || name.ends_with(".self_attn.v_scale")
        || last.starts_with("rope_factors_")
}
