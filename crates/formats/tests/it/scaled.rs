//! Quantised checkpoints against the packages that write them: weights equal to the last bit.

use formats::checkpoint::Checkpoint;
use formats::dtype::DType;
use formats::quant::dequantise;
use formats::scaled::{Quantisation, ScaledRows, ScaledWeight, Scheme};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/scaled")
}

/// The folders of reference data.
fn folders() -> Vec<PathBuf> {
    let mut folders: Vec<_> =
        std::fs::read_dir(data()).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert!(folders.len() >= 17, "{folders:?}");
    folders
}

fn open(folder: &Path) -> (Checkpoint, Quantisation, serde_json::Map<String, Value>) {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let quantisation = Quantisation::of(&checkpoint).unwrap().unwrap();
    let expected = std::fs::read(folder.join("expected.json")).unwrap();
    (checkpoint, quantisation, serde_json::from_slice(&expected).unwrap())
}

fn floats(weight: &ScaledWeight, rows: &ScaledRows, count: usize) -> Vec<f32> {
    let mut floats = vec![f32::NAN; count * weight.cols()];
    rows.dequantise(weight.cols(), &mut floats);
    floats
}

fn fnv(floats: &[f32]) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for byte in floats.iter().flat_map(|x| x.to_le_bytes()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    format!("{hash:016x}")
}

fn scheme(weight: &ScaledWeight) -> String {
    match weight.scheme() {
        Scheme::Fp8Block => "block".to_owned(),
        Scheme::Fp8Row => "row".to_owned(),
        Scheme::Int4 { group, ordered } => {
            format!("int4 {group}{}", if ordered { " ordered" } else { "" })
        }
        Scheme::Mxfp4 => "mxfp4".to_owned(),
    }
}

#[test]
fn every_weight_is_bit_exact_with_the_package_that_wrote_it() {
    for folder in folders() {
        let (checkpoint, quantisation, expected) = open(&folder);
        assert!(!expected.is_empty());
        for (name, expected) in expected {
            let place = format!("{}: {name}", folder.display());
            let weight = quantisation.weight(&checkpoint, &name).unwrap().expect(&place);
            assert_eq!(scheme(&weight), expected["scheme"], "{place}");
            assert_eq!(serde_json::json!([weight.rows(), weight.cols()]), expected["shape"]);
            let rows = weight.read(&checkpoint, 0..weight.rows()).unwrap();
            let found = floats(&weight, &rows, weight.rows());
            for (found, expected) in found.iter().zip(expected["head"].as_array().unwrap()) {
                assert_eq!(&format!("{:08x}", found.to_bits()), expected, "{place}");
            }
            assert_eq!(fnv(&found), expected["fnv"], "{place}");
        }
    }
}

/// Any rows are those of the whole, however they are cut: also in the middle of a block or word.
#[test]
fn parts_are_rows_of_the_whole() {
    for folder in folders() {
        let (checkpoint, quantisation, expected) = open(&folder);
        for name in expected.keys() {
            let weight = quantisation.weight(&checkpoint, name).unwrap().unwrap();
            let all = weight.rows();
            let whole = floats(&weight, &weight.read(&checkpoint, 0..all).unwrap(), all);
            for (start, end) in
                [(0, 1), (1, 3), (all - 1, all), (all / 3, all), (5, 6), (2, all - 1), (3, 3)]
            {
                let rows = weight.read(&checkpoint, start..end).unwrap();
                let part = floats(&weight, &rows, end - start);
                let cols = weight.cols();
                assert!(part == whole[start * cols..end * cols], "{name} rows {start}..{end}");
            }
            let beyond = weight.read(&checkpoint, all..all + 1).unwrap_err().to_string();
            assert!(beyond.contains("rows of tensor"), "{beyond}");
            #[allow(clippy::reversed_empty_ranges)]
            let backwards = weight.read(&checkpoint, 2..1);
            assert!(backwards.is_err());
        }
    }
}

/// Every tensor of a checkpoint is a plain weight or belongs to a quantised one.
#[test]
fn every_tensor_is_accounted_for() {
    for folder in folders() {
        let (checkpoint, quantisation, expected) = open(&folder);
        let mut left: BTreeSet<_> = checkpoint.tensors().map(|t| t.name.clone()).collect();
        for name in expected.keys() {
            let weight = quantisation.weight(&checkpoint, name).unwrap().unwrap();
            for tensor in weight.tensors() {
                assert!(left.remove(tensor), "{}: {tensor}", folder.display());
            }
        }
        let plain = ["lm_head.weight", "model.layers.0.mlp.gate.weight", "model.norm.weight"];
        assert_eq!(left.iter().map(String::as_str).collect::<Vec<_>>(), plain);
        for name in plain.iter().chain(&["absent.weight", "model.norm.bias"]) {
            assert!(quantisation.weight(&checkpoint, name).unwrap().is_none(), "{name}");
        }
    }
}

#[test]
fn rows_have_the_documented_sizes() {
    let (checkpoint, quantisation, _) = open(&data().join("fp8"));
    let name = "model.layers.0.mlp.down_proj.weight";
    let weight = quantisation.weight(&checkpoint, name).unwrap().unwrap();
    let ScaledRows::Fp8 { bytes, scales } = weight.read(&checkpoint, 126..130).unwrap() else {
        panic!("not fp8");
    };
    assert_eq!((bytes.len(), scales.len()), (4 * 136, 4 * 2));
    assert!(scales[0..2] == scales[2..4] && scales[2..4] != scales[4..6]);

    let (checkpoint, quantisation, _) = open(&data().join("gptq-ordered"));
    let name = "model.layers.0.self_attn.q_proj.weight";
    let weight = quantisation.weight(&checkpoint, name).unwrap().unwrap();
    let rows = weight.read(&checkpoint, 3..13).unwrap();
    let ScaledRows::Int4 { values, scales, zeros, groups } = rows else { panic!("not int4") };
    assert_eq!((values.len(), scales.len(), zeros.len()), (10 * 128, 10 * 4, 10 * 4));
    assert!(values.iter().all(|&value| value < 16) && zeros.iter().all(|&zero| zero == 8));
    assert_eq!(groups.unwrap().len(), 128);

    let (checkpoint, quantisation, _) = open(&data().join("mxfp4"));
    let name = "model.layers.0.mlp.experts.down_proj";
    let weight = quantisation.weight(&checkpoint, name).unwrap().unwrap();
    // Rows of two experts.
    let rows = weight.read(&checkpoint, 8..13).unwrap();
    let ScaledRows::Mxfp4 { bytes, exponents } = rows else { panic!("not mxfp4") };
    assert_eq!((bytes.len(), exponents.len()), (5 * 48, 5 * 3));
}

/// GGUF's blocks have the exponent first and their elements in halves; their rows are those of safetensors.
#[test]
fn blocks_of_gguf_are_rows_of_mxfp4() {
    let stored = include_bytes!("../data/quant/mxfp4.bin");
    let count = stored.len() / (17 + 4 * 32);
    let (blocks, floats) = stored.split_at(count * 17);
    let mut found = vec![f32::NAN; count * 32];
    ScaledRows::of_mxfp4_blocks(blocks).dequantise(32, &mut found);
    for (found, expected) in found.iter().zip(floats.as_chunks::<4>().0) {
        // The sign of a zero is lost in GGUF's package only.
        assert_eq!(*found, f32::from_le_bytes(*expected));
    }
}

#[test]
fn methods_and_their_absence_are_told_apart() {
    let method = |folder: &str| open(&data().join(folder)).1.method();
    assert_eq!(method("fp8"), "fp8");
    assert_eq!(method("compressed-64"), "compressed-tensors");
    assert_eq!(method("awq-32"), "awq");
    assert_eq!(method("gptq-v2"), "gptq");
    assert_eq!(method("mxfp4"), "mxfp4");
    let plain = |json: &str| Quantisation::from_json(Path::new("c"), json.as_bytes()).unwrap();
    assert!(plain("{}").is_none());
    assert!(plain(r#"{"quantization_config":null}"#).is_none());
}

/// All codes of both types, by their definition: exact powers of two and sums of them.
#[test]
fn bytes_are_the_numbers_of_their_definition() {
    let codes: Vec<u8> = (0..=255).collect();
    let mut found = [0.0f32; 256];
    dequantise(DType::F8_E4M3, &codes, &mut found).unwrap();
    for (code, &found) in codes.iter().zip(&found) {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = match exponent {
            15 if mantissa == 7.0 => f64::NAN,
            0 => mantissa / 8.0 * 2f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        };
        let expected = if code & 128 == 0 { magnitude } else { -magnitude } as f32;
        let same = found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan());
        assert!(same, "{code}: {found} {expected}");
    }
    dequantise(DType::F8_E8M0, &codes, &mut found).unwrap();
    for (code, &found) in codes[..255].iter().zip(&found) {
        assert_eq!(f64::from(found), 2f64.powi(i32::from(*code) - 127), "{code}");
    }
    assert!(found[255].is_nan());
}

/// A transposed weight larger than what is read at once, with every word different.
#[test]
fn long_weights_are_read_in_pieces() {
    let (rows, cols) = (1_032usize, 4_096usize);
    let value = |row: usize, col: usize| ((row * 2_654_435_761 + col * 40_503) >> 7) as u32 & 15;
    // The order of eight features in a word of AWQ, as its packer has it.
    let features = [0, 2, 4, 6, 1, 3, 5, 7];
    let awq = (0..cols).flat_map(|col| {
        (0..rows / 8).map(move |word| {
            (0..8).map(|i| value(8 * word + features[i], col) << (4 * i)).sum::<u32>()
        })
    });
    let gptq = (0..cols / 8).flat_map(|word| {
        (0..rows).map(move |row| (0..8).map(|i| value(row, 8 * word + i) << (4 * i)).sum::<u32>())
    });
    let awq: Vec<u8> = awq.flat_map(u32::to_le_bytes).collect();
    let gptq: Vec<u8> = gptq.flat_map(u32::to_le_bytes).collect();
    let groups = cols / 128;
    let (zeros, scales) = (vec![0u8; groups * rows / 2], vec![0u8; groups * rows * 2]);
    for (method, words, shape) in [("awq", awq, [cols, rows / 8]), ("gptq", gptq, [cols / 8, rows])]
    {
        let folder = tempfile::tempdir().unwrap();
        let view = |dtype, shape: [usize; 2], bytes| {
            safetensors::tensor::TensorView::new(dtype, shape.to_vec(), bytes).unwrap()
        };
        let tensors = [
            ("a.qweight", view(safetensors::Dtype::I32, shape, &words)),
            ("a.qzeros", view(safetensors::Dtype::I32, [groups, rows / 8], &zeros)),
            ("a.scales", view(safetensors::Dtype::F16, [groups, rows], &scales)),
        ];
        let file = safetensors::serialize(tensors, None).unwrap();
        std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
        let config = serde_json::json!({"quantization_config": {
            "quant_method": method, "bits": 4, "group_size": 128, "desc_act": false}});
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let quantisation = Quantisation::of(&checkpoint).unwrap().unwrap();
        let weight = quantisation.weight(&checkpoint, "a.weight").unwrap().unwrap();
        for range in [0..rows, 3..rows - 5, 100..117] {
            let first = range.start;
            let ScaledRows::Int4 { values, .. } = weight.read(&checkpoint, range).unwrap() else {
                panic!("not int4");
            };
            for (row, line) in values.chunks(cols).enumerate() {
                let same = (0..cols).all(|col| u32::from(line[col]) == value(first + row, col));
                assert!(same, "{method}: row {}", first + row);
            }
        }
    }
}
