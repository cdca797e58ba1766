//! Models with experts: quantised files against `transformers`, answers by replay and eagerly, DeepSeek's router, and
//! how evenly dummy weights route.

use crate::models;
use device::cpu::Numerics;
use device::op::{Route, Routing, Score};
use device::{DType, Device, Node, Op, OpenArena, Region, StepLimits, Tensor};
use engine::Engine;
use engine::exec::{Executor, Join, Page, Row, Seat, SeatParams, Step};
use engine::request::{Request, RequestId, Sampling};
use fixtures::Traffic;
use formats::checkpoint::Checkpoint;
use graph::bucket::{BucketSpec, Buckets};
use graph::compile::merge::Merge;
use graph::layout::Layout;
use graph::mail::Mailbox;
use graph::{CompileTarget, Phase, Plan, ShapeKey, compile};
use model::{
    LoadError, LoadOptions, LoadedExecutor, ModelConfig, ModelSource, OpenModel, Precision,
    load_executor, precision,
};
use models::{cpu, devices};
use std::path::Path;
use std::sync::Arc;

fn load(
    file: &str,
    device: &Device,
    precision: Option<Precision>,
    backend: &str,
) -> LoadedExecutor {
    load_of("qwen3-moe", file, device, precision, backend)
}

fn load_of(
    case: &str,
    file: &str,
    device: &Device,
    precision: Option<Precision>,
    backend: &str,
) -> LoadedExecutor {
    let mut options = LoadOptions {
        max_batch: 4,
        max_context: 128,
        prefill_tokens: Some(64),
        pages: Some(40),
        precision,
        ..LoadOptions::default()
    };
    for phase in Phase::ALL {
        options.graphs.flags.insert(format!("graph-backend-{phase}"), backend.into());
    }
    let source = ModelSource::Checkpoint(models::folder().join(case).join(file));
    load_executor(&source, device, &options, &|_| {}).unwrap()
}

/// Tokens and logits of a golden file beside a model.
fn golden(case: &str, file: &str) -> (Vec<u32>, Vec<Vec<f32>>) {
    let file = Checkpoint::open(&models::folder().join(case).join(file)).unwrap();
    let shape = file.get("logits").unwrap().shape.clone();
    let mut bytes = vec![0; shape[0] * 4];
    file.read_into("tokens", &mut bytes).unwrap();
    let tokens = bytes.chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect();
    let flat = file.read_f32("logits").unwrap();
    (tokens, flat.chunks(shape[1]).map(<[f32]>::to_vec).collect())
}

/// Logits of all tokens in one prefill step: of the last one of them.
fn last_logits(loaded: &mut LoadedExecutor, tokens: &[u32]) -> Vec<f32> {
    let seat = Seat(0);
    let join = Join { seat, len: 0, last_token: 0, params: SeatParams::greedy(), history: vec![] };
    let kept = loaded.executor.geometry().kept;
    let pages = (0..4).flat_map(|index| kept.entries(seat, index, Page(1 + index * kept.width())));
    let step = Step {
        number: 1,
        rows: vec![Row::feed(seat, 0, tokens.to_vec())],
        joins: vec![join],
        pages: pages.collect(),
        ..Step::default()
    };
    loaded.executor.launch(&step).unwrap();
    loaded.executor.poll(true).unwrap().expect("a result");
    loaded.executor.read_logits(0).unwrap()
}

/// Experts of a quantised GGUF file, unpacked to f32, are what the `gguf` package reads; multiplied as they are packed,
/// they are close to it.
#[test]
fn quantised_experts_equal_transformers_with_their_weights() {
    let device = cpu();
    for (kind, packed) in [("q4_0", 0.25), ("q8_0", 0.1)] {
        let (tokens, logits) = golden("qwen3-moe", &format!("golden-{kind}.safetensors"));
        let theirs = logits.last().unwrap();
        for (precision, tolerance) in [(Some(Precision::EXACT), 1e-4), (None, packed)] {
            let mut loaded = load(&format!("model-{kind}.gguf"), &device, precision, "full");
            let is_packed = |spec: &&graph::program::WeightRef| spec.name.contains("experts");
            for weight in loaded.program.weights.iter().filter(is_packed) {
                let expected = match (precision, kind) {
                    (Some(_), _) => DType::F32,
                    (None, "q4_0") => DType::P4,
                    (None, _) => DType::P8,
                };
                assert_eq!(weight.dtype, expected, "{}", weight.name);
            }
            let ours = last_logits(&mut loaded, &tokens);
            let worst = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst <= tolerance, "{kind}, {precision:?}: logits differ by {worst}");
        }
    }
}

/// gpt-oss's experts in MXFP4, of both containers: as they are stored they give what transformers computes from the weights
/// it dequantises.
#[test]
fn experts_of_mxfp4_equal_transformers_with_their_weights() {
    let device = cpu();
    for (case, file, expected) in [
        ("gpt-oss", "model-mxfp4.gguf", "golden-mxfp4.safetensors"),
        ("gpt-oss-mxfp4", "model.safetensors", "golden.safetensors"),
    ] {
        let (tokens, logits) = golden(case, expected);
        let theirs = logits.last().unwrap();
        // As stored: nothing is rounded but keys and values.
        let stored = Precision { weights: None, ..Precision::EXACT };
        for (precision, dtype) in [(Precision::EXACT, DType::F32), (stored, DType::Mxfp4)] {
            let mut loaded = load_of(case, file, &device, Some(precision), "full");
            let matrices = ["experts_gate_up", "experts_down"];
            let named = |name: &str| matrices.iter().any(|end| name.ends_with(end));
            let weights = loaded.program.weights.iter().filter(|weight| named(&weight.name));
            // A matrix that has no whole pieces of 64 columns is widened: `down` of the first model.
            let expected = |cols: u32| if cols.is_multiple_of(64) { dtype } else { DType::F32 };
            assert!(weights.clone().any(|weight| weight.dtype == dtype));
            assert!(weights.clone().all(|weight| weight.dtype == expected(weight.cols)));
            let ours = last_logits(&mut loaded, &tokens);
            let worst = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst <= 1e-4, "{case}, {dtype:?}: logits differ by {worst}");
        }
    }
}

/// Greedy answers of three requests that run together.
fn answers(file: &str, device: &Device, backend: &str) -> Vec<Vec<u32>> {
    let loaded = load(file, device, None, backend);
    let mut engine = Engine::builder(loaded.executor).step_tokens(16).build();
    let sampling = Sampling { max_tokens: 24, ..Sampling::default() };
    let prompt = |n: u32| (0..6 + 9 * n).map(|i| 3 + (n * 31 + i * 7) % 120).collect::<Vec<u32>>();
    let requests = (0..3).map(|n| Request::new(RequestId(n.into()), prompt(n), sampling.clone()));
    let answers = engine.answer(requests).into_iter().map(Result::unwrap);
    answers.map(|mut answer| answer.choices.remove(0).tokens).collect()
}

#[test]
fn answers_are_the_same_by_replay_and_eagerly() {
    for device in devices() {
        let mut seen = Vec::new();
        for file in ["model.safetensors", "model.gguf", "model-q4_0.gguf", "model-q8_0.gguf"] {
            let eager = answers(file, &device, "disabled");
            assert!(eager.iter().all(|tokens| !tokens.is_empty()));
            for backend in ["full", "breakable", "piecewise"] {
                assert_eq!(answers(file, &device, backend), eager, "{file}, {backend}");
            }
            seen.push(eager);
        }
        assert_eq!(seen[0], seen[1], "the same weights from both containers");
    }
}

/// Matrices of a GGUF file stay as they are on a GPU whose steps have few rows; with many they become bf16.
#[test]
fn blocks_stay_for_few_rows() {
    let file = models::folder().join("qwen3-moe/model-q8_0.gguf");
    let model = OpenModel::open(&ModelSource::Checkpoint(file)).unwrap();
    let hopper = device::cuda::launch::Target::h200();
    for (few_rows, dtype) in [(true, DType::Q8_0), (false, DType::BF16)] {
        let precision = Precision { few_rows, ..precision(&hopper) };
        let written = model.write(&hopper, Numerics::Fast, precision, 64).unwrap();
        let found = |part: &str| {
            let mut weights = written.program.weights.iter();
            weights.find(|weight| weight.name.ends_with(part)).map(|weight| weight.dtype)
        };
        assert_eq!(found("qkv"), Some(dtype));
        assert_eq!(found("experts_down"), Some(DType::BF16));
    }
}

/// A stacked tensor of the wrong shape is named with the shape it should have; so is a missing expert.
#[test]
fn wrong_tensors_of_experts_are_listed() {
    let target = device::target::CpuTarget;
    let problems = |from: &Path, config: &str| {
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(from.join("model.safetensors"), folder.path().join("model.safetensors"))
            .unwrap();
        std::fs::write(folder.path().join("config.json"), config).unwrap();
        let model = OpenModel::open(&ModelSource::Checkpoint(folder.path().to_owned())).unwrap();
        match model.write(&target, Numerics::Fast, precision(&target), 64) {
            Err(LoadError::Tensors { problems, .. }) => problems,
            other => panic!("{other:?}"),
        }
    };
    let config =
        |case: &str| std::fs::read_to_string(models::folder().join(case).join("config.json"));
    let granite = models::folder().join("granite-moe");
    let changed = config("granite-moe").unwrap();
    let changed = changed.replace(r#""num_local_experts": 40"#, r#""num_local_experts": 41"#);
    let listed = problems(&granite, &changed).join("\n");
    let expected = "model.layers.0.block_sparse_moe.input_linear.weight: shape [40, 32, 64], expected [41, 32, 64]";
    assert!(listed.contains(expected), "{listed}");
    let qwen = models::folder().join("qwen3-moe");
    let changed = config("qwen3-moe").unwrap();
    let changed = changed.replace(r#""num_local_experts": 12"#, r#""num_local_experts": 13"#);
    let listed = problems(&qwen, &changed).join("\n");
    assert!(listed.contains("model.layers.1.mlp.experts.12.up_proj.weight: missing"), "{listed}");
    assert!(listed.contains("model.layers.0.mlp.gate.weight: shape [12, 64], expected [13, 64]"));
    // What would not be llama.cpp's sums is refused.
    let model = OpenModel::open(&ModelSource::Checkpoint(qwen.join("model.gguf"))).unwrap();
    let ggml = model.write(&target, Numerics::Ggml, precision(&target), 64);
    assert!(matches!(ggml, Err(LoadError::GgmlExperts)));
}

/// What DeepSeek-V3's router in transformers chooses, in which order of scores, and with which weights.
#[test]
fn deepseek_routes_as_in_transformers() {
    let file = models::folder().parent().unwrap().join("router.safetensors");
    let file = Checkpoint::open(&file).unwrap();
    for device in devices() {
        for case in 0..4 {
            let read = |key: &str| file.read_f32(&format!("{case}.{key}")).unwrap();
            let [experts, top, groups, kept, renormalise, scale] = read("options")[..] else {
                panic!("six options")
            };
            let (experts, top) = (experts as u32, top as u32);
            let routing = Routing {
                score: Score::Sigmoid,
                groups: groups as u32,
                kept: kept as u32,
                group_top: 2,
                renormalise: renormalise == 1.0,
                scale,
                ..Routing::softmax(top)
            };
            let (x, w, bias) = (read("x"), read("w"), read("bias"));
            let wide = w.len() as u32 / experts;
            let rows = x.len() as u32 / wide;
            let mut open = OpenArena::new();
            let mut place = |dtype: DType, rows: u32, cols: u32| {
                let bytes = dtype.bytes(rows as usize * cols as usize) as u64;
                Tensor::dense(open.alloc(Region::Workspace, "t", bytes), dtype, rows, cols)
            };
            let (xs, ws) = (place(DType::F32, rows, wide), place(DType::F32, experts, wide));
            let (biases, y) = (place(DType::F32, 1, experts), place(DType::U32, rows, 2 * top));
            let arena = device.seal(open).unwrap();
            for (tensor, values) in [(xs, &x), (ws, &w), (biases, &bias)] {
                let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                device.write(&arena, tensor.span, &bytes).unwrap();
            }
            let pick = Default::default();
            let route = Route {
                x: xs,
                w: ws,
                bias: Some(biases),
                routing,
                y,
                live: None,
                plans: None,
                load: None,
                scratch: None,
                pick,
            };
            let node = Node { op: Op::Route(route), name: "route".into(), layer: None };
            device.run(&arena, &node).unwrap();
            let words = device.read(&arena, y.span).unwrap();
            let words: Vec<u32> =
                words.chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect();
            let top = top as usize;
            let (ids, weights) = (read("ids"), read("weights"));
            for (row, words) in words.chunks(2 * top).enumerate() {
                let theirs: Vec<u32> =
                    ids[row * top..][..top].iter().map(|&id| id as u32).collect();
                assert_eq!(words[..top], theirs, "case {case}, row {row}");
                for (ours, theirs) in words[top..].iter().zip(&weights[row * top..]) {
                    let (ours, theirs) = (f32::from_bits(*ours), *theirs);
                    assert!((ours - theirs).abs() <= 1e-6 * scale, "{ours}, not {theirs}");
                }
            }
        }
    }
}

/// Tokens that each expert of each layer gets when random tokens run through dummy weights.
fn histograms(config: &ModelConfig, tokens: u32, steps: u64) -> Vec<Vec<u32>> {
    let device = cpu();
    let source = ModelSource::Dummy { config: Box::new(config.clone()), seed: 5 };
    let model = OpenModel::open(&source).unwrap();
    let target = device.target();
    let written = model.write(&*target, device.numerics(), precision(&*target), 256).unwrap();
    let program = &written.program;
    let limits = StepLimits {
        seats: 16,
        rows: 16,
        tokens,
        pages_per_seat: 16,
        page_size: 16,
        vocab: program.shape.vocab,
        penalties: false,
        tokens_per_row: 1,
        tables: 1,
    };
    let target = CompileTarget::new(target);
    let spec: BucketSpec = tokens.to_string().parse().unwrap();
    let buckets = Buckets::generate(&spec, Phase::Prefill, tokens, None).unwrap();
    let key = buckets.key(tokens, &limits);
    let mut layout = Layout::new(program, &target, limits, &[key]).unwrap();
    let pages = 1 + limits.seats * limits.pages_per_seat;
    layout.add_pages(program, pages);
    let Layout { arena, bindings } = layout;
    let arena = device.seal(arena).unwrap();
    model.fill(&written, &device, &arena, &bindings, &|_| ()).unwrap();
    let plan = compile(program, &target, &key, &bindings).unwrap();
    let mut mail = Mailbox::new(&arena, &bindings.state).unwrap();
    let mut counts: Vec<Vec<u32>> = Vec::new();
    for step in 0..steps {
        // Sequences that start anew: another seed, other tokens.
        let input = Traffic::new(limits, pages, step).prefill(tokens);
        mail.post(&input, &key).unwrap();
        mail.sent();
        let mut layer = 0;
        for node in &plan.nodes {
            device.run(&arena, node).unwrap();
            let Op::Route(route) = &node.op else { continue };
            // The last layer routes the last token of each row only.
            if route.x.rows != tokens {
                continue;
            }
            let words = device.read(&arena, route.y.span).unwrap();
            let word = |at: usize| u32::from_le_bytes(words[4 * at..][..4].try_into().unwrap());
            let (top, experts) = (route.routing.top as usize, route.w.rows as usize);
            counts.resize_with(counts.len().max(layer + 1), || vec![0; experts]);
            for token in 0..tokens as usize {
                (0..top).for_each(|i| counts[layer][word(2 * top * token + i) as usize] += 1);
            }
            layer += 1;
        }
        mail.take().unwrap();
    }
    counts
}

/// Dummy weights are for measuring speed: experts must get about as many tokens each as they would by chance.
#[test]
fn dummy_weights_route_about_uniformly() {
    let json = r#"{"model_type":"qwen3_moe","hidden_size":512,"intermediate_size":64,"num_hidden_layers":5,
        "num_attention_heads":4,"num_key_value_heads":2,"head_dim":32,"vocab_size":2048,"num_experts":32,
        "num_experts_per_tok":4,"moe_intermediate_size":64,"norm_topk_prob":true,"torch_dtype":"bfloat16"}"#;
    let config = ModelConfig::from_hf(Path::new("config.json"), json.as_bytes(), None).unwrap();
    let (tokens, steps) = (256, 8);
    let counts = histograms(&config, tokens, steps);
    assert_eq!(counts.len(), config.layers - 1);
    for (layer, counts) in counts.iter().enumerate() {
        let all: u32 = counts.iter().sum();
        assert_eq!(u64::from(all), u64::from(tokens) * 4 * steps);
        let mean = all / counts.len() as u32;
        println!("layer {layer}, {mean} expected: {counts:?}");
        let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
        assert!(*least >= mean / 2 && *most <= mean * 2, "layer {layer}: {counts:?}");
    }
}

/// Each step is counted once on every device and backend: tokens of each expert, experts that had any, steps.
#[test]
fn what_experts_do_is_counted() {
    let tokens = [3, 1, 4, 1, 5, 9, 2];
    for device in devices() {
        for backend in ["full", "disabled"] {
            let mut loaded = load("model.safetensors", &device, None, backend);
            assert!(loaded.executor.expert_loads().unwrap().iter().all(|load| load.steps == 0));
            last_logits(&mut loaded, &tokens);
            let loads = loaded.executor.expert_loads().unwrap();
            let layers: Vec<_> = loaded.program.experts().collect();
            assert!(!layers.is_empty() && loads.len() == layers.len());
            for (load, experts) in loads.iter().zip(&layers) {
                assert_eq!((load.layer, load.steps), (experts.layer, 1));
                assert_eq!(load.tokens.len(), experts.count as usize);
                let had_some = load.tokens.iter().filter(|tokens| **tokens > 0).count();
                assert_eq!(load.chosen, had_some as u64);
                // The last layer may leave out tokens whose result is never read.
                let assignments = load.tokens.iter().sum::<u64>();
                let (all, one) = (7 * u64::from(experts.top), u64::from(experts.top));
                let last = experts.layer as usize + 1 == layers.len();
                assert!(assignments == all || last && assignments >= one, "{load:?}");
            }
        }
    }
}

/// The same with an MLP beside the experts, and recurrent layers between their linears.
#[test]
fn few_tokens_have_one_node_for_shared_experts_and_recurrent_layers() {
    for (name, experts, recurrent) in [("qwen3.5-35b-a3b", 40, 30), ("deepseek-v2-lite", 26, 0)] {
        for (rows, merge, whole, short) in [
            (1, Merge::Measured, true, true),
            (2, Merge::Measured, true, true),
            (4, Merge::Measured, false, true),
            (16, Merge::Measured, false, false),
            (1, Merge::Never, false, false),
        ] {
            let plan = plan_of(name, rows, merge, false);
            let count =
                |name: &str| plan.nodes.iter().filter(|node| node.op.name() == name).count();
            let found = [count("expert_layer"), count("recurrent")];
            let expected = [if whole { experts } else { 0 }, if short { recurrent } else { 0 }];
            assert_eq!(found, expected, "{name}, {rows} rows, {merge:?}");
            let parts = [count("experts") + count("expert_layer"), count("scan") + found[1]];
            assert_eq!(parts, [experts, recurrent], "{name}, {rows} rows, {merge:?}");
            let left = [count("route"), count("add_gated")];
            assert!(!whole || left == [0, 0], "{name}, {rows} rows: {left:?}");
        }
    }
}

fn plan_of(name: &str, rows: u32, merge: Merge, fixed: bool) -> Plan {
    let config = ModelConfig::bundled(name).unwrap();
    let model = OpenModel::open(&ModelSource::Dummy { config: Box::new(config), seed: 0 }).unwrap();
    let hopper = device::cuda::launch::Target::h200();
    let written = model.write(&hopper, Numerics::Fast, precision(&hopper), 64).unwrap();
    let program = &written.program;
    let limits = StepLimits {
        seats: 16,
        rows: 16,
        tokens: 16,
        pages_per_seat: 4,
        page_size: 16,
        vocab: program.shape.vocab,
        penalties: false,
        tokens_per_row: 1,
        tables: 1,
    };
    let mut target = CompileTarget::new(Arc::new(hopper));
    target.merge = merge;
    let key = ShapeKey::decode(rows).with_fixed(fixed);
    let mut layout = Layout::new(program, &target, limits, &[key]).unwrap();
    layout.add_pages(program, 33);
    compile(program, &target, &key, &layout.bindings).unwrap()
}

/// On Hopper a norm, its router and experts are one node of decode steps with one or two rows, unless layers stay nodes or
/// kernels are fixed; with more rows a chain of kernels was measured to be faster.
#[test]
fn few_tokens_have_one_node_for_a_layer_of_experts() {
    for (rows, merge, fixed, whole) in [
        (1, Merge::Measured, false, true),
        (2, Merge::Measured, false, true),
        (4, Merge::Measured, false, false),
        (4, Merge::Always, false, true),
        (8, Merge::Always, false, false),
        (1, Merge::Never, false, false),
        (1, Merge::Measured, true, false),
    ] {
        let plan = plan_of("qwen3-30b-a3b", rows, merge, fixed);
        let count = |name: &str| plan.nodes.iter().filter(|node| node.op.name() == name).count();
        let layers = 48;
        let expected = if whole { (layers, 0, 0) } else { (0, layers, layers) };
        let found = (count("expert_layer"), count("route"), count("experts"));
        assert_eq!(found, expected, "{rows} rows, {merge:?}, fixed {fixed}");
    }
}
