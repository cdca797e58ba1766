//! `dacapo bench`: measurements, recorded with the machine and the command.

mod accuracy;
mod cpu;
mod decode;
mod device;
mod experts;
mod kept;
mod mix;
mod mixed;
mod nodes;
mod plot;
mod prefill;
mod quality;
pub(crate) mod record;
mod replay;
mod report;
mod serve;
mod steady;
mod tune;

use crate::cli::Global;
use anyhow::Result;
use clap::{Args, Subcommand};

/// Measure this machine, a model or a server
#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    Device(device::DeviceArgs),
    Cpu(cpu::CpuArgs),
    Decode(decode::DecodeArgs),
    Nodes(nodes::NodesArgs),
    Prefill(prefill::PrefillArgs),
    Mixed(mixed::MixedArgs),
    Kept(Box<kept::KeptArgs>),
    Quality(quality::QualityArgs),
    Accuracy(accuracy::AccuracyArgs),
    Replay(replay::ReplayArgs),
    Tune(tune::TuneArgs),
    Serve(Box<serve::ServeArgs>),
}

pub(crate) fn run(args: &BenchArgs, global: &Global) -> Result<()> {
    match &args.what {
        What::Device(args) => device::run(args, global),
        What::Cpu(args) => cpu::run(args, global),
        What::Decode(args) => decode::run(args, global),
        What::Nodes(args) => nodes::run(args, global),
        What::Prefill(args) => prefill::run(args, global),
        What::Mixed(args) => mixed::run(args, global),
        What::Kept(args) => kept::run(args, global),
        What::Quality(args) => quality::run(args, global),
        What::Accuracy(args) => accuracy::run(args, global),
        What::Replay(args) => replay::run(args, global),
        What::Tune(args) => tune::run(args, global),
        What::Serve(args) => serve::run(args),
    }
}
