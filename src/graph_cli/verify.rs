//! `dacapo graph verify`.

use super::{ModelArgs, ProgramSource};
use crate::exit::bad_input;
use crate::numbers::TIMES;
use crate::output::say;
use anyhow::{Result, bail};
use clap::Args;
use device::StepLimits;
use fixtures::{Sweep, Verified};
use graph::bucket::{BucketSpec, Buckets};
use graph::layout::Layout;
use graph::program::Program;
use graph::{BackendKind, CompileTarget, Phase};

/// Run every bucket and backend on this device, replayed and op by op, and compare every byte
#[derive(Args, Debug)]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Only this backend
    #[arg(long, value_name = "BACKEND")]
    backend: Option<String>,
    /// Decode buckets, in sequences
    #[arg(long, value_name = "LIST", default_value = "1,2,4,8")]
    buckets_decode: String,
    /// Prefill buckets, in tokens
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

pub(super) fn run(args: &VerifyArgs, source: &dyn ProgramSource) -> Result<()> {
    let mut printed = Ok(());
    let passed = verify(args, source, &mut |line| {
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
    source: &dyn ProgramSource,
    tell: &mut dyn FnMut(String),
) -> Result<bool> {
    let device = source.open_device()?;
    let target = CompileTarget::new(device.target());
    let list = |text: &str, phase: Phase, max: u32| -> Result<Buckets> {
        let spec: BucketSpec = text.parse().map_err(|error| bad_input(format!("{error}")))?;
        Buckets::generate(&spec, phase, max, None).map_err(|error| bad_input(error.to_string()))
    };
    let mut sweep = Sweep {
        backends: backends(args.backend.as_deref())?,
        decode: list(&args.buckets_decode, Phase::Decode, args.model.max_batch)?,
        prefill: list(&args.buckets_prefill, Phase::Prefill, args.model.max_tokens)?,
        steps: args.steps,
        replays: args.replays,
        seed: args.seed,
    };
    let model = &args.model;
    let program = source.program(&model.model, &model.load_format, &target)?;
    let limits = small_limits(&sweep, model, &program);
    if !program.phases.contains(&Phase::Decode) {
        sweep.decode.sizes.clear();
    }
    let keys: Vec<_> =
        [&sweep.decode, &sweep.prefill].iter().flat_map(|buckets| buckets.keys(&limits)).collect();
    let mut layout = Layout::new(&program, &target, limits, &keys)?;
    layout.add_pages(&program, pages(&limits));
    let Layout { arena, bindings } = layout;
    let arena = device.seal(arena)?;
    source.fill(&model.model, &model.load_format, &device, &arena, &bindings)?;
    tell(format!("{} on {}", program.name, device.describe()));
    let each = &mut |line: &Verified| tell(text(line));
    let findings = sweep.run(&device, &arena, &program, &target, &bindings, each)?;
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

fn backends(only: Option<&str>) -> Result<Vec<BackendKind>> {
    let Some(name) = only else { return Ok(BackendKind::ALL.to_vec()) };
    let found = BackendKind::ALL.into_iter().find(|kind| kind.name() == name);
    let names = BackendKind::ALL.map(BackendKind::name).join(", ");
    found
        .map(|kind| vec![kind])
        .ok_or_else(|| bad_input(format!("unknown backend: use one of {names}")))
}

/// Small limits: pages for the largest step, not for a whole context.
fn small_limits(sweep: &Sweep, model: &ModelArgs, program: &Program) -> StepLimits {
    let seats = sweep.decode.largest().max(2);
    let tokens = sweep.prefill.largest().max(seats);
    let each = tokens.div_ceil(model.page_size) + 2;
    let most = program.shape.max_positions / model.page_size;
    StepLimits {
        seats,
        rows: seats,
        tokens,
        pages_per_seat: each.min(most.max(1)),
        ..model.limits(program)
    }
}

/// Pages for two of the largest steps over all seats and a few more, not a whole context per seat.
fn pages(limits: &StepLimits) -> u32 {
    let step = (2 * limits.tokens).div_ceil(limits.seats * limits.page_size);
    1 + limits.seats * (step + 8).min(limits.pages_per_seat)
}

fn text(line: &Verified) -> String {
    let outcome = match &line.problem {
        None => format!("{} steps agree", line.steps),
        Some(problem) => problem.clone(),
    };
    format!("{:<10} {:<18} {outcome}", line.backend.name(), line.key.to_string())
}
