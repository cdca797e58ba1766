//! Flags that the benches of model steps share, and the output of their results.

use super::record;
use crate::loading::LoadArgs;
use anyhow::Result;
use clap::Args;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The backends to measure.
#[derive(Args, Debug)]
pub(crate) struct BackendArgs {
    /// Backends to compare, instead of the configured one
    #[arg(long, value_name = "NAME,NAME,…", value_delimiter = ',')]
    backend: Vec<String>,
}

impl BackendArgs {
    /// The load arguments per backend; `flag` selects the backend.
    pub(crate) fn loads(&self, load: &LoadArgs, flag: &str) -> Vec<LoadArgs> {
        match self.backend.as_slice() {
            [] => vec![load.clone()],
            names => names.iter().map(|name| load.with_graph_flag(flag, name)).collect(),
        }
    }
}

/// Additional outputs.
#[derive(Args, Debug)]
pub(crate) struct ReportArgs {
    /// Write the results, with machine and command, to this file (- is standard output)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Plot the results as SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

impl ReportArgs {
    /// Plots, writes and prints the results as requested.
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
