//! `dacapo pull`: downloads a model.

use crate::exit::bad_input;
use crate::models::{self, DEFAULT, HubEnv, ModelName};
use crate::output::say;
use anyhow::Result;
use clap::Args;
use serde_json::json;

/// Download or update a model in the hub's cache
#[derive(Args, Debug)]
pub(crate) struct PullArgs {
    /// Hub id `org/name[@revision]`, `org/name/file.gguf`, `smollm2` or `gemma3-270m`
    #[arg(default_value = DEFAULT)]
    model: String,
    /// Print one JSON object instead of the path
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &PullArgs) -> Result<()> {
    let env = HubEnv::read();
    let name = ModelName::parse(&args.model)?;
    let report = match &name {
        ModelName::Hub(id) => {
            let pulled = models::pull(id, &env)?;
            let part = |(file, bytes): &(String, u64)| json!({ "file": file, "bytes": bytes });
            json!({
                "model": id.to_string(),
                "commit": pulled.commit,
                "path": pulled.files.path(),
                "files": pulled.parts.iter().map(part).collect::<Vec<_>>(),
            })
        }
        ModelName::Named(_) => {
            json!({ "model": args.model, "path": models::locate(&name, &env)?.path() })
        }
        ModelName::Folder(_) | ModelName::Gguf(_) => {
            return Err(bad_input(format!("{} is already on this machine", args.model)));
        }
    };
    match args.json {
        true => say!("{report}")?,
        false => say!("{}", report["path"].as_str().unwrap_or_default())?,
    }
    Ok(())
}
