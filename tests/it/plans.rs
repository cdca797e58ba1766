//! Compares the plans of bundled models with stored listings of kernels, grids, constants and
//! bytes. A refactoring must not change a plan; after a change of kernels, `UPDATE_EXPECT=1 cargo
//! test --test it plans` stores the new listing for review.

use expect_test::expect_file;
use serde_json::Value;
use std::fmt::Write;
use std::process::Command;

/// The plans of one model: flags of the compilation, and sizes of the steps.
struct Case {
    file: &'static str,
    model: &'static str,
    more: &'static [&'static str],
    decode: &'static [u32],
    prefill: &'static [u32],
}

const DECODE: &[u32] = &[1, 2, 4, 8, 16, 24, 32, 48, 64, 104, 128, 168, 224, 256];
const PREFILL: &[u32] = &[16, 128, 512, 640, 1024, 2048, 8192];

const CASES: &[Case] = &[
    Case { file: "8b", model: "qwen3-8b", more: &[], decode: DECODE, prefill: PREFILL },
    Case { file: "06b", model: "qwen3-0.6b", more: &[], decode: DECODE, prefill: PREFILL },
    Case {
        file: "06b-nodes",
        model: "qwen3-0.6b",
        more: &["--graph-layers", "nodes"],
        decode: &[1, 8],
        prefill: &[],
    },
    Case {
        file: "8b-unfused",
        model: "qwen3-8b",
        more: &["--unfused"],
        decode: &[1, 16, 256],
        prefill: &[512],
    },
    Case {
        file: "8b-cpu",
        model: "qwen3-8b",
        more: &["--target", "cpu"],
        decode: &[1, 32],
        prefill: &[512],
    },
];

fn explained(case: &Case, phase: &str, size: u32) -> Value {
    let flag = if phase == "decode" { "--batch" } else { "--tokens" };
    let output = Command::new(env!("CARGO_BIN_EXE_dacapo"))
        .args(["graph", "explain", case.model, "--load-format", "dummy", "--format", "json"])
        .args(["--phase", phase, flag, &size.to_string(), "--max-tokens", "8192"])
        .args(case.more)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A node without its spans, so that equal nodes of all layers are listed once.
fn line(node: &Value) -> String {
    let size = |list: &Value| {
        let sizes: Vec<String> = list.as_array().unwrap().iter().map(Value::to_string).collect();
        sizes.join("·")
    };
    let kernel = |kernel: &Value| {
        let pair =
            |pair: &Value| format!("{}={}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap());
        let defines: Vec<String> = kernel["defines"].as_array().unwrap().iter().map(pair).collect();
        format!(
            "{} {} × {}, {} B shared, {}",
            kernel["name"].as_str().unwrap(),
            size(&kernel["grid"]),
            size(&kernel["block"]),
            kernel["shared"],
            defines.join(" ")
        )
    };
    let kernels: Vec<String> = node["kernels"].as_array().unwrap().iter().map(kernel).collect();
    let problem = node["problem"].as_str().map_or(String::new(), |why| format!(" problem: {why}"));
    let cuts = [("breaks", " break"), ("splits", " split")]
        .map(|(field, word)| if node[field] == true { word } else { "" })
        .concat();
    format!(
        "{}: weights {}, values {}{cuts}{problem} | {}",
        node["name"].as_str().unwrap(),
        node["weight_bytes"],
        node["value_bytes"],
        kernels.join(" + ")
    )
}

fn listing(case: &Case) -> String {
    let mut text = String::new();
    let steps = case.decode.iter().map(|size| ("decode", *size));
    for (phase, size) in steps.chain(case.prefill.iter().map(|size| ("prefill", *size))) {
        let plan = explained(case, phase, size);
        let nodes = plan["nodes"].as_array().unwrap();
        writeln!(
            text,
            "{phase} {size}: {} nodes, {} launches, weights {}, workspace {}",
            nodes.len(),
            plan["launches"],
            plan["weight_bytes"],
            plan["workspace"]
        )
        .unwrap();
        let mut lines: Vec<(String, u32)> = Vec::new();
        for node in nodes {
            let line = line(node);
            match lines.iter_mut().find(|(known, _)| *known == line) {
                Some((_, count)) => *count += 1,
                None => lines.push((line, 1)),
            }
        }
        for (line, count) in lines {
            writeln!(text, "  {count} × {line}").unwrap();
        }
    }
    text
}

#[test]
fn plans_are_as_stored() {
    for case in CASES {
        let file = format!("{}/tests/goldens/plans/{}.txt", env!("CARGO_MANIFEST_DIR"), case.file);
        expect_file![file].assert_eq(&listing(case));
    }
}
