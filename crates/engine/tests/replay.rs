//! The programs of real models replay what they say: every family of `goldens/` × every backend × every
//! bucket × random batches, each step run op by op and by replay from the same state and compared byte
//! for byte. On the CPU, and the same on a GPU when there is one.

mod models;

use device::{DType, Device, DeviceChoice, StepLimits};
use engine::model::place::{Placed, device_dtype, sources};
use engine::model::weights::specs;
use engine::model::{fill, numbers, program, rope};
use fixtures::Sweep;
use formats::checkpoint::Checkpoint;
use formats::config::ModelConfig;
use formats::tensor_names::Role;
use graph::bucket::{BucketSpec, Buckets};
use graph::layout::Layout;
use graph::{BackendKind, CompileTarget, Phase};
use std::path::Path;

/// Per bucket; with eleven models and eight buckets, 1,056 batches for each backend.
const STEPS: u32 = 12;

fn buckets(list: &str, phase: Phase, limits: &StepLimits) -> Buckets {
    let spec: BucketSpec = list.parse().unwrap();
    let most = if phase == Phase::Decode { limits.rows } else { limits.tokens };
    Buckets::generate(&spec, phase, most, None).unwrap()
}

fn sweep(folder: &Path, device: &Device) {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let config = ModelConfig::of(&checkpoint).unwrap();
    let specs = specs(&config);
    let tensors = sources(&checkpoint, &specs).unwrap();
    let stored = |role: Role| -> DType { device_dtype(tensors[&role].dtype).unwrap() };
    let target = device.target();
    let positions = (config.max_position as u32).min(128);
    let (program, _) = program(&config, &*target, numbers(&*target), positions, &stored).unwrap();
    let limits = StepLimits {
        seats: 8,
        rows: 8,
        tokens: 40,
        pages_per_seat: 8,
        page_size: 16,
        vocab: program.shape.vocab,
        penalties: true,
    };
    let target = CompileTarget::new(target);
    let sweep = Sweep {
        backends: BackendKind::ALL.to_vec(),
        decode: buckets("1,2,4,8", Phase::Decode, &limits),
        prefill: buckets("8,16,24,40", Phase::Prefill, &limits),
        steps: STEPS,
        replays: 1,
        seed: 1,
    };
    let keys: Vec<_> =
        [&sweep.decode, &sweep.prefill].iter().flat_map(|buckets| buckets.keys(&limits)).collect();
    let mut layout = Layout::new(&program, &target, limits, &keys).unwrap();
    layout.add_pages(&program, 1 + limits.seats * limits.pages_per_seat);
    let Layout { arena, bindings } = layout;
    let arena = device.seal(arena).unwrap();
    let place = |spec: &engine::model::weights::WeightSpec| {
        let tensor = bindings.weights.get(&spec.name).copied();
        tensor.map(|tensor| Placed { spec: spec.clone(), tensor })
    };
    let placed: Vec<Placed> = specs.iter().filter_map(place).collect();
    let heads = fill::HeadRows::new(&checkpoint, config.head_dim, program.pairs());
    fill::from_checkpoint(device, &arena, &placed, &checkpoint, &tensors, heads, &|_| ()).unwrap();
    let table = rope::table(&config, program.shape.max_positions as usize, device.numerics());
    let bytes: Vec<u8> = table.iter().flat_map(|x| x.to_le_bytes()).collect();
    device.write(&arena, bindings.rope.span, &bytes).unwrap();
    let findings = sweep.run(device, &arena, &program, &target, &bindings, &mut |_| ()).unwrap();
    assert!(findings.passed(), "{}: {findings:?}", folder.display());
    assert_eq!(findings.verified.len(), 4 * 8);
    assert!(findings.verified.iter().all(|line| line.steps == STEPS));
}

#[test]
fn every_family_replays_what_its_plan_says() {
    let mut devices = vec![Device::open(DeviceChoice::Cpu).unwrap().0];
    match Device::open(DeviceChoice::Cuda(0)) {
        Ok((gpu, _)) => devices.push(gpu),
        Err(reason) => eprintln!("skipped: no GPU ({reason})"),
    }
    for device in &devices {
        let mut families = 0;
        for entry in std::fs::read_dir(models::folder()).unwrap() {
            sweep(&entry.unwrap().path(), device);
            families += 1;
        }
        assert_eq!(families, 11);
    }
}
