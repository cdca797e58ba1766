//! Malicious model files given to the program: truncated, overflowing, cyclic, declaring gigabytes
//! in a kilobyte. Each must give one line on standard error and exit code 2 within 512 MB of
//! memory. Times are printed, not checked: `cargo test --test bad_files -- --nocapture`.

#![cfg(unix)]

use crate::process;
use process::fails;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Limit of the address space in KiB, which is more than the memory used.
const MEMORY: u32 = 512 << 10;

/// The fuzzing seeds, which include published vulnerabilities.
fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut seeds: Vec<(String, Vec<u8>)> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter_map(|path| {
            let name = path.file_name()?.to_str()?.strip_prefix("seed-")?.to_owned();
            Some((format!("{target}/{name}"), fs::read(&path).unwrap()))
        })
        .collect();
    seeds.sort();
    assert!(!seeds.is_empty(), "no seeds in {}", folder.display());
    seeds
}

fn seed(name: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name)).unwrap()
}

/// A valid configuration.
fn config() -> Vec<u8> {
    let seed = seed("config/seed-good");
    seed.split(|byte| *byte == 0).next().unwrap().to_vec()
}

/// Runs an invalid model; returns the error line and the time it took.
#[track_caller]
fn refused(name: &str, model: &Path) -> (String, Duration) {
    let start = Instant::now();
    let output = Command::new("sh")
        .arg("-c")
        .arg(format!("ulimit -v {MEMORY} && exec \"$@\""))
        .args(["sh", env!("CARGO_BIN_EXE_dacapo"), "run"])
        .arg(model)
        .args(["-p", "hello", "--device", "cpu", "--threads", "1"])
        .output()
        .unwrap();
    let took = start.elapsed();
    // Names the case if the next check fails.
    println!("{name}");
    let line = fails(output, 2);
    assert!(line.len() < 1_000, "{name}: {line}");
    assert!(!line.contains("memory allocation"), "{name}: {line}");
    (line, took)
}

/// Writes each case to `file` and expects that it is refused. A safetensors file is put in a folder
/// with a configuration.
fn refuse_all(file: &str, cases: Vec<(String, Vec<u8>)>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(file);
    let in_folder = file.ends_with(".safetensors");
    if in_folder {
        fs::write(folder.path().join("config.json"), config()).unwrap();
    }
    let model = if in_folder { folder.path() } else { &path };
    let mut slowest = (Duration::ZERO, String::new());
    for (name, bytes) in cases {
        fs::write(&path, &bytes).unwrap();
        let (line, took) = refused(&name, model);
        let shown = line.replace(&*folder.path().to_string_lossy(), "");
        println!("{:>5.1} ms  {name}: {}", took.as_secs_f64() * 1e3, shown.trim_end());
        slowest = slowest.max((took, name));
    }
    println!("slowest: {:.1} ms, {}", slowest.0.as_secs_f64() * 1e3, slowest.1);
}

/// A folder that looks like a model, with these files.
fn folder(files: &[(&str, &[u8])]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    let path = folder.path().to_owned();
    (folder, path)
}

#[test]
fn hostile_gguf() {
    refuse_all("model.gguf", corpus("gguf"));
}

#[test]
fn hostile_vocabularies() {
    refuse_all("model.gguf", corpus("tokenizer_gguf"));
}

#[test]
fn hostile_safetensors() {
    refuse_all("model.safetensors", corpus("safetensors"));
}

#[test]
fn truncated_files() {
    let whole = seed("tokenizer_gguf/seed-smollm");
    let cut = |at: usize| (format!("the first {at} bytes"), whole[..at].to_vec());
    let places = (0..10).map(|i| i * whole.len() / 10).chain([1, 4, 8, 23, whole.len() - 1]);
    refuse_all("model.gguf", places.map(cut).collect());
}

#[test]
fn files_that_declare_ten_gigabytes() {
    const CLAIM: u64 = 10_000_000_000;
    let gguf = |keys: &[u8], key_count: u64, tensors: &[u8], tensor_count: u64| {
        let counts = [tensor_count.to_le_bytes(), key_count.to_le_bytes()].concat();
        let mut file = [&b"GGUF\x03\0\0\0"[..], &counts, keys, tensors].concat();
        file.resize(1024, 0);
        file
    };
    let name = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let key = |kind: u32, value: &[u8]| [&name("k")[..], &kind.to_le_bytes(), value].concat();
    let string = key(8, &CLAIM.to_le_bytes());
    let array = key(9, &[&4u32.to_le_bytes()[..], &CLAIM.to_le_bytes()].concat());
    let tensor = |shape: [u64; 2]| {
        let dims: Vec<u8> = shape.iter().flat_map(|d| d.to_le_bytes()).collect();
        let kind = [0; 4];
        [&name("token_embd.weight")[..], &2u32.to_le_bytes(), &dims, &kind, &[0; 8]].concat()
    };
    refuse_all(
        "model.gguf",
        vec![
            ("a string".into(), gguf(&string, 1, &[], 0)),
            ("an array".into(), gguf(&array, 1, &[], 0)),
            ("keys".into(), gguf(&[], CLAIM, &[], 0)),
            ("tensors".into(), gguf(&[], 0, &[], CLAIM)),
            ("a tensor".into(), gguf(&[], 0, &tensor([50_000, 50_000]), 1)),
            ("a shape that overflows".into(), gguf(&[], 0, &tensor([1 << 33, 1 << 33]), 1)),
        ],
    );
    let header = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let tensor = r#"{"a":{"dtype":"F32","shape":[50000,50000],"data_offsets":[0,10000000000]}}"#;
    let mut long = CLAIM.to_le_bytes().to_vec();
    long.resize(1024, b' ');
    refuse_all(
        "model.safetensors",
        vec![("a header".into(), long), ("a tensor".into(), header(tensor))],
    );
}

#[test]
fn cyclic_indexes_and_links() {
    let config = &config()[..];
    for case in ["seed-itself", "seed-outside"] {
        let index = seed(&format!("index/{case}"));
        let files = [("config.json", config), ("model.safetensors.index.json", &index[..])];
        let (_kept, path) = folder(&files);
        let (line, took) = refused(case, &path);
        println!("{:>5.1} ms  {case}: {}", took.as_secs_f64() * 1e3, line.trim_end());
    }
    // Weights that link to their own folder, and weights that link to each other.
    let (_kept, path) = folder(&[("config.json", config)]);
    std::os::unix::fs::symlink(".", path.join("model.safetensors")).unwrap();
    println!("{}", refused("a link to the folder", &path).0.trim_end());
    let (_kept, path) = folder(&[("config.json", config)]);
    std::os::unix::fs::symlink("b.gguf", path.join("a.gguf")).unwrap();
    std::os::unix::fs::symlink("a.gguf", path.join("b.gguf")).unwrap();
    println!("{}", refused("links to each other", &path.join("a.gguf")).0.trim_end());
}

#[test]
fn hostile_configs() {
    for (name, bytes) in corpus("config") {
        // Valid configs are refused too, because the folder has no weights.
        let config = bytes.split(|byte| *byte == 0).next().unwrap().to_vec();
        let (_kept, path) = folder(&[("config.json", &config)]);
        let (line, took) = refused(&name, &path);
        println!("{:>5.1} ms  {name}: {}", took.as_secs_f64() * 1e3, line.trim_end());
    }
}
