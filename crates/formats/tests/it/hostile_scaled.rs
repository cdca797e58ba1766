//! Malicious quantised checkpoints: configurations and tensors that do not fit are refused with one line.

use crate::make;
use crate::refusal;
use formats::checkpoint::Checkpoint;
use formats::scaled::{Quantisation, ScaledWeight};
use make::safetensors;
use proptest::prelude::*;
use refusal::refused;
use serde_json::{Value, json};
use std::path::Path;
use tempfile::TempDir;

const MODULE: &str = "model.layers.0.self_attn.q_proj";

fn config(quantisation: &Value) -> formats::Result<Option<Quantisation>> {
    let json = json!({ "quantization_config": quantisation }).to_string();
    Quantisation::from_json(Path::new("config.json"), json.as_bytes())
}

/// A tensor of the module: the last part of its name, type and shape; and its bytes, zeros when they are too few.
#[derive(Clone, Debug)]
struct Tensor(&'static str, &'static str, Vec<usize>, Vec<u8>);

fn tensor(end: &'static str, dtype: &'static str, shape: &[usize]) -> Tensor {
    Tensor(end, dtype, shape.to_vec(), Vec::new())
}

fn integers(end: &'static str, numbers: &[i32]) -> Tensor {
    Tensor(end, "I32", vec![numbers.len()], numbers.iter().flat_map(|n| n.to_le_bytes()).collect())
}

fn checkpoint(quantisation: &Value, tensors: &[Tensor]) -> (TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for Tensor(end, dtype, shape, bytes) in tensors {
        let size = match *dtype {
            "I64" => 8,
            "F32" | "I32" => 4,
            "F16" | "BF16" => 2,
            _ => 1,
        };
        let start = data.len();
        data.extend(bytes);
        data.resize(start + size * shape.iter().product::<usize>(), 0);
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(format!("{MODULE}.{end}"), entry);
    }
    let mut file = safetensors(&Value::Object(header).to_string(), 0);
    file.extend(data);
    std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
    let config = json!({ "quantization_config": quantisation }).to_string();
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    (folder, checkpoint)
}

/// The weight that these tensors make.
fn weight(quantisation: &Value, tensors: &[Tensor]) -> formats::Result<Option<ScaledWeight>> {
    let (_folder, checkpoint) = checkpoint(quantisation, tensors);
    let quantisation = Quantisation::of(&checkpoint)?.expect("there is a configuration");
    // Experts of all of a layer have no `.weight` in their names.
    let end = if quantisation.method() == "mxfp4" { "experts" } else { "weight" };
    let weight = quantisation.weight(&checkpoint, &format!("{MODULE}.{end}"))?;
    if let Some(weight) = &weight {
        let rows = weight.read(&checkpoint, 0..weight.rows())?;
        let mut floats = vec![0.0; weight.rows() * weight.cols()];
        rows.dequantise(weight.cols(), &mut floats);
    }
    Ok(weight)
}

/// `tensors` with one of them replaced.
fn with(tensors: &[Tensor], new: Tensor) -> Vec<Tensor> {
    let mut tensors: Vec<_> = tensors.iter().filter(|t| t.0 != new.0).cloned().collect();
    tensors.push(new);
    tensors
}

fn without(tensors: &[Tensor], end: &str) -> Vec<Tensor> {
    tensors.iter().filter(|t| t.0 != end).cloned().collect()
}

fn fp8() -> Value {
    json!({"quant_method": "fp8", "weight_block_size": [128, 128]})
}

fn awq() -> Value {
    json!({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"})
}

fn gptq() -> Value {
    json!({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": true})
}

fn compressed(format: &str, weights: Value) -> Value {
    let groups = json!({"group_0": {"targets": ["Linear"], "weights": weights}});
    json!({"quant_method": "compressed-tensors", "format": format, "config_groups": groups})
}

fn packed() -> Value {
    let weights = json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": false});
    compressed("pack-quantized", weights)
}

/// An order of 64 columns in two groups.
fn alternating() -> [i32; 64] {
    std::array::from_fn(|column| column as i32 % 2)
}

fn fp8_tensors() -> Vec<Tensor> {
    vec![tensor("weight", "F8_E4M3", &[130, 20]), tensor("weight_scale_inv", "F32", &[2, 1])]
}

fn awq_tensors() -> Vec<Tensor> {
    vec![
        tensor("qweight", "I32", &[64, 2]),
        tensor("qzeros", "I32", &[2, 2]),
        tensor("scales", "F16", &[2, 16]),
    ]
}

fn gptq_tensors() -> Vec<Tensor> {
    vec![
        tensor("qweight", "I32", &[8, 12]),
        tensor("qzeros", "I32", &[2, 2]),
        tensor("scales", "F16", &[2, 12]),
        integers("g_idx", &alternating()),
    ]
}

fn packed_tensors() -> Vec<Tensor> {
    vec![
        tensor("weight_packed", "I32", &[12, 8]),
        tensor("weight_scale", "BF16", &[12, 2]),
        tensor("weight_zero_point", "I32", &[2, 2]),
        integers("weight_shape", &[12, 64]),
        integers("weight_g_idx", &alternating()),
    ]
}

fn mxfp4() -> Value {
    json!({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
}

fn mxfp4_tensors() -> Vec<Tensor> {
    vec![tensor("experts_blocks", "U8", &[2, 3, 2, 16]), tensor("experts_scales", "U8", &[2, 3, 2])]
}

fn all() -> [(Value, Vec<Tensor>); 5] {
    [
        (fp8(), fp8_tensors()),
        (awq(), awq_tensors()),
        (gptq(), gptq_tensors()),
        (packed(), packed_tensors()),
        (mxfp4(), mxfp4_tensors()),
    ]
}

#[test]
fn the_checkpoints_the_others_are_made_from_are_good() {
    for (config, tensors) in all() {
        let weight = weight(&config, &tensors).unwrap().unwrap();
        assert_eq!(weight.tensors().len(), tensors.len());
    }
}

/// `base` with one field set, at any depth.
fn set(base: &Value, path: &str, value: Value) -> Value {
    let mut changed = base.clone();
    let (parent, key) = path.rsplit_once('/').unwrap();
    let parent = changed.pointer_mut(parent).unwrap();
    parent.as_object_mut().unwrap().insert(key.to_owned(), value);
    changed
}

#[test]
fn a_bad_configuration_is_one_line_that_names_the_field() {
    let bad = |base: &Value, path: &str, value: Value, about: &str| {
        refused(config(&set(base, path, value)), about);
    };
    refused(config(&json!("awq")), "quantization_config: found \"awq\", allowed: an object");
    refused(config(&json!({})), "quantization_config.quant_method: nothing is not supported");
    bad(&awq(), "/quant_method", json!("bitsandbytes"), "quant_method: bitsandbytes");
    bad(&awq(), "/quant_method", json!(7), "quantization_config.quant_method: found 7");
    refused(Quantisation::from_json(Path::new("c"), b"[1]"), "config");
    refused(Quantisation::from_json(Path::new("c"), "[".repeat(9_999).as_bytes()), "config");

    bad(&gptq(), "/bits", json!(3), "quantization_config.bits: 3 is not supported; supported: 4");
    bad(&gptq(), "/bits", json!("4"), "quantization_config.bits: found \"4\", allowed: an integer");
    bad(&gptq(), "/group_size", json!(0), "quantization_config.group_size: 0");
    bad(&gptq(), "/group_size", json!(-2), "quantization_config.group_size: -2");
    bad(&gptq(), "/group_size", json!(null), "quantization_config.group_size: nothing");
    bad(&gptq(), "/checkpoint_format", json!("marlin"), "checkpoint_format: marlin");
    bad(&gptq(), "/is_marlin_format", json!(true), "is_marlin_format: true");
    bad(&gptq(), "/pack_dtype", json!("int8"), "pack_dtype: int8");
    bad(&gptq(), "/desc_act", json!(1), "quantization_config.desc_act: found 1");
    bad(&gptq(), "/dynamic", json!({"x": {"bits": 8}}), "dynamic.x.bits: 8 is not supported");
    bad(&gptq(), "/dynamic", json!({"x": {"group_size": 16}}), "dynamic.x.group_size: 16");
    bad(&gptq(), "/dynamic", json!([1]), "quantization_config.dynamic: found [1]");
    let many: serde_json::Map<_, _> = (0..2_000).map(|n| (n.to_string(), json!({}))).collect();
    bad(&gptq(), "/dynamic", json!(many), "2000 exceptions");

    bad(&awq(), "/bits", json!(8), "quantization_config.bits: 8");
    bad(&awq(), "/version", json!("gemv"), "quantization_config.version: gemv");
    bad(&awq(), "/zero_point", json!(false), "quantization_config.zero_point: false");
    bad(&awq(), "/modules_to_not_convert", json!("x"), "a list of names");
    bad(&awq(), "/modules_to_not_convert", json!(vec![""; 200_000]), "200000 names");

    bad(&mxfp4(), "/modules_to_not_convert", json!({}), "a list of names");

    bad(&fp8(), "/fmt", json!("e5m2"), "quantization_config.fmt: e5m2");
    bad(&fp8(), "/weight_block_size", json!([64, 128]), "weight_block_size: [64,128]");
    bad(&fp8(), "/weight_block_size", json!([128]), "allowed: two integers");
    bad(&fp8(), "/weight_block_size", json!(128), "allowed: two integers");
    bad(&fp8(), "/scale_fmt", json!("e3m4"), "scale_fmt: e3m4");
    bad(&fp8(), "/activation_scheme", json!("x"), "activation_scheme: x");
    bad(&fp8(), "/expert_dtype", json!("fp4"), "expert_dtype: fp4");
    bad(&fp8(), "/ignored_layers", json!([1]), "quantization_config.ignored_layers: found 1");
}

#[test]
fn a_bad_compressed_configuration_names_the_field() {
    let bad = |base: &Value, path: &str, value: Value, about: &str| {
        refused(config(&set(base, path, value)), about);
    };
    let weights = "/config_groups/group_0/weights";
    let of = |key: &str| format!("{weights}/{key}");
    for format in ["int-quantized", "nvfp4-pack-quantized", "marlin-24", "mixed-precision", "dense"]
    {
        bad(&packed(), "/format", json!(format), &format!("quantization_config.format: {format}"));
    }
    bad(&packed(), "/config_groups/group_0/format", json!("x"), "config_groups.group_0.format: x");
    bad(&packed(), "/config_groups", json!(null), "quantization_config.config_groups: nothing");
    bad(&packed(), "/config_groups", json!({"W4A16": ["Linear"]}), "config_groups.W4A16: found");
    bad(&packed(), &of("num_bits"), json!(8), "config_groups.group_0.weights.num_bits: 8");
    bad(&packed(), &of("type"), json!("float"), "weights.type: float");
    bad(&packed(), &of("group_size"), json!(16), "weights.group_size: 16");
    bad(&packed(), &of("strategy"), json!("tensor_group"), "weights.strategy: tensor_group");
    bad(&packed(), &of("actorder"), json!("x"), "weights.actorder: x");
    bad(&packed(), &of("dynamic"), json!(true), "weights.dynamic: true");
    bad(&packed(), &of("symmetric"), json!("no"), "weights.symmetric: found");
    bad(&packed(), "/ignore", json!(["re:(?!x)"]), "quantization_config.ignore: ");
    bad(&packed(), "/config_groups/group_0/targets", json!(["re:("]), "group_0.targets: ");
    bad(
        &packed(),
        "/sparsity_config",
        json!({"format": "sparse-24-bitmask"}),
        "sparsity_config.format",
    );
    let transform = json!({"config_groups": {"u": {}}});
    bad(&packed(), "/transform_config", transform, "transform_config.config_groups");
    let many: serde_json::Map<_, _> = (0..2_000).map(|n| (n.to_string(), json!({}))).collect();
    bad(&packed(), "/config_groups", json!(many), "2000 groups");

    let float = compressed("float-quantized", json!({"type": "float", "strategy": "channel"}));
    assert!(config(&float).unwrap().is_some());
    bad(&float, &of("strategy"), json!("group"), "weights.strategy: group");
    bad(&float, &of("strategy"), json!("block"), "weights.block_structure: nothing");
    bad(&float, &of("symmetric"), json!(false), "weights.symmetric: false");
    bad(&float, &of("num_bits"), json!(4), "weights.num_bits: 4");
}

#[test]
fn every_tensor_is_checked_against_the_weight() {
    let bad = |base: &(Value, Vec<Tensor>), new: Tensor, about: &str| {
        refused(weight(&base.0, &with(&base.1, new)), about);
    };
    let [fp8, awq, gptq, packed, _] = all();
    for (config, tensors) in [&fp8, &awq, &gptq, &packed] {
        for missing in tensors.iter().skip(1) {
            let left = without(tensors, missing.0);
            // Compressed-tensors need no order of columns, and say so in actorder.
            if missing.0 != "weight_g_idx" {
                refused(weight(config, &left), &format!("no tensor {MODULE}.{}", missing.0));
            }
        }
    }
    bad(&fp8, tensor("weight", "F8_E4M3", &[130, 20, 1]), "two dimensions");
    bad(&fp8, tensor("weight", "F8_E4M3", &[130, 0]), "two dimensions above 0");
    bad(&fp8, tensor("weight", "BF16", &[130, 20]), "F8_E4M3");
    bad(&fp8, tensor("weight_scale_inv", "F32", &[1, 1]), "[2, 1], one per block");
    bad(&fp8, tensor("weight_scale_inv", "U8", &[2, 1]), "dtype of tensor");
    bad(&fp8, tensor("weight_scale", "F32", &[2, 1]), "one of weight_scale and weight_scale_inv");

    bad(&awq, tensor("qweight", "I32", &[60, 2]), "a multiple of the group size 32");
    bad(&awq, tensor("qweight", "F32", &[64, 2]), "dtype of tensor");
    bad(&awq, tensor("qzeros", "I32", &[2, 16]), "[2, 2], from the shape of");
    bad(&awq, tensor("scales", "F16", &[16, 2]), "[2, 16], from the shape of");
    bad(&awq, tensor("scales", "F8_E4M3", &[2, 16]), "dtype of tensor");
    bad(&awq, tensor("weight", "BF16", &[16, 64]), "presence of tensor");

    bad(&gptq, tensor("qzeros", "I32", &[2, 1]), "[2, 2], from the shape of");
    bad(&gptq, tensor("scales", "F16", &[4, 12]), "[2, 12], from the shape of");
    bad(&gptq, integers("g_idx", &[0; 63]), "[64], one per column");
    bad(&gptq, tensor("g_idx", "F32", &[64]), "dtype of tensor");
    for outside in [2, -1, i32::MAX, i32::MIN] {
        let mut order = [0; 64];
        order[63] = outside;
        bad(&gptq, integers("g_idx", &order), &format!("found {outside} at 63, allowed: 0 to 1"));
        bad(&packed, integers("weight_g_idx", &order), &format!("found {outside} at 63"));
    }
    bad(&gptq, integers("g_idx", &[-1; 64]), "found -1 at 0");
    bad(&gptq, integers("g_idx", &[1; 64]), "group 0 0 times, allowed: each 32 times");

    bad(&packed, tensor("weight_scale", "BF16", &[12, 64]), "[12, 2], from the shape of");
    bad(&packed, tensor("weight_zero_point", "I32", &[12, 2]), "[2, 2], from the shape of");
    for shape in [[12, 65], [12, 56], [11, 64], [-12, 64], [12, i32::MAX], [12, 0]] {
        bad(&packed, integers("weight_shape", &shape), "contents of tensor");
    }
    bad(&packed, integers("weight_shape", &[12]), "shape of tensor");
    bad(&packed, tensor("weight", "F8_E4M3", &[12, 64]), "presence of tensor");
    let ignored = set(&packed.0, "/ignore", json!([MODULE]));
    refused(weight(&ignored, &packed.1), "quantization_config.ignore");
    let others = set(&packed.0, "/config_groups/group_0/targets", json!(["re:.*k_proj"]));
    refused(weight(&others, &packed.1), "config_groups targets");
    let float = compressed("float-quantized", json!({"type": "float", "strategy": "channel"}));
    refused(weight(&float, &packed.1), "config_groups says");
    let bytes = [tensor("weight", "I8", &[4, 4]), tensor("weight_scale", "F32", &[4, 1])];
    refused(weight(&float, &bytes), "F8_E4M3");
    let row = [tensor("weight", "F8_E4M3", &[4, 4]), tensor("weight_scale", "F32", &[1, 4])];
    refused(weight(&float, &row), "one per row");
}

#[test]
fn experts_in_mxfp4_must_have_whole_groups() {
    let bad = |new: Tensor, about: &str| {
        refused(weight(&mxfp4(), &with(&mxfp4_tensors(), new)), about);
    };
    bad(tensor("experts_blocks", "U8", &[2, 3, 2, 8]), "[experts, rows, columns / 32, 16]");
    bad(tensor("experts_blocks", "U8", &[6, 2, 16]), "[experts, rows, columns / 32, 16]");
    bad(tensor("experts_blocks", "U8", &[2, 0, 2, 16]), "no dimension of 0");
    bad(tensor("experts_blocks", "I8", &[2, 3, 2, 16]), "dtype of tensor");
    bad(tensor("experts_scales", "U8", &[2, 3, 4]), "shape of tensor");
    bad(tensor("experts_scales", "F32", &[2, 3, 2]), "dtype of tensor");
    let alone = without(&mxfp4_tensors(), "experts_scales");
    refused(weight(&mxfp4(), &alone), "no tensor");
    assert!(weight(&mxfp4(), &without(&mxfp4_tensors(), "experts_blocks")).unwrap().is_none());
}

#[test]
fn an_order_that_was_never_filled_in_is_none() {
    let tensors = with(&packed_tensors(), integers("weight_g_idx", &[-1; 64]));
    let found = weight(&packed(), &tensors).unwrap().unwrap();
    assert_eq!(format!("{:?}", found.scheme()), "Int4 { group: 32, ordered: false }");
}

/// A module that was not converted may be stored in fp8 without a scale; then it is a plain tensor.
#[test]
fn lists_of_plain_modules_are_read() {
    let tensors = [tensor("weight", "F8_E4M3", &[4, 4])];
    refused(weight(&fp8(), &tensors), "no tensor");
    for name in [MODULE, "model.layers.0", "q_proj", "self_attn.q_proj"] {
        for key in ["/modules_to_not_convert", "/ignored_layers"] {
            assert!(weight(&set(&fp8(), key, json!([name])), &tensors).unwrap().is_none());
        }
    }
    for name in ["model.layers.0.self", "proj", "model.layers.1", ""] {
        refused(weight(&set(&fp8(), "/ignored_layers", json!([name])), &tensors), "no tensor");
    }
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop_oneof![Just("re:("), Just("re:.*"), Just("gptq"), Just("Linear"), Just("\u{1b}\n")]
            .prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::hash_map("[a-z_]{1,8}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// One field of a good configuration replaced by anything.
    #[test]
    fn no_configuration_panics(which in 0usize..5, at in any::<prop::sample::Index>(), value in any_json()) {
        let good = all()[which].0.clone();
        let mut paths: Vec<String> = good.as_object().unwrap().keys().map(|k| format!("/{k}")).collect();
        paths.extend(["/ignore", "/dynamic", "/scale_fmt", "/sym", "/format"].map(str::to_owned));
        if which == 3 {
            let weights = good.pointer("/config_groups/group_0/weights").unwrap();
            let keys = weights.as_object().unwrap().keys();
            paths.extend(keys.map(|k| format!("/config_groups/group_0/weights/{k}")));
            paths.push("/config_groups/group_0/targets".to_owned());
            paths.push("/config_groups/group_0".to_owned());
        }
        let changed = set(&good, &paths[at.index(paths.len())], value);
        if let Err(error) = config(&changed) {
            let line = error.to_string();
            prop_assert!(!line.contains('\n') && line.len() < 1_000, "{}", line);
        }
    }

    /// One tensor of a good weight with any shape, type and contents.
    #[test]
    fn no_tensors_panic(
        which in 0usize..5,
        at in any::<prop::sample::Index>(),
        dtype in prop::sample::select(vec!["F8_E4M3", "F8_E8M0", "F32", "BF16", "F16", "I32", "I64", "U8"]),
        shape in prop::collection::vec(0usize..70, 0..4),
        bytes in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let (config, tensors) = all()[which].clone();
        let end = tensors[at.index(tensors.len())].0;
        let room = 8 * shape.iter().product::<usize>();
        let bytes = if bytes.len() <= room / 8 { bytes } else { Vec::new() };
        let _ = weight(&config, &with(&tensors, Tensor(end, dtype, shape, bytes)));
    }

    /// The same tensors with other contents are always readable: nothing in them but g_idx and weight_shape is checked.
    #[test]
    fn any_contents_are_read(which in 0usize..5, fill in any::<u8>()) {
        let (config, mut tensors) = all()[which].clone();
        for Tensor(end, _, shape, bytes) in &mut tensors {
            if !end.ends_with("g_idx") && !end.ends_with("shape") {
                *bytes = vec![fill; shape.iter().product()];
            }
        }
        prop_assert!(weight(&config, &tensors).unwrap().is_some());
    }
}
