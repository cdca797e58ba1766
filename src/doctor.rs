//! `dacapo doctor`: what this machine has, what will be used, and what to do about the rest.

use crate::models::{HubEnv, default_model};
use anyhow::Result;
use clap::Args;
use serde_json::json;

/// Say what was found on this machine, what will be used, and how to mend what is missing
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
    if args.json {
        let models = json!({ "hub_cache": env.cache, "offline": env.offline, "smollm2": default });
        println!("{}", json!({ "device": report, "models": models }));
        return Ok(());
    }
    print!("{report}");
    println!("hub cache      {}", env.cache.display());
    match default {
        Some(path) => println!("smollm2        {}", path.display()),
        None => println!("smollm2        not here yet; `dacapo pull` fetches it"),
    }
    Ok(())
}
