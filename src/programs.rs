//! Models for `dacapo graph`: programs, and weights for `verify`.

use crate::cli::{Global, Rounding};
use crate::graph_cli::ProgramSource;
use crate::loading::{self, LoadFormat};
use anyhow::Result;
use clap::ValueEnum;
use device::{Arena, DType, Device};
use engine::model::dense::Numbers;
use engine::model::place::{Placed, device_dtype, sources};
use engine::model::weights::specs;
use engine::model::{ModelSource, fill, numbers, program, rope};
use formats::checkpoint::Checkpoint;
use formats::config::ModelConfig;
use formats::tensor_names::Role;
use graph::program::Program;
use graph::{Bindings, CompileTarget};

/// The context of programs made here; the memory of graphs does not depend on it.
const MAX_POSITIONS: u32 = 8192;

/// Opens models by name.
pub(crate) struct Programs<'a> {
    pub(crate) global: &'a Global,
}

/// A model's files, or only its shape.
struct Opened {
    config: ModelConfig,
    checkpoint: Option<Checkpoint>,
}

fn open(model: &str, load_format: &str) -> Result<Opened> {
    let format = LoadFormat::from_str(load_format, true).map_err(crate::exit::bad_input)?;
    match loading::source(model, format)? {
        ModelSource::Dummy { config, .. } => Ok(Opened { config: *config, checkpoint: None }),
        ModelSource::Checkpoint(path) => {
            let checkpoint = Checkpoint::open(&path)?;
            let config = ModelConfig::of(&checkpoint)?;
            Ok(Opened { config, checkpoint: Some(checkpoint) })
        }
    }
}

impl ProgramSource for Programs<'_> {
    fn program(&self, model: &str, load_format: &str, target: &CompileTarget) -> Result<Program> {
        let Opened { config, checkpoint } = open(model, load_format)?;
        let device = &*target.device;
        let tensors =
            checkpoint.as_ref().map(|found| sources(found, &specs(&config))).transpose()?;
        let stored = |role: Role| match &tensors {
            Some(tensors) => {
                device_dtype(tensors[&role].dtype).expect("sources() checked the type")
            }
            None => DType::BF16,
        };
        let positions = MAX_POSITIONS.min(config.max_position as u32);
        let numbers = match self.global.numerics {
            Rounding::Exact => Numbers::EXACT,
            Rounding::Fast | Rounding::Ggml => numbers(device),
        };
        Ok(program(&config, device, numbers, positions, &stored)?.0)
    }

    fn fill(
        &self,
        model: &str,
        load_format: &str,
        program: &Program,
        device: &Device,
        arena: &Arena,
        bindings: &Bindings,
    ) -> Result<()> {
        let Opened { config, checkpoint } = open(model, load_format)?;
        let place = |spec: engine::model::weights::WeightSpec| {
            bindings.weights.get(&spec.name).map(|&tensor| Placed { spec, tensor })
        };
        let specs = specs(&config);
        let placed: Vec<Placed> = specs.iter().cloned().filter_map(place).collect();
        match &checkpoint {
            None => fill::from_seed(device, arena, &placed, 0)?,
            Some(found) => {
                let tensors = sources(found, &specs)?;
                let heads = fill::HeadRows::new(found, config.head_dim, program.pairs());
                fill::from_checkpoint(device, arena, &placed, found, &tensors, heads, &|_| ())?;
            }
        }
        let table = rope::table(&config, program.shape.max_positions as usize, device.numerics());
        let bytes: Vec<u8> = table.iter().flat_map(|x| x.to_le_bytes()).collect();
        Ok(device.write(arena, bindings.rope.span, &bytes)?)
    }

    fn open_device(&self) -> Result<Device> {
        Ok(loading::open_device(self.global)?.0)
    }
}
