//! `dacapo doctor`: checks this machine.

use crate::models::{HubEnv, default_model};
use crate::output::{Output, say};
use anyhow::Result;
use clap::Args;
use serde_json::json;
use std::io::Write;

/// Check this machine: devices, libraries, and how to fix what is missing
#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &DoctorArgs) -> Result<()> {
    let report = device::doctor::report();
    let env = HubEnv::read();
    let default = default_model(&env);
    let cache = env.cache();
    if args.json {
        let (cache, problem) =
            (cache.ok(), default.as_ref().err().map(|error| format!("{error:#}")));
        let default = default.ok().flatten();
        let models = json!({
            "hub_cache": cache,
            "offline": env.offline,
            "smollm2": default,
            "smollm2_problem": problem,
        });
        say!("{}", json!({ "device": report, "models": models }))?;
        return Ok(());
    }
    write!(Output::new(), "{report}")?;
    match cache {
        Ok(path) => say!("hub cache      {}", path.display())?,
        Err(problem) => say!("hub cache      none: {problem}")?,
    }
    match default {
        Ok(Some(path)) => say!("smollm2        {}", path.display())?,
        Ok(None) => say!("smollm2        not downloaded; `dacapo pull` downloads it")?,
        Err(problem) => say!("smollm2        {problem:#}")?,
    }
    Ok(())
}
