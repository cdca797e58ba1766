//! What ops are lowered to on a GPU, without one: arguments match the kernels' parameters, launches fit the GPU, and
//! each batch size gets the kernel that was measured to be best for it.

use crate::shapes;
use device::cuda::launch::{Arg, Launch, Lowered, Target};
use device::cuda::lower::{SEMAPHORE_BYTES, lower};
use device::cuda::source;
use device::op::{Attention, KvLayer, Linear};
use device::variant::Pick;
use device::{DType, Op};

fn targets() -> [Target; 2] {
    let ampere = Target {
        capability: (8, 0),
        sms: 108,
        shared_per_block: 163 << 10,
        shared_per_sm: 164 << 10,
        l2: 40 << 20,
        tuned: Default::default(),
    };
    [ampere, Target::h200()]
}

/// Parameters of an entry, counted in its source.
fn parameters(launch: &Launch) -> usize {
    let text = source::text(&format!("{}.cu", launch.kernel.source)).expect("a source");
    let head = format!("\n{}(", launch.kernel.entry);
    let start = text.find(&head).unwrap_or_else(|| panic!("no {} there", launch.kernel.entry));
    let list = &text[start + head.len()..];
    let list = &list[..list.find(')').expect("a parameter list ends")];
    // Kernels of weights with scales have more: a macro that is empty otherwise.
    let scaled = launch.kernel.defines.iter().any(|(name, value)| name == "WEIGHT" && value != "0");
    let of_macro = |name: &str| {
        let macros = text.lines().filter_map(|line| line.strip_prefix(name));
        macros.map(|rest| rest.matches(',').count()).max().unwrap_or(0)
    };
    let more = of_macro("#define SCALES_PARAMETER");
    // Pages of e4m3 have two arrays of scales.
    let bytes = launch.kernel.defines.iter().any(|(name, value)| name == "KT" && value == "3");
    let pages = if bytes && list.contains("SCALES_OF_PAGES") { 2 } else { 0 };
    // Where sequences are remembered and drafts are verified, there are more.
    let defined = |wanted: &str| launch.kernel.defines.iter().any(|(name, _)| name == wanted);
    let history = defined("HISTORY") && list.contains("HISTORY_ARGUMENT");
    let drafts = defined("Q_LEN") && list.contains("DRAFT_ARGUMENTS");
    let history = if history { of_macro("#define HISTORY_ARGUMENT") } else { 0 };
    let remembered = history + if drafts { 3 } else { 0 };
    let sinks = usize::from(defined("SINKS") && list.contains("SINKS_PARAMETER"));
    list.split(',').count() + pages + remembered + sinks + if scaled { more } else { 0 }
}

fn for_each_launch(mut see: impl FnMut(&Target, &Op, u32, &Launch)) {
    for target in targets() {
        for model in shapes::MODELS {
            for (rows, tokens, single) in shapes::BUCKETS {
                let ops = shapes::ops(&model, rows, tokens, single);
                for op in shapes::fixed(ops.clone()).into_iter().chain(ops) {
                    for lowered in shapes::lowered(&op, &target).unwrap_or_default() {
                        if let Lowered::Launch(launch) = lowered {
                            see(&target, &op, rows, &launch);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn arguments_are_as_many_as_parameters() {
    for_each_launch(|_, op, rows, launch| {
        assert_eq!(
            launch.args.len(),
            parameters(launch),
            "{} at {rows} rows: {}",
            op.name(),
            launch.kernel.entry
        );
    });
}

#[test]
fn launches_fit_the_machine() {
    for_each_launch(|target, op, rows, launch| {
        let what = format!("{} at {rows} rows: {}", op.name(), launch.kernel.entry);
        assert!(launch.shared <= target.shared_per_block, "{what}: {} bytes", launch.shared);
        assert!(launch.block[0] <= 1024 && launch.block[0].is_multiple_of(32), "{what}");
        assert!(launch.grid.iter().all(|blocks| *blocks > 0), "{what}: an empty grid");
        assert!(launch.grid[1] <= 65535 && launch.grid[2] <= 65535, "{what}: {:?}", launch.grid);
        let whole = |at: usize| launch.grid[at].is_multiple_of(launch.cluster[at]);
        assert!((0..3).all(whole), "{what}: half a cluster");
        let clustered = launch.cluster != [1, 1, 1];
        assert!(!clustered || launch.grid[0] <= target.sms, "{what}: clusters in two waves");
        for arg in &launch.args {
            if let Arg::TensorMap(map) = arg {
                assert!(map.tile.iter().all(|side| (1..=256).contains(side)), "{what}: {map:?}");
                assert!(map.strides.iter().all(|stride| stride.is_multiple_of(16)), "{what}");
            }
        }
    });
}

/// Rows with any number of drafts have a kernel, with pages of either format.
#[test]
fn attention_of_drafts_fits_the_machine() {
    for target in targets() {
        for model in shapes::MODELS {
            for (rows, each) in
                [1, 2, 4, 6, 9, 40].iter().flat_map(|&r| (2..=9).map(move |e| (r, e)))
            {
                let ops = shapes::ops(&model, rows * each, rows * each, true);
                let single = |op: &Op| match op {
                    Op::Attention(op) if op.single => Some(op.clone()),
                    _ => None,
                };
                for op in ops.iter().filter_map(single) {
                    for kv in
                        [op.kv, KvLayer { dtype: DType::E4M3, scales: Some(op.kv.span), ..op.kv }]
                    {
                        let op =
                            Attention { kv, rows, even: Some(each), single: false, ..op.clone() };
                        let op = Op::Attention(op);
                        let found = shapes::lowered(&op, &target);
                        let launches =
                            found.unwrap_or_else(|| panic!("{}, {rows} of {each}", model.name));
                        for lowered in launches {
                            let Lowered::Launch(launch) = lowered else { continue };
                            assert!(
                                launch.shared <= target.shared_per_block,
                                "{rows} of {each}: {launch:?}"
                            );
                        }
                    }
                }
            }
        }
    }
}

/// Blocks of a cluster share the pages of one or two rows in plans of 8 k tokens, whatever room drafts have beyond them; with
/// drafts there are no more clusters than fit the GPU.
#[test]
fn drafts_leave_a_row_its_cluster() {
    let target = Target::h200();
    let ops = shapes::ops(&shapes::MODELS[0], 8, 8, true);
    let single = |op: &Op| match op {
        Op::Attention(op) if op.single && op.window.is_none() => Some(op.clone()),
        _ => None,
    };
    let op = ops.iter().find_map(single).expect("attention of a decode step");
    for (rows, each, pages, cluster) in [
        (1, 4, 513, 8),
        (2, 4, 513, 8),
        (1, 1, 513, 8),
        (1, 1, 512, 8),
        (1, 4, 514, 1),
        (4, 2, 513, 1),
    ] {
        let even = (each > 1).then_some(each);
        let mut op = Attention { rows, even, single: each == 1, ..op.clone() };
        (op.state.limits.pages_per_seat, op.state.limits.tokens_per_row) = (pages, 4);
        let lowered = shapes::lowered(&Op::Attention(op), &target).expect("a launch");
        let [Lowered::Launch(launch)] = &lowered[..] else { panic!("{lowered:?}") };
        assert_eq!(launch.cluster[1], cluster, "{rows} of {each}, {pages} pages");
    }
}

#[test]
fn a_product_gets_the_kernel_of_its_batch() {
    let target = Target::h200();
    let qwen = shapes::MODELS.iter().find(|model| model.name == "qwen3-8b").expect("a model");
    let mut table = String::new();
    for (rows, tokens, single) in shapes::BUCKETS {
        let mut line = format!("{rows} rows, {tokens} tokens:");
        for op in shapes::ops(qwen, rows, tokens, single) {
            let drafts = matches!(&op, Op::Attention(attention) if attention.even.is_some());
            if !matches!(op.name(), "linear" | "attention") || drafts {
                continue;
            }
            let Some(lowered) = shapes::lowered(&op, &target) else {
                line += " none";
                continue;
            };
            let names = lowered.iter().map(|lowered| match lowered {
                Lowered::Launch(launch) => launch.kernel.entry.clone(),
                Lowered::Gemm(_) => "library".into(),
                Lowered::Copy { .. } | Lowered::Fill { .. } => "node".into(),
            });
            line += &format!(" {}", names.collect::<Vec<_>>().join("+"));
        }
        table += &(line + "\n");
    }
    expect_test::expect![[r#"
        1 rows, 1 tokens: linear_stream linear_stream attention attention linear_stream linear_stream linear_stream linear_stream attention attention none none none none attention
        2 rows, 2 tokens: linear_stream linear_stream attention attention linear_stream linear_stream linear_stream linear_stream attention attention none none none none attention
        4 rows, 4 tokens: linear_stream linear_stream attention attention linear_stream linear_stream linear_stream linear_stream attention attention none none none none attention
        8 rows, 8 tokens: linear_stream linear_stream attention attention linear_stream linear_stream linear_wgmma rms_norm+linear_wgmma attention attention none none linear_wgmma none attention
        16 rows, 16 tokens: rms_norm+linear_wgmma linear_wgmma attention attention linear_wgmma rms_norm+linear_wgmma linear_wgmma rms_norm+linear_wgmma attention attention linear_wgmma linear_wgmma linear_wgmma linear_wgmma attention
        24 rows, 24 tokens: rms_norm+linear_wgmma linear_wgmma attention attention linear_wgmma rms_norm+linear_wgmma linear_wgmma rms_norm+linear_wgmma attention attention linear_wgmma linear_wgmma linear_wgmma linear_wgmma attention
        32 rows, 32 tokens: rms_norm+linear_wgmma linear_wgmma attention attention linear_wgmma rms_norm+linear_wgmma linear_wgmma rms_norm+linear_wgmma attention attention linear_wgmma linear_wgmma linear_wgmma linear_wgmma attention
        40 rows, 40 tokens: rms_norm+linear_wgmma linear_wgmma attention attention linear_wgmma rms_norm+linear_wgmma linear_wgmma rms_norm+linear_wgmma attention attention linear_wgmma linear_wgmma linear_wgmma linear_wgmma attention
        48 rows, 48 tokens: rms_norm+linear_wgmma linear_wgmma attention attention linear_wgmma rms_norm+linear_wgmma linear_wgmma rms_norm+linear_wgmma attention attention linear_wgmma linear_wgmma linear_wgmma linear_wgmma attention
        64 rows, 64 tokens: rms_norm+linear_wgmma linear_wgmma attention attention linear_wgmma rms_norm+linear_wgmma linear_wgmma rms_norm+linear_wgmma attention attention linear_wgmma linear_wgmma linear_wgmma linear_wgmma attention
        80 rows, 80 tokens: rms_norm+linear_wgmma linear_wgmma attention attention linear_wgmma rms_norm+linear_wgmma linear_wgmma rms_norm+linear_wgmma attention attention linear_wgmma linear_wgmma linear_wgmma linear_wgmma attention
        104 rows, 104 tokens: rms_norm+linear_wgmma linear_wgmma attention attention linear_wgmma rms_norm+linear_wgmma linear_wgmma rms_norm+linear_wgmma attention attention linear_wgmma linear_wgmma linear_wgmma linear_wgmma attention
        128 rows, 128 tokens: rms_norm+linear_wgmma linear_wgmma attention attention linear_wgmma rms_norm+linear_wgmma linear_wgmma rms_norm+linear_wgmma attention attention linear_wgmma linear_wgmma linear_wgmma linear_wgmma attention
        168 rows, 168 tokens: rms_norm+linear_wgmma linear_wgmma attention attention linear_wgmma rms_norm+linear_wgmma library rms_norm+library attention attention none none none none attention
        224 rows, 224 tokens: rms_norm+library library attention attention linear_wgmma rms_norm+linear_wgmma library rms_norm+linear_wgmma attention attention none none none none attention
        256 rows, 256 tokens: rms_norm+library library attention attention library rms_norm+linear_wgmma linear_wgmma rms_norm+linear_wgmma attention attention none none none none attention
        4 rows, 128 tokens: rms_norm+linear_wgmma linear_wgmma attention_wgmma attention_wgmma linear_wgmma rms_norm+linear_wgmma linear_wgmma linear_stream attention_wgmma attention_wgmma attention_wgmma attention_wgmma linear_wgmma linear_wgmma linear_wgmma linear_wgmma none linear_tiles
        16 rows, 512 tokens: rms_norm+library library attention_wgmma attention_wgmma library rms_norm+linear_tiles library rms_norm+linear_wgmma attention_wgmma attention_wgmma attention_wgmma attention_wgmma none linear_tiles none none none linear_tiles
        32 rows, 2048 tokens: rms_norm+linear_tiles linear_tiles attention_wgmma+attention attention_wgmma+attention library rms_norm+linear_tiles library rms_norm+linear_wgmma attention_wgmma attention_wgmma attention_wgmma+attention attention_wgmma+attention none linear_tiles linear_tiles linear_tiles linear_tiles linear_tiles
    "#]].assert_eq(&table);
}

/// The order in which a kernel sums must not depend on the bucket.
#[test]
fn fixed_kernels_are_the_same_for_every_batch() {
    for model in shapes::MODELS {
        for target in targets() {
            let kernels = |(rows, tokens, single)| {
                let mut ops = shapes::fixed(shapes::ops(&model, rows, tokens, single));
                // Models without a causal mask have no decode steps.
                ops.retain(|op| !matches!(op, Op::Attention(attention) if !attention.causal));
                // Not every batch can be divided into rows with drafts.
                ops.retain(
                    |op| !matches!(op, Op::Attention(attention) if attention.even.is_some()),
                );
                ops.retain(|op| !matches!(op, Op::LatentAttention(op) if op.even.is_some()));
                let name = |op: &Op| match &lower(op, &target).expect("a lowering")[..] {
                    [Lowered::Launch(launch)] => {
                        let define = |name: &str| {
                            let defines = &launch.kernel.defines;
                            let found = defines.iter().find(|(key, _)| key == name);
                            found.map_or("", |(_, value)| value.as_str()).to_owned()
                        };
                        let (split, splits, warps) =
                            (define("SPLIT"), define("SPLITS"), define("WARPS"));
                        format!("{} {split} {splits} {warps}", launch.kernel.entry)
                    }
                    other => panic!("{} launches instead of one kernel of ours", other.len()),
                };
                ops.iter().map(name).collect::<Vec<_>>()
            };
            for bucket in shapes::BUCKETS {
                assert_eq!(
                    kernels(bucket),
                    kernels(shapes::BUCKETS[0]),
                    "{}, {bucket:?}",
                    model.name
                );
            }
        }
    }
}

/// Blocks of GGUF files are read as they are by a few rows, in turns by a few more, and widened for many: behind the
/// semaphores, which another op waits for.
#[test]
fn blocks_are_read_by_few_rows_and_widened_for_many() {
    let target = Target::h200();
    for (dtype, rows, expected) in [
        (DType::Q4K, 1, "linear_blocks"),
        (DType::Q4K, 8, "linear_blocks"),
        (DType::Q8_0, 8, "linear_blocks linear_blocks"),
        (DType::Q6K, 64, "widen linear_wgmma"),
        (DType::Q2K, 64, "widen linear_wgmma"),
    ] {
        let op = shapes::linear(dtype, (rows, 4096, 4096));
        let Op::Linear(Linear { scratch: Some(scratch), .. }) = op else { unreachable!() };
        let launches: Vec<Launch> = lower(&op, &target)
            .expect("a lowering")
            .into_iter()
            .map(|lowered| match lowered {
                Lowered::Launch(launch) => launch,
                other => panic!("{other:?}"),
            })
            .collect();
        let names: Vec<&str> = launches.iter().map(|launch| launch.kernel.entry.as_str()).collect();
        assert_eq!(names.join(" "), expected, "{rows} rows of {dtype:?}");
        if let [widen, ..] = &launches[..]
            && widen.kernel.entry == "widen"
        {
            let Some(Arg::Address(to)) = widen.args.last() else { panic!("{:?}", widen.args) };
            assert!(to.offset >= scratch.offset + SEMAPHORE_BYTES, "{rows} rows of {dtype:?}");
        }
    }
}

/// Prompts of recurrent layers in bf16 run by chunks behind the semaphores of scratch, where a kernel has such shapes; decode steps,
/// drafts and fixed kernels token by token.
#[test]
fn prompts_in_bf16_are_scanned_by_chunks() {
    let target = Target::h200();
    let model = shapes::MODELS.iter().find(|model| model.weights == DType::BF16).expect("a model");
    let mut seen = Vec::new();
    for (rows, tokens, single) in shapes::BUCKETS {
        let ops = shapes::ops(model, rows, tokens, single);
        for op in ops.into_iter().filter(|op| matches!(op, Op::Scan(_))) {
            let names = |op: &Op| -> Vec<String> {
                let launches = lower(op, &target).expect("a lowering").into_iter();
                let launches = launches.map(|lowered| match lowered {
                    Lowered::Launch(launch) => launch,
                    other => panic!("{other:?}"),
                });
                launches.map(|launch| launch.kernel.entry).collect()
            };
            let Op::Scan(scan) = &op else { unreachable!() };
            let long = !single && scan.q_len == 1 && tokens >= 128;
            let chunks = long && scan.key <= 128 && scan.value >= 32;
            let expected: &[&str] =
                if chunks { &["scan_prepare", "scan_chunks", "scan"] } else { &["scan"] };
            assert_eq!(names(&op), expected, "{}", op.describe());
            let mut fixed = op.clone();
            assert!(fixed.set_pick(Pick::Fixed));
            assert_eq!(names(&fixed), ["scan"], "{}", op.describe());
            seen.push(chunks);
        }
    }
    assert!(seen.contains(&true) && seen.contains(&false));
}
