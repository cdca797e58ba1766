//! `dacapo bench device`: the speed of the hardware.

use super::record;
use crate::cli::Global;
use crate::output::Output;
use crate::{loading, progress};
use anyhow::Result;
use clap::Args;
use std::io::Write;
use std::path::PathBuf;

/// Measure the hardware: bandwidth, cost of a launch, cost of a replay
#[derive(Args, Debug)]
pub(crate) struct DeviceArgs {
    /// Write the results, with machine and command, to this file (- is standard output)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub(crate) fn run(args: &DeviceArgs, global: &Global) -> Result<()> {
    let (device, line) = loading::open_device(global)?;
    let working = progress::spinner("measuring");
    let table = figures::run(&device, &mut |what| working.set_message(what.to_owned()))?;
    working.finish_and_clear();
    if let Some(path) = &args.json {
        record::write(path, &record::record(&line, &table)?)?;
    }
    if args.json.as_deref() != Some("-".as_ref()) {
        write!(Output::new(), "{table}")?;
    }
    Ok(())
}
