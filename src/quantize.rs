//! `dacapo quantize`: writes a quantised checkpoint.

use crate::cli::{Format, Global};
use crate::exit::{Interrupted, bad_file, bad_input};
use crate::interrupt::{Answering, Interrupt};
use crate::models::{self, Files, HubEnv, ModelName};
use crate::output::{note, say};
use crate::progress;
use anyhow::{Context, Result, anyhow};
use clap::Args;
use device::Device;
use engine::request::Token;
use formats::checkpoint::Checkpoint;
use formats::tokenizer::Tokenizer;
use model::{ModelConfig, QuantiseError, QuantiseOptions, Quantiser, Texts};
use serde_json::json;
use std::collections::HashSet;
use std::fs::Permissions;
use std::ops::ControlFlow;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Tokens of a text to calibrate by.
const WINDOW: usize = 512;

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
    // Not a doc comment, because rustdoc would parse the brackets as links.
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    #[arg(
        help = "Quantise by what reaches each matrix while the model reads a text: this file, or without one a text that the \
                model writes itself; slower and closer to the model. Runs on the CPU"
    )]
    calibrate: Option<Option<PathBuf>>,
    /// Tokens to calibrate by
    #[arg(long, value_name = "N", default_value_t = 16_384, requires = "calibrate")]
    #[arg(value_parser = clap::value_parser!(u32).range(64..=1 << 20))]
    calibrate_tokens: u32,
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
    let calibration = match &args.calibrate {
        None => None,
        Some(file) => {
            let device = device::cpu::open(global.threads.map(usize::from), false)?;
            let texts = texts(args, files.path(), file.as_deref(), &device, &stop)?;
            Some((device, texts))
        }
    };
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
    let calibration = calibration.as_ref().map(|(device, texts)| (device, texts));
    let outcome = quantiser.write(folder.path(), calibration, &report);
    bar.finish_and_clear();
    let [calibrated, rounded] = outcome.map_err(refused)?;
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
            "calibrated": calibrated,
            "calibration_tokens": calibration.map_or(0, |(_, texts)| texts.tokens()),
            "rounded": rounded,
        });
        say!("{report}")?;
        return Ok(());
    }
    let [from, to] = [before, after].map(graph::plan::bytes);
    let share = 100.0 * after as f64 / before as f64;
    note!("{}: {from} before, {to} after ({share:.0} %)", quantiser.describe());
    if let Some((_, texts)) = calibration {
        let tokens = texts.tokens();
        note!("{calibrated} matrices calibrated by {tokens} tokens, {rounded} rounded without");
    }
    say!("{path}")?;
    Ok(())
}

/// What the model is calibrated by: a file's text, or its own.
fn texts(
    args: &QuantizeArgs,
    model: &Path,
    file: Option<&Path>,
    device: &Device,
    stop: &Answering<'_>,
) -> Result<Texts> {
    let checkpoint = Checkpoint::open(model)?;
    let tokenizer = Tokenizer::of(&checkpoint)?;
    // What the model expects before a text, if anything.
    let begin = tokenizer.encode_text("", true)?;
    let length = WINDOW.min(args.calibrate_tokens as usize);
    let count = args.calibrate_tokens as usize / length;
    if let Some(file) = file {
        let text = std::fs::read_to_string(file).map_err(bad_file(file))?;
        let tokens = tokenizer.encode_text(&text, false)?;
        let few = || {
            let (has, needs) = (tokens.len(), length - begin.len());
            bad_input(format!("{}: {has} tokens, needs at least {needs}", file.display()))
        };
        return Texts::cut(&tokens, &begin, length, count).ok_or_else(few);
    }
    let control: HashSet<Token> = tokenizer.control_ids().collect();
    let vocab = ModelConfig::of(&checkpoint)?.vocab as u64;
    // Any token may begin a text, so that texts are of many kinds.
    let mut draws = (0..u64::MAX).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20) % vocab);
    let mut start = |_| -> Vec<Token> {
        let plain = |id: &Token| !control.contains(id) && !tokenizer.token_bytes(*id).is_empty();
        let first = draws.by_ref().map(|id| id as Token).find(plain);
        begin.iter().copied().chain(first).collect()
    };
    let starts: Vec<Vec<Token>> = (0..count).map(&mut start).collect();
    let bar = progress::count((count * length) as u64, "tokens written");
    let report = |done| {
        bar.set_position(done);
        !stop.interrupted()
    };
    let texts = Texts::written_by(model, device, &starts, length, &report);
    bar.finish_and_clear();
    texts.map_err(refused)?.ok_or_else(|| Interrupted.into())
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
        QuantiseError::Step(_) => anyhow!(error),
        QuantiseError::Write(error) => error.into(),
        other @ (QuantiseError::Gguf(_)
        | QuantiseError::Already { .. }
        | QuantiseError::NoText(_)
        | QuantiseError::NoMatrix(_)) => bad_input(other.to_string()),
    }
}
