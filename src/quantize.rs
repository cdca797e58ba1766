//! `dacapo quantize`: writes a quantised checkpoint.

use crate::cli::{Format, Global};
use crate::exit::{Interrupted, bad_input};
use crate::interrupt::Interrupt;
use crate::models::{self, Files, HubEnv, ModelName};
use crate::output::{note, say};
use crate::progress;
use anyhow::{Context, Result};
use clap::Args;
use model::{QuantiseError, QuantiseOptions, Quantiser};
use serde_json::json;
use std::fs::Permissions;
use std::ops::ControlFlow;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Write a checkpoint with quantised matrices, which vLLM and transformers read, too
///
/// The matrices of layers are quantised; routers, embeddings and the head stay as they are. The format is that of
/// compressed-tensors.
#[derive(Args, Debug)]
pub(crate) struct QuantizeArgs {
    /// Folder with safetensors, or hub id `org/name[@revision]`
    model: String,
    /// The new folder, which must not exist or be empty
    #[arg(long, short, value_name = "FOLDER")]
    output: PathBuf,
    /// fp8: e4m3 in blocks of 128 × 128, or in rows where matrices are not whole blocks; int4: groups of columns
    #[arg(long, value_name = "FORMAT")]
    format: Format,
    /// With int4: columns that share a scale; fewer where columns do not divide [default: 128]
    #[arg(long, value_name = "N", value_parser = ["128", "64", "32"])]
    group: Option<String>,
    /// Print one JSON object instead of the path
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &QuantizeArgs, global: &Global) -> Result<()> {
    if args.group.is_some() && args.format == Format::Fp8 {
        return Err(bad_input("--group is for --format int4"));
    }
    let parent = check_output(&args.output)?;
    let files = models::locate(&ModelName::parse(&args.model)?, &HubEnv::read())?;
    if let Files::Gguf(path) = files {
        return Err(refused(QuantiseError::Gguf(path)));
    }
    let options = QuantiseOptions {
        format: args.format.into(),
        group: args.group.as_deref().unwrap_or("128").parse()?,
        threads: global.threads.map(usize::from),
        shard_bytes: None,
    };
    let quantiser = Quantiser::open(files.path(), options).map_err(refused)?;
    let (before, after) = quantiser.bytes();

    let interrupt = Interrupt::install()?;
    let stop = interrupt.guard();
    let name = args.output.file_name().unwrap_or_default().to_string_lossy();
    std::fs::create_dir_all(&parent).with_context(|| parent.display().to_string())?;
    // Renamed when it is complete, and removed if that does not happen.
    let folder = tempfile::Builder::new()
        .prefix(&format!(".{name}."))
        .suffix(".partial")
        .permissions(Permissions::from_mode(0o777))
        .tempdir_in(&parent)
        .with_context(|| parent.display().to_string())?;
    let bar = progress::bytes(before, "quantising");
    let report = |done| {
        bar.set_position(done);
        if stop.interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let outcome = quantiser.write(folder.path(), &report);
    bar.finish_and_clear();
    outcome.map_err(refused)?;
    std::fs::rename(folder.path(), &args.output)
        .with_context(|| format!("renaming the folder to {}", args.output.display()))?;
    // It has another name now.
    let _ = folder.keep();

    let path = args.output.display();
    if args.json {
        let report = json!({
            "model": args.model,
            "path": args.output,
            "matrices": quantiser.describe(),
            "bytes_before": before,
            "bytes_after": after,
        });
        say!("{report}")?;
        return Ok(());
    }
    let [from, to] = [before, after].map(graph::plan::bytes);
    let share = 100.0 * after as f64 / before as f64;
    note!("{}: {from} before, {to} after ({share:.0} %)", quantiser.describe());
    say!("{path}")?;
    Ok(())
}

/// Refuses an output folder that has something in it; returns the folder it will be in.
fn check_output(output: &Path) -> Result<PathBuf> {
    let refuse = |why: &str| Err(bad_input(format!("{}: {why}", output.display())));
    if output.file_name().is_none() {
        return refuse("name a new folder");
    }
    match std::fs::read_dir(output).map(|mut entries| entries.next().is_some()) {
        Ok(true) => return refuse("the folder is not empty; name a new one"),
        Ok(false) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return refuse(&error.to_string()),
    }
    let parent = output.parent().filter(|parent| !parent.as_os_str().is_empty());
    Ok(parent.unwrap_or(Path::new(".")).to_owned())
}

/// The error with its exit code: what is wrong with the model is invalid input, what is wrong with the disk is not.
fn refused(error: QuantiseError) -> anyhow::Error {
    match error {
        QuantiseError::Load(error) => error.into(),
        QuantiseError::Stopped => Interrupted.into(),
        QuantiseError::Write(error) => error.into(),
        other @ (QuantiseError::Gguf(_)
        | QuantiseError::Already { .. }
        | QuantiseError::NoMatrix(_)) => bad_input(other.to_string()),
    }
}
