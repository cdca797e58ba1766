//! Models for `dacapo graph`, configured as they are served.

use crate::cli::Global;
use crate::graph_cli::ModelArgs;
use crate::loading::{self, LoadFormat};
use anyhow::Result;
use clap::ValueEnum;
use device::{Device, DeviceKind, Target};
use graph::config::Given;
use model::{Configured, LoadOptions, ModelSource, OpenModel};
use std::sync::Arc;

/// Where a model's files are, in the format that was asked for.
fn source(name: &str, args: &ModelArgs) -> Result<ModelSource> {
    let format = LoadFormat::from_str(&args.load_format, true);
    loading::source(name, format.map_err(crate::exit::bad_input)?)
}

/// Opens models by name.
pub(crate) struct Programs<'a> {
    pub(crate) global: &'a Global,
}

impl Programs<'_> {
    /// Opens a model; with `dummy` only its shape is read.
    pub(crate) fn open(&self, args: &ModelArgs) -> Result<OpenModel> {
        Ok(OpenModel::open(&source(&args.model, args)?)?)
    }

    /// How the model would be served on a target, with these options of graphs.
    pub(crate) fn configure(
        &self,
        model: &OpenModel,
        args: &ModelArgs,
        target: Arc<dyn Target>,
        graphs: Given,
    ) -> Result<Configured> {
        let drafter = args.spec_model.as_deref().map(|name| source(name, args)).transpose()?;
        let kind = match target.compute_capability() {
            Some(_) => DeviceKind::Cuda,
            None => DeviceKind::Cpu,
        };
        let options = LoadOptions {
            max_batch: args.max_batch.unwrap_or_else(|| loading::default_batch(kind)),
            prefill_tokens: args.max_tokens,
            max_context: args.max_context,
            page_size: args.page_size,
            precision: Some(self.global.precision(&*target)),
            spec: args.spec,
            spec_model: drafter,
            graphs,
            ..LoadOptions::default()
        };
        let source = source(&args.model, args)?;
        Ok(model::configure(&source, model, target, self.global.numerics.into(), &options)?)
    }

    /// The device to verify on.
    pub(crate) fn open_device(&self) -> Result<Device> {
        Ok(loading::open_device(self.global)?.0)
    }
}
