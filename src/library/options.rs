//! The options of a model, as on the command line.

use crate::cli::Global;
use crate::loading::LoadArgs;
use crate::numbers::SEQUENCES;
use clap::Parser;
use device::DeviceKind;

/// The flags of every command and those of loading, with the model's name.
#[derive(Clone, Debug, Parser)]
#[command(name = "LLM", disable_help_flag = true)]
pub(super) struct Options {
    #[command(flatten)]
    pub(super) load: LoadArgs,
    #[command(flatten)]
    pub(super) global: Global,
    /// Most sequences that run at once
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(SEQUENCES))]
    max_batch: Option<u32>,
}

impl Options {
    /// How many sequences run at once.
    pub(super) fn max_batch(&self, kind: DeviceKind) -> u32 {
        self.max_batch.unwrap_or_else(|| crate::loading::default_batch(kind))
    }
}

impl Options {
    /// The model as the commands about graphs take it, after their name.
    pub(super) fn graph_line(&self) -> Vec<String> {
        let format = self.load.format_name();
        let mut line =
            ["graph", &self.load.model, "--load-format", &format].map(str::to_owned).to_vec();
        line.extend(self.load.graph_line());
        line
    }
}
