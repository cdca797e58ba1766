//! Lists the kernel sources, so that a new file under `src/kernels` is embedded without being named twice.

use std::fmt::Write;
use std::path::PathBuf;

fn main() {
    let folder = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it"))
        .join("src")
        .join("kernels");
    println!("cargo::rerun-if-changed={}", folder.display());
    // Set by `testing/sanitize`, which links AddressSanitizer.
    println!("cargo::rustc-check-cfg=cfg(dacapo_asan)");
    let mut names: Vec<String> = std::fs::read_dir(&folder)
        .expect("the kernels folder is part of the crate")
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.ends_with(".cu") || name.ends_with(".cuh"))
        .collect();
    names.sort();
    let mut table = String::from("&[\n");
    for name in names {
        let path = folder.join(&name);
        writeln!(table, "    ({name:?}, include_str!({path:?})),").expect("a string");
    }
    table.push_str("]\n");
    let out = PathBuf::from(std::env::var("OUT_DIR").expect("cargo sets it")).join("kernels.rs");
    std::fs::write(out, table).expect("the build folder is writable");
}
