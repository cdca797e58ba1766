//! Replays of real models' programs equal their plans: every family of `goldens/` × every backend × every
//! bucket × random batches, each step run op by op and by replay from the same state and compared byte
//! for byte. Models with recurrent layers also verify drafts. On the CPU, and the same on a GPU when there is one.

use crate::models;
use device::{Device, DeviceChoice, StepLimits};
use fixtures::{Setup, Sweep};
use graph::bucket::{BucketSpec, Buckets};
use graph::layout::Layout;
use graph::{CompileTarget, Phase};
use model::{ModelSource, OpenModel, precision};
use std::collections::BTreeSet;
use std::path::Path;

/// Per bucket: with eight buckets, 96 batches for each model and backend.
const STEPS: u32 = 12;

fn buckets(list: &str, phase: Phase, limits: &StepLimits) -> Buckets {
    let spec: BucketSpec = list.parse().unwrap();
    let most = if phase == Phase::Decode { limits.rows } else { limits.tokens };
    Buckets::generate(&spec, phase, most, None).unwrap()
}

/// Runs the model in `folder`, and returns its family.
fn sweep(folder: &Path, device: &Device) -> &'static str {
    let model = OpenModel::open(&ModelSource::Checkpoint(folder.to_owned())).unwrap();
    let target = device.target();
    let positions = (model.config.max_position as u32).min(128);
    let written = model.write(&*target, device.numerics(), precision(&*target), positions).unwrap();
    let program = &written.program;
    let recurs = program.carry_bytes() > 0;
    let limits = StepLimits {
        seats: 8,
        rows: 8,
        tokens: 40,
        pages_per_seat: 8,
        page_size: 16,
        vocab: program.shape.vocab,
        penalties: true,
        tokens_per_row: if recurs { 4 } else { 1 },
        tables: program.kept().tables().max(1),
    };
    let target = CompileTarget::new(target);
    let decode = buckets("1,2,4,8", Phase::Decode, &limits);
    let prefill = buckets("8,16,24,40", Phase::Prefill, &limits);
    let mut setups = Setup::each_backend(&target, &decode, &prefill);
    for setup in setups.iter_mut().filter(|_| recurs) {
        setup.decode.q_lens = vec![2, 4];
    }
    let configs = [&setups[0].decode, &setups[0].prefill];
    let keys: Vec<_> = configs.iter().flat_map(|config| config.keys(&limits)).collect();
    assert_eq!(keys.len(), if recurs { 16 } else { 8 });
    let sweep = Sweep { setups, steps: STEPS, replays: 1, seed: 1 };
    let mut layout = Layout::new(program, &target, limits, &keys).unwrap();
    layout.add_pages(program, 1 + limits.seats * limits.pages_per_seat * limits.tables);
    let Layout { arena, bindings } = layout;
    let arena = device.seal(arena).unwrap();
    model.fill(&written, device, &arena, &bindings, &|_| ()).unwrap();
    let findings = sweep.run(device, &arena, program, &bindings, &mut |_| ()).unwrap();
    assert!(findings.passed(), "{}: {findings:?}", folder.display());
    assert_eq!(findings.verified.len(), 3 * keys.len());
    assert!(findings.verified.iter().all(|line| line.steps == STEPS));
    model.config.family
}

#[test]
fn every_family_replays_what_its_plan_says() {
    let mut devices = vec![Device::open(DeviceChoice::Cpu).unwrap().0];
    match Device::open(DeviceChoice::Cuda(0)) {
        Ok((gpu, _)) => devices.push(gpu),
        Err(reason) => eprintln!("skipped: no GPU ({reason})"),
    }
    for device in &devices {
        let cases = models::cases();
        let families: BTreeSet<_> =
            cases.iter().map(|case| sweep(&models::folder().join(case), device)).collect();
        let encoders: BTreeSet<_> = model::families::encoders().collect();
        let decoders = model::families::names().filter(|name| !encoders.contains(name));
        assert_eq!(families, decoders.collect());
    }
}
