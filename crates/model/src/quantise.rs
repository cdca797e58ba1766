//! Writes a model's checkpoint with quantised matrices, in the format of compressed-tensors, which vLLM and
//! `transformers` read.
//!
//! Each tensor of the checkpoint that is a matrix of a layer is quantised in its own rows; all others are copied. Where
//! every tensor goes is known before the first is read, so that rows of all of them are read, quantised and written in
//! parallel, and no tensor is ever whole in memory. With texts to calibrate by, the model reads them first, and matrices
//! are quantised layer by layer (`quantise/calibrate.rs`); what that leaves out follows as without.

mod calibrate;
mod factor;
mod residual;
mod scheme;

pub use calibrate::Texts;

use crate::open::{ModelSource, OpenModel};
use crate::precision::{Precision, Quantise};
use crate::weights::{Part, WeightSpec};
use crate::{LoadError, Written};
use calibrate::Output;
use device::cpu::Numerics;
use device::scaled::feedback::Inputs;
use device::target::{CpuTarget, WeightUse};
use device::{DType, Device, scaled};
use formats::checkpoint::{Checkpoint, Format, TensorInfo, read_capped};
use formats::limits;
use formats::quant::dequantise;
use formats::scaled::Quantisation;
use formats::write::{NewCheckpoint, NewTensor, WriteError};
use rayon::prelude::*;
use scheme::{Rounded, Scheme, UNIT};
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet};
use std::ops::{ControlFlow, Range};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of floats handled at once; bounds memory to about twice this times the threads.
const CHUNK_BYTES: usize = 16 << 20;
/// Most bytes of data in one file.
const SHARD_BYTES: u64 = 5_000_000_000;
/// Modules of experts, in every family.
const EXPERTS: &str = r"re:.*\.experts\..*";
/// Ends of files with weights, which are not copied.
const WEIGHTS: [&str; 9] =
    ["safetensors", "bin", "pt", "pth", "gguf", "h5", "msgpack", "onnx", "index.json"];

/// What to make of a model.
#[derive(Clone, Copy, Debug)]
pub struct QuantiseOptions {
    /// The format of matrices.
    pub format: Quantise,
    /// For 4 bits: most columns that share a scale. Fewer are taken where columns do not divide.
    pub group: usize,
    /// Threads; `None` takes all cores.
    pub threads: Option<usize>,
    /// Most bytes of data in one file; `None` takes 5 GB.
    pub shard_bytes: Option<u64>,
}

/// Why no checkpoint could be written.
#[derive(Debug, thiserror::Error)]
pub enum QuantiseError {
    /// The model cannot be read.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// It is not a checkpoint of safetensors.
    #[error("{}: a GGUF file cannot be quantised; name a folder with safetensors", .0.display())]
    Gguf(PathBuf),
    /// Its weights have scales already.
    #[error("{}: already quantised ({method})", path.display())]
    Already {
        /// The model.
        path: PathBuf,
        /// The format, as its configuration calls it.
        method: &'static str,
    },
    /// No matrix has a shape that can be quantised.
    #[error("{}: no matrix has a number of columns that this format can have", .0.display())]
    NoMatrix(PathBuf),
    /// It generates no text.
    #[error("{}: calibration needs a model that generates text", .0.display())]
    NoText(PathBuf),
    /// The model could not read the texts to calibrate by.
    #[error("calibration: {0}")]
    Step(String),
    /// A file could not be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The caller asked to stop.
    #[error("stopped")]
    Stopped,
}

impl From<device::Error> for QuantiseError {
    fn from(error: device::Error) -> Self {
        Self::Load(error.into())
    }
}

impl From<formats::Error> for QuantiseError {
    fn from(error: formats::Error) -> Self {
        Self::Load(error.into())
    }
}

/// A `config.json` to which a last field can be added. Its text stays as it is: numbers that JSON does not have, such as
/// Python's `Infinity`, too.
fn open_object(mut fields: Map<String, Value>, json: &[u8]) -> String {
    let text = match fields.remove("quantization_config") {
        None => String::from_utf8_lossy(json).into_owned(),
        // It says null: a model that is quantised is refused.
        Some(_) => format!("{:#}", Value::Object(fields.clone())),
    };
    let before = text.trim_end().strip_suffix('}').unwrap_or(&text).trim_end();
    format!("{before}{}", if fields.is_empty() { "" } else { "," })
}

/// A model that is to be quantised, and where each of its tensors goes.
#[derive(Debug)]
pub struct Quantiser {
    checkpoint: Checkpoint,
    /// The model's `config.json`, without an end and without a `quantization_config`.
    config: String,
    options: QuantiseOptions,
    /// For each tensor of the checkpoint, in its order: its scheme, unless it is copied.
    schemes: Vec<Option<Scheme>>,
    dense: Option<Scheme>,
    experts: Option<Scheme>,
    /// Modules that stay as they are.
    ignored: Vec<String>,
}

impl Quantiser {
    /// Opens a model and decides what becomes of its tensors.
    pub fn open(path: &Path, options: QuantiseOptions) -> Result<Quantiser, QuantiseError> {
        let checkpoint = Checkpoint::open(path)?;
        if checkpoint.format() == Format::Gguf {
            return Err(QuantiseError::Gguf(path.to_owned()));
        }
        if let Some(found) = Quantisation::of(&checkpoint)? {
            let method = found.method();
            return Err(QuantiseError::Already { path: path.to_owned(), method });
        }
        let model = OpenModel::open(&ModelSource::Checkpoint(path.to_owned()))?;
        // Also checks that every tensor is there and has its shape.
        let written = model.write(&CpuTarget, Numerics::Fast, Precision::EXACT, 64)?;
        let file = checkpoint.folder().join("config.json");
        let json = read_capped(&file, limits::CONFIG_BYTES)?;
        let config = open_object(formats::config::object(&file, &json)?, &json);
        let [matrices, of_experts] = [WeightUse::Matrix, WeightUse::Experts]
            .map(|kind| matrices(&written, kind, options.format));
        let choose = |experts, matrices: &HashMap<String, [usize; 2]>| {
            let shapes: Vec<_> = matrices.values().copied().collect();
            Scheme::choose(options.format, options.group, experts, &shapes)
        };
        let (dense, experts) = (choose(false, &matrices), choose(true, &of_experts));
        if dense.is_none() && experts.is_none() {
            return Err(QuantiseError::NoMatrix(path.to_owned()));
        }
        let scheme = |info: &TensorInfo| {
            let experts = experts.filter(|_| of_experts.contains_key(&info.name));
            dense.filter(|_| matrices.contains_key(&info.name)).or(experts)
        };
        let schemes: Vec<_> = checkpoint.tensors().map(scheme).collect();
        let ignored = ignored(&checkpoint, &schemes, experts, &written);
        Ok(Quantiser { checkpoint, config, options, schemes, dense, experts, ignored })
    }

    /// Bytes of the model's tensors before and after.
    pub fn bytes(&self) -> (u64, u64) {
        let after = self.groups().iter().flatten().map(NewTensor::bytes).sum();
        (self.checkpoint.total_bytes(), after)
    }

    /// How matrices are stored, and those of experts if there are any.
    pub fn describe(&self) -> String {
        let dense = self.dense.map(|scheme| scheme.to_string());
        let experts = self.experts.map(|scheme| format!("experts in {scheme}"));
        dense.into_iter().chain(experts).collect::<Vec<_>>().join(", ")
    }

    /// Writes the checkpoint into a folder that has no files yet; with texts, matrices of linears are calibrated by them on
    /// this device. `progress` gets bytes read so far, and may ask to stop. Returns how many matrices were calibrated and how
    /// many were rounded to the nearest values.
    pub fn write(
        &self,
        folder: &Path,
        calibration: Option<(&Device, &Texts)>,
        progress: &(dyn Fn(u64) -> ControlFlow<()> + Sync),
    ) -> Result<[usize; 2], QuantiseError> {
        let mut metadata = self.checkpoint.metadata().clone();
        metadata.insert("format".into(), "pt".into());
        let shard = self.options.shard_bytes.unwrap_or(SHARD_BYTES);
        let new = NewCheckpoint::create(folder, &self.groups(), shard, &metadata)?;
        let done = AtomicU64::new(0);
        let report = |read| match progress(done.fetch_add(read, Ordering::Relaxed) + read) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(QuantiseError::Stopped),
        };
        let work = || {
            let output = Output { quantiser: self, new: &new, report: &report };
            let calibrated = match calibration {
                Some((device, texts)) => calibrate::run(output, device, texts)?,
                None => HashSet::new(),
            };
            let jobs = self.jobs().into_par_iter();
            jobs.filter(|(index, _)| !calibrated.contains(index))
                .try_for_each(|(index, rows)| report(self.write_rows(&new, index, rows)?))?;
            Ok::<usize, QuantiseError>(calibrated.len())
        };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(self.options.threads.unwrap_or(0));
        let no_threads = |error: rayon::ThreadPoolBuildError| WriteError {
            file: folder.to_owned(),
            source: std::io::Error::other(error),
        };
        let calibrated = pool.build().map_err(no_threads)?.install(work)?;
        new.finish()?;
        let config = folder.join("config.json");
        std::fs::write(&config, self.new_config()).map_err(WriteError::of(&config))?;
        self.copy_files(folder)?;
        let all = self.schemes.iter().flatten().count();
        Ok([calibrated, all - calibrated])
    }

    /// The new tensors: those of one old tensor belong together.
    fn groups(&self) -> Vec<Vec<NewTensor>> {
        let new = |(info, scheme): (&TensorInfo, &Option<Scheme>)| match scheme {
            Some(scheme) => scheme.tensors(module(&info.name), shape(info)),
            None => {
                let (name, shape) = (info.name.clone(), info.shape.clone());
                vec![NewTensor { name, dtype: info.dtype, shape }]
            }
        };
        self.checkpoint.tensors().zip(&self.schemes).map(new).collect()
    }

    /// Pieces of tensors: rows of those that are quantised, bytes of the others.
    fn jobs(&self) -> Vec<(usize, Range<usize>)> {
        let pieces = |(index, (info, scheme)): (usize, (&TensorInfo, &Option<Scheme>))| {
            let (all, step) = match scheme {
                Some(_) => {
                    let [rows, cols] = shape(info);
                    (rows, UNIT.max(CHUNK_BYTES / (4 * cols) / UNIT * UNIT))
                }
                None => (info.bytes, CHUNK_BYTES),
            };
            let piece = move |from| (index, from..all.min(from + step));
            (0..all).step_by(step).map(piece)
        };
        self.checkpoint.tensors().zip(&self.schemes).enumerate().flat_map(pieces).collect()
    }

    /// Does one piece; returns bytes read.
    fn write_rows(
        &self,
        new: &NewCheckpoint,
        index: usize,
        rows: Range<usize>,
    ) -> Result<u64, QuantiseError> {
        let info = self.checkpoint.tensors().nth(index).expect("an index of a tensor");
        let Some(scheme) = self.schemes[index] else {
            let mut bytes = vec![0; rows.len()];
            self.checkpoint.read_range(&info.name, rows.start, &mut bytes)?;
            new.write(&info.name, rows.start as u64, &bytes)?;
            return Ok(bytes.len() as u64);
        };
        let first = rows.start;
        let read = rows.len() * (info.bytes / info.shape[0]);
        let rounded = scheme.round(&self.read_rows(info, rows)?, info.shape[1], None);
        self.store(new, info, (scheme, first), rounded)?;
        Ok(read as u64)
    }

    /// Rows of a matrix as floats.
    fn read_rows(&self, info: &TensorInfo, rows: Range<usize>) -> Result<Vec<f32>, QuantiseError> {
        let [all_rows, cols] = shape(info);
        let row_bytes = info.bytes / all_rows;
        let mut bytes = vec![0; rows.len() * row_bytes];
        self.checkpoint.read_range(&info.name, rows.start * row_bytes, &mut bytes)?;
        let mut floats = vec![0.0; rows.len() * cols];
        dequantise(info.dtype, &bytes, &mut floats).map_err(LoadError::Quant)?;
        Ok(floats)
    }

    /// Writes rounded rows of a matrix from `first` on.
    fn store(
        &self,
        new: &NewCheckpoint,
        info: &TensorInfo,
        (scheme, first): (Scheme, usize),
        rounded: Rounded,
    ) -> Result<(), QuantiseError> {
        for (end, at, bytes) in scheme.bytes(shape(info), first, rounded) {
            new.write(&format!("{}.{end}", module(&info.name)), at, &bytes)?;
        }
        Ok(())
    }

    /// Bytes of a tensor.
    fn bytes_of(&self, index: usize) -> u64 {
        self.checkpoint.tensors().nth(index).map_or(0, |info| info.bytes as u64)
    }

    /// Writes a matrix that is quantised by the inputs of its linear; returns what it stands for then.
    fn write_calibrated(
        &self,
        new: &NewCheckpoint,
        index: usize,
        inputs: &Inputs<'_>,
    ) -> Result<Vec<f32>, QuantiseError> {
        let info = self.checkpoint.tensors().nth(index).expect("an index of a tensor");
        let scheme = self.schemes[index].expect("the tensor is quantised");
        let [rows, cols] = shape(info);
        let starts: Vec<usize> = (0..rows).step_by(scheme.unit()).collect();
        let piece = |first: usize| {
            let floats = self.read_rows(info, first..rows.min(first + scheme.unit()))?;
            let missing = inputs.missing.get(first * cols..).unwrap_or(&[]);
            let rounded = scheme.round(&floats, cols, Some(&Inputs { missing, ..*inputs }));
            let values = scheme.values(&rounded, cols);
            self.store(new, info, (scheme, first), rounded)?;
            Ok(values)
        };
        let pieces: Result<Vec<Vec<f32>>, QuantiseError> =
            starts.into_par_iter().map(piece).collect();
        Ok(pieces?.concat())
    }

    /// The model's `config.json` with a `quantization_config`.
    fn new_config(&self) -> String {
        let groups = [(self.dense, "Linear"), (self.experts, EXPERTS)];
        let groups = groups.into_iter().filter_map(|(scheme, target)| Some((scheme?, target)));
        let groups: Vec<(Scheme, &str)> = groups.collect();
        let format = groups[0].0.format();
        let group = |(at, (scheme, target)): (usize, &(Scheme, &str))| {
            (format!("group_{at}"), scheme.config(&[target]))
        };
        let groups: Map<String, Value> = groups.iter().enumerate().map(group).collect();
        let quantisation = json!({
            "config_groups": groups,
            "quant_method": "compressed-tensors",
            "kv_cache_scheme": null,
            "format": format,
            "quantization_status": "compressed",
            "global_compression_ratio": null,
            "ignore": self.ignored,
        });
        format!("{}\n  \"quantization_config\": {quantisation:#}\n}}\n", self.config)
    }

    /// Copies what is beside the weights: tokenizer, chat template, licence.
    fn copy_files(&self, folder: &Path) -> Result<(), QuantiseError> {
        let from = self.checkpoint.folder();
        let entries = std::fs::read_dir(from).map_err(WriteError::of(from))?;
        for entry in entries {
            let path = entry.map_err(WriteError::of(from))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let weights = WEIGHTS.iter().any(|end| name.ends_with(&format!(".{end}")));
            if name.starts_with('.') || name == "config.json" || weights || !path.is_file() {
                continue;
            }
            let to = folder.join(path.file_name().unwrap_or_default());
            std::fs::copy(&path, &to).map_err(WriteError::of(&to))?;
        }
        Ok(())
    }
}

/// The tensors of a kind of weight that can be quantised, with their shapes. Those that a program joins are quantised
/// together or not at all, because other programs join them, too; so are all experts.
fn matrices(written: &Written, kind: WeightUse, format: Quantise) -> HashMap<String, [usize; 2]> {
    let finest = match format {
        Quantise::Fp8 => DType::F8Row,
        Quantise::Int4 => DType::I4G32,
    };
    let fits = |spec: &&WeightSpec| {
        // A tensor of three dimensions is not a module.
        spec.parts.iter().all(|part| {
            part.stack.is_none() && scaled::fits(finest, part.tensor_rows, spec.tensor_cols)
        })
    };
    let all: Vec<&WeightSpec> = written.weights.iter().filter(|spec| spec.kind == kind).collect();
    if kind == WeightUse::Experts && !all.iter().all(fits) {
        return HashMap::new();
    }
    let shapes = |spec: &WeightSpec| {
        let cols = spec.tensor_cols;
        let shape = move |part: &Part| (part.tensor.clone(), [part.tensor_rows, cols]);
        spec.parts.iter().map(shape).collect::<Vec<_>>()
    };
    all.into_iter().filter(fits).flat_map(shapes).collect()
}

/// The modules that stay as they are although readers could take them for quantised ones: the head, routers, matrices
/// of odd shapes, experts if they are not quantised.
fn ignored(
    checkpoint: &Checkpoint,
    schemes: &[Option<Scheme>],
    experts: Option<Scheme>,
    written: &Written,
) -> Vec<String> {
    let named = |spec: &&WeightSpec| {
        matches!(spec.kind, WeightUse::Table | WeightUse::Head | WeightUse::Experts)
    };
    let named = written.weights.iter().filter(named).flat_map(|spec| &spec.parts);
    let named: HashSet<&str> = named.map(|part| part.tensor.as_str()).collect();
    let mut all = vec!["lm_head".to_owned()];
    for (info, scheme) in checkpoint.tensors().zip(schemes) {
        let module = module(&info.name);
        let plain = scheme.is_none() && info.shape.len() > 1 && info.name != module;
        if plain && !named.contains(info.name.as_str()) && module != "lm_head" {
            all.push(module.to_owned());
        }
    }
    let has_experts = written.weights.iter().any(|spec| spec.kind == WeightUse::Experts);
    if has_experts && experts.is_none() {
        all.push(EXPERTS.to_owned());
    }
    all
}

/// The module of a weight.
fn module(tensor: &str) -> &str {
    tensor.strip_suffix(".weight").unwrap_or(tensor)
}

/// Rows and columns of a matrix.
fn shape(info: &TensorInfo) -> [usize; 2] {
    [info.shape[0], info.shape[1]]
}
