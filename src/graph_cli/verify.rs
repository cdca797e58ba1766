//! `dacapo graph verify`.

use super::ModelArgs;
use crate::exit::bad_input;
use crate::numbers::TIMES;
use crate::output::say;
use crate::programs::Programs;
use anyhow::{Result, bail};
use clap::Args;
use device::{Device, StepLimits};
use fixtures::{Setup, Sweep, Verified};
use graph::BackendKind;
use graph::config::ConfigError;
use graph::layout::Layout;
use model::{Configured, LoadError, OpenModel};

/// Run every bucket and backend on this device, replayed and op by op, and compare every byte
///
/// Plans are those that `serve` would run with the same options: merged layers, fixed kernels, staged inputs, drafts. Loops of several
/// steps are compared with single steps.
#[derive(Args, Debug)]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Only this backend
    #[arg(long, value_name = "BACKEND")]
    backend: Option<String>,
    /// Decode buckets, in sequences; auto: those that `serve` records [default: 1,2,4,8, up to --max-batch]
    #[arg(long, value_name = "LIST")]
    buckets_decode: Option<String>,
    /// Prefill buckets, in tokens; auto: those that `serve` records
    #[arg(long, value_name = "LIST", default_value = "16,64")]
    buckets_prefill: String,
    /// Random steps per bucket
    #[arg(long, value_name = "N", default_value_t = 3)]
    #[arg(value_parser = clap::value_parser!(u32).range(TIMES))]
    steps: u32,
    /// Replays of each step, each from the same state and compared with the op-by-op run
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(TIMES))]
    replays: u32,
    /// Seed of the random steps
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

pub(super) fn run(args: &VerifyArgs, programs: &Programs<'_>) -> Result<()> {
    let mut printed = Ok(());
    let passed = verify(args, programs, &mut |line| {
        if printed.is_ok() {
            printed = say!("{line}");
        }
    })?;
    printed?;
    if !passed {
        bail!("replay and op-by-op results differ; see the lines above");
    }
    Ok(())
}

/// Verifies, with a line of text for each thing found; returns whether everything agreed.
pub(crate) fn verify(
    args: &VerifyArgs,
    programs: &Programs<'_>,
    tell: &mut dyn FnMut(String),
) -> Result<bool> {
    let device = programs.open_device()?;
    let opened = programs.open(&args.model)?;
    let mut configured: Vec<Configured> = Vec::new();
    for backend in backends(args.backend.as_deref())? {
        match configure(args, programs, &opened, &device, backend) {
            Ok(found) if found.decode.backend == backend => configured.push(found),
            // `--graph-config` names another one.
            Ok(_) => {}
            Err(error) if args.backend.is_none() && breaks_rule(&error) => {
                tell(format!("{:<10} skipped: {error}", backend.name()));
            }
            Err(error) => return Err(error),
        }
    }
    let Some(first) = configured.first() else {
        return Err(bad_input("no backend runs with these options"));
    };
    let (program, limits) = (first.program(), first.limits);
    // The first is the one with merged layers, if any is.
    let mut layout = first.layout()?;
    layout.add_pages(program, pages(&limits));
    let Layout { arena, bindings } = layout;
    let arena = device.seal(arena)?;
    first.fill(&opened, &device, &arena, &bindings, &|_| ())?;
    tell(format!("{} on {}", program.name, device.describe()));
    let setup = |of: &Configured| Setup {
        target: of.target.clone(),
        decode: of.decode.clone(),
        prefill: of.prefill.clone(),
    };
    let setups = configured.iter().map(setup).collect();
    let sweep = Sweep { setups, steps: args.steps, replays: args.replays, seed: args.seed };
    let each = &mut |line: &Verified| tell(text(line));
    let findings = sweep.run(&device, &arena, program, &bindings, each)?;
    for (backend, time) in &findings.recording {
        let bytes = findings.verified.iter().filter(|line| line.backend == *backend);
        let bytes = graph::plan::bytes(bytes.map(|line| line.bytes).sum());
        tell(format!("{backend:<10} recorded in {:.3} s, {bytes}", time.as_secs_f64()));
    }
    let passed = findings.passed();
    if passed {
        tell("all replays match their plans".into());
    }
    Ok(passed)
}

/// A few buckets, the largest of them for no more sequences than there may be.
fn small_buckets(most: Option<u32>) -> String {
    let most = most.unwrap_or(8).clamp(1, 8);
    let smaller = [1, 2, 4].into_iter().filter(|bucket| *bucket < most);
    let list: Vec<String> = smaller.chain([most]).map(|bucket| bucket.to_string()).collect();
    list.join(",")
}

/// Whether a backend cannot run with the other options.
fn breaks_rule(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(LoadError::Graphs(ConfigError::Rule { .. })))
}

/// The model as it is served by a backend, with the buckets that are asked for.
fn configure(
    args: &VerifyArgs,
    programs: &Programs<'_>,
    opened: &OpenModel,
    device: &Device,
    backend: BackendKind,
) -> Result<Configured> {
    let decode = args.buckets_decode.clone().unwrap_or_else(|| small_buckets(args.model.max_batch));
    let flags = [
        ("graph-backend-decode", backend.name()),
        ("graph-backend-prefill", backend.name()),
        ("graph-buckets-decode", &decode),
        ("graph-buckets-prefill", &args.buckets_prefill),
    ];
    let given = args.model.given(&flags);
    let mut found = programs.configure(opened, &args.model, device.target(), given.clone())?;
    // Only as many sequences and tokens as the largest bucket: state of more would be compared for nothing.
    let model = ModelArgs {
        max_batch: Some(found.decode.buckets.largest().max(2)),
        max_tokens: Some(found.prefill.buckets.largest().max(2)),
        ..args.model.clone()
    };
    found = programs.configure(opened, &model, device.target(), given)?;
    Ok(found)
}

fn backends(only: Option<&str>) -> Result<Vec<BackendKind>> {
    // `disabled` records nothing that could be compared: what it runs is what the others are compared with.
    let recording = BackendKind::ALL.into_iter().filter(|&kind| kind != BackendKind::Disabled);
    let found: Vec<_> =
        recording.filter(|kind| only.is_none_or(|name| kind.name() == name)).collect();
    match found.is_empty() {
        true => Err(bad_input("use full, breakable or piecewise: only these record")),
        false => Ok(found),
    }
}

/// Pages for two of the largest steps over all seats and a few more, not a whole context per seat.
fn pages(limits: &StepLimits) -> u32 {
    let step = (2 * limits.tokens).div_ceil(limits.seats * limits.page_size);
    1 + limits.seats * (step + 8).min(limits.pages_per_seat) * limits.tables
}

fn text(line: &Verified) -> String {
    let outcome = match &line.problem {
        None => format!("{} steps agree", line.steps),
        Some(problem) => problem.clone(),
    };
    format!("{:<10} {:<18} {outcome}", line.backend.name(), line.key.to_string())
}
