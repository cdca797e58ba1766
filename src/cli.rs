//! What may stand on the command line.

use clap::{Args, Parser, Subcommand, ValueEnum};
use device::DeviceChoice;
use device::cpu::Numerics;

/// Runs language models by recording them as device graphs and replaying those
#[derive(Parser, Debug)]
#[command(
    name = "dacapo",
    version,
    propagate_version = true,
    max_term_width = 100,
    after_help = EXAMPLES
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXAMPLES: &str = "\
Examples:
  dacapo run -p \"What is the capital of France?\"     answer with SmolLM2, fetched when needed
  dacapo serve                                       OpenAI API and a page on http://127.0.0.1:8000
  dacapo chat Qwen/Qwen3-0.6B                        talk with a model of the hub
  dacapo run ./model.gguf --json < question.txt      one JSON object, for scripts

Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted, 141 nobody reads the output any more.";

/// Flags that every command takes.
#[derive(Args, Clone, Debug)]
pub(crate) struct Global {
    /// auto, cpu, cuda or cuda:N
    #[arg(
        long,
        global = true,
        value_name = "DEVICE",
        default_value = "auto",
        env = "DACAPO_DEVICE"
    )]
    pub(crate) device: DeviceChoice,
    /// Threads of the CPU device; all cores unless said
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) threads: Option<u16>,
    /// Where numbers are rounded. ggml: the same tokens as llama.cpp from the same GGUF (Q4_1, Q5, Q8_0)
    /// on a CPU, slower; exact: the same tokens on every device, slowest
    #[arg(long, global = true, value_name = "HOW", default_value = "fast")]
    pub(crate) numerics: Rounding,
}

/// Where numbers are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Rounding {
    /// Wherever it is fastest
    Fast,
    /// As llama.cpp does on a CPU, to the bit
    Ggml,
    /// Nowhere below float32: weights are unpacked, four bytes each
    Exact,
}

impl From<Rounding> for Numerics {
    fn from(rounding: Rounding) -> Numerics {
        match rounding {
            // Of float32 weights nothing is rounded by the fast kernels either.
            Rounding::Fast | Rounding::Exact => Numerics::Fast,
            Rounding::Ggml => Numerics::Ggml,
        }
    }
}

/// The commands; each is a file of its own.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    Serve(crate::serve::ServeArgs),
    Run(crate::run::RunArgs),
    Chat(crate::chat::ChatArgs),
    Pull(crate::pull::PullArgs),
    Bench(crate::bench::BenchArgs),
    Graph(crate::graph_cli::GraphArgs),
    Trace(crate::trace::TraceArgs),
    Doctor(crate::doctor::DoctorArgs),
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn no_two_flags_are_in_each_others_way() {
        Cli::command().debug_assert();
    }
}
