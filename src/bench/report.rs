//! Flags that every bench of a model's steps has, and where its figures go.

use super::record;
use crate::loading::LoadArgs;
use anyhow::Result;
use clap::Args;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Which backends run.
#[derive(Args, Debug)]
pub(crate) struct BackendArgs {
    /// Backends to compare, instead of the configured one
    #[arg(long, value_name = "NAME,NAME,…", value_delimiter = ',')]
    backend: Vec<String>,
}

impl BackendArgs {
    /// How to load the model, once per backend; `flag` sets it.
    pub(crate) fn loads(&self, load: &LoadArgs, flag: &str) -> Vec<LoadArgs> {
        match self.backend.as_slice() {
            [] => vec![load.clone()],
            names => names.iter().map(|name| load.with_graph_flag(flag, name)).collect(),
        }
    }
}

/// Where figures go besides the table.
#[derive(Args, Debug)]
pub(crate) struct ReportArgs {
    /// Write the figures, with machine and command, to this file (- is standard output)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the figures
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

impl ReportArgs {
    /// Draws, writes and prints, as far as asked for; `print` says the device, too.
    pub(crate) fn finish<F: Serialize>(
        &self,
        device: &str,
        figures: &F,
        draw: impl FnOnce(&Path) -> Result<()>,
        print: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if let Some(path) = &self.svg {
            draw(path)?;
        }
        if let Some(path) = &self.json {
            record::write(path, &record::record(device, figures)?)?;
        }
        if self.json.as_deref() != Some("-".as_ref()) {
            print()?;
        }
        Ok(())
    }
}
