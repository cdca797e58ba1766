//! `dacapo quantize`: the folder it writes, and what it refuses.

use crate::process;
use formats::checkpoint::Checkpoint;
use process::fails;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/model/tests/goldens").join(name)
}

fn quantize(model: &Path, output: &Path, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dacapo"));
    command.arg("quantize").arg(model).arg("-o").arg(output).args(more);
    command.output().unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_folder_has_the_model_and_everything_beside_it() {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("model");
    fs::create_dir(&model).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden("qwen3").join(name), model.join(name)).unwrap();
    }
    let beside = ["tokenizer.json", "chat_template.jinja", "LICENSE", "generation_config.json"];
    beside.iter().for_each(|name| fs::write(model.join(name), "{}").unwrap());
    fs::write(model.join("pytorch_model.bin"), "old weights").unwrap();

    let (new, empty) = (home.path().join("made/fp8"), home.path().join("int4"));
    fs::create_dir(&empty).unwrap();
    for (folder, more) in
        [(&new, &["--format", "fp8"][..]), (&empty, &["--format", "int4", "--group", "32"])]
    {
        let done = quantize(&model, folder, more);
        let said = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(0), "{said}");
        assert_eq!(String::from_utf8(done.stdout).unwrap().trim(), folder.to_str().unwrap());
        assert!(said.starts_with(more[1]) && said.contains(" before, "), "{said}");
        let expected = [&beside[..], &["config.json", "model.safetensors"]].concat();
        let mut expected: Vec<&str> = expected;
        expected.sort_unstable();
        assert_eq!(names(folder), expected);
        let [before, after] =
            [&model, folder].map(|path| Checkpoint::open(path).unwrap().total_bytes());
        assert!(after < before);
    }
    assert_eq!(names(&home.path().join("made")), ["fp8"], "no partial folder is left");

    let error = fails(quantize(&model, &new, &["--format", "fp8"]), 2);
    assert!(error.contains("the folder is not empty; name a new one"), "{error}");
    let again = home.path().join("again");
    let error = fails(quantize(&new, &again, &["--format", "int4"]), 2);
    assert!(error.contains("already quantised (compressed-tensors)"), "{error}");
    assert!(!again.exists());
}

#[test]
fn what_cannot_be_quantised_is_refused() {
    let home = tempfile::tempdir().unwrap();
    let output = home.path().join("new");
    let file = home.path().join("file");
    fs::write(&file, "").unwrap();
    let gguf = golden("gemma3").join("model.gguf");
    let int4 = ["--format", "int4"];
    let cases: [(&Path, &Path, &[&str], &str); 4] = [
        (&gguf, &output, &int4, "a GGUF file cannot be quantised"),
        (&home.path().join("missing"), &output, &int4, "missing"),
        (&golden("qwen3"), &file, &int4, "file: "),
        (
            &golden("qwen3"),
            &output,
            &["--format", "fp8", "--group", "64"],
            "--group is for --format int4",
        ),
    ];
    for (model, output, more, word) in cases {
        let error = fails(quantize(model, output, more), 2);
        assert!(error.contains(word), "{error}");
    }
    assert_eq!(names(home.path()), ["file"], "nothing is written");
}

#[test]
fn json_has_sizes() {
    let home = tempfile::tempdir().unwrap();
    let output = home.path().join("new");
    let done = quantize(&golden("qwen3"), &output, &["--format", "fp8", "--json"]);
    let found: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(found["path"], output.to_str().unwrap());
    let after = Checkpoint::open(&output).unwrap().total_bytes();
    assert_eq!(found["bytes_after"], after);
    assert!(found["bytes_before"].as_u64().unwrap() > after);
}
