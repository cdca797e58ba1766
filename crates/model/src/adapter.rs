//! Adapters: matrices of low rank that are added to a model's linears, one adapter for each sequence or none. They lie in
//! slots beside the weights; which slot a sequence uses is a word of its seat, so one graph serves any mix.

mod filler;
mod peft;

use crate::LoadError;
use crate::executor::GraphExecutor;
use crate::stored::device_dtype;
use crate::weights::{Arrange, WeightSpec};
use device::op::LoraParts;
use device::target::WeightUse;
use device::{DType, DeviceKind, Span, Tensor};
use engine::exec::Step;
use filler::Filler;
use formats::checkpoint::Checkpoint;
use graph::Bindings;
use graph::program::WeightRef;
use peft::PeftConfig;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How many adapters are on the device at once, and how large each may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterRoom {
    /// Adapters on the device.
    pub slots: u32,
    /// The largest rank.
    pub rank: u32,
}

/// Why an adapter cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// The model was loaded without room for adapters.
    #[error("the model was loaded without room for adapters")]
    NoRoom,
    /// Its configuration asks for something that is not there.
    #[error("{}: {problem}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Its tensors are not those of an adapter of this model: all that do not fit.
    #[error("{}: the adapter does not fit the model:\n  {}", path.display(), problems.join("\n  "))]
    Tensors {
        /// The file.
        path: PathBuf,
        /// One line each.
        problems: Vec<String>,
    },
    /// A file that cannot be read.
    #[error(transparent)]
    Format(#[from] formats::Error),
}

impl From<LoadError> for AdapterError {
    fn from(error: LoadError) -> AdapterError {
        AdapterError::Tensors { path: PathBuf::new(), problems: vec![error.to_string()] }
    }
}

/// A weight that adapters add to, and its slots.
#[derive(Clone, Debug)]
pub(crate) struct Adapted {
    spec: WeightSpec,
    /// The model's name of each part.
    modules: Vec<String>,
    room: AdapterRoom,
}

impl Adapted {
    /// `head`: the weight is the head, which may be the embedding once more.
    pub(crate) fn new(spec: WeightSpec, head: bool, room: AdapterRoom) -> Adapted {
        let module = |tensor: &str| match head {
            true => "lm_head".to_owned(),
            false => tensor.trim_end_matches(".weight").to_owned(),
        };
        let modules = spec.parts.iter().map(|part| module(&part.tensor)).collect();
        Adapted { spec, modules, room }
    }

    fn inner(&self) -> usize {
        self.spec.parts.len() * self.room.rank as usize
    }

    /// The matrices of all slots, as weights of a program.
    pub(crate) fn refs(&self, dtype: DType) -> [WeightRef; 2] {
        let (slots, rank) = (self.room.slots, self.room.rank);
        let name = |which: &str| format!("{}.lora_{which}", self.spec.name);
        let (rows, cols) = (self.spec.rows() as u32, self.spec.cols() as u32);
        let a = WeightRef::matrix(name("a"), dtype, slots * self.inner() as u32, cols);
        [a, WeightRef::matrix(name("b"), dtype, slots * rows, rank)]
    }

    /// Which columns of the linear's result belong to which part.
    pub(crate) fn parts(&self) -> LoraParts {
        match self.spec.arrange {
            Arrange::Stacked => {
                let mut end = 0;
                let ends = self.spec.parts.iter().map(|part| {
                    end += part.rows.len() as u32;
                    end
                });
                LoraParts::Stacked(ends.collect())
            }
            Arrange::Turns { parts, .. } => LoraParts::Turns(parts as u32),
        }
    }

    fn bound(&self, bindings: &Bindings) -> [Tensor; 2] {
        ["a", "b"].map(|which| bindings.weights[&format!("{}.lora_{which}", self.spec.name)])
    }

    /// Where slot `slot`, counted from 0, of both matrices lies.
    fn spans(&self, bindings: &Bindings, slot: u32) -> [Span; 2] {
        self.bound(bindings).map(|tensor| {
            let bytes = tensor.bytes() / u64::from(self.room.slots);
            tensor.span.part(u64::from(slot) * bytes, bytes)
        })
    }
}

/// An adapter in host memory, as its slot holds it.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// The bytes of all spans of a slot, one after the other.
    bytes: Vec<u8>,
    /// Its largest rank.
    rank: u32,
}

impl Adapter {
    /// The largest rank of its matrices.
    pub fn rank(&self) -> u32 {
        self.rank
    }
}

/// The adapters that are known, and which seat has one.
#[derive(Debug)]
pub(crate) struct Adapters {
    known: HashMap<u64, Arc<Adapter>>,
    /// The slot of each seat's adapter, counted from 1; 0 for none.
    seats: Vec<u32>,
    filler: Filler,
}

impl Adapters {
    pub(crate) fn new(seats: u32) -> Adapters {
        Adapters { known: HashMap::new(), seats: vec![0; seats as usize], filler: Filler::new() }
    }

    /// Takes the joins of a step; returns whether some row of it has an adapter.
    pub(crate) fn serve(&mut self, step: &Step) -> bool {
        for join in &step.joins {
            self.seats[join.seat.0 as usize] = join.params.adapter;
        }
        step.rows.iter().any(|row| self.seats[row.seat.0 as usize] != 0)
    }
}

/// Reads adapters for a model, apart from its executor.
#[derive(Clone, Debug)]
pub struct AdapterReader {
    room: AdapterRoom,
    /// The weights, and the types of both matrices.
    adapted: Vec<(Adapted, [DType; 2])>,
    parallel: bool,
}

impl AdapterReader {
    /// Reads an adapter that `peft` saved, and compares it with the model.
    pub fn read(&self, folder: &Path) -> Result<Adapter, AdapterError> {
        let config = PeftConfig::read(folder)?;
        let path = folder.join("adapter_model.safetensors");
        let checkpoint = Checkpoint::open(&path)?;
        let all: Vec<&Adapted> = self.adapted.iter().map(|(adapted, _)| adapted).collect();
        let rank = check(&checkpoint, &all, self.room)
            .map_err(|problems| AdapterError::Tensors { path: path.clone(), problems })?;
        let bytes = |(adapted, types): &(Adapted, [DType; 2])| {
            slot_bytes(adapted, *types, &checkpoint, &config)
        };
        let read: Result<Vec<Vec<u8>>, AdapterError> = match self.parallel {
            true => self.adapted.par_iter().map(bytes).collect(),
            false => self.adapted.iter().map(bytes).collect(),
        };
        Ok(Adapter { bytes: read?.concat(), rank })
    }
}

/// What a slot holds of one weight's adapter.
fn slot_bytes(
    adapted: &Adapted,
    [a, b]: [DType; 2],
    checkpoint: &Checkpoint,
    config: &PeftConfig,
) -> Result<Vec<u8>, AdapterError> {
    let parts = adapted.modules.iter().map(|module| {
        let read = |which| -> Result<Option<Found>, AdapterError> {
            let name = format!("base_model.model.{module}.lora_{which}.weight");
            let Some(info) = checkpoint.get(&name) else { return Ok(None) };
            let (rows, cols) = (info.shape[0], info.shape[1]);
            Ok(Some(Found { rows, cols, values: checkpoint.read_f32(&name)? }))
        };
        let both = read("A")?.zip(read("B")?);
        Ok(both.map(|(a, b)| (config.scale(module, a.rows), a, b)))
    });
    let parts = parts.collect::<Result<Vec<_>, AdapterError>>()?;
    let mut bytes = Vec::new();
    put_a(adapted, &parts, a, &mut bytes);
    put_b(adapted, &parts, b, &mut bytes);
    Ok(bytes)
}

/// A matrix of an adapter's file.
struct Found {
    rows: usize,
    cols: usize,
    values: Vec<f32>,
}

impl GraphExecutor {
    /// Room for adapters, if there is any.
    pub(crate) fn adapter_room(&self) -> Option<AdapterRoom> {
        let origin = self.holding.origin.as_ref()?;
        origin.drafted.written.adapted.first().map(|adapted| adapted.room)
    }

    /// What reads adapters for this model, on any thread.
    pub fn adapter_reader(&self) -> Result<AdapterReader, AdapterError> {
        let room = self.adapter_room().ok_or(AdapterError::NoRoom)?;
        let origin = self.holding.origin.as_ref().ok_or(AdapterError::NoRoom)?;
        let bindings = self.runners().bindings();
        let of = |adapted: &Adapted| {
            (adapted.clone(), adapted.bound(bindings).map(|tensor| tensor.dtype))
        };
        let adapted = origin.drafted.written.adapted.iter().map(of).collect();
        // On a CPU the other threads compute steps.
        let parallel = self.device().kind() != DeviceKind::Cpu;
        Ok(AdapterReader { room, adapted, parallel })
    }

    /// Reads an adapter that `peft` saved, and compares it with the model.
    pub fn read_adapter(&self, folder: &Path) -> Result<Adapter, AdapterError> {
        self.adapter_reader()?.read(folder)
    }

    /// Lets requests use an adapter under a number, which is not 0.
    pub fn add_adapter(&mut self, number: u64, adapter: impl Into<Arc<Adapter>>) {
        self.adapters.known.insert(number, adapter.into());
    }

    /// Forgets an adapter that no request uses.
    pub fn remove_adapter(&mut self, number: u64) {
        self.adapters.known.remove(&number);
    }
}

type Part = Option<(f32, Found, Found)>;

/// The rows of A: those of each part, then zeros up to the largest rank.
fn put_a(adapted: &Adapted, parts: &[Part], dtype: DType, out: &mut Vec<u8>) {
    let (rank, cols) = (adapted.room.rank as usize, adapted.spec.cols());
    let mut all = vec![0.0; adapted.inner() * cols];
    for (part, all) in parts.iter().zip(all.chunks_exact_mut(rank * cols)) {
        if let Some((_, a, _)) = part {
            all[..a.values.len()].copy_from_slice(&a.values);
        }
    }
    dtype.encode(&all, out);
}

/// The rows of B in the order of the weight's rows, scaled.
fn put_b(adapted: &Adapted, parts: &[Part], dtype: DType, out: &mut Vec<u8>) {
    let (rank, rows) = (adapted.room.rank as usize, adapted.spec.rows());
    let mut all = vec![0.0; rows * rank];
    for (row, all) in all.chunks_exact_mut(rank).enumerate() {
        let (part, stored) = adapted.spec.source(row);
        if let Some((scale, _, b)) = &parts[part] {
            let values = &b.values[stored * b.cols..][..b.cols];
            all.iter_mut().zip(values).for_each(|(to, value)| *to = scale * value);
        }
    }
    dtype.encode(&all, out);
}

/// Compares the tensors of an adapter with the model; returns the largest rank, or everything that does not fit.
fn check(
    checkpoint: &Checkpoint,
    adapted: &[&Adapted],
    room: AdapterRoom,
) -> Result<u32, Vec<String>> {
    let mut wanted: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for adapted in adapted {
        debug_assert!(adapted.spec.kind != WeightUse::Vector);
        for (module, part) in adapted.modules.iter().zip(&adapted.spec.parts) {
            wanted.insert(module, (part.tensor_rows, adapted.spec.tensor_cols));
        }
    }
    let (mut problems, mut ranks) = (Vec::new(), BTreeMap::new());
    let mut halves: BTreeSet<(&str, &str)> = BTreeSet::new();
    for info in checkpoint.tensors() {
        let name = info.name.strip_prefix("base_model.model.").unwrap_or(&info.name);
        let split = name.strip_suffix(".weight").and_then(|name| name.rsplit_once(".lora_"));
        let Some((module, half @ ("A" | "B"))) = split else {
            problems.push(format!("{}: not a matrix of a LoRA adapter", info.name));
            continue;
        };
        let Some(&(rows, cols)) = wanted.get(module) else {
            problems.push(format!("{module}: no linear of this model that adapters can add to"));
            continue;
        };
        halves.insert((module, half));
        let fits = match info.shape[..] {
            [r, k] if half == "A" && k == cols => Some(r),
            [n, r] if half == "B" && n == rows => Some(r),
            _ => None,
        };
        let Some(rank) = fits else {
            let expected =
                if half == "A" { format!("[r, {cols}]") } else { format!("[{rows}, r]") };
            problems.push(format!("{}: shape {:?}, expected {expected}", info.name, info.shape));
            continue;
        };
        if rank == 0 || rank > room.rank as usize {
            let most = room.rank;
            problems
                .push(format!("{module}: rank {rank}, and at most {most} fits (--max-lora-rank)"));
        }
        if *ranks.entry(module).or_insert(rank) != rank {
            problems.push(format!("{module}: A and B differ in rank"));
        }
        if device_dtype(info.dtype).is_none() {
            problems.push(format!("{}: type {} cannot be a weight", info.name, info.dtype));
        }
    }
    for &module in ranks.keys() {
        for half in ["A", "B"] {
            if !halves.contains(&(module, half)) {
                problems.push(format!("{module}: lora_{half} is missing"));
            }
        }
    }
    if ranks.is_empty() && problems.is_empty() {
        problems.push("it has no matrices".into());
    }
    match problems.is_empty() {
        true => Ok(ranks.values().copied().max().unwrap_or(0) as u32),
        false => Err(problems),
    }
}
