//! Models for `dacapo graph`: programs, and weights for `verify`.

use crate::cli::Global;
use crate::graph_cli::ProgramSource;
use crate::loading::{self, LoadFormat};
use anyhow::Result;
use clap::ValueEnum;
use device::{Arena, Device};
use graph::program::Program;
use graph::{Bindings, CompileTarget};
use model::{OpenModel, Written};

/// The context of programs made here; the memory of graphs does not depend on it.
const MAX_POSITIONS: u32 = 8192;

/// Opens models by name.
pub(crate) struct Programs<'a> {
    pub(crate) global: &'a Global,
}

impl Programs<'_> {
    fn write(&self, model: &OpenModel, target: &dyn device::Target) -> Result<Written> {
        let positions = MAX_POSITIONS.min(model.config.max_position as u32);
        let precision = self.global.precision(target);
        Ok(model.write(target, self.global.numerics.into(), precision, positions)?)
    }
}

fn open(model: &str, load_format: &str) -> Result<OpenModel> {
    let format = LoadFormat::from_str(load_format, true).map_err(crate::exit::bad_input)?;
    Ok(OpenModel::open(&loading::source(model, format)?)?)
}

impl ProgramSource for Programs<'_> {
    fn program(&self, model: &str, load_format: &str, target: &CompileTarget) -> Result<Program> {
        Ok(self.write(&open(model, load_format)?, &*target.device)?.program)
    }

    fn fill(
        &self,
        model: &str,
        load_format: &str,
        device: &Device,
        arena: &Arena,
        bindings: &Bindings,
    ) -> Result<()> {
        let model = open(model, load_format)?;
        let written = self.write(&model, &*device.target())?;
        Ok(model.fill(&written, device, arena, bindings, &|_| ())?)
    }

    fn open_device(&self) -> Result<Device> {
        Ok(loading::open_device(self.global)?.0)
    }
}
