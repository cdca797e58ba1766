//! The command line.

use crate::version;
use clap::{Args, Parser, Subcommand, ValueEnum};
use device::cpu::Numerics;
use device::{DType, DeviceChoice, Target};
use model::{Precision, Quantise, precision};

/// Runs language models by recording them as device graphs and replaying them
#[derive(Parser, Debug)]
#[command(
    name = "dacapo",
    version = version::SHORT,
    long_version = version::LONG,
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
    /// Quantise the matrices of layers while they are loaded: fp8 (e4m3, blocks of 128 × 128) or int4 (groups of 128)
    #[arg(long, global = true, value_name = "FORMAT")]
    pub(crate) quantize: Option<Format>,
    /// Keys and values in the KV cache
    #[arg(long, global = true, value_name = "TYPE", default_value = "auto")]
    pub(crate) kv_dtype: KvType,
}

impl Global {
    /// The precision that these flags ask for on a target.
    pub(crate) fn precision(&self, target: &dyn Target) -> Precision {
        let precision = match self.numerics {
            Rounding::Exact => Precision::EXACT,
            Rounding::Fast | Rounding::Ggml => precision(target),
        };
        let kv = match self.kv_dtype {
            KvType::Auto => precision.kv,
            KvType::Fp8 => DType::E4M3,
        };
        Precision { kv, quantise: self.quantize.map(Into::into), ..precision }
    }
}

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvType {
    /// What the device computes with: bf16 on a GPU, f16 on a CPU
    Auto,
    /// e4m3, half the bytes
    Fp8,
}

/// A format to quantise to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Half the bytes of bf16
    Fp8,
    /// A quarter of the bytes of bf16
    Int4,
}

impl From<Format> for Quantise {
    fn from(format: Format) -> Quantise {
        match format {
            Format::Fp8 => Quantise::Fp8,
            Format::Int4 => Quantise::Int4,
        }
    }
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
            Rounding::Fast => Numerics::Fast,
            Rounding::Exact => Numerics::Exact,
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
    Embed(crate::embed::EmbedArgs),
    Pull(crate::pull::PullArgs),
    Quantize(crate::quantize::QuantizeArgs),
    Bench(crate::bench::BenchArgs),
    Graph(crate::graph_cli::GraphArgs),
    Trace(crate::trace::TraceArgs),
    Doctor(crate::doctor::DoctorArgs),
    Completions(crate::install::CompletionsArgs),
    Man(crate::install::ManArgs),
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
