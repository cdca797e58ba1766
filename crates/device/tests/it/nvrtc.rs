//! Every kernel that lowering can request compiles for every architecture we name, waits if lowering says so, and
//! does not spill. Needs no GPU.

use crate::compiler;
use crate::shapes;
use device::cuda::cache::Cache;
use device::cuda::launch::{KernelKey, Launch, Lowered, Target};
use device::cuda::lower::{scratch_bytes, unfit_layers};
use device::cuda::source;
use device::cuda::usage::usage;
use device::variant::Pick;
use device::{DType, Op};
use std::collections::BTreeMap;

/// Bytes of local memory a thread may have. Kernels are written to fit their registers; a few bytes
/// around a rare path cost nothing.
const MOST_LOCAL: u32 = 32;

fn targets() -> Vec<Target> {
    [((8, 0), 108, 163, 164), ((9, 0), 132, 227, 228), ((10, 0), 148, 227, 228)]
        .map(|(capability, sms, block, sm)| Target {
            capability,
            sms,
            shared_per_block: block << 10,
            shared_per_sm: sm << 10,
            l2: 40 << 20,
            tuned: Default::default(),
        })
        .to_vec()
}

/// Whether every model and bucket is compiled for every architecture, which takes minutes; a few of each take
/// seconds. The few cover every source, every dtype and both phases.
fn everything() -> bool {
    std::env::var_os("DACAPO_ALL_KERNELS").is_some()
}

/// Constants that only say how long something is, not how a kernel is made: of kernels that differ in these, the
/// selection has one.
const LENGTHS: [&str; 9] = [
    "AREA_BIASES",
    "AREA_MASKS",
    "AREA_SEEN",
    "MASK_WORDS",
    "PAGES_CAP",
    "PARTS",
    "VOCAB",
    "WIDE",
    "WIDTH",
];
/// The kernels in which they are that: tiles of a linear may be called wide, too.
const OF_ANY_LENGTH: [&str; 7] =
    ["draft_rows", "lora_groups", "pool", "prologue", "propose", "publish", "sample"];

/// A kernel with its lengths left out.
fn without_lengths(key: &KernelKey) -> KernelKey {
    let mut key = key.clone();
    if OF_ANY_LENGTH.contains(&key.source.as_str()) {
        key.defines.retain(|(name, _)| !LENGTHS.contains(&name.as_str()));
    }
    key
}

/// One launch for all lengths of a kernel: the one with the most shared memory.
fn of_one_length(all: BTreeMap<KernelKey, Launch>) -> BTreeMap<KernelKey, Launch> {
    let mut kept: BTreeMap<KernelKey, Launch> = BTreeMap::new();
    for (key, launch) in all {
        let slot = kept.entry(without_lengths(&key)).or_insert_with(|| launch.clone());
        if launch.shared > slot.shared {
            *slot = launch;
        }
    }
    kept.into_values().map(|launch| (launch.kernel.clone(), launch)).collect()
}

/// Every launch of the models and buckets, by kernel: the one with the most shared memory.
fn launches(target: &Target, everything: bool) -> BTreeMap<KernelKey, Launch> {
    let hopper = target.capability == (9, 0);
    let mut all = BTreeMap::new();
    let mut add = |op: &Op, name: &str| {
        op.check().unwrap_or_else(|problem| panic!("{name}: {problem}"));
        assert!(scratch_bytes(op, target) <= shapes::SCRATCH, "{name}: {}", op.name());
        let Some(lowered) = shapes::lowered(op, target) else { return };
        assert!(!lowered.is_empty(), "{} became nothing", op.name());
        for part in lowered {
            if let Lowered::Launch(launch) = part {
                let slot = all.entry(launch.kernel.clone()).or_insert_with(|| launch.clone());
                if launch.shared > slot.shared {
                    *slot = launch;
                }
            }
        }
    };
    for dtype in [DType::Q4_0, DType::Q5_1, DType::Q8_0, DType::Q4K, DType::Q5K, DType::Q6K] {
        let few = [(1, 4096, 4096), (3, 1000, 768)];
        let odd = (2, 64, 640);
        let narrow = dtype.block_elems() < 256;
        for shape in few.into_iter().chain(narrow.then_some(odd)) {
            add(&shapes::linear(dtype, shape), "blocks");
        }
    }
    for (index, layer) in shapes::EXPERT_LAYERS.iter().enumerate() {
        for tokens in [1, 8, 64, 256, 512, 1024, 2048] {
            let chosen = match hopper {
                true => {
                    index == 0 && [1, 8, 64, 2048].contains(&tokens)
                        || index == 5 && tokens == 8
                        || index == 6 && [1, 8].contains(&tokens)
                        || index >= 7 && tokens == 1
                        || tokens == 512
                }
                false => tokens == 8 && [0, 3, 4].contains(&index),
            };
            if !chosen && !everything {
                continue;
            }
            let ops = shapes::expert_ops(layer, tokens);
            let mut fixed = if hopper { ops.clone() } else { Vec::new() };
            // Fixed kernels are never fused.
            fixed.retain(|op| !matches!(op, Op::Fused(_)));
            fixed.iter_mut().for_each(|op| assert!(op.set_pick(Pick::Fixed)));
            for op in ops.iter().chain(&fixed) {
                add(op, layer.name);
            }
        }
    }
    for (index, model) in shapes::MODELS.iter().enumerate() {
        for (rows, tokens, single) in shapes::BUCKETS {
            let chosen = match (hopper, single) {
                // Of the largest step one model's: only there rows of one token have a launch of their own.
                (true, false) if tokens == 2048 => index == 0,
                (_, false) => tokens == 512 && [0, 5, 6].contains(&index),
                (true, true) if index == 0 => [1, 8, 64].contains(&rows),
                (true, true) => rows == 1 && index >= 3 && index != 4 || index == 6 && rows == 64,
                (false, true) => [0, 6].contains(&index) && rows == 1,
            };
            if !chosen && !everything {
                continue;
            }
            let ops = shapes::ops(model, rows, tokens, single);
            let fixed = if hopper { shapes::fixed(ops.clone()) } else { Vec::new() };
            for op in ops.into_iter().chain(fixed) {
                add(&op, model.name);
            }
        }
    }
    if everything { all } else { of_one_length(all) }
}

#[test]
fn every_kernel_compiles_waits_and_does_not_spill() {
    let Some(compiler) = compiler::find() else { return };
    let cache = Cache::new(compiler::folder().join("kernels"));
    let mut wrong = Vec::new();
    for target in targets() {
        let (arch, launches) = (target.arch(), launches(&target, everything()));
        let keys: Vec<KernelKey> = launches.keys().cloned().collect();
        let compiled =
            cache.get_all(&compiler, &keys, &arch).unwrap_or_else(|problem| panic!("{problem}"));
        for ((key, launch), (compiled, _)) in launches.iter().zip(&compiled) {
            let name = format!("{}::{} {:?} for {arch}", key.source, key.entry, key.defines);
            if launch.waits && !compiled.waits {
                wrong.push(format!("{name} says it waits, and does not"));
            }
            if launch.shared > target.shared_per_block {
                wrong.push(format!("{name} asks for {} bytes of shared memory", launch.shared));
            }
            let threads: u32 = launch.block.iter().product();
            if !(1..=1024).contains(&threads) || launch.grid.contains(&0) {
                wrong.push(format!("{name} has a grid of {:?} × {:?}", launch.grid, launch.block));
            }
            match usage(&compiled.cubin, &key.entry) {
                None => wrong.push(format!("{name}: the cubin does not say what it uses")),
                Some(usage) if usage.local > MOST_LOCAL => {
                    wrong.push(format!("{name} has {} bytes of local memory", usage.local));
                }
                Some(usage) if usage.registers * threads > 65_536 => {
                    wrong
                        .push(format!("{name}: {} registers × {threads} threads", usage.registers));
                }
                Some(_) => {}
            }
        }
        eprintln!("{arch}: {} kernels", keys.len());
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The bounds of layers as one node are those of the kernel: the widest that is accepted still fits its registers.
#[test]
fn the_widest_layers_do_not_spill() {
    let hopper = Target::h200();
    let layers = |model: &shapes::Model, rows| {
        let op = shapes::ops(model, rows, rows, true).pop().expect("layers come last");
        (unfit_layers(&op, &hopper), op)
    };
    let model = shapes::MODELS[0];
    let inner = |n: u32| shapes::Model { inner: n * 1024, ..model };
    let heads = |n: u32| shapes::Model { heads: n * 8, ..model };
    let mut keys = Vec::new();
    for rows in [1, 4, 8] {
        let fits = |model: &shapes::Model| layers(model, rows).0.is_none();
        for widest in
            [(1..).map(inner).take_while(fits).last(), (1..).map(heads).take_while(fits).last()]
        {
            let widest = widest.expect("some layers fit");
            let Some(lowered) = shapes::lowered(&layers(&widest, rows).1, &hopper) else {
                panic!("{widest:?}")
            };
            keys.extend(lowered.into_iter().map(|part| match part {
                Lowered::Launch(launch) => launch.kernel,
                other => panic!("{other:?}"),
            }));
        }
    }
    let Some(compiler) = compiler::find() else { return };
    let cache = Cache::new(compiler::folder().join("kernels"));
    let compiled =
        cache.get_all(&compiler, &keys, &hopper.arch()).unwrap_or_else(|e| panic!("{e}"));
    for (key, (compiled, _)) in keys.iter().zip(&compiled) {
        let used = usage(&compiled.cubin, &key.entry).expect("the cubin says what it uses");
        eprintln!("{:?}: {used:?}", key.defines);
        assert!(used.local <= MOST_LOCAL, "{:?}: {used:?}", key.defines);
    }
}

#[test]
fn the_kernels_of_tests_and_benches_compile() {
    let Some(compiler) = compiler::find() else { return };
    let key = |source: &str, entry: &str, defines: &[(&str, u32)]| KernelKey {
        source: source.into(),
        entry: entry.into(),
        defines: defines.iter().map(|(name, value)| ((*name).into(), value.to_string())).collect(),
    };
    let keys = [
        (key("condition", "set_condition", &[]), false),
        (
            key(
                "mail_test",
                "mail_test",
                &[("MAIL_ROWS", 16), ("RING_ENTRIES", 8), ("ENTRY_WORDS", 60)],
            ),
            false,
        ),
        (key("bench_read", "bench_read", &[("UNROLL", 8)]), false),
        (key("bench_copy", "bench_copy", &[]), false),
        (key("bench_chain", "chain_plain", &[("LINE", 128)]), false),
        (key("bench_chain", "chain_dependent", &[("LINE", 128)]), true),
        (key("bench_chain", "add_plain", &[("LINE", 128)]), false),
        (key("bench_chain", "add_dependent", &[("LINE", 128)]), true),
        (key("bench_ring", "bench_ring", &[]), false),
    ];
    for (key, waits) in keys {
        for target in targets() {
            let compiled = compiler.compile(&key, &target.arch()).unwrap_or_else(|e| panic!("{e}"));
            // Dependent launch begins with Hopper; before it the wait is compiled away.
            assert_eq!(compiled.waits, waits && target.capability.0 >= 9, "{}", key.entry);
            assert_eq!(&compiled.cubin[..4], b"\x7fELF");
        }
    }
}

#[test]
fn a_kernel_that_does_not_compile_says_why() {
    let Some(compiler) = compiler::find() else { return };
    let key =
        KernelKey { source: "mail_test".into(), entry: "mail_test".into(), defines: Vec::new() };
    let problem =
        compiler.compile(&key, "sm_90a").expect_err("its constants are missing").to_string();
    assert!(problem.contains("MAIL_ROWS"), "{problem}");
    let absent = KernelKey { source: "absent".into(), entry: "absent".into(), defines: Vec::new() };
    assert!(compiler.compile(&absent, "sm_90a").is_err());
    let entry =
        KernelKey { source: "condition".into(), entry: "absent".into(), defines: Vec::new() };
    let problem = compiler.compile(&entry, "sm_90a").expect_err("no such entry").to_string();
    assert!(problem.contains("no entry `absent`"), "{problem}");
}

#[test]
fn every_source_is_asked_for_by_some_op_or_is_known_to_be_ours() {
    let ours = ["condition", "mail_test", "bench_read", "bench_copy", "bench_chain", "bench_ring"];
    let mut used: Vec<String> = targets()
        .iter()
        .flat_map(|target| launches(target, true).into_keys())
        .flat_map(|key| source::closure(&key.source).expect("it is embedded"))
        .map(|(name, _)| name.to_owned())
        .collect();
    used.extend(ours.iter().map(|stem| format!("{stem}.cu")));
    for (name, _) in source::SOURCES {
        assert!(used.iter().any(|used| used == name), "{name} is compiled by no test");
    }
}
