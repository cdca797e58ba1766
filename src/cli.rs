//! The command line.

use clap::{Args, Parser, Subcommand, ValueEnum};
use device::DeviceChoice;
use device::cpu::Numerics;

/// Runs language models by recording them as device graphs and replaying them
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
  dacapo run -p \"What is the capital of France?\"     answer with SmolLM2, downloaded if needed
  dacapo serve                                       OpenAI API and a page on http://127.0.0.1:8000
  dacapo chat Qwen/Qwen3-0.6B                        chat with a model from the hub
  dacapo run ./model.gguf --json < question.txt      one JSON object, for scripts

Exit codes: 0 success, 1 failure, 2 invalid input, 130 interrupted, 141 output pipe closed.";

/// Flags of every command.
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
    /// Threads of the CPU device [default: all cores]
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) threads: Option<u16>,
    /// Precision. fast; ggml: the same tokens as llama.cpp from the same GGUF (Q4_1, Q5, Q8_0, Q4_K to Q6_K) on a
    /// CPU, slower; exact: float32, the same tokens on every device, slowest
    #[arg(long, global = true, value_name = "MODE", default_value = "fast")]
    pub(crate) numerics: Rounding,
}

/// The precision of the computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Rounding {
    /// The fastest kernels
    Fast,
    /// Bit for bit like llama.cpp on a CPU
    Ggml,
    /// Float32 throughout: weights are unpacked to four bytes each
    Exact,
}

impl From<Rounding> for Numerics {
    fn from(rounding: Rounding) -> Numerics {
        match rounding {
            // With float32 weights the fast kernels round nothing.
            Rounding::Fast | Rounding::Exact => Numerics::Fast,
            Rounding::Ggml => Numerics::Ggml,
        }
    }
}

/// The subcommands, one per file.
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
    fn flags_do_not_conflict() {
        Cli::command().debug_assert();
    }
}
